"""What a model folder holds and needs: shapes, tensors by role and format, bytes to store and to run.

Everything comes as one JSON object, which the command prints or lays out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cache import FORMATS, layer_bytes, row_bytes
from ..config import ModelConfig
from ..errors import InputError
from ..quants import BLOCK, tensor_bytes
from .layout import expected_tensors
from .reader import StoredTensor, open_checkpoint

DEFAULT_CONTEXT = 8192
_PROGRAM_BYTES = 180 << 20  #: resident size of a process that holds no model, measured
_HEAD_TILE = 4096  #: vocabulary entries of the head computed at once, as a bound of its buffers


def describe(path: str | Path, contexts: Sequence[int] = ()) -> dict[str, Any]:
    """A model folder as a JSON object: config, generation, groups, tensors, totals and memory, sizes in bytes.

    contexts: tokens of prompt and reply for the memory (default 8192, or the model's own limit when smaller). Raises
    CheckpointError, ConfigError or InputError.
    """
    with open_checkpoint(path) as checkpoint:
        c = checkpoint.config
        limit = c.max_position_embeddings
        contexts = contexts or [min(DEFAULT_CONTEXT, limit)]
        for context in contexts:
            if not 1 <= context <= limit:
                raise InputError(f"context must be 1 to {limit} tokens (the model's limit), not {context}")
        tensors = (*checkpoint.tensors.values(), *checkpoint.vision.values())
        return {
            "path": str(checkpoint.path),
            "files": len(checkpoint.files),
            "config": {**asdict(c), "layers": _layer_kinds(c)},
            "generation": asdict(checkpoint.generation_defaults),
            "groups": _groups(tensors),
            "tensors": [_tensor(t) for t in tensors],
            "ignored": list(checkpoint.ignored),
            "parameters": sum(math.prod(t.shape) for t in tensors),
            "bytes": checkpoint.total_bytes,
            "memory": memory(c, contexts),
        }


def _role(tensor: StoredTensor) -> str:
    return tensor.role or "vision"


def _tensor(t: StoredTensor) -> dict[str, Any]:
    return {
        "name": t.name,
        "role": _role(t),
        "format": t.format,
        "shape": list(t.shape),
        "bytes": t.nbytes,
        "file": t.file.name,
    }


def _groups(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """Tensors counted by role and format."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for t in tensors:
        new = {"role": _role(t), "format": t.format, "tensors": 0, "parameters": 0, "bytes": 0}
        group = groups.setdefault((_role(t), t.format), new)
        group["tensors"] += 1
        group["parameters"] += math.prod(t.shape)
        group["bytes"] += t.nbytes
    return list(groups.values())


def _layer_kinds(c: ModelConfig) -> list[dict[str, Any]]:
    """Layers with the same settings, listed once with how many there are."""
    kinds: dict[Any, dict[str, Any]] = {}
    for layer in c.layers:
        kinds.setdefault(layer, {"count": 0, **asdict(layer)})["count"] += 1
    return list(kinds.values())


def memory(c: ModelConfig, contexts: Sequence[int]) -> dict[str, Any]:
    """Bytes needed to run the text model with so many tokens in the cache, the canvas being denoised included.

    weights_q40: matrices Q40 (4.5 bits a weight), embedding Q80 (8.5), the rest float32; weights_f32: all float32.
    kv_cache: a session's keys and values at every context by format, exactly as allocated. The other figures are for
    the longest: kv_sliding, kv_full: its parts by kind of layer; kv_per_1k_tokens: what 1024 more tokens come to.
    working: Python, the compiled kernels and the buffers of a canvas pass, an estimate. The totals are with the cache
    that goes with the weights by default: f16 with Q40, f32 with float32.
    """
    context = max(contexts)
    specs = expected_tensors(c).values()
    formats = {"matrix": "q40", "embedding": "q80", "float": "f32"}
    q40 = sum(tensor_bytes(formats[s.role] if s.shape[-1] % BLOCK == 0 else "f32", s.shape) for s in specs)
    f32 = sum(tensor_bytes("f32", s.shape) for s in specs)
    kv_sliding, kv_full = ({fmt: _kv_bytes(c, context, fmt, sliding) for fmt in FORMATS} for sliding in (True, False))
    full = [(2 * layer.num_key_value_heads, layer.head_dim) for layer in c.layers if not layer.sliding]
    queries, keys = (max(f(i) for i in range(c.num_hidden_layers)) for f in (c.query_size, c.key_value_size))
    row = 8 * c.hidden_size + 2 * queries + 2 * keys + 3 * c.intermediate_size + c.num_experts + _HEAD_TILE
    row += c.top_k_experts * (3 * c.moe_intermediate_size + c.hidden_size)
    working = 4 * c.canvas_length * row + _PROGRAM_BYTES
    return {
        "context": context,
        "weights_q40": q40,
        "weights_f32": f32,
        "kv_cache": [
            {"context": n} | {f: _kv_bytes(c, n, f, True) + _kv_bytes(c, n, f, False) for f in FORMATS}
            for n in contexts
        ],
        "kv_sliding": kv_sliding,
        "kv_full": kv_full,
        "kv_per_1k_tokens": {fmt: sum(n * 1024 * row_bytes(fmt, size) for n, size in full) for fmt in FORMATS},
        "working": working,
        "total_q40": q40 + kv_sliding["f16"] + kv_full["f16"] + working,
        "total_f32": f32 + kv_sliding["f32"] + kv_full["f32"] + working,
    }


def _kv_bytes(c: ModelConfig, context: int, fmt: str, sliding: bool) -> int:
    """Of the sliding layers or of the full ones."""
    return sum(layer_bytes(c, i, context, fmt) for i, layer in enumerate(c.layers) if layer.sliding == sliding)
