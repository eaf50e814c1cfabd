"""The micro-kernels of instruction sets that this machine may not have: ARM's under an emulator, x86's as assembly."""

import re

import numpy as np
import pytest
from llvmlite import ir

from ddllm_vk.cpu import emit, isa
from ddllm_vk.cpu.intrinsics import I16, V16F, at, half_to_floats

pytest.importorskip("unicorn", reason="the emulator, of the dev extra")
from aarch64 import TRIPLE, Emulated, compile_for

PROCESSORS = {"neon-dotprod": "cortex-a76", "neon": "cortex-a72", "generic": "cortex-a72"}
FORMATS = ("q40", "q80")
rng = np.random.default_rng(0)


def functions(target: isa.Isa) -> dict:
    """Everything emit.py writes with instructions that differ between instruction sets."""

    def halves(builder, args):
        bits = builder.load(at(builder, args[0], ir.VectorType(I16, 16)), align=2)
        builder.store(half_to_floats(builder, bits, target), at(builder, args[1], V16F), align=4)

    def rows(tile):
        return lambda builder, args: tile(builder, args[0], args[1:])

    return {
        "q40_tile": (9, rows(emit.emit_int8_tile(target, "q40"))),
        "q80_tile": (9, rows(emit.emit_int8_tile(target, "q80"))),
        "float_tile": (7, rows(emit.emit_float_tile(target))),
        "q40_block_to_floats": (3, emit.emit_block_to_floats(target, "q40")),
        "q80_block_to_floats": (3, emit.emit_block_to_floats(target, "q80")),
        "transpose_16": (3, emit.emit_transpose),
        "q80_transposed": (4, emit.emit_q80_transposed),
        "halves": (2, halves),
    }


@pytest.fixture(scope="module", params=PROCESSORS)
def arm(request: pytest.FixtureRequest) -> tuple[isa.Isa, Emulated]:
    target = isa.ISAS[request.param]
    return target, Emulated(PROCESSORS[request.param], functions(target))


def packed_weights(fmt: str, blocks: int, extreme: bool) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes of a weight tile and its integers, int64 [blocks, 32, 16 rows]; layout: the docstring of emit.py."""
    values = rng.choice([-8, 7] if extreme else np.arange(-8, 8), (blocks, 32, 16))
    if fmt == "q80":
        values = rng.choice([-128, 127] if extreme else np.arange(-128, 128), (blocks, 32, 16))
    groups = values.reshape(blocks, 8, 4, 16).swapaxes(2, 3)  # [blocks][8][16 rows][4]
    if fmt == "q80":
        return (groups + 128).astype(np.uint8), values
    return ((groups[:, :4] + 8) | (groups[:, 4:] + 8) << 4).astype(np.uint8), values


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("fmt", FORMATS)
def test_int8_tiles_are_exact(arm, fmt, blocks, extreme):
    """Every number of rows. With scales of one the results are integers; with others, of float32's accuracy."""
    target, run = arm
    weights, w = packed_weights(fmt, blocks, extreme)
    for m in range(1, target.rows + 1):
        x = rng.choice([-127, 127] if extreme else np.arange(-127, 128), (blocks, m, 32)).astype(np.int8)
        starts = (-8 * x.sum(axis=-1, dtype=np.int64)).astype(np.int32)
        dots = np.einsum("bmk,bkn->bmn", x.astype(np.int64), w)
        scales, weight_scales = np.ones((blocks, m), np.float32), np.ones((blocks, 16), np.float16)
        out = np.full((m, 19), np.nan, np.float32)
        tile = f"{fmt}_tile"
        run(tile, m, x, scales, starts, weights, weight_scales, blocks, out, out.strides[0])
        assert np.array_equal(out[:, :16], dots.sum(axis=0)), m
        assert np.isnan(out[:, 16:]).all()

        scales = rng.uniform(1e-3, 1, (blocks, m)).astype(np.float32)
        weight_scales = rng.choice([6e-8, 1e-5, 0.01, -2, 300], (blocks, 16)).astype(np.float16)
        run(tile, m, x, scales, starts, weights, weight_scales, blocks, out, out.strides[0])
        products = dots * scales[:, :, None].astype(np.float64) * weight_scales[:, None, :].astype(np.float64)
        assert (np.abs(out[:, :16] - products.sum(axis=0)) <= 1e-6 * np.abs(products).sum(axis=0)).all(), m


