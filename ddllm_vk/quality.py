"""Quality of a model on the tasks of tasks.py: exact answers counted, with confidence intervals, on any backend."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .diffusion import GenerationConfig, OnCanvas, OnStep, Result
from .errors import InputError
from .loader import Model
from .tasks import Example, check, held_out


@dataclass
class TaskScore:
    """Right answers of one task. `low` and `high` bound the accuracy with 95% confidence (Wilson's interval)."""

    task: str
    questions: int
    right: int
    mean_steps: float  #: denoising steps a canvas
    seconds: float  #: of generation, all questions together

    @property
    def accuracy(self) -> float:
        return self.right / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.right, self.questions)


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The interval that holds a proportion with 95% confidence (Wilson 1927), also near 0 and 1."""
    p = right / total
    middle = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def answer(
    model: Model,
    example: Example,
    config: GenerationConfig,
    on_step: OnStep | None = None,
    on_canvas: OnCanvas | None = None,
) -> tuple[Result, bool]:
    """The model's reply to one question and whether it is right."""
    result = model.generate(example.prompt, config, on_step=on_step, on_canvas=on_canvas)
    return result, check(example, result.text)


def score(
    model: Model,
    task: str,
    count: int,
    config: GenerationConfig,
    seed: int = 0,
    on_answer: Callable[[Example, Result, bool], Any] | None = None,
    ask: Callable[[Model, Example, GenerationConfig], tuple[Result, bool]] = answer,
) -> TaskScore:
    """Asks `count` held-out questions of a task. `seed` chooses the questions, `config.seed` the sampling; `ask` puts
    one to the model."""
    right = steps = canvases = 0
    seconds = 0.0
    try:
        examples = held_out(task, count, seed)
    except ValueError as e:
        raise InputError(f"{e}; ask for fewer") from None
    for example in examples:
        result, correct = ask(model, example, config)
        right += correct
        steps += sum(result.stats.steps)
        canvases += len(result.stats.steps)
        seconds += result.stats.seconds
        if on_answer is not None:
            on_answer(example, result, correct)
    return TaskScore(task, count, right, steps / max(canvases, 1), seconds)
