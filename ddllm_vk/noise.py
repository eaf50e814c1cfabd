"""Where the sampler's random numbers come from: counter-based, keyed by (seed, canvas, step, row).

Nothing depends on what was drawn before, so any node can draw its own rows and a repeated step draws the same numbers.
"""

from typing import Protocol

import numpy as np


class NoiseSource(Protocol):
    """All randomness of a generation. canvas_index and step count from 0."""

    def initial_canvas(self, canvas_index: int) -> np.ndarray:
        """Random ids, int [canvas_length], uniform over the vocabulary."""
        ...

    def renoise(self, canvas_index: int, step: int) -> np.ndarray:
        """One full canvas of random ids, of which the rows that were not accepted are used."""
        ...

    def uniforms(self, canvas_index: int, step: int) -> np.ndarray:
        """float64 [canvas_length] in [0, 1): one number a row for inverse-CDF sampling."""
        ...


_INITIAL, _RENOISE, _UNIFORMS = 0, 1, 2


class PhiloxNoise:
    """Philox 4x64: the seed is the key, (kind, step, canvas) the counter's upper words; row r takes the r-th number."""

    def __init__(self, seed: int, canvas_length: int, vocab_size: int):
        self.seed, self.canvas_length, self.vocab_size = seed, canvas_length, vocab_size

    def _raw(self, kind: int, canvas_index: int, step: int) -> np.ndarray:
        key = np.array([self.seed & (2**64 - 1), 0], dtype=np.uint64)
        counter = np.array([0, kind, step, canvas_index], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(self.canvas_length)

    def _ids(self, raw: np.ndarray) -> np.ndarray:
        # (32 random bits * vocabulary) >> 32: the bias is below vocabulary / 2^32
        return (((raw >> np.uint64(32)) * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int32)

    def initial_canvas(self, canvas_index: int) -> np.ndarray:
        return self._ids(self._raw(_INITIAL, canvas_index, 0))

    def renoise(self, canvas_index: int, step: int) -> np.ndarray:
        return self._ids(self._raw(_RENOISE, canvas_index, step))

    def uniforms(self, canvas_index: int, step: int) -> np.ndarray:
        return (self._raw(_UNIFORMS, canvas_index, step) >> np.uint64(11)).astype(np.float64) * 2.0**-53
