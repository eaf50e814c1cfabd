"""The seam of the Vulkan backend: buffers, pipelines, a recorded program, run it. Everything above knows only this.

    runtime = open_runtime()                                  # choice.py
    x = runtime.allocate(4 * rows * columns)                  # device memory
    runtime.upload(x, array)
    program = Program()
    program.dispatch(runtime.pipeline("rms_norm"), {"x": x, ...}, {"columns": 2816, ...}, groups=(rows,))
    recording = runtime.record(program)                       # barriers placed, once
    recording.run()                                           # as often as wanted
    runtime.download(x, np.float32)

VulkanRuntime and KomputeRuntime implement it. Errors are GpuError, one line each. One thread at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ..errors import GpuError
from ..units import format_bytes
from .buffers import Buffer, Slice, as_slice
from .devices import Device, Heap, free_bytes
from .program import Pipeline, Program, check_value
from .shaders import Shader, load
from .spirv import evaluate

#: Bytes of the one buffer through which data reach memory that the host cannot see.
STAGE_BYTES = 64 * 2**20


class Recording(ABC):
    """A program in the device's own form. Holds its buffers and pipelines alive."""

    def __init__(self, runtime: "Runtime", program: Program):
        self.runtime = runtime
        self.buffers = list({id(s.buffer): s.buffer for d in program.dispatches for s in d.operands}.values())
        self.freed = False
        runtime.recordings.append(self)

    def run(self) -> None:
        """Submits once and waits until the device is done; other Python threads run meanwhile."""
        self.runtime.check_alive()
        if self.freed or any(buffer.freed for buffer in self.buffers):
            raise GpuError("a recorded program cannot run: it, or one of its buffers, was freed")
        self._run()

    @abstractmethod
    def _run(self) -> None: ...

    def free(self) -> None:
        """Gives back what the device holds for this program; it cannot run after that."""
        if not self.freed:
            self.freed = True
            self.runtime.recordings.remove(self)
            if self.runtime.failure is None:
                self._free()

    @abstractmethod
    def _free(self) -> None: ...


