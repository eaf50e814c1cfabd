"""Probabilities in float64, and what a token sampled from them must satisfy; for the tests of the head."""

import numpy as np


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)


def check_sampled(sampled: np.ndarray, p: np.ndarray, uniforms: np.ndarray) -> None:
    """Inverse CDF over the tokens in id order, up to float32 rounding of the logits at the edges."""
    rows = np.arange(len(p))
    end = np.cumsum(p, axis=-1)[rows, sampled]
    assert np.all(p[rows, sampled] > 0)
    assert np.all(uniforms < end + 2e-6)
    assert np.all(uniforms >= end - p[rows, sampled] - 2e-6)
    assert np.mean(sampled == (np.cumsum(p, axis=-1) <= uniforms[:, None]).sum(axis=-1)) > 0.8
