"""The small model: its configuration, first weights, the two passes that training needs, and Q40 rounding.

The architecture is the reference implementation's own (`transformers`), module by module. What is written here is only
the order of the calls, so that one encoder pass serves several denoising steps and a compiler sees plain functions of
tensors. Shapes: B examples, P prompt tokens (left padded), R canvas rows, V tokens in the vocabulary.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from training.tokenizer import BOS, EOS, IMAGE, IMAGE_BEGIN, IMAGE_END, PAD, TURN_END, VOCABULARY_SIZE

CANVAS = 64  # rows
WINDOW = 48  # tokens a sliding layer sees
FROZEN = ("vision_tower", "embed_vision")  # parts of the architecture that no task uses
KEPT_FLOAT = (*FROZEN, "router", "norm")  # parts that Q40 leaves alone


def configuration() -> DiffusionGemmaConfig:
    """2.4 million parameters: six layers (sliding, sliding, full, twice), eight experts of which two run."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    text = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "sliding_window": WINDOW,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 4096,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "patch_size": 8,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "standardize": True,
    }
    return DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS,
        boi_token_id=IMAGE_BEGIN,
        image_token_id=IMAGE,
        eoi_token_id=IMAGE_END,
        dtype="float32",
    )


def generation_configuration() -> DiffusionGemmaGenerationConfig:
    """The family's default sampler, one canvas long."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=CANVAS,
        max_denoising_steps=48,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
        t_min=0.4,
        t_max=0.8,
        stability_threshold=1,
        confidence_threshold=0.005,
        bos_token_id=BOS,
        eos_token_id=[EOS, TURN_END],
        pad_token_id=PAD,
    )


def new_model(seed: int) -> DiffusionGemmaForBlockDiffusion:
    """A model with first weights that train: unit-variance activations, quiet branches, moderate attention."""
    torch.manual_seed(seed)
    config = configuration()
    config._attn_implementation = "eager"
    config._experts_implementation = "grouped_mm"
    model = DiffusionGemmaForBlockDiffusion(config)
    model.generation_config = generation_configuration()
    with torch.no_grad():
        for name, weight in trained_parameters(model).items():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(1.2 * weight.shape[0] ** -0.25)  # the attention scale of this architecture is 1
            elif "post_" in name:
                weight.fill_(0.3)
            elif weight.ndim >= 2:  # the embedding too: its last axis is the hidden size
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is trained, tied ones once; the others are frozen on the way."""
    found = {}
    for name, parameter in model.named_parameters():
        if any(part in name for part in FROZEN):
            parameter.requires_grad_(False)
        else:
            found[name] = parameter
    return found


# Q40 ------------------------------------------------------------------------------------------------------------------


def is_quantised(name: str, weight: Tensor) -> bool:
    """Whether a checkpoint stores this tensor as Q40: matrices, except of the router, the norms and vision."""
    return weight.ndim >= 2 and not any(part in name for part in KEPT_FLOAT)


def q40_rounded(weight: Tensor) -> Tensor:
    """`weight` as Q40 would give it back: blocks of 32 along the last axis, 4-bit steps of a float16 scale."""
    blocks = weight.reshape(-1, 32)
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = extreme / -8
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    steps = (blocks * inverse + 8.5).trunc().clamp(0, 15)
    return ((steps - 8) * scale.half().float()).reshape(weight.shape)


# The two passes -------------------------------------------------------------------------------------------------------


class LayerPrefix:
    """What the reference's attention needs of a cache, for one layer: filled by the encoder, only read by the decoder.

    keys, values: float32 [B, heads, P, head_dim], the prompt's.
    """

    is_compileable = False

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        self.keys, self.values = keys, values
        self.layers = self

    def __getitem__(self, layer: int) -> "LayerPrefix":
        return self

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: object) -> tuple[Tensor, Tensor]:
        """An encoder layer's keys and values are all it attends to."""
        self.keys, self.values = keys, values
        return keys, values


def layer_pass(
    layer: nn.Module, hidden: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, prefix: LayerPrefix
) -> tuple[Tensor, Tensor]:
    """One layer, in the reference's order, with the router's probabilities kept for the load-balance loss.

    hidden: float32 [B, R, H]. Returns the next hidden state and experts * sum(share of load * mean probability), which
    is 1 when the experts are equally busy.
    """
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden), position_embeddings=turns, attention_mask=mask, cache=prefix
    )
    hidden = hidden + layer.post_attention_layernorm(attended)
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(hidden)))
    flat = hidden.flatten(0, 1)
    probabilities, weights, chosen = layer.router(flat)
    sparse = layer.experts(layer.pre_feedforward_layernorm_2(flat), chosen, weights).view_as(hidden)
    sparse = layer.post_feedforward_layernorm_2(sparse)
    load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0 / chosen.shape[1]).mean(dim=0)
    balance = probabilities.shape[1] * (load * probabilities.mean(dim=0)).sum()
    return (hidden + layer.post_feedforward_layernorm(dense + sparse)) * layer.layer_scalar, balance


