"""Bad models and bad requests through the command line: one clear line on stderr, nothing on stdout, exit 1 or 2."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ORACLE

from ddllm_vk.cli import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder to be damaged."""
    target = tmp_path / "model"
    shutil.copytree(ORACLE / "case_1_base/checkpoint", target)
    return target


def header_of(file: Path) -> tuple[dict, bytes]:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(file: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def missing_shard(folder: Path) -> None:
    header, _ = header_of(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = [n for n in header if n != "__metadata__"]
    shards = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {names[0]: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def wrong_shape(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    header["model.decoder.norm.weight"]["shape"] = [8, 8]
    write(folder / "model.safetensors", header, data)


def wrong_dtype(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    header["model.decoder.norm.weight"]["dtype"] = "I32"
    write(folder / "model.safetensors", header, data)


def not_a_number(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    start = header["model.decoder.layers.2.mlp.up_proj.weight"]["data_offsets"][0]
    write(folder / "model.safetensors", header, data[:start] + np.float32("nan").tobytes() + data[start + 4 :])


def missing_tensor(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    entry = header.pop("model.decoder.layers.0.router.scale")
    header["model.decoder.layers.0.router.scales"] = entry
    write(folder / "model.safetensors", header, data)


def wrong_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))


def no_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text('{"a": ')


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pipe(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")


def dangling(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("gone.json")


def nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGES = {
    "truncated shard": (truncate, ["model.safetensors", "truncated"]),
    "missing shard": (missing_shard, ["model-00002-of-00002.safetensors"]),
    "wrong shape": (wrong_shape, ["model.safetensors", "model.decoder.norm.weight"]),
    "wrong dtype": (wrong_dtype, ["model.safetensors", "model.decoder.norm.weight", "I32"]),
    "NaN weights": (not_a_number, ["model.safetensors", "model.decoder.layers.2.mlp.up_proj.weight"]),
    "misnamed tensor": (missing_tensor, ["router.scale"]),
    "wrong model_type": (wrong_model_type, ["config.json", "model_type", "gemma3"]),
    "missing field": (no_field, ["config.json", "sliding_window"]),
    "no tokenizer": (no_tokenizer, ["tokenizer.json"]),
    "broken config.json": (broken("config.json"), ["config.json", "JSON"]),
    "broken generation_config.json": (broken("generation_config.json"), ["generation_config.json", "JSON"]),
    "broken tokenizer.json": (broken("tokenizer.json"), ["tokenizer.json"]),
    "broken tokenizer_config.json": (broken("tokenizer_config.json"), ["tokenizer_config.json"]),
    "pickle": (pickled, ["pytorch_model.bin", "safetensors"]),
    "a pipe": (pipe, ["chat_template.jinja", "regular file"]),
    "a dangling link": (dangling, ["generation_config.json", "not there"]),
    "not a model": (nothing, ["model"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model(damage: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    spoil, named = DAMAGES[damage]
    spoil(folder)
    assert run(["generate", "--model", str(folder), "sum", "--steps", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    message = [line for line in err.splitlines() if not line.startswith("first run")]
    assert len(message) == 1
    assert message[0].startswith("error: ")
    for word in named:
        assert word in message[0]


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["generate", ""], 2, "prompt is empty"),
        (["generate", "  \n"], 2, "prompt is empty"),
        (["generate", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["generate", "a", "--steps", "-1"], 2, "--steps"),
        (["generate", "a", "--threads", "0"], 2, "--threads"),
        (["generate", "a", "--t-max", "nan"], 2, "--t-max"),
        (["generate", "word " * 5000], 1, "context of 4096"),
        (["generate", "a", "--model", "/nonexistent"], 1, "/nonexistent"),
        (["generate", "a", "--model", "/dev/null"], 1, "/dev/null"),
        (["bench", "--context", "4096"], 1, "--context"),
        (["demo", "--count", "0"], 2, "--count"),
    ],
)
def test_a_request_that_cannot_be_met(args: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]):
    assert run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["convert", "synth"])
def test_a_target_that_cannot_be_written(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "model"
    source = [str(ORACLE / "case_1_base/checkpoint")]
    assert run([command, *(source if command == "convert" else []), str(target)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path / "file") in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_convert_without_a_tokenizer_is_refused_before_the_work(folder: Path, capsys: pytest.CaptureFixture[str]):
    no_tokenizer(folder)
    assert run(["convert", str(folder), str(folder.parent / "converted")]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
