"""Block formats of weights, as they lie in files: Q40 (llama.cpp's Q4_0, bit for bit) and Q80 (its Q8_0).

A block is 32 consecutive weights along the last axis. Q40: one float16 scale d, then 16 bytes; byte j holds weight j in
its low nibble and weight j + 16 in its high one; weight = (nibble - 8) * d. Q80: one float16 scale d, then 32 int8;
weight = int8 * d. Arrays in, arrays out; knows nothing of files.
"""

import numpy as np

BLOCK = 32
Q40_BYTES = 18
Q80_BYTES = 34

#: bytes of one block of BLOCK weights, for every format a tensor can have in a file
BLOCK_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "q40": Q40_BYTES, "q80": Q80_BYTES}
QUANTIZED = ("q40", "q80")


def tensor_bytes(fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of logical `shape` in format `fmt`; quantised: the last axis is a multiple of 32."""
    count = int(np.prod(shape, dtype=np.int64))
    return count // BLOCK * BLOCK_BYTES[fmt] + count % BLOCK * (BLOCK_BYTES[fmt] // BLOCK)


def quantize_q40(x: np.ndarray) -> np.ndarray:
    """x: float32 [..., K], K a multiple of 32 -> uint8 [..., K/32, 18].

    The scale is the signed value of largest magnitude over -8, so that this value is exact.
    """
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    at = np.argmax(np.abs(blocks), axis=-1)[..., None]
    d = np.take_along_axis(blocks, at, axis=-1) / np.float32(-8)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(d != 0, np.float32(1) / d, np.float32(0))
        q = np.minimum((blocks * inverse + np.float32(8.5)).astype(np.int8), 15).astype(np.uint8)
    out = np.empty((*blocks.shape[:-1], Q40_BYTES), dtype=np.uint8)
    out[..., :2] = d.astype(np.float16).view(np.uint8)
    out[..., 2:] = q[..., :16] | (q[..., 16:] << 4)
    return out


def quantize_q80(x: np.ndarray) -> np.ndarray:
    """x: float32 [..., K], K a multiple of 32 -> uint8 [..., K/32, 34]; rounds half away from zero."""
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        y = blocks * np.where(d != 0, np.float32(1) / d, np.float32(0))
        q = (np.trunc(y + np.copysign(np.float32(0.5), y))).astype(np.int8)
    out = np.empty((*blocks.shape[:-1], Q80_BYTES), dtype=np.uint8)
    out[..., :2] = d.astype(np.float16).view(np.uint8)
    out[..., 2:] = q.view(np.uint8)
    return out


def dequantize_q40(blocks: np.ndarray) -> np.ndarray:
    """uint8 [..., K/32, 18] -> float32 [..., K]."""
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    packed = blocks[..., 2:]
    q = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - np.float32(8)
    return (q * d).reshape(*blocks.shape[:-2], -1)


def dequantize_q80(blocks: np.ndarray) -> np.ndarray:
    """uint8 [..., K/32, 34] -> float32 [..., K]."""
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    q = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
    return (q * d).reshape(*blocks.shape[:-2], -1)


def quantize(fmt: str, x: np.ndarray) -> np.ndarray:
    """float32 [..., K] in format `fmt`: blocks as above for q40 and q80, else a plain array (bf16 as uint16 bits)."""
    if fmt == "q40":
        return quantize_q40(x)
    if fmt == "q80":
        return quantize_q80(x)
    if fmt == "bf16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        # round to nearest even; the addition cannot overflow for finite values
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    return x.astype(np.float16 if fmt == "f16" else np.float32)


def dequantize(fmt: str, raw: np.ndarray) -> np.ndarray:
    """Inverse of `quantize`: float32 of the logical shape."""
    if fmt == "q40":
        return dequantize_q40(raw)
    if fmt == "q80":
        return dequantize_q80(raw)
    if fmt == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)
