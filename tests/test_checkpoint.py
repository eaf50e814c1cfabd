"""Opening checkpoints: what is found in good ones, and what is said about bad ones."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from checkpoint_files import (
    ORACLE,
    Tensors,
    copy_of,
    oracle_folder,
    read_tensors,
    write_raw,
    write_sharded,
    write_tensors,
)
from safetensors import safe_open
from safetensors.numpy import load_file

from ddllm_vk import quants
from ddllm_vk.checkpoint import expected_tensors, open_checkpoint
from ddllm_vk.checkpoint.reader import StoredTensor
from ddllm_vk.config import load_config
from ddllm_vk.errors import CheckpointError, ConfigError, DdllmError

CASES = sorted(p.name for p in ORACLE.iterdir() if (p / "checkpoint").is_dir())
Q_PROJ = "model.decoder.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.decoder.embed_tokens.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small bf16 checkpoint to break."""
    return copy_of("case_2_long_prompt", tmp_path / "model")


def edit(folder: Path, change: Callable[[dict[str, list]], object]) -> None:
    """Rewrites the weights after `change` has had its way with name -> [dtype, shape, bytes]."""
    tensors = read_tensors(folder / WEIGHTS)
    change(tensors.by_name)
    write_tensors(folder / WEIGHTS, tensors)


def message(path: Path, error: type[DdllmError] = CheckpointError) -> str:
    """What opening `path` says, which must be one line."""
    with pytest.raises(error) as e:
        open_checkpoint(path)
    text = str(e.value)
    assert text.isprintable()
    return text


# Good checkpoints


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_the_reference(case: str) -> None:
    with safe_open(oracle_folder(case) / WEIGHTS, "np") as f:
        stored = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
    expected = expected_tensors(load_config(oracle_folder(case)))
    vision = {n for n in stored if n.startswith(("model.encoder.vision_tower.", "model.encoder.embed_vision."))}
    assert {n: s.shape for n, s in expected.items()} == {n: s for n, s in stored.items() if n not in vision}
    with open_checkpoint(oracle_folder(case)) as c:
        assert set(c.vision) == vision
        assert list(c.tensors) == list(expected)
        c.check_finite()


def test_values_are_those_of_the_file() -> None:
    expected = load_file(oracle_folder("case_1_base") / WEIGHTS)
    with open_checkpoint(oracle_folder("case_1_base")) as c:
        for name, tensor in (c.tensors | c.vision).items():
            np.testing.assert_array_equal(tensor.raw(), expected[name])
            np.testing.assert_array_equal(tensor.float32(), expected[name])
            assert tensor.raw().dtype == np.float32
            assert not tensor.raw().flags.writeable
        assert c.total_bytes == sum(x.nbytes for x in expected.values())


def test_bf16_is_given_as_bits_and_as_exact_float32() -> None:
    file = oracle_folder("case_2_long_prompt") / WEIGHTS
    bits = np.frombuffer(read_tensors(file).by_name[Q_PROJ][2], "<u2").reshape(128, 64)
    with open_checkpoint(file.parent) as c:
        np.testing.assert_array_equal(c.tensors[Q_PROJ].raw(), bits)
        values = [struct.unpack("<f", struct.pack("<I", int(b) << 16))[0] for b in bits[3]]
        np.testing.assert_array_equal(c.tensors[Q_PROJ].float32()[3], values)


def test_f16_is_read(folder: Path) -> None:
    x = np.linspace(-2, 2, 128 * 64, dtype=np.float16).reshape(128, 64)
    edit(folder, lambda t: t.update({Q_PROJ: ["F16", [128, 64], x.tobytes()]}))
    with open_checkpoint(folder) as c:
        assert c.tensors[Q_PROJ].format == "f16"
        np.testing.assert_array_equal(c.tensors[Q_PROJ].raw(), x)


def test_shards_hold_the_same_as_one_file(folder: Path) -> None:
    with open_checkpoint(folder) as c:
        whole = {name: t.float32() for name, t in c.tensors.items()}
    write_sharded(folder, read_tensors(folder / WEIGHTS), 3)
    with open_checkpoint(folder) as c:
        assert len(c.files) == 3
        for name, x in whole.items():
            np.testing.assert_array_equal(c.tensors[name].float32(), x)


def test_encoder_and_decoder_scalars_are_kept_apart(folder: Path) -> None:
    encoder, decoder = "model.encoder.language_model.layers.1.layer_scalar", "model.decoder.layers.1.layer_scalar"
    edit(folder, lambda t: t.update({encoder: ["F32", [1], struct.pack("<f", 0.25)]}))
    edit(folder, lambda t: t.update({decoder: ["F32", [1], struct.pack("<f", 0.75)]}))
    with open_checkpoint(folder) as c:
        assert c.tensors[encoder].float32() == [0.25]
        assert c.tensors[decoder].float32() == [0.75]


