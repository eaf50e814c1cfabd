"""Attention of a canvas or a prompt over one layer's KV cache, with a running softmax: no [rows, slots] matrix exists.

Work is cut into blocks of query rows that share keys (rows times the query heads of one KV head), and a block goes
through tiles of KEYS cache slots at multiples of KEYS, wherever a row's own range begins: a row's result does not
depend on its neighbours. A tile's keys and values are packed once a block, for all of the block's row tiles.
"""

import numpy as np

from ddllm_vk.cpu.attention_tiles import NARROW, ROWS, pack_rows, pack_values, score_tile, softmax_tile, weigh_tile
from ddllm_vk.cpu.cache_rows import FORMATS, KEYS, CacheRows
from ddllm_vk.cpu.intrinsics import address, load_f32, store_f32, store_u16, take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import check
from ddllm_vk.cpu.threads import ThreadPool

#: Most row tiles of one block: enough that packing a key tile costs little beside the products with it.
TILES = max(1, 512 // ROWS)


@kernel
def _block_bytes(tiles, padded):
    """Offsets of a block's buffers behind each other, and their sum last; padded: head size in whole blocks of 32."""
    sizes = (
        KEYS * padded * 4,  # keys
        KEYS * padded * 4,  # values
        16 * padded * 4,  # rows being packed
        tiles * ROWS * padded * 4 + 64,  # queries
        tiles * ROWS * padded * 4,  # sums
        ROWS * KEYS * 4,  # scores
        tiles * ROWS * 4 + 64,  # largest
        tiles * ROWS * 4 + 64,  # total
        ROWS * 4 + 64,  # factors
    )
    offsets = np.zeros(len(sizes) + 1, np.int64)
    for i in range(len(sizes)):
        offsets[i + 1] = offsets[i] + (sizes[i] + 63) // 64 * 64
    return offsets


@kernel
def _mask(lo, hi, begin, n, shared, first, scores):
    """Scores of slots outside of a row's range become -inf; n rows (row and head) from `begin` on."""
    for i in range(n):
        t = (begin + i) // shared
        row = scores + i * KEYS * 4
        for j in range(max(0, min(lo[t] - first, KEYS))):
            store_f32(row, j, np.float32(-np.inf))
        for j in range(max(0, min(hi[t] - first, KEYS)), KEYS):
            store_f32(row, j, np.float32(-np.inf))


@kernel
def _clear_unused(lo, hi, row, end, first, narrow, groups, values):
    """Packed values of slots that no row of row..end-1 attends to become 0: they may hold NaN, and 0 * NaN is NaN."""
    used = np.zeros(KEYS, np.bool_)
    for t in range(row, end):
        for j in range(max(0, lo[t] - first), min(KEYS, hi[t] - first)):
            used[j] = True
    for j in range(KEYS):
        if not used[j]:
            for g in range(groups):
                for c in range(16):
                    if narrow:
                        store_u16(values, (g * KEYS + j // 2 * 2) * 16 + c * 2 + j % 2, np.uint16(0))
                    else:
                        store_f32(values, (g * KEYS + j) * 16 + c, np.float32(0))


@kernel
def _pack_queries(q, kv, shared, begin, n, padded, narrow, stage, out):
    """Rows (row and head) begin..begin+n-1 of the KV head as row tiles; rows missing in the last tile are 0."""
    size = q.shape[2]
    words = padded // (2 if narrow else 1)
    for tile in range((n + ROWS - 1) // ROWS):
        for i in range(16):
            row = begin + tile * ROWS + i
            target = stage + i * padded * 4
            valid = size if i < ROWS and tile * ROWS + i < n else 0
            if valid:
                source = address(q) + (row // shared * q.shape[1] + kv * shared + row % shared) * size * 4
                for d in range(size):
                    store_f32(target, d, load_f32(source, d))
            for d in range(valid, padded):
                store_f32(target, d, np.float32(0))
        # a row of words is stored 16 wide and the next one over its end
        pack_rows(0, narrow, stage, padded * 4, padded // 32, out + tile * words * ROWS * 4, ROWS * 4)


@kernel
def _attention(q, fmt, narrow, k, v, lo, hi, out, tiles, memory, workers, counter, jobs, grain):
    """Job: a block of at most tiles * ROWS (row, head) pairs of one KV head. memory: uint8 [threads, bytes]."""
    rows, heads, size = q.shape
    shared = heads // k.shape[0]
    padded = (size + 31) // 32 * 32
    groups = padded // 16
    words = padded // (2 if narrow else 1)
    pairs = rows * shared
    blocks = (pairs + tiles * ROWS - 1) // (tiles * ROWS)
    row_bytes = k.shape[2]
    offsets = _block_bytes(tiles, padded) + address(memory) + take(workers, 1) * memory.shape[1]
    at_keys, at_values, at_stage, at_q, at_sums, at_scores, at_largest, at_total, at_factors = (
        offsets[0], offsets[1], offsets[2], offsets[3], offsets[4], offsets[5], offsets[6], offsets[7], offsets[8]
    )  # fmt: skip
    tile_low, tile_high = np.empty(tiles, np.int64), np.empty(tiles, np.int64)  # slots some row of a tile attends to
    whole_low, whole_high = np.empty(tiles, np.int64), np.empty(tiles, np.int64)  # and those that all do
    while True:
        claimed = take(counter, grain)
        if claimed >= jobs:
            return
        for job in range(claimed, min(claimed + grain, jobs)):
            kv = job // blocks
            # blocks of nearly the same number of tiles
            all_tiles = (pairs + ROWS - 1) // ROWS
            index = job - kv * blocks
            begin = index * all_tiles // blocks * ROWS
            n = min((index + 1) * all_tiles // blocks * ROWS, pairs) - begin
            count = (n + ROWS - 1) // ROWS
            _pack_queries(q, kv, shared, begin, n, padded, narrow, at_stage, at_q)
            for i in range(count * ROWS * padded):
                store_f32(at_sums, i, np.float32(0))
            for i in range(count * ROWS):
                store_f32(at_largest, i, np.float32(-np.inf))
                store_f32(at_total, i, np.float32(0))
            low, high = np.int64(2**62), np.int64(0)
            for tile in range(count):
                tile_low[tile], tile_high[tile] = np.int64(2**62), np.int64(0)
                whole_low[tile], whole_high[tile] = np.int64(0), np.int64(2**62)
                first_row = (begin + tile * ROWS) // shared
                last_row = (begin + min(tile * ROWS + ROWS, n) - 1) // shared
                for t in range(first_row, last_row + 1):
                    if hi[t] > lo[t]:
                        tile_low[tile] = min(tile_low[tile], np.int64(lo[t]))
                        tile_high[tile] = max(tile_high[tile], np.int64(hi[t]))
                    whole_low[tile] = max(whole_low[tile], np.int64(lo[t]))
                    whole_high[tile] = min(whole_high[tile], np.int64(hi[t]))
                low, high = min(low, tile_low[tile]), max(high, tile_high[tile])
            for first in range(low // KEYS * KEYS, high, KEYS):
                source = (kv * k.shape[1] + first) * row_bytes
                for part in range(KEYS // 16):
                    here = address(k) + source + part * 16 * row_bytes
                    pack_rows(fmt, narrow, here, row_bytes, padded // 32, at_keys + part * words * 64, 64)
                pack_values(fmt, narrow, address(v) + source, row_bytes, padded // 32, at_values)
                whole = True
                for tile in range(count):
                    whole = whole and first >= whole_low[tile] and first + KEYS <= whole_high[tile]
                if not whole:
                    _clear_unused(
                        lo, hi, begin // shared, (begin + n - 1) // shared + 1, first, narrow, groups, at_values
                    )
                for tile in range(count):
                    if first >= tile_high[tile] or first + KEYS <= tile_low[tile]:
                        continue
                    score_tile(narrow, at_q + tile * words * ROWS * 4, at_keys, words, at_scores)
                    if first < whole_low[tile] or first + KEYS > whole_high[tile]:
                        done = tile * ROWS
                        _mask(lo, hi, begin + done, min(ROWS, n - done), shared, first, at_scores)
                    state = tile * ROWS * 4
                    softmax_tile(narrow, at_scores, at_largest + state, at_total + state, at_factors)
                    weigh_tile(narrow, at_scores, at_values, at_factors, groups, at_sums + state * padded)
            for i in range(n):
                t, head = (begin + i) // shared, kv * shared + (begin + i) % shared
                total = load_f32(at_total, i)
                inverse = np.float32(0)
                if total != np.float32(0):
                    inverse = np.float32(1) / total
                sums = at_sums + i // ROWS * ROWS * padded * 4 + i % ROWS * 64
                target = address(out) + (t * heads + head) * size * 4
                for d in range(0, size, 16):
                    for c in range(min(16, size - d)):
                        store_f32(target + d * 4, c, load_f32(sums + d * ROWS * 4, c) * inverse)


def attention(
    pool: ThreadPool,
    q: np.ndarray,
    k: CacheRows,
    v: CacheRows,
    lo: np.ndarray,
    hi: np.ndarray,
    out: np.ndarray,
) -> np.ndarray:
    """out[t, h * hd : (h + 1) * hd] = softmax(q[t, h] . k[h // shared, s]) @ v[h // shared, s], lo[t] <= s < hi[t].

    q: float32 [T, heads, hd]; k, v: of the same format and capacity; lo, hi: int32 [T]; out: [T, heads * hd]. Scale 1.
    This one form serves causal, sliding, image-block and canvas masks. Slots outside every row's range are never used:
    they may hold anything. A row with an empty range gives zeros.

    Sums and softmax are float32. Products are float32 over a float32 cache. Over the others the queries, keys, values
    and probabilities are rounded to bfloat16 where the machine multiplies those (attention_tiles.NARROW).
    """
    rows, heads, size = q.shape
    kv, capacity = k.kv_heads, k.capacity
    check(q, "q", (rows, heads, size))
    assert (k.format, k.head_dim, k.data.shape) == (v.format, v.head_dim, v.data.shape), "k and v differ"
    assert k.head_dim == size, f"the cache's heads have {k.head_dim} values, the queries' {size}"
    check(lo, "lo", (rows,), np.int32)
    check(hi, "hi", (rows,), np.int32)
    check(out, "out", (rows, heads * size))
    assert heads % kv == 0, f"{heads} query heads do not share {kv} KV heads evenly"
    if rows == 0:
        return out
    assert lo.min() >= 0, "lo: negative"
    assert hi.max() <= capacity, f"hi: beyond the cache's {capacity} slots"
    tiles = -(-rows * (heads // kv) // ROWS)
    # several blocks a thread, so that none waits long for the last one
    blocks = max(-(-tiles // TILES), min(tiles, -(-4 * pool.threads // kv)))
    tiles = -(-tiles // blocks)
    jobs = kv * -(-rows * (heads // kv) // (tiles * ROWS))
    work = rows * heads * size * int((hi - lo).max(initial=0))
    with pool.lock:
        space = int(_block_bytes(tiles, -(-size // 32) * 32)[-1])
        memory = pool.scratch("attention", np.uint8, pool.threads * space)[: pool.threads * space]
        workers = pool.scratch("attention.workers", np.int64, 1)
        workers[0] = 0
        pool.run(
            _attention,
            jobs,
            q,
            FORMATS.index(k.format),
            int(NARROW and k.format != "f32"),
            k.data,
            v.data,
            lo,
            hi,
            out,
            tiles,
            memory.reshape(pool.threads, space),
            workers,
            grain=1 if work > 1_000_000 else jobs,
        )
    return out
