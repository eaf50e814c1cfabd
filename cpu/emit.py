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
from ddllm_vk.cpu.dots import DOTS
from ddllm_vk.cpu.intrinsics import F32, I8, I16, I32, I64, V16F, at, call, filled, half_to_floats, lanes_of, splat
from ddllm_vk.cpu.isa import TILE, Isa

#: The most activation rows a row tile has with the active instruction set.
ROWS = isa.ACTIVE.rows

# Weights come from memory once a pass: they are asked for this many bytes (28 blocks of Q40) before they are needed.
_PREFETCH = 8192

#: Writes a function's instructions, given its arguments (int64).
Emit = Callable[[ir.IRBuilder, list[ir.Value]], None]


def _word(
    builder: ir.IRBuilder, row: ir.Value, index: int, count: int, ty: ir.Type, lanes: int, target: Isa
) -> ir.Value:
    """Word `index` of `count` contiguous ones, in every lane. Where an instruction takes a single lane, words are
    loaded by fours and the copy costs nothing."""
    first = index // 4 * 4
    if target.lane_operands and first + 4 <= count:
        four = builder.load(at(builder, row, ir.VectorType(ty, 4), 4 * first), align=4)
        return lanes_of(builder, four, [index - first] * lanes)
    return splat(builder, builder.load(at(builder, row, ty, 4 * index), align=4), lanes)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at an address, which may lie anywhere, to be brought into the second-level cache."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(2), I32(1)])


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


