"""Weights as the kernels read them: every matrix cut into tiles of 16 rows, a tile's rows interleaved.

A weight's shape is (N, K), or (E, N, K) for a layer's E experts; N is padded with zeros to whole tiles per matrix.
Bytes are rearranged, never changed: Q40 keeps its 4.5 bits a weight and Q80 its 8.5. Built from the blocks of
quants.py, whose read-only, memory-mapped bytes are read once. The layouts are described in emit.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddllm_vk.cpu.intrinsics import (
    address,
    load_u16,
    load_u32,
    store_u16,
    store_u32,
    transpose_u16,
    transpose_u32,
)
from ddllm_vk.cpu.isa import TILE
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.memory import address_of, mapped_empty
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.errors import InputError
from ddllm_vk.quants import BLOCK, BLOCK_BYTES, QUANTIZED

ReadRows = Callable[[int, int], np.ndarray]

#: bytes of the file packed at a time: what was just read is still in the core's own cache
_CHUNK_BYTES = 1 << 19

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
def _pack_blocks(code, raw, rows, blocks, tiles, first, last, data, scales):
    """Tiles first..last of a weight from blocks of 18 or 34 bytes; raw: address of the rows from tile `first` on."""
    groups = 4 if code == Q40 else 8
    block_bytes = 18 if code == Q40 else 34
    flip = np.uint64(0) if code == Q40 else np.uint64(0x80808080)
    row_bytes = blocks * block_bytes
    source = raw
    for tile in range(first, last):
        target = address(data) + tile * blocks * groups * 64
        scale = address(scales) + tile * blocks * 32
        valid = min(16, rows - tile % tiles * 16)
        if valid == 16:
            for b in range(blocks):
                block = source + b * block_bytes
                for r in range(16):
                    store_u16(scale, b * 16 + r, load_u16(block + r * row_bytes, 0))
                for g in range(0, groups, 4):
                    transpose_u32(block + 2 + g * 4, row_bytes, target + (b * groups + g) * 64, flip)
        else:
            for b in range(blocks):
                for r in range(16):
                    block = source + r * row_bytes + b * block_bytes
                    store_u16(scale, b * 16 + r, load_u16(block, 0) if r < valid else np.uint16(0))
                    for g in range(groups):
                        word = load_u32(block + 2, g) ^ np.uint32(flip) if r < valid else np.uint32(0)
                        store_u32(target, (b * groups + g) * 16 + r, word)
        source += valid * row_bytes


@kernel
def _pack_dense(size, raw, rows, columns, tiles, first, last, data):
    """Tiles first..last of a weight from elements of `size` (2 or 4) bytes; raw: address of tile `first`'s rows."""
    source = raw
    for tile in range(first, last):
        target = address(data) + tile * columns * 16 * size
        valid = min(16, rows - tile % tiles * 16)
        done = 0
        if valid == 16:
            step = 16 // size
            done = columns // step * step
            for k in range(0, done, step):
                if size == 4:
                    transpose_u32(source + k * 4, columns * 4, target + k * 64, np.uint64(0))
                else:
                    transpose_u16(source + k * 2, columns * 2, target + k * 32, np.uint64(0))
        for k in range(done, columns):
            for r in range(16):
                if size == 4:
                    word = load_u32(source, r * columns + k) if r < valid else np.uint32(0)
                    store_u32(target, k * 16 + r, word)
                else:
                    half = load_u16(source, r * columns + k) if r < valid else np.uint16(0)
                    store_u16(target, k * 16 + r, half)
        source += valid * columns * size