class Runtime(ABC):
    """One device in use. `direct`: the host writes device memory itself (integrated GPUs and software devices, where
    all memory is the host's); else data go through one staging buffer."""

    name: str  #: "vulkan" or "kompute"

    def __init__(self, device: Device, features: frozenset[str], direct: bool | None = None):
        self.device = device
        self.features = features  #: features that shaders may use with this runtime
        self.direct = device.shares_host_memory if direct is None else direct
        self.largest_buffer = device.largest_buffer
        self.allocated = 0  #: bytes in buffers
        self.buffers: list[Buffer] = []  #: not freed yet
        self.recordings: list[Recording] = []  #: not freed yet
        self.failure: str | None = None  #: why the device can no longer be used
        self._pipelines: dict[tuple[str, bytes, tuple[Any, ...]], Pipeline] = {}

    def allocate(self, nbytes: int, host: bool = False) -> Buffer:
        """A new buffer, contents undefined; `host`: memory that both sides see (Buffer.array), for small things.

        GpuError if it is larger than `largest_buffer` or than what is free.
        """
        self.check_alive()
        size = -(-nbytes // 4) * 4
        if not 0 < size <= self.largest_buffer:
            raise GpuError(
                f"a buffer of {nbytes} bytes was asked of {self.device.title}, whose largest holds"
                f" {self.largest_buffer}; split it by rows"
            )
        self.require(size)
        buffer = self._allocate(size, host)
        self.buffers.append(buffer)
        self.allocated += size
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Gives the memory back; recordings that use it can no longer run."""
        if not buffer.freed:
            buffer.freed = True
            buffer.mapped = None
            self.buffers.remove(buffer)
            self.allocated -= buffer.nbytes
            if self.failure is None:
                self._free(buffer)

    def require(self, nbytes: int, what: str = "") -> None:
        """GpuError if the device has not `nbytes` free. Call it with the sum before a model is uploaded."""
        free = self.free_bytes()
        if nbytes > free:
            raise GpuError(
                f"{self.device.title} has {format_bytes(max(free, 0))} free, {what or 'a buffer'} needs"
                f" {format_bytes(nbytes)}; use a smaller model, a shorter context, or another device"
            )

    def free_bytes(self) -> int:
        """What buffers may still take: what the driver says, else the device's heap less our own buffers."""
        return free_bytes(self.device, self.allocated, self._heaps())

    def pipeline(self, shader: str | Shader, constants: Mapping[str, int | float] | None = None) -> Pipeline:
        """The shader compiled for the device with these specialisation constants (the others keep their defaults).

        Made once for each combination. GpuError names what the device lacks.
        """
        self.check_alive()
        shader = load(shader) if isinstance(shader, str) else shader
        given = constants or {}
        unknown = set(given) - {c.name for c in shader.constants}
        if unknown:
            raise GpuError(f"shader {shader.name} has no specialisation constant {', '.join(sorted(unknown))}")
        settled = {c.name: given.get(c.name, c.default) for c in shader.constants}
        for c in shader.constants:
            check_value(f"shader {shader.name}: specialisation constant {c.name}", c.type, settled[c.name])
        key = (shader.name, shader.spirv, tuple(settled.items()))
        if key not in self._pipelines:
            x, y, z = (int(settled[n]) if isinstance(n, str) else n for n in shader.workgroup)
            self._check_shader(shader, (x, y, z), evaluate(shader.shared_bytes, settled))
            handle = self._create_pipeline(shader, settled)
            self._pipelines[key] = Pipeline(shader, settled, (x, y, z), handle)
        return self._pipelines[key]

    def record(self, program: Program) -> Recording:
        """The program in the device's form, with the barriers its dispatches need."""
        self.check_alive()
        if not program.dispatches:
            raise GpuError("a program without dispatches cannot be recorded")
        ours = {id(thing) for thing in (*self.buffers, *self._pipelines.values())}
        for dispatch in program.dispatches:
            name, limits = dispatch.pipeline.shader.name, self.device.max_workgroups
            if any(g > limit for g, limit in zip(dispatch.groups, limits, strict=True)):
                raise GpuError(f"shader {name}: {dispatch.groups} workgroups, {self.device.title} takes {limits}")
            if not ours >= {id(dispatch.pipeline), *(id(s.buffer) for s in dispatch.operands)}:
                raise GpuError(f"shader {name}: one of its buffers was freed, or something is of another runtime")
        return self._record(program)

    def upload(self, target: Buffer | Slice, data: np.ndarray) -> None:
        """Copies the bytes of `data` to the start of `target`; a size that is no multiple of 4 is filled up with
        zeros. Host memory used beside: none, or the staging buffer."""
        self.check_alive()
        target = as_slice(target)
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if target.buffer.freed:
            raise GpuError("the buffer was freed")
        if source.size > target.nbytes:
            raise GpuError(f"{source.size} bytes do not fit a slice of {target.nbytes}")
        if source.size == 0:
            return
        mapped = target.buffer.mapped
        if mapped is not None:
            mapped[target.offset : target.offset + source.size] = source
            return
        for at in range(0, source.size, STAGE_BYTES):
            part = source[at : at + STAGE_BYTES]
            self._stage_in(target.buffer, target.offset + at, part)

    def download(self, source: Buffer | Slice, dtype: Any = np.float32) -> np.ndarray:
        """A copy of the bytes of `source` as a 1-D array."""
        self.check_alive()
        source = as_slice(source)
        if source.buffer.freed:
            raise GpuError("the buffer was freed")
        mapped = source.buffer.mapped
        out = np.empty(source.nbytes, dtype=np.uint8)
        if mapped is not None:
            out[:] = mapped[source.offset : source.offset + source.nbytes]
        else:
            for at in range(0, source.nbytes, STAGE_BYTES):
                self._stage_out(source.buffer, source.offset + at, out[at : at + STAGE_BYTES])
        item = np.dtype(dtype).itemsize
        return out[: source.nbytes // item * item].view(dtype)

    def check_alive(self) -> None:
        if self.failure is not None:
            raise GpuError(self.failure)

    def fail(self, what: str) -> GpuError:
        """The device cannot be used any more: every later call raises the same."""
        self.failure = f"{self.device.title} failed: {what}; restart the program, use the CPU if it happens again"
        return GpuError(self.failure)

    def close(self) -> None:
        """Gives everything back, buffers and recordings too. The runtime cannot be used after that.

        Of a device that failed nothing is given back: it may still be at work, and its driver may hang or crash.
        """
        for recording in list(self.recordings):
            recording.free()
        for buffer in list(self.buffers):
            self.free(buffer)
        self._pipelines.clear()
        if self.failure is None:
            self._close()
            self.failure = f"{self.device.title} is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_shader(self, shader: Shader, workgroup: tuple[int, int, int], shared_bytes: int) -> None:
        missing = shader.features - self.features
        if missing:
            reason = "is not enabled by the runtime" if missing <= self.device.features else "is not there"
            raise GpuError(
                f"shader {shader.name} needs {', '.join(sorted(missing))}, which {reason} on {self.device.title}"
                f" (runtime {self.name})"
            )
        x, y, z = workgroup
        sizes = self.device.max_workgroup_size
        wrong = any(not 0 < n <= most for n, most in zip(workgroup, sizes, strict=True))
        if wrong or x * y * z > self.device.max_invocations:
            raise GpuError(
                f"shader {shader.name}: a workgroup of {workgroup} exceeds the limits of {self.device.title}:"
                f" {sizes}, {self.device.max_invocations} in all"
            )
        if not 0 <= shared_bytes <= self.device.max_shared_memory:
            raise GpuError(
                f"shader {shader.name} needs {shared_bytes} bytes of shared memory with these constants,"
                f" {self.device.title} has {self.device.max_shared_memory}"
            )
        if 4 * len(shader.push_constants) > self.device.max_push_constants:
            raise GpuError(
                f"shader {shader.name} has {4 * len(shader.push_constants)} bytes of push constants,"
                f" {self.device.title} takes {self.device.max_push_constants}"
            )

    # What an implementation is.

    @abstractmethod
    def _heaps(self) -> list[Heap]: ...

    @abstractmethod
    def _allocate(self, nbytes: int, host: bool) -> Buffer: ...

    @abstractmethod
    def _free(self, buffer: Buffer) -> None: ...

    @abstractmethod
    def _create_pipeline(self, shader: Shader, constants: Mapping[str, int | float]) -> Any: ...

    @abstractmethod
    def _record(self, program: Program) -> Recording: ...

    @abstractmethod
    def _stage_in(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        """data: uint8, at most STAGE_BYTES, into memory that is not mapped."""

    @abstractmethod
    def _stage_out(self, buffer: Buffer, offset: int, out: np.ndarray) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...
