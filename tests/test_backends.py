"""CpuOps against ReferenceOps where formats mix: a width that is no multiple of 32 stays unquantised."""

from functools import partial

import numpy as np
import pytest

from ddllm_vk.backends.cpu import CpuOps
from ddllm_vk.backends.reference import ReferenceOps
from ddllm_vk.quants import quantize


def rows_of(raw: np.ndarray, first: int, count: int) -> np.ndarray:
    """An Ops' `read` of stored experts [E, N, ...]."""
    return raw.reshape(-1, *raw.shape[2:])[first : first + count]


@pytest.mark.parametrize(("gate_up_format", "down_format"), [("q40", "f32"), ("f32", "q40"), ("q40", "q40")])
def test_experts_of_mixed_formats(gate_up_format: str, down_format: str):
    rng = np.random.default_rng(0)
    hidden, width = (64, 40) if down_format == "f32" else (48 if gate_up_format == "f32" else 64, 64)
    gate_up = rng.standard_normal((5, 2 * width, hidden)).astype(np.float32)
    down = rng.standard_normal((5, hidden, width)).astype(np.float32)
    x = rng.standard_normal((7, hidden)).astype(np.float32)
    ids = np.array([[i % 5, (i + 2) % 5] for i in range(7)], dtype=np.int32)
    weights = rng.random((7, 2)).astype(np.float32)
    results = []
    for ops in (CpuOps(1e-6), ReferenceOps(1e-6)):
        uploaded = [
            ops.upload(fmt, partial(rows_of, quantize(fmt, w)), w.shape)
            for fmt, w in ((gate_up_format, gate_up), (down_format, down))
        ]
        with ops.scope():
            results.append(np.array(ops.experts(x, ids, weights, *uploaded)))
    assert np.abs(results[0] - results[1]).max() < 2e-2 * np.abs(results[1]).max()
