"""The micro-kernels of attention, emitted as LLVM IR: packing of a tile's keys and values, scores, softmax, sums.

A key tile is KEYS cache slots, a row tile ROWS query rows. Products multiply float32 words or, `narrow`, words of two
bfloat16 (NARROW: the machine has instructions for that, twice as fast). hd below is the head's size in float32 words,
or in pairs when narrow. Packed operands:
    queries of a row tile    [hd][ROWS] words
    keys of a key tile       [KEYS/16][hd][16 slots] words; a pair is two values of one slot
    values of a key tile     [head size/16][KEYS words][16]; a pair is one value of two slots, so KEYS/2 words
    scores of a row tile     float32 [ROWS][KEYS]; softmax puts probabilities (words) in the same rows
    sums of a row tile       float32 [head size/16][ROWS][16]
Every addition of a row runs in an order that depends on the slots alone, so a row's result does not depend on others.
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Callable

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ddllm_vk.cpu import isa
from ddllm_vk.cpu.cache_rows import FORMATS, KEYS, load_half
from ddllm_vk.cpu.emit import loop, reduced, single, transposed
from ddllm_vk.cpu.intrinsics import F32, I16, I32, I64, V16F, at, call, filled, splat

#: Rows of a row tile. At most 14: two columns of sums then fit into 32 registers, and are a fifth faster than one.
ROWS = min(isa.ACTIVE.rows, 14)
#: Whether words of two bfloat16 can be multiplied. Older LLVMs declare the instruction with other types.
NARROW = (
    isa.ACTIVE.name == "avx512vnni"
    and "avx512bf16" in isa.target_features()
    and llvmlite.binding.llvm_version_info >= (17, 0, 0)
)
#: columns of 16 whose accumulators fit into the registers beside each other
_COLUMNS = 2 if 2 * ROWS + 3 <= 32 and isa.ACTIVE.lanes == 16 else 1

_WORDS = ir.VectorType(I32, 16)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 32)


def multiply_add(builder: ir.IRBuilder, narrow: bool, x: ir.Value, w: ir.Value, total: ir.Value) -> ir.Value:
    """total + x * w for sixteen words of each (i32), summed over the values of a word."""
    if narrow:
        x, w = builder.bitcast(x, _PAIRS), builder.bitcast(w, _PAIRS)
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [total, x, w])
    return call(builder, "llvm.fmuladd.v16f32", V16F, [builder.bitcast(x, V16F), builder.bitcast(w, V16F), total])


def _to_pairs(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two V16F to <32 x i16> of bfloat16, rounded to nearest even, `low` first."""
    pairs = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [high, low])
    return builder.bitcast(pairs, ir.VectorType(I16, 32))


def _pack_rows(fmt: str, narrow: bool) -> Callable:
    """Sixteen rows of blocks * 32 stored values, `stride` bytes apart, transposed: word k of all of them at
    out + k * out_stride. Writes 64 bytes there, so with a smaller out_stride the last ones come after the end."""

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        source, stride, blocks, out, out_stride = args
        rows = [builder.add(source, builder.mul(stride, I64(i))) for i in range(16)]

        def block(b, _):
            halves = [lambda h=h: [load_half(builder, fmt, row, b, h) for row in rows] for h in (0, 1)]
            if narrow:
                pairs = zip(halves[0](), halves[1](), strict=True)
                parts = [lambda: [builder.bitcast(_to_pairs(builder, low, high), _WORDS) for low, high in pairs]]
            else:
                parts = halves
            for p, part in enumerate(parts):
                first = builder.add(builder.mul(b, I64(16 * len(parts))), I64(16 * p))
                here = builder.add(out, builder.mul(first, out_stride))
                for word in transposed(builder, part()):
                    builder.store(word, at(builder, here, word.type), align=4)
                    here = builder.add(here, out_stride)
            return []

        loop(builder, blocks, [], block)
        builder.ret_void()

    return emit


def _pack_values(fmt: str, narrow: bool) -> Callable:
    """KEYS rows of blocks * 32 stored values, `stride` bytes apart, in the order of packed values."""
    words = KEYS // 2 if narrow else KEYS

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        source, stride, blocks, out = args

        def word(k, _):
            row = builder.add(source, builder.mul(builder.shl(k, I64(int(narrow))), stride))
            here = builder.add(out, builder.shl(k, I64(6)))

            def block(b, _):
                for half in (0, 1):
                    values = load_half(builder, fmt, row, b, half)
                    if narrow:
                        values = _to_pairs(builder, values, load_half(builder, fmt, builder.add(row, stride), b, half))
                        order = [lane // 2 + 16 * (lane % 2) for lane in range(32)]
                        values = builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(I32, 32), order))
                    target = builder.add(here, builder.mul(b, I64(2 * words * 64)))
                    builder.store(values, at(builder, target, values.type, half * words * 64), align=4)
                return []

            loop(builder, blocks, [], block)
            return []

        loop(builder, I64(words), [], word)
        builder.ret_void()

    return emit


