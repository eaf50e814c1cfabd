"""What `inspect` says, against figures reckoned by hand."""

import json
from pathlib import Path

import pytest
from checkpoint_files import oracle_folder
from click.testing import CliRunner

from ddllm_vk.checkpoint.convert import convert
from ddllm_vk.checkpoint.inspect import describe, memory
from ddllm_vk.checkpoint.presets import PRESETS
from ddllm_vk.cli.inspect import inspect as command
from ddllm_vk.config import parse_config
from ddllm_vk.errors import InputError

SOURCE = oracle_folder("case_5_image")


def test_groups_add_up() -> None:
    d = describe(SOURCE)
    assert d["bytes"] == sum(g["bytes"] for g in d["groups"]) == sum(t["bytes"] for t in d["tensors"]) == 1226872
    assert d["parameters"] == 1226872 // 2
    assert {(g["role"], g["format"]): g["tensors"] for g in d["groups"]} == {
        ("embedding", "bf16"): 1,
        ("float", "bf16"): 86,
        ("matrix", "bf16"): 56,
        ("vision", "bf16"): 31,
    }
    assert [(k["count"], k["head_dim"], k["num_key_value_heads"]) for k in d["config"]["layers"]] == [
        (5, 32, 2),
        (1, 64, 1),
    ]


def test_converted_formats(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "out")
    d = describe(tmp_path / "out")
    groups = {(g["role"], g["format"]): g for g in d["groups"]}
    assert set(groups) == {("embedding", "q80"), ("float", "f32"), ("matrix", "q40"), ("vision", "bf16")}
    assert groups["matrix", "q40"]["bytes"] * 8 == 4.5 * groups["matrix", "q40"]["parameters"]
    assert groups["embedding", "q80"]["bytes"] * 8 == 8.5 * 512 * 64
    text = sum(g["bytes"] for g in d["groups"] if g["role"] != "vision")
    assert d["memory"]["weights_q40"] == text


def test_cache_of_the_real_model() -> None:
    """25 sliding layers keep 1024 positions of 8 x 256 values, 5 full ones all of 2 x 512; float32, keys and values."""
    c = parse_config(PRESETS["26b-a4b"], Path("config.json"))
    m = memory(c, 4096)
    assert m["kv_sliding"] == 25 * 1024 * 8 * 256 * 4 * 2
    assert m["kv_full"] == 5 * 4096 * 2 * 512 * 4 * 2
    assert m["kv_per_1k_tokens"] == 5 * 1024 * 2 * 512 * 4 * 2
    assert memory(c, 100)["kv_sliding"] == 25 * 100 * 8 * 256 * 4 * 2
    assert m["weights_q40"] == pytest.approx(14.6e9, rel=0.01)
    assert m["total_q40"] == m["weights_q40"] + m["kv_sliding"] + m["kv_full"] + m["working"]


@pytest.mark.parametrize("context", [0, -5, 4097])
def test_context_beyond_the_model(context: int) -> None:
    with pytest.raises(InputError, match=r"context must be 1 to 4096 tokens"):
        describe(SOURCE, context)


def test_plain_text_in_a_pipe() -> None:
    result = CliRunner().invoke(command, [str(SOURCE), "--tensors", "--context", "2048"])
    assert result.exit_code == 0
    assert result.output.isascii()
    lines = [line.split() for line in result.output.splitlines()]
    assert ["matrix", "bf16", "56", "540,672", "1.08", "MB", "16.00"] in lines
    assert [
        "model.decoder.layers.0.experts.down_proj",
        "matrix",
        "bf16",
        "8x64x32",
        "model.safetensors",
        "32.8",
        "kB",
    ] in [line for line in lines if line]
    assert "Memory to run, 2048 tokens" in result.output
    assert not any(line.endswith(" ") for line in result.output.splitlines())


def test_json() -> None:
    d = json.loads(CliRunner().invoke(command, [str(SOURCE), "--json"]).output)
    assert "tensors" not in d
    assert d["config"]["hidden_size"] == 64
    d = json.loads(CliRunner().invoke(command, [str(SOURCE), "--json", "--tensors"]).output)
    assert len(d["tensors"]) == 174
