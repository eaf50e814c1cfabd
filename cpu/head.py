"""The head without logits: per row, everything the sampler needs, from one pass over the vocabulary in chunks.

A chunk of raw products updates each row's maximum, argmax, sum of exponentials, entropy sum, a maximum and a sum for
every tile of tokens (so that sampling picks the tile first and then the token in it, from recomputed products), and a
bounded list of the largest candidates (from which the self-conditioning embedding is made, soft.py).
z = softcap * tanh(product / softcap) / temperature throughout; MODEL.md, "Embedding, self-conditioning, head".
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import DTypeLike

from ddllm_vk.cpu.intrinsics import address, exp32, max_of, next_above, sum_of, take, tanh32
from ddllm_vk.cpu.isa import TILE
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import (
    Groups,
    check,
    empty_quantized,
    grouped_product,
    linear,
    one_group,
    pack_rows,
    quantize_rows,
    row_grain,
    scratch_quantized,
)
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import Weight

#: Tokens of one sampling tile.
TOKENS = 256
#: Candidates kept a row, at most.
CANDIDATES = 1024
#: Candidates this far below the maximum have a probability below e^-22, all 262,144 of them below 1e-4 together.
DEPTH = 22.0
#: The vocabulary's mean embedding stands for the tokens left out of a row's sparse one. What that gets wrong is bounded
#: by the 2-norm of their probabilities (measured: up to three times it, in units of an embedding's length). A row where
#: it cannot be kept below this needs the dense product. int8 activations round what comes of it to about 5e-3.
DROPPED_F32, DROPPED_INT8 = 3e-5, 2e-4
#: The candidates handed on leave out about this much (2-norm), where that is possible.
WANTED = 1e-5
#: In a row that needs the dense product, tokens of at least this probability are candidates all the same.
EXACT = 1e-4


@kernel
def squash(products, softcap, inv_temperature, z):
    """z = softcap * tanh(products / softcap) * inv_temperature, 1-D; softcap 0: none."""
    cap, factor = np.float32(softcap), np.float32(inv_temperature)
    if cap == np.float32(0):
        for j in range(products.size):
            z[j] = products[j] * factor
    else:
        for j in range(products.size):
            z[j] = cap * tanh32(products[j] / cap) * factor


@dataclass(eq=False)
class HeadState:
    """Running statistics of `rows` rows over a vocabulary that arrives in chunks, in order.

    largest float32, argmax int32, total and weighted float64 [rows]: max z, its lowest id, sum of e and of (z - max) e,
    e = exp(z - max). tile_largest float32, tile_total float64 [rows, tiles]: the same for each tile of `tile` tokens,
    with respect to its own maximum. ids int32, values float32 [rows, capacity], kept int32, floor float32 [rows]: the
    candidates in id order, and the z up to which everything has been dropped. pool: whose scratch memory holds the
    large ones, until its next HeadState.
    """

    rows: int
    vocab: int
    capacity: int = CANDIDATES
    tile: int = TOKENS
    pool: ThreadPool | None = None
    largest: np.ndarray = field(init=False)
    argmax: np.ndarray = field(init=False)
    total: np.ndarray = field(init=False)
    weighted: np.ndarray = field(init=False)
    tile_largest: np.ndarray = field(init=False)
    tile_total: np.ndarray = field(init=False)
    ids: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    kept: np.ndarray = field(init=False)
    floor: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        assert self.tile > 0, "tile: zero"
        assert self.tile % TILE == 0, f"tile {self.tile} is not a multiple of {TILE}"
        self.capacity = max(2, min(self.capacity, self.vocab))
        tiles = -(-self.vocab // self.tile)
        self.largest = np.full(self.rows, -np.inf, np.float32)
        self.argmax = np.zeros(self.rows, np.int32)
        self.total = np.zeros(self.rows)
        self.weighted = np.zeros(self.rows)
        self.tile_largest = self._memory("tile_largest", np.float32, tiles)
        self.tile_largest[:] = -np.inf
        self.tile_total = self._memory("tile_total", np.float64, tiles)
        self.tile_total[:] = 0
        self.ids = self._memory("ids", np.int32, self.capacity)
        self.values = self._memory("values", np.float32, self.capacity)
        self.kept = np.zeros(self.rows, np.int32)
        self.floor = np.full(self.rows, -np.inf, np.float32)

    def _memory(self, name: str, dtype: DTypeLike, columns: int) -> np.ndarray:
        """Uninitialised [rows, columns]."""
        if self.pool is None:
            return np.empty((self.rows, columns), dtype)
        return self.pool.scratch(f"head.{name}", dtype, self.rows * columns).reshape(self.rows, columns)


@kernel
def _halve(values, ids, kept, lowest):
    """Drop the smaller half of a full candidate list, in place and in order; returns (kept, new floor)."""
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for i in range(kept):
        low, high = min(low, values[i]), max(high, values[i])
    low = max(low, lowest)
    for _ in range(40):
        middle = np.float32(0.5) * (low + high)
        above = 0
        for i in range(kept):
            above += 1 if values[i] > middle else 0
        if above > kept // 2:
            low = middle
        else:
            high = middle
    left = 0
    for i in range(kept):
        if values[i] > high:
            values[left], ids[left] = values[i], ids[i]
            left += 1
    return left, high


@kernel
def _head_chunk(
    products, begin, softcap, inv_temperature, forbidden, forbidden_row, tile,
    largest, argmax, total, weighted, tile_largest, tile_total, ids, values, kept, floor, counter, jobs, grain,
):  # fmt: skip
    """Job: a row."""
    z = np.empty(tile, np.float32)
    e = np.empty(tile, np.float32)
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for row in range(claimed, min(claimed + grain, jobs)):
            for first in range(0, products.shape[1], tile):
                n = min(tile, products.shape[1] - first)
                squash(products[row, first : first + n], softcap, inv_temperature, z)
                if row == forbidden_row:
                    for token in forbidden:
                        if begin + first <= token < begin + first + n:
                            z[token - begin - first] = np.float32(-np.inf)
                z[n:] = np.float32(-np.inf)
                top = max_of(address(z), n)
                if top == np.float32(-np.inf):
                    continue
                if top > largest[row]:
                    at = 0
                    while z[at] != top:
                        at += 1
                    argmax[row] = begin + first + at
                    shift = np.float64(largest[row]) - np.float64(top)
                    if total[row] > 0.0:
                        scale = math.exp(shift)
                        weighted[row] = scale * (weighted[row] + shift * total[row])
                        total[row] *= scale
                    largest[row] = top
                for j in range(n):
                    e[j] = exp32(z[j] - top)
                mass = np.float64(sum_of(address(e), n))
                for j in range(n):
                    e[j] = e[j] * max(z[j] - top, np.float32(-1e4))
                slope = np.float64(sum_of(address(e), n))
                shift = np.float64(top) - np.float64(largest[row])
                scale = math.exp(shift)
                total[row] += mass * scale
                weighted[row] += scale * (slope + shift * mass)
                index = (begin + first) // tile
                tile_largest[row, index] = top
                tile_total[row, index] = mass
                lowest = max(floor[row], largest[row] - np.float32(DEPTH))
                j = next_above(address(z), 0, tile, lowest)
                while j < tile:
                    if kept[row] == ids.shape[1]:
                        left, new_floor = _halve(values[row], ids[row], np.int64(kept[row]), lowest)
                        kept[row] = left
                        floor[row] = new_floor
                        lowest = max(lowest, new_floor)
                    if z[j] > lowest:
                        ids[row, kept[row]] = begin + first + j
                        values[row, kept[row]] = z[j]
                        kept[row] += 1
                    j = next_above(address(z), j + 1, tile, lowest)


def head_chunk(
    pool: ThreadPool,
    products: np.ndarray,
    first: int,
    softcap: float,
    inv_temperature: float,
    forbidden: np.ndarray,
    forbidden_row: int,
    state: HeadState,
) -> None:
    """Update `state` with the raw products float32 [rows, C] of tokens first..first+C.

    first, and C except for the last chunk, are multiples of state.tile. forbidden: int32 ids that count as probability
    zero in row forbidden_row (-1: in none).
    """
    count = products.shape[1]
    check(products, "products", (state.rows, count))
    check(forbidden, "forbidden", forbidden.shape, np.int32)
    assert first % state.tile == 0, "chunk does not begin at a tile"
    assert 0 <= first <= state.vocab - count, "chunk outside of the vocabulary"
    assert count % state.tile == 0 or first + count == state.vocab, "only the last chunk may end inside a tile"
    s = state
    arrays = (s.largest, s.argmax, s.total, s.weighted, s.tile_largest, s.tile_total, s.ids, s.values, s.kept, s.floor)
    settings = (first, float(softcap), float(inv_temperature), forbidden, forbidden_row, s.tile)
    grain = row_grain(pool, s.rows, products.size * 8)
    pool.run(_head_chunk, s.rows, products, *settings, *arrays, grain=grain)


@kernel
def _threshold(e, count, total, floor, limit):
    """The highest threshold t (0: none but all) for which the tokens with exp(z - max) < t, each below max(t, floor),
    have probabilities of a 2-norm of at most `limit`; -1 if there is none."""
    mass = 0.0
    for i in range(count):
        mass += np.float64(e[i])
    if math.sqrt(np.float64(floor) * max(total - mass, 0.0)) > limit * total:
        return np.float32(-1)
    low, high = np.float32(0), np.float32(1)
    for _ in range(40):
        middle = np.sqrt(low * high) if low > np.float32(0) else high * np.float32(0.125)
        if middle <= low or middle >= high:
            break
        mass = 0.0
        for i in range(count):
            mass += np.float64(e[i]) if e[i] >= middle else 0.0
        if math.sqrt(np.float64(max(middle, floor)) * max(total - mass, 0.0)) <= limit * total:
            low = middle
        else:
            high = middle
    return low


@kernel
def _finish(
    largest, total, weighted, tile_largest, tile_total, ids, values, kept, floor, uniforms, wanted, allowed,
    entropy, tile, residual, soft_ids, soft_probabilities, soft_counts, dropped, decided, counter, jobs, grain,
):  # fmt: skip
    """Job: a row."""
    e = np.empty(ids.shape[1], np.float32)
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for row in range(claimed, min(claimed + grain, jobs)):
            value = math.log(total[row]) - weighted[row] / total[row]
            entropy[row] = 0.0 if value < 0.0 else value  # keeps NaN: broken logits must not look certain
            target = uniforms[row] * total[row]
            passed = 0.0
            for t in range(tile_total.shape[1]):
                if tile_total[row, t] <= 0.0:
                    continue
                scale = math.exp(np.float64(tile_largest[row, t]) - np.float64(largest[row]))
                if scale == 0.0:
                    continue
                tile[row] = t
                residual[row] = (target - passed) / scale
                passed += tile_total[row, t] * scale
                if passed > target:
                    break
            count = kept[row]
            for i in range(count):
                e[i] = exp32(values[row, i] - largest[row])
            # no token that is not among the candidates is above this
            highest = max(exp32(floor[row] - largest[row]), exp32(np.float32(-DEPTH)))
            low = _threshold(e, count, total[row], highest, wanted)
            if low < np.float32(0):
                low = _threshold(e, count, total[row], highest, allowed)
            decided[row] = low >= np.float32(0)
            if not decided[row]:
                low = np.float32(EXACT * total[row])
            used = 0
            mass = 0.0
            for i in range(count):
                if e[i] >= low:
                    soft_ids[row, used] = ids[row, i]
                    soft_probabilities[row, used] = np.float32(np.float64(e[i]) / total[row])
                    mass += np.float64(e[i])
                    used += 1
            soft_counts[row] = used
            dropped[row] = max(0.0, 1.0 - mass / total[row])


@dataclass(frozen=True, eq=False)
class HeadSummary:
    """What `finish` makes of a HeadState. entropy: float64 [rows], nats. tile: int32 [rows], the sampling tile;
    residual: float64 [rows], what the sum of its exponentials must exceed. soft_*: the candidates, see HeadStatistics.
    dropped: float64 [rows], the probability that the candidates miss; decided: bool [rows], whether the rest is
    small enough (DROPPED_*)."""

    entropy: np.ndarray
    argmax: np.ndarray
    tile: np.ndarray
    residual: np.ndarray
    soft_ids: np.ndarray
    soft_probabilities: np.ndarray
    soft_counts: np.ndarray
    dropped: np.ndarray
    decided: np.ndarray


def finish(pool: ThreadPool, state: HeadState, uniforms: np.ndarray, allowed: float = DROPPED_F32) -> HeadSummary:
    """Close the statistics; uniforms: float64 [rows] in [0, 1), one random number a row; allowed: see DROPPED_*."""
    rows = state.rows
    check(uniforms, "uniforms", (rows,), np.float64)
    summary = HeadSummary(
        np.zeros(rows),
        state.argmax,
        np.zeros(rows, np.int32),
        np.zeros(rows),
        np.zeros(state.ids.shape, np.int32),
        np.zeros(state.ids.shape, np.float32),
        np.zeros(rows, np.int32),
        np.zeros(rows),
        np.zeros(rows, np.bool_),
    )
    s, r = state, summary
    sums = (s.largest, s.total, s.weighted, s.tile_largest, s.tile_total)
    taken = (*sums, s.ids, s.values, s.kept, s.floor, uniforms, WANTED, allowed)
    given = (r.entropy, r.tile, r.residual, r.soft_ids, r.soft_probabilities, r.soft_counts, r.dropped, r.decided)
    pool.run(_finish, rows, *taken, *given, grain=row_grain(pool, rows, rows * state.capacity * 16))
    return summary


@kernel
def _sample_in_tile(
    products, tiles, residual, width, vocab, softcap, inv_temperature, forbidden, forbidden_row, sampled,
    counter, jobs, grain,
):  # fmt: skip
    """Job: a row."""
    z = np.empty(width, np.float32)
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for row in range(claimed, min(claimed + grain, jobs)):
            begin = np.int64(tiles[row]) * width
            n = min(width, vocab - begin)
            squash(products[row, :n], softcap, inv_temperature, z)
            if row == forbidden_row:
                for token in forbidden:
                    if begin <= token < begin + n:
                        z[token - begin] = np.float32(-np.inf)
            top = max_of(address(z), n)
            passed = 0.0
            for j in range(n):
                e = exp32(z[j] - top)
                if e > np.float32(0):
                    sampled[row] = begin + j
                    passed += np.float64(e)
                    if passed > residual[row]:
                        break


def sample_in_tile(
    pool: ThreadPool,
    products: np.ndarray,
    summary: HeadSummary,
    state: HeadState,
    softcap: float,
    inv_temperature: float,
    forbidden: np.ndarray,
    forbidden_row: int,
) -> np.ndarray:
    """int32 [rows]: in each row's tile, the first token whose cumulative sum, in id order, exceeds the residual (the
    last one of nonzero probability if rounding leaves none). products: float32 [rows, tile], raw products of the
    tokens of each row's own tile."""
    check(products, "products", (state.rows, state.tile))
    sampled = np.zeros(state.rows, np.int32)
    args = (products, summary.tile, summary.residual, state.tile, state.vocab)
    settings = (float(softcap), float(inv_temperature), forbidden, forbidden_row, sampled)
    pool.run(_sample_in_tile, state.rows, *args, *settings, grain=row_grain(pool, state.rows, products.size * 8))
    return sampled


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """One denoising step's head. argmax, sampled: int32 [M]; entropy: float64 [M], nats.

    soft_ids int32, soft_probabilities float32 [M, capacity], soft_counts int32 [M]: the tokens that matter for the
    self-conditioning embedding; dropped: float64 [M], the probability of all others. undecided: int32 [u], the rows
    whose other tokens matter too (DROPPED_*); for them undecided_x (float32 [u, H]), largest and total (float64) allow
    the dense product (soft.soft_embedding).
    """

    argmax: np.ndarray
    sampled: np.ndarray
    entropy: np.ndarray
    soft_ids: np.ndarray
    soft_probabilities: np.ndarray
    soft_counts: np.ndarray
    dropped: np.ndarray
    undecided: np.ndarray
    undecided_x: np.ndarray
    largest: np.ndarray
    total: np.ndarray
    softcap: float
    temperature: float
    forbidden_row: int
    forbidden: np.ndarray
    quantized: bool


