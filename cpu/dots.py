"""Exact int32 dot products of one block, 32 weights times 32 int8 activations, with each instruction set's own means.

A register of weights holds four weights of each of its lanes' rows; an activation operand holds four activations, the
same in every lane. Activations lie in -127..127. Q40 weights are used as they are stored, 0..15, and so are Q80 ones
(0..255) where a multiplier takes them unsigned: starting from -8 (or -128) times the sum of the activations makes up
for it.
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Callable

from llvmlite import ir

from ddllm_vk.cpu.intrinsics import I8, I16, I32, call, filled, lanes_of

#: The register of weights number g of a block, <lanes x i32>; a Q40 block has four, a Q80 block eight.
Load = Callable[[int], ir.Value]


class Dot:
    """One instruction set's way with one format: fold each step's operands into a row's state, then finish it.

    Subclasses say what an operand is, and with which word of the activations (four of them) it is multiplied.
    """

    def __init__(self, fmt: str, lanes: int) -> None:
        self.fmt = fmt
        self.lanes = lanes
        self.words = ir.VectorType(I32, lanes)
        self.shorts = ir.VectorType(I16, 2 * lanes)
        self.bytes = ir.VectorType(I8, 4 * lanes)
        self.steps = 4 if fmt == "q40" else 8
        self.registers = 2 if fmt == "q40" else 1  # that the operands of a step take
        self.state = [self.words]  # types of a row's state

    def operands(self, builder: ir.IRBuilder, step: int, load: Load) -> list[tuple[ir.Value, int]]:
        """What step number `step` of a block multiplies: pairs of a weight operand and a word of the activations."""
        if self.fmt == "q40":
            low, high = self.nibbles(builder, load(step))
            return [(low, step), (high, 4 + step)]
        return [(load(step), step)]

    def nibbles(self, builder: ir.IRBuilder, weights: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The low and the high half of every byte, as bytes."""
        weights = builder.bitcast(weights, self.bytes)
        return builder.and_(weights, filled(self.bytes, 15)), builder.lshr(weights, filled(self.bytes, 4))

    def begin(self, builder: ir.IRBuilder, start: ir.Value) -> list[ir.Value]:
        """A row's state; start: <lanes x i32>, -8 times the sum of the block's activations."""
        raise NotImplementedError

    def add(self, builder: ir.IRBuilder, state: list[ir.Value], weight: ir.Value, x: ir.Value) -> list[ir.Value]:
        """The state with one operand's products; x: <lanes x i32>, four activations in every lane."""
        raise NotImplementedError

    def finish(self, builder: ir.IRBuilder, state: list[ir.Value], start: ir.Value) -> ir.Value:
        """<lanes x i32>, the block's dot products; `start` as in begin."""
        return state[0]


class Vnni(Dot):
    """vpdpbusd: four products of unsigned and signed bytes added to int32, in one instruction."""

    def begin(self, builder, start):
        return [builder.shl(start, filled(self.words, 4)) if self.fmt == "q80" else start]

    def add(self, builder, state, weight, x):
        weight = builder.bitcast(weight, self.words)
        return [call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.words, [*state, weight, x])]


class Maddubs(Dot):
    """vpmaddubsw: sums of two products of unsigned and signed bytes, as int16, which saturate.

    Half bytes do not: all sixteen products of an int16 lane, over the whole block, are at most 16 * 15 * 127 = 30480.
    So a Q80 block is computed as two of Q40's, from the low and from the high halves of its unsigned bytes.
    """

    def __init__(self, fmt, lanes):
        super().__init__(fmt, lanes)
        self.registers = 2
        self.state = [self.shorts] if fmt == "q40" else [self.shorts] * 2

    def operands(self, builder, step, load):
        if self.fmt == "q40":
            return super().operands(builder, step, load)
        return [(self.nibbles(builder, load(step)), step)]

    def begin(self, builder, start):
        return [None, None] if self.fmt == "q80" else [None]

    def add(self, builder, state, weight, x):
        x = builder.bitcast(x, self.bytes)
        halves = weight if self.fmt == "q80" else [weight]
        return [self._accumulate(builder, total, half, x) for total, half in zip(state, halves, strict=True)]

    def _accumulate(self, builder, total, weight, x):
        name = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}[self.lanes]
        pairs = call(builder, name, self.shorts, [weight, x])
        return pairs if total is None else builder.add(total, pairs)

    def finish(self, builder, state, start):
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[self.lanes]
        low, *high = [call(builder, name, self.words, [total, filled(self.shorts, 1)]) for total in state]
        for total in high:
            start = builder.shl(builder.add(start, total), filled(self.words, 4))
        return builder.add(low, start)


