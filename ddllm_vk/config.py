"""ModelConfig from config.json (both published styles) and GenerationDefaults from generation_config.json.

Pure values, validated here and nowhere else: every error names the file and the field. Names are the checkpoint's own.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

MODEL_TYPE = "diffusion_gemma"
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class LayerConfig:
    """What differs between layers. Sizes in elements."""

    layer_type: str
    head_dim: int
    num_key_value_heads: int
    rope_type: str
    rope_theta: float
    partial_rotary_factor: float

    @property
    def sliding(self) -> bool:
        return self.layer_type == SLIDING

    @property
    def has_v_proj(self) -> bool:
        """Full-attention layers take the values from the raw k_proj output."""
        return self.sliding


@dataclass(frozen=True)
class ModelConfig:
    """The text model's shapes and constants. Sizes in elements, context in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts: int
    top_k_experts: int
    canvas_length: int
    sliding_window: int
    max_position_embeddings: int
    rms_norm_eps: float
    final_logit_softcapping: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    image_token_id: int | None
    boi_token_id: int | None
    eoi_token_id: int | None
    dtype: str
    layers: tuple[LayerConfig, ...]
    has_vision: bool

    def query_size(self, layer: int) -> int:
        return self.num_attention_heads * self.layers[layer].head_dim

    def key_value_size(self, layer: int) -> int:
        return self.layers[layer].num_key_value_heads * self.layers[layer].head_dim


@dataclass(frozen=True)
class GenerationDefaults:
    """generation_config.json over the family's defaults; null in the file means the default, not off."""

    max_new_tokens: int = 256
    max_denoising_steps: int = 48
    t_max: float = 0.8
    t_min: float = 0.4
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0


_ROPE_FIELDS = {"rope_type", "rope_theta", "partial_rotary_factor"}


class _Fields:
    """One JSON object of a file, read field by field with errors that name the file and the field."""

    def __init__(self, data: Any, file: Path, prefix: str = ""):
        self.file, self.prefix = file, prefix
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: {prefix.rstrip('.') or 'the file'} must be a JSON object")
        self.data = data

    def error(self, field: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: field {self.prefix}{field} {problem}")

    def sub(self, field: str) -> "_Fields":
        if self.data.get(field) is None:
            raise self.error(field, "is missing")
        return _Fields(self.data[field], self.file, f"{self.prefix}{field}.")

    def number(
        self, field: str, kind: type, default: Any = None, minimum: float | None = None, above: float | None = None
    ) -> Any:
        value = self.data.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        allowed = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not _survives_float32(value):
            raise self.error(field, f"must be {'an integer' if kind is int else 'a number'}, not {value!r}")
        if minimum is not None and value < minimum:
            raise self.error(field, f"must be at least {minimum}, not {value}")
        if above is not None and value <= above:
            raise self.error(field, f"must be greater than {above}, not {value}")
        return kind(value)

    def token_id(self, field: str, vocab_size: int) -> int | None:
        value = self.data.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(field, f"must be a token id below vocab_size {vocab_size}, not {value!r}")
        return value

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        value = self.data.get(field)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
                raise self.error(field, f"must hold token ids below vocab_size {vocab_size}, not {i!r}")
        return tuple(ids)


def _survives_float32(value: float) -> bool:
    """Whether a number stays finite, and other than zero if it was, in the arithmetic it is meant for."""
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except (OverflowError, struct.error):
        return False
    return math.isfinite(single) and (single != 0) == (value != 0)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: file not found; is {file.parent} a model folder?") from None
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError) as e:  # also numbers too long to read and text that is not UTF-8
        raise ConfigError(f"{file}: not valid JSON ({e}); download the file again") from None


def load_config(folder: str | Path) -> ModelConfig:
    """config.json of a model folder as a ModelConfig. Raises ConfigError naming the file and the field."""
    file = Path(folder) / "config.json"
    return parse_config(_read_json(file), file)


