"""Numpy reference kernels: the plain statement of every operation, for tests and for reading beside MODEL.md.

Same names as the compiled kernels. Weights are logical float32 arrays (dequantised); rows are float32 [rows, columns].
Clear, not fast; nothing here is used in production.
"""

import numpy as np

F32 = np.float32


def quantize_dequantize_rows(x: np.ndarray) -> np.ndarray:
    """x: float32 [M, K] rounded to Q80 activations and back: blocks of 32, float32 scale max|x|/127, rounded half away
    from zero. K that is no multiple of 32 is padded with zeros."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), dtype=F32)
    padded[:, :k] = x
    blocks = padded.reshape(rows, -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / F32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.where(scale > 0, blocks * (F32(1) / scale), F32(0))
    q = np.trunc(y + np.copysign(F32(0.5), y))
    return (q * scale).reshape(rows, -1)[:, :k].astype(F32)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x: [M, K], weight: [N, K] -> [M, N]."""
    return x @ weight.T


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x: [..., H]; x * (mean(x^2) + eps)^-0.5 * w, w None is one (MODEL.md, Layer)."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + F32(eps))
    return y if weight is None else y * weight


def add_rms_norm(x: np.ndarray, y: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0) -> np.ndarray:
    """(x + rms_norm(y) * w) * scale, all [M, H]."""
    return (x + rms_norm(y, weight, eps)) * F32(scale)


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU, tanh approximation."""
    return F32(0.5) * x * (F32(1) + np.tanh(F32(0.7978845608028654) * (x + F32(0.044715) * x * x * x)))


def gelu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gelu(gate) * up


def head_norm_rope(
    x: np.ndarray, weight: np.ndarray | None, eps: float, cos: np.ndarray | None, sin: np.ndarray | None
) -> np.ndarray:
    """x: [M, heads, head_dim]; RMS norm per head, then rotation of the pairs (d, d + head_dim/2) by
    cos, sin: [M, head_dim/2]; no rotation where they are None."""
    y = rms_norm(x, weight, eps)
    if cos is None or sin is None:
        return y
    half = x.shape[-1] // 2
    a, b = y[..., :half], y[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """q: [T, heads, hd]; k, v: [kv_heads, capacity, hd]; row t sees the cache slots lo[t] <= s < hi[t].

    Scale 1.0; heads / kv_heads query heads share one K/V head. Returns [T, heads * hd].
    """
    rows, heads, head_dim = q.shape
    group = heads // k.shape[0]
    out = np.empty((rows, heads, head_dim), dtype=F32)
    for t in range(rows):
        for h in range(heads):
            keys, values = k[h // group, lo[t] : hi[t]], v[h // group, lo[t] : hi[t]]
            out[t, h] = softmax(keys @ q[t, h]) @ values
    return out.reshape(rows, heads * head_dim)


def router(
    h: np.ndarray, scale: np.ndarray, proj: np.ndarray, per_expert_scale: np.ndarray, top_k: int, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """h: [M, H], the residual stream itself, not a normed copy -> expert ids int32 [M, top_k] by falling probability
    (ties to the lower id) and weights float32 [M, top_k]."""
    x = rms_norm(h, None, eps) * scale * F32(h.shape[-1] ** -0.5)
    probabilities = softmax(x @ proj.T)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k].astype(np.int32)
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * per_expert_scale[ids]


def experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray, quantized: bool = False
) -> np.ndarray:
    """x: [M, H]; ids, weights: [M, top_k]; gate_up: [E, 2I, H] (first I rows gate, last I up); down: [E, H, I]."""
    out = np.zeros_like(x)
    width = down.shape[-1]
    inputs = quantize_dequantize_rows(x) if quantized else x
    for row in range(x.shape[0]):
        for e, w in zip(ids[row], weights[row], strict=True):
            gu = inputs[row] @ gate_up[e].T
            a = gelu_mul(gu[:width], gu[width:])[None]
            a = quantize_dequantize_rows(a) if quantized else a
            out[row] += w * (a @ down[e].T)[0]
    return out


def head_logits(x: np.ndarray, table: np.ndarray, softcap: float) -> np.ndarray:
    """x: [M, H], table: [V, H] -> softcap * tanh(x @ table.T / softcap), [M, V]."""
    return F32(softcap) * np.tanh(x @ table.T / F32(softcap))
