"""`synth`: a model of random weights, for benchmarks."""

from pathlib import Path

import click

from .options import format_bytes
from .write_progress import write_progress


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    type=click.Choice(["26b-a4b", "small", "tiny"]),
    default="tiny",
    show_default=True,
    help="Shapes: the real model's (14.6 GB), or smaller ones (0.3 GB, 5 MB).",
)
@click.option("--layers", type=click.IntRange(min=1), default=None, help="Keep only so many of the first layers.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed, the same bytes.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads that draw weights.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def synth(target: Path, preset: str, layers: int | None, seed: int, threads: int, quiet: bool) -> None:
    """Write a random-weight model of true shapes, in Q40, to the new folder TARGET.

    It runs like a real model and says nothing that makes sense.
    """
    from ..checkpoint.synth import synthesize

    with write_progress("writing", quiet) as progress:
        done = synthesize(target, preset, layers=layers, seed=seed, progress=progress, threads=threads)
    if quiet:
        return
    click.echo(
        f"{done.path}: {done.parameters:,} parameters, {format_bytes(done.nbytes)} in {done.shards} "
        f"file{'s' if done.shards > 1 else ''}, {done.seconds:.1f} s"
    )