def parse_config(data: Any, file: Path) -> ModelConfig:
    """A decoded config.json as a ModelConfig; `file` is only used in messages."""
    top = _Fields(data, file)
    if top.data.get("model_type") != MODEL_TYPE:
        raise top.error("model_type", f"is {top.data.get('model_type')!r}; only {MODEL_TYPE!r} models can be run")
    text = top.sub("text_config")
    positive = {"kind": int, "minimum": 1}
    vocab_size = text.number("vocab_size", **positive)
    heads = text.number("num_attention_heads", **positive)
    experts = text.number("num_experts", **positive)
    top_k = text.number("top_k_experts", **positive)
    if top_k > experts:
        raise text.error("top_k_experts", f"is {top_k}, more than num_experts {experts}")
    activation = text.data.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise text.error("hidden_activation", f"is {activation!r}; only 'gelu_pytorch_tanh' is supported")
    if text.data.get("attention_bias"):
        raise text.error("attention_bias", "is true; biases are not supported")
    if text.data.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise text.error("use_bidirectional_attention", "must be 'vision' or absent; prompts are encoded causally")
    canvas_length = top.number("canvas_length", **positive)
    context = text.number("max_position_embeddings", **positive)
    if canvas_length >= context:
        raise top.error(
            "canvas_length", f"is {canvas_length}; max_position_embeddings {context} must hold more than that"
        )
    for fields in (top, text):
        if fields.data.get("tie_word_embeddings") is False:
            raise fields.error("tie_word_embeddings", "is false; only tied embeddings are supported")

    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=text.number("hidden_size", **positive),
        intermediate_size=text.number("intermediate_size", **positive),
        moe_intermediate_size=text.number("moe_intermediate_size", **positive),
        num_hidden_layers=text.number("num_hidden_layers", **positive),
        num_attention_heads=heads,
        num_experts=experts,
        top_k_experts=top_k,
        canvas_length=canvas_length,
        sliding_window=text.number("sliding_window", int, minimum=2),
        max_position_embeddings=context,
        rms_norm_eps=text.number("rms_norm_eps", float, above=0.0),
        final_logit_softcapping=text.number("final_logit_softcapping", float, default=30.0, above=0.0),
        bos_token_id=text.token_id("bos_token_id", vocab_size),
        eos_token_ids=top.token_ids("eos_token_id", vocab_size) or text.token_ids("eos_token_id", vocab_size),
        pad_token_id=text.token_id("pad_token_id", vocab_size) or 0,
        image_token_id=top.token_id("image_token_id", vocab_size),
        boi_token_id=top.token_id("boi_token_id", vocab_size),
        eoi_token_id=top.token_id("eoi_token_id", vocab_size),
        dtype=str(top.data.get("dtype") or text.data.get("dtype") or "float32"),
        layers=_parse_layers(text, heads),
        has_vision=top.data.get("vision_config") is not None,
    )


