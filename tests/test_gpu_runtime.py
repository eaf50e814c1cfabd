"""The seam: both runtimes move data, order dependent work, replay, and refuse what cannot work (gpu_fixtures.py)."""

import itertools

import numpy as np
import pytest

from ddllm_vk.gpu import vulkan_runtime
from ddllm_vk.gpu.program import Program


def copies(runtime, buffers, words):
    """A program that copies the first buffer into the second, the second into the third, and so on."""
    span = runtime.allocate(12, host=True)
    span.array()[:] = [0, 0, words]
    program = Program()
    for source, destination in itertools.pairwise(buffers):
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
