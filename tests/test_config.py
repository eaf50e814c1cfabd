"""config.json in both published styles, and one clear message for each thing that can be wrong with it."""

import copy
import json
from pathlib import Path

import pytest
from conftest import ORACLE, TEXT_CASES

from ddllm_vk.config import GenerationDefaults, load_config, load_generation_defaults, parse_config
from ddllm_vk.errors import ConfigError

FILE = Path("model/config.json")


@pytest.fixture
def published() -> dict:
    return json.loads((ORACLE / "case_2_long_prompt/checkpoint/config.json").read_text())


@pytest.fixture
def per_layer() -> dict:
    return json.loads((ORACLE / "case_1_base/checkpoint/config.json").read_text())


@pytest.mark.parametrize("name", TEXT_CASES)
def test_layers_of_both_styles(name: str):
    meta = json.loads((ORACLE / name / "meta.json").read_text())
    config = load_config(ORACLE / name / "checkpoint")
    assert [layer.layer_type for layer in config.layers] == meta["layer_types"]
    assert [layer.head_dim for layer in config.layers] == meta["head_dim"]
    assert [layer.num_key_value_heads for layer in config.layers] == meta["kv_heads"]
    assert config.canvas_length == meta["canvas_length"]
    assert config.vocab_size == meta["vocab_size"]
    assert config.final_logit_softcapping == 30.0


def test_end_of_sequence_ids_from_either_level(published: dict, per_layer: dict):
    assert parse_config(published, FILE).eos_token_ids == (1, 6)
    assert parse_config(per_layer, FILE).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model_type",), "gemma4", "model_type is 'gemma4'"),
        (("text_config",), None, "text_config is missing"),
        (("text_config",), [1], "text_config must be a JSON object"),
        (("text_config", "hidden_size"), None, "text_config.hidden_size is missing"),
        (("text_config", "hidden_size"), 0, "text_config.hidden_size must be at least 1"),
        (("text_config", "hidden_size"), "64", "text_config.hidden_size must be an integer"),
        (("text_config", "hidden_size"), True, "text_config.hidden_size must be an integer"),
        (("text_config", "rms_norm_eps"), float("nan"), "text_config.rms_norm_eps must be a number"),
        (("text_config", "num_attention_heads"), 3, "text_config.num_attention_heads is 3, not divisible by the 2"),
        (("text_config", "head_dim"), 31, "text_config.head_dim of layer 0 is 31"),
        (("text_config", "top_k_experts"), 9, "text_config.top_k_experts is 9, more than num_experts 8"),
        (("text_config", "layer_types"), ["full_attention"], "text_config.layer_types has 1 entries"),
        (("text_config", "layer_types"), None, "text_config.layer_types is missing"),
        (("text_config", "hidden_activation"), "silu", "text_config.hidden_activation is 'silu'"),
        (("text_config", "rope_parameters", "full_attention", "rope_type"), "yarn", "rope_type is 'yarn'"),
        (("text_config", "rope_parameters", "full_attention"), None, "rope_parameters.full_attention is missing"),
        (
            ("text_config", "rope_parameters", "full_attention", "factor"),
            8.0,
            "rope_parameters.full_attention.factor is",
        ),
        (("text_config", "rope_parameters", "full_attention", "rope_theta"), 1e-320, "rope_theta must be a number"),
        (("text_config", "final_logit_softcapping"), float("inf"), "final_logit_softcapping must be a number"),
        (("text_config", "rms_norm_eps"), 1e308, "rms_norm_eps must be a number"),
        (("text_config", "max_position_embeddings"), 32, "canvas_length is 32; max_position_embeddings 32 must hold"),
        (("text_config", "use_bidirectional_attention"), "all", "use_bidirectional_attention must be 'vision'"),
        (("text_config", "tie_word_embeddings"), False, "tie_word_embeddings is false"),
        (("canvas_length",), None, "canvas_length is missing"),
        (("eos_token_id",), [1, 512], "eos_token_id must hold token ids below vocab_size 512"),
        (("text_config", "pad_token_id"), -1, "text_config.pad_token_id must be a token id"),
    ],
)
def test_a_broken_field_is_named(published: dict, path: tuple[str, ...], value, message: str):
    data = copy.deepcopy(published)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        parse_config(data, FILE)
    assert str(error.value).startswith(f"{FILE}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_layer_index_that_does_not_exist(per_layer: dict):
    per_layer["text_config"]["per_layer_config"]["9"] = {"head_dim": 64}
    with pytest.raises(ConfigError, match=r"per_layer_config\.9 is not a layer index"):
        parse_config(per_layer, FILE)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": ' + "9" * 5000 + "}", "\x00", "[" * 100_000, '{"model_type": "diffusion_gemma"']
)
def test_broken_json(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json: file not found"):
        load_config(tmp_path)


def test_generation_config_wins_over_the_defaults_and_null_means_default(published: dict, tmp_path: Path):
    config = parse_config(published, FILE)
    assert load_generation_defaults(tmp_path, config) == GenerationDefaults(eos_token_ids=(1, 6))
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {"t_max": 0.9, "max_denoising_steps": None, "eos_token_id": 3, "sampler_config": {"entropy_bound": 0.2}}
        )
    )
    defaults = load_generation_defaults(tmp_path, config)
    assert (defaults.t_max, defaults.t_min, defaults.max_denoising_steps) == (0.9, 0.4, 48)
    assert (defaults.entropy_bound, defaults.eos_token_ids) == (0.2, (3,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    assert load_generation_defaults(tmp_path, config).eos_token_ids == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"t_min": 0.9, "t_max": 0.5}, "t_min is 0.9, above t_max 0.5"),
        ({"sampler_config": {"_cls_name": "Other"}}, "sampler_config._cls_name is 'Other'"),
        ({"sampler_config": {"entropy_bound": -1}}, "sampler_config.entropy_bound must be at least 0"),
        ({"eos_token_id": [99999]}, "eos_token_id must hold token ids below vocab_size"),
    ],
)
def test_a_broken_generation_config(published: dict, tmp_path: Path, data: dict, message: str):
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        load_generation_defaults(tmp_path, parse_config(published, FILE))
    assert message in str(error.value)
