"""The `kompute` runtime: Kompute's Python package `kp`, built by .ci/build_kompute.py with the edits this needs.

What those edits give: a barrier before every dispatch, results that are checked, Algorithm.set_workgroup, the GIL
released while the device works. What remains Kompute's: Vulkan 1.1 with no features, one pipeline for each (shader,
constants, set of buffers), a binding is a whole buffer, memory that the host does not see is filled by a copy shader.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import GpuError
from .buffers import Buffer
from .devices import Device, Heap, heaps_now
from .program import Dispatch, Program
from .runtime import STAGE_BYTES, Recording, Runtime
from .shaders import Shader

MARKER = "+ddllm"

#: Device index -> kp.Manager. Dropping one destroys everything made with it: one a device, for the process's life.
_managers: dict[int, Any] = {}


def load_kompute() -> Any:
    """The package kp; GpuError if it is missing, lacks our edits or corrupts data."""
    try:
        with _untouched_logging():
            import kp
    except ImportError as e:
        raise GpuError(f"Kompute cannot be imported ({e}); build it with .ci/build_kompute.py") from None
    if MARKER not in getattr(kp, "__version__", ""):
        raise GpuError(
            f"kp {getattr(kp, '__version__', '?')} lacks the barriers that dependent dispatches need; build it with"
            " .ci/build_kompute.py"
        )
    return kp


@contextlib.contextmanager
def _untouched_logging() -> Iterator[None]:
    """kp calls logging.basicConfig when it is imported: the root logger is the program's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class KomputeRecording(Recording):
    runtime: "KomputeRuntime"

    def __init__(self, runtime: "KomputeRuntime", program: Program):
        super().__init__(runtime, program)
        with runtime.translated("cannot record a program"):
            self._sequence = runtime.manager.sequence()
            for dispatch in program.dispatches:
                self._sequence.record(runtime.operation(dispatch))

    def _run(self) -> None:
        try:
            self._sequence.eval()
        except RuntimeError as e:
            raise self.runtime.fail(_explain(e)) from e

    def _free(self) -> None:
        self._sequence.destroy()


