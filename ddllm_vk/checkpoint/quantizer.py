"""Quantising for conversion: quants.quantize, with a compiled kernel for Q40, where a large model spends its time."""

from functools import cache
from typing import Any

import numpy as np

from .. import quants

#: weights from which compiling the kernel (about a second) pays
COMPILE_FROM = 1 << 27


def quantize(fmt: str, x: np.ndarray, compiled: bool) -> np.ndarray:
    """quants.quantize, the same bytes; `compiled`: four times as fast for q40. x: finite float32 [..., K]."""
    if fmt != "q40" or not compiled:
        with np.errstate(all="ignore"):  # a result that is not finite is noticed by its user
            return quants.quantize(fmt, x)
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, quants.BLOCK)
    out = np.empty((len(blocks), quants.Q40_BYTES), np.uint8)
    scales = np.empty(len(blocks), np.float32)
    _q40_kernel()(blocks, blocks.view(np.uint32), out, scales)
    with np.errstate(over="ignore"):
        out[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return out.reshape(*x.shape[:-1], -1, quants.Q40_BYTES)


@cache
def _q40_kernel() -> Any:
    import numba  # slow to import, and only large conversions need it

    @numba.njit(nogil=True)
    def kernel(blocks, bits, out, scales):  # float32 [n, 32], the same as uint32, uint8 [n, 18], float32 [n]
        for b in range(blocks.shape[0]):
            # magnitudes compare as integers do, which vectorises
            largest = np.uint32(0)
            for j in range(32):
                largest = max(largest, bits[b, j] & np.uint32(0x7FFFFFFF))
            first = np.int32(31)
            for j in range(32):
                if bits[b, j] & np.uint32(0x7FFFFFFF) == largest:
                    first = min(first, np.int32(j))
            scale = blocks[b, first] / np.float32(-8)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            scales[b] = scale
            for j in range(16):
                low = min(np.int32(blocks[b, j] * inverse + np.float32(8.5)), np.int32(15))
                high = min(np.int32(blocks[b, j + 16] * inverse + np.float32(8.5)), np.int32(15))
                out[b, 2 + j] = np.uint8(low | (high << 4))

    return kernel
