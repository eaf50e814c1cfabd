"""What `inspect` says, against figures reckoned by hand."""

import copy
import json
from pathlib import Path

import pytest
from checkpoint_files import oracle_folder
from click.testing import CliRunner

from ddllm_vk.backends.cpu import CpuOps
from ddllm_vk.cache import KVCache
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


@pytest.mark.parametrize(("fmt", "bits"), [("f16", 16), ("q80", 8.5), ("f32", 32)])
def test_cache_of_the_real_model(fmt: str, bits: float) -> None:
    """25 sliding layers keep 1023 positions and a pass of 256, as a multiple of 128, of 8 x 256 values; 5 full ones all
    positions of 2 x 512. Keys and values."""
    c = parse_config(PRESETS["26b-a4b"], Path("config.json"))
    m = memory(c, [300, 4096])
    assert m["context"] == 4096
    assert m["kv_sliding"][fmt] == 25 * 1280 * 8 * 256 * 2 * bits / 8
    assert m["kv_full"][fmt] == 5 * 4096 * 2 * 512 * 2 * bits / 8
    assert m["kv_per_1k_tokens"][fmt] == 5 * 1024 * 2 * 512 * 2 * bits / 8
    assert m["kv_cache"][1][fmt] == m["kv_sliding"][fmt] + m["kv_full"][fmt]
    assert m["kv_cache"][0][fmt] == m["kv_sliding"][fmt] + 5 * 512 * 2 * 512 * 2 * bits / 8


def test_totals_are_with_the_cache_of_the_weights() -> None:
    m = memory(parse_config(PRESETS["26b-a4b"], Path("config.json")), [4096])
    assert m["weights_q40"] == pytest.approx(14.6e9, rel=0.01)
    assert m["total_q40"] == m["weights_q40"] + m["kv_cache"][0]["f16"] + m["working"]
    assert m["total_f32"] == m["weights_f32"] + m["kv_cache"][0]["f32"] + m["working"]


@pytest.mark.parametrize("fmt", ["f16", "q80", "f32"])
@pytest.mark.parametrize("prompt", [1, 300, 1000, 2017])
def test_the_cache_is_allocated_as_predicted(fmt: str, prompt: int) -> None:
    """Also when a session got there in several turns, and with heads that are no multiple of 32 wide."""
    source = copy.deepcopy(PRESETS["tiny"])
    source["text_config"].update(head_dim=40, global_head_dim=80)
    c = parse_config(source, Path("config.json"))
    ops = CpuOps(1e-6, threads=1)
    in_one, in_turns = KVCache(ops, c, fmt), KVCache(ops, c, fmt)
    in_one.fill(prompt)
    in_one.reserve(c.canvas_length)
    while in_turns.length < prompt:
        rows = min(100, prompt - in_turns.length)
        in_turns.reserve(rows)
        in_turns.length += rows
    in_turns.reserve(c.canvas_length)
    predicted = memory(c, [prompt + c.canvas_length])["kv_cache"][0][fmt]
    for cache in (in_one, in_turns):
        arrays = [array for layer in cache.layers for array in (layer.k, layer.v)]
        assert predicted == cache.nbytes == sum(array.data.nbytes for array in arrays)


@pytest.mark.parametrize("context", [0, -5, 4097])
def test_context_beyond_the_model(context: int) -> None:
    with pytest.raises(InputError, match=r"context must be 1 to 4096 tokens"):
        describe(SOURCE, [context])


def test_plain_text_in_a_pipe() -> None:
    result = CliRunner().invoke(command, [str(SOURCE), "--tensors", "--context", "512,2048"])
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
    # one full layer with one head of 64, five sliding ones with two of 32 that hold their window of 16 and a pass
    f16 = [2 * 2 * (n * 64 + 5 * 384 * 2 * 32) / 1000 for n in (512, 2048)]
    assert ["512", f"{f16[0]:.3g}", "kB"] in [line[:3] for line in lines]
    assert ["2048", f"{f16[1] / 1000:.3g}", "MB"] in [line[:3] for line in lines]
    assert not any(line.endswith(" ") for line in result.output.splitlines())


def test_json() -> None:
    d = json.loads(CliRunner().invoke(command, [str(SOURCE), "--json"]).output)
    assert "tensors" not in d
    assert d["config"]["hidden_size"] == 64
    d = json.loads(CliRunner().invoke(command, [str(SOURCE), "--json", "--tensors"]).output)
    assert len(d["tensors"]) == 174
