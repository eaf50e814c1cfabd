"""Shaders against cpu/reference.py, on both runtimes, under synchronization validation (gpu_fixtures.py)."""

import numpy as np
import pytest

from ddllm_vk.cpu import reference

F32 = np.float32
EPS = 1e-6
#: rows and columns around the workgroup's size and its multiples
SIZES = [(1, 1), (3, 5), (2, 63), (5, 64), (4, 65), (7, 191), (3, 2816)]


def rows(rng, shape):
    return rng.standard_normal(shape, dtype=F32) * F32(3)


@pytest.mark.parametrize("workgroup", [1, 48, 64, 256])
@pytest.mark.parametrize(("m", "columns"), SIZES)
def test_rms_norm(run_shader, m, columns, workgroup):
    rng = np.random.default_rng(columns)
    x, weight = rows(rng, (m, columns)), rows(rng, columns)
    push, constants = {"columns": columns, "eps": EPS}, {"WORKGROUP_X": workgroup}
    operands = {"x": x, "weight": weight, "result": np.zeros_like(x)}
    found = run_shader("rms_norm", operands, push, (m,), constants)["result"]
    np.testing.assert_allclose(found, reference.rms_norm(x, weight, EPS), rtol=2e-6, atol=1e-6)
    del operands["weight"]
    found = run_shader("rms_norm_no_weight", operands, push, (m,), constants)["result"]
    np.testing.assert_allclose(found, reference.rms_norm(x, None, EPS), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("m", "columns"), SIZES)
def test_add_rms_norm(run_shader, m, columns):
    rng = np.random.default_rng(columns)
    x, y, weight = rows(rng, (m, columns)), rows(rng, (m, columns)), rows(rng, columns)
    operands = {"x": x, "y": y, "weight": weight, "result": np.zeros_like(x)}
    push = {"columns": columns, "eps": EPS, "scale": 0.75}
    found = run_shader("add_rms_norm", operands, push, (m,))["result"]
    expected = reference.add_rms_norm(x, y, weight, EPS, 0.75)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=4e-6)
