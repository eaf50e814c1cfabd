"""Products of activation rows with weights: x [M, K] times W [N, K] transposed, for one matrix or a group of them.

There is one kernel for int8 activations and one for float32 ones. Both work through a table of groups (matrices, each
with its own activation rows, cut into row tiles): a plain linear layer is one group, the experts of a layer are many,
and recomputing one vocabulary tile a row (head.py) is many as well. Jobs are weight tiles, so weights are read once.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import DTypeLike

from ddllm_vk.cpu.emit import ROWS, float_tile, q40_block_to_floats, q40_tile, q80_block_to_floats, q80_tile
from ddllm_vk.cpu.intrinsics import (
    absmax_of,
    address,
    bits_to_float,
    half_to_float,
    load_f32,
    load_u16,
    store_f32,
    store_i8,
    take,
)
from ddllm_vk.cpu.isa import TILE
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.memory import aligned_empty
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import F16, F32, Q40, Q80, Weight
from ddllm_vk.quants import BLOCK

#: Multiply-adds that take about as long as waking a thread: less work than this stays on the caller's thread.
SMALL_PRODUCT = 2_000_000


def check(array: np.ndarray, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> None:
    """Kernels cannot notice a wrong size: refuse anything but a C-contiguous array of exactly this shape."""
    assert array.dtype == dtype, f"{name}: {array.dtype}, expected {np.dtype(dtype)}"
    assert array.shape == shape, f"{name}: shape {array.shape}, expected {shape}"
    assert array.flags.c_contiguous, f"{name}: not C-contiguous"


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows meet which matrices. Packed row r of group g is a row of tile t, begin[g] <= t < begin[g + 1].

    matrix: int32 [groups], index of each group's matrix. begin: int32 [groups + 1], first row tile of each group.
    start, count: int32 [tiles], first packed row and number of rows (1..ROWS) of each row tile.
    """

    matrix: np.ndarray
    begin: np.ndarray
    start: np.ndarray
    count: np.ndarray


