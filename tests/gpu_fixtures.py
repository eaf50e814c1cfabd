"""What tests of the GPU layer share: both runtimes under synchronization validation, and run_shader.

Vulkan's validation layer writes its messages into a pipe, whoever creates an instance: this process with either
runtime, or one it starts. A test that leaves a message there fails. Without a Vulkan driver, without the layer or
without Kompute the tests are skipped, unless DDLLM_VK_REQUIRE_GPU is set, as in continuous integration.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ddllm_vk.errors import GpuError
from ddllm_vk.gpu.devices import Device, list_devices, load_vulkan
from ddllm_vk.gpu.kompute_runtime import KomputeRuntime
from ddllm_vk.gpu.program import Program
from ddllm_vk.gpu.runtime import Runtime
from ddllm_vk.gpu.vulkan_runtime import VulkanRuntime

LAYER = "VK_LAYER_KHRONOS_validation"
RUNTIMES = {"vulkan": VulkanRuntime, "kompute": KomputeRuntime}
# The keys of layers of 2023 and of later ones; each ignores the other's.
SETTINGS = """\
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn,perf
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
khronos_validation.validate_sync = true
khronos_validation.log_filename = {log}
"""
F_SETPIPE_SZ = 1031


def missing(reason: str) -> None:
    """Skips the test, or fails it where GPU tests are required."""
    if os.environ.get("DDLLM_VK_REQUIRE_GPU"):
        pytest.fail(reason)
    pytest.skip(reason)


class Validation:
    """The messages of the validation layer since they were last taken."""

    def __init__(self, folder: pathlib.Path):
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        fcntl.fcntl(self._write, F_SETPIPE_SZ, 2**20)
        settings = folder / "vk_layer_settings.txt"
        settings.write_text(SETTINGS.format(log=f"/proc/{os.getpid()}/fd/{self._write}"))
        self.environment = {"VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": str(settings)}

    def take(self) -> str:
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._read, 2**20):
                parts.append(part)
        return b"".join(parts).decode(errors="replace")


@pytest.fixture(scope="session")
def validation(tmp_path_factory) -> Iterator[Validation]:
    """Turns the layer on for every Vulkan instance from here on, in this process and in those it starts."""
    try:
        layers = {layer.layerName for layer in load_vulkan().vkEnumerateInstanceLayerProperties()}
    except GpuError as e:
        missing(str(e))
    if LAYER not in layers:
        missing(f"{LAYER} is not installed (Debian: vulkan-validationlayers)")
    messages = Validation(tmp_path_factory.mktemp("validation"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in messages.environment.items():
            patch.setenv(name, value)
        yield messages


@pytest.fixture(scope="session")
def gpu_device(validation) -> Device:
    """Device 0: lavapipe where there is no GPU. DDLLM_VK_TEST_DEVICE names another."""
    try:
        return list_devices()[int(os.environ.get("DDLLM_VK_TEST_DEVICE", "0"))]
    except GpuError as e:
        missing(str(e))
        raise


@pytest.fixture(scope="session")
def open_runtimes(gpu_device) -> Iterator[dict[tuple[str, bool], Runtime]]:
    opened: dict[tuple[str, bool], Runtime] = {}
    yield opened
    for runtime in opened.values():
        runtime.close()


@pytest.fixture
def no_messages(validation) -> Iterator[None]:
    """The test fails if the validation layer says anything meanwhile."""
    validation.take()
    yield
    said = validation.take()
    assert not said, f"the validation layer says:\n{said}"


@pytest.fixture(params=list(RUNTIMES))
def runtime(request, gpu_device, open_runtimes, no_messages) -> Iterator[Runtime]:
    """Each runtime in turn. What the test allocates and records is freed after it."""
    yield from _lend(request.param, None, gpu_device, open_runtimes)


@pytest.fixture(params=list(RUNTIMES))
def staged_runtime(request, gpu_device, open_runtimes, no_messages) -> Iterator[Runtime]:
    """The same, moving data through the staging buffer as on a GPU with memory of its own."""
    yield from _lend(request.param, False, gpu_device, open_runtimes)


def _lend(name: str, direct: bool | None, device: Device, opened: dict) -> Iterator[Runtime]:
    if (name, direct) not in opened:
        try:
            opened[name, direct] = RUNTIMES[name](device, direct)
        except GpuError as e:
            missing(str(e))
    runtime = opened[name, direct]
    held = list(runtime.buffers)
    recordings = list(runtime.recordings)
    yield runtime
    for recording in [r for r in runtime.recordings if r not in recordings]:
        recording.free()
    for buffer in [b for b in runtime.buffers if b not in held]:
        runtime.free(buffer)


RunShader = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def run_shader(runtime) -> RunShader:
    """run_shader(name, {binding: array}, push, groups, constants=None, offset=300) -> {binding: array} it may write.

    Arrays go to the device as they are, each into a slice of its own that begins at byte `offset` of a bigger buffer
    if the shader takes an offset (`<binding>_at`); what comes back has their dtype and shape. Fails if anything around
    them changed.
    """

    def run(
        shader: str,
        operands: Mapping[str, np.ndarray],
        push: Mapping[str, int | float] | None = None,
        groups: tuple[int, ...] = (1,),
        constants: Mapping[str, int | float] | None = None,
        offset: int = 300,  # no multiple of any alignment but that of words
    ) -> dict[str, np.ndarray]:
        return run_once(runtime, shader, operands, push, groups, constants, offset)

    return run


GUARD = 0xA5


def run_once(
    runtime: Runtime,
    name: str,
    operands: Mapping[str, np.ndarray],
    push: Mapping[str, int | float] | None,
    groups: tuple[int, ...],
    constants: Mapping[str, int | float] | None,
    offset: int,
) -> dict[str, np.ndarray]:
    pipeline = runtime.pipeline(name, constants)
    taken = {p.name for p in pipeline.shader.push_constants}
    slices: dict[str, Any] = {}
    for binding, array in operands.items():
        size = -(-array.nbytes // 4) * 4
        before = offset if f"{binding}_at" in taken else 0
        buffer = runtime.allocate(before + size + 64)
        runtime.upload(buffer, np.full(buffer.nbytes, GUARD, dtype=np.uint8))
        slices[binding] = buffer.slice(before, size)
        runtime.upload(slices[binding], array)
    program = Program()
    program.dispatch(pipeline, slices, push, groups)
    runtime.record(program).run()
    out = {}
    for binding in pipeline.shader.bindings:
        array, part = operands[binding.name], slices[binding.name]
        memory = runtime.download(part.buffer, np.uint8)
        around = np.concatenate([memory[: part.offset], memory[part.offset + part.nbytes :]])
        assert (around == GUARD).all(), f"{name} wrote outside {binding.name}"
        if binding.writes:
            out[binding.name] = memory[part.offset :][: array.nbytes].view(array.dtype).reshape(array.shape)
    return out
