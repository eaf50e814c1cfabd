"""Acceptance, renoising and stopping on the GPU are exactly those of sampler.py, whatever the entropies."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import TEXT_CASES, oracle_case

from ddllm_vk import sampler
from ddllm_vk.backends.vulkan_head import SETTINGS_WORDS, StepRecord, VulkanHead, bound_limit, mean_limit
from ddllm_vk.gpu.program import Program

ROW = np.dtype(
    "float32, float32, float32, int32, float32, uint32, float32, float32",
).newbyteorder("<")
ROW.names = ("largest", "total", "total_low", "argmax", "entropy", "tile", "residual", "residual_low")
UNIT = 2.0**-32  # nats: entropies are multiples of it


@dataclass
class Decider:
    """entropy_bound.comp alone: the statistics come from the host."""

    runtime: object
    rows: int
    guard: bool = False
    workgroup: int = 64
    buffers: dict = field(init=False)

    def __post_init__(self):
        rows, runtime = self.rows, self.runtime
        everything = rows + 1
        sizes = {"rows": ROW.itemsize * everything, "sampled": 4 * everything, "renoise": 4 * rows, "canvas": 4 * rows}
        sizes |= {"settings": 4 * SETTINGS_WORDS, "state": 4 * (1 + rows), "record": 4 * (4 + 5 * rows)}
        self.buffers = {name: runtime.allocate(size, host=True) for name, size in sizes.items()}
        for buffer in self.buffers.values():
            buffer.array()[:] = 0
        program = Program()
        operands = self.buffers | {"record": self.buffers["record"].slice(4)}
        push = {"row_count": rows, "first_row": rows if self.guard else 0}
        program.dispatch(runtime.pipeline("entropy_bound", {"WORKGROUP_X": self.workgroup}), operands, push)
        self.recording = runtime.record(program)
        self.head = VulkanHead.__new__(VulkanHead)  # what writes the settings and reads the record, without a table
        self.head.rows, self.head.settings, self.head.record = rows, self.buffers["settings"], self.buffers["record"]

    def step(self, entropy, argmax, sampled, renoise, *, bound=0.1, k=1, confidence=0.005, first=False) -> StepRecord:
        stats = np.zeros(self.rows + 1, ROW)
        place = np.arange(self.rows)
        if self.guard:  # row 0's own statistics are at the end; the others of row 0 must not count
            place[0] = self.rows
            stats["entropy"][0], stats["argmax"][0] = 7, -5
        stats["entropy"][place], stats["argmax"][place] = entropy, argmax
        self.buffers["rows"].array()[:] = stats.view(np.uint32)
        self.buffers["sampled"].array(np.int32)[place] = sampled
        self.buffers["renoise"].array(np.int32)[:] = renoise
        self.head.set_sampler(bound, k, confidence, first)
        self.recording.run()
        record = self.head.read()
        assert np.array_equal(self.buffers["canvas"].array(np.int32), record.canvas)
        return record


def on_grid(entropy: np.ndarray) -> np.ndarray:
    """As head_finish leaves them: float32, multiples of 2^-32."""
    entropy = entropy.astype(np.float32)
    return np.where(entropy < 2.0**-8, np.floor(entropy / UNIT) * UNIT, entropy).astype(np.float32)


def check(decider: Decider, entropy: np.ndarray, bound: float, **options) -> StepRecord:
    rng = np.random.default_rng(1)
    argmax, sampled, renoise = rng.integers(0, 1000, (3, decider.rows))
    record = decider.step(entropy, argmax, sampled, renoise, bound=bound, **options)
    assert np.array_equal(record.entropy, entropy.astype(np.float64))
    expected = sampler.accept(record.entropy, bound)
    assert np.array_equal(record.accepted, expected)
    assert np.array_equal(record.canvas, np.where(expected, sampled, renoise))
    assert np.array_equal(record.argmax, argmax)
    assert np.array_equal(record.sampled, sampled)
    return record


@pytest.mark.parametrize(
    ("rows", "workgroup", "guard"), [(1, 64, False), (7, 24, True), (256, 64, True), (257, 8, False)]
)
def test_acceptance(runtime, rows, workgroup, guard):
    decider = Decider(runtime, rows, guard, workgroup)
    rng = np.random.default_rng(rows)
    kinds = [
        rng.exponential(0.1, rows),
        rng.exponential(1e-6, rows),
        rng.random(rows) ** 40 * 12.5,  # from nothing to the most there is
        rng.integers(0, 4, rows) * 0.01,  # ties, most of all at zero
        np.zeros(rows),
        np.full(rows, 12.5),
        rng.integers(1, 50, rows) * UNIT,
        rng.integers(1, 1000, rows) * 2.0**-14,
    ]
    for kind in kinds:
        entropy = on_grid(kind)
        sums = np.cumsum(np.sort(entropy.astype(np.float64)))
        # at a sum exactly, one unit to either side, and between two floats there
        at = float(sums[rng.integers(0, rows)])
        for bound in (0.1, 0.0, at, at - UNIT, at + UNIT, np.nextafter(at, 0), np.nextafter(at, 99), 1e30, math.inf):
            check(decider, entropy, max(float(bound), 0.0))


def test_a_bound_of_float64_that_no_float32_holds(runtime):
    decider = Decider(runtime, 3)
    entropy = on_grid(np.array([0.05, 0.05, 0.3]))
    both = float(entropy[:2].astype(np.float64).sum())
    assert check(decider, entropy, both).accepted.tolist() == [True, True, True]
    assert check(decider, entropy, np.nextafter(both, 0)).accepted.tolist() == [True, True, False]


@pytest.mark.parametrize("rows", [1, 256, 257])
@pytest.mark.parametrize("threshold", [0.005, 0.1, 1e-9, 3.0])
def test_stopping_at_the_very_mean(runtime, rows, threshold):
    """The sums of entropies around the one whose mean is the threshold."""
    decider = Decider(runtime, rows)
    limit = mean_limit(threshold, rows)
    assert math.ldexp(limit, -32) / rows >= threshold > math.ldexp(limit - 1, -32) / rows
    units = limit // rows
    for total in (limit - 1, limit, limit + 1):
        parts = np.full(rows, units, np.int64) >> 8 << 8  # few enough bits for a float32
        parts[0] += total - parts.sum()
        entropy = on_grid(parts * UNIT)
        rest = total - int((entropy.astype(np.float64) / UNIT).sum())
        if rest:  # what did not fit the first row's float32
            entropy[-1] += np.float32(rest * UNIT)
        record = check(decider, entropy, 0.1, k=0, confidence=threshold, first=True)
        assert record.settled == sampler.is_settled(record.argmax, [], float(record.entropy.mean()), 0, threshold)


def test_stopping_thresholds_at_the_ends(runtime):
    decider = Decider(runtime, 5)
    nothing = np.zeros(5, np.float32)
    assert not check(decider, nothing, 0.1, k=0, confidence=0.0).settled  # strictly below
    assert check(decider, nothing, 0.1, k=0, confidence=5e-324).settled
    assert check(decider, np.full(5, 12.5, np.float32), 0.1, k=0, confidence=math.inf).settled


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_stopping_needs_the_argmax_canvas_to_stay(runtime, stability):
    decider = Decider(runtime, 33, guard=True, workgroup=16)
    rng = np.random.default_rng(stability)
    sampled = renoise = np.zeros(33, np.int32)
    stops = 0
    for _ in range(6):  # canvases
        previous: deque[np.ndarray] = deque(maxlen=max(stability, 1))
        argmax = rng.integers(0, 9, 33)
        for step in range(10):
            if rng.random() < 0.4:
                argmax = argmax.copy()
                argmax[rng.integers(0, 33)] += 1
            entropy = on_grid(rng.random(33) * 0.0102)
            record = decider.step(entropy, argmax, sampled, renoise, k=stability, first=step == 0)
            mean = float(record.entropy.mean())
            assert record.settled == sampler.is_settled(argmax, list(previous), mean, stability, 0.005)
            stops += record.settled
            previous.append(argmax)
    assert 0 < stops < 60


def test_broken_entropies_are_told_and_never_settle(runtime):
    decider = Decider(runtime, 9)
    entropy = np.zeros(9, np.float32)
    entropy[4] = np.nan
    ids = np.arange(9)
    record = decider.step(entropy, ids, ids, ids, k=0, confidence=1.0, first=True)
    assert record.broken
    assert not record.settled
    assert np.isnan(record.entropy[4])
    assert not decider.step(np.zeros(9, np.float32), ids, ids, ids, k=0, confidence=1.0).broken


@pytest.mark.parametrize(("name", "trace"), [(n, t) for n in TEXT_CASES for t in oracle_case(n).meta["traces"]])
def test_decisions_of_the_recorded_traces(runtime, name, trace):
    case = oracle_case(name)
    v, g = case.vectors, case.meta["traces"][trace]["generation_config"]
    v = {key.split("__")[1]: v[key] for key in v if key.startswith(f"trace_{trace}__")}
    decider = Decider(runtime, case.meta["canvas_length"])
    for i in range(len(v["canvas_index"])):
        first = i == 0 or v["canvas_index"][i] != v["canvas_index"][i - 1]
        record = decider.step(
            on_grid(v["entropy"][i]),
            v["argmax_canvas"][i],
            v["sampled"][i],
            v["rand_renoise"][i],
            bound=g["sampler_config"]["entropy_bound"],
            k=g["stability_threshold"],
            confidence=g["confidence_threshold"],
            first=first,
        )
        assert np.array_equal(record.accepted, v["accepted_mask"][i].astype(bool))
        assert np.array_equal(record.canvas, v["canvas_out"][i])
        assert record.settled == bool(v["finished"][i])


def test_limits():
    assert bound_limit(0.0) == 1
    assert bound_limit(0.1) == math.floor(0.1 * 2**32) + 1
    assert bound_limit(UNIT) == 2
    assert bound_limit(math.inf) == bound_limit(1e300) == 2**64 - 1
    assert mean_limit(0.0, 256) == 0
    assert mean_limit(UNIT, 256) == 256
    assert mean_limit(math.inf, 256) == 2**64 - 1
