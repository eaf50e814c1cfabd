"""ProfiledOps: CPU operations with a clock and a count of their arithmetic, for `bench --profile`.

Two levels: the operations of the Ops interface, and the kernels they run (ThreadPool.profile).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..cpu.peak import Peaks
from ..quants import QUANTIZED
from .cpu import CpuOps

#: Not operations of a pass.
_UNTIMED = {"upload", "weight_bytes", "scope", "new_cache", "cache_bytes", "resize_cache", "close"}


@dataclass(kw_only=True)
class Work:
    """What an operation has to do: multiplications and additions of int8, float32 and bfloat16 (`narrow`) products, and
    bytes of weights, which come from memory once a pass. What is next to nothing beside those is not counted."""

    dot: int = 0
    fma: int = 0
    narrow: int = 0
    weight_bytes: int = 0

    def seconds(self, peaks: Peaks) -> float:
        """At the measured peaks: arithmetic and reading overlap."""
        products = self.dot / peaks.dot + self.fma / peaks.fma + self.narrow / peaks.narrow
        return max(products, self.weight_bytes / peaks.read)

    def add(self, other: "Work") -> None:
        self.dot += other.dot
        self.fma += other.fma
        self.narrow += other.narrow
        self.weight_bytes += other.weight_bytes


@dataclass(kw_only=True)
class Entry(Work):
    """An operation's calls, their wall clock in seconds, and their work."""

    calls: int = 0
    wall: float = 0.0


class ProfiledOps:
    """Stands in for a CpuOps in a Session; `entries` are summed by the name of the operation."""

    def __init__(self, ops: CpuOps):
        self._ops = ops
        self.entries: dict[str, Entry] = {}

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        if name in _UNTIMED or not callable(operation):
            return operation
        return self._timed(name, operation)

    def _timed(self, name: str, operation: Callable) -> Callable:
        count = getattr(type(self), f"_{name}_work", None)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = operation(*args, **kwargs)
            wall = time.perf_counter() - started
            entry = self.entries.setdefault(name, Entry())
            entry.calls += 1
            entry.wall += wall
            if count is not None:
                entry.add(count(self, *args))
            return result

        return timed

    def _product(self, operations: int, *weights: Any, read: float = 1.0) -> Work:
        """Work of products with weights, of which the part `read` is read."""
        quantized = self._ops.quantized and all(w.format in QUANTIZED for w in weights)
        nbytes = int(read * sum(w.nbytes for w in weights))
        return Work(dot=operations, weight_bytes=nbytes) if quantized else Work(fma=operations, weight_bytes=nbytes)

    def _linear_work(self, x: np.ndarray, *weights: Any) -> Work:
        return _sum(self._product(2 * x.shape[0] * w.rows * w.columns, w) for w in weights)

    def _attention_work(self, q: np.ndarray, heads: int, k: Any, v: Any, lo: np.ndarray, hi: np.ndarray) -> Work:
        operations = 4 * q.shape[1] * int((hi - lo).sum())
        return Work(fma=operations) if k.format == "f32" else Work(narrow=operations)

    def _router_work(self, h: np.ndarray, scale: Any, proj: Any, per_expert_scale: Any, top_k: int) -> Work:
        return self._product(2 * h.shape[0] * proj.rows * proj.columns, proj)

    def _experts_work(self, x: np.ndarray, ids: np.ndarray, weights: Any, gate_up: Any, down: Any) -> Work:
        used = len(np.unique(ids)) / down.experts
        each = gate_up.rows * gate_up.columns + down.rows * down.columns
        return self._product(2 * ids.size * each, gate_up, down, read=used)

    def _head_logits_work(self, x: np.ndarray, table: Any, softcap: float) -> Work:
        return self._product(2 * x.shape[0] * table.rows * table.columns, table)

    def _head_statistics_work(self, x: np.ndarray, table: Any, *_: Any) -> Work:
        return self._product(2 * x.shape[0] * table.rows * table.columns, table)

    def _soft_embedding_work(self, statistics: Any, *_: Any) -> Work:
        # The rows' own tokens; then, of undecided rows, the product of the head again and the one with the table.
        stats, table = statistics.soft
        tokens = int(stats.soft_counts.sum())
        some = Work(fma=2 * tokens * table.columns)
        dense = self._product(4 * len(stats.undecided) * table.rows * table.columns, table)
        return _sum([some, dense]) if len(stats.undecided) else some


def _sum(works: Any) -> Work:
    total = Work()
    for work in works:
        total.add(work)
    return total


def profile(session: Any, run: Callable[[], object], repeat: int, peaks: Peaks) -> dict[str, Any]:
    """Of one run of `run` (a pass of `session`), the mean of `repeat`: {"seconds", "operations": {name: {"calls",
    "seconds", "dot", "fma", "narrow" (operations), "weight_bytes", "peak_seconds"}},
    "kernels": {name: {"runs", "seconds"}}}."""
    ops, pool = session.ops, session.ops.pool
    session.ops = profiled = ProfiledOps(ops)
    pool.profile = {}
    try:
        started = time.perf_counter()
        for _ in range(repeat):
            run()
        seconds = (time.perf_counter() - started) / repeat
        kernels = pool.profile
    finally:
        session.ops, pool.profile = ops, None
    operations = {}
    for name, entry in profiled.entries.items():
        figures = {key: value / repeat for key, value in asdict(entry).items()}
        figures["seconds"] = figures.pop("wall")
        figures["peak_seconds"] = entry.seconds(peaks) / repeat
        operations[name] = figures
    return {
        "seconds": seconds,
        "operations": _by_seconds(operations),
        "kernels": _by_seconds({n: {"runs": r / repeat, "seconds": s / repeat} for n, (r, s) in kernels.items()}),
    }


def _by_seconds(entries: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return dict(sorted(entries.items(), key=lambda item: -item[1]["seconds"]))
