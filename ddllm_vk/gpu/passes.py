"""Passes recorded once and replayed: the operations of a forward pass as they come, matched with those seen before.

An operation is told as a key, everything that decides what is dispatched, and a function that dispatches it. Known
sequences of keys form a tree; `flush` runs the path from its root as one recorded program, one submission. A pass that
comes again only walks the tree. What changes from pass to pass (ids, positions, temperatures) lies in host memory that
the operation owns and its caller rewrites at every walk.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .buffers import ALIGNMENT, Buffer, Slice
from .program import Dispatch, Program
from .runtime import Recording, Runtime

_SCRATCH_CHUNK = 32 * 2**20  #: bytes of scratch allocated at a time
_PARAMETER_CHUNK = 2**20
MOST_RECORDINGS = 24  #: passes kept recorded; the least recently run is forgotten


class Parameters:
    """Small pieces of host memory, given out and taken back."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._free: dict[int, list[Slice]] = {}
        self._rest: Slice | None = None

    def take(self, nbytes: int) -> Slice:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._free.get(size):
            return self._free[size].pop()
        if self._rest is None or self._rest.nbytes <= size:
            self._rest = self._runtime.allocate(max(2 * size, _PARAMETER_CHUNK), host=True).slice()
        taken = self._rest.buffer.slice(self._rest.offset, size)
        self._rest = self._rest.buffer.slice(self._rest.offset + size)
        return taken

    def give_back(self, taken: Slice) -> None:
        self._free.setdefault(taken.nbytes, []).append(taken)


class Scratch:
    """A stack of device memory. Places are numbered through all chunks, so that `top` alone says what is in use."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._chunks: list[tuple[int, Buffer]] = []  # place of the first byte, memory
        self.top = 0

    def take(self, nbytes: int) -> Slice:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for first, buffer in self._chunks:
            offset = max(self.top - first, 0)
            if offset + size <= buffer.nbytes:
                self.top = first + offset + size
                return buffer.slice(offset, nbytes)
        first = sum(buffer.nbytes for _, buffer in self._chunks)
        buffer = self._runtime.allocate(max(size, min(_SCRATCH_CHUNK, self._runtime.largest_buffer)))
        self._chunks.append((first, buffer))
        self.top = first + size
        return buffer.slice(0, nbytes)


class _Node:
    """An operation after those before it."""

    def __init__(self, parent: "_Node | None", key: Hashable = None):
        self.parent, self.key = parent, key
        self.dispatches: list[Dispatch] = []
        self.result: Any = None
        self.parameters: list[Slice] = []
        self.top = 0
        self.children: dict[Hashable, _Node] = {}
        self.recording: Recording | None = None


class Passes:
    """The operations since the last flush, and all that were seen before. One thread at a time."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.scratch = Scratch(runtime)
        self._parameters = Parameters(runtime)
        self._root = self._here = _Node(None)
        self._recorded: OrderedDict[int, _Node] = OrderedDict()  # by id, least recently run first
        self._given: list[Slice] = []  # parameters of the operation that is being built
        self.submissions = 0  #: programs run, for reports

    @property
    def pending(self) -> bool:
        return self._here is not self._root

    def operation(self, key: tuple[Hashable, ...], build: Callable[[Program], Any]) -> Any:
        """What `build` returned when this operation, after the same ones and at the same height of scratch, was first
        seen. `build` dispatches into the program it is given, takes scratch and parameters, and must not look at
        anything that `key` does not tell."""
        full = (self.scratch.top, *key)
        node = self._here.children.get(full)
        if node is None:
            node = _Node(self._here, full)
            program, self._given = Program(), node.parameters
            node.result = build(program)
            node.dispatches, node.top = program.dispatches, self.scratch.top
            self._here.children[full] = node
        self.scratch.top = node.top
        self._here = node
        return node.result

    def parameter(self, dtype: Any, shape: tuple[int, ...]) -> tuple[Slice, np.ndarray]:
        """Host memory of the operation that is being built, and its array, to be written at every walk."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        taken = self._parameters.take(nbytes)
        self._given.append(taken)
        memory = taken.buffer.array(np.uint8)[taken.offset : taken.offset + nbytes]
        return Slice(taken.buffer, taken.offset, -(-nbytes // 4) * 4), memory.view(dtype).reshape(shape)

    @contextmanager
    def temporaries(self) -> Iterator[None]:
        """Scratch taken inside is free again after it, though the program may still use it: what is dispatched later
        comes later."""
        top = self.scratch.top
        yield
        self.scratch.top = top

    def flush(self) -> None:
        """Runs what is pending, in one submission."""
        node, self._here = self._here, self._root
        if node is self._root:
            return
        if node.recording is None:
            node.recording = self.runtime.record(_program(node))
        self._recorded[id(node)] = node
        self._recorded.move_to_end(id(node))
        if len(self._recorded) > MOST_RECORDINGS:
            self._forget(next(iter(self._recorded.values())))
        self.submissions += 1
        node.recording.run()

    def latest(self) -> Program:
        """The program that was run last, for profiles."""
        return _program(next(reversed(self._recorded.values())))

    def discard(self) -> None:
        """Drops what is pending: the pass was broken off."""
        self._here = self._root

    def drop(self, buffers: set[Buffer]) -> None:
        """Forgets every pass that uses one of these; the caller frees them. Nothing may be pending."""
        assert not self.pending
        pending = [self._root]
        while pending:
            node = pending.pop()
            for child in list(node.children.values()):
                if any(s.buffer in buffers for dispatch in child.dispatches for s in dispatch.operands):
                    self._cut(child)
                else:
                    pending.append(child)

    def _forget(self, node: _Node) -> None:
        """Gives back a recording, and the operations that led to nothing else."""
        assert node.recording is not None
        node.recording.free()
        node.recording = None
        del self._recorded[id(node)]
        while node.parent is not None and not node.children and node.recording is None:
            parent = node.parent
            self._cut(node)
            node = parent

    def _cut(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        pending = [node]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            if node.recording is not None:
                node.recording.free()
                del self._recorded[id(node)]
            for taken in node.parameters:
                self._parameters.give_back(taken)


def _program(node: _Node) -> Program:
    """All operations from the root to `node`."""
    program, at = Program(), node
    while at.parent is not None:
        program.dispatches[:0] = at.dispatches
        at = at.parent
    return program
