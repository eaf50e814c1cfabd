"""A stack of scratch arrays: the buffers of a forward pass, allocated once and used again by every pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_ALIGN = 64


class Arena:
    """Gives arrays from one buffer; leaving `scope` takes back all that was given inside it.

    The buffer grows to the largest pass seen: what does not fit is allocated by itself once, and the buffer is made
    large enough when the outermost scope is left.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)
        self._top = self._high = 0
        self._depth = 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        mark = self._top
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._top = mark
            if self._depth == 0 and self._high > self._buffer.nbytes:
                self._buffer = _aligned(self._high)

    def take(self, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """An array of undefined contents, 64-byte aligned, valid until the current scope is left."""
        if self._depth == 0:
            raise RuntimeError("arrays of a forward pass are made inside Ops.scope()")
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        start = self._top
        self._top += -(-nbytes // _ALIGN) * _ALIGN
        self._high = max(self._high, self._top)
        raw = self._buffer[start : start + nbytes] if self._top <= self._buffer.nbytes else _aligned(nbytes)
        return raw.view(dtype).reshape(shape)


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + _ALIGN, dtype=np.uint8)
    offset = -raw.ctypes.data % _ALIGN
    return raw[offset : offset + nbytes]
