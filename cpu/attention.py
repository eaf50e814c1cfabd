"""Attention of a canvas or a prompt over one layer's KV cache, with a running softmax: no [rows, slots] matrix exists.

Work is cut into blocks of query rows that share keys (rows times the query heads of one KV head) and tiles of KEYS
cache slots at multiples of KEYS, wherever a row's own range begins: a row's result does not depend on its neighbours.
"""

import numpy as np

from ddllm_vk.cpu.emit import ROWS, float_tile, transpose_16
from ddllm_vk.cpu.intrinsics import address, exp32, load_f32, max_of, store_f32, sum_of, take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import check
from ddllm_vk.cpu.threads import ThreadPool

#: Cache slots of one tile: a multiple of 16.
KEYS = 64
#: Query rows (row and head) of one block; a multiple of ROWS or near one, large enough to amortise packing the keys.
QUERIES = ROWS * max(1, 84 // ROWS)


@kernel
def _pack_keys(k, kv, first, last, keys):
    """Slots first..first+KEYS-1 of k[kv], transposed, at address `keys`: float32 [KEYS/16][hd][16]. last: slots from
    there on are not read but zero."""
    size = k.shape[2]
    for part in range(KEYS // 16):
        target = keys + part * size * 64
        slot = first + part * 16
        if slot + 16 <= last and size % 16 == 0:
            source = address(k) + (kv * k.shape[1] + slot) * size * 4
            for d in range(0, size, 16):
                transpose_16(source + d * 4, size * 4, target + d * 64)
        else:
            for d in range(size):
                for j in range(16):
                    value = k[kv, slot + j, d] if slot + j < last else np.float32(0)
                    store_f32(target, d * 16 + j, value)


@kernel
def _attention(q, k, v, lo, hi, out, queries, counter, jobs, grain):
    """Job: a block of `queries` (row, head) pairs of one KV head."""
    rows, heads, size = q.shape
    shared = heads // k.shape[0]
    padded = (size + 15) // 16 * 16
    blocks = (rows * shared + queries - 1) // queries
    memory = np.empty(queries * (size + 2 * padded + 2 * KEYS + 2) + KEYS * (size + padded) + 256, np.float32)
    largest = np.empty(queries, np.float32)
    total = np.empty(queries, np.float32)
    used = np.empty(KEYS, np.bool_)
    while True:
        # taken here, not before the loop: an array whose last use is taking its address is freed at once
        base = (address(memory) + 63) // 64 * 64
        at_keys = base  # [KEYS/16][hd][16]
        at_values = at_keys + KEYS * size * 4  # [KEYS][padded]
        at_q = at_values + KEYS * padded * 4  # row tiles [hd][m]
        at_sums = at_q + (queries * size + 15) // 16 * 64  # [queries][padded]
        at_scores = at_sums + queries * padded * 4  # [queries][KEYS]
        at_p = at_scores + queries * KEYS * 4  # row tiles [KEYS][m]
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for job in range(claimed, min(claimed + grain, jobs)):
            kv = job // blocks
            begin = (job - kv * blocks) * queries
            n = min(queries, rows * shared - begin)
            tiles = (n + ROWS - 1) // ROWS
            low, high = np.int64(2**62), np.int64(0)
            inner_low, inner_high = np.int64(0), np.int64(2**62)
            for i in range(n):
                t = (begin + i) // shared
                head = kv * shared + (begin + i) % shared
                tile = i // ROWS
                m = min(ROWS, n - tile * ROWS)
                for d in range(size):
                    store_f32(at_q, tile * ROWS * size + d * m + i - tile * ROWS, q[t, head, d])
                for d in range(padded):
                    store_f32(at_sums, i * padded + d, np.float32(0))
                largest[i] = np.float32(-np.inf)
                total[i] = np.float32(0)
                if hi[t] > lo[t]:
                    low = min(low, np.int64(lo[t]))
                    high = max(high, np.int64(hi[t]))
                inner_low = max(inner_low, np.int64(lo[t]))
                inner_high = min(inner_high, np.int64(hi[t]))
            for first in range(low // KEYS * KEYS, high, KEYS):
                whole = first >= inner_low and first + KEYS <= inner_high
                _pack_keys(k, kv, first, min(high, first + KEYS), at_keys)
                for i in range(n * KEYS):
                    store_f32(at_scores, i, np.float32(0))
                for part in range(KEYS // 16):
                    for tile in range(tiles):
                        float_tile(
                            min(ROWS, n - tile * ROWS),
                            at_q + tile * ROWS * size * 4,
                            at_keys + part * size * 64,
                            64,
                            size,
                            at_scores + (tile * ROWS * KEYS + part * 16) * 4,
                            KEYS * 4,
                        )
                if not whole:
                    used[:] = False
                for i in range(n):
                    scores = at_scores + i * KEYS * 4
                    if not whole:
                        t = (begin + i) // shared
                        for j in range(KEYS):
                            if first + j < lo[t] or first + j >= hi[t]:
                                store_f32(scores, j, np.float32(-np.inf))
                            else:
                                used[j] = True
                    peak = max(largest[i], max_of(scores, KEYS))
                    if peak == np.float32(-np.inf):
                        peak = np.float32(0)  # nothing to attend to so far: every exp below is 0
                    correction = exp32(largest[i] - peak)
                    for j in range(KEYS):
                        store_f32(scores, j, exp32(load_f32(scores, j) - peak))
                    added = sum_of(scores, KEYS)
                    total[i] = total[i] * correction + added
                    if total[i] != np.float32(0):
                        largest[i] = peak
                    if correction != np.float32(1):
                        sums = at_sums + i * padded * 4
                        for d in range(padded):
                            store_f32(sums, d, load_f32(sums, d) * correction)
                    tile = i // ROWS
                    m = min(ROWS, n - tile * ROWS)
                    p = at_p + (tile * ROWS * KEYS + i - tile * ROWS) * 4
                    for j in range(KEYS):
                        store_f32(p, j * m, load_f32(scores, j))
                values = address(v) + (kv * v.shape[1] + first) * size * 4
                stride = size * 4
                if not whole or padded != size:
                    # What no row attends to may be anything, and 0 * NaN is NaN.
                    for j in range(KEYS):
                        if whole or used[j]:
                            for d in range(size):
                                store_f32(at_values, j * padded + d, v[kv, first + j, d])
                            for d in range(size, padded):
                                store_f32(at_values, j * padded + d, np.float32(0))
                        else:
                            for d in range(padded):
                                store_f32(at_values, j * padded + d, np.float32(0))
                    values = at_values
                    stride = padded * 4
                for tile in range(tiles):
                    for d in range(0, padded, 16):
                        float_tile(
                            min(ROWS, n - tile * ROWS),
                            at_p + tile * ROWS * KEYS * 4,
                            values + d * 4,
                            stride,
                            KEYS,
                            at_sums + (tile * ROWS * padded + d) * 4,
                            padded * 4,
                        )
            for i in range(n):
                t = (begin + i) // shared
                head = kv * shared + (begin + i) % shared
                inverse = np.float32(0)
                if total[i] != np.float32(0):
                    inverse = np.float32(1) / total[i]
                for d in range(size):
                    out[t, head * size + d] = load_f32(at_sums, i * padded + d) * inverse


def attention(
    pool: ThreadPool,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lo: np.ndarray,
    hi: np.ndarray,
    out: np.ndarray,
) -> np.ndarray:
    """out[t, h * hd : (h + 1) * hd] = softmax(q[t, h] . k[h // shared, s]) @ v[h // shared, s], lo[t] <= s < hi[t].

    q: float32 [T, heads, hd]; k, v: [kv, capacity, hd]; lo, hi: int32 [T]; out: [T, heads * hd]. Scale 1. This one form
    serves causal, sliding, image-block and canvas masks. Slots outside every row's range are never used: they may hold
    anything. A row with an empty range gives zeros.
    """
    rows, heads, size = q.shape
    kv, capacity = k.shape[:2]
    check(q, "q", (rows, heads, size))
    check(k, "k", (kv, capacity, size))
    check(v, "v", (kv, capacity, size))
    check(lo, "lo", (rows,), np.int32)
    check(hi, "hi", (rows,), np.int32)
    check(out, "out", (rows, heads * size))
    assert heads % kv == 0, f"{heads} query heads do not share {kv} KV heads evenly"
    if rows == 0:
        return out
    assert lo.min() >= 0, "lo: negative"
    assert hi.max() <= capacity, f"hi: beyond the cache's {capacity} slots"
    pairs = rows * (heads // kv)
    queries = QUERIES
    # few rows: smaller blocks, so that every thread has some
    while queries > ROWS and kv * -(-pairs // queries) < 2 * pool.threads:
        queries = max(ROWS, queries // 2 // ROWS * ROWS)
    jobs = kv * -(-pairs // queries)
    work = rows * heads * size * int((hi - lo).max(initial=0))
    pool.run(_attention, jobs, q, k, v, lo, hi, out, queries, grain=1 if work > 1_000_000 else jobs)
    return out
