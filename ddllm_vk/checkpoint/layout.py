"""Which tensors a checkpoint holds: names and shapes of the text model (MODEL.md, "Stored tensors"), ties, vision.

Pure: a ModelConfig in, names and shapes out. Names are the checkpoint's own.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ..config import ModelConfig

#: matrix: a weight of linear layers, quantisable along the last axis; embedding: also the head; float: kept in float32
Role = Literal["matrix", "embedding", "float"]

EMBEDDING = "model.decoder.embed_tokens.weight"
VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

_DECODER = "model.decoder."
_ENCODER = "model.encoder.language_model."


@dataclass(frozen=True)
class TensorSpec:
    """One tensor the text model needs: logical shape in elements, and what it is used as."""

    shape: tuple[int, ...]
    role: Role


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text model by name, in the order of the forward pass. Vision is not part of it."""
    c = config
    tensors = {EMBEDDING: TensorSpec((c.vocab_size, c.hidden_size), "embedding")}
    prefix = _DECODER + "self_conditioning."
    tensors[prefix + "pre_norm.weight"] = TensorSpec((c.hidden_size,), "float")
    tensors |= _gated_mlp(prefix, c.hidden_size, c.intermediate_size)
    for i in range(c.num_hidden_layers):
        tensors |= _layer(c, i)
    tensors[_DECODER + "norm.weight"] = TensorSpec((c.hidden_size,), "float")
    return tensors


def _gated_mlp(prefix: str, hidden: int, inner: int) -> dict[str, TensorSpec]:
    return {
        prefix + "gate_proj.weight": TensorSpec((inner, hidden), "matrix"),
        prefix + "up_proj.weight": TensorSpec((inner, hidden), "matrix"),
        prefix + "down_proj.weight": TensorSpec((hidden, inner), "matrix"),
    }


def _layer(c: ModelConfig, i: int) -> dict[str, TensorSpec]:
    hidden, experts, inner = c.hidden_size, c.num_experts, c.moe_intermediate_size
    layer, queries, keys = c.layers[i], c.query_size(i), c.key_value_size(i)
    attention = {
        "q_proj.weight": TensorSpec((queries, hidden), "matrix"),
        "k_proj.weight": TensorSpec((keys, hidden), "matrix"),
        "v_proj.weight": TensorSpec((keys, hidden), "matrix"),
        "o_proj.weight": TensorSpec((hidden, queries), "matrix"),
        "q_norm.weight": TensorSpec((layer.head_dim,), "float"),
        "k_norm.weight": TensorSpec((layer.head_dim,), "float"),
    }
    if not layer.has_v_proj:
        del attention["v_proj.weight"]
    norms = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm",
    )  # fmt: skip
    prefix = f"{_DECODER}layers.{i}."
    tensors = {prefix + "self_attn." + name: spec for name, spec in attention.items()}
    tensors |= _gated_mlp(prefix + "mlp.", hidden, c.intermediate_size)
    tensors |= {
        prefix + "router.scale": TensorSpec((hidden,), "float"),
        prefix + "router.proj.weight": TensorSpec((experts, hidden), "float"),
        prefix + "router.per_expert_scale": TensorSpec((experts,), "float"),
        prefix + "experts.gate_up_proj": TensorSpec((experts, 2 * inner, hidden), "matrix"),
        prefix + "experts.down_proj": TensorSpec((experts, hidden, inner), "matrix"),
    }
    tensors |= {f"{prefix}{norm}.weight": TensorSpec((hidden,), "float") for norm in norms}
    # one for canvas passes, one for encoder passes
    tensors[prefix + "layer_scalar"] = TensorSpec((1,), "float")
    tensors[f"{_ENCODER}layers.{i}.layer_scalar"] = TensorSpec((1,), "float")
    return tensors


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower or its projection."""
    return name.startswith(VISION_PREFIXES)


def tied_to(name: str) -> str | None:
    """The text tensor that `name` is only another name of, or None.

    The reference ties the head to the embedding and the encoder to the decoder, all but the layer scalars; a checkpoint
    may hold such a tensor under either name, or under both.
    """
    if name == "lm_head.weight":
        return EMBEDDING
    own = re.fullmatch(re.escape(_ENCODER) + r"((?:embed_tokens|layers|norm)\..+)", name)
    if own is None or own[1].endswith(".layer_scalar"):
        return None
    return _DECODER + own[1]
