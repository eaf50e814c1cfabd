"""Kernels that touch each activation once: norms, gates, RoPE, cache rows, embedding rows, the router's choice.

Everything is float32 and C-contiguous. A row is computed by one thread, in an order that depends on its length only.
"""

import numpy as np

from ddllm_vk.cpu.emit import q40_row_block, q80_row_block
from ddllm_vk.cpu.intrinsics import (
    address,
    bits_to_float,
    exp32,
    gelu32,
    half_to_float,
    load_f32,
    load_u16,
    max_of,
    square_sum_of,
    store_f32,
    sum_of,
    take,
)
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import check, linear, row_grain
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.cpu.weights import F16, F32, Q40, Q80, DenseWeight, Weight

_NOTHING = np.zeros(0, dtype=np.float32)
_NOTHING_2D = np.zeros((0, 0), dtype=np.float32)


@kernel
def _inverse_rms(where, count, eps):
    """1 / sqrt(mean of squares + eps) of float32 values at an address."""
    mean = square_sum_of(where, count) / np.float32(count)
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


@kernel
def _rms_norm(x, weight, eps, out, counter, jobs, grain):
    """Job: a row. weight: [H] or [0] for none."""
    columns = x.shape[1]
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            scale = _inverse_rms(address(x) + row * columns * 4, columns, eps)
            if weight.size:
                for j in range(columns):
                    out[row, j] = x[row, j] * scale * weight[j]
            else:
                for j in range(columns):
                    out[row, j] = x[row, j] * scale


def rms_norm(pool: ThreadPool, x: np.ndarray, weight: np.ndarray | None, eps: float, out: np.ndarray) -> np.ndarray:
    """out = x * (mean(x^2) + eps)^-0.5 * weight. x, out: [M, H] (may be the same array); weight: [H] or None."""
    check(x, "x", (x.shape[0], x.shape[1]))
    check(out, "out", x.shape)
    if weight is not None:
        check(weight, "weight", (x.shape[1],))
    args = (x, _NOTHING if weight is None else weight, float(eps), out)
    pool.run(_rms_norm, x.shape[0], *args, grain=row_grain(pool, x.shape[0], x.size))
    return out


@kernel
def _add_rms_norm(x, y, weight, eps, scale, out, counter, jobs, grain):
    """Job: a row."""
    columns = x.shape[1]
    factor = np.float32(scale)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            inverse = _inverse_rms(address(y) + row * columns * 4, columns, eps)
            for j in range(columns):
                out[row, j] = (x[row, j] + y[row, j] * inverse * weight[j]) * factor


def add_rms_norm(
    pool: ThreadPool,
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    eps: float,
    out: np.ndarray,
    scale: float = 1.0,
) -> np.ndarray:
    """out = (x + rms_norm(y) * weight) * scale. x, y, out: [M, H] (out may be x or y); weight: [H]."""
    check(x, "x", (x.shape[0], x.shape[1]))
    check(y, "y", x.shape)
    check(out, "out", x.shape)
    check(weight, "weight", (x.shape[1],))
    args = (x, y, weight, float(eps), float(scale), out)
    pool.run(_add_rms_norm, x.shape[0], *args, grain=row_grain(pool, x.shape[0], x.size))
    return out


_CHUNK = 4096


@kernel
def _gelu_mul(gate, up, out, counter, jobs, grain):
    """Job: _CHUNK numbers."""
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        begin = first * _CHUNK
        a, b, c = address(gate) + begin * 4, address(up) + begin * 4, address(out) + begin * 4
        for i in range(min(grain * _CHUNK, gate.size - begin)):
            store_f32(c, i, gelu32(load_f32(a, i)) * load_f32(b, i))


