"""The head without logits, and the self-conditioning embedding, against float64 arithmetic on full logits."""

import numpy as np
import pytest
from distributions import check_sampled, entropy, softmax

from ddllm_vk import quants
from ddllm_vk.cpu.head import DROPPED_F32, TOKENS, HeadState, finish, head_chunk, sample_in_tile
from ddllm_vk.cpu.kernels import (
    ThreadPool,
    head_logits,
    head_statistics,
    pack,
    soft_embedding,
    soft_embedding_of_logits,
    sparse_rows,
    table_mean,
)

SOFTCAP, TEMPERATURE = 30.0, 0.7
SIZES = [(5, 512, 64), (19, 4096, 96), (3, 1003, 32), (4, 70, 32), (1, 16, 32)]


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(3)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def packed(fmt: str, values: np.ndarray, pool: ThreadPool):
    raw = quants.quantize(fmt, values)
    return pack(fmt, raw, values.shape, pool), quants.dequantize(fmt, raw).astype(np.float64)


@pytest.mark.parametrize("capacity", [8, 1024])
@pytest.mark.parametrize("gain", [0.05, 0.5, 4.0])
@pytest.mark.parametrize(("rows", "vocab", "hidden"), SIZES)
@pytest.mark.parametrize("fmt", ["q80", "f32"])
def test_head_and_soft_embedding(fmt, rows, vocab, hidden, gain, capacity, pool):
    table, values = packed(fmt, random(1, vocab, hidden), pool)
    x = gain * random(2, rows, hidden)
    uniforms = np.random.default_rng(3).random(rows)
    forbidden = np.array([3, 5, vocab - 1], np.int32)
    row = rows // 2
    stats = head_statistics(pool, x, table, SOFTCAP, TEMPERATURE, uniforms, row, forbidden, False, capacity)
    z = SOFTCAP * np.tanh(x @ values.T / SOFTCAP) / TEMPERATURE
    z[row, forbidden] = -np.inf
    p = softmax(z)
    assert np.array_equal(stats.argmax, p.argmax(axis=-1))
    check_sampled(stats.sampled, p, uniforms)
    assert np.abs(stats.entropy - entropy(p)).max() < 2e-5
    rest = p.copy()
    for r, (ids, count) in enumerate(zip(stats.soft_ids, stats.soft_counts, strict=True)):
        rest[r, ids[:count]] = 0
    assert np.abs(rest.sum(axis=1) - stats.dropped).max() < 2e-6
    decided = ~np.isin(np.arange(rows), stats.undecided)
    assert np.all(np.linalg.norm(rest[decided], axis=1) <= 1.01 * DROPPED_F32 + 1e-6)
    out = soft_embedding(pool, stats, table, table_mean(pool, table), 8.0, np.full((rows, hidden), np.nan, np.float32))
    # the mean row stands for what was left out: an error of its 2-norm in the directions of the rows around it
    spread = np.linalg.norm(values - values.mean(axis=0), ord=2)
    tolerance = 2e-5 * np.abs(values).max() + np.where(decided, np.linalg.norm(rest, axis=1), 0) * spread
    assert np.all(np.abs(out - 8 * p @ values) <= 8 * tolerance[:, None])


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "f16", "bf16"])
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 32), (1003, 96), (2100, 64)])
def test_table_mean(fmt, vocab, hidden, pool):
    table, values = packed(fmt, 1 + random(1, vocab, hidden), pool)
    assert np.abs(table_mean(pool, table) - values.mean(axis=0)).max() < 1e-5


def test_a_long_tail_of_improbable_tokens_is_no_reason_for_a_dense_product(pool):
    # one token of probability near 1 and thousands that share the rest, as at a late denoising step
    vocab, hidden = 8192, 256
    table, values = packed("f32", random(1, vocab, hidden) / 16, pool)
    x = 16 * values[[5, 900]].astype(np.float32)
    stats = head_statistics(pool, x, table, 30.0, 0.9, np.full(2, 0.5), quantized=False, capacity=512)
    p = softmax(30 * np.tanh(x @ values.T / 30) / 0.9)
    assert 5e-4 < stats.dropped.max() < 1e-2
    assert stats.undecided.size == 0
    out = soft_embedding(pool, stats, table, table_mean(pool, table), 1.0, np.empty((2, hidden), np.float32))
    assert np.linalg.norm(out - p @ values, axis=1).max() < 1e-4 * np.linalg.norm(values, axis=1).mean()


