"""VulkanOps against ReferenceOps, and how its passes are recorded, replayed and forgotten (gpu/passes.py)."""

import gc
import logging

import numpy as np
import pytest

import ddllm_vk
import ddllm_vk.gpu.choice
import ddllm_vk.gpu.devices
from ddllm_vk.backends.reference import ReferenceOps
from ddllm_vk.backends.vulkan import VulkanOps
from ddllm_vk.errors import GpuError, InputError
from ddllm_vk.gpu import passes
from ddllm_vk.gpu.weights import device_bytes
from ddllm_vk.quants import quantize

F32 = np.float32


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


@pytest.fixture
def ops(runtime) -> VulkanOps:
    return VulkanOps(runtime, 1e-6)


def both(ops: VulkanOps, fmt: str, values: np.ndarray) -> tuple:
    """A weight uploaded to the device and to the reference."""
    raw = quantize(fmt, values)
    rows = raw.reshape(-1, *raw.shape[values.ndim - 1 :])

    def read(first: int, count: int) -> np.ndarray:
        return rows[first : first + count]

    return ops.upload(fmt, read, values.shape), ReferenceOps(1e-6).upload(fmt, read, values.shape)


@pytest.mark.parametrize(("gate_up_format", "down_format"), [("q40", "f32"), ("f32", "q40"), ("q80", "q40")])
def test_experts_of_mixed_formats(ops, gate_up_format, down_format):
    hidden, width = (64, 40) if down_format == "f32" else (48 if gate_up_format == "f32" else 64, 64)
    gate_up = both(ops, gate_up_format, random(0, 5, 2 * width, hidden))
    down = both(ops, down_format, random(1, 5, hidden, width))
    x = random(2, 7, hidden)
    ids = np.array([[i % 5, (i + 2) % 5] for i in range(7)], np.int32)
    weights = np.abs(random(3, 7, 2))
    expected = ReferenceOps(1e-6).experts(x, ids, weights, gate_up[1], down[1])
    arrays = []
    for values in (x, ids, weights):
        place = ops.runtime.allocate(values.nbytes).slice()
        ops.runtime.upload(place, values)
        arrays.append(ops._array(place, values.shape, values.dtype))
    with ops.scope():
        found = np.asarray(ops.experts(*arrays, gate_up[0], down[0]))
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def test_weights_are_split_where_a_buffer_cannot_hold_them(ops, monkeypatch):
    monkeypatch.setattr(ops.runtime, "largest_buffer", 8192)
    table, reference = both(ops, "q80", random(0, 500, 64))
    assert len(table.parts) > 3
    assert sum(part.count for part in table.parts) == 500
    assert all(part.slice.nbytes <= 8192 for part in table.parts)
    stack, _ = both(ops, "q40", random(1, 7, 48, 64))
    assert [(part.first, part.count) for part in stack.parts] == [(0, 4), (4, 3)]
    monkeypatch.undo()
    ids = np.array([0, 499, 250, 16, 15, 127], np.int32)
    with ops.scope():
        x = ops.embedding_rows(table, ids, 2.0)
        (y,) = ops.linear(x, table)
        expected = ReferenceOps(1e-6).embedding_rows(reference, ids, 2.0)
        np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-6)
        wanted = ReferenceOps(1e-6).linear(expected, reference)[0]
        np.testing.assert_allclose(np.asarray(y), wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)


def test_caches_are_resized_and_shifted(ops):
    x = random(0, 9, 2 * 4)
    place = ops.runtime.allocate(x.nbytes).slice()
    ops.runtime.upload(place, x)
    cache = ops.new_cache("f32", 2, 12, 4)
    with ops.scope():
        ops.store_rows(ops._array(place, x.shape), cache, 2)
    rows = x.reshape(9, 2, 4).transpose(1, 0, 2)
    assert np.array_equal(cache[:, 2:11], rows)
    larger = ops.resize_cache(cache, 20, 4, 7)
    assert larger.shape == (2, 20, 4)
    assert np.array_equal(larger[:, :7], rows[:, 2:])
    assert ops.resize_cache(cache, 12, 3, 8) is cache  # overlapping slots
    assert np.array_equal(cache[:, :8], rows[:, 1:])


