"""`ddllm_vk bench`: how long loading, encoder passes and canvas passes take."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from .options import format_bytes, load, model_options

DEFAULT_CONTEXT = 256


class CountList(click.ParamType):
    """Comma-separated integers that are not negative."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            counts = [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of integers", param, ctx)
        if min(counts) < 0:
            self.fail(f"{min(counts)} is negative", param, ctx)
        return counts


@click.command(short_help="Time loading, encoder and canvas passes of a model.")
@model_options
@click.option(
    "--context",
    type=CountList(),
    metavar="N[,N...]",
    help=f"Prompt lengths in tokens, 0 for none.  [default: {DEFAULT_CONTEXT}, or what the model's context holds]",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Times each pass is measured, after one that is not.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help='Write the figures as JSON to FILE, or "-" for standard output.',
)
def bench(
    model_path: Path | None,
    backend: str,
    device: int | None,
    gpu_runtime: str,
    weights: str,
    activations: str,
    threads: int | None,
    context: list[int] | None,
    repeat: int,
    json_path: str | None,
) -> None:
    """Time a model's passes: the encoder over random prompts, and canvas passes after them.

    A canvas pass is one denoising step as in generate, without the sampler's decisions: the first of a canvas has no
    self-conditioning, later ones have.
    """  # fmt: skip
    started = time.perf_counter()
    choices = {"backend": backend, "device": device, "gpu_runtime": gpu_runtime}
    choices |= {"weights": weights, "activations": activations}
    model = load(model_path, threads, show_progress=True, **choices)
    load_seconds = time.perf_counter() - started
    from ..cpu.threads import default_threads
    from ..loader import peak_memory_bytes

    config = model.config
    room = config.max_position_embeddings - config.canvas_length
    contexts = context or [max(min(DEFAULT_CONTEXT, room), 1)]
    if max(contexts) > room:
        raise InputError(
            f"--context {max(contexts)} and a canvas of {config.canvas_length} exceed the model's context of"
            f" {config.max_position_embeddings}; use at most {room}"
        )
    figures = {
        "model": str(model.path),
        **choices,
        "backend": model.backend,
        "threads": threads or default_threads(),
        "canvas_length": config.canvas_length,
        "weight_bytes": int(model.weight_bytes),
        "load_seconds": load_seconds,
        "repeat": repeat,
        "contexts": [measure(model, length, repeat) for length in contexts],
        "peak_memory_bytes": peak_memory_bytes(),
    }
    print_figures(figures, to_stderr=json_path == "-")
    if json_path is not None:
        write_json(figures, json_path)


def measure(model: Any, context: int, repeat: int) -> dict[str, Any]:
    """Seconds of `repeat` encoder passes over `context` random tokens and of canvas passes after them."""
    import numpy as np

    config = model.config
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, context, dtype=np.int32)
    canvas = rng.integers(0, config.vocab_size, config.canvas_length, dtype=np.int32)
    uniforms = rng.random(config.canvas_length)
    temperature = model.generation_defaults.t_max
    session = model.session()
    encode, first, later = [], [], []
    for _ in range(repeat + 1):
        session.reset()
        encode.append(seconds(lambda: session.encode(prompt)) if context else 0.0)
        session.begin_canvas()
        first.append(seconds(lambda: session.canvas_step(canvas, temperature, uniforms)))
        later.append(seconds(lambda: session.canvas_step(canvas, temperature, uniforms)))
    spread = {"encode": encode, "canvas_first": first, "canvas": later}
    return {
        "context": context,
        **{f"{name}_seconds": {"min": min(t[1:]), "median": statistics.median(t[1:])} for name, t in spread.items()},
        "prefill_tokens_per_second": context / min(encode[1:]) if context else 0.0,
        "canvas_rows_per_second": config.canvas_length / min(later[1:]),
    }


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def print_figures(figures: dict[str, Any], to_stderr: bool) -> None:
    from rich.table import Table

    from .tables import print_table

    click.echo(
        f"{figures['model']}: weights {format_bytes(figures['weight_bytes'])},"
        f" loaded in {figures['load_seconds']:.2f} s, canvas of {figures['canvas_length']},"
        f" {figures['threads']} threads, backend {figures['backend']}",
        err=to_stderr,
    )
    table = Table(title=f"encoder and canvas passes in seconds, min / median of {figures['repeat']}")
    for name in ("context", "encoder", "tokens/s", "first pass", "later pass", "rows/s"):
        table.add_column(name, justify="right")
    for row in figures["contexts"]:
        table.add_row(
            str(row["context"]),
            _spread(row["encode_seconds"]),
            f"{row['prefill_tokens_per_second']:.1f}",
            _spread(row["canvas_first_seconds"]),
            _spread(row["canvas_seconds"]),
            f"{row['canvas_rows_per_second']:.1f}",
        )
    print_table(table, to_stderr)
    click.echo(f"peak memory {format_bytes(figures['peak_memory_bytes'])}", err=to_stderr)


def _spread(times: dict[str, float]) -> str:
    return f"{times['min']:.3g} / {times['median']:.3g}"


def write_json(figures: dict[str, Any], path: str) -> None:
    text = json.dumps(figures, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise InputError(f"{target}: cannot be written ({e.strerror}); choose another --json file") from None