class _Signed(Dot):
    """Multipliers of signed bytes: Q80's weights get their sign back, and only Q40 needs `start`."""

    def operands(self, builder, step, load):
        if self.fmt == "q40":
            return super().operands(builder, step, load)
        return [(builder.xor(load(step), filled(self.words, -0x7F7F7F80)), step)]

    def begin(self, builder, start):
        return [start if self.fmt == "q40" else filled(self.words, 0)]


class Sdot(_Signed):
    """sdot: four products of signed bytes added to int32, in one instruction."""

    def add(self, builder, state, weight, x):
        args = [*state, builder.bitcast(weight, self.bytes), builder.bitcast(x, self.bytes)]
        return [call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", self.words, args)]


class Smull(_Signed):
    """smull and smlal: eight products of signed bytes, as int16, so a register of weights takes two of them.

    An int16 lane holds eight products of a Q40 block (8 * 15 * 127 = 15240, two lanes still fit together), or two of a
    Q80 block (2 * 128 * 127 = 32512), which is why Q80 takes its registers by twos and adds them up in int32.
    """

    def __init__(self, fmt, lanes):
        super().__init__(fmt, lanes)
        self.steps, self.registers = 4, 2

    def operands(self, builder, step, load):
        if self.fmt == "q40":
            return super().operands(builder, step, load)
        return super().operands(builder, 2 * step, load) + super().operands(builder, 2 * step + 1, load)

    def begin(self, builder, start):
        return [filled(self.words, 0)] * 2 + [None] * 2 if self.fmt == "q80" else [None] * 2

    def _products(self, builder, weight, x, half):
        wide = ir.VectorType(I16, 8)
        a, b = (lanes_of(builder, builder.bitcast(v, self.bytes), range(8 * half, 8 * half + 8)) for v in (weight, x))
        return builder.mul(builder.sext(a, wide), builder.sext(b, wide))

    def add(self, builder, state, weight, x):
        *sums, low, high = state
        products = [self._products(builder, weight, x, half) for half in (0, 1)]
        if low is not None:
            products = [builder.add(total, part) for total, part in zip((low, high), products, strict=True)]
        if not sums:
            return products
        if low is None:
            return [*sums, *products]
        return [*(self._add_pairs(builder, s, p) for s, p in zip(sums, products, strict=True)), None, None]

    def _add_pairs(self, builder, total, shorts):
        pairs = call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", self.words, [shorts])
        return builder.add(total, pairs)

    def finish(self, builder, state, start):
        if self.fmt == "q80":
            return call(builder, "llvm.aarch64.neon.addp.v4i32", self.words, state[:2])
        pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", self.shorts, state)
        return self._add_pairs(builder, start, pairs)


class Widened(_Signed):
    """No instruction of its own: bytes widened to int16, multiplied, and added up by fours in int32."""

    def add(self, builder, state, weight, x):
        wide = ir.VectorType(I16, 4 * self.lanes)
        weight, x = (builder.sext(builder.bitcast(v, self.bytes), wide) for v in (weight, x))
        products = builder.mul(weight, x)
        for _ in range(2):
            count = products.type.count
            even, odd = (lanes_of(builder, products, range(first, count, 2)) for first in (0, 1))
            if even.type.element == I16:
                longs = ir.VectorType(I32, count // 2)
                even, odd = builder.sext(even, longs), builder.sext(odd, longs)
            products = builder.add(even, odd)
        return [builder.add(*state, products)]


#: How each instruction set of isa.ISAS multiplies.
DOTS: dict[str, type[Dot]] = {
    "avx512vnni": Vnni,
    "avxvnni": Vnni,
    "avx512": Maddubs,
    "avx2": Maddubs,
    "neon-dotprod": Sdot,
    "neon": Smull,
    "generic": Widened,
}
