"""A program: dispatches in order, each with what it reads and writes, and where a barrier must stand. Pure values."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import GpuError
from .buffers import Buffer, Slice, as_slice
from .shaders import Shader

_FORMATS = {"uint": "I", "int": "i", "float": "f"}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A shader with its specialisation constants settled, made by one runtime."""

    shader: Shader
    constants: Mapping[str, int | float]  #: all of them, defaults included
    workgroup: tuple[int, int, int]
    handle: Any

    @property
    def invocations(self) -> int:
        x, y, z = self.workgroup
        return x * y * z


@dataclass(frozen=True)
class Dispatch:
    pipeline: Pipeline
    operands: tuple[Slice, ...]  #: one for each binding
    push: Mapping[str, int | float]  #: without the offsets, which push_bytes adds
    groups: tuple[int, int, int]

    @property
    def reads(self) -> list[Slice]:
        return [s for s, b in zip(self.operands, self.pipeline.shader.bindings, strict=True) if b.reads]

    @property
    def writes(self) -> list[Slice]:
        return [s for s, b in zip(self.operands, self.pipeline.shader.bindings, strict=True) if b.writes]

    def push_bytes(self, origins: list[int]) -> bytes:
        """The push constants; `<binding>_at` is where the slice begins, in words from byte `origin` of its buffer."""
        shader = self.pipeline.shader
        bound = zip(shader.bindings, self.operands, origins, strict=True)
        values = {f"{binding.name}_at": (s.offset - origin) // 4 for binding, s, origin in bound} | dict(self.push)
        return b"".join(struct.pack("<" + _FORMATS[p.type], values[p.name]) for p in shader.push_constants)


@dataclass
class Program:
    """Dispatches in the order of their effects. `Runtime.record` turns it into something that runs, as often as wanted.

    What changes from run to run lies in host buffers (Runtime.allocate(..., host=True)), never in push constants.
    """

    dispatches: list[Dispatch] = field(default_factory=list)

    def dispatch(
        self,
        pipeline: Pipeline,
        operands: Mapping[str, Buffer | Slice],
        push: Mapping[str, int | float] | None = None,
        groups: tuple[int, ...] = (1,),
    ) -> None:
        """Appends one. `operands`: a buffer or slice for every binding, by name. `push`: every push constant by name,
        save `<binding>_at`, which is filled in. `groups`: workgroups in x, y, z. Raises GpuError for anything else."""
        shader = pipeline.shader
        slices = tuple(as_slice(o) for o in _by_name(shader, "bindings", [b.name for b in shader.bindings], operands))
        offsets = {f"{b.name}_at" for b in shader.bindings}
        pushed = {p.name for p in shader.push_constants}
        for binding, operand in zip(shader.bindings, slices, strict=True):
            if operand.offset and f"{binding.name}_at" not in pushed:
                raise GpuError(
                    f"shader {shader.name} takes {binding.name} from the start of a buffer only: it has no push"
                    f" constant {binding.name}_at"
                )
        values = push or {}
        wanted = [p for p in shader.push_constants if p.name not in offsets]
        _by_name(shader, "push constants", [p.name for p in wanted], values)
        for constant in wanted:
            check_value(f"shader {shader.name}: push constant {constant.name}", constant.type, values[constant.name])
        x, y, z = (*groups, 1, 1)[:3]
        if len(groups) > 3 or min(x, y, z) < 1:
            raise GpuError(f"shader {shader.name}: {groups} is no number of workgroups")
        self.dispatches.append(Dispatch(pipeline, slices, dict(values), (x, y, z)))


def _by_name(shader: Shader, what: str, expected: list[str], given: Mapping[str, Any]) -> list[Any]:
    if set(expected) != set(given):
        raise GpuError(f"shader {shader.name} has the {what} ({', '.join(expected)}), given are ({', '.join(given)})")
    return [given[name] for name in expected]


def check_value(what: str, scalar: str, value: int | float) -> None:
    """GpuError if `value` does not fit the type `scalar`: uint, int or float."""
    try:
        struct.pack("<" + _FORMATS[scalar], value)
    except (struct.error, OverflowError):
        raise GpuError(f"{what} is a 32-bit {scalar}, which {value!r} does not fit") from None


def plan_barriers(dispatches: list[Dispatch]) -> list[bool]:
    """Whether a barrier stands before each dispatch: it touches what one since the last barrier wrote, or writes what
    one read."""
    planned: list[bool] = []
    reads: list[Slice] = []
    writes: list[Slice] = []
    for dispatch in dispatches:
        dependent = _touch(dispatch.reads, writes) or _touch(dispatch.writes, writes) or _touch(dispatch.writes, reads)
        if dependent:
            reads, writes = [], []
        reads += dispatch.reads
        writes += dispatch.writes
        planned.append(dependent)
    return planned


def _touch(a: list[Slice], b: list[Slice]) -> bool:
    return any(x.overlaps(y) for x in a for y in b)
