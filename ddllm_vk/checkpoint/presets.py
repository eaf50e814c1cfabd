"""Shapes of synthetic models as config.json objects of the published style, and the family's generation_config.json."""

import copy
from typing import Any

from ..config import FULL, MODEL_TYPE, SLIDING

SLIDING_PER_FULL = 5


def _config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    sliding: tuple[int, int],  # head_dim, key/value heads
    full: tuple[int, int],
    window: int,
    mlp: int,
    experts: tuple[int, int, int],  # count, used per token, width
    vocab: int,
    canvas: int,
    context: int,
) -> dict[str, Any]:
    """The config.json of a text-only model; sizes in elements, context in tokens."""
    period = SLIDING_PER_FULL + 1
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "boi_token_id": 7,
        "canvas_length": canvas,
        "dtype": "bfloat16",
        "eoi_token_id": 9,
        "eos_token_id": [1, 6],
        "image_token_id": 8,
        "model_type": MODEL_TYPE,
        "text_config": {
            "attention_bias": False,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "global_head_dim": full[0],
            "head_dim": sliding[0],
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "layer_types": [FULL if i % period == SLIDING_PER_FULL else SLIDING for i in range(layers)],
            "max_position_embeddings": context,
            "model_type": f"{MODEL_TYPE}_text",
            "moe_intermediate_size": experts[2],
            "num_attention_heads": heads,
            "num_experts": experts[0],
            "num_global_key_value_heads": full[1],
            "num_hidden_layers": layers,
            "num_key_value_heads": sliding[1],
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": window,
            "tie_word_embeddings": True,
            "top_k_experts": experts[1],
            "vocab_size": vocab,
        },
        "tie_word_embeddings": True,
    }


#: 26b-a4b: the real model's shapes, 14.6 GB in Q40; small: 0.3 GB; tiny: 5 MB
PRESETS = {
    "26b-a4b": _config(
        hidden=2816, layers=30, heads=16, sliding=(256, 8), full=(512, 2), window=1024, mlp=2112,
        experts=(128, 8, 704), vocab=262144, canvas=256, context=262144,
    ),
    "small": _config(
        hidden=1024, layers=12, heads=8, sliding=(128, 4), full=(256, 1), window=512, mlp=2048,
        experts=(32, 4, 320), vocab=32768, canvas=256, context=32768,
    ),
    "tiny": _config(
        hidden=256, layers=6, heads=4, sliding=(64, 2), full=(128, 1), window=64, mlp=512,
        experts=(8, 2, 128), vocab=1024, canvas=64, context=4096,
    ),
}  # fmt: skip

GENERATION_CONFIG = {
    "bos_token_id": 2,
    "confidence_threshold": 0.005,
    "eos_token_id": [1, 6],
    "max_denoising_steps": 48,
    "max_new_tokens": 256,
    "pad_token_id": 0,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1,
    "t_max": 0.8,
    "t_min": 0.4,
}


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """A copy of a config.json object cut to its first `layers` layers."""
    cut = copy.deepcopy(config)
    text = cut["text_config"]
    text["num_hidden_layers"] = layers
    text["layer_types"] = text["layer_types"][:layers]
    return cut
