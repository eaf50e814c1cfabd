"""The experts of a layer: gather each expert's rows, two grouped products around the gated activation, scatter.

No loop over experts in Python: rows are counted and sorted by expert in a kernel, and matmul.py's grouped products run
over all experts at once.
"""

import numpy as np

from ddllm_vk.cpu.emit import ROWS
from ddllm_vk.cpu.intrinsics import address, copy_32, gelu32, take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import (
    Groups,
    check,
    grouped_product,
    pack_rows,
    quantize_row,
    quantize_rows,
    row_grain,
    scratch_quantized,
    single_rows,
)
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import Weight


@kernel
def _route(ids, experts, matrix, begin, start, count, source, position):
    """Sort the (row, choice) pairs by expert, in row order, and cut each expert's into row tiles of nearly one size.

    ids: int32 [M, k]. Fills Groups' arrays (sized for the worst case), source[packed row] = row, position[row, choice]
    = packed row. Returns (groups, row tiles), or (-1, 0) if an id is out of range.
    """
    rows, choices = ids.shape
    fill = np.zeros(experts + 1, np.int64)
    for row in range(rows):
        for j in range(choices):
            if ids[row, j] < 0 or ids[row, j] >= experts:
                return -1, 0
            fill[ids[row, j] + 1] += 1
    groups = 0
    tiles = 0
    begin[0] = 0
    for e in range(experts):
        n = fill[e + 1]
        fill[e + 1] += fill[e]
        if n == 0:
            continue
        pieces = (n + ROWS - 1) // ROWS
        at = fill[e]
        for p in range(pieces):
            size = n // pieces + (1 if p < n % pieces else 0)
            start[tiles] = at
            count[tiles] = size
            at += size
            tiles += 1
        matrix[groups] = e
        groups += 1
        begin[groups] = tiles
    for row in range(rows):
        for j in range(choices):
            at = fill[ids[row, j]]
            fill[ids[row, j]] += 1
            source[at] = row
            position[row, j] = at
    return groups, tiles


@kernel
def _gather(
    values, scales, starts, blocks, source, start, count, to_values, to_scales, to_starts, counter, jobs, grain
):
    """Job: a row tile. Quantised rows packed singly to row tiles; packed row r is row source[r]."""
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = np.int64(start[tile])
            m = np.int64(count[tile])
            for i in range(m):
                row = np.int64(source[r + i])
                for b in range(blocks):
                    a = row * blocks + b
                    z = r * blocks + b * m + i
                    copy_32(address(values) + a * 32, address(to_values) + z * 32)
                    to_scales[z] = scales[a]
                    to_starts[z] = starts[a]


@kernel
def _activate_quantized(gate_up, start, count, values, scales, starts, counter, jobs, grain):
    """Job: a row tile. gelu(gate) * up, quantised into the same row tiles."""
    width = gate_up.shape[1] // 2
    row = np.empty(width, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = start[tile]
            m = count[tile]
            for i in range(m):
                for j in range(width):
                    row[j] = gelu32(gate_up[r + i, j]) * gate_up[r + i, width + j]
                quantize_row(address(row), width, r, m, i, values, scales, starts)


@kernel
def _activate(gate_up, start, count, out, counter, jobs, grain):
    """Job: a row tile. gelu(gate) * up as float row tiles [I][m]."""
    width = gate_up.shape[1] // 2
    row = np.empty(width, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = np.int64(start[tile])
            m = np.int64(count[tile])
            for i in range(m):
                for j in range(width):
                    row[j] = gelu32(gate_up[r + i, j]) * gate_up[r + i, width + j]
                for j in range(width):
                    out[r * width + j * m + i] = row[j]


@kernel
def _combine(down, position, weights, out, counter, jobs, grain):
    """Job: a row. The weighted sum of its experts' results, in the order of its choices."""
    columns = out.shape[1]
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            for h in range(columns):
                out[row, h] = np.float32(0)
            for j in range(position.shape[1]):
                weight = weights[row, j]
                at = position[row, j]
                for h in range(columns):
                    out[row, h] += weight * down[at, h]


def experts(
    pool: ThreadPool,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate_up: Weight,
    down: Weight,
    out: np.ndarray,
    quantized: bool,
) -> np.ndarray:
    """out[r] = sum over j of weights[r, j] * down[e](gelu(gate) * up), gate and up the halves of gate_up[e](x[r]),
    e = ids[r, j]; added in the order of j.

    x, out: float32 [M, H]; ids: int32 [M, k]; weights: float32 [M, k]; gate_up: (E, 2I, H), down: (E, H, I).
    quantized: int8 activations before both products (q40 and q80 weights only); else float32.
    """
    rows, hidden = x.shape
    choices = ids.shape[1]
    inner = down.columns
    check(x, "x", (rows, hidden))
    check(ids, "ids", (rows, choices), np.int32)
    check(weights, "weights", (rows, choices))
    check(out, "out", (rows, hidden))
    assert gate_up.shape == (down.experts, 2 * inner, hidden), f"gate_up {gate_up.shape}, down {down.shape}"
    assert down.shape == (down.experts, hidden, inner), f"gate_up {gate_up.shape}, down {down.shape}"
    packed = rows * choices
    if packed == 0:
        out[:] = 0
        return out
    with pool.lock:
        table = pool.scratch("experts.table", np.int32, 5 * packed + down.experts + 1)
        matrix, start, count, source, position = (table[i * packed : (i + 1) * packed] for i in range(5))
        begin = table[5 * packed : 5 * packed + down.experts + 1]
        position = position.reshape(rows, choices)
        found, tiles = _route(ids, down.experts, matrix, begin, start, count, source, position)
        assert found >= 0, f"ids: not all in 0..{down.experts - 1}"
        groups = Groups(matrix[:found], begin[: found + 1], start[:tiles], count[:tiles])
        both = pool.scratch("experts.gate_up", np.float32, packed * 2 * inner).reshape(packed, 2 * inner)
        result = pool.scratch("experts.down", np.float32, packed * hidden).reshape(packed, hidden)
        grain = row_grain(pool, tiles, packed * inner * 4)
        if quantized:
            singles = scratch_quantized(pool, "experts.singles", rows, hidden, single_rows(rows))
            gathered = scratch_quantized(pool, "experts.gathered", packed, hidden, groups)
            active = scratch_quantized(pool, "experts.active", packed, inner, groups)
            quantize_rows(pool, x, singles)
            into = (gathered.values, gathered.scales, gathered.starts)
            args = (singles.values, singles.scales, singles.starts, singles.blocks, source, groups.start, groups.count)
            pool.run(_gather, tiles, *args, *into, grain=row_grain(pool, tiles, packed * hidden))
            grouped_product(pool, gathered, groups, gate_up, both)
            into = (active.values, active.scales, active.starts)
            pool.run(_activate_quantized, tiles, both, groups.start, groups.count, *into, grain=grain)
            grouped_product(pool, active, groups, down, result)
        else:
            grouped_product(pool, pack_rows(pool, x, groups, source), groups, gate_up, both)
            active = pool.scratch("experts.active", np.float32, packed * inner)
            pool.run(_activate, tiles, both, groups.start, groups.count, active, grain=grain)
            grouped_product(pool, active, groups, down, result)
        pool.run(_combine, rows, result, position, weights, out, grain=row_grain(pool, rows, packed * hidden))
    return out
