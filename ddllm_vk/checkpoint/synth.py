"""Models of random weights in true shapes, written directly as Q40 blocks: for benchmarks and trials of clusters.

Weights are spread so that activations and logits stay sane at any depth: embedding H^-0.5, matrices fan_in^-0.5, norms
after a block 0.3, query and key norms 1.2 * head_dim^-0.25 (attention scale is 1.0), the router's logits about 1.
"""

import json
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config import parse_config
from ..errors import InputError
from ..quants import BLOCK, BLOCK_BYTES
from .layout import TensorSpec, expected_tensors
from .presets import GENERATION_CONFIG, PRESETS, with_layers
from .synthetic_tokenizer import tokenizer_files
from .writer import PIECE_BYTES, Piece, PlannedTensor, ProgressCallback, write_model

#: standard deviation of uniform nibbles and of uniform int8
_SPREAD = {"q40": math.sqrt((16**2 - 1) / 12), "q80": math.sqrt((256**2 - 1) / 12)}


@dataclass(frozen=True)
class Synthesis:
    """What was written. Bytes of weights, seconds."""

    path: Path
    nbytes: int
    parameters: int
    shards: int
    resumed: int
    seconds: float


def synthesize(
    target: str | Path,
    preset: str | dict[str, Any],
    *,
    layers: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    threads: int = 2,
) -> Synthesis:
    """Writes a random model into the new folder `target`, which appears complete or not at all.

    preset: a name of PRESETS, or a config.json object; layers: only so many of its first layers. The same arguments
    give the same bytes. Raises DdllmError in one line: bad arguments, target exists or cannot be written, disk full.
    """
    began = time.monotonic()
    if isinstance(preset, str) and preset not in PRESETS:
        raise InputError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    config_json = PRESETS[preset] if isinstance(preset, str) else preset
    config = parse_config(config_json, Path("config.json"))
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise InputError(f"layers must be 1 to {config.num_hidden_layers}, not {layers}")
        config_json = with_layers(config_json, layers)
        config = parse_config(config_json, Path("config.json"))
    if seed < 0:
        raise InputError(f"seed must not be negative, not {seed}")
    specs = expected_tensors(config)
    plan = [_plan(name, spec) for name, spec in specs.items()]
    texts = {
        "config.json": json.dumps(config_json, indent=2).encode(),
        "generation_config.json": json.dumps(GENERATION_CONFIG, indent=2).encode(),
        **tokenizer_files(config.vocab_size, config.max_position_embeddings),
    }
    written = write_model(
        target,
        plan,
        lambda t: _pieces(t, specs[t.name], seed),
        texts,
        {"synth": 1, "config": config_json, "seed": seed},
        verify=False,  # there is nothing that a flipped bit of a random weight would spoil
        progress=progress,
        threads=threads,
    )
    return Synthesis(
        path=written.path,
        nbytes=written.nbytes,
        parameters=sum(math.prod(spec.shape) for spec in specs.values()),
        shards=written.shards,
        resumed=written.resumed,
        seconds=time.monotonic() - began,
    )


def _plan(name: str, spec: TensorSpec) -> PlannedTensor:
    blocks = {"matrix": "q40", "embedding": "q80", "float": "f32"}[spec.role]
    fmt = blocks if spec.shape[-1] % BLOCK == 0 else "f32"
    tensor = PlannedTensor(name, fmt, spec.shape, 0)
    return PlannedTensor(name, fmt, spec.shape, work=tensor.nbytes)


def _pieces(tensor: PlannedTensor, spec: TensorSpec, seed: int) -> Iterator[Piece]:
    """Each piece has a random stream of its own, so that the result does not depend on the threads."""
    key = (seed, zlib.crc32(tensor.name.encode()))
    if tensor.format == "f32":
        yield partial(_floats, tensor.name, spec, key)
        return
    count, step = math.prod(tensor.stored_shape[:-1]), PIECE_BYTES // BLOCK_BYTES[tensor.format]
    scale = spec.shape[-1] ** -0.5 / _SPREAD[tensor.format]
    for start in range(0, count, step):
        yield partial(_blocks, tensor.format, min(step, count - start), scale, (*key, start // step))


def _blocks(fmt: str, count: int, scale: float, key: tuple[int, ...]) -> np.ndarray:
    """uint8 [count, 18 or 34]: random bytes with a constant scale of random sign.

    The sign takes away the mean of -0.5 that random nibbles and int8 have.
    """
    size = BLOCK_BYTES[fmt]
    words = np.random.SFC64(np.random.SeedSequence(key)).random_raw(-(-count * size // 8))
    blocks = words.view(np.uint8)[: count * size].reshape(count, size)
    low, high = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    blocks[:, 0] = low
    blocks[:, 1] &= 0x80
    blocks[:, 1] |= high
    return blocks


def _floats(name: str, spec: TensorSpec, key: tuple[int, ...]) -> np.ndarray:
    """float32 of the logical shape: norm weights, router, scalars, and matrices whose rows are not whole blocks."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if spec.role != "float":
        std = spec.shape[-1] ** -0.5
    elif name.endswith("router.proj.weight"):
        std = 1.0  # its input has norm 1
    elif kind in ("q_norm", "k_norm"):
        return np.full(spec.shape, 1.2 * spec.shape[0] ** -0.25, np.float32)
    elif kind.startswith("post_"):
        return np.full(spec.shape, 0.3, np.float32)
    else:
        return np.ones(spec.shape, np.float32)
    normal = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key))).standard_normal(spec.shape, np.float32)
    return normal * np.float32(std)
