"""What a terminal shows while a model loads and a canvas denoises."""

import time
from collections.abc import Sequence
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from ..diffusion import Canvas, StepInfo

ACCEPTED, UNSETTLED, STATUS = "bold", "dim cyan", "reverse"
FRAME_SECONDS = 0.05
ENCODE_BAR = 20  # characters
BAR_DELAY = 0.5  # seconds; what is done sooner shows no bar


def printable(text: str, replacement: str = "�") -> str:
    """The text without characters that steer a terminal; newline and tab stay."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0x9F else replacement for c in text)


def canvas_text(tokenizer: Tokenizer, step: "StepInfo", end_ids: frozenset[int]) -> Text:
    """The most probable canvas up to its end of sequence, accepted tokens set off from unsettled ones."""
    ids = [int(i) for i in step.ids]
    length = next((row for row, i in enumerate(ids) if i in end_ids), len(ids))
    text = Text(end="")
    rows = zip(step.accepted, tokenizer.pieces(ids[:length]), strict=False)
    for accepted, run in groupby(rows, key=lambda row: bool(row[0])):
        piece = "".join(piece for _, piece in run)
        text.append(printable(piece, "·").replace("\t", "  "), ACCEPTED if accepted else UNSETTLED)
    return text


def fitting(parts: Sequence[str], width: int) -> str:
    """The first parts that fit into a line of that width."""
    line = f" {parts[0]} "
    for part in parts[1:]:
        if len(line) + len(part) + 2 > width:
            break
        line += f" {part} "
    return line


class LiveCanvas:
    """Context manager: the reply so far and the canvas being denoised, refreshed in place, gone at the end."""

    def __init__(self, console: Console, tokenizer: Tokenizer, end_ids: frozenset[int]):
        self._console, self._tokenizer, self._end_ids = console, tokenizer, end_ids
        self._decoder = StreamDecoder(tokenizer)
        self._finished = Text(end="")
        self._drawn = 0.0
        self._body = Text(end="")
        self._live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> "LiveCanvas":
        self._live.start()
        self.say("reading the prompt")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_step(self, step: "StepInfo") -> None:
        now = time.perf_counter()
        if now - self._drawn < FRAME_SECONDS:
            return
        self._drawn = now
        self._body = self._finished.copy().append_text(canvas_text(self._tokenizer, step, self._end_ids))
        accepted = int(step.accepted.sum())
        parts = [f"step {step.step + 1}/{step.max_steps}", f"entropy {step.mean_entropy:.3f}"]
        parts += [f"{step.seconds:.2g} s/step"]
        parts += [f"accepted {accepted}/{len(step.accepted)}", f"canvas {step.canvas_index + 1}"]
        self.say(fitting(parts, self._console.width))

    def say(self, status: str) -> None:
        """Redraws with this line under the text."""
        self._live.update(self._frame(self._body, status), refresh=True)

    def on_encode(self, done: int, total: int) -> None:
        """Of a prompt of several passes, how far it is."""
        if done < total:
            bar = "#" * (done * ENCODE_BAR // total)
            parts = ["reading the prompt", f"[{bar:<{ENCODE_BAR}}]", f"{done:,} of {total:,} tokens"]
            self.say(fitting(parts, self._console.width))

    def on_canvas(self, canvas: "Canvas") -> None:
        ids = [int(i) for i in canvas.ids]
        self._finished.append(printable(self._decoder.feed(ids)).replace("\t", "  "))

    def _frame(self, body: Text, status: str) -> Group:
        """The last lines that fit the terminal: what is above could not be refreshed."""
        lines = body.wrap(self._console, self._console.width)
        room = max(self._console.height - 2, 1)
        shown = Text("\n").join(lines[-room:])
        return Group(shown, Text(status, style=STATUS, no_wrap=True, overflow="ellipsis"))


class DelayedBar:
    """Context manager: a progress bar on stderr, only on a terminal and only when the work takes its time."""

    def __init__(self, label: str, amount: ProgressColumn, enabled: bool = True):
        """amount: the column that says how much is done."""
        self._console = Console(stderr=True)
        self._enabled = enabled and self._console.is_terminal and not self._console.is_dumb_terminal
        self._columns = (TextColumn(label), BarColumn(), amount, TimeRemainingColumn())
        self._begin = time.perf_counter()
        self._progress: Progress | None = None

    def __enter__(self) -> "DelayedBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def update(self, done: int, total: int) -> None:
        """Draws how much is done; the bar goes away when all is."""
        if not self._enabled:
            return
        if done >= total:
            self._stop()
            return
        if self._progress is None:
            if time.perf_counter() - self._begin < BAR_DELAY:
                return
            self._progress = Progress(*self._columns, console=self._console, transient=True)
            self._progress.add_task("", total=total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def loading_bar(enabled: bool) -> DelayedBar:
    """For load_model's progress callback, which counts bytes."""
    return DelayedBar("loading", DownloadColumn(), enabled)


def encoding_bar(enabled: bool) -> DelayedBar:
    """For the on_encode callback, which counts tokens."""
    return DelayedBar("reading the prompt, tokens", MofNCompleteColumn(), enabled)