def test_tied_copies_are_ignored(folder: Path) -> None:
    """Where both names are stored, the reference overwrites the copy."""
    copies = ("lm_head.weight", "model.encoder.language_model.embed_tokens.weight")
    edit(folder, lambda t: t.update({n: [*t[EMBEDDING][:2], bytes(len(t[EMBEDDING][2]))] for n in copies}))
    with open_checkpoint(folder) as c:
        assert set(c.ignored) == set(copies)
        assert c.tensors[EMBEDDING].float32().any()


def test_a_tensor_stored_under_its_tied_name_only_is_found(folder: Path) -> None:
    other = Q_PROJ.replace("model.decoder.", "model.encoder.language_model.")
    with open_checkpoint(folder) as c:
        expected = c.tensors[Q_PROJ].float32()
    edit(folder, lambda t: t.update({other: t.pop(Q_PROJ)}))
    with open_checkpoint(folder) as c:
        np.testing.assert_array_equal(c.tensors[Q_PROJ].float32(), expected)


def test_blocks_are_read_by_format_and_logical_shape(folder: Path) -> None:
    x = np.random.default_rng(0).standard_normal((128, 64), dtype=np.float32)
    blocks = quants.quantize_q40(x)
    tensors = read_tensors(folder / WEIGHTS)
    tensors.by_name[Q_PROJ] = ["U8", list(blocks.shape), blocks.tobytes()]
    declared = json.dumps({Q_PROJ: {"format": "q40", "shape": [128, 64]}})
    tensors.metadata = {"ddllm_vk.format_version": "1", "ddllm_vk.quantized": declared}
    write_tensors(folder / WEIGHTS, tensors)
    with open_checkpoint(folder) as c:
        tensor = c.tensors[Q_PROJ]
        assert (tensor.format, tensor.shape, tensor.raw().shape) == ("q40", (128, 64), (128, 2, 18))
        np.testing.assert_array_equal(tensor.raw(), blocks)
        np.testing.assert_array_equal(tensor.float32(), quants.dequantize_q40(blocks))


def test_views_outlive_the_checkpoint() -> None:
    with open_checkpoint(oracle_folder("case_1_base")) as c:
        view = c.tensors[Q_PROJ].raw()
        expected = view.copy()
    np.testing.assert_array_equal(view, expected)


