"""Attention over a KV cache in each of its formats, against float64 softmax attention on the values it holds."""

import numpy as np
import pytest

from ddllm_vk import cache as kv_cache
from ddllm_vk.cpu import cache_rows
from ddllm_vk.cpu.attention_tiles import NARROW
from ddllm_vk.cpu.kernels import CacheRows, ThreadPool, attention, empty_cache, store_rows
from ddllm_vk.quants import dequantize, quantize

FORMATS = ("f32", "f16", "q80")
NAN_BYTE = 0xFF  #: a row of such bytes is NaN in every format


def cache_of(pool: ThreadPool, fmt: str, x: np.ndarray) -> CacheRows:
    """x: [kv, slots, hd] in a cache with more slots than that, and NaN in all its bytes before."""
    cache = empty_cache(fmt, x.shape[0], -(-x.shape[1] // cache_rows.KEYS) * cache_rows.KEYS, x.shape[2])
    cache.data[:] = NAN_BYTE
    store_rows(pool, np.ascontiguousarray(x.transpose(1, 0, 2)), cache, 0)
    return cache


def multiplied(fmt: str, x: np.ndarray) -> np.ndarray:
    """What the products see of queries, keys and values: bfloat16 where the kernels are narrow."""
    return dequantize("bf16", quantize("bf16", x)) if NARROW and fmt != "f32" else x


def largest_error(fmt: str, v: np.ndarray) -> float:
    """A probability is rounded to the 8 bits of a bfloat16, in the sum and in the total."""
    return np.abs(v).max(initial=0) / 128 if NARROW and fmt != "f32" else 3e-5


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(3)


def expected_attention(q, k, v, lo, hi):
    rows, heads, size = q.shape
    shared = heads // k.shape[0]
    out = np.zeros((rows, heads, size))
    for t in range(rows):
        for h in range(heads):
            keys, values = (a[h // shared, lo[t] : hi[t]].astype(np.float64) for a in (k, v))
            if len(keys):
                scores = keys @ q[t, h]
                p = np.exp(scores - scores.max())
                out[t, h] = p / p.sum() @ values
    return out.reshape(rows, -1)


def ranges(kind: str, rows: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """lo and hi; slots capacity - 5.. are never used."""
    rng = np.random.default_rng(1)
    position = np.arange(rows) + capacity - 5 - rows
    lo, hi = {
        "canvas": (np.zeros(rows), np.full(rows, capacity - 5)),
        "causal": (np.zeros(rows), position + 1),
        "sliding": (np.maximum(position - 9, 0), position + 1),
        "random": (rng.integers(0, capacity // 2, rows), rng.integers(capacity // 2 + 1, capacity - 5, rows)),
        "disjoint": (np.where(position % 2, 2, capacity - 8), np.where(position % 2, 5, capacity - 6)),
        "some empty": (np.full(rows, 4), np.where(position % 3, 4, capacity - 5)),
    }[kind]
    return lo.astype(np.int32), hi.astype(np.int32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["canvas", "causal", "sliding", "random", "disjoint", "some empty"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv", "size", "capacity"),
    [
        (1, 1, 1, 32, 70),
        (7, 4, 2, 32, 100),
        (33, 8, 1, 64, 300),
        (64, 4, 4, 256, 140),
        (20, 2, 2, 512, 290),
        (5, 2, 1, 40, 70),
        (17, 3, 3, 5, 200),
    ],
)
def test_attention(fmt, kind, rows, heads, kv, size, capacity, pool):
    rng = np.random.default_rng(2)
    q = 0.3 * rng.standard_normal((rows, heads, size), dtype=np.float32)
    k, v = rng.standard_normal((2, kv, capacity, size), dtype=np.float32)
    lo, hi = ranges(kind, rows, capacity)
    used = np.zeros(capacity, bool)
    for first, last in zip(lo, hi, strict=True):
        used[first:last] = True
    stored_k, stored_v = cache_of(pool, fmt, k), cache_of(pool, fmt, v)
    k, v = multiplied(fmt, stored_k.float32()), multiplied(fmt, stored_v.float32())
    expected = expected_attention(multiplied(fmt, q), k, v, lo, hi)
    # what no row attends to may hold anything: NaN for instance
    for cache in (stored_k, stored_v):
        cache.data[:, :capacity][:, ~used] = NAN_BYTE
    out = np.full((rows, heads * size), np.nan, np.float32)
    attention(pool, q, stored_k, stored_v, lo, hi, out)
    assert np.abs(out - expected).max() <= largest_error(fmt, v[:, :capacity][:, used])


@pytest.mark.parametrize("fmt", FORMATS)
def test_errors_of_rounding_average_out(fmt, pool):
    """Over many slots the errors of a row are independent: much smaller than a single one's bound."""
    rng = np.random.default_rng(8)
    q = rng.standard_normal((30, 4, 64), dtype=np.float32) / 8
    k, v = (cache_of(pool, fmt, rng.standard_normal((2, 1000, 64), dtype=np.float32)) for _ in "kv")
    lo, hi = np.zeros(30, np.int32), np.full(30, 1000, np.int32)
    out = attention(pool, q, k, v, lo, hi, np.empty((30, 256), np.float32))
    expected = expected_attention(q, k.float32(), v.float32(), lo, hi)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < (4e-3 if NARROW and fmt != "f32" else 1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(fmt, pool):
    rng = np.random.default_rng(3)
    rows, heads, kv, size, capacity = 150, 4, 2, 64, 500
    q = rng.standard_normal((rows, heads, size), dtype=np.float32)
    k, v = (cache_of(pool, fmt, rng.standard_normal((kv, capacity, size), dtype=np.float32)) for _ in "kv")
    lo, hi = ranges("random", rows, capacity)

    def run(first: int, last: int, threads: ThreadPool) -> np.ndarray:
        out = np.empty((last - first, heads * size), np.float32)
        return attention(threads, q[first:last].copy(), k, v, lo[first:last].copy(), hi[first:last].copy(), out)

    together = run(0, rows, pool)
    assert np.array_equal(run(0, rows, ThreadPool(1)), together)
    for first, last in ((0, 1), (149, 150), (40, 47), (10, 110)):
        assert np.array_equal(run(first, last, pool), together[first:last])


@pytest.mark.parametrize("fmt", FORMATS)
def test_large_scores_do_not_overflow(fmt, pool):
    q = np.full((2, 1, 32), 30, np.float32)
    k = np.ones((1, 80, 32), np.float32)
    k[0, 70] = 2
    v = np.arange(80, dtype=np.float32)[None, :, None] * np.ones((1, 1, 32), np.float32)
    out = np.empty((2, 32), np.float32)
    attention(
        pool, q, cache_of(pool, fmt, k), cache_of(pool, fmt, v), np.zeros(2, np.int32), np.full(2, 80, np.int32), out
    )
    assert np.abs(out - 70).max() <= (0.05 if fmt == "q80" else 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_constant_value_stays(fmt, pool):
    """Probabilities sum to one however they are rounded."""
    q = np.random.default_rng(5).standard_normal((9, 2, 32), dtype=np.float32)
    k = np.random.default_rng(6).standard_normal((1, 333, 32), dtype=np.float32)
    v = np.full((1, 333, 32), 1.5, np.float32)
    out = np.empty((9, 64), np.float32)
    attention(
        pool, q, cache_of(pool, fmt, k), cache_of(pool, fmt, v), np.zeros(9, np.int32), np.full(9, 333, np.int32), out
    )
    value = 1.5 if fmt != "q80" else float(np.float16(1.5 / 127)) * 127
    assert np.abs(out / value - 1).max() < (1 / 256 if fmt == "q80" and NARROW else 1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_damaged_row_is_not_hidden(fmt, pool):
    """A query that is not a number gives no numbers, in its own row only."""
    q = np.ones((3, 1, 32), np.float32)
    q[1, 0, 7] = np.nan
    k = cache_of(pool, fmt, np.ones((1, 130, 32), np.float32))
    out = attention(pool, q, k, k, np.zeros(3, np.int32), np.full(3, 130, np.int32), np.empty((3, 32), np.float32))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_ranges_outside_of_the_cache_are_refused(pool):
    q, k = np.zeros((1, 1, 32), np.float32), empty_cache("f32", 1, 128, 32)
    for lo, hi in ((-1, 4), (0, 129)):
        with pytest.raises(AssertionError):
            attention(pool, q, k, k, np.array([lo], np.int32), np.array([hi], np.int32), np.empty((1, 32), np.float32))


@pytest.mark.parametrize("size", [4, 32, 40, 96])
@pytest.mark.parametrize("fmt", FORMATS)
def test_store_rows(fmt, size, pool):
    """What is stored is what quants.py makes of the rows, zeros behind them; the other slots stay."""
    cache = empty_cache(fmt, 2, 128, size)
    cache.data[:] = 0
    x = np.random.default_rng(4).standard_normal((3, 2, size), dtype=np.float32)
    x[0] *= 1e-5  # float16 denormals
    x[1, 0, 0], x[1, 1, 0] = 60000, -np.float32(2**-24)
    x[2, 0] = 0
    store_rows(pool, x, cache, 6)
    whole = np.pad(x, [(0, 0), (0, 0), (0, -size % 32)])
    expected = dequantize(fmt, quantize(fmt, whole))[..., :size].transpose(1, 0, 2)
    assert np.array_equal(cache.float32()[:, 6:9], expected)
    assert not cache.data[:, :6].any()
    assert not cache.data[:, 9:].any()
    for slot in (-1, 126):
        with pytest.raises(AssertionError):
            store_rows(pool, x, cache, slot)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the NaN
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_stays_so(fmt, pool):
    cache = empty_cache(fmt, 1, 128, 32)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 1, 32), np.float32)
        x[0, 0, 3] = bad
        store_rows(pool, x, cache, 0)
        assert not np.isfinite(cache.float32()[0, 0, 3])


def test_every_float16_is_rounded_to_nearest_even(pool):
    """All float16 values, the floats halfway between two of them, and their neighbours."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([halves, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(1e9))])
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, -len(x) % 64)).reshape(-1, 1, 64)
    cache = empty_cache("f16", 1, -(-len(x) // 128) * 128, 64)
    store_rows(pool, x, cache, 0)
    assert np.array_equal(cache.float32()[0, : len(x)], x[:, 0].astype(np.float16).astype(np.float32))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of slots never written
@pytest.mark.parametrize("fmt", FORMATS)
def test_resized_caches_hold_the_same_rows(fmt, pool):
    x = np.random.default_rng(7).standard_normal((2, 128, 40), dtype=np.float32)
    cache = cache_of(pool, fmt, x)
    rows = cache.float32()
    larger = cache.resized(256, 0, 128)
    assert larger.capacity == 256
    assert np.array_equal(larger.float32()[:, :128], rows)
    moved = larger.resized(256, 28, 100)
    assert moved is larger
    assert np.array_equal(moved.float32()[:, :100], rows[:, 28:])


def test_kernels_and_cache_agree_on_whole_tiles():
    assert kv_cache.SLOTS % cache_rows.KEYS == 0
    assert set(kv_cache.FORMATS) == set(cache_rows.FORMATS)