def _scores(narrow: bool) -> Callable:
    """scores[i, s] = sum over words k of q[k, i] * keys[s // 16, k, s % 16]."""
    columns = _COLUMNS

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        q, keys, count, out = args
        part = builder.shl(count, I64(6))

        def column(c, _):
            here = builder.add(keys, builder.mul(builder.mul(c, part), I64(columns)))
            parts = [builder.add(here, builder.mul(part, I64(p))) for p in range(columns)]

            def word(k, totals):
                offset = builder.shl(k, I64(6))
                w = [builder.load(at(builder, builder.add(p, offset), _WORDS), align=4) for p in parts]
                x = builder.add(q, builder.mul(k, I64(4 * ROWS)))
                result = []
                for i in range(ROWS):
                    value = splat(builder, builder.load(at(builder, x, I32, 4 * i), align=4), 16)
                    for p in range(columns):
                        result.append(multiply_add(builder, narrow, value, w[p], totals[i * columns + p]))
                return result

            totals = loop(builder, count, [filled(V16F, 0.0)] * (ROWS * columns), word)
            target = builder.add(out, builder.mul(c, I64(64 * columns)))
            for i in range(ROWS):
                for p in range(columns):
                    place = at(builder, target, V16F, i * KEYS * 4 + 64 * p)
                    builder.store(totals[i * columns + p], place, align=4)
            return []

        loop(builder, I64(KEYS // 16 // columns), [], column)
        builder.ret_void()

    return emit


def _weigh(narrow: bool) -> Callable:
    """sums[g, i] = sums[g, i] * factors[i] + sum over words k of p[i, k] * values[g, k]; g counts sixteens."""
    words = KEYS // 2 if narrow else KEYS
    columns = _COLUMNS

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        p, values, factors, groups, sums = args

        def group(g, _):
            here = builder.add(values, builder.mul(g, I64(columns * words * 64)))
            target = builder.add(sums, builder.mul(g, I64(columns * ROWS * 64)))

            def place(i, c):
                return at(builder, target, V16F, (c * ROWS + i) * 64)

            totals = []
            for i in range(ROWS):
                factor = splat(builder, builder.load(at(builder, factors, F32, 4 * i), align=4), 16)
                totals += [builder.fmul(builder.load(place(i, c), align=4), factor) for c in range(columns)]

            def word(k, totals):
                offset = builder.add(here, builder.shl(k, I64(6)))
                w = [builder.load(at(builder, offset, _WORDS, c * words * 64), align=4) for c in range(columns)]
                x = builder.add(p, builder.shl(k, I64(2)))
                result = []
                for i in range(ROWS):
                    value = splat(builder, builder.load(at(builder, x, I32, i * KEYS * 4), align=4), 16)
                    for c in range(columns):
                        result.append(multiply_add(builder, narrow, value, w[c], totals[i * columns + c]))
                return result

            totals = loop(builder, I64(words), totals, word)
            for i in range(ROWS):
                for c in range(columns):
                    builder.store(totals[i * columns + c], place(i, c), align=4)
            return []

        loop(builder, builder.udiv(groups, I64(columns)), [], group)
        builder.ret_void()

    return emit


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp(x) for x <= 0: 2^n * exp(r), |r| <= ln(2)/2 (coefficients: Cephes expf); 0 below -86, and NaN stays."""

    def constant(value):
        return filled(V16F, value)

    def fma(a, b, c):
        return call(builder, "llvm.fmuladd.v16f32", V16F, [a, b, c])

    tiny = builder.fcmp_ordered("<", x, constant(-86.0))
    x = builder.select(tiny, constant(-86.0), x)
    rounder = constant(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to an integer
    shifted = builder.fadd(builder.fmul(x, constant(1.4426950216293335)), rounder)
    f = builder.fsub(shifted, rounder)
    r = fma(f, constant(2.12194440e-4), fma(f, constant(-0.693359375), x))
    p = constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, constant(c))
    p = fma(p, builder.fmul(r, r), builder.fadd(r, constant(1.0)))
    power = builder.shl(builder.add(builder.bitcast(shifted, _WORDS), filled(_WORDS, 127)), filled(_WORDS, 23))
    return builder.select(tiny, constant(0.0), builder.fmul(p, builder.bitcast(power, V16F)))


def _softmax(narrow: bool) -> Callable:
    """A running softmax over the key tile's scores, which become probabilities relative to the largest score so far.

    largest, total: float32 [ROWS], the state; factors[i]: what sums of earlier tiles are to be multiplied with.
    The total adds the probabilities as they are rounded.
    """

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        scores, largest, total, factors = args
        infinite = ir.Constant(F32, float("-inf"))

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        def row(i, _):
            here = builder.add(scores, builder.mul(i, I64(KEYS * 4)))
            at_largest, at_total, at_factor = (
                at(builder, builder.add(a, builder.shl(i, I64(2))), F32) for a in (largest, total, factors)
            )
            x = [builder.load(at(builder, here, V16F, 64 * j), align=4) for j in range(KEYS // 16)]
            most = x[0]
            for vector in x[1:]:
                most = larger(most, vector)
            before = builder.load(at_largest, align=4)
            peak = larger(before, reduced(builder, most, larger))
            builder.store(peak, at_largest, align=4)
            # nothing to attend to so far: any finite peak makes every exp below 0
            peak = builder.select(builder.fcmp_ordered("==", peak, infinite), F32(0.0), peak)
            factor = _exp(builder, splat(builder, builder.fsub(before, peak), 16))
            factor = builder.extract_element(factor, I32(0))
            builder.store(factor, at_factor, align=4)
            peaks = splat(builder, peak, 16)
            p = [_exp(builder, builder.fsub(vector, peaks)) for vector in x]
            added = None
            if narrow:
                for j in range(0, KEYS // 16, 2):
                    pairs = builder.bitcast(_to_pairs(builder, p[j], p[j + 1]), _WORDS)
                    builder.store(pairs, at(builder, here, _WORDS, 32 * j), align=4)
                    low = builder.bitcast(builder.shl(pairs, filled(_WORDS, 16)), V16F)
                    high = builder.bitcast(builder.and_(pairs, filled(_WORDS, -65536)), V16F)
                    pair = builder.fadd(low, high)
                    added = pair if added is None else builder.fadd(added, pair)
            else:
                for j, vector in enumerate(p):
                    builder.store(vector, at(builder, here, V16F, 64 * j), align=4)
                    added = vector if added is None else builder.fadd(added, vector)
            added = reduced(builder, added, builder.fadd)
            old = builder.load(at_total, align=4)
            builder.store(builder.fadd(builder.fmul(old, factor), added), at_total, align=4)
            return []

        loop(builder, I64(ROWS), [], row)
        builder.ret_void()

    return emit


def _two(name: str, count: int, make: Callable[[bool], Callable]):
    """An intrinsic of `narrow` and `count` int64 arguments that runs the narrow micro-kernel or the float32 one."""

    def codegen(context, builder, signature, args):
        narrow, *rest = args
        wide = single(f"{name}.f32", count, make(False))
        if not NARROW:
            return wide(context, builder, signature, rest)
        with builder.if_else(builder.icmp_signed("!=", narrow, narrow.type(0))) as (then, otherwise):
            with then:
                single(f"{name}.bf16", count, make(True))(context, builder, signature, rest)
            with otherwise:
                wide(context, builder, signature, rest)
        return context.get_dummy_value()

    return codegen


@intrinsic
def score_tile(typingctx, narrow, q, keys, count, out):
    """See _scores. count: words of a head, at least 1."""
    return types.void(types.int64, *[types.int64] * 4), _two("score_tile", 4, _scores)


@intrinsic
def softmax_tile(typingctx, narrow, scores, largest, total, factors):
    """See _softmax."""
    return types.void(types.int64, *[types.int64] * 4), _two("softmax_tile", 4, _softmax)


@intrinsic
def weigh_tile(typingctx, narrow, p, values, factors, groups, sums):
    """See _weigh. groups: head size / 16, an even number."""
    return types.void(types.int64, *[types.int64] * 5), _two("weigh_tile", 5, _weigh)


def _formats(name: str, count: int, make: Callable[[str, bool], Callable]):
    """An intrinsic of an index into FORMATS, `narrow` and `count` int64 arguments."""

    def codegen(context, builder, signature, args):
        fmt, narrow, *rest = args
        after = builder.append_basic_block("format.end")
        switch = builder.switch(fmt, after)
        for index, known in enumerate(FORMATS):
            start = builder.append_basic_block(f"format.{known}")
            switch.add_case(I64(index), start)
            with builder.goto_block(start):
                emit = _two(f"{name}.{known}", count, lambda narrow, known=known: make(known, narrow))
                emit(context, builder, signature, [narrow, *rest])
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return codegen


@intrinsic
def pack_rows(typingctx, fmt, narrow, source, stride, blocks, out, out_stride):
    """See _pack_rows."""
    return types.void(*[types.int64] * 7), _formats("pack_rows", 5, _pack_rows)


@intrinsic
def pack_values(typingctx, fmt, narrow, source, stride, blocks, out):
    """See _pack_values."""
    return types.void(*[types.int64] * 6), _formats("pack_values", 4, _pack_values)