def test_a_pass_is_recorded_once_and_is_one_submission(ops):
    table, reference = both(ops, "f32", random(0, 40, 8))

    def run(ids):
        with ops.scope():
            x = ops.embedding_rows(table, ids, 1.0)
            return np.asarray(ops.rms_norm(ops.add(x, x), None))

    before = len(ops.runtime.recordings)
    for seed in range(3):  # what changes is in host memory: the ids
        ids = np.random.default_rng(seed).integers(0, 40, 5, dtype=np.int32)
        expected = ReferenceOps(1e-6).rms_norm(2 * reference[ids], None)
        np.testing.assert_allclose(run(ids), expected, rtol=2e-6)
        assert ops.passes.submissions == seed + 1
        assert len(ops.runtime.recordings) == before + 1
    run(np.arange(6, dtype=np.int32))  # another shape is another pass
    assert len(ops.runtime.recordings) == before + 2


def test_passes_are_forgotten(ops, monkeypatch):
    monkeypatch.setattr(passes, "MOST_RECORDINGS", 3)
    table, _ = both(ops, "f32", random(0, 40, 8))
    before = len(ops.runtime.recordings)
    for rows in range(1, 9):
        with ops.scope():
            ops.embedding_rows(table, np.zeros(rows, np.int32), 1.0)
    assert len(ops.runtime.recordings) == before + 3
    assert len(ops.passes._root.children) == 3


def test_memory_of_arrays_that_are_let_go_is_given_back(ops):
    x = ops._array(ops.runtime.allocate(64).slice(), (2, 8))
    before, recordings = ops.runtime.allocated, len(ops.runtime.recordings)
    for _ in range(3):
        cache = ops.new_cache("f16", 2, 4, 4)
        with ops.scope():
            ops.store_rows(x, cache, 0)
        del cache
        gc.collect()
        with ops.scope():
            pass
    assert len(ops.runtime.recordings) == recordings
    assert ops.runtime.allocated <= before + passes._PARAMETER_CHUNK


def test_a_pass_that_fails_leaves_nothing_pending(ops):
    table, _ = both(ops, "f32", random(0, 40, 8))
    with pytest.raises(IndexError), ops.scope():
        ops.embedding_rows(table, np.zeros(2, np.int32), 1.0).shape[5]
    assert not ops.passes.pending
    assert ops.passes.submissions == 0


def test_what_does_not_fit_is_refused_before_it_is_uploaded(ops, monkeypatch):
    monkeypatch.setattr(ops.runtime, "free_bytes", lambda: 1000)
    with pytest.raises(GpuError, match=r"the model needs"):
        ops.expect([("q40", (64, 64)), ("f32", (5,))])
    assert device_bytes("q40", (64, 64)) == 64 * 64 * 18 // 32
    ops.expect([("f32", (5,))])


def test_caches_that_the_shaders_cannot_take_are_refused(ops):
    with pytest.raises(GpuError, match="head_dim 6"):
        ops.new_cache("f32", 1, 1, 6)
    with pytest.raises(InputError, match="f16 and f32"):
        ops.new_cache("q80", 1, 1, 4)


def test_auto_never_takes_a_software_device(gpu_device, caplog):
    if gpu_device.type != "cpu":
        pytest.skip("there is a GPU")
    with caplog.at_level(logging.WARNING, "ddllm_vk"):
        model = ddllm_vk.load_model(backend="auto")
    assert model.backend == "cpu"
    assert "running on the CPU" in caplog.text
    assert "software" in caplog.text
    model.close()


def test_auto_falls_back_and_vulkan_fails_without_a_driver(monkeypatch, caplog):
    def none():
        raise GpuError("no Vulkan driver")

    monkeypatch.setattr(ddllm_vk.gpu.devices, "list_devices", none)
    with pytest.raises(GpuError, match="no Vulkan driver"):
        ddllm_vk.load_model(backend="vulkan")
    model = ddllm_vk.load_model(backend="auto")
    assert model.backend == "cpu"
    assert "running on the CPU: no Vulkan driver" in caplog.text
    model.close()
