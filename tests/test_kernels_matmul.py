"""Packed weights, quantised activations, linear layers and experts, against float64 arithmetic on the same numbers."""

import numpy as np
import pytest

from ddllm_vk import quants
from ddllm_vk.cpu import weights
from ddllm_vk.cpu.kernels import (
    DenseWeight,
    PackedQ40,
    PackedQ80,
    ThreadPool,
    empty_quantized,
    experts,
    linear,
    pack,
    quantize_rows,
    unpack,
)
from ddllm_vk.cpu.memory import address_of, mapped_empty
from ddllm_vk.cpu.weights import pack_from
from ddllm_vk.errors import InputError

FORMATS = ("q40", "q80", "f32", "f16", "bf16")
SIZES = [(1, 32, 16), (5, 64, 37), (29, 96, 160), (3, 256, 8), (64, 2112, 48)]


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(3)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def packed(fmt: str, values: np.ndarray, pool: ThreadPool):
    """The packed weight and the float64 values it stands for."""
    raw = quants.quantize(fmt, values)
    return pack(fmt, raw, values.shape, pool), quants.dequantize(fmt, raw).astype(np.float64)


def dequantised_activations(x: np.ndarray) -> np.ndarray:
    """float64 values of x as Q80 with float32 scales: quants' integers, whose scales are rounded, with exact scales."""
    q = quants.quantize_q80(x)[..., 2:].view(np.int8).astype(np.float64)
    scale = np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(axis=-1, keepdims=True) / np.float32(127)
    return (q * scale.astype(np.float64)).reshape(x.shape)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (37, 64), (1, 96), (3, 21, 32), (2, 16, 64)])
def test_packing_keeps_every_value(fmt, shape, pool):
    values = random(1, *shape)
    weight, expected = packed(fmt, values, pool)
    assert weight.shape == shape
    assert weight.format == fmt
    assert isinstance(weight, {"q40": PackedQ40, "q80": PackedQ80}.get(fmt, DenseWeight))
    assert np.array_equal(unpack(weight), expected.astype(np.float32))
    assert weight.data.__array_interface__["data"][0] % 64 == 0


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_dense_weights_take_any_number_of_inputs(fmt, pool):
    weight, expected = packed(fmt, random(2, 19, 7), pool)
    assert np.array_equal(unpack(weight), expected.astype(np.float32))
    x = random(3, 4, 7)
    out = np.empty((4, 19), np.float32)
    assert np.abs(linear(pool, x, weight, out) - x @ expected.T).max() < 1e-5


def test_packed_q40_is_four_and_a_half_bits_a_weight(pool):
    weight, _ = packed("q40", random(4, 64, 128), pool)
    assert weight.nbytes == 64 * 128 * 9 // 16


def test_pack_reads_a_read_only_file_and_fills_a_given_weight(tmp_path, pool):
    values = random(5, 3, 20, 64)
    raw = quants.quantize("q40", values)
    raw.tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", dtype=np.uint8, mode="r")
    first = pack("q40", mapped, values.shape)
    again = pack("q40", mapped, values.shape, pool, out=first)
    assert again is first
    assert np.array_equal(unpack(first), quants.dequantize("q40", raw))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(200, 64), (5, 37, 96)])
