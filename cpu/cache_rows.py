"""Rows of a KV cache as they are stored: float32, float16 or Q80 (quants.py), and the code to write and read them.

A row is one slot's key or value of one KV head, padded with zeros to whole blocks of 32 values. A cache holds its
slots one after the other; attention packs them anew for each of its blocks of queries, which costs it 2 %.
"""

# llvmlite comes without type information.
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ddllm_vk.cpu import isa
from ddllm_vk.cpu.emit import loop, reduced, single
from ddllm_vk.cpu.intrinsics import (
    F32,
    I8,
    I16,
    I32,
    I64,
    V16F,
    address,
    at,
    filled,
    half_to_floats,
    load_f32,
    splat,
    store_f32,
    take,
)  # fmt: skip
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.matmul import check
from ddllm_vk.cpu.memory import aligned_empty
from ddllm_vk.cpu.threads import ThreadPool
from ddllm_vk.quants import BLOCK, BLOCK_BYTES, dequantize

#: In the order of the kernels' indices.
FORMATS = ("f32", "f16", "q80")
#: A capacity is a multiple of this many slots: attention reads whole tiles of them.
KEYS = 128

_WORDS = ir.VectorType(I32, 16)
_HALVES = ir.VectorType(I16, 16)
_BYTES = ir.VectorType(I8, 16)


@dataclass(eq=False)
class CacheRows:
    """K or V of one layer. data: uint8 [kv_heads, capacity, bytes of a row], in `format`."""

    format: str
    head_dim: int
    data: np.ndarray

    @property
    def kv_heads(self) -> int:
        return self.data.shape[0]

    @property
    def capacity(self) -> int:
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def resized(self, capacity: int, first: int, count: int) -> "CacheRows":
        """A cache of `capacity` whose slots 0..count-1 are slots first..first+count-1 of this one, which is used for it
        where the capacity is the same."""
        if capacity == self.capacity:
            self.data[:, :count] = self.data[:, first : first + count]  # numpy minds the overlap
            return self
        out = empty_cache(self.format, self.kv_heads, capacity, self.head_dim)
        out.data[:, :count] = self.data[:, first : first + count]
        return out

    def float32(self) -> np.ndarray:
        """A copy: float32 [kv_heads, capacity, head_dim]."""
        if self.format == "q80":
            values = dequantize("q80", self.data.reshape(*self.data.shape[:2], -1, BLOCK_BYTES["q80"]))
        else:
            values = self.data.view(np.float32 if self.format == "f32" else np.float16).astype(np.float32)
        return values[..., : self.head_dim]


