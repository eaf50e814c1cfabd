"""The KV cache of one session: which positions lie in which slots, which slots a row may see, and what it all takes.

Full-attention layers keep every committed position. Sliding layers keep the window only: no row ever sees further back
than sliding_window - 1 positions. K and V of a canvas are written behind the committed ones for the time of the pass
and never committed (MODEL.md, Attention masks). The arrays belong to the Ops; here are only numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import ModelConfig
from .errors import DdllmError
from .ops import Ops
from .quants import BLOCK, BLOCK_BYTES

#: what keys and values are stored as (quants.py)
FORMATS = ("f16", "q80", "f32")
#: rows of a prompt that one encoder pass takes
ENCODER_CHUNK = 256
#: capacities are multiples of this many slots: kernels read whole tiles of them
SLOTS = 128
_SMALLEST_STEP = 256  #: slots


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


def most_rows(config: ModelConfig) -> int:
    """Rows of the largest pass: a chunk of a prompt, or a canvas."""
    return max(ENCODER_CHUNK, config.canvas_length)


def layer_capacity(config: ModelConfig, layer: int, positions: int) -> int:
    """Slots a layer has once `positions` positions were in use, the canvas being denoised included.

    Full layers grow in steps of an eighth of their size, so that a long conversation is not copied at every turn.
    """
    context = config.max_position_embeddings
    if config.layers[layer].sliding:
        # a window beyond the context holds no more than the context
        return _up(min(config.sliding_window - 1, context) + most_rows(config), SLOTS)
    step = max(_SMALLEST_STEP, 1 << max(positions.bit_length() - 4, 0))
    return max(min(_up(positions, step), _up(context, SLOTS)), _up(most_rows(config), SLOTS))


def layer_bytes(config: ModelConfig, layer: int, positions: int, fmt: str) -> int:
    """Bytes of a layer's K and V, exactly as allocated."""
    spec = config.layers[layer]
    return 2 * spec.num_key_value_heads * layer_capacity(config, layer, positions) * row_bytes(fmt, spec.head_dim)


def row_bytes(fmt: str, head_dim: int) -> int:
    """Bytes of one slot's key or value of one KV head, padded to whole blocks of 32 values."""
    return _up(head_dim, BLOCK) // BLOCK * BLOCK_BYTES[fmt]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class KVCache:
    """Cached K and V of all layers in one of FORMATS. `length`: committed positions."""

    def __init__(self, ops: Ops, config: ModelConfig, fmt: str):
        self.ops, self.config, self.format = ops, config, fmt
        self.window, self.chunk = config.sliding_window, most_rows(config)
        self.length = 0
        self.layers: list[LayerCache] = []
        for i, layer in enumerate(config.layers):
            capacity = layer_capacity(config, i, 0)
            k, v = (ops.new_cache(fmt, layer.num_key_value_heads, capacity, layer.head_dim) for _ in range(2))
            self.layers.append(LayerCache(k, v, capacity))

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers."""
        return sum(self.ops.cache_bytes(array) for layer in self.layers for array in (layer.k, layer.v))

    def layer_window(self, layer: int) -> int | None:
        return self.window if self.config.layers[layer].sliding else None

    def grow(self, positions: int) -> None:
        """Makes room in the full layers for `positions` in all, so that what is coming is not copied on the way."""
        for i, layer in enumerate(self.layers):
            capacity = layer_capacity(self.config, i, positions)
            if capacity <= layer.capacity:
                continue
            try:
                self._move(layer, capacity, 0, min(self.length, layer.capacity))
            except MemoryError:
                raise DdllmError(
                    f"no memory for a KV cache of {positions} tokens; use a shorter prompt or kv_cache='q80'"
                ) from None

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` positions behind the committed ones in every layer."""
        if rows > self.chunk:
            raise ValueError(f"{rows} rows in one pass; the cache was made for {self.chunk}")
        self.grow(self.length + rows)
        for layer in self.layers:
            held = self.length - layer.base
            if held + rows > layer.capacity:  # a sliding one: its window moves to the front
                keep = min(held, self.window - 1)
                self._move(layer, layer.capacity, held - keep, keep)

    def _move(self, layer: LayerCache, capacity: int, first: int, count: int) -> None:
        k, v = (self.ops.resize_cache(array, capacity, first, count) for array in (layer.k, layer.v))
        layer.k, layer.v, layer.capacity = k, v, capacity
        layer.base += first

    def reset(self) -> None:
        """Forgets everything; keeps the memory."""
        self.length = 0
        for layer in self.layers:
            layer.base = 0

    def fill(self, length: int, seed: int = 0) -> None:
        """Holds `length` positions of random numbers instead of what it held: to time passes after a long context
        without encoding one. Keys and values are normally distributed, as wide as the RMS norm leaves real ones."""
        rng = np.random.default_rng(seed)
        self.reset()
        self.grow(length)
        self.length = length
        for i, layer in enumerate(self.layers):
            window, spec = self.layer_window(i), self.config.layers[i]
            layer.base = 0 if window is None else max(length - (window - 1), 0)
            x = rng.standard_normal((self.chunk, spec.num_key_value_heads * spec.head_dim), dtype=np.float32)
            for slot in range(0, length - layer.base, self.chunk):
                rows = min(self.chunk, length - layer.base - slot)
                for array in (layer.k, layer.v):
                    self.ops.store_rows(x[:rows], array, slot)