def _parse_layers(text: _Fields, heads: int) -> tuple[LayerConfig, ...]:
    count = text.number("num_hidden_layers", int, minimum=1)
    types = text.data.get("layer_types")
    if not isinstance(types, list):
        raise text.error("layer_types", "is missing" if types is None else "must be a list")
    if len(types) != count:
        raise text.error("layer_types", f"has {len(types)} entries, num_hidden_layers is {count}")
    head_dim = text.number("head_dim", int, minimum=1)
    kv_heads = text.number("num_key_value_heads", int, minimum=1)
    full_head_dim = text.number("global_head_dim", int, default=head_dim, minimum=1)
    full_kv_heads = text.number("num_global_key_value_heads", int, default=kv_heads, minimum=1)
    per_layer = text.data.get("per_layer_config") or {}
    if not isinstance(per_layer, dict):
        raise text.error("per_layer_config", "must be an object keyed by layer index")
    for key in per_layer:
        if not str(key).isdecimal() or int(key) >= count:
            raise text.error(f"per_layer_config.{key}", f"is not a layer index below num_hidden_layers {count}")
    ropes = text.sub("rope_parameters")

    layers = []
    for i, layer_type in enumerate(types):
        if layer_type not in (SLIDING, FULL):
            raise text.error(f"layer_types[{i}]", f"is {layer_type!r}; expected {SLIDING!r} or {FULL!r}")
        sliding = layer_type == SLIDING
        own = _Fields(per_layer.get(str(i)) or {}, text.file, f"{text.prefix}per_layer_config.{i}.")
        hd = own.number("head_dim", int, default=head_dim if sliding else full_head_dim, minimum=1)
        kv = own.number("num_key_value_heads", int, default=kv_heads if sliding else full_kv_heads, minimum=1)
        if heads % kv:
            raise text.error(
                "num_attention_heads", f"is {heads}, not divisible by the {kv} key/value heads of layer {i}"
            )
        if hd % 2:
            raise text.error("head_dim", f"of layer {i} is {hd}; rotary embeddings need an even size")
        rope = ropes.sub(layer_type)
        rope_type = rope.data.get("rope_type", "default")
        unknown = {k for k, v in rope.data.items() if v is not None} - _ROPE_FIELDS
        if unknown and not (unknown == {"factor"} and rope.data["factor"] == 1):
            raise rope.error(min(unknown), "is not supported; it would change the rotation")
        if rope_type not in ("default", "proportional"):
            raise rope.error("rope_type", f"is {rope_type!r}; expected 'default' or 'proportional'")
        factor = rope.number("partial_rotary_factor", float, default=1.0, above=0.0)
        if factor > 1:
            raise rope.error("partial_rotary_factor", f"must be at most 1, not {factor}")
        theta = rope.number("rope_theta", float, above=0.0)
        layers.append(LayerConfig(layer_type, hd, kv, rope_type, theta, factor))
    return tuple(layers)


def load_generation_defaults(folder: str | Path, config: ModelConfig) -> GenerationDefaults:
    """generation_config.json over the family's defaults; the file may be absent."""
    file = Path(folder) / "generation_config.json"
    if not file.exists():
        return GenerationDefaults(eos_token_ids=config.eos_token_ids, pad_token_id=config.pad_token_id)
    top = _Fields(_read_json(file), file)
    d = GenerationDefaults()
    sampler = _Fields(top.data.get("sampler_config") or {}, file, "sampler_config.")
    name = sampler.data.get("_cls_name", "EntropyBoundSamplerConfig")
    if name != "EntropyBoundSamplerConfig":
        raise sampler.error("_cls_name", f"is {name!r}; only 'EntropyBoundSamplerConfig' is supported")
    defaults = GenerationDefaults(
        max_new_tokens=top.number("max_new_tokens", int, d.max_new_tokens, minimum=1),
        max_denoising_steps=top.number("max_denoising_steps", int, d.max_denoising_steps, minimum=1),
        t_max=top.number("t_max", float, d.t_max, above=0.0),
        t_min=top.number("t_min", float, d.t_min, above=0.0),
        entropy_bound=sampler.number("entropy_bound", float, d.entropy_bound, minimum=0.0),
        stability_threshold=top.number("stability_threshold", int, d.stability_threshold, minimum=0),
        confidence_threshold=top.number("confidence_threshold", float, d.confidence_threshold, minimum=0.0),
        eos_token_ids=(
            config.eos_token_ids
            if top.data.get("eos_token_id") is None
            else top.token_ids("eos_token_id", config.vocab_size)
        ),
        pad_token_id=(
            pad if (pad := top.token_id("pad_token_id", config.vocab_size)) is not None else config.pad_token_id
        ),
    )
    if defaults.t_min > defaults.t_max:
        raise top.error("t_min", f"is {defaults.t_min}, above t_max {defaults.t_max}")
    return defaults
