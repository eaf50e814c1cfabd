"""What quantising the activations to Q80 costs, against float activations on the same Q40 weights.

The arithmetic explains an error: each value moves by at most half a step, a step being its block's largest magnitude
over 127. Rounding errors behave like independent uniform noise of that width. So the expected error is computed by
putting such noise on float activations, and the measured one must not be larger than that explains.
"""

import numpy as np
import pytest

import ddllm_vk
from ddllm_vk.backends.reference import ReferenceOps, _array, _Quantized
from ddllm_vk.cpu import reference as kernels


def with_rounding_noise(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """x: [rows, K]; every value moved by uniform noise as wide as a Q80 step of its block of 32."""
    blocks = x.reshape(x.shape[0], -1, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    return (blocks + step * rng.uniform(-0.5, 0.5, blocks.shape)).reshape(x.shape).astype(np.float32)


class NoisyOps(ReferenceOps):
    """Float activations with rounding noise where Q80 activations would be rounded."""

    rng = np.random.default_rng(0)

    def _input(self, x, weight):
        return with_rounding_noise(x, self.rng) if isinstance(weight, _Quantized) else x

    def experts(self, x, ids, weights, gate_up, down):
        noisy, out = with_rounding_noise(x, self.rng), np.zeros_like(x)
        width = _array(down).shape[-1]
        for row in range(len(x)):
            for e, w in zip(ids[row], weights[row], strict=True):
                gate_up_row = _array(gate_up)[e] @ noisy[row]
                a = kernels.gelu_mul(gate_up_row[:width], gate_up_row[width:])[None]
                out[row] += w * (with_rounding_noise(a, self.rng) @ _array(down)[e].T)[0]
        return out


def test_one_product():
    """The error of a product is what independent rounding explains, not more and not less."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((64, 2816)).astype(np.float32), rng.standard_normal((256, 2816)).astype(np.float32)
    exact = x @ w.T
    measured = np.linalg.norm(kernels.quantize_dequantize_rows(x) @ w.T - exact) / np.linalg.norm(exact)
    step = np.abs(x.reshape(64, -1, 32)).max(axis=-1) / 127
    expected = np.sqrt((32 * step**2 / 12).sum() / (x**2).sum())
    assert measured == pytest.approx(expected, rel=0.05)


def test_logits_of_the_bundled_model(capsys):
    prompts = ["What is 47 + 38?", "Sort the letters: PLANET", "What is the capital of France?"]
    model = ddllm_vk.load_model(kv_cache="f32")
    exact_model = ddllm_vk.load_model(activations="f32")
    noisy_model = ddllm_vk.load_model(backend="reference", activations="f32")
    noisy_model._ops = NoisyOps(model.config.rms_norm_eps, "f32")
    rng = np.random.default_rng(2)
    measured, expected = [], []
    for prompt in prompts:
        canvas = rng.integers(0, model.config.vocab_size, model.config.canvas_length)
        logits = []
        for m in (exact_model, model, noisy_model):
            session = m.session()
            session.encode(m.prompt_ids(prompt))
            logits.append(session.canvas_logits(canvas).astype(np.float64))
        exact, q80, noisy = logits
        measured.append(np.linalg.norm(q80 - exact) / np.linalg.norm(exact))
        expected.append(np.linalg.norm(noisy - exact) / np.linalg.norm(exact))
    with capsys.disabled():
        print(
            f"\nQ80 against float activations: relative logit error {np.mean(measured):.2%}, "
            f"rounding explains {np.mean(expected):.2%}"
        )
    assert np.mean(measured) < 1.5 * np.mean(expected)
    assert np.mean(measured) < 0.1