def test_release_gives_memory_back(folder: Path) -> None:
    big = "model.encoder.vision_tower.big"
    size = 64 << 20
    edit(folder, lambda t: t.update({big: ["F32", [size // 4], bytes(size)]}))
    process = psutil.Process()
    with open_checkpoint(folder) as c:
        before = process.memory_info().rss
        view = c.vision[big].raw()
        assert view.sum() == 0
        touched = process.memory_info().rss
        c.vision[big].release()
        released = process.memory_info().rss
        assert view[123] == 0
    assert touched - before > 0.9 * size
    assert released - before < 0.1 * size


# Paths that are no model


def test_no_such_path(tmp_path: Path) -> None:
    assert "nowhere: does not exist" in message(tmp_path / "nowhere")


def test_a_folder_that_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a model folder" in message(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.gguf", "GGUF"),
        ("x.safetensors", "give the folder"),
        ("pytorch_model.bin", "can execute code"),
        ("x.txt", "is a file; a model is a folder"),
    ],
)
def test_a_file_instead_of_a_folder(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_bytes(b"abc")
    text = message(tmp_path / name)
    assert name in text
    assert says in text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    text = message(folder)
    assert name in text
    assert "can execute code" in text
    assert "safetensors" in text


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    open_checkpoint(folder).close()


def test_config_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "has no weights" in message(folder)


def test_weights_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in message(folder)


def test_shards_without_index(folder: Path) -> None:
    write_sharded(folder, read_tensors(folder / WEIGHTS), 2)
    (folder / INDEX).unlink()
    assert "download the index" in message(folder)


def test_another_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    text = message(folder, ConfigError)
    assert "config.json" in text
    assert "'llama'" in text


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 200_000])
def test_broken_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in message(folder, ConfigError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_weights(folder: Path) -> None:
    (folder / WEIGHTS).chmod(0)
    assert "cannot be read" in message(folder)


def test_weights_that_are_a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert "is a folder" in message(folder)


# Files that are damaged


@pytest.mark.parametrize("keep", [0, 5, 8, 1000, -1, -100_000])
def test_truncated_file(folder: Path, keep: int) -> None:
    file = folder / WEIGHTS
    size = file.stat().st_size
    os.truncate(file, keep % size if keep else 0)
    text = message(folder)
    assert f"{file}: is truncated" in text
    if keep < 0:
        assert f"needs {size} bytes, has {size + keep}; copy it again" in text


def test_trailing_bytes(folder: Path) -> None:
    with open(folder / WEIGHTS, "ab") as f:
        f.write(b"xyz")
    assert "3 more than" in message(folder)


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"not json", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": {}, "a": {}}', "twice"),
        (b'{"a": [' + b"9" * 5000 + b"]}", "not valid JSON"),
        ({"a": 1}, "malformed header entry"),
        ({"a": {}}, "unknown dtype"),
        ({"a": entry("F4")}, "unknown dtype"),
        ({"a": entry(shape=[-2])}, "malformed shape"),
        ({"a": entry(shape=[True, 2])}, "malformed shape"),
        ({"a": entry(shape="2")}, "malformed shape"),
        ({"a": entry(shape=[1] * 9 + [2])}, "malformed shape"),
        ({"a": entry(offsets=[8, 0])}, "malformed data_offsets"),
        ({"a": entry(offsets=[0])}, "malformed data_offsets"),
        ({"a": entry(offsets=[0, 8.0])}, "malformed data_offsets"),
        ({"a": entry(offsets=[-8, 0])}, "malformed data_offsets"),
        ({"a": entry(shape=[3])}, "has 8 bytes, but F32 [3] needs 12"),
        ({"a": entry(shape=[2**62, 2**62])}, "needs"),
        ({"a": entry(offsets=[2**60, 2**60 + 8])}, "is truncated"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlap"),
        ({"a\n\x1b[31m": entry()}, "malformed name"),
        ({"__metadata__": {"x": 1}, "a": entry()}, "__metadata__"),
        ({"__metadata__": {"ddllm_vk.format_version": "99"}, "a": entry()}, "update"),
    ],
)
def test_broken_header(folder: Path, header: object, says: str) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_raw(folder / WEIGHTS, raw, bytes(8))
    text = message(folder)
    assert text.startswith(f"{folder / WEIGHTS}: ")
    assert says in text


def test_absurd_header_length(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 64)
    assert "is not a safetensors file" in message(folder)


@pytest.mark.parametrize(
    "declared",
    [
        "no json",
        "[]",
        {Q_PROJ: 1},
        {Q_PROJ: {"format": "q99", "shape": [128, 64]}},
        {Q_PROJ: {"format": "q40", "shape": [128, 60]}},
        {Q_PROJ: {"format": "q40", "shape": []}},
        {Q_PROJ: {"format": "q40", "shape": [128, 64]}},  # it is stored as BF16
        {"nothing": {"format": "q40", "shape": [128, 64]}},
    ],
)
def test_broken_block_metadata(folder: Path, declared: object) -> None:
    tensors = read_tensors(folder / WEIGHTS)
    text = declared if isinstance(declared, str) else json.dumps(declared)
    tensors.metadata = {"ddllm_vk.format_version": "1", "ddllm_vk.quantized": text}
    write_tensors(folder / WEIGHTS, tensors)
    assert WEIGHTS in message(folder)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_to_the_header_is_an_error_or_harmless(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = (folder / WEIGHTS).read_bytes()
    header, messages = 8 + int.from_bytes(data[:8], "little"), []
    for _ in range(25):
        damaged = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 5)):
            damaged[at] = rng.integers(256) if rng.random() < 0.5 else rng.choice(list(b'0123456789[]{},:"-'))
        (folder / WEIGHTS).write_bytes(damaged)
        try:
            open_checkpoint(folder).check_finite()
        except CheckpointError as e:
            messages.append(str(e))
    assert messages
    assert all(text.isprintable() for text in messages)


# Weights that do not fit the config


def test_wrong_shape(folder: Path) -> None:
    edit(folder, lambda t: t[Q_PROJ].__setitem__(1, [64, 128]))
    assert f"{WEIGHTS}: tensor {Q_PROJ} has shape [64, 128]; config.json asks for [128, 64]" in message(folder)


@pytest.mark.parametrize(("dtype", "width"), [("I8", 1), ("F64", 8), ("U8", 1)])
def test_wrong_dtype(folder: Path, dtype: str, width: int) -> None:
    edit(folder, lambda t: t.update({Q_PROJ: [dtype, [128, 64], bytes(128 * 64 * width)]}))
    assert f"{WEIGHTS}: tensor {Q_PROJ} has dtype {dtype}" in message(folder)


