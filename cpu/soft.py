"""The self-conditioning embedding: each row's probabilities over the vocabulary times the embedding table.

From a row's few probable tokens where the others hardly matter (sparse_rows; the vocabulary's mean embedding stands for
those), else from all of them: the other probabilities are recomputed and multiplied with the table, chunk by chunk.
"""

import numpy as np

from ddllm_vk.cpu.emit import float_tile, q40_block_to_floats, q80_block_to_floats, q80_transposed, transpose_16
from ddllm_vk.cpu.head import HeadStatistics, chunk_tokens, squash
from ddllm_vk.cpu.intrinsics import (
    address,
    bits_to_float,
    exp32,
    half_to_float,
    load_f32,
    load_u16,
    max_of,
    store_f32,
    sum_of,
    take,
)
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import (
    check,
    grouped_product,
    one_group,
    pack_rows,
    quantize_row,
    quantize_rows,
    row_grain,
    scratch_quantized,
)
from ddllm_vk.cpu.rowwise import row_to_floats
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import F16, F32, Q40, Q80, PackedQ80, Weight

#: Columns of the table that one job of the dense product covers, and tokens it converts at a time.
_SLAB = 128
_TOKENS = 64
#: Weight tiles that one job of table_mean adds up.
_MEAN_TILES = 64


@kernel
def _by_token(ids, probabilities, counts, vocab, begin, row_of, probability_of):
    """Turn rows' lists of tokens into tokens' lists of rows: token t has entries begin[t]..begin[t + 1], in row order.

    begin: int32 [vocab + 2], zeroed. Returns False if an id is outside of the vocabulary.
    """
    for row in range(ids.shape[0]):
        for i in range(counts[row]):
            if ids[row, i] < 0 or ids[row, i] >= vocab:
                return False
            begin[ids[row, i] + 2] += 1
    for token in range(vocab):
        begin[token + 2] += begin[token + 1]
    for row in range(ids.shape[0]):
        for i in range(counts[row]):
            at = begin[ids[row, i] + 1]
            begin[ids[row, i] + 1] += 1
            row_of[at] = row
            probability_of[at] = probabilities[row, i]
    return True


@kernel
def _sparse_rows(code, data, scales, begin, row_of, probability_of, factor, out, counter, jobs, grain):
    """Job: _SLAB columns of all rows, token by token: each row of the table is read once."""
    columns = out.shape[1]
    values = np.empty(_SLAB, np.float32)
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for slab in range(claimed, min(claimed + grain, jobs)):
            left = slab * _SLAB
            width = min(_SLAB, columns - left)
            for row in range(out.shape[0]):
                for k in range(width):
                    out[row, left + k] = np.float32(0)
            for token in range(begin.size - 2):
                if begin[token] == begin[token + 1]:
                    continue
                row_to_floats(code, data, scales, columns, token, left, left + width, address(values))
                for i in range(begin[token], begin[token + 1]):
                    p = probability_of[i]
                    sums = address(out) + (row_of[i] * columns + left) * 4
                    for k in range(width):
                        store_f32(sums, k, load_f32(sums, k) + p * values[k])
            for row in range(out.shape[0]):
                for k in range(width):
                    out[row, left + k] *= np.float32(factor)