def empty(fmt: str, shape: tuple[int, ...]) -> Weight:
    """An uninitialised packed weight of a logical shape, to `pack` into."""
    if fmt not in _CLASSES:
        raise InputError(f"weight format {fmt!r} is not known; use one of {', '.join(_CLASSES)}")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise InputError(f"a weight has the shape (N, K) or (experts, N, K) with no zeros, not {tuple(shape)}")
    columns = shape[-1]
    tiles = math.prod(shape[:-2]) * -(-shape[-2] // TILE)
    if fmt in QUANTIZED:
        if columns % BLOCK:
            raise InputError(f"{fmt} needs a multiple of {BLOCK} inputs, not {columns}")
        blocks = tiles * TILE * columns // BLOCK
        memory = mapped_empty(blocks * BLOCK_BYTES[fmt])
        data, scales = memory[: -2 * blocks], memory[-2 * blocks :].view(np.uint16)
    else:
        data = mapped_empty(tiles * TILE * columns * np.dtype(_DENSE_DTYPES[fmt]).itemsize)
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
    weight = _weight_to_fill(fmt, shape, out)
    rows = weight.experts * weight.rows
    dtype, elements = _stored_row(weight)
    if raw.dtype != dtype or raw.size != rows * elements:
        raise InputError(
            f"a {fmt} weight of shape {weight.shape} is made from {rows * elements} elements of {dtype}, "
            f"not {raw.size} of {raw.dtype}"
        )
    matrix = np.ascontiguousarray(raw).reshape(rows, elements)
    return pack_from(fmt, lambda first, count: matrix[first : first + count], shape, pool, weight)


def pack_from(
    fmt: str, read: ReadRows, shape: tuple[int, ...], pool: ThreadPool | None = None, out: Weight | None = None
) -> Weight:
    """As `pack`, of a tensor that is read while it is packed, in chunks that fit a core's cache, on every thread.

    read: (first, count) -> rows first..first+count of all E * N, as `pack` takes them; called once for every row.
    An error in `read` is raised here. Raises InputError if what it gives does not fit.
    """
    weight = _weight_to_fill(fmt, shape, out)
    dtype, elements = _stored_row(weight)
    tiles = weight.experts * weight.tiles
    grain = max(1, _CHUNK_BYTES // (TILE * elements * dtype.itemsize))

    def row_of(tile: int) -> int:
        return tile // weight.tiles * weight.rows + tile % weight.tiles * TILE

    chunks = iter(range(0, tiles, grain))

    def work(*_: object) -> None:
        """Packs chunks until there are no more; threads share the iterator, whose steps the interpreter keeps apart."""
        for first in chunks:
            last = min(first + grain, tiles)
            start, count = row_of(first), row_of(last) - row_of(first)
            rows = read(start, count)
            if rows.dtype != dtype or rows.size != count * elements or not rows.flags.c_contiguous:
                raise InputError(f"{fmt} {weight.shape}: {count} rows were read as {rows.dtype} {rows.shape}")
            _pack_tiles(weight, rows, first, last)

    (ThreadPool(1) if pool is None else pool).run(work, tiles, grain=grain)
    return weight


def _weight_to_fill(fmt: str, shape: tuple[int, ...], out: Weight | None) -> Weight:
    shape = tuple(int(n) for n in shape)
    if out is None:
        return empty(fmt, shape)
    if out.format != fmt or out.shape != shape:
        raise InputError(f"cannot pack {fmt} {shape} into a weight of {out.format} {out.shape}")
    return out


def _stored_row(weight: Weight) -> tuple[np.dtype, int]:
    """What one row of the file is: the elements' dtype and their number."""
    if weight.format in QUANTIZED:
        return np.dtype(np.uint8), weight.columns // BLOCK * BLOCK_BYTES[weight.format]
    return np.dtype(_DENSE_DTYPES[weight.format]), weight.columns


def _pack_tiles(weight: Weight, rows: np.ndarray, first: int, last: int) -> None:
    """Tiles first..last from the rows that they are made of."""
    source = address_of(rows)
    if weight.format in QUANTIZED:
        blocks = weight.columns // BLOCK
        matrix = (weight.rows, blocks, weight.tiles)
        _pack_blocks(weight.code, source, *matrix, first, last, weight.data, weight.scales)
    else:
        matrix = (weight.rows, weight.columns, weight.tiles)
        _pack_dense(rows.itemsize, source, *matrix, first, last, weight.data)


def unpack(weight: Weight) -> np.ndarray:
    """The float32 values [N, K] or [E, N, K] of a packed weight; plain numpy, for tests and small tensors."""
    tiles = weight.experts * weight.tiles
    if weight.format in QUANTIZED:
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
