"""The tables of `bench --profile`: where a pass's time goes, per operation of the Ops interface and per kernel."""

from typing import Any

from rich.table import Table

from .tables import print_table


def print_profile(profile: dict[str, Any], peaks: dict[str, Any], context: int, to_stderr: bool) -> None:
    """profile: of backends.profile.profile; peaks: cpu.peak.Peaks as a dict."""
    title = (
        f"a canvas pass after {context} tokens, {profile['seconds'] * 1e3:.1f} ms; measured peaks of"
        f" {peaks['threads']} threads: int8 {peaks['dot'] / 1e9:.0f} GOP/s, float32 {peaks['fma'] / 1e9:.0f} GOP/s,"
        f" bfloat16 {peaks['narrow'] / 1e9:.0f} GOP/s, memory {peaks['read'] / 1e9:.0f} GB/s"
    )
    names = ("operation", "calls", "ms", "share", "GOP", "GOP/s", "weights, GB", "ms at the peak", "of the peak")
    table = _table(title, *names)
    known = 0.0
    for name, e in profile["operations"].items():
        known += e["seconds"]
        work = e["dot"] + e["fma"] + e["narrow"]
        counted = ["", "", "", "", ""]
        if work:
            counted = [
                f"{work / 1e9:.1f}",
                f"{work / e['seconds'] / 1e9:.1f}",
                f"{e['weight_bytes'] / 1e9:.2f}",
                f"{e['peak_seconds'] * 1e3:.1f}",
                f"{e['peak_seconds'] / e['seconds']:.0%}",
            ]
        table.add_row(name, *_time(e["calls"], e["seconds"], profile["seconds"]), *counted)
    rest = profile["seconds"] - known
    table.add_row("between them", *_time(None, rest, profile["seconds"]), *[""] * 5)
    print_table(table, to_stderr)

    table = _table("its kernels", "kernel", "runs", "ms", "share")
    for name, e in profile["kernels"].items():
        table.add_row(name, *_time(e["runs"], e["seconds"], profile["seconds"]))
    print_table(table, to_stderr)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _time(count: float | None, seconds: float, whole: float) -> tuple[str, str, str]:
    return "" if count is None else f"{count:g}", f"{seconds * 1e3:.2f}", f"{seconds / whole:.1%}"
