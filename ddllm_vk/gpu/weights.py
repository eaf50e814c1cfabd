"""Weights on the device: packed into tiles of 16 rows (shaders/weights.glsl), split where a buffer cannot hold them.

Bytes are rearranged, never changed: Q40 keeps its 4.5 bits a weight and Q80 its 8.5. A tensor is packed a few megabytes
at a time, so that loading needs no second copy of it.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..errors import GpuError
from ..ops import ReadRows
from ..quants import BLOCK, BLOCK_BYTES, QUANTIZED
from .buffers import ALIGNMENT, Arena, Slice
from .runtime import Runtime

TILE = 16  #: rows of a tile
#: format -> columns of a step, bytes of a tile's step
STEPS = {"q40": (32, TILE * 18), "q80": (32, TILE * 34), "f32": (4, 256), "f16": (8, 256), "bf16": (8, 256)}
_QUAD = np.dtype("V16")  # what a shader reads at once
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Part:
    """Some of a weight in one buffer. first, count: rows of a matrix (`first` a multiple of 16), experts of a stack."""

    slice: Slice
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A matrix [N, K], or the matrices [E, N, K] of a layer's experts; parts in order, without gaps."""

    format: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        return sum(part.slice.nbytes for part in self.parts)


def tile_bytes(fmt: str, columns: int) -> int:
    """Bytes of 16 rows."""
    step, nbytes = STEPS[fmt]
    return -(-columns // step) * nbytes


def matrix_bytes(fmt: str, rows: int, columns: int) -> int:
    return -(-rows // TILE) * tile_bytes(fmt, columns)


def device_bytes(fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes on the device, alignment included; a vector is float32."""
    if len(shape) == 1:
        return -(-4 * shape[0] // ALIGNMENT) * ALIGNMENT
    nbytes = math.prod(shape[:-2]) * matrix_bytes(fmt, shape[-2], shape[-1])
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(fmt: str, raw: np.ndarray) -> np.ndarray:
    """Whole tiles, the last filled up with zeros: uint8 [bytes].

    raw: uint8 [N, K/32, 18 or 34] (q40, q80), float32, float16 or uint16 [N, K] (f32, f16, bf16).
    """
    rows = len(raw)
    if rows % TILE:
        raw = np.concatenate([raw, np.zeros((-rows % TILE, *raw.shape[1:]), raw.dtype)])
    tiles = len(raw) // TILE
    if fmt not in QUANTIZED:
        raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % STEPS[fmt][0])))
        quads = raw.view(_QUAD).reshape(tiles, TILE, -1)
        return np.ascontiguousarray(quads.transpose(0, 2, 1)).reshape(-1).view(np.uint8)
    raw = np.ascontiguousarray(raw)
    blocks = raw.shape[1]
    out = np.empty((tiles, blocks, STEPS[fmt][1]), np.uint8)
    scales = raw[..., :2].view(np.uint16).reshape(tiles, TILE, blocks)
    out[..., : 2 * TILE].view(np.uint16)[...] = scales.transpose(0, 2, 1)
    quads = raw[..., 2:].view(_QUAD).reshape(tiles, TILE, blocks, -1)
    target = out[..., 2 * TILE :].view(_QUAD).reshape(tiles, blocks, -1, TILE)
    target[...] = quads.transpose(0, 2, 3, 1)
    return out.reshape(-1)


def upload_weight(runtime: Runtime, arena: Arena, fmt: str, read: ReadRows, shape: tuple[int, ...]) -> DeviceWeight:
    """A tensor of the file to the device; `read` gives rows as `pack` takes them. GpuError if they do not fit."""
    shape = tuple(int(n) for n in shape)
    rows, columns = shape[-2:]
    if fmt not in STEPS or len(shape) not in (2, 3) or (fmt in QUANTIZED and columns % BLOCK):
        raise GpuError(f"a {fmt} weight of shape {shape} is nothing the GPU backend takes")
    block = (columns // BLOCK, BLOCK_BYTES[fmt]) if fmt in QUANTIZED else (columns,)
    tiles, row_tile = -(-rows // TILE), tile_bytes(fmt, columns)
    step = max(1, _CHUNK_BYTES // row_tile)  # tiles

    def fill(target: Slice, expert: int, first: int, count: int) -> None:
        """Tiles first..first+count of one matrix, a few at a time."""
        for at in range(first, first + count, step):
            begin, end = at * TILE, min((at + step) * TILE, (first + count) * TILE, rows)
            raw = read(expert * rows + begin, end - begin).reshape(end - begin, *block)
            offset = target.offset + (at - first) * row_tile
            runtime.upload(Slice(target.buffer, offset, target.offset + target.nbytes - offset), pack(fmt, raw))

    parts, first = [], 0
    if len(shape) == 2:
        for taken, count in arena.take_rows(tiles, row_tile):
            fill(taken, 0, first, count)
            parts.append(Part(taken, first * TILE, min(count * TILE, rows - first * TILE)))
            first += count
    else:  # whole experts
        for taken, count in arena.take_rows(shape[0], tiles * row_tile):
            for i in range(count):
                begin = taken.offset + i * tiles * row_tile
                fill(Slice(taken.buffer, begin, tiles * row_tile), first + i, 0, tiles)
            parts.append(Part(taken, first, count))
            first += count
    return DeviceWeight(fmt, shape, tuple(parts))