def test_unknown_tensors_are_named_and_counted(folder: Path) -> None:
    names = [f"model.decoder.extra.{i}" for i in range(7)]
    edit(folder, lambda t: t.update({name: ["F32", [1], bytes(4)] for name in names}))
    text = message(folder)
    assert "7 unknown tensors" in text
    assert names[0] in text


def test_missing_tensors_are_named_and_counted(folder: Path) -> None:
    edit(folder, lambda t: [t.pop(name) for name in (Q_PROJ, "model.encoder.language_model.layers.2.layer_scalar")])
    text = message(folder)
    assert "2 tensors" in text
    assert Q_PROJ in text
    assert "model.encoder.language_model.layers.2.layer_scalar" in text


def test_full_layers_have_no_v_proj(folder: Path) -> None:
    name = "model.decoder.layers.5.self_attn.v_proj.weight"
    edit(folder, lambda t: t.update({name: t["model.decoder.layers.5.self_attn.k_proj.weight"]}))
    assert name in message(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_are_not_finite(folder: Path, dtype: str, value: float) -> None:
    fmt = dtype.lower()
    x = np.zeros((128, 64), np.float32)
    x[100, 3] = value
    raw = (x.view(np.uint32) >> 16).astype("<u2") if fmt == "bf16" else quants.quantize(fmt, x)
    edit(folder, lambda t: t.update({Q_PROJ: [dtype, [128, 64], raw.tobytes()]}))
    with open_checkpoint(folder) as c, pytest.raises(CheckpointError) as e:
        c.check_finite()
    assert f"{folder / WEIGHTS}: tensor {Q_PROJ} has values that are NaN or infinite" in str(e.value)
    with open_checkpoint(folder) as c, pytest.raises(CheckpointError) as e:
        c.tensors[Q_PROJ].read_rows(90, 20)
    assert f"{folder / WEIGHTS}: tensor {Q_PROJ} has values that are NaN or infinite" in str(e.value)


@pytest.mark.parametrize(("fmt", "size"), [("q40", 18), ("q80", 34)])
def test_block_scales_that_are_not_finite(tmp_path: Path, folder: Path, fmt: str, size: int) -> None:
    blocks = np.full((128, 2, size), 0xFF, np.uint8)  # weights of all ones bits are fine, such scales are not
    blocks[..., :2] = 0
    for bad in (False, True):
        if bad:
            blocks[77, 1, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        tensors = read_tensors(folder / WEIGHTS)
        tensors.by_name[Q_PROJ] = ["U8", list(blocks.shape), blocks.tobytes()]
        declared = json.dumps({Q_PROJ: {"format": fmt, "shape": [128, 64]}})
        tensors.metadata = {"ddllm_vk.format_version": "1", "ddllm_vk.quantized": declared}
        write_tensors(folder / WEIGHTS, tensors)
        with open_checkpoint(folder) as c:
            tensor: StoredTensor = c.tensors[Q_PROJ]
            if not bad:
                tensor.check_finite()
                continue
            with pytest.raises(CheckpointError, match="has scales that are NaN or infinite"):
                tensor.check_finite()
            tensor.read_rows(0, 77)
            with pytest.raises(CheckpointError, match=f"tensor {Q_PROJ} has scales that are NaN or infinite"):
                tensor.read_rows(77, 1)


# Shards


@pytest.fixture
def sharded(folder: Path) -> Path:
    write_sharded(folder, read_tensors(folder / WEIGHTS), 2)
    return folder


SECOND = "model-00002-of-00002.safetensors"


def test_index_naming_a_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    text = message(sharded)
    assert f"{sharded / SECOND}: " in text
    assert "not in the folder" in text


def test_truncated_shard(sharded: Path) -> None:
    os.truncate(sharded / SECOND, 100_000)
    assert f"{SECOND}: is truncated: needs" in message(sharded)


def test_tensor_of_the_index_absent_from_its_shard(sharded: Path) -> None:
    tensors = read_tensors(sharded / SECOND)
    name = next(iter(tensors.by_name))
    del tensors.by_name[name]
    write_tensors(sharded / SECOND, tensors)
    text = message(sharded)
    assert f"{SECOND}: tensor {name} is missing" in text


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = (read_tensors(sharded / n) for n in ("model-00001-of-00002.safetensors", SECOND))
    name = next(iter(first.by_name))
    write_tensors(sharded / SECOND, Tensors(second.by_name | {name: first.by_name[name]}))
    assert name in message(sharded)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../../secret.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "model.bin"}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    ],
)
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in message(sharded)
