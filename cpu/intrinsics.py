"""Small pieces of emitted code for use inside kernels: raw memory, an atomic counter, float16, exp, tanh, reductions.

Addresses are int64. Nothing here knows the size of anything: callers have checked. exp and tanh have a few units in
the last place of error, no branches, and no library calls, so loops over them vectorise on every instruction set.
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Iterable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ddllm_vk.cpu import isa

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
V16F = ir.VectorType(F32, 16)


def at(builder: ir.IRBuilder, address: ir.Value, ty: ir.Type, offset: int = 0) -> ir.Value:
    """A pointer to `ty` at an int64 address plus a constant number of bytes."""
    base = builder.inttoptr(address, I8.as_pointer())
    if offset:
        base = builder.gep(base, [I64(offset)])
    return builder.bitcast(base, ty.as_pointer())


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    """Call the LLVM intrinsic or function `name`, declared on first use."""
    declared = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(declared, args)


def filled(ty: ir.VectorType, value) -> ir.Constant:
    """A constant vector of equal elements."""
    return ir.Constant(ty, [value] * ty.count)


def lanes_of(builder: ir.IRBuilder, vector: ir.Value, lanes: Iterable[int]) -> ir.Value:
    """The vector of the given lanes of a vector."""
    lanes = list(lanes)
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """A vector of `count` copies of a scalar."""
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return lanes_of(builder, builder.insert_element(nothing, value, I32(0)), [0] * count)


@intrinsic
def address(typingctx, array):
    """int64 address of an array's first element."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), codegen


@intrinsic
def take(typingctx, counter, amount):
    """Atomically add `amount` to counter[0] (int64) and return what it held: the first job of the next grain."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, args[1], "monotonic")

    return types.int64(counter, types.int64), codegen


def _memory(ty: ir.Type, numba_type: types.Type):
    """load(where, i) and store(where, i, value): element i of an unaligned array at an address. A loop over i
    vectorises; one over `where` does not."""

    @intrinsic
    def load(typingctx, where, index):
        def codegen(context, builder, signature, args):
            return builder.load(builder.gep(at(builder, args[0], ty), [args[1]]), align=1)

        return numba_type(types.int64, types.int64), codegen

    @intrinsic
    def store(typingctx, where, index, value):
        def codegen(context, builder, signature, args):
            builder.store(args[2], builder.gep(at(builder, args[0], ty), [args[1]]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return load, store


load_u8, store_u8 = _memory(I8, types.uint8)
load_i8, store_i8 = _memory(I8, types.int8)
load_u16, store_u16 = _memory(I16, types.uint16)
load_u32, store_u32 = _memory(I32, types.uint32)
load_f32, store_f32 = _memory(F32, types.float32)


@intrinsic
def copy_32(typingctx, source, target):
    """Copy 32 bytes from one address to another."""

    def codegen(context, builder, signature, args):
        block = ir.VectorType(I8, 32)
        builder.store(builder.load(at(builder, args[0], block), align=1), at(builder, args[1], block), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _transposition(ty: ir.Type, per_row: int):
    """transpose(source, stride, target, flip): the first `per_row` elements of 16 rows, `stride` bytes apart, to
    [per_row][16] at `target`; every element is xor-ed with `flip`."""
    row, whole = ir.VectorType(ty, per_row), ir.VectorType(ty, 16 * per_row)

    @intrinsic
    def transpose(typingctx, source, stride, target, flip):
        def codegen(context, builder, signature, args):
            source, stride, target, flip = args
            rows = [
                builder.load(at(builder, builder.add(source, builder.mul(stride, I64(r))), row), align=1)
                for r in range(16)
            ]
            # Interleaving row r with row r + 8, the results r and r + 4 of that, and so on leaves all rows in order.
            while len(rows) > 1:
                half, count = len(rows) // 2, rows[0].type.count
                order = ir.Constant(ir.VectorType(I32, 2 * count), [i // 2 + i % 2 * count for i in range(2 * count)])
                rows = [builder.shuffle_vector(rows[r], rows[r + half], order) for r in range(half)]
            flips = builder.insert_element(ir.Constant(whole, ir.Undefined), builder.trunc(flip, ty), I32(0))
            flips = builder.shuffle_vector(flips, flips, ir.Constant(ir.VectorType(I32, whole.count), None))
            builder.store(builder.xor(rows[0], flips), at(builder, target, whole), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.uint64), codegen

    return transpose


transpose_u32 = _transposition(I32, 4)
transpose_u16 = _transposition(I16, 8)


@intrinsic
def bits_to_float(typingctx, bits):
    """The float32 whose bits are the given uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