def test_pack_from_reads_every_row_once_in_chunks(fmt, shape, pool, monkeypatch):
    raw = quants.quantize(fmt, random(12, *shape))
    rows = raw.reshape(int(np.prod(shape[:-1])), -1)
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 3 * 16 * rows[0].nbytes)  # three tiles
    asked = []

    def read(first, count):
        asked.append(range(first, first + count))
        return rows[first : first + count].copy()

    weight = pack_from(fmt, read, shape, pool)
    assert np.array_equal(unpack(weight), quants.dequantize(fmt, raw))
    assert len(asked) == -(-weight.experts * weight.tiles // 3)
    assert sorted(row for chunk in asked for row in chunk) == list(range(len(rows)))


def test_pack_from_passes_on_what_goes_wrong(pool):
    def broken(first, count):
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        pack_from("q40", broken, (64, 64), pool)
    with pytest.raises(InputError, match="rows were read as"):
        pack_from("q40", lambda first, count: np.zeros((count, 17), np.uint8), (64, 64), pool)


@pytest.mark.parametrize("size", [1000, (4 << 20) + 1000])
def test_memory_of_weights_is_aligned_and_writable(size):
    memory = mapped_empty(size)
    assert (memory.dtype, memory.shape) == (np.uint8, (size,))
    assert address_of(memory) % 64 == 0
    memory[:] = 7
    assert memory[-1] == 7


@pytest.mark.parametrize(
    ("fmt", "raw", "shape"),
    [
        ("q40", np.zeros((16, 1, 18), np.uint8), (16, 64)),
        ("q40", np.zeros((16, 1, 18), np.int8), (16, 32)),
        ("q40", np.zeros((16, 1, 18), np.uint8), (16, 33)),
        ("q41", np.zeros((16, 1, 18), np.uint8), (16, 32)),
        ("bf16", np.zeros((16, 32), np.float16), (16, 32)),
        ("f32", np.zeros(16, np.float32), (16,)),
    ],
)
def test_pack_refuses_what_does_not_fit(fmt, raw, shape):
    with pytest.raises(InputError):
        pack(fmt, raw, shape)


@pytest.mark.parametrize("columns", [32, 64, 45, 7])
def test_quantised_rows_are_q80(columns, pool):
    x = random(6, 9, columns)
    x[2, :] = 0
    q = quantize_rows(pool, x)
    padded = np.zeros((9, q.blocks * 32), np.float32)
    padded[:, :columns] = x
    expected = quants.quantize_q80(padded)[..., 2:].view(np.int8)
    tiles = zip(q.groups.start, q.groups.count, strict=True)
    for r, m in tiles:
        values = q.values[r * q.blocks * 32 :][: m * q.blocks * 32].reshape(q.blocks, m, 32).swapaxes(0, 1)
        assert np.array_equal(values, expected[r : r + m])
        starts = q.starts[r * q.blocks :][: m * q.blocks].reshape(q.blocks, m).T
        assert np.array_equal(starts, -8 * values.astype(np.int32).sum(axis=-1))
        scales = q.scales[r * q.blocks :][: m * q.blocks].reshape(q.blocks, m).T
        assert np.array_equal(scales, np.abs(padded[r : r + m].reshape(m, -1, 32)).max(axis=-1) / np.float32(127))


@pytest.mark.parametrize(("rows", "columns", "outputs"), SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_with_float_activations(fmt, rows, columns, outputs, pool):
    weight, expected = packed(fmt, random(7, outputs, columns), pool)
    x = random(8, rows, columns)
    out = np.full((rows, outputs), np.nan, np.float32)
    assert linear(pool, x, weight, out) is out
    exact = x.astype(np.float64) @ expected.T
    assert np.abs(out - exact).max() < 3e-6 * np.abs(exact).max() * np.sqrt(columns / 32)


@pytest.mark.parametrize(("rows", "columns", "outputs"), SIZES)
@pytest.mark.parametrize("fmt", ["q40", "q80"])
def test_linear_with_quantised_activations(fmt, rows, columns, outputs, pool):
    weight, expected = packed(fmt, random(9, outputs, columns), pool)
    x = random(10, rows, columns)
    out = np.full((rows, outputs), np.nan, np.float32)
    linear(pool, quantize_rows(pool, x, out=empty_quantized(rows, columns)), weight, out)
    exact = dequantised_activations(x) @ expected.T
    assert np.abs(out - exact).max() < 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("fmt", ["q40", "q80"])
def test_extreme_integers_do_not_overflow(fmt, pool):
    """All weights at the ends of their range, all activations at +-127: the largest sums there are."""
    blocks = np.zeros((16, 4, quants.BLOCK_BYTES[fmt]), np.uint8)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    for payload in (0x00, 0xFF, 0x80, 0x7F):
        blocks[..., 2:] = payload
        weight = pack(fmt, blocks, (16, 128), pool)
        values = quants.dequantize(fmt, blocks).astype(np.float64)
        for x in (np.full((2, 128), 127, np.float32), np.full((2, 128), -127, np.float32)):
            out = np.empty((2, 16), np.float32)
            linear(pool, quantize_rows(pool, x), weight, out)
            assert np.array_equal(out, x.astype(np.float64) @ values.T)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("fmt", ["q40", "q80", "bf16"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(fmt, quantized, pool):
    if quantized and fmt == "bf16":
        pytest.skip("dense weights take float activations")
    weight, _ = packed(fmt, random(11, 75, 704), pool)
    x = random(12, 61, 704)

    def product(rows: np.ndarray, threads: ThreadPool) -> np.ndarray:
        out = np.empty((len(rows), 75), np.float32)
        return linear(threads, quantize_rows(threads, rows) if quantized else rows, weight, out)

    together = product(x, pool)
    assert np.array_equal(product(x, ThreadPool(1)), together)
    for count in (1, 2, 7, 13, 14, 15, 40):
        assert np.array_equal(product(x[5 : 5 + count].copy(), pool), together[5 : 5 + count])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["q40", "q80"])
def test_what_is_not_finite_stays_visible(fmt, bad, pool):
    """Quantisation must not turn a NaN or an infinity into a plausible number."""
    weight, _ = packed(fmt, random(26, 16, 96), pool)
    x = random(27, 3, 96)
    x[1, 40] = bad
    out = linear(pool, quantize_rows(pool, x), weight, np.empty((3, 16), np.float32))
    assert np.isfinite(out[[0, 2]]).all()
    assert not np.isfinite(out[1]).any()


def test_tiny_activations_are_zero_or_right(pool):
    weight, expected = packed("q80", random(28, 16, 32), pool)
    for size in (1e-44, 1e-38, 1e-30):
        x = np.full((1, 32), size, np.float32)
        out = linear(pool, quantize_rows(pool, x), weight, np.empty((1, 16), np.float32))
        assert np.abs(out - x.astype(np.float64) @ expected.T).max() < max(1e-36, 1e-5 * size)


def test_sizes_are_checked(pool):
    weight, _ = packed("q40", random(13, 16, 64), pool)
    with pytest.raises(AssertionError):
        linear(pool, random(0, 2, 32), weight, np.empty((2, 16), np.float32))
    with pytest.raises(AssertionError):
        linear(pool, random(0, 2, 64), weight, np.empty((2, 17), np.float32))
    with pytest.raises(AssertionError):
        linear(pool, random(0, 2, 64), weight, np.empty((2, 32), np.float32)[:, ::2])
    with pytest.raises(AssertionError):
        linear(pool, quantize_rows(pool, random(0, 2, 32)), weight, np.empty((2, 16), np.float32))


def expected_experts(x, ids, weights, gate_up, down, quantized):
    out = np.zeros(x.shape)
    inner = down.shape[-1]
    inputs = dequantised_activations(x) if quantized else x.astype(np.float64)
    for r in range(len(x)):
        for e, w in zip(ids[r], weights[r], strict=True):
            both = gate_up[e] @ inputs[r]
            active = gelu(both[:inner]) * both[inner:]
            if quantized:
                active = dequantised_activations(active.astype(np.float32)[None])[0]
            out[r] += w * (down[e] @ active)
    return out


def routing(rows: int, count: int, choices: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(14)
    if kind == "all to one":
        return np.tile(np.arange(choices, dtype=np.int32), (rows, 1))
    used = count // 2 if kind == "half unused" else count
    return np.stack([rng.permutation(used)[:choices] for _ in range(rows)]).astype(np.int32)


@pytest.mark.parametrize("kind", ["spread", "half unused", "all to one"])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize(("fmt", "quantized"), [("q40", True), ("q80", True), ("q40", False), ("f32", False)])
def test_experts(fmt, quantized, rows, kind, pool):
    hidden, inner, count, choices = 64, 96, 12, 3
    gate_up, gate_up_values = packed(fmt, 0.2 * random(15, count, 2 * inner, hidden), pool)
    down, down_values = packed(fmt, 0.2 * random(16, count, hidden, inner), pool)
    x = random(17, rows, hidden)
    ids = routing(rows, count, choices, kind)
    weights = np.random.default_rng(18).random((rows, choices), dtype=np.float32)
    out = np.full((rows, hidden), np.nan, np.float32)
    experts(pool, x, ids, weights, gate_up, down, out, quantized)
    expected = expected_experts(x, ids, weights, gate_up_values, down_values, quantized)
    # an activation at the edge between two integers may round either way: one step in 127 of one input of many
    tolerance = 3e-3 if quantized else 3e-6
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()
    alone = np.empty((1, hidden), np.float32)
    experts(ThreadPool(1), x[-1:].copy(), ids[-1:].copy(), weights[-1:].copy(), gate_up, down, alone, quantized)
    assert np.array_equal(alone[0], out[-1])


def test_experts_of_many_rows_and_odd_sizes(pool):
    hidden, inner, count, choices, rows = 37, 21, 128, 8, 256
    gate_up, gate_up_values = packed("f32", 0.2 * random(19, count, 2 * inner, hidden), pool)
    down, down_values = packed("f32", 0.2 * random(20, count, hidden, inner), pool)
    x = random(21, rows, hidden)
    ids = routing(rows, count, choices, "spread")
    weights = np.random.default_rng(22).random((rows, choices), dtype=np.float32)
    out = np.empty((rows, hidden), np.float32)
    experts(pool, x, ids, weights, gate_up, down, out, False)
    expected = expected_experts(x, ids, weights, gate_up_values, down_values, False)
    assert np.abs(out - expected).max() < 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("bad", [-1, 4])
def test_experts_refuses_an_unknown_expert(bad, pool):
    gate_up, _ = packed("f32", random(23, 4, 8, 16), pool)
    down, _ = packed("f32", random(24, 4, 16, 4), pool)
    ids = np.array([[0, bad]], np.int32)
    with pytest.raises(AssertionError, match="ids"):
        experts(
            pool,
            random(25, 1, 16),
            ids,
            np.ones((1, 2), np.float32),
            gate_up,
            down,
            np.empty((1, 16), np.float32),
            False,
        )
