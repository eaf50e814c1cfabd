"""What a model folder holds and needs: shapes, tensors by role and format, bytes to store and to run.

Everything comes as one JSON object, which the command prints or lays out.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import InputError
from ..quants import BLOCK, tensor_bytes
from .layout import expected_tensors
from .reader import StoredTensor, open_checkpoint

DEFAULT_CONTEXT = 8192
#: vocabulary entries of the head computed at once, as a bound of its buffers
_PROGRAM_BYTES = 180 << 20  #: resident size of a process that holds no model, measured
_HEAD_TILE = 4096


def describe(path: str | Path, context: int | None = None) -> dict[str, Any]:
    """A model folder as a JSON object: config, generation, groups, tensors, totals and memory, sizes in bytes.

    context: tokens of prompt and reply for the memory (default 8192, or the model's own limit when smaller). Raises
    CheckpointError, ConfigError or InputError.
    """
    with open_checkpoint(path) as checkpoint:
        c = checkpoint.config
        limit = c.max_position_embeddings
        if context is None:
            context = min(DEFAULT_CONTEXT, limit)
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
            "memory": memory(c, context),
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


def memory(c: ModelConfig, context: int) -> dict[str, int]:
    """Bytes needed to run the text model with `context` tokens in the cache.

    weights_q40: matrices Q40 (4.5 bits a weight), embedding Q80 (8.5), the rest float32; weights_f32: all float32. The
    cache is float32, keys and values: sliding layers keep their window, full layers everything (kv_per_1k_tokens is
    what 1024 more tokens cost once the window is full). working: Python, the compiled kernels
    and the buffers of a canvas pass, an estimate.
    """
    specs = expected_tensors(c).values()
    formats = {"matrix": "q40", "embedding": "q80", "float": "f32"}
    q40 = sum(tensor_bytes(formats[s.role] if s.shape[-1] % BLOCK == 0 else "f32", s.shape) for s in specs)
    f32 = sum(tensor_bytes("f32", s.shape) for s in specs)
    per_token = {True: 0, False: 0}  # by sliding
    for i, layer in enumerate(c.layers):
        per_token[layer.sliding] += 2 * 4 * c.key_value_size(i)
    kv_sliding = per_token[True] * min(context, c.sliding_window)
    kv_full = per_token[False] * context
    queries, keys = (max(f(i) for i in range(c.num_hidden_layers)) for f in (c.query_size, c.key_value_size))
    row = 8 * c.hidden_size + 2 * queries + 2 * keys + 3 * c.intermediate_size + c.num_experts + _HEAD_TILE
    row += c.top_k_experts * (3 * c.moe_intermediate_size + c.hidden_size)
    working = 4 * c.canvas_length * row + _PROGRAM_BYTES
    return {
        "context": context,
        "weights_q40": q40,
        "weights_f32": f32,
        "kv_sliding": kv_sliding,
        "kv_full": kv_full,
        "kv_per_1k_tokens": per_token[False] * 1024,
        "working": working,
        "total_q40": q40 + kv_sliding + kv_full + working,
        "total_f32": f32 + kv_sliding + kv_full + working,
    }