def half_bits_to_float(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """float16 bits (i16, or a vector of them) to float32 with integer arithmetic: exact for every value."""
    count = half.type.count if isinstance(half.type, ir.VectorType) else 0
    i32 = ir.VectorType(I32, count) if count else I32
    f32 = ir.VectorType(F32, count) if count else F32

    def constant(ty, value):
        return ir.Constant(ty, [value] * count if count else value)

    wide = builder.zext(half, i32)
    sign = builder.shl(builder.and_(wide, constant(i32, 0x8000)), constant(i32, 16))
    magnitude = builder.and_(wide, constant(i32, 0x7FFF))
    shifted = builder.shl(magnitude, constant(i32, 13))
    scaled = builder.bitcast(builder.fmul(builder.bitcast(shifted, f32), constant(f32, 2.0**112)), i32)
    special = builder.icmp_unsigned(">=", magnitude, constant(i32, 0x7C00))
    value = builder.select(special, builder.or_(shifted, constant(i32, 0x7F800000)), scaled)
    return builder.bitcast(builder.or_(value, sign), f32)


def half_to_floats(builder: ir.IRBuilder, bits: ir.Value, target: isa.Isa = isa.ACTIVE) -> ir.Value:
    """float16 bits (i16, or a vector of them) to float32, by an instruction where the target has one."""
    if not target.hardware_half:
        return half_bits_to_float(builder, bits)
    half, single = ir.HalfType(), F32
    if isinstance(bits.type, ir.VectorType):
        half, single = (ir.VectorType(ty, bits.type.count) for ty in (half, single))
    return builder.fpext(builder.bitcast(bits, half), single)


@intrinsic
def half_to_float(typingctx, bits):
    """The float32 value of float16 bits."""

    def codegen(context, builder, signature, args):
        return half_to_floats(builder, args[0])

    return types.float32(types.uint16), codegen


def _fma(builder, a, b, c):
    suffix = "f32" if a.type == F32 else f"v{a.type.count}f32"
    return call(builder, f"llvm.fmuladd.{suffix}", a.type, [a, b, c])


def _polynomial(builder, x, coefficients):
    value = ir.Constant(F32, coefficients[0])
    for c in coefficients[1:]:
        value = _fma(builder, value, x, ir.Constant(F32, c))
    return value


def _exp(builder, x):
    """exp(x) = 2^n * exp(r), |r| <= ln(2)/2 (coefficients: Cephes expf). Below -87.3 it is 0, above 88.7 infinite."""
    low, high = ir.Constant(F32, -87.33654022216797), ir.Constant(F32, 88.72283172607422)
    tiny = builder.fcmp_ordered("<", x, low)
    huge = builder.fcmp_ordered(">", x, high)
    clamped = builder.select(tiny, low, builder.select(huge, high, x))
    y = builder.fmul(clamped, ir.Constant(F32, 1.4426950216293335))
    half = builder.select(builder.fcmp_ordered("<", y, F32(0.0)), F32(-0.5), F32(0.5))
    # 88.72 would round to 2^128: stay at 127, the polynomial still reaches
    n = builder.fptosi(builder.fadd(y, half), I32)
    n = builder.select(builder.icmp_signed(">", n, I32(127)), I32(127), n)
    f = builder.sitofp(n, F32)
    r = _fma(builder, f, ir.Constant(F32, -0.693359375), clamped)
    r = _fma(builder, f, ir.Constant(F32, 2.12194440e-4), r)
    p = _polynomial(
        builder,
        r,
        [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1],
    )
    p = _fma(builder, p, builder.fmul(r, r), builder.fadd(r, F32(1.0)))
    scale = builder.bitcast(builder.shl(builder.add(n, I32(127)), I32(23)), F32)
    result = builder.fmul(p, scale)
    result = builder.select(tiny, F32(0.0), result)
    return builder.select(huge, F32(float("inf")), result)


@intrinsic
def exp32(typingctx, x):
    """float32 exp."""

    def codegen(context, builder, signature, args):
        return _exp(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def tanh32(typingctx, x):
    """float32 tanh: an odd polynomial for |x| < 0.625 (Cephes tanhf), 1 - 2 / (exp(2|x|) + 1) beyond."""

    def codegen(context, builder, signature, args):
        (x,) = args
        bits = builder.bitcast(x, I32)
        sign = builder.and_(bits, I32(-0x80000000))
        size = builder.bitcast(builder.and_(bits, I32(0x7FFFFFFF)), F32)
        square = builder.fmul(x, x)
        p = _polynomial(
            builder,
            square,
            [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1],
        )
        small = _fma(builder, builder.fmul(p, square), x, x)
        e = _exp(builder, builder.fadd(size, size))
        large = builder.fsub(F32(1.0), builder.fdiv(F32(2.0), builder.fadd(e, F32(1.0))))
        large = builder.bitcast(builder.or_(builder.bitcast(large, I32), sign), F32)
        return builder.select(builder.fcmp_ordered("<", size, ir.Constant(F32, 0.625)), small, large)

    return types.float32(types.float32), codegen


@intrinsic
def gelu32(typingctx, x):
    """GELU, tanh approximation: 0.5 x (1 + tanh(u)) is x / (1 + exp(-2u)), which keeps its accuracy at both ends."""

    def codegen(context, builder, signature, args):
        (x,) = args
        cubed = builder.fmul(builder.fmul(x, x), x)
        u = _fma(builder, cubed, ir.Constant(F32, 0.044714998453855515), x)
        e = _exp(builder, builder.fmul(u, ir.Constant(F32, -1.5957691669464111)))
        return builder.fdiv(x, builder.fadd(F32(1.0), e))

    return types.float32(types.float32), codegen


def _reduction(combine, horizontal, start):
    """float32 reduction of `count` contiguous values: 16 lanes, then their tree, then the tail from left to right.
    max_of passes over NaN, the others keep it."""

    @intrinsic
    def reduce(typingctx, where, count):
        def codegen(context, builder, signature, args):
            where, count = args
            lanes = cgutils.alloca_once_value(builder, ir.Constant(V16F, [start] * 16))
            full = builder.and_(count, I64(-16))
            with cgutils.for_range_slice(builder, I64(0), full, I64(16), inc=True) as (i, _):
                vector = builder.load(at(builder, builder.add(where, builder.shl(i, I64(2))), V16F), align=4)
                builder.store(combine(builder, builder.load(lanes), vector), lanes)
            total = cgutils.alloca_once(builder, F32)
            vector = builder.load(lanes)
            width = 16
            while width > 1:
                width //= 2
                low = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), list(range(width))))
                high = builder.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
                )
                vector = horizontal(builder, low, high)
            builder.store(builder.extract_element(vector, I32(0)), total)
            with cgutils.for_range_slice(builder, full, count, I64(1), inc=True) as (i, _):
                value = builder.load(at(builder, builder.add(where, builder.shl(i, I64(2))), F32), align=4)
                builder.store(combine(builder, builder.load(total), value), total)
            return builder.load(total)

        return types.float32(types.int64, types.int64), codegen

    return reduce