class _Int8Tile:
    """out[i, 0:16] = row i of an int8 row tile times a Q40 or Q80 weight tile, for i < m.

    Arguments: x, its scales and starts, weights, their scales, a count of blocks >= 1, out, out's row stride in bytes.
    `sub` numbers the registers that a weight tile's 16 rows take.
    """

    def __init__(self, target: Isa, fmt: str) -> None:
        self.target = target
        self.lanes = target.lanes
        self.dot = DOTS[target.name](fmt, target.lanes)
        self.block_bytes = 256 if fmt == "q40" else 512
        self.floats = ir.VectorType(F32, target.lanes)

    def _prefetch(self, builder, weights, b, sub):
        """The first pass over a weight tile fetches what comes after it."""
        ahead = builder.add(weights, builder.add(builder.mul(b, I64(self.block_bytes)), I64(_PREFETCH)))
        for line in range(0, self.block_bytes if sub == 0 else 0, 64):
            prefetch(builder, builder.add(ahead, I64(line)))

    def _operands(self, builder, weights, b, sub, steps):
        """The weight operands of some steps of block b, each with the activations' word it is multiplied with."""
        block = builder.add(weights, builder.mul(b, I64(self.block_bytes)))

        def load(group):
            place = at(builder, block, self.dot.words, 64 * group + 4 * self.lanes * sub)
            return builder.load(place, align=4 * self.lanes)

        return [pair for step in steps for pair in self.dot.operands(builder, step, load)]

    def _weight_scale(self, builder, weight_scales, b, sub):
        place = builder.add(weight_scales, builder.mul(b, I64(2 * TILE)))
        half = at(builder, place, ir.VectorType(I16, self.lanes), 2 * self.lanes * sub)
        return half_to_floats(builder, builder.load(half, align=2 * self.lanes), self.target)

    def _splat(self, builder, address, ty):
        return splat(builder, builder.load(at(builder, address, ty), align=4), self.lanes)

    def _add(self, builder, state, operands, x):
        for weight, w in operands:
            state = self.dot.add(builder, state, weight, _word(builder, x, w, 8, I32, self.lanes, self.target))
        return state

    def _scaled(self, builder, number, scale, weight_scale, total):
        """total + number * the product of the scales."""
        scale = builder.fmul(self._splat(builder, scale, F32), weight_scale)
        args = [builder.sitofp(number, self.floats), scale, total]
        return call(builder, f"llvm.fmuladd.v{self.lanes}f32", self.floats, args)

    def unrolled(self, builder: ir.IRBuilder, m: int, args: list[ir.Value]) -> None:
        """All rows' sums in registers."""
        x, scales, starts, weights, weight_scales, blocks, out, out_stride = args
        for sub in range(TILE // self.lanes):

            def body(b, totals, sub=sub):
                self._prefetch(builder, weights, b, sub)
                operands = self._operands(builder, weights, b, sub, range(self.dot.steps))
                weight_scale = self._weight_scale(builder, weight_scales, b, sub)
                first = builder.mul(b, I64(m))
                result = []
                for i, total in enumerate(totals):
                    row = builder.add(first, I64(i))
                    word = builder.shl(row, I64(2))
                    start = self._splat(builder, builder.add(starts, word), I32)
                    state = self.dot.begin(builder, start)
                    state = self._add(builder, state, operands, builder.add(x, builder.shl(row, I64(5))))
                    number = self.dot.finish(builder, state, start)
                    result.append(self._scaled(builder, number, builder.add(scales, word), weight_scale, total))
                return result

            totals = loop(builder, blocks, [filled(self.floats, 0.0)] * m, body)
            for i, total in enumerate(totals):
                row = builder.add(out, builder.mul(out_stride, I64(i)))
                builder.store(total, at(builder, row, self.floats, 4 * self.lanes * sub), align=4)
        builder.ret_void()

    def looped(self, builder: ir.IRBuilder, m: ir.Value, args: list[ir.Value]) -> None:
        """All rows' sums in memory, one row after the other: for few registers, which a block's weights fill, or a part
        of them; what a row has of the block by then is in memory, too. (Unrolled, LLVM mixes rows and spills.)"""
        x, scales, starts, weights, weight_scales, blocks, out, out_stride = args
        dot, count = self.dot, self.target.held // self.dot.registers
        phases = [range(first, first + count) for first in range(0, dot.steps, count)]
        sums = builder.alloca(self.floats, self.target.rows)
        states = [builder.alloca(ty, self.target.rows) for ty in dot.state] if len(phases) > 1 else []
        for sub in range(TILE // self.lanes):

            def block(b, _, sub=sub):
                self._prefetch(builder, weights, b, sub)
                weight_scale = self._weight_scale(builder, weight_scales, b, sub)
                first = builder.mul(b, m)
                for phase in phases:
                    operands = self._operands(builder, weights, b, sub, phase)

                    def row(i, _, phase=phase, operands=operands):
                        row = builder.add(first, i)
                        word = builder.shl(row, I64(2))
                        start = self._splat(builder, builder.add(starts, word), I32)
                        places = [builder.gep(state, [i]) for state in states]
                        state = dot.begin(builder, start) if phase is phases[0] else [builder.load(p) for p in places]
                        state = self._add(builder, state, operands, builder.add(x, builder.shl(row, I64(5))))
                        if phase is not phases[-1]:
                            for value, place in zip(state, places, strict=True):
                                builder.store(value, place)
                            return []
                        number = dot.finish(builder, state, start)
                        place = builder.gep(sums, [i])
                        total = builder.load(place)
                        total = self._scaled(builder, number, builder.add(scales, word), weight_scale, total)
                        builder.store(total, place)
                        return []

                    loop(builder, m, [], row)
                return []

            def write(i, _, sub=sub):
                row = builder.add(out, builder.mul(out_stride, i))
                total = builder.load(builder.gep(sums, [i]))
                builder.store(total, at(builder, row, self.floats, 4 * self.lanes * sub), align=4)
                return []

            for place in range(self.target.rows):  # a loop over m would become a call of memset
                builder.store(filled(self.floats, 0.0), builder.gep(sums, [I64(place)]))
            loop(builder, blocks, [], block)
            loop(builder, m, [], write)
        builder.ret_void()


def _float_rows(target: Isa, m: int) -> Emit:
    """out[i, 0:16] += sum over k of x[k, i] * w[k, 0:16], for i < m.

    Arguments: x, w, w's row stride in bytes, the count of k >= 1, out, out's row stride in bytes.
    """

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        x, weights, weight_stride, count, out, out_stride = args
        rows = [at(builder, builder.add(out, builder.mul(out_stride, I64(i))), V16F) for i in range(m)]

        def body(k, totals):
            here = builder.add(weights, builder.mul(k, weight_stride))
            weight = builder.load(at(builder, here, V16F), align=4)
            values = builder.add(x, builder.mul(k, I64(4 * m)))
            result = []
            for i, total in enumerate(totals):
                value = _word(builder, values, i, m, F32, 16, target)
                result.append(call(builder, "llvm.fmuladd.v16f32", V16F, [value, weight, total]))
            return result

        totals = loop(builder, count, [builder.load(row, align=4) for row in rows], body)
        for total, row in zip(totals, rows, strict=True):
            builder.store(total, row, align=4)
        builder.ret_void()

    return emit


def define(module: ir.Module, name: str, count: int, emit: Emit) -> ir.Function:
    """A private function of `count` int64 arguments, emitted once a module."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    emit(ir.IRBuilder(function.append_basic_block("entry")), list(function.args))
    return function


#: Writes, into its caller, the product of a row tile of m rows: (builder, m, the other arguments).
EmitRows = Callable[[ir.IRBuilder, ir.Value, list[ir.Value]], None]


def _by_rows(target: Isa, name: str, count: int, make: Callable[[int], Emit]) -> EmitRows:
    """A switch over m, 1 <= m <= target.rows, to functions for just that many rows."""

    def emit(builder, m, args):
        after = builder.append_basic_block("rows.end")
        switch = builder.switch(m, after)
        for rows in range(1, target.rows + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{rows}")):
                builder.call(define(builder.module, f"ddllm_vk.{name}.{rows}", count, make(rows)), args)
                builder.branch(after)
                switch.add_case(I64(rows), builder.block)
        builder.position_at_end(after)

    return emit


def emit_int8_tile(target: Isa, fmt: str) -> EmitRows:
    """See _Int8Tile."""
    tile, name = _Int8Tile(target, fmt), f"{fmt}_tile"
    if not target.held:
        return _by_rows(target, name, 8, lambda m: lambda builder, args: tile.unrolled(builder, m, args))

    def looped(builder, args):
        tile.looped(builder, args[0], args[1:])

    return lambda builder, m, args: builder.call(define(builder.module, f"ddllm_vk.{name}", 9, looped), [m, *args])


def emit_float_tile(target: Isa) -> EmitRows:
    """See _float_rows."""
    return _by_rows(target, "float_tile", 6, lambda m: _float_rows(target, m))


def _rows_intrinsic(emit: Callable):
    """The code generation of an intrinsic of m and int64 arguments that emit_int8_tile or emit_float_tile write."""

    def codegen(context, builder, signature, args):
        emit(builder, args[0], args[1:])
        return context.get_dummy_value()

    return codegen


@intrinsic
def q40_tile(typingctx, m, x, scales, starts, weights, weight_scales, blocks, out, out_stride):
    """See _Int8Tile."""
    return types.void(*[types.int64] * 9), _rows_intrinsic(emit_int8_tile(isa.ACTIVE, "q40"))


@intrinsic
def q80_tile(typingctx, m, x, scales, starts, weights, weight_scales, blocks, out, out_stride):
    """See _Int8Tile."""
    return types.void(*[types.int64] * 9), _rows_intrinsic(emit_int8_tile(isa.ACTIVE, "q80"))


@intrinsic
def float_tile(typingctx, m, x, weights, weight_stride, count, out, out_stride):
    """See emit_float_tile."""
    return types.void(*[types.int64] * 7), _rows_intrinsic(emit_float_tile(isa.ACTIVE))


def emit_block_to_floats(target: Isa, fmt: str) -> Emit:
    """A block of a Q40 or Q80 weight tile and its 16 scales to float32 [32][16]."""

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        block, scales, out = args
        words = ir.VectorType(I32, 16)
        scale = half_to_floats(builder, builder.load(at(builder, scales, ir.VectorType(I16, 16)), align=2), target)
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


def _inline(emit: Emit):
    def codegen(context, builder, signature, args):
        emit(builder, args)
        return context.get_dummy_value()

    return codegen


def single(name: str, count: int, emit: Emit):
    def codegen(context, builder, signature, args):
        builder.call(define(builder.module, f"ddllm_vk.{name}", count, emit), args)
        return context.get_dummy_value()

    return codegen


@intrinsic
def q40_block_to_floats(typingctx, block, scales, out):
    """See emit_block_to_floats."""
    return types.void(*[types.int64] * 3), single("q40_block_to_floats", 3, emit_block_to_floats(isa.ACTIVE, "q40"))


@intrinsic
def q80_block_to_floats(typingctx, block, scales, out):
    """See emit_block_to_floats."""
    return types.void(*[types.int64] * 3), single("q80_block_to_floats", 3, emit_block_to_floats(isa.ACTIVE, "q80"))


def emit_row_block(fmt: str) -> Emit:
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
            parts = [lanes_of(builder, values, range(first, first + 16)) for first in (0, 16)]
            zero = 128
        wide = ir.VectorType(I32, 16)
        factor = splat(builder, scale, 16)
        for half, part in enumerate(parts):
            number = builder.sitofp(builder.sub(builder.zext(part, wide), filled(wide, zero)), V16F)
            builder.store(builder.fmul(number, factor), at(builder, out, V16F, 64 * half), align=4)

    return emit


@intrinsic
def q40_row_block(typingctx, block, scale, out):
    """See emit_row_block."""
    return types.void(types.int64, types.float32, types.int64), _inline(emit_row_block("q40"))


@intrinsic
def q80_row_block(typingctx, block, scale, out):
    """See emit_row_block."""
    return types.void(types.int64, types.float32, types.int64), _inline(emit_row_block("q80"))


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of sixteen vectors of sixteen: four rounds of interleaving row i with row i + 8."""
    masks = [
        ir.Constant(ir.VectorType(I32, 16), [lane // 2 + half + 16 * (lane % 2) for lane in range(16)])
        for half in (0, 8)
    ]
    for _ in range(4):
        rows = [builder.shuffle_vector(rows[i], rows[i + 8], mask) for i in range(8) for mask in masks]
    return rows


def _rows(builder: ir.IRBuilder, source: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Sixteen rows of sixteen float32, `stride` bytes apart."""
    return [
        builder.load(at(builder, builder.add(source, builder.mul(stride, I64(i))), V16F), align=4) for i in range(16)
    ]


def emit_transpose(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
    """out[j, i] = source[i, j] for 16 x 16 float32."""
    source, stride, out = args
    for j, row in enumerate(transposed(builder, _rows(builder, source, stride))):
        builder.store(row, at(builder, out, V16F, 64 * j), align=4)
    builder.ret_void()


@intrinsic
def transpose_16(typingctx, source, stride, out):
    """See emit_transpose. `stride` is the bytes from one source row to the next; out rows are contiguous."""
    return types.void(*[types.int64] * 3), single("transpose_16", 3, emit_transpose)


def emit_q80_transposed(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
    """Two 16 x 16 float32 blocks [16 columns][16 tokens] to one block of a Q80 weight tile whose rows are the columns.

    scale = amax / 127, rounded up to 11 bits so that float16 holds it exactly; a value is rounded to even.
    """
    first, second, out, scales = args
    values = [row for source in (first, second) for row in transposed(builder, _rows(builder, source, I64(64)))]
    words = ir.VectorType(I32, 16)
    largest = filled(V16F, 0.0)
    for value in values:
        size = call(builder, "llvm.fabs.v16f32", V16F, [value])
        largest = builder.select(builder.fcmp_ordered(">", size, largest), size, largest)
    bits = builder.bitcast(builder.fmul(largest, filled(V16F, 1 / 127)), words)
    bits = builder.and_(builder.add(bits, filled(words, 0x1FFF)), filled(words, -0x2000))
    least = filled(words, 113 << 23)  # 2^-14, float16's smallest normal number
    bits = builder.select(builder.icmp_signed("<", bits, least), least, bits)
    half = builder.lshr(builder.sub(bits, filled(words, 112 << 23)), filled(words, 13))
    shorts = ir.VectorType(I16, 16)
    builder.store(builder.trunc(half, shorts), at(builder, scales, shorts), align=2)
    inverse = builder.fdiv(filled(V16F, 1.0), builder.bitcast(bits, V16F))
    # Adding 1.5 * 2^23 leaves the rounded value in the low bits; 128 more is the format's offset.
    shift = filled(V16F, 12582912.0 + 128)
    for g in range(8):
        word = None
        for c in range(4):
            shifted = call(builder, "llvm.fmuladd.v16f32", V16F, [values[4 * g + c], inverse, shift])
            byte = builder.and_(builder.bitcast(shifted, words), filled(words, 255))
            byte = builder.shl(byte, filled(words, 8 * c)) if c else byte
            word = byte if word is None else builder.or_(word, byte)
        builder.store(word, at(builder, out, words, 64 * g), align=4)
    builder.ret_void()


@intrinsic
def q80_transposed(typingctx, first, second, out, scales):
    """See emit_q80_transposed. Four addresses."""
    return types.void(*[types.int64] * 4), single("q80_transposed", 4, emit_q80_transposed)