def empty_cache(fmt: str, kv_heads: int, capacity: int, head_dim: int) -> CacheRows:
    """Uninitialised CacheRows."""
    assert fmt in FORMATS, fmt
    assert capacity % KEYS == 0, f"{capacity} slots: not a multiple of {KEYS}"
    row = -(-head_dim // BLOCK) * BLOCK_BYTES[fmt]
    return CacheRows(fmt, head_dim, aligned_empty((kv_heads, capacity, row), np.uint8))


def load_half(builder: ir.IRBuilder, fmt: str, row: ir.Value, block: ir.Value, half: int) -> ir.Value:
    """Values 16 * half.. of block `block` of a stored row, as V16F."""
    here = builder.add(row, builder.mul(block, I64(BLOCK_BYTES[fmt])))
    if fmt == "f32":
        return builder.load(at(builder, here, V16F, 64 * half), align=4)
    if fmt == "f16":
        return half_to_floats(builder, builder.load(at(builder, here, _HALVES, 32 * half), align=2))
    scale = half_to_floats(builder, splat(builder, builder.load(at(builder, here, I16), align=2), 16))
    values = builder.load(at(builder, here, _BYTES, 2 + 16 * half), align=1)
    return builder.fmul(builder.sitofp(builder.sext(values, _WORDS), V16F), scale)


def _to_halves(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """V16F to <16 x i16> of float16, rounded to nearest even."""
    if isa.ACTIVE.hardware_half:
        return builder.bitcast(builder.fptrunc(x, ir.VectorType(ir.HalfType(), 16)), _HALVES)

    def constant(value):
        return filled(_WORDS, value)

    bits = builder.bitcast(x, _WORDS)
    size = builder.and_(bits, constant(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, constant(13)), constant(1))
    normal = builder.add(builder.add(size, constant(0xFFF)), odd)
    normal = builder.lshr(builder.sub(normal, constant(0x38000000)), constant(13))
    # below 2^-14 the spacing is that of the floats from 0.5 to 1
    small = builder.fadd(builder.bitcast(size, V16F), filled(V16F, 0.5))
    small = builder.sub(builder.bitcast(small, _WORDS), constant(0x3F000000))
    half = builder.select(builder.icmp_unsigned("<", size, constant(0x38800000)), small, normal)
    half = builder.select(builder.icmp_unsigned(">=", size, constant(0x477FF000)), constant(0x7C00), half)
    half = builder.select(builder.icmp_unsigned(">", size, constant(0x7F800000)), constant(0x7E00), half)
    sign = builder.and_(builder.lshr(bits, constant(16)), constant(0x8000))
    return builder.trunc(builder.or_(half, sign), _HALVES)


def _store_q80(builder: ir.IRBuilder, x: list[ir.Value], out: ir.Value) -> None:
    """Two V16F as one block, as quants.quantize_q80 does."""

    def magnitude(v):
        return builder.and_(builder.bitcast(v, _WORDS), filled(_WORDS, 0x7FFFFFFF))

    def larger(a, b):  # compared as integers: a NaN is larger than everything and stays
        return builder.select(builder.icmp_signed(">", b, a), b, a)

    largest = builder.bitcast(reduced(builder, larger(*map(magnitude, x)), larger), F32)
    scale = builder.fdiv(largest, F32(127.0))
    usable = builder.fcmp_ordered(">=", scale, ir.Constant(F32, 1e-37))  # else the inverse may be infinite
    inverse = builder.select(usable, builder.fdiv(F32(1.0), scale), F32(0.0))
    halves = _to_halves(builder, splat(builder, scale, 16))
    builder.store(builder.extract_element(halves, I32(0)), at(builder, out, I16), align=2)
    for half, values in enumerate(x):
        y = builder.fmul(values, splat(builder, inverse, 16))
        sign = builder.and_(builder.bitcast(y, _WORDS), filled(_WORDS, -0x80000000))
        away = builder.bitcast(builder.or_(sign, filled(_WORDS, 0x3F000000)), V16F)
        q = builder.trunc(builder.fptosi(builder.fadd(y, away), _WORDS), _BYTES)
        builder.store(q, at(builder, out, _BYTES, 2 + 16 * half), align=1)


def _store_row(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
    """blocks * 32 float32 at `source` to a stored row at `out`, in the format of that index."""
    fmt, source, blocks, out = args
    after = builder.append_basic_block("stored")
    switch = builder.switch(fmt, after)
    for index, known in enumerate(FORMATS):
        start = builder.append_basic_block(known)
        switch.add_case(I64(index), start)
        builder.position_at_end(start)

        def block(b, _, known=known):
            x = [load_half(builder, "f32", source, b, half) for half in (0, 1)]
            here = builder.add(out, builder.mul(b, I64(BLOCK_BYTES[known])))
            if known == "q80":
                _store_q80(builder, x, here)
                return []
            for half, values in enumerate(x):
                stored = values if known == "f32" else _to_halves(builder, values)
                place = at(builder, here, stored.type, half * BLOCK_BYTES[known] // 2)
                builder.store(stored, place, align=2)
            return []

        loop(builder, blocks, [], block)
        builder.branch(after)
    builder.position_at_end(after)
    builder.ret_void()


@intrinsic
def store_row(typingctx, fmt, source, blocks, out):
    """See _store_row."""
    emit: Callable = _store_row
    return types.void(*[types.int64] * 4), single("store_row", 4, emit)


@kernel
def _store_rows(x, fmt, data, slot, counter, jobs, grain):
    """Job: a row."""
    heads, size = x.shape[1:]
    blocks = (size + 31) // 32
    padded = np.zeros(blocks * 32, np.float32)
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for row in range(first, min(first + grain, jobs)):
            for head in range(heads):
                source = address(x) + (row * heads + head) * size * 4
                if size % 32:
                    for d in range(size):
                        store_f32(address(padded), d, load_f32(source, d))
                    source = address(padded)
                store_row(fmt, source, blocks, address(data) + (head * data.shape[1] + slot + row) * data.shape[2])


def store_rows(pool: ThreadPool, x: np.ndarray, cache: CacheRows, slot: int) -> None:
    """Row r of x, float32 [M, kv_heads, head_dim], into slot + r, rounded to the cache's format."""
    rows = x.shape[0]
    check(x, "x", (rows, cache.kv_heads, cache.head_dim))
    assert 0 <= slot <= cache.capacity - rows, f"slots {slot}..{slot + rows} of {cache.capacity}"
    grain = max(1, 65536 // max(x[0].size, 1)) if rows else 1  # a grain is long enough to be worth waking a thread for
    pool.run(_store_rows, rows, x, FORMATS.index(cache.format), cache.data, slot, grain=grain)
