"""`ddllm_vk bench`: how long loading, encoder passes and canvas passes take."""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .options import CountList, format_bytes, load, model_options

if TYPE_CHECKING:
    from ..cpu.peak import Peaks

DEFAULT_CONTEXT = 256


@click.command(short_help="Time loading, encoder and canvas passes of a model.")
@model_options
@click.option(
    "--context",
    type=CountList(),
    metavar="N[,N...]",
    help=f"Prompt lengths in tokens, 0 for none.  [default: {DEFAULT_CONTEXT}, or what the model's context holds]",
)
@click.option(
    "--synthetic-context",
    is_flag=True,
    help="Fill the cache with random numbers instead of encoding --context tokens, and time one more encoder pass.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Times each pass is measured, after one that is not.",
)
@click.option("--profile", is_flag=True, help="Also show where a canvas pass's time goes, by operation and kernel.")
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
    kv_cache: str | None,
    threads: int | None,
    context: list[int] | None,
    synthetic_context: bool,
    repeat: int,
    profile: bool,
    json_path: str | None,
) -> None:
    """Time a model's passes: the encoder over random prompts, and canvas passes after them.

    A canvas pass is one denoising step as in generate, without the sampler's decisions: the first of a canvas has no
    self-conditioning, later ones have. Long contexts take long to encode: with --synthetic-context the passes see a
    cache of the same size and random contents, which takes them as long, and the encoder's time is that of the next
    tokens after it.
    """  # fmt: skip
    if json_path not in (None, "-"):
        check_writable(json_path)
    started = time.perf_counter()
    choices = {"backend": backend, "device": device, "gpu_runtime": gpu_runtime}
    choices |= {"weights": weights, "activations": activations, "kv_cache": kv_cache}
    model = load(model_path, threads, show_progress=True, **choices)
    choices["kv_cache"] = model.kv_cache
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
    peaks = None
    if profile:
        from ..cpu import peak

        peaks = peak.measure(peak.ThreadPool(threads))
    figures = {
        "model": str(model.path),
        **choices,
        "backend": model.backend,
        "threads": threads or default_threads(),
        "canvas_length": config.canvas_length,
        "weight_bytes": int(model.weight_bytes),
        "load_seconds": load_seconds,
        "repeat": repeat,
        "synthetic_context": synthetic_context,
        "contexts": [measure(model, length, repeat, synthetic_context, peaks) for length in contexts],
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if peaks is not None:
        figures["peaks"] = asdict(peaks)
    print_figures(figures, to_stderr=json_path == "-")
    if json_path is not None:
        write_json(figures, json_path)


def measure(
    model: Any, context: int, repeat: int, synthetic: bool = False, peaks: "Peaks | None" = None
) -> dict[str, Any]:
    """Seconds of `repeat` encodings and of canvas passes after `context` tokens; with the processor's peaks, also the
    profile of the later passes.

    The tokens are random and are what is encoded. If synthetic, the keys and values are random instead, and what is
    encoded is one encoder pass after them.
    """
    import numpy as np

    from ..cache import ENCODER_CHUNK
    from .live import encoding_bar

    config = model.config
    rng = np.random.default_rng(0)
    encoded = min(ENCODER_CHUNK, config.max_position_embeddings - context) if synthetic else context
    prompt = rng.integers(0, config.vocab_size, encoded, dtype=np.int32)
    canvas = rng.integers(0, config.vocab_size, config.canvas_length, dtype=np.int32)
    uniforms = rng.random(config.canvas_length)
    temperature = model.generation_defaults.t_max
    session = model.session()
    encode, first, later = [], [], []
    with encoding_bar(enabled=True) as bar:
        for _ in range(repeat + 1):
            session.reset()
            if synthetic:
                session.fill_with_random_context(context)
            encode.append(seconds(lambda: session.encode(prompt, bar.update)) if encoded else 0.0)
            if synthetic:
                session.fill_with_random_context(context)
            session.begin_canvas()
            first.append(seconds(lambda: session.canvas_step(canvas, temperature, uniforms)))
            later.append(seconds(lambda: session.canvas_step(canvas, temperature, uniforms)))
    spread = {"encode": encode, "canvas_first": first, "canvas": later}
    profiled = {}
    if peaks is not None:
        from ..backends.profile import profile

        step = partial(session.canvas_step, canvas, temperature, uniforms)
        profiled = {"profile": profile(session, step, repeat, peaks)}
    return {
        "context": context,
        "encoded_tokens": encoded,
        "kv_cache_bytes": session.cache.nbytes,
        **{f"{name}_seconds": {"min": min(t[1:]), "median": statistics.median(t[1:])} for name, t in spread.items()},
        "prefill_tokens_per_second": encoded / min(encode[1:]) if encoded else 0.0,
        "canvas_rows_per_second": config.canvas_length / min(later[1:]),
        **profiled,
    }


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def print_figures(figures: dict[str, Any], to_stderr: bool) -> None:
    from rich.table import Table

    from .profile_tables import print_profile
    from .tables import print_table

    click.echo(
        f"{figures['model']}: weights {format_bytes(figures['weight_bytes'])},"
        f" loaded in {figures['load_seconds']:.2f} s, canvas of {figures['canvas_length']},"
        f" {figures['threads']} threads, backend {figures['backend']},"
        f" KV cache {figures['kv_cache']}",
        err=to_stderr,
    )
    contexts = "random cache" if figures["synthetic_context"] else "random tokens"
    table = Table(title=f"encoder and canvas passes in seconds, min / median of {figures['repeat']}, {contexts}")
    for name in ("context", "encoded", "encoder", "tokens/s", "first pass", "later pass", "rows/s", "KV cache"):
        table.add_column(name, justify="right")
    for row in figures["contexts"]:
        table.add_row(
            str(row["context"]),
            str(row["encoded_tokens"]),
            _spread(row["encode_seconds"]),
            f"{row['prefill_tokens_per_second']:.1f}",
            _spread(row["canvas_first_seconds"]),
            _spread(row["canvas_seconds"]),
            f"{row['canvas_rows_per_second']:.1f}",
            format_bytes(row["kv_cache_bytes"]),
        )
    print_table(table, to_stderr)
    for row in figures["contexts"]:
        if "profile" in row:
            print_profile(row["profile"], figures["peaks"], row["context"], to_stderr)
    click.echo(f"peak memory {format_bytes(figures['peak_memory_bytes'])}", err=to_stderr)


def _spread(times: dict[str, float]) -> str:
    return f"{times['min']:.3g} / {times['median']:.3g}"


def write_json(figures: dict[str, Any], path: str) -> None:
    text = json.dumps(figures, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path).resolve()
    part = target.with_name(target.name + ".part")
    try:
        if target.exists() and not target.is_file():  # a pipe or a device is written to, not replaced
            target.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({e.strerror}); choose another --json file") from None


def check_writable(path: str) -> None:
    """Raises InputError for a --json file that cannot be written, before anything is measured for it."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise InputError(f"{path}: cannot be written ({folder} is no folder); choose another --json file")
    if not os.access(folder, os.W_OK) or len(os.fsencode(Path(path).name)) > 250:
        raise InputError(f"{path}: cannot be written; choose another --json file")
