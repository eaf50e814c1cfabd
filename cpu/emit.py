"""The micro-kernels, emitted as LLVM IR: one generator for every instruction set (isa.py).

A weight tile is 16 rows of a weight matrix, i.e. 16 output columns; a row tile is m activation rows, 1 <= m <= ROWS.
Each function computes one (row tile, weight tile) pair with its float accumulators in registers over all of K. An
output's additions over K run in one order, whatever m is, so a row's result does not depend on its neighbours.

Packed operands (see weights.py, matmul.py):
    Q40 block of a weight tile   256 bytes [4 groups][16 rows][4]: byte c of group g holds weight 4g + c in its low
                                 nibble and weight 16 + 4g + c in its high one
    Q80 block of a weight tile   512 bytes [8 groups][16 rows][4]: byte c of group g is weight 4g + c, plus 128
    scales of both               float16 [K/32][16]
    int8 row tile                int8 [K/32][m][32], float32 scales [K/32][m], int32 -8 * sum of a block [K/32][m]
    float row tile               float32 [K][m]
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ddllm_vk.cpu import isa
from ddllm_vk.cpu.intrinsics import F32, I8, I16, I32, I64, V16F, at, call, half_bits_to_float

ROWS = isa.ACTIVE.rows
_LANES = isa.ACTIVE.lanes
_NAME = isa.ACTIVE.name

_WORDS = ir.VectorType(I32, _LANES)
_FLOATS = ir.VectorType(F32, _LANES)
_BYTES = ir.VectorType(I8, 4 * _LANES)
_SHORTS = ir.VectorType(I16, 2 * _LANES)


def splat(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """A vector of `count` copies of a scalar."""
    ty = ir.VectorType(value.type, count)
    nothing = ir.Constant(ty, ir.Undefined)
    one = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(I32, count), [0] * count))


def filled(ty: ir.VectorType, value) -> ir.Constant:
    return ir.Constant(ty, [value] * ty.count)


def half_to_floats(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """<n x i16> of float16 bits to <n x float>."""
    if not isa.ACTIVE.hardware_half:
        return half_bits_to_float(builder, bits)
    count = bits.type.count
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), count)), ir.VectorType(F32, count))


def _every_other(builder, vector, first):
    count = vector.type.count // 2
    return builder.shuffle_vector(
        vector, vector, ir.Constant(ir.VectorType(I32, count), list(range(first, 2 * count, 2)))
    )


def _generic_products(builder, products):
    """Sums of groups of four int16 products, as int32."""
    for _ in range(2):
        even, odd = (_every_other(builder, products, first) for first in (0, 1))
        if even.type.element == I16:
            wide = ir.VectorType(I32, even.type.count)
            even, odd = builder.sext(even, wide), builder.sext(odd, wide)
        products = builder.add(even, odd)
    return products


def _dot_vnni(builder, weights, broadcasts, start):
    total = start
    for weight, x in zip(weights, broadcasts, strict=True):
        total = call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, [total, weight, x()])
    return total


def _pairs(builder, weight, x):
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [weight, x])


def _fours(builder, shorts):
    return call(builder, "llvm.x86.avx2.pmadd.wd", _WORDS, [shorts, filled(_SHORTS, 1)])


def _dot_avx2_q40(builder, weights, broadcasts, start):
    # All sixteen products of an int16 lane fit: 16 * 15 * 127 = 30480.
    total = None
    for weight, x in zip(weights, broadcasts, strict=True):
        pairs = _pairs(builder, builder.bitcast(weight, _BYTES), builder.bitcast(x(), _BYTES))
        total = pairs if total is None else builder.add(total, pairs)
    return builder.add(start, _fours(builder, total))


def _dot_avx2_q80(builder, weights, broadcasts, start):
    # |w| * (x with w's sign): a pair is at most 2 * 128 * 127 = 32512, but two pairs no longer fit in int16.
    total = start
    for (weight, size), x in zip(weights, broadcasts, strict=True):
        signed = call(builder, "llvm.x86.avx2.psign.b", _BYTES, [builder.bitcast(x(), _BYTES), weight])
        total = builder.add(total, _fours(builder, _pairs(builder, size, signed)))
    return total


def _dot_generic(builder, weights, broadcasts, start, signed):
    total = start
    wide = ir.VectorType(I16, 4 * _LANES)
    for weight, x in zip(weights, broadcasts, strict=True):
        weight = builder.bitcast(weight, _BYTES)
        weight = builder.sext(weight, wide) if signed else builder.zext(weight, wide)
        products = builder.mul(weight, builder.sext(builder.bitcast(x(), _BYTES), wide))
        total = builder.add(total, _generic_products(builder, products))
    return total


def _load_weights(builder, fmt, block, sub):
    """The eight operands of a block's dots, in the order of x's bytes: [0:4], [4:8], ..., [28:32]."""
    groups = [
        builder.load(at(builder, block, _WORDS, 64 * g + 4 * _LANES * sub), align=4 * _LANES)
        for g in range(4 if fmt == "q40" else 8)
    ]
    if fmt == "q40":
        low = [builder.and_(g, filled(_WORDS, 0x0F0F0F0F)) for g in groups]
        high = [builder.and_(builder.lshr(g, filled(_WORDS, 4)), filled(_WORDS, 0x0F0F0F0F)) for g in groups]
        return low + high
    if _NAME == "avx512vnni":
        return groups
    groups = [builder.bitcast(builder.xor(g, filled(_WORDS, -0x7F7F7F80)), _BYTES) for g in groups]
    if _NAME == "avx2":
        zero = filled(_BYTES, 0)
        return [(g, builder.select(builder.icmp_signed("<", g, zero), builder.sub(zero, g), g)) for g in groups]
    return groups


def _block_dot(builder, fmt, weights, broadcasts, start):
    """int32 lanes: exact dot products of one block of 32, `start` (-8 * sum of x) making up for unsigned weights."""
    if _NAME == "avx512vnni":
        if fmt == "q80":
            start = builder.shl(start, filled(_WORDS, 4))
        return _dot_vnni(builder, weights, broadcasts, start)
    if fmt == "q80":
        start = filled(_WORDS, 0)
    if _NAME == "avx2":
        dot = _dot_avx2_q40 if fmt == "q40" else _dot_avx2_q80
        return dot(builder, weights, broadcasts, start)
    return _dot_generic(builder, weights, broadcasts, start, signed=fmt == "q80")


def loop(builder: ir.IRBuilder, count: ir.Value, start: list[ir.Value], body: Callable) -> list[ir.Value]:
    """for i in range(count): state = body(i, state), the state in registers; count must be at least 1."""
    before = builder.block
    block = builder.append_basic_block("loop")
    after = builder.append_basic_block("end")
    builder.branch(block)
    builder.position_at_end(block)
    index = builder.phi(I64)
    state = [builder.phi(value.type) for value in start]
    final = body(index, state)
    following = builder.add(index, I64(1))
    for phi, first, last in zip([index, *state], [I64(0), *start], [following, *final], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return final


def reduced(builder: ir.IRBuilder, vector: ir.Value, combine: Callable) -> ir.Value:
    """The sixteen lanes combined in a tree, as a scalar."""
    width = 16
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(I32, width), list(range(f, f + width))) for f in (0, width))
        vector = combine(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
    return builder.extract_element(vector, I32(0))


def _int8_tile(fmt: str, m: int) -> Callable:
    """out[i, 0:16] = row i of an int8 row tile times a Q40 or Q80 weight tile, for i < m."""
    block_bytes = 256 if fmt == "q40" else 512

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        x, scales, starts, weights, weight_scales, blocks, out, out_stride = args
        for sub in range(isa.TILE // _LANES):

            def body(b, totals, sub=sub):
                here = builder.add(weights, builder.mul(b, I64(block_bytes)))
                operands = _load_weights(builder, fmt, here, sub)
                half = builder.add(weight_scales, builder.mul(b, I64(2 * isa.TILE)))
                half = builder.load(at(builder, half, ir.VectorType(I16, _LANES), 2 * _LANES * sub), align=2 * _LANES)
                weight_scale = half_to_floats(builder, half)
                row_block = builder.mul(b, I64(m))
                values = builder.add(x, builder.shl(row_block, I64(5)))
                at_scale = builder.add(scales, builder.shl(row_block, I64(2)))
                at_start = builder.add(starts, builder.shl(row_block, I64(2)))
                result = []
                for i, total in enumerate(totals):

                    def broadcast(g, i=i):
                        word = builder.load(at(builder, values, I32, 32 * i + 4 * g), align=4)
                        return splat(builder, word, _LANES)

                    start = splat(builder, builder.load(at(builder, at_start, I32, 4 * i), align=4), _LANES)
                    dot = _block_dot(builder, fmt, operands, [lambda g=g, f=broadcast: f(g) for g in range(8)], start)
                    scale = splat(builder, builder.load(at(builder, at_scale, F32, 4 * i), align=4), _LANES)
                    scale = builder.fmul(scale, weight_scale)
                    number = builder.sitofp(dot, _FLOATS)
                    result.append(call(builder, f"llvm.fmuladd.v{_LANES}f32", _FLOATS, [number, scale, total]))
                return result

            totals = loop(builder, blocks, [filled(_FLOATS, 0.0)] * m, body)
            for i, total in enumerate(totals):
                row = builder.add(out, builder.mul(out_stride, I64(i)))
                builder.store(total, at(builder, row, _FLOATS, 4 * _LANES * sub), align=4)
        builder.ret_void()

    return emit


def _float_tile(m: int) -> Callable:
    """out[i, 0:16] += sum over k of x[k, i] * w[k, 0:16], for i < m; strides of w and out are in bytes."""

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        x, weights, weight_stride, count, out, out_stride = args
        rows = [at(builder, builder.add(out, builder.mul(out_stride, I64(i))), V16F) for i in range(m)]

        def body(k, totals):
            here = builder.add(weights, builder.mul(k, weight_stride))
            weight = builder.load(at(builder, here, V16F), align=4)
            values = builder.add(x, builder.mul(k, I64(4 * m)))
            result = []
            for i, total in enumerate(totals):
                value = splat(builder, builder.load(at(builder, values, F32, 4 * i), align=4), 16)
                result.append(call(builder, "llvm.fmuladd.v16f32", V16F, [value, weight, total]))
            return result

        totals = loop(builder, count, [builder.load(row, align=4) for row in rows], body)
        for total, row in zip(totals, rows, strict=True):
            builder.store(total, row, align=4)
        builder.ret_void()

    return emit


def _function(module: ir.Module, name: str, count: int, emit: Callable) -> ir.Function:
    """A private function of `count` int64 arguments, emitted once a module."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    emit(ir.IRBuilder(function.append_basic_block("entry")), list(function.args))
    return function


