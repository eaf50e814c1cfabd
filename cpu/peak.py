"""What this processor can do at most, measured: the yardstick for the kernels.

Dot products of bytes as the active instruction set makes them (dots.py), multiply-adds of float32 and of bfloat16, with
enough independent sums in registers to hide their latency; and reading memory. An operation is a multiplication or an
addition.
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ddllm_vk.cpu import isa
from ddllm_vk.cpu.attention_tiles import NARROW, multiply_add
from ddllm_vk.cpu.dots import DOTS
from ddllm_vk.cpu.emit import loop
from ddllm_vk.cpu.intrinsics import F32, I32, I64, address, at, call, filled, take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.memory import aligned_empty
from ddllm_vk.cpu.threads import ThreadPool

_LANES = isa.ACTIVE.lanes
_FLOATS = ir.VectorType(F32, _LANES)
_WORDS = ir.VectorType(I32, _LANES)

#: Operands in registers and operands read in every turn, each of the one with each of the other: that many sums.
_HELD, _READ = 3, 4
_SUMS = _HELD * _READ
#: Bytes that one turn of the reading loop takes.
_STRETCH = 512

_TURNS = 100_000
_MEMORY = 1 << 27
_PIECE = 1 << 20
#: float32 of one job's operands and results.
_ROOM = 1024


def _keep(builder: ir.IRBuilder, where: ir.Value, sums: list[ir.Value]) -> None:
    """Store the sums, so that they are not computed in vain."""
    for i, total in enumerate(sums):
        builder.store(total, at(builder, where, total.type, 64 * i), align=4)


@intrinsic
def _dot_turns(typingctx, where, turns):
    """`turns` times _SUMS dot products of registers. where: address of _ROOM float32."""

    def codegen(context, builder, signature, args):
        where, turns = args
        dot = DOTS[isa.ACTIVE.name]("q40", _LANES)
        weights = [
            builder.bitcast(builder.load(at(builder, where, dot.words, 64 * i), align=4), dot.bytes)
            for i in range(_HELD)
        ]

        def turn(_, values):
            # memory may have changed: without this the products would be computed once for all turns
            builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
            xs = [builder.load(at(builder, where, dot.words, 64 * (_HELD + i)), align=4) for i in range(_READ)]
            size = len(values) // _SUMS
            states = [values[i : i + size] for i in range(0, len(values), size)]
            pairs = [(weight, x) for x in xs for weight in weights]
            return [
                value for state, pair in zip(states, pairs, strict=True) for value in dot.add(builder, state, *pair)
            ]

        zero = filled(dot.words, 0)
        first = dot.add(builder, dot.begin(builder, zero), weights[0], zero)
        _keep(builder, where, loop(builder, turns, first * _SUMS, turn))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _multiply_adds(narrow: bool):
    """An intrinsic: `turns` times _SUMS multiply-adds of registers, of pairs of bfloat16 if attention has those and
    `narrow`. where: address of _ROOM float32."""

    @intrinsic
    def turns_of(typingctx, where, turns):
        def codegen(context, builder, signature, args):
            where, turns = args
            a, b = (builder.load(at(builder, where, _WORDS, 64 * i), align=4) for i in (0, 1))

            def turn(_, sums):
                if narrow and NARROW:
                    return [multiply_add(builder, True, a, b, total) for total in sums]
                x, y = builder.bitcast(a, _FLOATS), builder.bitcast(b, _FLOATS)
                return [call(builder, f"llvm.fmuladd.v{_LANES}f32", _FLOATS, [x, y, total]) for total in sums]

            _keep(builder, where, loop(builder, turns, [filled(_FLOATS, float(i)) for i in range(_SUMS)], turn))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return turns_of


_fma_turns = _multiply_adds(narrow=False)
_narrow_turns = _multiply_adds(narrow=True)


@intrinsic
def _read(typingctx, memory, turns, where):
    """Reads `turns` stretches at address `memory`. where: address of _ROOM float32."""

    def codegen(context, builder, signature, args):
        memory, turns, where = args
        line = ir.VectorType(I32, 16)

        def turn(index, sums):
            here = builder.add(memory, builder.mul(index, I64(_STRETCH)))
            return [
                builder.xor(total, builder.load(at(builder, here, line, 64 * i), align=4))
                for i, total in enumerate(sums)
            ]

        _keep(builder, where, loop(builder, turns, [filled(line, 0)] * (_STRETCH // 64), turn))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


#: What _multiplies measures.
_DOT, _FMA, _NARROW = range(3)


@kernel
def _multiplies(what, turns, room, counter, jobs, grain):
    """Job: `turns` turns in a row of `room`."""
    while True:
        job = take(counter, grain)
        if job >= jobs:
            return
        where = address(room) + job * _ROOM * 4
        if what == _DOT:
            _dot_turns(where, turns)
        elif what == _FMA:
            _fma_turns(where, turns)
        else:
            _narrow_turns(where, turns)


@kernel
def _reads(memory, room, counter, jobs, grain):
    """Job: _PIECE bytes."""
    while True:
        job = take(counter, grain)
        if job >= jobs:
            return
        _read(address(memory) + job * _PIECE, _PIECE // _STRETCH, address(room) + job * _ROOM * 4)


@dataclass(frozen=True)
class Peaks:
    """Of `threads` threads together, in operations a second: dot products, float32 multiply-adds, and those of bfloat16
    (where attention has none: float32's); reading memory in bytes a second."""

    threads: int
    dot: float
    fma: float
    narrow: float
    read: float


def measure(pool: ThreadPool, runs: int = 30) -> Peaks:
    """Each the best of `runs` runs of a few milliseconds; of one thread in its processor time, which others on the
    machine hardly disturb."""
    clock = time.thread_time if pool.threads == 1 else time.perf_counter
    pieces, jobs = _MEMORY // _PIECE, 4 * pool.threads  # several jobs a thread: one that starts late does not decide
    memory = aligned_empty(_MEMORY, np.uint8)
    memory[:] = 1
    room = aligned_empty((max(pieces, jobs), _ROOM), np.float32)

    def best(kernel: Callable, count: int, *args: object) -> float:
        times = []
        for _ in range(runs + 1):
            room[:] = 0.5
            started = clock()
            pool.run(kernel, count, *args, room)
            times.append(clock() - started)
        return min(times[1:])  # the first may have compiled

    operations = 2 * jobs * _TURNS * _SUMS * _LANES
    return Peaks(
        pool.threads,
        dot=4 * operations / best(_multiplies, jobs, _DOT, _TURNS),
        fma=operations / best(_multiplies, jobs, _FMA, _TURNS),
        narrow=(2 if NARROW else 1) * operations / best(_multiplies, jobs, _NARROW, _TURNS),
        read=_MEMORY / best(_reads, pieces, memory),
    )
