"""Progress of commands that write a model, on stderr: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from ..checkpoint.writer import Progress, ProgressCallback
from .options import format_bytes

#: seconds between lines where there is no terminal
_INTERVAL = 10.0


@contextmanager
def write_progress(writing: str, quiet: bool) -> Iterator[ProgressCallback | None]:
    """A callback that shows Progress; `writing`: the word for the first phase; `quiet`: nothing is shown.

    An interrupt inside becomes one line and exit code 130.
    """
    labels = {"write": writing, "verify": "verifying"}
    try:
        if quiet:
            yield None
        elif sys.stderr.isatty():
            with _bar() as bar:
                yield _BarCallback(bar, labels)
        else:
            yield _LineCallback(labels)
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command again to continue where it stopped", err=True)
        raise click.exceptions.Exit(130) from None


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tensors]} tensors"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class _BarCallback:
    def __init__(self, bar: Bar, labels: dict[str, str]):
        self.bar, self.labels, self.phase = bar, labels, ""

    def __call__(self, p: Progress) -> None:
        tensors = f"{p.tensors}/{p.tensors_total}"
        if p.phase != self.phase:
            for task in self.bar.task_ids:
                self.bar.remove_task(task)
            # starting at what an earlier run had done, which must not count as speed
            label = self.labels[p.phase]
            self.task = self.bar.add_task(label, total=p.bytes_total, completed=p.bytes, tensors=tensors)
            self.phase = p.phase
        self.bar.update(self.task, completed=p.bytes, tensors=tensors)


class _LineCallback:
    def __init__(self, labels: dict[str, str]):
        self.labels, self.phase = labels, ""

    def __call__(self, p: Progress) -> None:
        now = time.monotonic()
        if p.phase != self.phase:
            self.phase, self.began, self.at_start, self.shown = p.phase, now, p.bytes, now
        finished = p.tensors == p.tensors_total
        if now - self.shown < _INTERVAL and not finished:
            return
        self.shown = now
        rate = (p.bytes - self.at_start) / max(now - self.began, 1e-3)
        left = f", {(p.bytes_total - p.bytes) / rate:.0f} s left" if rate and not finished else ""
        click.echo(
            f"{self.labels[p.phase]}: {p.tensors} of {p.tensors_total} tensors, {format_bytes(p.bytes)} of "
            f"{format_bytes(p.bytes_total)}, {rate / 1e6:.0f} MB/s{left}",
            err=True,
        )