def canvas_input(decoder: nn.Module, canvas: Tensor, previous: Tensor | None) -> Tensor:
    """The canvas's embedding with self-conditioning: float32 [B, R, H]."""
    hidden = decoder.embed_tokens(canvas)
    if previous is None:
        soft = torch.zeros_like(hidden)
    else:
        soft = previous.softmax(dim=-1) @ decoder.embed_tokens.weight * decoder.embed_tokens.scalar_embed_scale
    return decoder.self_conditioning(hidden, soft)


def canvas_output(model: DiffusionGemmaForBlockDiffusion, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits after the softcap, float32 [B, R, V], and their cross-entropy with `target`, float32 [B, R]."""
    logits = model.lm_head(model.model.decoder.norm(hidden))
    logits = model.final_logit_softcapping * torch.tanh(logits / model.final_logit_softcapping)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return logits, loss.view(target.shape)


def _additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)


class Passes:
    """Encoder and denoising passes over a model, with their pieces compiled or not."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, compiled: bool):
        def piece(function: Callable) -> Callable:
            return torch.compile(function, dynamic=False) if compiled else function

        torch._dynamo.config.recompile_limit = 64
        # Each pass keeps a prefix per layer, so no layer needs its number; told apart by it, each would be compiled.
        for part in (model.model.encoder.language_model, model.model.decoder):
            for layer in part.layers:
                layer.self_attn.layer_idx = 0
        self.model = model
        self.layer_pass = piece(layer_pass)
        self.canvas_input = piece(canvas_input)
        self.canvas_output = piece(canvas_output)

    def encode(self, ids: Tensor, real: Tensor) -> tuple[list[LayerPrefix], Tensor]:
        """The causal pass over the prompt.

        ids: int64 [B, P], real: bool [B, P], false on padding. Returns each layer's prefix and the balance loss.
        """
        text = self.model.model.encoder.language_model
        length = ids.shape[1]
        rows = torch.arange(length)
        causal = rows[None, :] <= rows[:, None]
        near = causal & (rows[None, :] > rows[:, None] - WINDOW)
        # A padding row would see nothing: it may see itself.
        seen = real[:, None, :] | torch.eye(length, dtype=torch.bool)
        masks = {
            "full_attention": _additive((causal & seen)[:, None]),
            "sliding_attention": _additive((near & seen)[:, None]),
        }
        hidden = text.embed_tokens(ids)
        turns = {kind: text.rotary_emb(hidden, rows[None], kind) for kind in masks}
        prefixes, balance = [], torch.zeros(())
        for layer, kind in zip(text.layers, text.config.layer_types, strict=True):
            prefixes.append(LayerPrefix())
            hidden, part = self.layer_pass(layer, hidden, turns[kind], masks[kind], prefixes[-1])
            balance = balance + part / len(text.layers)
        return prefixes, balance

    def decode(
        self,
        prefixes: list[LayerPrefix],
        real: Tensor,
        canvas: Tensor,
        rows: Tensor,
        previous: Tensor | None,
        target: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One denoising pass over some rows of the canvas.

        real: bool [B, P]; canvas, target: int64 [B, R]; rows: int64 [B, R], where on the canvas these rows lie;
        previous: float32 [B, R, V], the last step's logits over its temperature, none on a canvas's first step.
        Returns logits float32 [B, R, V], cross-entropy with the target float32 [B, R], and the balance loss.
        """
        decoder = self.model.model.decoder
        hidden = self.canvas_input(decoder, canvas, previous)
        length = real.shape[1]
        visible = torch.cat([real, torch.ones(canvas.shape, dtype=torch.bool)], dim=1)
        cut = {"full_attention": 0, "sliding_attention": max(0, length - (WINDOW - 1))}
        masks = {kind: _additive(visible[:, start:])[:, None, None, :] for kind, start in cut.items()}
        turns = {kind: decoder.rotary_emb(hidden, rows + length, kind) for kind in masks}
        balance = torch.zeros(())
        for layer, kind, whole in zip(decoder.layers, decoder.text_config.layer_types, prefixes, strict=True):
            prefix = LayerPrefix(whole.keys[:, :, cut[kind] :], whole.values[:, :, cut[kind] :])
            hidden, part = self.layer_pass(layer, hidden, turns[kind], masks[kind], prefix)
            balance = balance + part / len(decoder.layers)
        logits, loss = self.canvas_output(self.model, hidden, target)
        return logits, loss, balance


def load(folder: Path, q40: bool = False) -> DiffusionGemmaForBlockDiffusion:
    """A checkpoint through the reference implementation; `q40` rounds its weights as the shipped file does."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
    if q40:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if is_quantised(name, weight):
                    weight.copy_(q40_rounded(weight))
    return model.eval()