@pytest.mark.parametrize("count", [1, 5, 33])
def test_float_tiles(arm, count):
    target, run = arm
    for m in range(1, target.rows + 1):
        x, w = rng.standard_normal((count, m), np.float32), rng.standard_normal((count, 20), np.float32)
        out = rng.standard_normal((m, 17), np.float32)
        expected = out.astype(np.float64)
        expected[:, :16] += np.einsum("km,kn->mn", x.astype(np.float64), w[:, :16].astype(np.float64))
        run("float_tile", m, x, w, w.strides[0], count, out, out.strides[0])
        assert np.abs(out - expected).max() < 1e-5
        assert np.array_equal(out[:, 16], expected[:, 16].astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_to_floats(arm, fmt):
    _, run = arm
    weights, w = packed_weights(fmt, 1, False)
    scales = rng.choice([6e-8, 1e-5, 0.01, -2, 300], 16).astype(np.float16)
    out = np.empty((32, 16), np.float32)
    run(f"{fmt}_block_to_floats", weights, scales, out)
    assert np.array_equal(out, w[0].astype(np.float32) * scales.astype(np.float32))


def test_transpose(arm):
    _, run = arm
    source, out = rng.standard_normal((16, 21), np.float32), np.empty((16, 16), np.float32)
    run("transpose_16", source, source.strides[0], out)
    assert np.array_equal(out, source[:, :16].T)


def test_transposition_to_q80(arm):
    """One block of a weight tile whose rows are the columns of 32 x 16 values, to half a step of the scale."""
    _, run = arm
    values = rng.standard_normal((2, 16, 16), np.float32) * rng.choice([1e-3, 1, 100], 16).astype(np.float32)[:, None]
    block, scales = np.empty((8, 16, 4), np.uint8), np.empty(16, np.float16)
    run("q80_transposed", *values, block, scales)
    stored = (block.astype(np.int64) - 128).swapaxes(1, 2).reshape(32, 16) * scales.astype(np.float64)
    expected = values.swapaxes(1, 2).reshape(32, 16)
    assert (np.abs(stored - expected) <= 0.5001 * scales.astype(np.float64)).all()
    largest = np.abs(expected).max(axis=0)
    assert (scales >= largest / 127).all()
    assert (scales <= np.maximum(largest / 127 * (1 + 2**-10), 2**-14)).all()  # float16's smallest normal number


def test_float16(arm):
    """Every finite number and the infinities exactly; NaN stays NaN."""
    _, run = arm
    bits = np.arange(0, 2**16, 61).astype(np.uint16)
    bits = np.concatenate([bits, np.array([0x7C00, 0xFC00, 0x7E00, 1, 0x8001, 0x3FF], np.uint16)])
    bits.resize(-(-bits.size // 16), 16)
    for row in bits:
        out = np.empty(16, np.float32)
        run("halves", row, out)
        assert np.array_equal(out, row.view(np.float16).astype(np.float32), equal_nan=True)


def test_arm_instructions():
    """What makes each fast: dot products and products with one lane, float16 and widening multiplications."""
    fast = Emulated("cortex-a76", functions(isa.ISAS["neon-dotprod"])).assembly
    assert re.search(r"\bsdot\tv\d+\.4s, v\d+\.16b, v\d+\.4b\[\d\]", fast)
    plain = Emulated("cortex-a72", functions(isa.ISAS["neon"])).assembly
    assert "sdot" not in plain
    assert re.search(r"\bsmlal2\tv\d+\.8h, v\d+\.16b, v\d+\.16b", plain)
    for assembly in (fast, plain):
        assert re.search(r"\bfcvtl\tv\d+\.4s, v\d+\.4h", assembly)
        assert re.search(r"\bfmla\tv\d+\.4s, v\d+\.4s, v\d+\.s\[\d\]", assembly)


@pytest.mark.parametrize(
    ("name", "cpu", "instruction", "registers"),
    [
        ("avx512vnni", "cascadelake", r"\bvpdpbusd\t\S+\{1to16\}, %zmm\d+", "zmm"),
        ("avxvnni", "alderlake", r"\{vex\}\s+vpdpbusd\s+%ymm\d+", "ymm"),
        ("avx512", "skylake-avx512", r"\bvpmaddubsw\t%zmm\d+", "zmm"),
        ("avx2", "haswell", r"\bvpmaddubsw\t%ymm\d+", "ymm"),
        ("generic", "x86-64", r"\bpmullw\t", "xmm"),
    ],
)
def test_x86_instructions(name, cpu, instruction, registers):
    """Each compiles for the plainest processor that has it, to the instructions and registers it is for."""
    assembly, _ = compile_for("x86_64-unknown-linux-gnu", cpu, "", functions(isa.ISAS[name]))
    assert re.search(instruction, assembly)
    used = {size for size in ("xmm", "ymm", "zmm") if f"%{size}" in assembly}
    assert max(used) == registers
    if name in ("avxvnni", "avx2"):  # no AVX-512 encodings
        assert not re.search(r"%[xyz]mm(1[6-9]|2\d|3[01])|\{1to|%k[0-7]", assembly)


@pytest.mark.parametrize(
    ("cpu", "stated", "expected"),
    [
        # what Linux reports of a Raspberry Pi 5 and 4, as LLVM understands it
        ("cortex-a76", "+aes,+crc,+fp-armv8,+lse,+neon,-rand,+sha2,-sve", "neon-dotprod"),
        ("cortex-a72", "-aes,+crc,+fp-armv8,+neon,-rand,-sha2,-sve", "neon"),
        ("cortex-a76", "+neon,-dotprod", "neon"),
        ("generic", "-aes,-rand,-sha2,-sve", "neon"),
        ("generic", "+dotprod", "neon-dotprod"),
    ],
)
def test_what_is_chosen_on_arm(cpu, stated, expected):
    compile_for(TRIPLE, cpu, stated, {})
    assert isa.choose(None, isa.features_of(TRIPLE, cpu, stated)).name == expected
