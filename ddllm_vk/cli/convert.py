"""`convert`: a checkpoint into a Q40 model folder."""

from pathlib import Path

import click

from .options import format_bytes
from .write_progress import write_progress


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--embedding",
    type=click.Choice(["q80", "q40", "f16"]),
    default="q80",
    show_default=True,
    help="Format of the embedding, which is also the head.",
)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads that quantise.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def convert(source: Path, target: Path, embedding: str, threads: int, quiet: bool) -> None:
    """Convert the model folder SOURCE to Q40 in the new folder TARGET.

    Streams, so that memory stays small for any size. TARGET appears when everything is written and read back; an
    interrupted run is continued by the same command.
    """
    from ..checkpoint.convert import convert as convert_checkpoint

    with write_progress("converting", quiet) as progress:
        done = convert_checkpoint(source, target, embedding=embedding, progress=progress, threads=threads)
    if quiet:
        return
    if done.restarted:
        click.echo("an earlier unfinished conversion was of another source or other options: started over", err=True)
    if done.resumed:
        click.echo(f"continued an earlier run: {done.resumed} tensors were there", err=True)
    if done.kept:
        names = ", ".join(done.kept[:3]) + (", ..." if len(done.kept) > 3 else "")
        click.echo(f"left as stored (rows are not a multiple of 32): {len(done.kept)} tensors: {names}", err=True)
    formats = ", ".join(f"{count} {fmt}" for fmt, count in sorted(done.formats.items()))
    click.echo(
        f"{done.path}: {format_bytes(done.source_bytes)} -> {format_bytes(done.target_bytes)} in {done.shards} "
        f"file{'s' if done.shards > 1 else ''} ({formats} tensors), verified, {done.seconds:.1f} s"
    )
