"""Norms, gates, RoPE, the router and embedding rows, against float64 arithmetic; exp and tanh against numpy's."""

import numpy as np
import pytest

from ddllm_vk import quants
from ddllm_vk.cpu.intrinsics import exp32, half_to_float, tanh32
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.kernels import (
    ThreadPool,
    add,
    add_rms_norm,
    embedding_rows,
    gelu_mul,
    head_norm_rope,
    pack,
    rms_norm,
    router,
)

EPS = 1e-6


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def normed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)


@kernel
def _exp_all(x, out):
    for i in range(x.size):
        out[i] = exp32(x[i])


@kernel
def _tanh_all(x, out):
    for i in range(x.size):
        out[i] = tanh32(x[i])


@kernel
def _half_all(bits, out):
    for i in range(bits.size):
        out[i] = half_to_float(bits[i])


def test_exp_is_accurate():
    x = np.linspace(-87.3, 88.7, 300_001, dtype=np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 4e-7
    special = np.array([-np.inf, -1e30, -100, 0, 100, np.inf], np.float32)
    out = np.empty_like(special)
    _exp_all(special, out)
    assert np.array_equal(out, np.array([0, 0, 0, 1, np.inf, np.inf], np.float32))


def test_tanh_is_accurate():
    x = np.concatenate([np.linspace(-30, 30, 300_000), np.geomspace(1e-30, 1, 1000)]).astype(np.float32)
    out = np.empty_like(x)
    _tanh_all(x, out)
    assert np.abs(out / np.tanh(x.astype(np.float64)) - 1).max() < 3e-7


def test_every_float16_converts_exactly():
    bits = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    _half_all(bits, out)
    assert np.array_equal(out, bits.view(np.float16).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 100), (9, 2816), (40, 33)])
def test_norms(rows, columns, pool):
    x, y, w = random(1, rows, columns), random(2, rows, columns), random(3, columns)
    out = np.empty_like(x)
    assert np.abs(rms_norm(pool, x, w, EPS, out) - normed(x) * w).max() < 5e-6
    assert np.abs(rms_norm(pool, x, None, EPS, out) - normed(x)).max() < 5e-6
    assert np.abs(add_rms_norm(pool, x, y, w, EPS, out, scale=0.7) - (x + normed(y) * w) * 0.7).max() < 5e-6
    alone = add_rms_norm(ThreadPool(1), x[-1:].copy(), y[-1:].copy(), w, EPS, np.empty((1, columns), np.float32), 0.7)
    assert np.array_equal(alone[0], out[-1])


def test_norms_in_place(pool):
    x, y, w = random(1, 5, 64), random(2, 5, 64), random(3, 64)
    expected = add_rms_norm(pool, x, y, w, EPS, np.empty_like(x))
    assert np.array_equal(add_rms_norm(pool, x, y.copy(), w, EPS, x.copy()), expected)
    into = x.copy()
    assert np.array_equal(add_rms_norm(pool, into, y, w, EPS, into), expected)
    expected = rms_norm(pool, x, w, EPS, np.empty_like(x))
    assert np.array_equal(rms_norm(pool, x, w, EPS, x), expected)


@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (50, 2112)])
def test_gate_and_add(shape, pool):
    gate, up = 3 * random(4, *shape), random(5, *shape)
    g = gate.astype(np.float64)
    expected = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * up
    out = np.empty_like(gate)
    assert np.abs(gelu_mul(pool, gate, up, out) - expected).max() < 3e-6
    assert np.array_equal(add(pool, gate, up, out), gate + up)


def test_gelu_at_the_ends(pool):
    x = np.array([-1e10, -50, -0.0, 50, 1e10], np.float32)
    out = gelu_mul(pool, x, np.ones_like(x), np.empty_like(x))
    assert np.array_equal(out, np.array([0, 0, 0, 50, 1e10], np.float32))


@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 32), (6, 3, 64), (20, 16, 256)])
def test_head_norm_and_rope(rows, heads, size, pool):
    x, w = random(6, rows, heads, size), random(7, size)
    angle = random(8, rows, size // 2).astype(np.float64)
    angle[:, size // 4 :] = 0  # dimensions that do not rotate
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = np.empty_like(x)
    n = normed(x) * w
    # a rotation of complex numbers whose parts are the two halves
    turned = (n[..., : size // 2] + 1j * n[..., size // 2 :]) * np.exp(1j * angle)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    assert np.abs(head_norm_rope(pool, x, w, EPS, cos, sin, out) - expected).max() < 5e-6
    assert np.abs(head_norm_rope(pool, x, None, EPS, None, None, out) - normed(x)).max() < 5e-6
    assert np.array_equal(head_norm_rope(pool, x, None, EPS, None, None, x), out)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 1), (11, 10, 4), (300, 128, 8), (5, 8, 8)])
def test_router(rows, experts, top_k, pool):
    hidden = 64
    h, scale, proj = random(9, rows, hidden), random(10, hidden), random(11, experts, hidden)
    per_expert = np.random.default_rng(12).random(experts, dtype=np.float32)
    ids, weights = np.empty((rows, top_k), np.int32), np.empty((rows, top_k), np.float32)
    router(pool, h, scale, pack("f32", proj, proj.shape, pool), per_expert, top_k, EPS, ids, weights)
    logits = normed(h) * scale * hidden**-0.5 @ proj.T
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    expected = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
    assert np.array_equal(ids, expected)
    chosen = np.take_along_axis(p, expected, axis=-1)
    assert np.abs(weights - chosen / chosen.sum(axis=-1, keepdims=True) * per_expert[expected]).max() < 1e-6


def test_router_ties_go_to_the_lower_id(pool):
    proj = np.zeros((6, 16), np.float32)
    proj[4] = 1
    ids, weights = np.empty((1, 3), np.int32), np.empty((1, 3), np.float32)
    ones = np.ones(16, np.float32)
    router(pool, ones[None].copy(), ones, pack("f32", proj, proj.shape), np.ones(6, np.float32), 3, EPS, ids, weights)
    assert ids.tolist() == [[4, 0, 1]]


@pytest.mark.parametrize("fmt", ["q40", "q80", "f32", "f16", "bf16"])
def test_embedding_rows(fmt, pool):
    raw = quants.quantize(fmt, random(13, 53, 96))
    table = pack(fmt, raw, (53, 96), pool)
    ids = np.array([52, 0, 17, 17, 31, 16], np.int32)
    out = embedding_rows(pool, table, ids, 53.0, np.empty((6, 96), np.float32))
    assert np.array_equal(out, quants.dequantize(fmt, raw)[ids] * np.float32(53))
    with pytest.raises(AssertionError):
        embedding_rows(pool, table, np.array([53], np.int32), 1.0, np.empty((1, 96), np.float32))
