"""`ddllm_vk warmup`: compiles the CPU kernels before they are needed."""

import sys
import time

import click


@click.command(short_help="Compile the CPU kernels before they are needed.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def warmup(quiet: bool) -> None:
    """Compile every CPU kernel for this machine and keep the code on disk.

    Without it, kernels are compiled when a model first needs them. A second run finds nothing to do.
    """
    from ..cpu import isa, jit
    from ..warmup import warm_up

    progress = sys.stderr.isatty() and not quiet

    def show(name: str, ready: int, total: int) -> None:
        click.echo(f"\r\x1b[Kcompiling {name} ({ready} of {total} kernels are ready)", err=True, nl=False)

    if jit.is_cold() and not progress and not quiet:
        click.echo(f"compiling the CPU kernels for {isa.ACTIVE.name}, which takes half a minute", err=True)
    started = time.perf_counter()
    try:
        compiled = warm_up(show if progress else None)
    finally:
        if progress:
            click.echo("\r\x1b[K", err=True, nl=False)
    if quiet:
        return
    where = f"for {isa.ACTIVE.name} in {jit.CACHE_FOLDER}"
    if compiled:
        click.echo(f"compiled {compiled} kernels {where} in {time.perf_counter() - started:.1f} s")
    else:
        click.echo(f"nothing to do: all kernels are compiled {where}")
