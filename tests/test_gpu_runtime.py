"""The seam: both runtimes move data, order dependent work, replay, and refuse what cannot work (gpu_fixtures.py)."""

import itertools
import threading

import numpy as np
import pytest

from ddllm_vk.errors import GpuError
from ddllm_vk.gpu import runtime as seam
from ddllm_vk.gpu import vulkan_runtime
from ddllm_vk.gpu.buffers import ALIGNMENT, Arena
from ddllm_vk.gpu.profile import seconds_by_shader
from ddllm_vk.gpu.program import Program
from ddllm_vk.gpu.vulkan_runtime import VulkanRuntime


def copies(runtime, slices, words):
    """A program that copies the first slice into the second, the second into the third, and so on."""
    span = runtime.allocate(12, host=True)
    span.array()[:] = [0, 0, words]
    program = Program()
    for source, destination in itertools.pairwise(slices):
        operands = {"source": source, "destination": destination, "span": span}
        program.dispatch(runtime.pipeline("copy_words"), operands, groups=(7,))
    return program, span


def test_validation_sees_a_missing_barrier(validation, runtime, monkeypatch):
    """The control of every other test here: without barriers the layer speaks."""
    if runtime.name != "vulkan":
        pytest.skip("Kompute's barriers are compiled in")
    monkeypatch.setattr(vulkan_runtime, "plan_barriers", lambda dispatches: [False] * len(dispatches))
    program, _ = copies(runtime, [runtime.allocate(400) for _ in range(3)], 100)
    runtime.record(program).run()
    assert "HAZARD" in validation.take()


@pytest.mark.parametrize("words", [1, 5, 1000, 30_001])
def test_dependent_dispatches_see_each_others_results(runtime, words):
    data = np.random.default_rng(words).integers(0, 2**32, words, dtype=np.uint32)
    buffers = [runtime.allocate(4 * words) for _ in range(6)]
    runtime.upload(buffers[0], data)
    program, _ = copies(runtime, buffers, words)
    runtime.record(program).run()
    np.testing.assert_array_equal(runtime.download(buffers[-1], np.uint32), data)


def test_a_replay_takes_its_parameters_from_host_memory(runtime):
    source, target = runtime.allocate(400), runtime.allocate(400)
    runtime.upload(source, np.arange(100, dtype=np.uint32))
    program, span = copies(runtime, [source, target], 0)
    recording = runtime.record(program)
    for start in (0, 40, 70):
        runtime.upload(target, np.zeros(100, dtype=np.uint32))
        span.array()[:] = [start, 5, 30]
        recording.run()
        expected = np.zeros(100, dtype=np.uint32)
        expected[5:35] = np.arange(start, start + 30)
        np.testing.assert_array_equal(runtime.download(target, np.uint32), expected)


def test_programs_that_follow_each_other_see_each_others_results(runtime):
    a, b, c = (runtime.allocate(4000) for _ in range(3))
    runtime.upload(a, np.arange(1000, dtype=np.uint32))
    first, second = (runtime.record(copies(runtime, pair, 1000)[0]) for pair in ([a, b], [b, c]))
    first.run()
    second.run()
    np.testing.assert_array_equal(runtime.download(c, np.uint32), np.arange(1000))


