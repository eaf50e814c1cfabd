"""What tests share: the oracle's cases and the noise recorded in them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_fixtures import (  # noqa: F401  the fixtures of tests on a GPU
    gpu_device,
    no_messages,
    open_runtimes,
    run_shader,
    runtime,
    staged_runtime,
    validation,
)

ORACLE = Path(__file__).parent / "oracle"
TEXT_CASES = ("case_1_base", "case_2_long_prompt", "case_3_multi_canvas", "case_6_canvas256")


@dataclass
class OracleCase:
    """One folder of tests/oracle: a checkpoint as the Hub holds it and what the reference computed with it."""

    name: str
    folder: Path
    vectors: dict[str, np.ndarray]
    meta: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def self_conditioning(self) -> np.ndarray:
        v = self.vectors
        return v["sc_logits"] if "sc_logits" in v else v["sc_logits_A"] @ v["sc_logits_B"]


_cases: dict[str, OracleCase] = {}


def oracle_case(name: str) -> OracleCase:
    if name not in _cases:
        folder = ORACLE / name
        with np.load(folder / "vectors.npz") as data:
            vectors = dict(data)
        _cases[name] = OracleCase(name, folder, vectors, json.loads((folder / "meta.json").read_text()))
    return _cases[name]


@pytest.fixture(params=TEXT_CASES)
def case(request: pytest.FixtureRequest) -> OracleCase:
    return oracle_case(request.param)


class RecordedNoise:
    """The random numbers of a recorded trace, as a NoiseSource."""

    def __init__(self, case: OracleCase, trace: str):
        v, prefix = case.vectors, f"trace_{trace}__"
        self.initial, self.ids, self.u = (v[prefix + n] for n in ("rand_init_canvas", "rand_renoise", "rand_uniform"))
        numbers = zip(v[prefix + "canvas_index"], v[prefix + "step_number"], strict=True)
        self.row = {(int(canvas), int(number) - 1): i for i, (canvas, number) in enumerate(numbers)}

    def initial_canvas(self, canvas_index: int) -> np.ndarray:
        return self.initial[canvas_index]

    def renoise(self, canvas_index: int, step: int) -> np.ndarray:
        return self.ids[self.row[canvas_index, step]]

    def uniforms(self, canvas_index: int, step: int) -> np.ndarray:
        return self.u[self.row[canvas_index, step]].astype(np.float64)