@pytest.mark.parametrize("fmt", ["q40", "q80"])
def test_quantised_activations(fmt, pool):
    table, values = packed(fmt, random(4, 700, 64), pool)
    x = random(5, 6, 64)
    blocks = quants.quantize_q80(x)[..., 2:].view(np.int8).astype(np.float64)
    exact = (blocks * (np.abs(x.reshape(6, 2, 32)).max(-1) / np.float32(127))[..., None]).reshape(6, 64)
    z = SOFTCAP * np.tanh(exact @ values.T / SOFTCAP)
    out = head_logits(pool, x, table, SOFTCAP, np.empty((6, 700), np.float32), True)
    assert np.abs(out - z).max() < 3e-5
    uniforms = np.random.default_rng(6).random(6)
    stats = head_statistics(pool, x, table, SOFTCAP, TEMPERATURE, uniforms, quantized=True)
    p = softmax(z / TEMPERATURE)
    assert np.array_equal(stats.argmax, p.argmax(axis=-1))
    check_sampled(stats.sampled, p, uniforms)
    soft = soft_embedding(pool, stats, table, table_mean(pool, table), 1.0, np.empty((6, 64), np.float32))
    assert np.abs(soft - p @ values).max() < 2e-4


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 16), (5, 333), (40, 1100)])
def test_full_logits_and_their_soft_embedding(fmt, rows, vocab, pool):
    table, values = packed(fmt, random(7, vocab, 64), pool)
    x = random(8, rows, 64)
    out = head_logits(pool, x, table, SOFTCAP, np.empty((rows, vocab), np.float32), False)
    assert np.abs(out - SOFTCAP * np.tanh(x @ values.T / SOFTCAP)).max() < 3e-5
    soft = soft_embedding_of_logits(pool, out, table, 2.0, np.empty((rows, 64), np.float32))
    assert np.abs(soft - 2 * softmax(out.astype(np.float64)) @ values).max() < 3e-5


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_soft_embedding_of_odd_width(fmt, pool):
    table, values = packed(fmt, random(9, 300, 37), pool)
    z = random(10, 3, 300)
    soft = soft_embedding_of_logits(pool, z, table, 1.0, np.empty((3, 37), np.float32))
    assert np.abs(soft - softmax(z.astype(np.float64)) @ values).max() < 1e-5


def test_every_uniform_picks_its_token(pool):
    """u at, just below and just above every step of the cumulative distribution, and at both ends."""
    vocab = TOKENS + 40
    logits = np.zeros((1, vocab), np.float32)
    logits[0, 1::2] = -np.inf  # only even tokens, all equally likely
    count = (vocab + 1) // 2
    picks = np.arange(count)
    for offset in (1e-6, 0.5, 1 - 1e-6):
        uniforms = (picks + offset) / count
        products = np.repeat(logits, count, axis=0)
        assert np.array_equal(sampled(pool, products, uniforms), 2 * picks)
    assert sampled(pool, logits, np.array([0.0])) == [0]
    assert sampled(pool, logits, np.array([np.nextafter(1.0, 0.0)])) == [2 * (count - 1)]


def sampled(pool: ThreadPool, products: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    rows, vocab = products.shape
    state = HeadState(rows, vocab)
    nothing = np.zeros(0, np.int32)
    with np.errstate(invalid="ignore"):
        head_chunk(pool, products, 0, 0.0, 1.0, nothing, -1, state)
    summary = finish(pool, state, uniforms)
    padded = np.full((rows, -(-vocab // TOKENS) * TOKENS), -np.inf, np.float32)
    padded[:, :vocab] = products
    tiles = padded.reshape(rows, -1, TOKENS)[np.arange(rows), summary.tile]
    return sample_in_tile(pool, np.ascontiguousarray(tiles), summary, state, 0.0, 1.0, nothing, -1)


def test_ties_of_the_maximum_go_to_the_lowest_id(pool):
    products = np.zeros((2, 3 * TOKENS), np.float32)
    products[0, [700, 300, 301]] = 5
    state = HeadState(2, 3 * TOKENS)
    for first in range(0, 3 * TOKENS, TOKENS):
        chunk = np.ascontiguousarray(products[:, first : first + TOKENS])
        head_chunk(pool, chunk, first, SOFTCAP, 1.0, np.zeros(0, np.int32), -1, state)
    assert state.argmax.tolist() == [300, 0]


@pytest.mark.parametrize("where", [slice(5, 6), slice(None)])
def test_broken_logits_do_not_look_certain(where, pool):
    products = random(16, 2, TOKENS)
    products[1, where] = np.nan
    state = HeadState(2, TOKENS)
    head_chunk(pool, products, 0, SOFTCAP, 1.0, np.zeros(0, np.int32), -1, state)
    entropies = finish(pool, state, np.full(2, 0.5)).entropy
    assert np.isfinite(entropies[0])
    assert np.isnan(entropies[1])


def test_results_do_not_depend_on_chunks_rows_or_threads(pool):
    table, _ = packed("q80", random(11, 5 * TOKENS + 7, 64), pool)
    x, uniforms = random(12, 30, 64), np.random.default_rng(13).random(30)
    together = head_statistics(pool, x, table, SOFTCAP, TEMPERATURE, uniforms)
    one = ThreadPool(1)
    for r in (0, 13, 29):
        alone = head_statistics(one, x[r : r + 1].copy(), table, SOFTCAP, TEMPERATURE, uniforms[r : r + 1].copy())
        for name in ("argmax", "sampled", "entropy", "soft_counts", "soft_ids", "soft_probabilities"):
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[r]), name


def test_sparse_rows(pool):
    table, values = packed("q40", random(14, 90, 160), pool)
    ids = np.array([[3, 89, 17], [0, 0, 0], [17, 5, 0]], np.int32)
    probabilities = np.random.default_rng(15).random((3, 3), dtype=np.float32)
    counts = np.array([3, 0, 2], np.int32)
    out = sparse_rows(pool, table, ids, probabilities, counts, 3.0, np.full((3, 160), np.nan, np.float32))
    for r in range(3):
        expected = 3 * probabilities[r, : counts[r]].astype(np.float64) @ values[ids[r, : counts[r]]]
        assert np.abs(out[r] - expected).max() < 1e-5
    ids[0, 1] = 90
    with pytest.raises(AssertionError, match="ids"):
        sparse_rows(pool, table, ids, probabilities, counts, 3.0, out)
