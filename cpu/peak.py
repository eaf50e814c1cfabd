"""What this processor can do at most, measured: the yardstick for the kernels.

Dot products of bytes and float32 multiply-adds with every operand in a register and enough independent sums to hide
their latency, in the active instruction set; and reading memory. An operation is a multiplication or an addition.
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
from ddllm_vk.cpu.intrinsics import F32, I8, I16, I32, I64, address, at, call, take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.memory import aligned_empty
from ddllm_vk.cpu.threads import ThreadPool

_LANES = isa.ACTIVE.lanes
_WORDS = ir.VectorType(I32, _LANES)
_BYTES = ir.VectorType(I8, 4 * _LANES)
_SHORTS = ir.VectorType(I16, 2 * _LANES)
_FLOATS = ir.VectorType(F32, _LANES)

#: Independent sums: with one operand each they still fit the sixteen registers of AVX2, or SSE.
_DOTS = 6
#: These share their operands.
_FMAS = 12
#: Bytes a turn of the reading loop takes, as eight registers of 64.
_STRETCH = 512

_ROUNDS = 200_000
_READ_BYTES = 1 << 28
_PIECE = 1 << 20


def _vnni(builder, total, weight, x):
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, [total, weight, x])


def _maddubs(builder, total, weight, x):
    # sums of two products of a byte each, as int16: how the kernels multiply
    pairs = call(
        builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [builder.bitcast(weight, _BYTES), builder.bitcast(x, _BYTES)]
    )
    return builder.bitcast(builder.add(builder.bitcast(total, _SHORTS), pairs), _WORDS)


def _widened(builder, total, weight, x):
    # without an instruction for it: products of int16, added up in int16
    wide = ir.VectorType(I16, 4 * _LANES)
    products = builder.mul(
        builder.sext(builder.bitcast(weight, _BYTES), wide), builder.sext(builder.bitcast(x, _BYTES), wide)
    )
    halves = [
        builder.shuffle_vector(products, products, ir.Constant(ir.VectorType(I32, 2 * _LANES), list(part)))
        for part in (range(2 * _LANES), range(2 * _LANES, 4 * _LANES))
    ]
    shorts = builder.add(builder.bitcast(total, _SHORTS), builder.add(*halves))
    return builder.bitcast(shorts, _WORDS)


#: Add the products of four bytes a lane to a register of sums, as the kernels of that instruction set do it.
_DOT = {"avx512vnni": _vnni, "avx2": _maddubs, "generic": _widened}[isa.ACTIVE.name]


def _sums_in_registers(builder, turns, sums, turn: Callable):
    """Runs sums = turn(index, sums) `turns` >= 1 times, index counting from 0; returns them."""
    before, body, after = builder.block, builder.append_basic_block("turn"), builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    held = [builder.phi(s.type) for s in sums]
    final = turn(index, held)
    following = builder.add(index, I64(1))
    for phi, first, last in zip([index, *held], [I64(0), *sums], [following, *final], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, turns), body, after)
    builder.position_at_end(after)
    return final


def _store_all(builder, where, sums):
    """So that nothing is computed in vain."""
    for i, total in enumerate(sums):
        builder.store(total, at(builder, where, total.type, 64 * i), align=4)


@intrinsic
def _dot_turns(typingctx, operands, turns):
    """`turns` times _DOTS dot products. operands: address of 64-byte lines, the weights, then an activation a sum."""

    def codegen(context, builder, signature, args):
        where, turns = args
        xs = [builder.load(at(builder, where, _WORDS, 64 * (1 + i)), align=4) for i in range(_DOTS)]
        weights = at(builder, where, _WORDS)

        def turn(_, sums):
            # memory may have changed, so nothing can be computed once for all turns
            builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
            weight = builder.load(weights, align=4)
            return [_DOT(builder, total, weight, x) for total, x in zip(sums, xs, strict=True)]

        zero = ir.Constant(_WORDS, [0] * _LANES)
        _store_all(builder, where, _sums_in_registers(builder, turns, [zero] * _DOTS, turn))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _fma_turns(typingctx, operands, turns):
    """`turns` times _FMAS multiply-adds of registers. operands: address of two 64-byte lines of float32, and room."""

    def codegen(context, builder, signature, args):
        where, turns = args
        a, b = (builder.load(at(builder, where, _FLOATS, 64 * i), align=4) for i in (0, 1))

        def turn(_, sums):
            return [call(builder, f"llvm.fmuladd.v{_LANES}f32", _FLOATS, [total, a, b]) for total in sums]

        starts = [ir.Constant(_FLOATS, [float(i)] * _LANES) for i in range(_FMAS)]
        _store_all(builder, where, _sums_in_registers(builder, turns, starts, turn))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _read(typingctx, where, turns, room):
    """Reads `turns` stretches of memory; room: where the sums of what is there go."""

    def codegen(context, builder, signature, args):
        where, turns, room = args
        line = ir.VectorType(I32, 16)

        def turn(index, sums):
            here = builder.add(where, builder.mul(index, I64(_STRETCH)))
            return [
                builder.xor(total, builder.load(at(builder, here, line, 64 * i), align=4))
                for i, total in enumerate(sums)
            ]

        zero = ir.Constant(line, [0] * 16)
        _store_all(builder, room, _sums_in_registers(builder, turns, [zero] * (_STRETCH // 64), turn))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@kernel
def _dots(rounds, operands, counter, jobs, grain):
    """Job: `rounds` turns, in a row of `operands`."""
    while True:
        job = take(counter, 1)
        if job >= jobs:
            return
        _dot_turns(address(operands) + job * 1024, rounds)


@kernel
def _fmas(rounds, operands, counter, jobs, grain):
    """Job: `rounds` turns, in a row of `operands`."""
    while True:
        job = take(counter, 1)
        if job >= jobs:
            return
        _fma_turns(address(operands) + job * 1024, rounds)


@kernel
def _reads(memory, room, counter, jobs, grain):
    """Job: _PIECE bytes."""
    while True:
        job = take(counter, 1)
        if job >= jobs:
            return
        _read(address(memory) + job * _PIECE, _PIECE // _STRETCH, address(room) + job * 1024)


@dataclass(frozen=True)
class Peaks:
    """Of `threads` threads together: dot products and float32 multiply-adds in operations a second, reading memory in
    bytes a second."""

    threads: int
    dot: float
    fma: float
    read: float


def measure(pool: ThreadPool, seconds: float = 0.5) -> Peaks:
    """The best of many short runs, `seconds` in all."""
    pieces = _READ_BYTES // _PIECE
    memory = aligned_empty(_READ_BYTES, np.uint8)
    memory[:] = 1
    operands = aligned_empty((max(pieces, 8 * pool.threads), 256), np.float32)
    operands[:] = 0.5
    jobs = 8 * pool.threads  # so that a thread that was late does not decide
    dots, fmas = (2 * _LANES * jobs * _ROUNDS * n for n in (4 * _DOTS, _FMAS))
    part = seconds / 3
    return Peaks(
        pool.threads,
        dot=dots / _best(lambda: pool.run(_dots, jobs, _ROUNDS, operands), part),
        fma=fmas / _best(lambda: pool.run(_fmas, jobs, _ROUNDS, operands), part),
        read=_READ_BYTES / _best(lambda: pool.run(_reads, pieces, memory, operands), part),
    )


def _best(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - started)
    return best