class KomputeRuntime(Runtime):
    name = "kompute"

    def __init__(self, device: Device, direct: bool | None = None):
        # Without features: what needs no enabling remains.
        super().__init__(device, frozenset(f for f in device.features if f.startswith("subgroup_")), direct)
        self.kp = load_kompute()
        if device.index not in _managers:
            with self.translated("cannot be opened"):
                _managers[device.index] = self.kp.Manager(device.index)
        self.manager = _managers[device.index]
        opened = self.manager.get_device_properties()["device_name"]
        if opened != device.name:
            raise GpuError(f"Kompute opens {opened} as device {device.index}, expected {device.name}")
        _check_round_trip(self.kp, self.manager)
        self._stage: Buffer | None = None
        self._span: Buffer | None = None
        # (shader, constants, ids of buffers) -> kp.Algorithm: a pipeline and a descriptor set. An entry lives no longer
        # than its buffers, which self.buffers holds until they are freed: an id stays theirs.
        self._algorithms: dict[tuple[Any, ...], Any] = {}
        self._copies: dict[tuple[int, int], KomputeRecording] = {}

    # Memory

    def _heaps(self) -> list[Heap]:
        return heaps_now(self.device.index)

    def _allocate(self, nbytes: int, host: bool) -> Buffer:
        visible = host or self.direct
        kinds = self.kp.TensorTypes
        with self.translated(f"cannot allocate a buffer of {nbytes} bytes"):
            # Only the size of the array counts for a storage tensor: its memory is never touched.
            values = np.zeros(nbytes // 4, dtype=np.uint32)
            tensor = self.manager.tensor_t(values, kinds.host if visible else kinds.storage)
        mapped = tensor.data().view(np.uint8) if visible else None
        return Buffer(nbytes, host, tensor, mapped)

    def _free(self, buffer: Buffer) -> None:
        for copied in [pair for pair in self._copies if id(buffer) in pair]:
            self._copies.pop(copied).free()
        for key in [key for key in self._algorithms if id(buffer) in key[2]]:
            self._algorithms.pop(key).destroy()
        buffer.handle.destroy()

    def _stage_in(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        size = -(-data.size // 4) * 4
        stage = self._staging()
        memory = stage.array(np.uint8)
        memory[: data.size] = data
        memory[data.size : size] = 0
        self._copy(stage, buffer, [0, offset // 4, size // 4])

    def _stage_out(self, buffer: Buffer, offset: int, out: np.ndarray) -> None:
        stage = self._staging()
        self._copy(buffer, stage, [offset // 4, 0, out.size // 4])
        out[:] = stage.array(np.uint8)[: out.size]

    def _staging(self) -> Buffer:
        if self._stage is None or self._stage.freed:
            self._stage = self.allocate(min(STAGE_BYTES, self.largest_buffer), host=True)
        if self._span is None or self._span.freed:
            self._span = self.allocate(12, host=True)
        return self._stage

    def _copy(self, source: Buffer, destination: Buffer, span: list[int]) -> None:
        """Copies span[2] words from word span[0] of `source` to word span[1] of `destination`."""
        assert self._span is not None
        key = (id(source), id(destination))
        if key not in self._copies:
            program = Program()
            operands = {"source": source, "destination": destination, "span": self._span}
            program.dispatch(self.pipeline("copy_words"), operands, groups=(256,))
            self._copies[key] = KomputeRecording(self, program)
        self._span.array()[:] = span
        self._copies[key].run()

    # Pipelines and programs

    def _create_pipeline(self, shader: Shader, constants: Mapping[str, int | float]) -> Any:
        return None  # Kompute makes one when the buffers are known

    def operation(self, dispatch: Dispatch) -> Any:
        """The kp operation of a dispatch."""
        pipeline = dispatch.pipeline
        buffers = [s.buffer for s in dispatch.operands]
        push = np.frombuffer(dispatch.push_bytes([0] * len(buffers)), dtype=np.uint32)
        key = (pipeline.shader.spirv, tuple(pipeline.constants.items()), tuple(map(id, buffers)))
        if key not in self._algorithms:
            types = {"uint": np.uint32, "int": np.int32, "float": np.float32}
            words = [types[c.type](pipeline.constants[c.name]).tobytes() for c in pipeline.shader.constants]
            self._algorithms[key] = self.manager.algorithm(
                [b.handle for b in buffers],
                pipeline.shader.spirv,
                list(dispatch.groups),
                np.frombuffer(b"".join(words), dtype=np.uint32),
                push,
            )
        algorithm = self._algorithms[key]
        algorithm.set_workgroup(list(dispatch.groups))  # read when the operation is recorded, at once
        return self.kp.OpAlgoDispatch(algorithm, push)

    def _record(self, program: Program) -> KomputeRecording:
        return KomputeRecording(self, program)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as e:
            if "DeviceLost" in str(e):
                raise self.fail(_explain(e)) from e
            raise GpuError(f"{self.device.title} {what}: {_explain(e)}") from e

    def _close(self) -> None:
        for algorithm in self._algorithms.values():
            algorithm.destroy()
        self._copies.clear()
        self._algorithms.clear()
        self._stage = self._span = None


def _check_round_trip(kp: Any, manager: Any) -> None:
    """An extension built against the wrong pybind11 corrupts data silently."""
    expected = np.arange(5, dtype=np.uint32)
    tensor = manager.tensor_t(expected, kp.TensorTypes.host)
    found = tensor.data().copy()
    tensor.destroy()
    if not np.array_equal(found, expected):
        raise GpuError("Kompute corrupts data (an old pybind11?); build it with .ci/build_kompute.py")


def _explain(error: BaseException) -> str:
    known = {
        "DeviceLost": "the driver lost the device",
        "OutOfDeviceMemory": "the device is out of memory",
        "OutOfHostMemory": "the driver is out of host memory",
    }
    return next((f"{text} ({error})" for name, text in known.items() if name in str(error)), str(error))
