"""Arrays aligned to a cache line, which the emitted kernels' vector loads rely on."""

import math

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64


def aligned_empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Like numpy.empty, C-contiguous, the first element at a multiple of ALIGNMENT bytes.

    Large arrays get huge pages from the system where it grants them to numpy's own allocations.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    skip = -address_of(raw) % ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


def address_of(array: np.ndarray) -> int:
    """Address of an array's first element; the array may be read-only."""
    return array.__array_interface__["data"][0]
