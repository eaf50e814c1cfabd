"""The sampler's decisions, checked against MODEL.md by hand-made cases and by slow plain restatements."""

import numpy as np
import pytest

from ddllm_vk import sampler
from ddllm_vk.noise import PhiloxNoise


def test_temperature_falls_from_near_t_max_to_one_step_above_t_min():
    assert sampler.temperature(48, 48, 0.4, 0.8) == pytest.approx(0.8)
    assert sampler.temperature(1, 4, 0.4, 0.8) == pytest.approx(0.5)


def test_accept_takes_rows_while_the_entropy_before_them_is_within_the_bound():
    entropy = np.array([0.3, 0.01, 0.05, 0.2])
    # ascending 0.01 0.05 0.2 0.3: sums before 0, 0.01, 0.06, 0.26
    assert sampler.accept(entropy, 0.1).tolist() == [False, True, True, True]
    assert sampler.accept(entropy, 0.05).tolist() == [False, True, True, False]
    assert sampler.accept(entropy, 0.0).tolist() == [False, True, False, False]


def test_accept_always_takes_one_row():
    assert sampler.accept(np.array([5.0, 4.0, 6.0]), 0.0).tolist() == [False, True, False]


def test_accept_against_a_plain_loop():
    rng = np.random.default_rng(1)
    for _ in range(200):
        entropy = rng.exponential(0.1, 17)
        expected, total = np.zeros(17, dtype=bool), 0.0
        for row in sorted(range(17), key=lambda r: (entropy[r], r)):
            if total > 0.3:
                break
            expected[row] = True
            total += entropy[row]
        assert np.array_equal(sampler.accept(entropy, 0.3), expected)


def test_settled_needs_enough_equal_argmax_canvases_and_low_entropy():
    a, b = np.array([1, 2]), np.array([1, 3])
    assert not sampler.is_settled(a, [], 0.0, 1, 0.005)
    assert sampler.is_settled(a, [b, a], 0.0, 1, 0.005)
    assert not sampler.is_settled(a, [a, b], 0.0, 1, 0.005)
    assert not sampler.is_settled(a, [b, a], 0.0, 2, 0.005)
    assert not sampler.is_settled(a, [a], 0.005, 1, 0.005)  # strictly below
    assert sampler.is_settled(a, [], 0.0, 0, 0.005)


def test_finalize_keeps_the_first_end_and_pads_behind_it():
    ids, end = sampler.finalize(np.array([5, 6, 7, 6]), [6], 0)
    assert ids.tolist() == [5, 6, 0, 0]
    assert end == 1
    ids, end = sampler.finalize(np.array([5, 7]), [6], 0)
    assert ids.tolist() == [5, 7]
    assert end is None
    assert sampler.finalize(np.array([6]), [], 0)[1] is None


def test_noise_is_keyed_by_seed_canvas_and_step_alone():
    a, b = PhiloxNoise(7, 64, 1000), PhiloxNoise(7, 64, 1000)
    b.uniforms(3, 3)  # what was drawn before does not matter
    assert np.array_equal(a.renoise(1, 2), b.renoise(1, 2))
    drawn = [
        a.renoise(1, 2),
        a.renoise(2, 1),
        a.renoise(1, 3),
        a.initial_canvas(1),
        PhiloxNoise(8, 64, 1000).renoise(1, 2),
    ]
    for i in range(len(drawn)):
        for j in range(i):
            assert not np.array_equal(drawn[i], drawn[j])


def test_noise_rows_do_not_depend_on_the_canvas_length():
    assert np.array_equal(PhiloxNoise(7, 64, 1000).uniforms(0, 0)[:10], PhiloxNoise(7, 10, 1000).uniforms(0, 0))


def test_noise_is_uniform():
    noise = PhiloxNoise(1, 100_000, 16)
    counts = np.bincount(noise.initial_canvas(0), minlength=16)
    assert len(counts) == 16
    # chi-square with 15 degrees of freedom; 40 is beyond the 99.9th percentile
    assert ((counts - 6250) ** 2 / 6250).sum() < 40
    u = noise.uniforms(0, 0)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01


def test_noise_accepts_any_integer_seed():
    for seed in (0, -1, 2**63, 2**70):
        PhiloxNoise(seed, 4, 10).uniforms(0, 0)