def sparse_rows(
    pool: ThreadPool,
    table: Weight,
    ids: np.ndarray,
    probabilities: np.ndarray,
    counts: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> np.ndarray:
    """out[r] = scale * sum over i < counts[r] of probabilities[r, i] * table[ids[r, i]], added in id order.

    table: (V, H); ids: int32, probabilities: float32 [M, C]; counts: int32 [M]; out: float32 [M, H].
    """
    rows, capacity = ids.shape
    check(ids, "ids", (rows, capacity), np.int32)
    check(probabilities, "probabilities", (rows, capacity))
    check(counts, "counts", (rows,), np.int32)
    check(out, "out", (rows, table.columns))
    assert rows == 0 or (counts.min() >= 0 and counts.max() <= capacity), "counts: more than there are ids"
    entries = int(counts.sum())
    with pool.lock:
        begin = pool.scratch("soft.begin", np.int32, table.rows + 2)
        begin[:] = 0
        row_of = pool.scratch("soft.row_of", np.int32, entries)
        probability_of = pool.scratch("soft.probability_of", np.float32, entries)
        assert _by_token(ids, probabilities, counts, table.rows, begin, row_of, probability_of), "ids: out of range"
        args = (table.code, table.data, table.scales, begin, row_of, probability_of, float(scale), out)
        jobs = -(-table.columns // _SLAB)
        pool.run(_sparse_rows, jobs, *args, grain=1 if entries * table.columns > 200_000 else jobs)
    return out


@kernel
def _row_probabilities(
    products, row, begin, softcap, inv_temperature, forbidden, forbidden_row, largest, total, ids, counts, p
):
    """p = exp(z - largest) / total of a row's chunk of tokens from `begin` on, 0 for its own ids and the forbidden."""
    tokens = products.shape[1]
    squash(products[row], softcap, inv_temperature, p)
    inverse = np.float32(1.0 / total[row])
    for j in range(tokens):
        p[j] = exp32(p[j] - largest[row]) * inverse
    if row == forbidden_row:
        for token in forbidden:
            if begin <= token < begin + tokens:
                p[token - begin] = np.float32(0)
    for i in range(counts[row]):
        if begin <= ids[row, i] < begin + tokens:
            p[ids[row, i] - begin] = np.float32(0)


@kernel
def _probabilities(
    products, begin, softcap, inv_temperature, forbidden, forbidden_row, largest, total, ids, counts, start, count, out,
    counter, jobs, grain,
):  # fmt: skip
    """Job: a row tile. Probabilities as float row tiles [tokens][m]."""
    tokens = products.shape[1]
    p = np.empty(tokens, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            r = np.int64(start[tile])
            m = np.int64(count[tile])
            for i in range(m):
                _row_probabilities(
                    products, r + i, begin, softcap, inv_temperature, forbidden, forbidden_row, largest, total,
                    ids, counts, p,
                )  # fmt: skip
                for j in range(tokens):
                    out[r * tokens + j * m + i] = p[j]


@kernel
def _quantized_probabilities(
    products, begin, softcap, inv_temperature, forbidden, forbidden_row, largest, total, ids, counts, start, count,
    values, scales, starts, counter, jobs, grain,
):  # fmt: skip
    """Job: a row tile. Probabilities as int8 row tiles."""
    tokens = products.shape[1]
    p = np.empty(tokens, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for tile in range(first, min(first + grain, jobs)):
            for i in range(count[tile]):
                _row_probabilities(
                    products, np.int64(start[tile] + i), begin, softcap, inv_temperature, forbidden, forbidden_row,
                    largest, total, ids, counts, p,
                )  # fmt: skip
                quantize_row(address(p), tokens, start[tile], count[tile], i, values, scales, starts)


@kernel
def _columns_to_floats(code, data, scales, columns, tile, k, out):
    """Columns k..k+15 of a weight tile, k-major float32 [16][16], at address `out` (room for [32][16]); returns the
    address of the result."""
    if code in (Q40, Q80):
        index = tile * (columns // 32) + k // 32
        if k % 32 == 0:
            if code == Q40:
                q40_block_to_floats(address(data) + index * 256, address(scales) + index * 32, out)
            else:
                q80_block_to_floats(address(data) + index * 512, address(scales) + index * 32, out)
        return out + (k % 32) * 64
    valid = min(16, columns - k) * 16
    at = (tile * columns + k) * 16
    for i in range(256):
        value = np.float32(0)
        if i < valid:
            if code == F32:
                value = load_f32(address(data), at + i)
            elif code == F16:
                value = half_to_float(load_u16(address(data), at + i))
            else:
                value = bits_to_float(np.uint32(load_u16(address(data), at + i)) << np.uint32(16))
        store_f32(out, i, value)
    return out


@kernel
def _accumulate(code, data, scales, columns, tokens, packed, start, count, sums, counter, jobs, grain):
    """Job: _SLAB columns of sums [rows, padded columns] += probabilities (float row tiles [tokens][m]) @ table."""
    padded = sums.shape[1]
    # [_SLAB/16][_TOKENS][16], then one block before it is transposed
    weight = np.empty(_SLAB * _TOKENS + 32 * 16, np.float32)
    block = address(weight) + _SLAB * _TOKENS * 4
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for slab in range(first, min(first + grain, jobs)):
            left = slab * _SLAB
            right = min(left + _SLAB, padded)
            for begin in range(0, tokens, _TOKENS):
                n = min(_TOKENS, tokens - begin)
                for t in range((n + 15) // 16):
                    for k in range(left, right, 16):
                        source = _columns_to_floats(code, data, scales, columns, begin // 16 + t, k, block)
                        at = (k - left) // 16 * _TOKENS + t * 16
                        transpose_16(source, 64, address(weight) + at * 64)
                for k in range(left, right, 16):
                    at = address(weight) + (k - left) // 16 * _TOKENS * 64
                    for tile in range(start.size):
                        r = np.int64(start[tile])
                        m = np.int64(count[tile])
                        p = address(packed) + (r * tokens + begin * m) * 4
                        float_tile(m, p, at, 64, n, address(sums) + (r * padded + k) * 4, padded * 4)


@kernel
def _transposed_table(code, data, scales, columns, tokens, to_data, to_scales, counter, jobs, grain):
    """Job: 32 tokens of the table. Packed Q80 weight tiles of its transpose: rows are columns, inputs are tokens."""
    first_half = np.empty(32 * 16, np.float32)
    second_half = np.empty(32 * 16, np.float32)
    nothing = np.zeros(16 * 16, np.float32)
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for job in range(claimed, min(claimed + grain, jobs)):
            for k in range(0, columns, 16):
                a = _columns_to_floats(code, data, scales, columns, 2 * job, k, address(first_half))
                b = address(nothing)
                if 2 * job + 1 < (tokens + 15) // 16:
                    b = _columns_to_floats(code, data, scales, columns, 2 * job + 1, k, address(second_half))
                block = k // 16 * jobs + job
                q80_transposed(a, b, address(to_data) + block * 512, address(to_scales) + block * 32)


class _DenseSum:
    """sums [rows, H] += probabilities @ table, chunk after chunk of the vocabulary.

    quantized: the probabilities and the transposed chunk of the table become Q80, for the integer kernels. That is for
    probabilities without the large ones: a block's rounding is relative to its largest value.
    """

    def __init__(self, pool: ThreadPool, table: Weight, rows: int, quantized: bool) -> None:
        self.pool, self.table, self.rows, self.quantized = pool, table, rows, quantized
        self.groups = one_group(rows)
        self.sums = np.zeros((rows, -(-table.columns // 16) * 16), np.float32)

    def add(
        self,
        products: np.ndarray,
        first: int,
        softcap: float,
        inv_temperature: float,
        forbidden: np.ndarray,
        forbidden_row: int,
        largest: np.ndarray,
        total: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """products: float32 [rows, C], tokens first..first+C; largest float32, total float64 [rows]; ids int32 [rows,
        capacity], counts int32 [rows]: tokens to leave out."""
        groups, count = self.groups, products.shape[1]
        settings = (products, first, softcap, inv_temperature, forbidden, forbidden_row, largest, total, ids, counts)
        grain = row_grain(self.pool, groups.start.size, products.size * 4)
        part = self.table.part(first, count)
        add = self._add_int8 if self.quantized else self._add_float
        add(part, count, (*settings, groups.start, groups.count), grain)

    def _add_int8(self, part: Weight, count: int, settings: tuple, grain: int) -> None:
        pool, tiles = self.pool, self.groups.start.size
        p = scratch_quantized(pool, "soft.probabilities", self.rows, count, self.groups)
        pool.run(_quantized_probabilities, tiles, *settings, p.values, p.scales, p.starts, grain=grain)
        jobs, shape = p.blocks, (self.sums.shape[1], p.blocks * 32)
        data = pool.scratch("soft.transposed", np.uint8, shape[0] * shape[1])
        scales = pool.scratch("soft.transposed_scales", np.uint16, shape[0] * jobs)
        pool.run(_transposed_table, jobs, part.code, part.data, part.scales, part.columns, count, data, scales)
        product = pool.scratch("soft.product", np.float32, self.sums.size).reshape(self.sums.shape)
        grouped_product(pool, p, self.groups, PackedQ80(shape, "q80", data, scales), product)
        self.sums += product

    def _add_float(self, part: Weight, count: int, settings: tuple, grain: int) -> None:
        pool, groups = self.pool, self.groups
        packed = pool.scratch("soft.probabilities", np.float32, self.rows * count)
        pool.run(_probabilities, groups.start.size, *settings, packed, grain=grain)
        args = (part.code, part.data, part.scales, part.columns, count, packed, groups.start, groups.count, self.sums)
        slabs = -(-self.sums.shape[1] // _SLAB)
        work = self.rows * count * part.columns
        pool.run(_accumulate, slabs, *args, grain=1 if work > 1_000_000 else slabs)


@kernel
def _column_sums(code, data, scales, columns, tokens, sums, counter, jobs, grain):
    """Job: _MEAN_TILES weight tiles; sums[job]: the sum of their rows. Rows that pad the last tile are zero."""
    block = np.empty(32 * 16, np.float32)
    totals = np.empty(columns + 16, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for job in range(first, min(first + grain, jobs)):
            totals[:] = np.float32(0)
            for tile in range(job * _MEAN_TILES, min((job + 1) * _MEAN_TILES, (tokens + 15) // 16)):
                for k in range(0, columns, 16):
                    source = _columns_to_floats(code, data, scales, columns, tile, k, address(block))
                    for c in range(16):
                        totals[k + c] += sum_of(source + c * 64, 16)
            sums[job] = totals[:columns]


def table_mean(pool: ThreadPool, table: Weight) -> np.ndarray:
    """float32 [H]: the mean row of a (V, H) table."""
    jobs = -(-table.tiles // _MEAN_TILES)
    sums = np.empty((jobs, table.columns), np.float32)
    pool.run(_column_sums, jobs, table.code, table.data, table.scales, table.columns, table.rows, sums)
    return (sums.sum(axis=0, dtype=np.float64) / table.rows).astype(np.float32)


def soft_embedding(
    pool: ThreadPool, stats: HeadStatistics, table: Weight, mean: np.ndarray, scale: float, out: np.ndarray
) -> np.ndarray:
    """out[r] = scale * sum over tokens of p[r, token] * table[token], p as in the step `stats` describes.

    table: the (V, H) weight the statistics were made with, mean: its table_mean; out: float32 [M, H]. Rows whose less
    probable tokens matter (stats.undecided) get the dense product; in others `mean` stands for those (head.DROPPED_*).
    """
    check(mean, "mean", (table.columns,))
    rows = stats.undecided.size
    ids, counts = stats.soft_ids, stats.soft_counts
    sparse_rows(pool, table, ids, stats.soft_probabilities, counts, scale, out)
    dropped = (scale * stats.dropped).astype(np.float32)
    dropped[stats.undecided] = 0
    out += dropped[:, None] * mean
    if rows == 0:
        return out
    ids, counts = ids[stats.undecided], counts[stats.undecided]
    settings = (stats.softcap, 1.0 / stats.temperature, stats.forbidden)
    found = np.flatnonzero(stats.undecided == stats.forbidden_row)
    forbidden_row = int(found[0]) if found.size else -1
    with pool.lock:
        dense = _DenseSum(pool, table, rows, stats.quantized)
        if stats.quantized:
            quantized = scratch_quantized(pool, "soft.x", rows, table.columns, dense.groups)
            packed = quantize_rows(pool, stats.undecided_x, quantized)
        else:
            packed = pack_rows(pool, stats.undecided_x, dense.groups, name="soft.x")
        step = chunk_tokens(rows, table.rows)
        for first in range(0, table.rows, step):
            count = min(step, table.rows - first)
            products = pool.scratch("soft.products", np.float32, rows * count).reshape(rows, count)
            grouped_product(pool, packed, dense.groups, table.part(first, count), products)
            dense.add(products, first, *settings, forbidden_row, stats.largest, stats.total, ids, counts)
        out[stats.undecided] += dense.sums[:, : table.columns] * np.float32(scale)
    return out


@kernel
def _normalisers(logits, largest, total, counter, jobs, grain):
    """Job: a row. Its maximum and the sum of exp(logit - maximum)."""
    e = np.empty(256, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            vocab = logits.shape[1]
            here = address(logits) + row * vocab * 4
            largest[row] = max_of(here, vocab)
            total[row] = 0.0
            for begin in range(0, vocab, 256):
                n = min(256, vocab - begin)
                for j in range(n):
                    e[j] = exp32(logits[row, begin + j] - largest[row])
                total[row] += np.float64(sum_of(address(e), n))


def soft_embedding_of_logits(
    pool: ThreadPool, logits: np.ndarray, table: Weight, scale: float, out: np.ndarray
) -> np.ndarray:
    """out = scale * softmax(logits) @ table. logits: float32 [M, V], as they are (no softcap, no temperature)."""
    rows, vocab = logits.shape
    check(logits, "logits", (rows, table.rows))
    check(out, "out", (rows, table.columns))
    if rows == 0:
        return out
    largest, total = np.empty(rows, np.float32), np.empty(rows)
    nothing, no_ids, no_counts = np.zeros(0, np.int32), np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32)
    with pool.lock:
        pool.run(_normalisers, rows, logits, largest, total, grain=row_grain(pool, rows, logits.size * 4))
        dense = _DenseSum(pool, table, rows, False)
        step = chunk_tokens(rows, vocab)
        for first in range(0, vocab, step):
            products = np.ascontiguousarray(logits[:, first : first + step])
            dense.add(products, first, 0.0, 1.0, nothing, -1, largest, total, no_ids, no_counts)
        out[:] = dense.sums[:, : table.columns] * np.float32(scale)
    return out