@lru_cache(maxsize=64)
def one_group(rows: int) -> Groups:
    """All rows meet matrix 0, in row tiles of nearly the same size (8 + 8 rather than 14 + 2)."""
    tiles = -(-rows // ROWS)
    count = np.full(tiles, rows // max(tiles, 1), dtype=np.int32)
    count[: rows % max(tiles, 1)] += 1
    start = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int32)[:tiles]
    return Groups(np.zeros(1, np.int32), np.array([0, tiles], dtype=np.int32), start, count)


@lru_cache(maxsize=64)
def single_rows(rows: int) -> Groups:
    """Row tiles of one row: packed rows lie one after the other."""
    return Groups(
        np.zeros(1, np.int32),
        np.array([0, rows], np.int32),
        np.arange(rows, dtype=np.int32),
        np.ones(rows, np.int32),
    )


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Activations as Q80: int8 blocks of 32 with a float32 scale each, packed by row tile.

    A tile of m rows starting at row r holds, from r * blocks blocks on, [blocks][m] blocks.
    values: int8 [rows * blocks * 32]; scales: float32 [rows * blocks]; starts: int32 [rows * blocks], -8 * the sum of
    a block's values. columns: K before padding with zeros to whole blocks.
    """

    rows: int
    columns: int
    groups: Groups
    values: np.ndarray
    scales: np.ndarray
    starts: np.ndarray

    @property
    def blocks(self) -> int:
        return -(-self.columns // BLOCK)


def empty_quantized(rows: int, columns: int, groups: Groups | None = None) -> QuantizedRows:
    """Uninitialised QuantizedRows, to be filled by quantize_rows(..., out=)."""
    blocks = rows * -(-columns // BLOCK)
    return QuantizedRows(
        rows,
        columns,
        groups or one_group(rows),
        aligned_empty(blocks * BLOCK, np.int8),
        aligned_empty(blocks, np.float32),
        aligned_empty(blocks, np.int32),
    )


def scratch_quantized(pool: ThreadPool, name: str, rows: int, columns: int, groups: Groups) -> QuantizedRows:
    """QuantizedRows in the pool's scratch memory."""
    blocks = rows * -(-columns // BLOCK)
    return QuantizedRows(
        rows,
        columns,
        groups,
        pool.scratch(name + ".values", np.int8, blocks * BLOCK),
        pool.scratch(name + ".scales", np.float32, blocks),
        pool.scratch(name + ".starts", np.int32, blocks),
    )


@kernel
def quantize_row(source, columns, r, m, i, values, scales, starts):
    """Row i of a tile of m rows that starts at packed row r, from float32 values at an address."""
    blocks = (columns + 31) // 32
    for b in range(blocks):
        here = source + b * 128
        valid = min(32, columns - b * 32)
        largest = absmax_of(here, valid)
        index = r * blocks + b * m + i
        scale = largest / np.float32(127)
        inverse = np.float32(1) / scale
        if scale < np.float32(1e-37):  # all zero, or so small that the inverse would be infinite
            scale = np.float32(0)
            inverse = np.float32(0)
        total = np.int32(0)
        target = address(values) + index * 32
        for j in range(valid):
            y = load_f32(here, j) * inverse
            q = np.int32(y + (np.float32(0.5) if y >= np.float32(0) else np.float32(-0.5)))
            store_i8(target, j, np.int8(q))
            total += q
        for j in range(valid, 32):
            store_i8(target, j, np.int8(0))
        scales[index] = scale
        starts[index] = -8 * total


@kernel
def _quantize_rows(x, start, count, values, scales, starts, counter, jobs, grain):
    """Job: a row tile."""
    columns = x.shape[1]
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = start[tile]
            m = count[tile]
            for i in range(m):
                quantize_row(address(x) + (r + i) * columns * 4, columns, r, m, i, values, scales, starts)


def row_grain(pool: ThreadPool, jobs: int, elements: int) -> int:
    """Grain for cheap, even jobs over `elements` numbers in all: everything at once if waking threads costs more."""
    if elements < 60_000:
        return max(jobs, 1)
    return max(1, -(-jobs // (4 * pool.threads)))


def quantize_rows(pool: ThreadPool, x: np.ndarray, out: QuantizedRows | None = None) -> QuantizedRows:
    """x: float32 [M, K] -> Q80 activations. scale = amax / 127 (float32, not rounded further); a value is
    trunc(y + copysign(0.5, y)) with y = x * (1 / scale), i.e. halves round away from zero as in quants.quantize_q80."""
    rows, columns = x.shape
    check(x, "x", (rows, columns))
    out = out or empty_quantized(rows, columns)
    assert (out.rows, out.columns) == (rows, columns), "out: made for another shape"
    tiles = out.groups.start.size
    args = (x, out.groups.start, out.groups.count, out.values, out.scales, out.starts)
    pool.run(_quantize_rows, tiles, *args, grain=row_grain(pool, tiles, x.size))
    return out


@kernel
def _pack_rows(x, source, start, count, out, counter, jobs, grain):
    """Job: a row tile. out: float32 row tiles [K][m]; packed row r is x's row source[r]."""
    columns = x.shape[1]
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = np.int64(start[tile])
            m = np.int64(count[tile])
            for i in range(m):
                row = source[r + i]
                for k in range(columns):
                    out[r * columns + k * m + i] = x[row, k]


@lru_cache(maxsize=64)
def _identity(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.int32)


def pack_rows(
    pool: ThreadPool, x: np.ndarray, groups: Groups, source: np.ndarray | None = None, name: str = "pack_rows"
) -> np.ndarray:
    """Float row tiles in scratch memory. source: int32 [packed rows], row of x for each (values are the caller's
    responsibility), or None for x's own rows in order."""
    if source is None:
        source = _identity(x.shape[0])
    out = pool.scratch(name, np.float32, source.size * x.shape[1])
    tiles = groups.start.size
    pool.run(_pack_rows, tiles, x, source, groups.start, groups.count, out, grain=row_grain(pool, tiles, out.size))
    return out


@kernel
def _grouped_int8(
    code, weights, weight_scales, blocks, tiles, limit,
    values, scales, starts, matrix, begin, start, count, out, counter, jobs, grain,
):  # fmt: skip
    """Job: a weight tile of one group; a matrix has `tiles` of them, and there are `limit` in all."""
    columns = out.shape[1]
    edge = np.empty(ROWS * TILE, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for job in range(first, min(first + grain, jobs)):
            group = job // tiles
            n = (job - group * tiles) * TILE
            tile = matrix[group] * tiles + n // TILE
            width = min(TILE, columns - n)
            if tile >= limit or width <= 0:
                continue
            weight = address(weights) + tile * blocks * (256 if code == Q40 else 512)
            weight_scale = address(weight_scales) + tile * blocks * 32
            for t in range(begin[group], begin[group + 1]):
                r = np.int64(start[t])
                m = np.int64(count[t])
                x = address(values) + r * blocks * 32
                scale = address(scales) + r * blocks * 4
                initial = address(starts) + r * blocks * 4
                target = address(out) + (r * columns + n) * 4
                stride = columns * 4
                if width < TILE:
                    target = address(edge)
                    stride = TILE * 4
                if code == Q40:
                    q40_tile(m, x, scale, initial, weight, weight_scale, blocks, target, stride)
                else:
                    q80_tile(m, x, scale, initial, weight, weight_scale, blocks, target, stride)
                if width < TILE:
                    for i in range(m):
                        for j in range(width):
                            out[r + i, n + j] = edge[i * TILE + j]


@kernel
def tile_to_floats(code, weights, weight_scales, columns, tile, buffer):
    """Address of a weight tile as float32 [K][16]: converted into `buffer` (an address), or where it lies (f32)."""
    data = address(weights)
    here = data + tile * columns * 32  # of the two-byte formats
    if code == F32:
        return data + tile * columns * 64
    if code == Q40:
        for b in range(columns // 32):
            index = tile * (columns // 32) + b
            q40_block_to_floats(data + index * 256, address(weight_scales) + index * 32, buffer + b * 2048)
    elif code == Q80:
        for b in range(columns // 32):
            index = tile * (columns // 32) + b
            q80_block_to_floats(data + index * 512, address(weight_scales) + index * 32, buffer + b * 2048)
    elif code == F16:
        for i in range(columns * 16):
            store_f32(buffer, i, half_to_float(load_u16(here, i)))
    else:
        for i in range(columns * 16):
            store_f32(buffer, i, bits_to_float(np.uint32(load_u16(here, i)) << np.uint32(16)))
    return buffer


@kernel
def _grouped_float(
    code, weights, weight_scales, inputs, tiles, limit,
    packed, matrix, begin, start, count, out, counter, jobs, grain,
):  # fmt: skip
    """Job: a weight tile of one group, as in _grouped_int8; packed: float row tiles [K][m]."""
    columns = out.shape[1]
    edge = np.empty(ROWS * TILE, np.float32)
    buffer = np.empty(16 if code == F32 else inputs * TILE + 16, np.float32)
    while True:
        # taken here, not before the loop: an array whose last use is taking its address is freed at once
        aligned = (address(buffer) + 63) // 64 * 64
        first = take(counter, grain)
        if first >= jobs:
            return
        for job in range(first, min(first + grain, jobs)):
            group = job // tiles
            n = (job - group * tiles) * TILE
            tile = matrix[group] * tiles + n // TILE
            width = min(TILE, columns - n)
            if tile >= limit or width <= 0:
                continue
            weight = tile_to_floats(code, weights, weight_scales, inputs, tile, aligned)
            for t in range(begin[group], begin[group + 1]):
                r = np.int64(start[t])
                m = np.int64(count[t])
                x = address(packed) + r * inputs * 4
                if width == TILE:
                    for i in range(m):
                        for j in range(TILE):
                            out[r + i, n + j] = np.float32(0)
                    float_tile(m, x, weight, TILE * 4, inputs, address(out) + (r * columns + n) * 4, columns * 4)
                else:
                    edge[:] = np.float32(0)
                    float_tile(m, x, weight, TILE * 4, inputs, address(edge), TILE * 4)
                    for i in range(m):
                        for j in range(width):
                            out[r + i, n + j] = edge[i * TILE + j]


def grouped_product(
    pool: ThreadPool,
    x: "QuantizedRows | np.ndarray",
    groups: Groups,
    weight: Weight,
    out: np.ndarray,
    tiles: int | None = None,
) -> None:
    """out[r] = packed row r times its group's matrix. x: QuantizedRows or float row tiles (1-D, from pack_rows).

    tiles: weight tiles of one "matrix" when the groups cut a single big matrix into pieces; default: a whole matrix.
    out: float32 [packed rows, columns], of which columns beyond the end of the weight are left alone.
    """
    total = weight.experts * weight.tiles
    tiles = tiles or weight.tiles
    rows = out.shape[0]
    check(out, "out", (rows, out.shape[1]))
    assert out.shape[1] <= tiles * TILE, "out: more columns than the weight has rows"
    assert int(groups.matrix.max(initial=0)) * tiles < total, "groups: a matrix beyond the weight's end"
    assert int((groups.start + groups.count).max(initial=0)) <= rows, "groups: more rows than out"
    jobs = groups.matrix.size * tiles
    grain = max(1, min(8, jobs // (4 * pool.threads)))
    if rows * out.shape[1] * weight.columns < SMALL_PRODUCT:
        grain = max(jobs, 1)
    table = (groups.matrix, groups.begin, groups.start, groups.count, out)
    if isinstance(x, QuantizedRows):
        assert weight.code in (Q40, Q80), f"int8 activations need a q40 or q80 weight, not {weight.format}"
        assert x.columns == weight.columns, f"x has {x.columns} columns, the weight {weight.columns}"
        assert x.rows >= rows, "x: fewer rows than out"
        head = (weight.code, weight.data, weight.scales, x.blocks, tiles, total)
        pool.run(_grouped_int8, jobs, *head, x.values, x.scales, x.starts, *table, grain=grain)
    else:
        assert x.ndim == 1, "x: not packed"
        assert x.size >= rows * weight.columns, "x: too few packed rows"
        head = (weight.code, weight.data, weight.scales, weight.columns, tiles, total)
        pool.run(_grouped_float, jobs, *head, x, *table, grain=grain)


def linear(pool: ThreadPool, x: "QuantizedRows | np.ndarray", weight: Weight, out: np.ndarray) -> np.ndarray:
    """out[M, N] = x[M, K] @ W[N, K].T, float32. x: QuantizedRows (q40 and q80 weights) or float32 [M, K] (all).

    Returns out. A row's result does not depend on the other rows, nor on the number of threads.
    """
    assert len(weight.shape) == 2, f"linear takes one matrix, not {weight.shape}"
    rows = x.rows if isinstance(x, QuantizedRows) else x.shape[0]
    check(out, "out", (rows, weight.rows))
    if rows == 0:
        return out
    if isinstance(x, QuantizedRows):
        grouped_product(pool, x, x.groups, weight, out)
        return out
    check(x, "x", (rows, weight.columns))
    groups = one_group(rows)
    with pool.lock:
        grouped_product(pool, pack_rows(pool, x, groups), groups, weight, out)
    return out
