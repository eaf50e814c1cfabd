"""`ddllm_vk generate`: a prompt in, text out; a live canvas in a terminal, plain text in a pipe, or one JSON object."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import INTERRUPTED
from .options import FiniteFloat, format_bytes, load, model_options

if TYPE_CHECKING:
    from ..diffusion import Canvas, Result, Settings, StepInfo


@click.command(short_help="Answer a prompt.")
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option("--prompt", "prompt_option", metavar="TEXT", help="The prompt, instead of the argument.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@model_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens to write at most.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Denoising steps a canvas at most.")
@click.option("--t-max", type=FiniteFloat(min=0, min_open=True), metavar="T", help="Temperature of the first step.")
@click.option("--t-min", type=FiniteFloat(min=0, min_open=True), metavar="T", help="Temperature after the last step.")
@click.option("--entropy-bound", type=FiniteFloat(min=0), metavar="NATS", help="How much doubt a step accepts at once.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, metavar="N")
@click.option("--no-guard", is_flag=True, help="Allow an empty reply.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: text, ids, finish_reason, stats, settings."
)
@click.option("--quiet", "-q", is_flag=True, help="Print the text only: no live view, no summary.")
@click.pass_context
def generate(
    ctx: click.Context,
    words: tuple[str, ...],
    prompt_option: str | None,
    system: str | None,
    raw: bool,
    model_path: Path | None,
    backend: str,
    device: int | None,
    gpu_runtime: str,
    weights: str,
    activations: str,
    kv_cache: str | None,
    threads: int | None,
    max_new_tokens: int | None,
    steps: int | None,
    t_max: float | None,
    t_min: float | None,
    entropy_bound: float | None,
    seed: int,
    no_guard: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Answer PROMPT with a diffusion language model.

    Without PROMPT, or with "-", the prompt is read from standard input. Sampling options default to the model's own
    values. The text goes to standard output, everything else to standard error.
    """
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template; leave out --raw")
    if t_min is not None and t_max is not None and t_min > t_max:
        raise click.UsageError(f"--t-min {t_min} is above --t-max {t_max}")
    text = read_prompt(" ".join(words) if words else None, prompt_option)
    choices = {"backend": backend, "device": device, "gpu_runtime": gpu_runtime}
    choices |= {"weights": weights, "activations": activations, "kv_cache": kv_cache}
    model = load(model_path, threads, show_progress=not quiet, **choices)
    choices["kv_cache"] = model.kv_cache

    import ddllm_vk

    from .live import encoding_bar

    config = ddllm_vk.GenerationConfig(
        max_new_tokens=max_new_tokens,
        max_denoising_steps=steps,
        t_max=t_max,
        t_min=t_min,
        entropy_bound=entropy_bound,
        seed=seed,
        guard_empty_reply=not no_guard,
    )
    try:
        settings = config.over(model.generation_defaults)
    except ddllm_vk.InputError as e:  # options that do not go with the model's own values
        raise click.UsageError(str(e).replace("t_min", "--t-min").replace("t_max", "--t-max")) from None
    messages = [*([{"role": "system", "content": system}] if system is not None else [])]
    messages.append({"role": "user", "content": text})
    ids = model.tokenizer.encode(text) if raw else model.tokenizer.apply_chat_template(messages)

    with stop_on_interrupt() as stop:
        if as_json:
            with encoding_bar(enabled=not quiet) as bar:
                result = model.generate(ids, config, on_step=stop.on_step, on_encode=stop.watching(bar.update))
            shown = as_json_object(result, settings, {"model": str(model.path), **choices})
            write(json.dumps(shown, ensure_ascii=False) + "\n")
        elif not quiet and live_console() is not None:
            result = generate_live(model, ids, config, settings, stop)
        else:
            result = generate_plain(model, ids, config, settings, stop, show_progress=not quiet)
    if not quiet:
        click.echo(summary(result), err=True)
    for warning in warnings(result):
        click.echo(warning, err=True)
    if result.finish_reason == "cancelled":
        ctx.exit(INTERRUPTED)


def read_prompt(argument: str | None, option: str | None) -> str:
    """The prompt from where it is given. Raises click.UsageError when there is none, two, or an empty one."""
    if argument is not None and option is not None:
        raise click.UsageError("the prompt is given twice, as an argument and with --prompt")
    text = option if option is not None else argument
    if text is None or (text == "-" and option is None):
        if sys.stdin is None or (text is None and sys.stdin.isatty()):
            raise click.UsageError("no prompt: give it as an argument, with --prompt, or on standard input")
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as e:
            raise click.UsageError(f"standard input is not UTF-8 text (byte {e.start})") from None
        text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


class Stop:
    """Set by the first Ctrl-C; ends the generation after the pass that is running."""

    message = "stopping after this step; Ctrl-C again aborts"

    def __init__(self) -> None:
        self.requested = False
        self.announce: Callable[[str], object] = say_on_terminal

    def on_step(self, _step: "StepInfo") -> bool:
        return not self.requested

    def watching(self, on_encode: Callable[[int, int], object]) -> Callable[[int, int], bool]:
        """That callback, and an end of the encoding when asked to stop."""

        def call(done: int, total: int) -> bool:
            on_encode(done, total)
            return not self.requested

        return call


