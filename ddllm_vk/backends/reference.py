"""ReferenceOps: the Ops in plain numpy on dequantised weights. Slow and clear: others are tested against it."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cpu import reference as kernels
from ..ops import HeadStatistics, ReadRows
from ..quants import BLOCK, QUANTIZED, dequantize, quantize

F32 = np.float32


class ReferenceOps:
    """Every weight is a float32 array of its logical shape; quantised activations are rounded to Q80 and back."""

    def __init__(self, eps: float, activations: str = "q80"):
        self.eps = eps
        self.quantized = activations == "q80"

    def expect(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        pass

    def upload(self, fmt: str, read: ReadRows, shape: tuple[int, ...]) -> Any:
        weight = dequantize(fmt, read(0, int(np.prod(shape[:-1])))).reshape(shape).astype(F32)
        # only Q40 and Q80 weights are multiplied with Q80 activations
        return _Quantized(weight) if fmt in QUANTIZED else weight

    def weight_bytes(self, weight: Any) -> int:
        return _array(weight).nbytes

    def scope(self):
        return nullcontext()

    def new_cache(self, fmt: str, kv_heads: int, capacity: int, head_dim: int) -> "_Cache":
        return _Cache(fmt, np.empty((kv_heads, capacity, head_dim), dtype=F32))

    def cache_bytes(self, cache: "_Cache") -> int:
        return cache.rows.nbytes

    def resize_cache(self, cache: "_Cache", capacity: int, first: int, count: int) -> "_Cache":
        kv_heads, _, head_dim = cache.rows.shape
        resized = self.new_cache(cache.format, kv_heads, capacity, head_dim)
        resized.rows[:, :count] = cache.rows[:, first : first + count]
        return resized

    def store_rows(self, x: np.ndarray, cache: "_Cache", slot: int) -> None:
        kv_heads, _, head_dim = cache.rows.shape
        rows = x.reshape(x.shape[0], kv_heads, head_dim).transpose(1, 0, 2)
        whole = np.pad(rows, [(0, 0), (0, 0), (0, -head_dim % BLOCK)])
        rounded = dequantize(cache.format, quantize(cache.format, whole))
        cache.rows[:, slot : slot + x.shape[0]] = rounded[..., :head_dim]

    def cache_to_host(self, cache: "_Cache") -> np.ndarray:
        return cache.rows.copy()

    def embedding_rows(self, table: Any, ids: np.ndarray, scale: float) -> np.ndarray:
        return _array(table)[ids] * F32(scale)

    def rms_norm(self, x: np.ndarray, weight: Any) -> np.ndarray:
        return kernels.rms_norm(x, weight, self.eps)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    def add_rms_norm(self, x, y, weight: Any, scale: float = 1.0, out: np.ndarray | None = None) -> np.ndarray:
        result = kernels.add_rms_norm(x, y, weight, self.eps, scale)
        if out is None:
            return result
        out[...] = result
        return out

    def linear(self, x: np.ndarray, *weights: Any) -> tuple[np.ndarray, ...]:
        return tuple(kernels.linear(self._input(x, w), _array(w)) for w in weights)

    def gelu_mul(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return kernels.gelu_mul(gate, up)

    def rope_tables(self, start: int, rows: int, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angles = np.arange(start, start + rows, dtype=F32)[:, None] * inv_freq
        return np.cos(angles), np.sin(angles)

    def head_norm_rope(self, x: np.ndarray, heads: int, weight: Any, rope: Any) -> np.ndarray:
        cos, sin = rope if rope is not None else (None, None)
        return kernels.head_norm_rope(x.reshape(x.shape[0], heads, -1), weight, self.eps, cos, sin).reshape(x.shape)

    def attention(self, q, heads: int, k, v, lo, hi) -> np.ndarray:
        return kernels.attention(q.reshape(q.shape[0], heads, -1), k.rows, v.rows, lo, hi)

    def router(self, h, scale, proj, per_expert_scale, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        return kernels.router(h, scale, proj, per_expert_scale, top_k, self.eps)

    def experts(self, x, ids, weights, gate_up, down) -> np.ndarray:
        quantized = self.quantized and isinstance(gate_up, _Quantized) and isinstance(down, _Quantized)
        return kernels.experts(x, ids, weights, _array(gate_up), _array(down), quantized)

    def append_row(self, x: np.ndarray, row: int) -> np.ndarray:
        return np.concatenate([x, x[row : row + 1]])

    def head_logits(self, x: np.ndarray, table: Any, softcap: float) -> np.ndarray:
        return kernels.head_logits(self._input(x, table), _array(table), softcap)

    def head_statistics(
        self,
        x: np.ndarray,
        table: Any,
        softcap: float,
        temperature: float,
        uniforms: np.ndarray,
        forbidden_row: int,
        forbidden_ids: Sequence[int],
    ) -> HeadStatistics:
        z = self.head_logits(x, table, softcap).astype(np.float64) / temperature
        soft = kernels.softmax(z)
        if forbidden_row >= 0:
            z[forbidden_row, list(forbidden_ids)] = -np.inf
        p = kernels.softmax(z)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(p > 0, p * np.log(p), 0).sum(axis=-1)
        cdf = np.cumsum(p, axis=-1)
        sampled = [np.searchsorted(c, u * c[-1], side="right") for c, u in zip(cdf, uniforms, strict=True)]
        last = p.shape[-1] - 1 - np.argmax(p[:, ::-1] > 0, axis=-1)
        sampled = np.minimum(np.array(sampled), last).astype(np.int32)
        return HeadStatistics(z.argmax(axis=-1).astype(np.int32), sampled, entropy, (soft, table))

    def soft_embedding(self, statistics: HeadStatistics, rows: int, scale: float, out: Any = None) -> np.ndarray:
        probabilities, table = statistics.soft
        return ((probabilities[:rows] @ _array(table)) * scale).astype(F32)

    def soft_embedding_of_logits(self, z: np.ndarray, table: Any, scale: float) -> np.ndarray:
        return (kernels.softmax(z) @ _array(table)) * F32(scale)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, dtype=F32)

    def close(self) -> None:
        pass

    def _input(self, x: np.ndarray, weight: Any) -> np.ndarray:
        quantized = self.quantized and isinstance(weight, _Quantized)
        return kernels.quantize_dequantize_rows(x) if quantized else x


@dataclass
class _Cache:
    """Values rounded to `format`, kept as float32 [kv_heads, capacity, head_dim]."""

    format: str
    rows: np.ndarray


class _Quantized:
    """Marks a weight whose products take Q80 activations."""

    def __init__(self, array: np.ndarray):
        self.array = array


def _array(weight: Any) -> np.ndarray:
    return weight.array if isinstance(weight, _Quantized) else weight