def _by_rows(name: str, count: int, make: Callable[[int], Callable]):
    """An intrinsic of m and `count` int64 arguments that runs the version of a micro-kernel for m rows."""

    def codegen(context, builder, signature, args):
        rows, *rest = args
        after = builder.append_basic_block("rows.end")
        switch = builder.switch(rows, after)
        for m in range(1, ROWS + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{m}")):
                builder.call(_function(builder.module, f"ddllm_vk.{name}.{m}", count, make(m)), rest)
                builder.branch(after)
                switch.add_case(I64(m), builder.block)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return codegen


@intrinsic
def q40_tile(typingctx, m, x, scales, starts, weights, weight_scales, blocks, out, out_stride):
    """See _int8_tile. Addresses, a count of blocks >= 1, and out's row stride in bytes."""
    return types.void(*[types.int64] * 9), _by_rows("q40_tile", 8, lambda m: _int8_tile("q40", m))


@intrinsic
def q80_tile(typingctx, m, x, scales, starts, weights, weight_scales, blocks, out, out_stride):
    """See _int8_tile. Addresses, a count of blocks >= 1, and out's row stride in bytes."""
    return types.void(*[types.int64] * 9), _by_rows("q80_tile", 8, lambda m: _int8_tile("q80", m))


@intrinsic
def float_tile(typingctx, m, x, weights, weight_stride, count, out, out_stride):
    """See _float_tile. Addresses, strides in bytes, count >= 1."""
    return types.void(*[types.int64] * 7), _by_rows("float_tile", 6, _float_tile)


def _dequantise_block(fmt: str) -> Callable:
    """A block of a Q40 or Q80 weight tile and its 16 scales to float32 [32][16]."""

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        block, scales, out = args
        words = ir.VectorType(I32, 16)
        scale = half_to_floats(builder, builder.load(at(builder, scales, ir.VectorType(I16, 16)), align=2))
        for g in range(4 if fmt == "q40" else 8):
            word = builder.load(at(builder, block, words, 64 * g), align=4)
            for c in range(4):
                parts = ((8 * c, 4 * g + c), (8 * c + 4, 16 + 4 * g + c)) if fmt == "q40" else ((8 * c, 4 * g + c),)
                for shift, k in parts:
                    mask, zero = (15, 8) if fmt == "q40" else (255, 128)
                    value = builder.and_(builder.lshr(word, filled(words, shift)), filled(words, mask))
                    value = builder.sitofp(builder.sub(value, filled(words, zero)), V16F)
                    builder.store(builder.fmul(value, scale), at(builder, out, V16F, 64 * k), align=4)
        builder.ret_void()

    return emit


def _inline(emit: Callable):
    def codegen(context, builder, signature, args):
        emit(builder, args)
        return context.get_dummy_value()

    return codegen


def single(name: str, count: int, emit: Callable):
    def codegen(context, builder, signature, args):
        builder.call(_function(builder.module, f"ddllm_vk.{name}", count, emit), args)
        return context.get_dummy_value()

    return codegen


@intrinsic
def q40_block_to_floats(typingctx, block, scales, out):
    """See _dequantise_block."""
    return types.void(*[types.int64] * 3), single("q40_block_to_floats", 3, _dequantise_block("q40"))


@intrinsic
def q80_block_to_floats(typingctx, block, scales, out):
    """See _dequantise_block."""
    return types.void(*[types.int64] * 3), single("q80_block_to_floats", 3, _dequantise_block("q80"))


def _row_block(fmt: str) -> Callable:
    """One row's 32 values of a Q40 or Q80 block to float32 [32]; the address is that of the row's first four bytes."""

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        block, scale, out = args
        groups = 4 if fmt == "q40" else 8
        words = ir.Constant(ir.VectorType(I32, groups), ir.Undefined)
        for g in range(groups):
            words = builder.insert_element(words, builder.load(at(builder, block, I32, 64 * g), align=4), I32(g))
        values = builder.bitcast(words, ir.VectorType(I8, 4 * groups))
        if fmt == "q40":
            parts = [builder.and_(values, filled(values.type, 15)), builder.lshr(values, filled(values.type, 4))]
            zero = 8
        else:
            masks = [ir.Constant(ir.VectorType(I32, 16), list(range(first, first + 16))) for first in (0, 16)]
            parts = [builder.shuffle_vector(values, values, mask) for mask in masks]
            zero = 128
        wide = ir.VectorType(I32, 16)
        factor = splat(builder, scale, 16)
        for half, part in enumerate(parts):
            number = builder.sitofp(builder.sub(builder.zext(part, wide), filled(wide, zero)), V16F)
            builder.store(builder.fmul(number, factor), at(builder, out, V16F, 64 * half), align=4)

    return emit


@intrinsic
def q40_row_block(typingctx, block, scale, out):
    """See _row_block."""
    return types.void(types.int64, types.float32, types.int64), _inline(_row_block("q40"))


@intrinsic
def q80_row_block(typingctx, block, scale, out):
    """See _row_block."""
    return types.void(types.int64, types.float32, types.int64), _inline(_row_block("q80"))


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of sixteen vectors of sixteen: four rounds of interleaving row i with row i + 8."""
    masks = [
        ir.Constant(ir.VectorType(I32, 16), [lane // 2 + half + 16 * (lane % 2) for lane in range(16)])
        for half in (0, 8)
    ]
    for _ in range(4):
        rows = [builder.shuffle_vector(rows[i], rows[i + 8], mask) for i in range(8) for mask in masks]
    return rows


def _transpose(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
    """out[j, i] = source[i, j] for 16 x 16 float32."""
    source, stride, out = args
    rows = [
        builder.load(at(builder, builder.add(source, builder.mul(stride, I64(i))), V16F), align=4) for i in range(16)
    ]
    for j, row in enumerate(transposed(builder, rows)):
        builder.store(row, at(builder, out, V16F, 64 * j), align=4)
    builder.ret_void()


@intrinsic
def transpose_16(typingctx, source, stride, out):
    """See _transpose. `stride` is the bytes from one source row to the next; out rows are contiguous."""
    return types.void(*[types.int64] * 3), single("transpose_16", 3, _transpose)
