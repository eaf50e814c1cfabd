"""Device memory as the layers above see it: buffers, byte ranges of them, and arenas of big buffers.

Pure bookkeeping: what a buffer is on the device is its runtime's business (`handle`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import GpuError

#: Slices begin at multiples of this many bytes: no device asks for more (minStorageBufferOffsetAlignment <= 256).
ALIGNMENT = 256
#: Kompute's sizes and many shaders' byte counts are 32-bit and some drivers' signed: stay below 2 GiB.
_SIGNED_LIMIT = 2**31 - 1


@dataclass(eq=False)
class Buffer:
    """One allocation of one runtime. `mapped`: uint8 [nbytes], the memory itself, where the host sees it."""

    nbytes: int
    host: bool  #: asked for as host memory: small, read and written by both sides
    handle: Any
    mapped: np.ndarray | None
    freed: bool = False

    def slice(self, offset: int = 0, nbytes: int | None = None) -> "Slice":
        return Slice(self, offset, self.nbytes - offset if nbytes is None else nbytes)

    def array(self, dtype: Any = np.uint32) -> np.ndarray:
        """The memory of a host buffer as a 1-D array; what is written there is seen by the next run."""
        if self.mapped is None or self.freed or not self.host:  # a GPU's own memory is mapped on some devices only
            raise GpuError("only host buffers that are not freed can be seen; use Runtime.upload and download")
        item = np.dtype(dtype).itemsize
        return self.mapped[: self.nbytes // item * item].view(dtype)


@dataclass(frozen=True)
class Slice:
    """Bytes offset..offset+nbytes-1 of a buffer; offset is a multiple of 4."""

    buffer: Buffer
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset % 4 or self.offset < 0 or self.nbytes <= 0 or self.offset + self.nbytes > self.buffer.nbytes:
            raise GpuError(
                f"bytes {self.offset}..{self.offset + self.nbytes} are no slice of a buffer of {self.buffer.nbytes}:"
                " it must begin at a multiple of 4, hold something and end inside"
            )

    def overlaps(self, other: "Slice") -> bool:
        return (
            self.buffer is other.buffer
            and self.offset < other.offset + other.nbytes
            and other.offset < self.offset + self.nbytes
        )


def as_slice(operand: Buffer | Slice) -> Slice:
    return operand if isinstance(operand, Slice) else operand.slice()


def largest_buffer(max_storage_buffer_range: int, max_allocation: int) -> int:
    """Bytes of the largest buffer: what one binding reaches, what the driver allocates at once, below 2 GiB."""
    return min(max_storage_buffer_range, max_allocation, _SIGNED_LIMIT) // ALIGNMENT * ALIGNMENT


def split_rows(rows: int, row_bytes: int, most: int) -> list[int]:
    """Rows of each part of a matrix, in order, so that no part exceeds `most` bytes; equal but for the last."""
    if row_bytes > most:
        raise GpuError(f"one row of {row_bytes} bytes exceeds the largest buffer of {most}")
    parts = -(-rows * row_bytes // (most // row_bytes * row_bytes)) if rows else 0
    each = -(-rows // parts) if parts else 0
    return [min(each, rows - at) for at in range(0, rows, each)] if each else []


@dataclass
class Arena:
    """Slices of few big buffers: few buffers make few bindings, and Kompute compiles a pipeline for each set of them.

    `runtime` allocates. `expected`: bytes that will be taken in all; buffers are made as large as that and the device
    allow, and for what is taken beyond it one by one. Nothing is given back but all at once.
    """

    runtime: Any
    expected: int
    buffers: list[Buffer] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)  # bytes of each buffer

    def take(self, nbytes: int) -> Slice:
        """A slice of `nbytes`, aligned, in one buffer; GpuError if that is more than a buffer or the device holds."""
        found = next((i for i, b in enumerate(self.buffers) if self._used[i] + nbytes <= b.nbytes), None)
        if found is None:
            left = self.expected - sum(b.nbytes for b in self.buffers)
            self.buffers.append(self.runtime.allocate(max(nbytes, min(left, self.runtime.largest_buffer))))
            self._used.append(0)
            found = len(self.buffers) - 1
        taken = self.buffers[found].slice(self._used[found], nbytes)
        self._used[found] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return taken

    def take_rows(self, rows: int, row_bytes: int) -> list[tuple[Slice, int]]:
        """Slices that hold a matrix's rows in order, with the rows of each; several where one buffer cannot hold it."""
        parts = split_rows(rows, row_bytes, self.runtime.largest_buffer)
        return [(self.take(part * row_bytes), part) for part in parts]

    def free(self) -> None:
        for buffer in self.buffers:
            self.runtime.free(buffer)
        self.buffers.clear()
        self._used.clear()
