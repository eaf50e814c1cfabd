"""Tables on a terminal and in a pipe, never cut: a narrow terminal wraps whole lines rather than lose digits."""

import sys

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(table: Table, to_stderr: bool = False) -> None:
    """Prints at the table's own width; without lines, and without spaces at line ends, where there is no terminal."""
    stream = sys.stderr if to_stderr else sys.stdout
    terminal = stream.isatty()
    table.box = box.SIMPLE_HEAD if terminal else None
    for column in table.columns:
        column.no_wrap = True
    measuring = Console(file=stream, width=10_000)
    width = Measurement.get(measuring, measuring.options, table).maximum
    console = Console(file=stream, width=max(width, 40), highlight=False)
    with console.capture() as text:
        console.print(table)
    stream.write("".join(line.rstrip() + "\n" for line in text.get().splitlines()))
