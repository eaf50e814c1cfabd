"""Arrays aligned to a cache line, which the emitted kernels' vector loads rely on."""

import contextlib
import math
import mmap

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64
HUGE_PAGE = 2 << 20


def aligned_empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Like numpy.empty, C-contiguous, the first element at a multiple of ALIGNMENT bytes."""
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    skip = -address_of(raw) % ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


def mapped_empty(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] for what is large and stays: memory of its own, which goes back to the system with the array.

    It lies in huge pages where the system grants them. Raises MemoryError.
    """
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return aligned_empty(nbytes, np.uint8)
    try:
        # Linux aligns a mapping to huge pages if its length is a multiple of theirs.
        memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"the system has no {nbytes} bytes of memory to give") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, 0, nbytes // HUGE_PAGE * HUGE_PAGE)  # the rest in small pages
    return np.frombuffer(memory, np.uint8, nbytes)


def address_of(array: np.ndarray) -> int:
    """Address of an array's first element; the array may be read-only."""
    return array.__array_interface__["data"][0]
