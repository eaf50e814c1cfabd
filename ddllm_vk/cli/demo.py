"""`ddllm_vk demo`: held-out questions of every task, the canvas live, and whether the answers are right."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ..tasks import TASKS
from .generate import live_console
from .options import load, model_options


@click.command(short_help="Ask the bundled model held-out questions and check its answers.")
@model_options
@click.option(
    "--task",
    "tasks",
    type=click.Choice(list(TASKS)),
    multiple=True,
    help="Only this task; may be repeated.  [default: all]",
)
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Questions a task."
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Denoising steps a canvas at most.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, metavar="N", help="Of the sampling."
)
@click.option(
    "--questions",
    "question_seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Which held-out questions are drawn.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the accuracy of every task.")
@click.option("--quiet", "-q", is_flag=True, help="Print the table of accuracies only.")  # fmt: skip
def demo(
    model_path: Path | None,
    backend: str,
    device: int | None,
    gpu_runtime: str,
    weights: str,
    activations: str,
    kv_cache: str | None,
    threads: int | None,
    tasks: tuple[str, ...],
    count: int,
    steps: int | None,
    seed: int,
    question_seed: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what the bundled model can do, on questions it was not trained on.

    With --count and --json this is the quality benchmark of a model and a backend: exact answers, with the 95%
    confidence interval of the accuracy.
    """
    choices = {"backend": backend, "device": device, "gpu_runtime": gpu_runtime}
    choices |= {"weights": weights, "activations": activations, "kv_cache": kv_cache}
    model = load(model_path, threads, show_progress=not quiet, **choices)
    choices["kv_cache"] = model.kv_cache

    import ddllm_vk

    from ..quality import score

    config = ddllm_vk.GenerationConfig(seed=seed, max_denoising_steps=steps)
    scores = []
    for task in dict.fromkeys(tasks or TASKS):
        if quiet or as_json:
            scores.append(score(model, task, count, config, question_seed))
            continue
        click.secho(f"\n{TASKS[task].title}", bold=True)
        if count == 1 and live_console() is not None:
            scores.append(score(model, task, 1, config, question_seed, show_verdict, ask_live))
        else:
            scores.append(score(model, task, count, config, question_seed, show_answer))
    if as_json:
        shown = {"model": str(model.path), **choices, "seed": seed, "questions_seed": question_seed,
                 "tasks": [score_object(s) for s in scores]}  # fmt: skip
        click.echo(json.dumps(shown, ensure_ascii=False))
    elif quiet or count > 1:
        print_scores(scores)


def score_object(score: Any) -> dict[str, Any]:
    low, high = score.interval
    return {**dataclasses.asdict(score), "accuracy": score.accuracy, "low": low, "high": high}


def show_answer(example: Any, result: Any, correct: bool) -> None:
    """One question and its answer on stdout."""
    click.echo(f"\n{indented(example.prompt)}\n")
    show_verdict(example, result, correct)


def show_verdict(example: Any, result: Any, correct: bool) -> None:
    click.secho(indented(result.text or "(nothing)"), fg="green" if correct else "red")
    steps = sum(result.stats.steps)
    verdict = "right" if correct else f"wrong; right is: {example.answer!r}"
    click.echo(f"  -> {verdict} ({steps} steps, {result.stats.seconds * 1000:.0f} ms)")


def ask_live(model: Any, example: Any, config: Any) -> tuple[Any, bool]:
    """One question, with the canvas shown while it denoises."""
    from ..quality import answer
    from .live import LiveCanvas

    click.echo(f"\n{indented(example.prompt)}\n")
    ends = frozenset(config.over(model.generation_defaults).eos_token_ids) | model.tokenizer.control.ends
    with LiveCanvas(live_console(), model.tokenizer, ends) as view:
        return answer(model, example, config, on_step=view.on_step, on_canvas=view.on_canvas)


def indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def print_scores(scores: list[Any]) -> None:
    from rich.table import Table

    from .tables import print_table

    table = Table("task", "questions", "right", "accuracy", "95% interval", "steps", "seconds")
    for s in scores:
        low, high = s.interval
        table.add_row(
            s.task,
            str(s.questions),
            str(s.right),
            f"{s.accuracy:.1%}",
            f"{low:.1%} - {high:.1%}",
            f"{s.mean_steps:.1f}",
            f"{s.seconds / s.questions:.3f}",
        )
    table.caption = "steps: passes a canvas; seconds: a question"
    print_table(table)