def test_one_pipeline_runs_with_several_sizes_and_offsets(runtime):
    """Push constants, numbers of workgroups and slices differ between dispatches of one pipeline in one program."""
    x = np.random.default_rng(0).standard_normal((9, 40), dtype=np.float32)
    memory = Arena(runtime, 2**16)
    source, result = memory.take(x.nbytes), memory.take(x.nbytes)
    assert source.buffer is result.buffer
    runtime.upload(source, x)
    norm, program, row_bytes = runtime.pipeline("rms_norm_no_weight"), Program(), 4 * 40
    for start, count, columns in ((0, 1, 40), (1, 3, 20), (4, 5, 40)):
        part = [s.buffer.slice(s.offset + start * row_bytes, count * row_bytes) for s in (source, result)]
        push = {"columns": columns, "eps": 0.5 * columns}
        program.dispatch(norm, {"x": part[0], "result": part[1]}, push, (count * 40 // columns,))
    runtime.record(program).run()
    expected = np.empty_like(x)
    for rows, columns in ((slice(0, 1), 40), (slice(1, 4), 20), (slice(4, 9), 40)):
        part = x[rows].reshape(-1, columns)
        normed = part / np.sqrt((part * part).mean(axis=1, keepdims=True) + 0.5 * columns)
        expected[rows] = normed.reshape(-1, 40)
    np.testing.assert_allclose(runtime.download(result).reshape(9, 40), expected, rtol=2e-6, atol=1e-7)


def test_results_can_be_written_to_host_memory(runtime):
    source, target = runtime.allocate(40), runtime.allocate(40, host=True)
    runtime.upload(source, np.arange(10, dtype=np.float32))
    runtime.record(copies(runtime, [source, target], 10)[0]).run()
    np.testing.assert_array_equal(target.array(np.float32), np.arange(10))


@pytest.mark.parametrize("nbytes", [1, 3, 4, 1001, 40_000])
def test_data_come_back_through_the_staging_buffer(staged_runtime, monkeypatch, nbytes):
    """In several pieces, from any word on; the buffer itself is not visible."""
    runtime = staged_runtime
    monkeypatch.setattr(seam, "STAGE_BYTES", 1024)
    buffer = runtime.allocate(nbytes + 1000)
    assert buffer.mapped is None
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    runtime.upload(buffer, np.full(buffer.nbytes, 7, dtype=np.uint8))
    runtime.upload(buffer.slice(12), data)
    found = runtime.download(buffer, np.uint8)
    np.testing.assert_array_equal(found[12 : 12 + nbytes], data)
    padded = 12 + -(-nbytes // 4) * 4
    assert (found[:12] == 7).all()
    assert (found[padded:] == 7).all()


def test_staged_data_are_seen_by_programs(staged_runtime):
    runtime = staged_runtime
    a, b = runtime.allocate(4000), runtime.allocate(4000)
    recording = runtime.record(copies(runtime, [a, b], 1000)[0])
    for start in (0, 5000):
        runtime.upload(a, np.arange(start, start + 1000, dtype=np.uint32))
        recording.run()
        np.testing.assert_array_equal(runtime.download(b, np.uint32), np.arange(start, start + 1000))


def test_other_threads_run_while_the_device_works(runtime):
    a, b = runtime.allocate(40_000), runtime.allocate(40_000)
    recording = runtime.record(copies(runtime, [a, b] * 500, 10_000)[0])
    turns, stop = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.wait(0.0005):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    recording.run()
    after = turns
    stop.set()
    thread.join()
    assert after > before


def test_memory_is_counted_and_given_back(runtime):
    before = runtime.allocated
    memory = Arena(runtime, expected=10_000)
    parts = [memory.take(n) for n in (1, 300, 9_000, 500, 12)]
    assert [p.offset % ALIGNMENT for p in parts] == [0] * 5
    assert [b.nbytes for b in memory.buffers] == [10_000, 500]  # the 12 bytes fit the first
    assert runtime.allocated - before == 10_500
    assert not any(a.overlaps(b) for a, b in itertools.combinations(parts, 2))
    memory.free()
    assert runtime.allocated == before


def test_a_matrix_larger_than_a_buffer_is_split_by_rows(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "largest_buffer", 4096)
    parts = Arena(runtime, 10_000).take_rows(rows=100, row_bytes=100)
    assert [rows for _, rows in parts] == [34, 34, 32]
    assert [part.nbytes for part, _ in parts] == [3400, 3400, 3200]


def test_only_host_memory_is_seen(runtime):
    """On every device alike: what works on a software device must not fail on a GPU."""
    with pytest.raises(GpuError, match="only host buffers"):
        runtime.allocate(40).array()


def test_a_freed_buffer_is_not_used(runtime):
    a, b = runtime.allocate(40), runtime.allocate(40)
    program, _ = copies(runtime, [a, b], 10)
    recording = runtime.record(program)
    runtime.free(a)
    for use in (recording.run, lambda: runtime.record(program), lambda: runtime.download(a)):
        with pytest.raises(GpuError, match="freed"):
            use()
    with pytest.raises(GpuError, match="freed"):
        runtime.upload(a, np.zeros(1, dtype=np.uint32))
    recording.free()
    with pytest.raises(GpuError, match="freed"):
        recording.run()


def test_what_belongs_to_another_runtime_is_refused(runtime, gpu_device):
    with VulkanRuntime(gpu_device) as other:
        a, b = runtime.allocate(40), other.allocate(40)
        for pair in ([a, b], [b, a]):
            program, _ = copies(runtime, pair, 10)
            with pytest.raises(GpuError, match="another runtime"):
                runtime.record(program)
        program, _ = copies(runtime, [a, a], 10)
        with pytest.raises(GpuError, match="another runtime"):
            other.record(program)


def test_what_does_not_fit_is_refused(runtime):
    buffer = runtime.allocate(40)
    span = runtime.allocate(12, host=True)
    copy, norm = runtime.pipeline("copy_words"), runtime.pipeline("rms_norm_no_weight")
    good = {"source": buffer, "destination": buffer, "span": span}
    program = Program()
    refused = [
        (r"copy_words has the bindings \(source, destination, span\)", lambda: program.dispatch(copy, {"x": buffer})),
        ("source from the start", lambda: program.dispatch(copy, good | {"source": buffer.slice(4, 4)})),
        ("push constants", lambda: program.dispatch(copy, good, {"rows": 1})),
        ("columns is a 32-bit uint", lambda: program.dispatch(norm, _norm(buffer), {"columns": -1, "eps": 0.0})),
        ("columns is a 32-bit uint", lambda: program.dispatch(norm, _norm(buffer), {"columns": 1.5, "eps": 0.0})),
        ("number of workgroups", lambda: program.dispatch(copy, good, groups=(0,))),
        ("no slice", lambda: buffer.slice(2, 4)),
        ("no slice", lambda: buffer.slice(0, 44)),
        ("largest holds", lambda: runtime.allocate(runtime.largest_buffer + 4)),
        ("largest holds", lambda: runtime.allocate(0)),
        ("do not fit", lambda: runtime.upload(buffer, np.zeros(11, dtype=np.float32))),
        ("without dispatches", lambda: runtime.record(program)),
        ("no shader 'rms'", lambda: runtime.pipeline("rms")),
        ("constant TILE", lambda: runtime.pipeline("rms_norm", {"TILE": 1})),
        ("WORKGROUP_X is a 32-bit uint", lambda: runtime.pipeline("rms_norm", {"WORKGROUP_X": -3})),
        ("exceeds the limits", lambda: runtime.pipeline("rms_norm", {"WORKGROUP_X": 1 << 20})),
        ("exceeds the limits", lambda: runtime.pipeline("rms_norm", {"WORKGROUP_X": 0})),
    ]
    for message, call in refused:
        with pytest.raises(GpuError, match=message):
            call()
    program.dispatch(copy, good, groups=(1 << 30,))
    with pytest.raises(GpuError, match="workgroups"):
        runtime.record(program)


def _norm(buffer):
    return {"x": buffer, "result": buffer}


def test_the_share_of_each_shader_is_measured(runtime):
    a, b = runtime.allocate(4000), runtime.allocate(4000)
    program, _ = copies(runtime, [a, b, a], 1000)
    program.dispatch(runtime.pipeline("rms_norm_no_weight"), _norm(a), {"columns": 10, "eps": 1.0}, (100,))
    recordings = len(runtime.recordings)
    shares = seconds_by_shader(runtime, program)
    assert {name: count for name, (count, _) in shares.items()} == {"copy_words": 2, "rms_norm_no_weight": 1}
    times = [seconds for _, seconds in shares.values()]
    assert times == sorted(times, reverse=True)
    assert min(times) > 0
    assert len(runtime.recordings) == recordings
