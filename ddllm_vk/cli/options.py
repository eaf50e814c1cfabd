"""Options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..units import format_bytes as format_bytes  # commands take it from here


class FiniteFloat(click.FloatRange):
    """A float range that refuses nan and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


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


_MODEL_OPTIONS = (
    click.option("--model", "model_path", type=click.Path(path_type=Path), metavar="PATH",
                 help="A model folder.  [default: the bundled model]"),
    click.option("--backend", type=click.Choice(["cpu", "vulkan", "auto"]), default="cpu", show_default=True,
                 help="What computes; auto: the GPU if one can be used."),
    click.option("--device", type=click.IntRange(min=0), metavar="N",
                 help="Vulkan device, as `devices` lists them.  [default: the first GPU]"),
    click.option("--gpu-runtime", type=click.Choice(["auto", "vulkan", "kompute"]), default="auto", show_default=True,
                 help="How a Vulkan device is driven."),
    click.option("--weights", type=click.Choice(["stored", "f32", "q40"]), default="stored", show_default=True,
                 help="What to hold in memory: the weights as stored, all float32, or quantised to Q40."),
    click.option("--activations", type=click.Choice(["q80", "f32"]), default="q80", show_default=True,
                 help="Inputs of products with Q40 weights."),
    click.option("--kv-cache", type=click.Choice(["f16", "q80", "f32"]), default=None,
                 help="What keys and values are stored as.  [default: f16; f32 where nothing else is rounded]"),
    click.option("--threads", type=click.IntRange(min=1), metavar="N", help="[default: one a physical core]"),
)  # fmt: skip


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --model, --backend, --device, --gpu-runtime, --weights, --activations, --kv-cache, --threads: what load()
    takes."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


def load(model_path: Path | None, threads: int | None, show_progress: bool, **choices: Any) -> Any:
    """ddllm_vk.load_model with the choices of model_options, and a progress bar on stderr where that is a terminal."""
    import ddllm_vk

    from ..cpu.jit import is_cold
    from .live import loading_bar

    if is_cold() and show_progress:
        click.echo("first run here: compiling the CPU kernels, which takes about half a minute once", err=True)
    with loading_bar(show_progress) as bar:
        return ddllm_vk.load_model(model_path, threads=threads, progress=bar.update, **choices)