def say_on_terminal(message: str) -> None:
    """Safe in a signal handler: no Python buffer is involved."""
    if os.isatty(2):
        os.write(2, f"{message}\n".encode())


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """While inside, the first SIGINT only asks to stop, the second raises KeyboardInterrupt."""
    stop = Stop()

    def handle(_signal: int, _frame: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        stop.announce(stop.message)

    if threading.current_thread() is not threading.main_thread():  # only there can a handler be set
        yield stop
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def live_console() -> Any:
    """A rich Console on stdout if that is a terminal which can be redrawn, else None."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def generate_live(model: Any, ids: list[int], config: Any, settings: "Settings", stop: Stop) -> "Result":
    """Shows the canvas denoising; the text alone stays."""
    from .live import LiveCanvas, printable

    end_ids = frozenset(settings.eos_token_ids) | model.tokenizer.control.ends
    with LiveCanvas(live_console(), model.tokenizer, end_ids) as view:
        stop.announce = view.say

        def on_step(step: "StepInfo") -> bool:
            view.on_step(step)
            return stop.on_step(step)

        result = model.generate(
            ids, config, on_step=on_step, on_canvas=view.on_canvas, on_encode=stop.watching(view.on_encode)
        )
    write_text(printable(result.text))
    return result


def generate_plain(
    model: Any, ids: list[int], config: Any, settings: "Settings", stop: Stop, show_progress: bool
) -> "Result":
    """Writes each canvas's text as soon as the canvas is finished."""
    from .live import encoding_bar

    written = ""
    clean = terminal_cleaner()
    on_canvas = canvas_streamer(model.tokenizer, settings)

    def stream(canvas: "Canvas") -> None:
        nonlocal written
        delta = on_canvas(canvas)
        written += delta
        write(clean(delta))

    with encoding_bar(show_progress) as bar:
        result = model.generate(
            ids, config, on_step=stop.on_step, on_canvas=stream, on_encode=stop.watching(bar.update)
        )
    rest = result.text.removeprefix(written) if result.text.startswith(written) else ""
    write(clean(rest) + ("" if (written + rest).endswith("\n") or not written + rest else "\n"))
    return result


def canvas_streamer(tokenizer: Any, settings: "Settings") -> Callable[["Canvas"], str]:
    """A function from each finished canvas to the text it adds, within max_new_tokens and up to end-of-sequence."""
    from ..tokenizer import StreamDecoder

    decoder = StreamDecoder(tokenizer)
    left = settings.max_new_tokens

    def text_of(canvas: "Canvas") -> str:
        nonlocal left
        ids = [int(i) for i in canvas.ids][:left]
        end = next((row for row, i in enumerate(ids) if i in settings.eos_token_ids), None)
        left = left - len(ids) if end is None else 0
        return decoder.feed(ids if end is None else ids[: end + 1])

    return text_of


def terminal_cleaner() -> Callable[[str], str]:
    """Text for a terminal must not steer it; a file or pipe gets it as it is."""
    if not sys.stdout.isatty():
        return lambda text: text
    from .live import printable

    return printable


def write_text(text: str) -> None:
    if text:
        write(text if text.endswith("\n") else text + "\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def as_json_object(result: "Result", settings: "Settings", named: dict[str, str]) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": [int(i) for i in result.ids],
        "finish_reason": result.finish_reason,
        "stats": dataclasses.asdict(result.stats),
        "settings": {**named, **dataclasses.asdict(settings)},
    }


def summary(result: "Result") -> str:
    """One line of figures for stderr."""
    s = result.stats
    passes = ", ".join(str(n) for n in s.steps[:8]) + (", ..." if len(s.steps) > 8 else "")
    if s.passes > sum(s.steps):
        passes += f"{', ' if passes else ''}{s.passes - sum(s.steps)} (interrupted)"
    return (
        f"prompt {_count(s.prompt_tokens, 'token')}, reply {_count(s.new_tokens, 'token')}"
        f" in {_count(s.canvases, 'canvas', 'canvases')}, steps {passes or '0'}, {s.tokens_per_pass:.1f} tokens/pass,"
        f" {s.seconds:.2f} s, {s.tokens_per_second:.1f} tokens/s, memory {format_bytes(s.peak_memory_bytes)},"
        f" end: {result.finish_reason}"
    )


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def warnings(result: "Result") -> list[str]:
    """What the reader of an unusual text should know, --quiet or not."""
    if result.finish_reason == "cancelled":
        done = _count(len(result.canvases), "finished canvas", "finished canvases")
        return [
            f"interrupted: the text is of {done}" if result.canvases else "interrupted before a canvas was finished"
        ]
    if result.text.strip():
        if not result.stats.unsettled:
            return []
        named = ", ".join(str(i + 1) for i in result.stats.unsettled[:8])
        return [f"note: canvas {named} ran out of steps before it settled; its text may be rough"]
    if result.finish_reason == "length":
        return ["warning: the reply is empty: all tokens went into a thought or control tokens; raise --max-new-tokens"]
    return ["warning: the reply is empty: the model ended it without text; try another --seed or wording"]
