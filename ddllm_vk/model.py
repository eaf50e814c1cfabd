"""The forward pass, stated once, as calls on an Ops. Read it beside MODEL.md.

Two passes share the layers: `encoder_pass` (causal, extends the KV cache) and `canvas_pass` (bidirectional over
[cache + canvas], leaves the cache as it was). Knows nothing of files, sampling or text.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cache import KVCache, canvas_ranges, encoder_ranges
from .config import LayerConfig, ModelConfig
from .ops import Array, Ops, Weight


@dataclass
class ModelWeights:
    """Uploaded weights under the checkpoint's own names, without the `model.decoder.` and `.weight` around them."""

    embed_tokens: Weight
    norm: Weight
    self_conditioning: dict[str, Weight]
    layers: list[dict[str, Weight]]
    encoder_layer_scalar: list[float] = field(default_factory=list)
    decoder_layer_scalar: list[float] = field(default_factory=list)


def inverse_frequencies(layer: LayerConfig) -> np.ndarray:
    """float32 [head_dim/2] (MODEL.md, RoPE). 'proportional' rotates the first n pairs and leaves the rest."""
    half = layer.head_dim // 2
    rotated = half if layer.rope_type == "default" else int(layer.partial_rotary_factor * layer.head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(layer.head_dim)
    inv_freq = np.zeros(half, dtype=np.float32)
    inv_freq[:rotated] = np.float32(1) / np.float32(layer.rope_theta) ** exponents
    return inv_freq


def _layers(
    ops: Ops,
    w: ModelWeights,
    config: ModelConfig,
    cache: KVCache,
    x: Array,
    rows: int,
    canvas: bool,
    last_hidden: bool = True,
) -> Array:
    """All layers over x: [rows, hidden], in place, at positions cache.length.. ; writes K and V behind the cache."""
    cache.reserve(rows)
    ropes: dict[LayerConfig, Any] = {}
    for spec in set(config.layers):
        ropes[spec] = ops.rope_tables(cache.length, rows, inverse_frequencies(spec))
    scalars = w.decoder_layer_scalar if canvas else w.encoder_layer_scalar
    for i, spec in enumerate(config.layers):
        with ops.scope():
            q = _attention_inputs(ops, w.layers[i], config, cache, i, x, ropes[spec])
            if i == config.num_hidden_layers - 1 and not last_hidden:
                break  # an encoder pass is run for its K and V only
            ranges = canvas_ranges if canvas else encoder_ranges
            lo, hi = ranges(cache.length, rows, cache.layer_window(i))
            kv = cache.layers[i]
            attended = ops.attention(q, config.num_attention_heads, kv.k, kv.v, lo - kv.base, hi - kv.base)
            _after_attention(ops, w.layers[i], config, x, attended, scalars[i])
    return x


def _attention_inputs(
    ops: Ops, w: dict[str, Weight], config: ModelConfig, cache: KVCache, i: int, x: Array, rope: Any
) -> Array:
    """Writes K and V of these rows to the cache; returns q: [rows, heads * head_dim]."""
    spec, kv = config.layers[i], cache.layers[i]
    n = ops.rms_norm(x, w["input_layernorm"])
    if spec.has_v_proj:
        q, k, v = ops.linear(n, w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"])
    else:
        q, k = ops.linear(n, w["self_attn.q_proj"], w["self_attn.k_proj"])
        v = k  # the raw projection, before norm and rotation
    slot = cache.length - kv.base
    ops.store_rows(ops.head_norm_rope(v, spec.num_key_value_heads, None, None), kv.v, slot)
    ops.store_rows(ops.head_norm_rope(k, spec.num_key_value_heads, w["self_attn.k_norm"], rope), kv.k, slot)
    return ops.head_norm_rope(q, config.num_attention_heads, w["self_attn.q_norm"], rope)


def _after_attention(
    ops: Ops, w: dict[str, Weight], config: ModelConfig, x: Array, attended: Array, layer_scalar: float
) -> None:
    """The rest of the layer; its output replaces x."""
    (o,) = ops.linear(attended, w["self_attn.o_proj"])
    h = ops.add_rms_norm(x, o, w["post_attention_layernorm"])

    gate, up = ops.linear(ops.rms_norm(h, w["pre_feedforward_layernorm"]), w["mlp.gate_proj"], w["mlp.up_proj"])
    (m,) = ops.linear(ops.gelu_mul(gate, up), w["mlp.down_proj"])
    m = ops.rms_norm(m, w["post_feedforward_layernorm_1"])

    # the router reads h itself, not a normed copy
    ids, weights = ops.router(
        h, w["router.scale"], w["router.proj"], w["router.per_expert_scale"], config.top_k_experts
    )
    e = ops.experts(
        ops.rms_norm(h, w["pre_feedforward_layernorm_2"]),
        ids,
        weights,
        w["experts.gate_up_proj"],
        w["experts.down_proj"],
    )
    e = ops.rms_norm(e, w["post_feedforward_layernorm_2"])

    ops.add_rms_norm(h, ops.add(m, e), w["post_feedforward_layernorm"], layer_scalar, out=x)


def encoder_pass(
    ops: Ops, w: ModelWeights, config: ModelConfig, cache: KVCache, ids: np.ndarray, last_hidden: bool = False
) -> Array | None:
    """Causal pass over ids: int32 [rows], which extends the cache. Returns the normed last hidden state
    [rows, hidden] only if asked: nothing of the model reads it."""
    with ops.scope():
        x = ops.embedding_rows(w.embed_tokens, ids, config.hidden_size**0.5)
        x = _layers(ops, w, config, cache, x, len(ids), canvas=False, last_hidden=last_hidden)
        cache.length += len(ids)
        return ops.rms_norm(x, w.norm) if last_hidden else None


def canvas_pass(
    ops: Ops, w: ModelWeights, config: ModelConfig, cache: KVCache, canvas: np.ndarray, soft: Array | None
) -> Array:
    """One bidirectional pass over canvas: int32 [canvas_length]. soft: the self-conditioning embedding
    softmax(z) @ E * sqrt(H) of the step before, None in the first step. Returns norm(y): [canvas_length, hidden]; call
    it inside ops.scope()."""
    x = ops.embedding_rows(w.embed_tokens, canvas, config.hidden_size**0.5)
    if soft is not None:
        sc = w.self_conditioning
        gate, up = ops.linear(ops.rms_norm(soft, sc["pre_norm"]), sc["gate_proj"], sc["up_proj"])
        (signal,) = ops.linear(ops.gelu_mul(gate, up), sc["down_proj"])
        x = ops.add(x, signal)
    x = ops.rms_norm(x, None)  # in the first step too
    return ops.rms_norm(_layers(ops, w, config, cache, x, len(canvas), canvas=True), w.norm)
