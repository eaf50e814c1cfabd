"""Loading: the bytes that arrive, the memory it takes, and files that change or are not what they should be."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from checkpoint_files import copy_of, oracle_folder, read_tensors, write_sharded

import ddllm_vk
from ddllm_vk.checkpoint import open_checkpoint
from ddllm_vk.checkpoint.reader import StoredTensor
from ddllm_vk.checkpoint.synth import synthesize
from ddllm_vk.cpu.weights import Weight, unpack
from ddllm_vk.errors import CheckpointError, InputError
from ddllm_vk.quants import dequantize, quantize

MIB = 1 << 20


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """62 MB in q40 and q80."""
    path = tmp_path_factory.mktemp("loader") / "model"
    synthesize(path, "small", layers=1)
    return path


def rss() -> int:
    return psutil.Process().memory_info().rss


def loaded_weights(model: ddllm_vk.Model) -> dict[str, np.ndarray]:
    """float32 values by the checkpoint's names, without the scalars of layers."""
    w = model._weights
    named = {"embed_tokens": w.embed_tokens, "norm": w.norm}
    named |= {f"self_conditioning.{k}": v for k, v in w.self_conditioning.items()}
    for i, layer in enumerate(w.layers):
        named |= {f"layers.{i}.{k}": v for k, v in layer.items()}
    return {f"model.decoder.{k}": unpack(v) if isinstance(v, Weight) else v for k, v in named.items()}


def assert_loaded(model: ddllm_vk.Model, path: Path, expected=StoredTensor.float32) -> None:
    weights = loaded_weights(model)
    with open_checkpoint(path) as checkpoint:
        scalars = [name for name in checkpoint.tensors if name.endswith("layer_scalar")]
        assert len(weights) == len(checkpoint.tensors) - len(scalars)
        for name, tensor in checkpoint.tensors.items():
            if name not in scalars:
                assert np.array_equal(weights[name.removesuffix(".weight")], expected(tensor)), name


@pytest.mark.parametrize("keep_cached", [True, False])
@pytest.mark.parametrize("case", ["case_1_base", "case_6_canvas256"])
def test_rows_are_read_as_stored(case: str, keep_cached: bool):
    with open_checkpoint(oracle_folder(case)) as c:
        for tensor in c.tensors.values():
            raw = tensor.raw().reshape(tensor.rows, -1)
            first, count = tensor.rows // 3, tensor.rows - tensor.rows // 2
            rows = tensor.read_rows(first, count, keep_cached)
            assert rows.dtype == raw.dtype
            np.testing.assert_array_equal(rows.reshape(count, -1), raw[first : first + count])


def test_rows_of_a_file_cut_since_it_was_opened(tmp_path: Path):
    folder = copy_of("case_2_long_prompt", tmp_path / "model")
    with open_checkpoint(folder) as c:
        tensor = c.tensors["model.decoder.layers.0.self_attn.q_proj.weight"]
        os.truncate(folder / "model.safetensors", tensor.start + tensor.nbytes // 2)
        tensor.read_rows(0, tensor.rows // 2)
        with pytest.raises(
            CheckpointError, match=rf"model.safetensors: was truncated while tensor {tensor.name} was read"
        ):
            tensor.read_rows(0, tensor.rows)


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_what_is_loaded_is_what_the_file_holds(converted: Path, available: int, monkeypatch: pytest.MonkeyPatch):
    """Both where the system can keep the files in its cache and where it cannot."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert_loaded(ddllm_vk.load_model(converted, threads=3), converted)


@pytest.mark.parametrize("shards", [1, 3])
def test_float_checkpoints_of_any_number_of_files(shards: int, tmp_path: Path):
    folder = copy_of("case_2_long_prompt", tmp_path / "model")
    if shards > 1:
        write_sharded(folder, read_tensors(folder / "model.safetensors"), shards)
    assert_loaded(ddllm_vk.load_model(folder), folder)


def test_weights_are_quantised_while_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = copy_of("case_2_long_prompt", tmp_path / "model")

    def expected(tensor: StoredTensor) -> np.ndarray:
        fmt = {"float": "f32", "embedding": "q80", "matrix": "q40"}[tensor.role or ""]
        return dequantize(fmt, quantize(fmt, tensor.float32()))

    monkeypatch.setattr("ddllm_vk.cpu.weights._CHUNK_BYTES", 1)  # every tile is read by itself
    assert_loaded(ddllm_vk.load_model(folder, weights="q40"), folder, expected)


def test_loading_holds_no_second_copy(converted: Path, monkeypatch: pytest.MonkeyPatch):
    ddllm_vk.load_model(converted).close()
    read, seen = StoredTensor.read_rows, []

    def watched(*args, **options):
        rows = read(*args, **options)
        seen.append(rss())
        return rows

    monkeypatch.setattr(StoredTensor, "read_rows", watched)
    before = rss()
    model = ddllm_vk.load_model(converted)
    assert model.weight_bytes > 60e6
    assert max(seen) - before < model.weight_bytes + 16 * MIB


def test_close_gives_the_memory_back_again_and_again(converted: Path):
    ddllm_vk.load_model(converted).close()
    before, held, after = rss(), [], []
    for _ in range(20):
        model = ddllm_vk.load_model(converted)
        held.append(rss())
        model.close()
        after.append(rss())
    assert min(held) - before > 50 * MIB
    assert max(after[10:]) - after[9] < 8 * MIB  # what the allocator keeps is kept by then


def test_a_closed_model_says_so(converted: Path):
    model = ddllm_vk.load_model(converted)
    session = model.session()
    session.encode([2, 3])
    model.close()
    for use in (model.session, lambda: model.generate([2, 3]), lambda: session.encode([4])):
        with pytest.raises(InputError, match="closed; load it again"):
            use()


def test_a_file_cut_while_it_is_loaded(tmp_path: Path):
    folder = copy_of("case_2_long_prompt", tmp_path / "model")
    file = folder / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was truncated while tensor model\.\S+ was read"):
        ddllm_vk.load_model(folder, progress=lambda done, total: os.truncate(file, 100_000))


def test_an_error_while_loading_frees_what_was_loaded(converted: Path):
    ddllm_vk.load_model(converted).close()
    before = rss()

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            ddllm_vk.load_model(converted, progress=stop)
    assert rss() - before < 8 * MIB


def test_a_converted_model_without_quantised_arithmetic(converted: Path):
    assert_loaded(ddllm_vk.load_model(converted, weights="f32"), converted)
