"""CpuOps: the Ops on compiled CPU kernels, computing at once in preallocated buffers."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..cpu import kernels
from ..cpu.cache_rows import CacheRows
from ..cpu.threads import ThreadPool
from ..cpu.weights import pack_from
from ..ops import HeadStatistics, ReadRows
from ..quants import QUANTIZED
from .arena import Arena

F32 = np.float32


class CpuOps:
    """Weights are packed for the kernels; activations float32, quantised to Q80 where `activations` is "q80" and the
    weight is quantised. One pass at a time (Session holds the model's lock)."""

    def __init__(self, eps: float, activations: str = "q80", threads: int | None = None):
        self.eps = eps
        self.quantized = activations == "q80"
        self.pool = ThreadPool(threads)
        self.arena = Arena()
        self._mean: tuple[Any, np.ndarray] | None = None  # the embedding table and its mean row

    def expect(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        pass

    def upload(self, fmt: str, read: ReadRows, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return np.array(read(0, 1), dtype=F32).reshape(shape)
        return pack_from(fmt, read, shape, self.pool)

    def weight_bytes(self, weight: Any) -> int:
        return weight.nbytes

    def scope(self) -> AbstractContextManager[None]:
        return self.arena.scope()

    def new_cache(self, fmt: str, kv_heads: int, capacity: int, head_dim: int) -> CacheRows:
        return kernels.empty_cache(fmt, kv_heads, capacity, head_dim)

    def cache_bytes(self, cache: CacheRows) -> int:
        return cache.nbytes

    def resize_cache(self, cache: CacheRows, capacity: int, first: int, count: int) -> CacheRows:
        return cache.resized(capacity, first, count)

    def store_rows(self, x: np.ndarray, cache: CacheRows, slot: int) -> None:
        kernels.store_rows(self.pool, x.reshape(x.shape[0], cache.kv_heads, cache.head_dim), cache, slot)

    def cache_to_host(self, cache: CacheRows) -> np.ndarray:
        return cache.float32()

    def embedding_rows(self, table: Any, ids: np.ndarray, scale: float) -> np.ndarray:
        out = self.arena.take((len(ids), table.shape[1]))
        kernels.embedding_rows(self.pool, table, ids, scale, out)
        return out

    def rms_norm(self, x: np.ndarray, weight: Any) -> np.ndarray:
        out = self.arena.take(x.shape)
        kernels.rms_norm(self.pool, x, weight, self.eps, out)
        return out

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = self.arena.take(x.shape)
        kernels.add(self.pool, x, y, out)
        return out

    def add_rms_norm(self, x, y, weight: Any, scale: float = 1.0, out: np.ndarray | None = None) -> np.ndarray:
        out = self.arena.take(x.shape) if out is None else out
        kernels.add_rms_norm(self.pool, x, y, weight, self.eps, out, scale)
        return out

    def linear(self, x: np.ndarray, *weights: Any) -> tuple[np.ndarray, ...]:
        outs = tuple(self.arena.take((x.shape[0], w.shape[0])) for w in weights)
        quantized = None
        for w, out in zip(weights, outs, strict=True):
            if self.quantized and w.format in QUANTIZED:
                quantized = quantized or kernels.quantize_rows(self.pool, x)
                kernels.linear(self.pool, quantized, w, out)
            else:
                kernels.linear(self.pool, x, w, out)
        return outs

    def gelu_mul(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        out = self.arena.take(gate.shape)
        kernels.gelu_mul(self.pool, gate, up, out)
        return out

    def rope_tables(self, start: int, rows: int, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angles = np.arange(start, start + rows, dtype=F32)[:, None] * inv_freq
        return np.cos(angles), np.sin(angles)

    def head_norm_rope(self, x: np.ndarray, heads: int, weight: Any, rope: Any) -> np.ndarray:
        out = self.arena.take(x.shape)
        shape = (x.shape[0], heads, x.shape[1] // heads)
        cos, sin = rope if rope is not None else (None, None)
        kernels.head_norm_rope(self.pool, x.reshape(shape), weight, self.eps, cos, sin, out.reshape(shape))
        return out

    def attention(self, q: np.ndarray, heads: int, k: CacheRows, v: CacheRows, lo, hi) -> np.ndarray:
        out = self.arena.take(q.shape)
        kernels.attention(self.pool, q.reshape(q.shape[0], heads, q.shape[1] // heads), k, v, lo, hi, out)
        return out

    def router(self, h, scale, proj, per_expert_scale, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.arena.take((h.shape[0], top_k), np.int32)
        weights = self.arena.take((h.shape[0], top_k))
        kernels.router(self.pool, h, scale, proj, per_expert_scale, top_k, self.eps, ids, weights)
        return ids, weights

    def experts(self, x, ids, weights, gate_up, down) -> np.ndarray:
        out = self.arena.take(x.shape)
        # one of the two may be unquantised, where a width is no multiple of 32
        quantized = self.quantized and all(w.format in QUANTIZED for w in (gate_up, down))
        kernels.experts(self.pool, x, ids, weights, gate_up, down, out, quantized)
        return out

    def append_row(self, x: np.ndarray, row: int) -> np.ndarray:
        out = self.arena.take((x.shape[0] + 1, x.shape[1]))
        out[:-1] = x
        out[-1] = x[row]
        return out

    def head_logits(self, x: np.ndarray, table: Any, softcap: float) -> np.ndarray:
        out = np.empty((x.shape[0], table.shape[0]), dtype=F32)
        kernels.head_logits(self.pool, x, table, softcap, out, self._quantized_table(table))
        return out

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
        stats = kernels.head_statistics(
            self.pool,
            x,
            table,
            softcap,
            temperature,
            uniforms,
            forbidden_row,
            np.asarray(forbidden_ids, dtype=np.int32),
            self._quantized_table(table),
        )
        return HeadStatistics(stats.argmax, stats.sampled, stats.entropy, (stats, table))

    def soft_embedding(self, statistics: HeadStatistics, rows: int, scale: float, out: Any = None) -> np.ndarray:
        stats, table = statistics.soft
        if self._mean is None or self._mean[0] is not table:
            self._mean = (table, kernels.table_mean(self.pool, table))
        out = np.empty((len(stats.argmax), table.shape[1]), dtype=F32)
        return kernels.soft_embedding(self.pool, stats, table, self._mean[1], scale, out)[:rows]

    def soft_embedding_of_logits(self, z: np.ndarray, table: Any, scale: float) -> np.ndarray:
        out = np.empty((z.shape[0], table.shape[1]), dtype=F32)
        return kernels.soft_embedding_of_logits(self.pool, z, table, scale, out)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, dtype=F32)

    def close(self) -> None:
        self._mean = None
        self.pool.close()

    def _quantized_table(self, table: Any) -> bool:
        return self.quantized and table.format in QUANTIZED