@intrinsic
def next_above(typingctx, where, first, count, limit):
    """The lowest index >= first of a float32 > limit, or `count`; count is a multiple of 16."""

    def codegen(context, builder, signature, args):
        where, first, count, limit = args
        lanes = ir.Constant(V16F, ir.Undefined)
        for lane in range(16):
            lanes = builder.insert_element(lanes, limit, I32(lane))
        # of the first sixteen, those before `first` do not count
        allowed = builder.trunc(builder.shl(I64(-1), builder.and_(first, I64(15))), I16)
        begin = builder.and_(first, I64(-16))
        before = builder.block
        head, body, hit, following, end = (
            builder.append_basic_block(f"above.{name}") for name in ("head", "body", "hit", "next", "end")
        )
        builder.branch(head)
        builder.position_at_end(head)
        index, mask = builder.phi(I64), builder.phi(I16)
        builder.cbranch(builder.icmp_signed("<", index, count), body, end)
        builder.position_at_end(body)
        values = builder.load(at(builder, builder.add(where, builder.shl(index, I64(2))), V16F), align=4)
        above = builder.and_(builder.bitcast(builder.fcmp_ordered(">", values, lanes), I16), mask)
        builder.cbranch(builder.icmp_unsigned("!=", above, I16(0)), hit, following)
        builder.position_at_end(hit)
        found = builder.add(index, builder.cttz(builder.zext(above, I64), ir.Constant(ir.IntType(1), 1)))
        builder.branch(end)
        builder.position_at_end(following)
        stepped = builder.add(index, I64(16))
        builder.branch(head)
        index.add_incoming(begin, before)
        index.add_incoming(stepped, following)
        mask.add_incoming(allowed, before)
        mask.add_incoming(I16(-1), following)
        builder.position_at_end(end)
        result = builder.phi(I64)
        result.add_incoming(count, head)
        result.add_incoming(found, hit)
        return result

    return types.int64(types.int64, types.int64, types.int64, types.float32), codegen


def _maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _larger_magnitude(builder, a, b):
    """The larger of |a| and |b|, compared as integers: a NaN is larger than everything and stays."""
    count = a.type.count if isinstance(a.type, ir.VectorType) else 0
    integer = ir.VectorType(I32, count) if count else I32
    mask = ir.Constant(integer, [0x7FFFFFFF] * count if count else 0x7FFFFFFF)
    a, b = (builder.and_(builder.bitcast(x, integer), mask) for x in (a, b))
    larger = builder.select(builder.icmp_signed(">", b, a), b, a)
    return builder.bitcast(larger, ir.VectorType(F32, count) if count else F32)


sum_of = _reduction(lambda b, s, v: b.fadd(s, v), lambda b, x, y: b.fadd(x, y), 0.0)
square_sum_of = _reduction(lambda b, s, v: _fma(b, v, v, s), lambda b, x, y: b.fadd(x, y), 0.0)
max_of = _reduction(_maximum, _maximum, float("-inf"))
absmax_of = _reduction(_larger_magnitude, _larger_magnitude, 0.0)
