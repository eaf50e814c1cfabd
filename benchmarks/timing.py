"""Timing of functions that compete, and tables of the results."""

import time
from collections.abc import Callable

#: Seconds of sleep before another competitor's turn: pools of other libraries spin for a while after their work.
REST = 0.03

Functions = dict[str, Callable[[], object]]


def clock_for(threads: int) -> Callable[[], float]:
    """The time of day; of one thread its own processor time, which others on the machine hardly disturb."""
    return time.thread_time if threads == 1 else time.perf_counter


def best(functions: Functions, threads: int, seconds: float = 1.0, least: int = 3) -> dict[str, float]:
    """Seconds of each function's fastest run, on `threads` threads. They take turns, so that a slow moment of the
    machine meets all of them, for about `seconds` each, but at least `least` turns. A turn is a run that does not count
    and two that do."""
    clock = clock_for(threads)
    found = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    turns, end = 0, time.perf_counter() + seconds * len(functions)
    while turns < least or time.perf_counter() < end:
        turns += 1
        for name, function in functions.items():
            if len(functions) > 1:
                time.sleep(REST)
                function()
            for _ in range(2):
                started = clock()
                function()
                found[name] = min(found[name], clock() - started)
    return found


class Table:
    """A Markdown table, printed row by row; `rows` keeps the numbers."""

    def __init__(self, title: str, first: str, *columns: str) -> None:
        self.title, self.first, self.columns = title, first, columns
        self.rows: list[dict[str, object]] = []
        print(f"\n**{title}**\n\n| {first} | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|", flush=True)

    def row(self, name: str, *values: float | str | None) -> None:
        """A share is a float below 10 in a column whose name begins with "of"; None is left empty."""
        self.rows.append({self.first: name, **dict(zip(self.columns, values, strict=True))})
        cells = [_cell(column, value) for column, value in zip(self.columns, values, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _cell(column: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column.startswith("of "):
        return f"{value:.0%}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
