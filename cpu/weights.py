"""Weights as the kernels read them: every matrix cut into tiles of 16 rows, a tile's rows interleaved.

A weight's shape is (N, K), or (E, N, K) for a layer's E experts; N is padded with zeros to whole tiles per matrix.
Bytes are rearranged, never changed: Q40 keeps its 4.5 bits a weight and Q80 its 8.5. Built from the blocks of
quants.py, whose read-only, memory-mapped bytes are read once. The layouts are described in emit.py.
"""

import math
from dataclasses import dataclass

import numpy as np

from ddllm_vk.cpu.intrinsics import address, load_u16, load_u32, store_u16, store_u32, take
from ddllm_vk.cpu.isa import TILE
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.memory import address_of, aligned_empty
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.errors import InputError
from ddllm_vk.quants import BLOCK, BLOCK_BYTES

_NO_SCALES = np.zeros(0, dtype=np.uint16)


@dataclass(frozen=True, eq=False)
class Weight:
    """What all packed weights have in common.

    data: uint8, the tiles one after the other, aligned. scales: uint16 (bits of float16), empty for dense formats.
    """

    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    scales: np.ndarray

    @property
    def experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """N: outputs of one matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """K: inputs of one matrix."""
        return self.shape[-1]

    @property
    def tiles(self) -> int:
        """Tiles of one matrix."""
        return -(-self.rows // TILE)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def part(self, first: int, count: int) -> "Weight":
        """Rows first..first+count of a single matrix, sharing its memory; `first` is a multiple of TILE."""
        assert len(self.shape) == 2, "part of one matrix"
        assert first % TILE == 0, f"part from row {first}, not a multiple of {TILE}"
        assert 0 < count <= self.rows - first, f"rows {first}..{first + count} of {self.rows}"
        data, scales = self.data.size // self.tiles, self.scales.size // self.tiles
        begin, end = first // TILE, -(-(first + count) // TILE)
        return type(self)(
            (count, self.columns),
            self.format,
            self.data[begin * data : end * data],
            self.scales[begin * scales : end * scales],
        )

    @property
    def code(self) -> int:
        """The format as kernels are told it."""
        return FORMAT_CODES[self.format]


class PackedQ40(Weight):
    """data: nibbles [E * tiles][K/32][4][16][4]; scales: float16 [E * tiles][K/32][16]."""


class PackedQ80(Weight):
    """data: int8 plus 128 [E * tiles][K/32][8][16][4]; scales: float16 [E * tiles][K/32][16]."""


class DenseWeight(Weight):
    """data: float32, float16 or bfloat16 [E * tiles][K][16], as stored in the file."""


#: How kernels are told a weight's format.
Q40, Q80, F32, F16, BF16 = range(5)
FORMAT_CODES = {"q40": Q40, "q80": Q80, "f32": F32, "f16": F16, "bf16": BF16}
_CLASSES = {"q40": PackedQ40, "q80": PackedQ80, "f32": DenseWeight, "f16": DenseWeight, "bf16": DenseWeight}
_DENSE_DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@kernel
def _pack_blocks(code, raw, rows, blocks, tiles, data, scales, counter, jobs, grain):
    """Job: a tile. raw: address of [E, rows, blocks, 18 or 34] bytes."""
    groups = 4 if code == Q40 else 8
    block_bytes = 18 if code == Q40 else 34
    flip = np.uint32(0) if code == Q40 else np.uint32(0x80808080)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            matrix = tile // tiles
            row = (tile - matrix * tiles) * 16
            source = raw + (matrix * rows + row) * blocks * block_bytes
            target = address(data) + tile * blocks * groups * 64
            scale = address(scales) + tile * blocks * 32
            valid = min(16, rows - row)
            for b in range(blocks):
                for r in range(valid):
                    block = source + (r * blocks + b) * block_bytes
                    store_u16(scale, b * 16 + r, load_u16(block, 0))
                    for g in range(groups):
                        store_u32(target, (b * groups + g) * 16 + r, load_u32(block + 2, g) ^ flip)
                for r in range(valid, 16):
                    store_u16(scale, b * 16 + r, np.uint16(0))
                    for g in range(groups):
                        store_u32(target, (b * groups + g) * 16 + r, np.uint32(0))


@kernel
def _pack_dense(size, raw, rows, columns, tiles, data, counter, jobs, grain):
    """Job: a tile. raw: address of [E, rows, columns] elements of `size` (2 or 4) bytes."""
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            matrix = tile // tiles
            row = (tile - matrix * tiles) * 16
            source = raw + (matrix * rows + row) * columns * size
            target = address(data) + tile * columns * 16 * size
            valid = min(16, rows - row)
            if size == 4:
                for k in range(columns):
                    for r in range(valid):
                        store_u32(target, k * 16 + r, load_u32(source, r * columns + k))
                    for r in range(valid, 16):
                        store_u32(target, k * 16 + r, np.uint32(0))
            else:
                for k in range(columns):
                    for r in range(valid):
                        store_u16(target, k * 16 + r, load_u16(source, r * columns + k))
                    for r in range(valid, 16):
                        store_u16(target, k * 16 + r, np.uint16(0))


def empty(fmt: str, shape: tuple[int, ...]) -> Weight:
    """An uninitialised packed weight of a logical shape, to `pack` into."""
    if fmt not in _CLASSES:
        raise InputError(f"weight format {fmt!r} is not known; use one of {', '.join(_CLASSES)}")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise InputError(f"a weight has the shape (N, K) or (experts, N, K) with no zeros, not {tuple(shape)}")
    columns = shape[-1]
    tiles = math.prod(shape[:-2]) * -(-shape[-2] // TILE)
    if fmt in ("q40", "q80"):
        if columns % BLOCK:
            raise InputError(f"{fmt} needs a multiple of {BLOCK} inputs, not {columns}")
        payload = BLOCK_BYTES[fmt] - 2
        data = aligned_empty(tiles * TILE * columns // BLOCK * payload, np.uint8)
        scales = aligned_empty(tiles * TILE * columns // BLOCK, np.uint16)
    else:
        data = aligned_empty(tiles * TILE * columns * np.dtype(_DENSE_DTYPES[fmt]).itemsize, np.uint8)
        scales = _NO_SCALES
    return _CLASSES[fmt](tuple(int(n) for n in shape), fmt, data, scales)


def pack(
    fmt: str, raw: np.ndarray, shape: tuple[int, ...], pool: ThreadPool | None = None, out: Weight | None = None
) -> Weight:
    """Rearrange a tensor of the file for the kernels.

    raw: uint8 [..., N, K/32, 18] (q40) or [..., N, K/32, 34] (q80), float32 (f32), float16 (f16) or uint16 (bf16)
    [..., N, K]; any shape of that many elements; may be read-only. shape: (N, K) or (E, N, K).
    out: a weight of the same format and shape to fill instead of a new one. Raises InputError if they do not fit.
    """
    shape = tuple(int(n) for n in shape)
    weight = empty(fmt, shape) if out is None else out
    if weight.format != fmt or weight.shape != shape:
        raise InputError(f"cannot pack {fmt} {shape} into a weight of {weight.format} {weight.shape}")
    quantized = fmt in ("q40", "q80")
    dtype = np.dtype(np.uint8 if quantized else _DENSE_DTYPES[fmt])
    count = math.prod(shape) // BLOCK * BLOCK_BYTES[fmt] if quantized else math.prod(shape)
    if raw.dtype != dtype or raw.size != count:
        raise InputError(
            f"a {fmt} weight of shape {shape} is made from {count} elements of {dtype}, not {raw.size} of {raw.dtype}"
        )
    raw = np.ascontiguousarray(raw)
    threads = ThreadPool(1) if pool is None else pool
    jobs = weight.experts * weight.tiles
    grain = max(1, 2**18 // (raw.nbytes // jobs + 1))
    if quantized:
        blocks = weight.columns // BLOCK
        args = (weight.code, address_of(raw), weight.rows, blocks, weight.tiles, weight.data, weight.scales)
        threads.run(_pack_blocks, jobs, *args, grain=grain)
    else:
        args = (dtype.itemsize, address_of(raw), weight.rows, weight.columns, weight.tiles, weight.data)
        threads.run(_pack_dense, jobs, *args, grain=grain)
    return weight


def unpack(weight: Weight) -> np.ndarray:
    """The float32 values [N, K] or [E, N, K] of a packed weight; plain numpy, for tests and small tensors."""
    tiles = weight.experts * weight.tiles
    if weight.format in ("q40", "q80"):
        blocks = weight.columns // BLOCK
        groups = 4 if weight.format == "q40" else 8
        data = weight.data.reshape(tiles, blocks, groups, TILE, 4)
        if weight.format == "q40":
            q = np.concatenate([data & 15, data >> 4], axis=2).astype(np.float32) - np.float32(8)
        else:
            q = data.astype(np.float32) - np.float32(128)
        scales = weight.scales.view(np.float16).reshape(tiles, blocks, 1, TILE, 1).astype(np.float32)
        values = (q * scales).transpose(0, 3, 1, 2, 4)
    else:
        stored = weight.data.view(_DENSE_DTYPES[weight.format]).reshape(tiles, weight.columns, TILE)
        if weight.format == "bf16":
            stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values = stored.astype(np.float32).transpose(0, 2, 1)
    values = values.reshape(weight.experts, weight.tiles * TILE, weight.columns)[:, : weight.rows]
    return np.ascontiguousarray(values.reshape(weight.shape))
