"""Batches of training examples as tensors, and the noise that is put on them.

A batch is of one shape, long or short, so that little of it is padding: Sudokus and JSON are long, the rest is short.
 Shapes: B examples, P prompt tokens, R canvas rows, V tokens in the vocabulary.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ddllm_vk.tasks import training_example
from training.model import CANVAS
from training.tokenizer import EOS, PAD, TURN_END, VOCABULARY_SIZE, chat_prompt

FILL_WEIGHT = 0.15  # of a row after the end of the turn, in the loss
TYPICAL_ANSWER = 14  # tokens; longer answers weigh less per row, by a power of 0.7


@dataclass(frozen=True)
class Shape:
    """One kind of batch: prompt tokens, rows of a reduced canvas, and the tasks' shares in each phase of training."""

    prompt: int
    reduced_rows: int
    phases: tuple[dict[str, float], ...]


# Arithmetic takes far longer than the other short tasks: it gets most of the room as soon as they have caught on, until
# it has too.
PHASE_STARTS = (0.0, 0.4, 0.7)  # of the schedule
SHAPES = {
    "short": Shape(
        30,
        20,
        (
            {"arithmetic": 43, "reverse": 7, "sort": 10, "facts": 20, "gap": 20},
            {"arithmetic": 78, "reverse": 3, "sort": 7, "facts": 6, "gap": 6},
            {"arithmetic": 40, "reverse": 6, "sort": 16, "facts": 12, "gap": 26},
        ),
    ),
    "long": Shape(
        58,
        56,
        (
            {"sudoku4": 20, "sudoku6": 50, "json": 30},
            {"sudoku4": 14, "sudoku6": 56, "json": 30},
            {"sudoku4": 12, "sudoku6": 58, "json": 30},
        ),
    ),
}


@dataclass(frozen=True)
class Batch:
    """ids int64 [B, P], real bool [B, P]; target, rows int64 [B, R]; weight float32 [B, R]; task names [B].

    several: bool [B], whether other answers than the target are right too.
    """

    ids: Tensor
    real: Tensor
    target: Tensor
    rows: Tensor
    weight: Tensor
    several: Tensor
    tasks: list[str]


def batch(
    rng: random.Random, tokenizer: Tokenizer, shape: Shape, size: int, reduced: bool, progress: float = 0.0
) -> Batch:
    """A batch of `size` training examples; a reduced one keeps the answers' rows and random ones of the fill.

    progress: how far the schedule is, from 0 to 1.
    """
    shares = shape.phases[sum(progress >= start for start in PHASE_STARTS[1:])]
    tasks = rng.choices(list(shares), weights=list(shares.values()), k=size)
    ids = torch.full((size, shape.prompt), PAD)
    real = torch.zeros(size, shape.prompt, dtype=torch.bool)
    count = shape.reduced_rows if reduced else CANVAS
    target = torch.full((size, CANVAS), EOS)
    weight = torch.full((size, CANVAS), FILL_WEIGHT)
    rows = torch.zeros(size, count, dtype=torch.int64)
    several = torch.zeros(size, dtype=torch.bool)
    for index, task in enumerate(tasks):
        example = training_example(rng, task)
        prompt = tokenizer.encode(chat_prompt(example.prompt), add_special_tokens=False).ids
        answer = [*tokenizer.encode(example.answer, add_special_tokens=False).ids, TURN_END]
        ids[index, -len(prompt) :] = torch.tensor(prompt)
        real[index, -len(prompt) :] = True
        target[index, : len(answer)] = torch.tensor(answer)
        several[index] = len(example.accepted) > 1
        weight[index, : len(answer)] = 1.0
        weight[index] *= (TYPICAL_ANSWER / len(answer)) ** 0.7
        kept = [*range(len(answer)), *rng.sample(range(len(answer), CANVAS), count - len(answer))]
        rows[index] = torch.tensor(sorted(kept))
    return Batch(ids, real, target.gather(1, rows), rows, weight.gather(1, rows), several, tasks)


def noised(target: Tensor) -> Tensor:
    """The targets with a share of their tokens replaced by random ones: all for 30 % of the examples, 5..100 % else."""
    count = target.shape[0]
    level = torch.where(torch.rand(count) < 0.3, torch.ones(count), 0.05 + 0.95 * torch.rand(count) ** 0.6)
    return torch.where(torch.rand(target.shape) < level[:, None], torch.randint(VOCABULARY_SIZE, target.shape), target)


def sampler_step(scaled: Tensor, target: Tensor, several: Tensor, entropy_bound: float = 0.1) -> Tensor:
    """The next canvas as the entropy-bound sampler makes it: int64 [B, R].

    scaled: float32 [B, R, V], logits over the temperature. Sampled tokens are accepted by ascending entropy while the
    entropies before them sum to no more than the bound; every other row gets a random token. Where there are `several`
    right answers, the target's token stands in for the sampled one: another right word beside this target would teach
    the model to doubt what it has chosen.
    """
    log_p = scaled.log_softmax(dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=-1)
    ordered, order = entropy.sort(dim=-1)
    accepted = torch.zeros_like(order, dtype=torch.bool).scatter(1, order, ordered.cumsum(1) - ordered <= entropy_bound)
    sampled = torch.multinomial(p.reshape(-1, p.shape[-1]), 1).reshape(entropy.shape)
    sampled = torch.where(several[:, None], target, sampled)
    return torch.where(accepted, sampled, torch.randint(VOCABULARY_SIZE, sampled.shape))
