"""Handles of arrays on the device. numpy reads them as any array: np.asarray(x) runs what is pending and copies."""

import weakref
from collections import deque
from typing import Any

import numpy as np

from ..gpu.buffers import Buffer, Slice


class DeviceArray:
    """float32 or int32 rows in scratch memory, valid until the scope is left."""

    def __init__(self, ops: Any, where: Slice, shape: tuple[int, ...], dtype: np.dtype):
        self._ops, self.slice, self.shape, self.dtype = ops, where, shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._ops.read(self)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]


class CacheArray(DeviceArray):
    """Memory of its own: K or V of a layer [kv_heads, capacity, head_dim], float32 or float16, or a session's soft
    embedding. Its buffer is handed to `dropped` when Python lets it go, to be freed between two passes."""

    def __init__(self, ops: Any, where: Slice, shape: tuple[int, ...], dtype: np.dtype, dropped: deque[Buffer]):
        super().__init__(ops, where, shape, dtype)
        weakref.finalize(self, dropped.append, where.buffer)
