"""The KV cache of one session: which positions lie in which slots, and which slots a row may see.

Full-attention layers keep every committed position. Sliding layers keep the window only: no row ever sees further back
than sliding_window - 1 positions. K and V of a canvas are written behind the committed ones for the time of the pass
and never committed (MODEL.md, Attention masks). The arrays belong to the Ops; here are only numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import ModelConfig
from .ops import Ops

_GRANULE = 256  #: full layers grow by doubling, in multiples of this many slots


@dataclass
class LayerCache:
    """K and V of one layer: [kv_heads, capacity, head_dim]; slot s holds position base + s."""

    k: Any
    v: Any
    capacity: int
    base: int = 0


def encoder_ranges(start: int, rows: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Visible positions lo <= j < hi of rows start..start+rows-1 of a causal pass: int32 [rows] each."""
    hi = np.arange(start + 1, start + rows + 1, dtype=np.int32)
    lo = np.zeros_like(hi) if window is None else np.maximum(hi - np.int32(window), 0)
    return lo, hi


def canvas_ranges(length: int, rows: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Visible positions of canvas rows over a cache of `length`: all canvas rows and, on sliding layers, the last
    window - 1 cached positions, the same for every row."""
    first = 0 if window is None else max(length - (window - 1), 0)
    return np.full(rows, first, dtype=np.int32), np.full(rows, length + rows, dtype=np.int32)


class KVCache:
    """Cached K and V of all layers. `length`: committed positions."""

    def __init__(self, ops: Ops, config: ModelConfig, chunk: int):
        """chunk: the most rows one pass writes."""
        self.ops, self.window, self.chunk = ops, config.sliding_window, chunk
        self.sliding = [layer.sliding for layer in config.layers]
        self.length = 0
        self.layers: list[LayerCache] = []
        for layer in config.layers:
            # a window beyond the context holds no more than the context
            window = min(self.window - 1, config.max_position_embeddings)
            capacity = window + chunk if layer.sliding else -(-chunk // _GRANULE) * _GRANULE
            shape = (layer.num_key_value_heads, capacity, layer.head_dim)
            self.layers.append(LayerCache(ops.new_cache(*shape), ops.new_cache(*shape), capacity))

    def layer_window(self, layer: int) -> int | None:
        return self.window if self.sliding[layer] else None

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` positions behind the committed ones in every layer."""
        if rows > self.chunk:
            raise ValueError(f"{rows} rows in one pass; the cache was made for {self.chunk}")
        for layer, sliding in zip(self.layers, self.sliding, strict=True):
            held = self.length - layer.base
            if held + rows <= layer.capacity:
                continue
            keep = min(held, self.window - 1) if sliding else held
            if not sliding:
                layer.capacity = -(-max(2 * layer.capacity, held + rows) // _GRANULE) * _GRANULE
            for name in ("k", "v"):
                resized = self.ops.resize_cache(getattr(layer, name), layer.capacity, held - keep, keep)
                setattr(layer, name, resized)
            layer.base += held - keep

    def reset(self) -> None:
        """Forgets everything; keeps the memory."""
        self.length = 0
        for layer in self.layers:
            layer.base = 0