def gelu_mul(pool: ThreadPool, gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = gelu(gate) * up, GELU's tanh approximation; any one shape (out may be gate or up)."""
    check(gate, "gate", gate.shape)
    check(up, "up", gate.shape)
    check(out, "out", gate.shape)
    jobs = -(-gate.size // _CHUNK)
    pool.run(_gelu_mul, jobs, gate.reshape(-1), up.reshape(-1), out.reshape(-1), grain=row_grain(pool, jobs, gate.size))
    return out


@kernel
def _add(a, b, out, counter, jobs, grain):
    """Job: _CHUNK numbers."""
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        begin = first * _CHUNK
        x, y, z = address(a) + begin * 4, address(b) + begin * 4, address(out) + begin * 4
        for i in range(min(grain * _CHUNK, a.size - begin)):
            store_f32(z, i, load_f32(x, i) + load_f32(y, i))


def add(pool: ThreadPool, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = a + b; any one shape (out may be a or b)."""
    check(a, "a", a.shape)
    check(b, "b", a.shape)
    check(out, "out", a.shape)
    jobs = -(-a.size // _CHUNK)
    pool.run(_add, jobs, a.reshape(-1), b.reshape(-1), out.reshape(-1), grain=row_grain(pool, jobs, a.size))
    return out


@kernel
def _head_norm_rope(x, weight, eps, cos, sin, out, counter, jobs, grain):
    """Job: a row (all its heads). weight: [hd] or [0]; cos, sin: [M, hd/2] or [0, 0]."""
    heads, size = x.shape[1], x.shape[2]
    half = size // 2
    normed = np.empty(size, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            for head in range(heads):
                scale = _inverse_rms(address(x) + (row * heads + head) * size * 4, size, eps)
                if weight.size:
                    for d in range(size):
                        normed[d] = x[row, head, d] * scale * weight[d]
                else:
                    for d in range(size):
                        normed[d] = x[row, head, d] * scale
                if cos.size:
                    for d in range(half):
                        out[row, head, d] = normed[d] * cos[row, d] - normed[d + half] * sin[row, d]
                        out[row, head, d + half] = normed[d + half] * cos[row, d] + normed[d] * sin[row, d]
                else:
                    for d in range(size):
                        out[row, head, d] = normed[d]


def head_norm_rope(
    pool: ThreadPool,
    x: np.ndarray,
    weight: np.ndarray | None,
    eps: float,
    cos: np.ndarray | None,
    sin: np.ndarray | None,
    out: np.ndarray,
) -> np.ndarray:
    """Each head's RMS norm (times weight, if any), then RoPE on the pairs (d, d + hd/2), if cos and sin are given.

    x, out: [M, heads, hd], hd even (may be the same array); weight: [hd]; cos, sin: [M, hd/2], 1 and 0 for dimensions
    that do not rotate.
    """
    rows, heads, size = x.shape
    check(x, "x", (rows, heads, size))
    check(out, "out", x.shape)
    assert size % 2 == 0, "head dimension must be even"
    assert (cos is None) == (sin is None), "cos and sin go together"
    if weight is not None:
        check(weight, "weight", (size,))
    if cos is not None and sin is not None:
        check(cos, "cos", (rows, size // 2))
        check(sin, "sin", (rows, size // 2))
    args = (
        x,
        _NOTHING if weight is None else weight,
        float(eps),
        _NOTHING_2D if cos is None else cos,
        _NOTHING_2D if sin is None else sin,
        out,
    )
    pool.run(_head_norm_rope, rows, *args, grain=row_grain(pool, rows, x.size))
    return out


@kernel
def _choose_experts(logits, per_expert_scale, ids, weights, counter, jobs, grain):
    """Job: a row. Softmax over all experts, the largest top_k in descending order, renormalised, scaled."""
    experts, top_k = logits.shape[1], ids.shape[1]
    p = np.empty(experts, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            largest = max_of(address(logits) + row * experts * 4, experts)
            for e in range(experts):
                p[e] = exp32(logits[row, e] - largest)
            total = sum_of(address(p), experts)
            for e in range(experts):
                p[e] = p[e] / total
            chosen = np.float32(0)
            for j in range(top_k):
                best = 0
                for e in range(1, experts):
                    if p[e] > p[best]:
                        best = e
                ids[row, j] = best
                weights[row, j] = p[best]
                chosen += p[best]
                p[best] = np.float32(-1)
            for j in range(top_k):
                weights[row, j] = weights[row, j] / chosen * per_expert_scale[ids[row, j]]


def router(
    pool: ThreadPool,
    h: np.ndarray,
    scale: np.ndarray,
    proj: DenseWeight,
    per_expert_scale: np.ndarray,
    top_k: int,
    eps: float,
    ids: np.ndarray,
    weights: np.ndarray,
) -> None:
    """MODEL.md, "Layer", Router: softmax(proj(rms(h) * scale * H^-0.5)), top-k, renormalised, times per_expert_scale.

    h: [M, H]; scale: [H]; proj: (E, H); per_expert_scale: [E]. ids: int32 [M, top_k], by descending probability, ties
    to the lower id; weights: float32 [M, top_k]. All of it in float32.
    """
    rows, hidden = h.shape
    experts = proj.rows
    check(scale, "scale", (hidden,))
    check(per_expert_scale, "per_expert_scale", (experts,))
    check(ids, "ids", (rows, top_k), np.int32)
    check(weights, "weights", (rows, top_k))
    assert 1 <= top_k <= experts, f"top {top_k} of {experts} experts"
    with pool.lock:
        normed = pool.scratch("router.normed", np.float32, h.size)[: h.size].reshape(h.shape)
        logits = pool.scratch("router.logits", np.float32, rows * experts)[: rows * experts].reshape(rows, experts)
        rms_norm(pool, h, scale * np.float32(hidden**-0.5), eps, normed)
        linear(pool, normed, proj, logits)
        grain = row_grain(pool, rows, rows * experts * 8)
        pool.run(_choose_experts, rows, logits, per_expert_scale, ids, weights, grain=grain)


@kernel
def row_to_floats(code, data, scales, columns, row, first, last, out):
    """Values first..last of row `row` of a packed weight to float32 at address `out`; in q40 and q80, both bounds are
    multiples of 32."""
    tile = row // 16
    lane = row - tile * 16
    if code in (Q40, Q80):
        blocks = columns // 32
        for b in range(first // 32, last // 32):
            index = tile * blocks + b
            scale = half_to_float(scales[index * 16 + lane])
            if code == Q40:
                q40_row_block(address(data) + index * 256 + lane * 4, scale, out + (b * 32 - first) * 4)
            else:
                q80_row_block(address(data) + index * 512 + lane * 4, scale, out + (b * 32 - first) * 4)
    elif code == F32:
        here = address(data) + (tile * columns * 16 + lane) * 4
        for k in range(first, last):
            store_f32(out, k - first, load_f32(here, k * 16))
    elif code == F16:
        here = address(data) + (tile * columns * 16 + lane) * 2
        for k in range(first, last):
            store_f32(out, k - first, half_to_float(load_u16(here, k * 16)))
    else:
        here = address(data) + (tile * columns * 16 + lane) * 2
        for k in range(first, last):
            store_f32(out, k - first, bits_to_float(np.uint32(load_u16(here, k * 16)) << np.uint32(16)))


@kernel
def _embedding_rows(code, data, scales, ids, factor, out, counter, jobs, grain):
    """Job: a row."""
    columns = out.shape[1]
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            row_to_floats(code, data, scales, columns, np.int64(ids[row]), 0, columns, address(out) + row * columns * 4)
            for k in range(columns):
                out[row, k] *= np.float32(factor)


def embedding_rows(pool: ThreadPool, weight: Weight, ids: np.ndarray, scale: float, out: np.ndarray) -> np.ndarray:
    """out[r] = weight[ids[r]] * scale. weight: (V, H), any format; ids: int32 [M]; out: [M, H]."""
    rows = ids.shape[0]
    check(ids, "ids", (rows,), np.int32)
    check(out, "out", (rows, weight.columns))
    assert rows == 0 or (ids.min() >= 0 and ids.max() < weight.rows), "ids: outside of the vocabulary"
    args = (weight.code, weight.data, weight.scales, ids, float(scale), out)
    pool.run(_embedding_rows, rows, *args, grain=row_grain(pool, rows, out.size * 4))
    return out
