"""Attention over a KV cache, against float64 softmax attention."""

import numpy as np
import pytest

from ddllm_vk.cpu.kernels import ThreadPool, attention, store_rows


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


@pytest.mark.parametrize("kind", ["canvas", "causal", "sliding", "random", "disjoint", "some empty"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv", "size", "capacity"),
    [
        (1, 1, 1, 32, 70),
        (7, 4, 2, 32, 100),
        (33, 8, 1, 64, 300),
        (64, 4, 4, 256, 140),
        (20, 2, 2, 512, 90),
        (5, 2, 1, 40, 70),
    ],
)
def test_attention(kind, rows, heads, kv, size, capacity, pool):
    rng = np.random.default_rng(2)
    q = 0.3 * rng.standard_normal((rows, heads, size), dtype=np.float32)
    k, v = rng.standard_normal((2, kv, capacity, size), dtype=np.float32)
    lo, hi = ranges(kind, rows, capacity)
    used = np.zeros(capacity, bool)
    for first, last in zip(lo, hi, strict=True):
        used[first:last] = True
    expected = expected_attention(q, k, v, lo, hi)
    # what no row attends to may hold anything
    k[:, ~used] = np.nan
    v[:, ~used] = np.nan
    out = np.full((rows, heads * size), np.nan, np.float32)
    attention(pool, q, k, v, lo, hi, out)
    assert np.abs(out - expected).max() < 3e-5


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(pool):
    rng = np.random.default_rng(3)
    rows, heads, kv, size, capacity = 150, 4, 2, 64, 500
    q = rng.standard_normal((rows, heads, size), dtype=np.float32)
    k, v = rng.standard_normal((2, kv, capacity, size), dtype=np.float32)
    lo, hi = ranges("random", rows, capacity)

    def run(first: int, last: int, threads: ThreadPool) -> np.ndarray:
        out = np.empty((last - first, heads * size), np.float32)
        return attention(threads, q[first:last].copy(), k, v, lo[first:last].copy(), hi[first:last].copy(), out)

    together = run(0, rows, pool)
    assert np.array_equal(run(0, rows, ThreadPool(1)), together)
    for first, last in ((0, 1), (149, 150), (40, 47), (10, 110)):
        assert np.array_equal(run(first, last, pool), together[first:last])


def test_large_scores_do_not_overflow(pool):
    q = np.full((2, 1, 32), 30, np.float32)
    k = np.ones((1, 80, 32), np.float32)
    k[0, 70] = 2
    v = np.arange(80, dtype=np.float32)[None, :, None] * np.ones((1, 1, 32), np.float32)
    out = np.empty((2, 32), np.float32)
    attention(pool, q, k, v, np.zeros(2, np.int32), np.full(2, 80, np.int32), out)
    assert np.array_equal(out, np.full((2, 32), 70, np.float32))


def test_ranges_outside_of_the_cache_are_refused(pool):
    q, k = np.zeros((1, 1, 32), np.float32), np.zeros((1, 8, 32), np.float32)
    for lo, hi in ((-1, 4), (0, 9)):
        with pytest.raises(AssertionError):
            attention(pool, q, k, k, np.array([lo], np.int32), np.array([hi], np.int32), np.empty((1, 32), np.float32))


def test_store_rows(pool):
    cache = np.zeros((2, 10, 4), np.float32)
    x = np.random.default_rng(4).standard_normal((3, 2, 4), dtype=np.float32)
    store_rows(pool, x, cache, 6)
    for row in range(3):
        assert np.array_equal(cache[:, 6 + row], x[row])
    assert not cache[:, :6].any()
    assert not cache[:, 9:].any()
    for slot in (-1, 8):
        with pytest.raises(AssertionError):
            store_rows(pool, x, cache, slot)
