"""Ops: the operations the forward pass is written in. A backend implements them; model.py calls them and nothing else.

Handles of device arrays are opaque to the model. Rows are float32 [rows, columns]. `Weight` is whatever `upload`
returned. CPU Ops compute at once; an Ops that records may replay later, so the model must not look into a handle.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = Any  #: float32 rows on the device
Cache = Any  #: K or V of one layer on the device
Weight = Any  #: a weight in the device's own layout
#: (first, count) -> rows first..first+count of a tensor seen as a matrix [rows, K], contiguous, as their file has them
ReadRows = Callable[[int, int], np.ndarray]


@dataclass
class HeadStatistics:
    """What one pass of the head leaves of the logits, for M rows; the logits themselves are never held."""

    argmax: np.ndarray  #: int32 [M]
    sampled: np.ndarray  #: int32 [M], inverse CDF at the given uniforms, tokens in id order
    entropy: np.ndarray  #: float64 [M], nats
    soft: Any  #: what `Ops.soft_embedding` needs of this pass; opaque


class Ops(Protocol):
    """One backend. Sizes are checked by the backend before a kernel runs."""

    def expect(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Formats and shapes of all that will be uploaded, told before the first: to refuse what does not fit."""
        ...

    def upload(self, fmt: str, read: ReadRows, shape: tuple[int, ...]) -> Weight:
        """A tensor's file bytes (quants.py) to the device's layout: [N, K], [E, N, K], or a vector (float32).

        `read` may be called from several threads; with some rows at a time a tensor is never held twice.
        """
        ...

    def weight_bytes(self, weight: Weight) -> int: ...

    def scope(self) -> AbstractContextManager[None]:
        """Arrays made inside are reused after it; what must live on is made outside."""
        ...

    def new_cache(self, fmt: str, kv_heads: int, capacity: int, head_dim: int) -> Cache:
        """K or V of one layer: [kv_heads, capacity, head_dim] values in a format of cache.py, contents undefined."""
        ...

    def cache_bytes(self, cache: Cache) -> int: ...

    def resize_cache(self, cache: Cache, capacity: int, first: int, count: int) -> Cache:
        """A cache of `capacity` whose slots 0..count-1 are slots first..first+count-1 of `cache`; may reuse it."""
        ...

    def store_rows(self, x: Array, cache: Cache, slot: int) -> None:
        """x: [M, kv_heads * head_dim] into slots slot..slot+M-1, rounded to the cache's format."""
        ...

    def cache_to_host(self, cache: Cache) -> np.ndarray:
        """A copy as float32 [kv_heads, capacity, head_dim]."""
        ...

    def embedding_rows(self, table: Weight, ids: np.ndarray, scale: float) -> Array: ...

    def rms_norm(self, x: Array, weight: Weight | None) -> Array: ...

    def add(self, x: Array, y: Array) -> Array: ...

    def add_rms_norm(self, x: Array, y: Array, weight: Weight, scale: float = 1.0, out: Array | None = None) -> Array:
        """(x + rms_norm(y) * weight) * scale, into `out` (an array of an outer scope) if given."""
        ...

    def linear(self, x: Array, *weights: Weight) -> tuple[Array, ...]:
        """x @ w.T for every weight; x is quantised once for all of them."""
        ...

    def gelu_mul(self, gate: Array, up: Array) -> Array: ...

    def rope_tables(self, start: int, rows: int, inv_freq: np.ndarray) -> Any:
        """Cosines and sines of positions start..start+rows-1 for inv_freq float32 [head_dim/2]."""
        ...

    def head_norm_rope(self, x: Array, heads: int, weight: Weight | None, rope: Any | None) -> Array:
        """x: [M, heads * head_dim]: RMS norm per head, then the rotation; weight None is one, rope None is none."""
        ...

    def attention(self, q: Array, heads: int, k: Cache, v: Cache, lo: np.ndarray, hi: np.ndarray) -> Array:
        """Row t of q sees cache slots lo[t] <= s < hi[t]: int32 [M] each."""
        ...

    def router(
        self, h: Array, scale: Weight, proj: Weight, per_expert_scale: Weight, top_k: int
    ) -> tuple[Array, Array]:
        """Expert ids int32 [M, top_k] and weights float32 [M, top_k]."""
        ...

    def experts(self, x: Array, ids: Array, weights: Array, gate_up: Weight, down: Weight) -> Array: ...

    def append_row(self, x: Array, row: int) -> Array:
        """x with a copy of its row `row` at the end."""
        ...

    def head_logits(self, x: Array, table: Weight, softcap: float) -> np.ndarray:
        """The full float32 [M, vocabulary] on the host; for tests and small models."""
        ...

    def head_statistics(
        self,
        x: Array,
        table: Weight,
        softcap: float,
        temperature: float,
        uniforms: np.ndarray,
        forbidden_row: int,
        forbidden_ids: Sequence[int],
    ) -> HeadStatistics:
        """Statistics of softcap * tanh(x @ table.T / softcap) / temperature without keeping it; in `forbidden_row`
        (-1: none) the forbidden ids have probability zero."""
        ...

    def soft_embedding(self, statistics: HeadStatistics, rows: int, scale: float, out: Array | None = None) -> Array:
        """scale * softmax(z) @ table of the first `rows` rows of that pass, in an array that outlives the scope; `out`:
        what an earlier call returned and nobody reads any more, to be used again."""
        ...

    def soft_embedding_of_logits(self, z: np.ndarray, table: Weight, scale: float) -> Array:
        """scale * softmax(z) @ table for float32 z [M, vocabulary] given by the host."""
        ...

    def to_host(self, x: Array) -> np.ndarray:
        """A copy as float32 [rows, columns]."""
        ...

    def close(self) -> None: ...
