"""Q40 and Q80 against a plain per-weight statement of the block formats."""

import struct

import numpy as np
import pytest

from ddllm_vk import quants


def plain_q40(block: np.ndarray) -> bytes:
    """One block of 32, by the definition: scale = signed value of largest magnitude / -8, nibble = trunc(x/d + 8.5)."""
    extreme = max(block, key=abs)
    d = np.float32(extreme) / np.float32(-8)
    inverse = np.float32(1) / d if d else np.float32(0)
    q = [min(int(np.float32(x * inverse) + np.float32(8.5)), 15) for x in block]
    return struct.pack("<e", d) + bytes(q[j] | q[j + 16] << 4 for j in range(16))


def test_q40_bytes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 64)).astype(np.float32)
    x[0, :32] = 0
    x[1, 3] = x[1, 4] = -9.0  # a tie: the first one sets the scale
    x[2, :32] = 1e-30
    expected = b"".join(plain_q40(block) for block in x.reshape(-1, 32))
    assert quants.quantize_q40(x).tobytes() == expected


def test_q40_keeps_the_extreme_value_of_each_block_up_to_its_float16_scale():
    x = np.random.default_rng(1).standard_normal((100, 32)).astype(np.float32)
    y = quants.dequantize_q40(quants.quantize_q40(x))
    at = np.abs(x).argmax(axis=-1)[:, None]
    assert np.allclose(np.take_along_axis(y, at, -1), np.take_along_axis(x, at, -1), rtol=2**-10)
    step = np.abs(x).max(axis=-1, keepdims=True) / 8
    assert (np.abs(x - y) <= step * 1.01).all()


def test_q80_bytes():
    x = np.random.default_rng(2).standard_normal((3, 32)).astype(np.float32)
    for row, block in zip(x, quants.quantize_q80(x)[:, 0], strict=True):
        d = np.abs(row).max() / np.float32(127)
        q = [int(abs(v) * (np.float32(1) / d) + 0.5) * (1 if v > 0 else -1) for v in row]
        assert block.tobytes() == struct.pack("<e32b", d, *q)


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "q40", "q80"])
def test_sizes_and_shapes(fmt: str):
    x = np.random.default_rng(3).standard_normal((2, 5, 96)).astype(np.float32)
    raw = quants.quantize(fmt, x)
    assert raw.nbytes == quants.tensor_bytes(fmt, x.shape)
    back = quants.dequantize(fmt, raw)
    assert back.shape == x.shape
    assert back.dtype == np.float32
    assert np.abs(back - x).max() < {"f32": 1e-9, "f16": 2e-3, "bf16": 2e-2, "q40": 0.5, "q80": 0.03}[fmt]


def test_bf16_rounds_to_nearest_even():
    # 1 + 2^-8 lies between two bf16 values and goes to the even one, 1.0; 1 + 3 * 2^-8 goes up to 1 + 2^-6
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -2.5], dtype=np.float32)
    assert quants.dequantize("bf16", quants.quantize("bf16", x)).tolist() == [1.0, 1 + 2**-6, -2.5]
