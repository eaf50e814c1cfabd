"""Counting right answers: the tasks' questions, the interval, and the demo command."""

import json

import pytest

from ddllm_vk import InputError
from ddllm_vk.cli import run
from ddllm_vk.diffusion import GenerationConfig
from ddllm_vk.loader import load_model
from ddllm_vk.quality import score, wilson_interval
from ddllm_vk.tasks import TASKS, check, held_out, is_held_out, training_example


def test_wilson_interval():
    """Published values: 95% intervals of 81 of 263, and of 0 and 20 of 20 (Newcombe 1998)."""
    low, high = wilson_interval(81, 263)
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-4)
    assert wilson_interval(20, 20) == pytest.approx((0.8389, 1.0), abs=5e-4)


@pytest.mark.parametrize("task", TASKS)
def test_questions_are_repeatable_and_their_answers_count_as_right(task: str):
    examples = held_out(task, 20, seed=3)
    assert examples == held_out(task, 20, seed=3)
    assert examples != held_out(task, 20, seed=4)
    assert len({e.prompt for e in examples}) == 20
    for e in examples:
        assert check(e, e.answer)
        assert check(e, f" {e.answer} \n")
        assert not check(e, e.answer + "x")
        assert not check(e, "")


@pytest.mark.parametrize("task", TASKS)
def test_training_never_sees_a_held_out_question(task: str):
    import random

    asked = {e.prompt for e in held_out(task, 200)}
    rng = random.Random(0)
    for _ in range(300):
        assert training_example(rng, task).prompt not in asked


def test_sums_are_held_out_with_their_mirror_image():
    keys = {(a, b): e.key for e in held_out("arithmetic", 100) if "+" in e.prompt for a, b in [_operands(e.prompt)]}
    assert keys
    for (a, b), key in keys.items():
        assert is_held_out("arithmetic", key)
        assert str(min(a, b)) in key
        assert str(max(a, b)) in key


def _operands(prompt: str) -> tuple[int, int]:
    a, b = prompt.removeprefix("What is ").removesuffix("?").split(" + ")
    return int(a), int(b)


def test_score_counts_what_check_accepts():
    model = load_model()
    told = []
    result = score(model, "reverse", 5, GenerationConfig(), on_answer=lambda *answer: told.append(answer))
    assert result.questions == len(told) == 5
    assert result.right == sum(correct for _, _, correct in told)
    assert all(correct == check(e, r.text) for e, r, correct in told)
    assert result.mean_steps == sum(sum(r.stats.steps) for _, r, _ in told) / 5


def test_more_questions_than_there_are():
    with pytest.raises(InputError, match="held-out questions"):
        score(load_model(), "facts", 10**6, GenerationConfig())


def test_demo_as_json(capsys: pytest.CaptureFixture[str]):
    assert run(["demo", "--task", "sort", "--task", "reverse", "--count", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [t["task"] for t in shown["tasks"]] == ["sort", "reverse"]
    assert all(t["questions"] == 3 and t["low"] <= t["accuracy"] <= t["high"] for t in shown["tasks"])


def test_demo_says_whether_an_answer_is_right(capsys: pytest.CaptureFixture[str]):
    assert run(["demo", "--task", "sort"]) == 0
    out = capsys.readouterr().out
    assert "Sort the letters" in out
    assert "-> right" in out or "-> wrong" in out