def chunk_tokens(rows: int, vocab: int) -> int:
    """Tokens of one chunk of the vocabulary: about 4 MB of products."""
    return min(-(-vocab // TOKENS), max(4, 2**20 // (rows * TOKENS))) * TOKENS


def head_statistics(
    pool: ThreadPool,
    x: np.ndarray,
    table: Weight,
    softcap: float,
    temperature: float,
    uniforms: np.ndarray,
    forbidden_row: int = -1,
    forbidden_ids: np.ndarray | None = None,
    quantized: bool = True,
    capacity: int = CANDIDATES,
) -> HeadStatistics:
    """x: float32 [M, H], normed; table: (V, H). See HeadStatistics; the logits are never held.

    uniforms: float64 [M]. forbidden_ids: int32 ids with probability zero in row forbidden_row (-1: in none).
    quantized: int8 activations (q40 and q80 tables only).
    """
    rows = x.shape[0]
    vocab = table.rows
    check(x, "x", (rows, table.columns))
    forbidden = np.zeros(0, np.int32) if forbidden_ids is None else np.ascontiguousarray(forbidden_ids, np.int32)
    settings = (float(softcap), 1.0 / temperature, forbidden, forbidden_row)
    with pool.lock:
        state = HeadState(rows, vocab, capacity, pool=pool)
        groups = one_group(rows)
        if quantized:
            packed = quantize_rows(pool, x, scratch_quantized(pool, "head.x", rows, table.columns, groups))
        else:
            packed = pack_rows(pool, x, groups, name="head.x")
        step = chunk_tokens(rows, vocab)
        for first in range(0, vocab, step):
            count = min(step, vocab - first)
            products = pool.scratch("head.products", np.float32, rows * count).reshape(rows, count)
            grouped_product(pool, packed, groups, table.part(first, count), products)
            head_chunk(pool, products, first, *settings, state)
        summary = finish(pool, state, uniforms, DROPPED_INT8 if quantized else DROPPED_F32)
        products = _tile_products(pool, x, table, summary.tile, quantized)
        sampled = sample_in_tile(pool, products, summary, state, *settings)
    undecided = np.flatnonzero(~summary.decided).astype(np.int32)
    return HeadStatistics(
        summary.argmax, sampled, summary.entropy,
        summary.soft_ids, summary.soft_probabilities, summary.soft_counts, summary.dropped,
        undecided, x[undecided], state.largest[undecided], state.total[undecided],
        float(softcap), float(temperature), forbidden_row, forbidden, quantized,
    )  # fmt: skip


def _tile_products(pool: ThreadPool, x: np.ndarray, table: Weight, tiles: np.ndarray, quantized: bool) -> np.ndarray:
    """float32 [M, TOKENS] in scratch: each row's products with the tokens of its own tile.

    A grouped product with the vocabulary's tiles as the matrices and one group of one row for each row.
    """
    rows = x.shape[0]
    order = np.arange(rows, dtype=np.int32)
    groups = Groups(tiles, np.arange(rows + 1, dtype=np.int32), order, np.ones(rows, np.int32))
    if quantized:
        packed = quantize_rows(pool, x, scratch_quantized(pool, "head.singles", rows, table.columns, groups))
    else:
        packed = pack_rows(pool, x, groups, name="head.singles")
    products = pool.scratch("head.tile_products", np.float32, rows * TOKENS).reshape(rows, TOKENS)
    grouped_product(pool, packed, groups, table, products, tiles=TOKENS // TILE)
    return products


@kernel
def _softcap_rows(out, softcap, counter, jobs, grain):
    """Job: a row."""
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for row in range(claimed, min(claimed + grain, jobs)):
            squash(out[row], softcap, 1.0, out[row])


def head_logits(
    pool: ThreadPool, x: np.ndarray, table: Weight, softcap: float, out: np.ndarray, quantized: bool
) -> np.ndarray:
    """out = softcap * tanh(x @ table.T / softcap): the full float32 [M, V], for tests and small models."""
    rows = x.shape[0]
    check(out, "out", (rows, table.rows))
    linear(pool, quantize_rows(pool, x, empty_quantized(rows, table.columns)) if quantized else x, table, out)
    pool.run(_softcap_rows, rows, out, float(softcap), grain=row_grain(pool, rows, out.size * 4))
    return out
