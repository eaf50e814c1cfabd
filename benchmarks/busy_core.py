"""What a busy core costs: two threads multiply while another process spins on one of the two cores, as Markdown.

That core then gives half of its time: 75% of the undisturbed speed is all that is left to have. Halves handed out
beforehand would leave 50%.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from kernels import HIDDEN, ROWS, normal, random_weight
from timing import Table

from ddllm_vk.cpu import kernels
from ddllm_vk.cpu.kernels import ThreadPool
from ddllm_vk.cpu.matmul import _grouped_int8

TURNS, RUNS = 5, 8


SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def rate(run: Callable[[], object]) -> float:
    """Runs a second, over RUNS of them: with a busy core single ones say little."""
    started = time.perf_counter()
    for _ in range(RUNS):
        run()
    return RUNS / (time.perf_counter() - started)


def halves(pool: ThreadPool, x, weight, out) -> Callable[[], object]:
    """The same product with as many jobs as threads: work that is handed out beforehand."""
    g, tiles = x.groups, weight.tiles
    args = (
        weight.code, weight.data, weight.scales, x.blocks, tiles, tiles,
        x.values, x.scales, x.starts, g.matrix, g.begin, g.start, g.count, out,
    )  # fmt: skip
    return lambda: pool.run(_grouped_int8, tiles, *args, grain=-(-tiles // pool.threads))


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    os.sched_setaffinity(0, set(cores))
    two, one = ThreadPool(2), ThreadPool(1)
    weight = random_weight(two, "q40", 8192, HIDDEN)
    x = kernels.quantize_rows(two, normal(ROWS, HIDDEN))
    out = np.empty((ROWS, 8192), np.float32)
    ways = {
        "2 threads": lambda: kernels.linear(two, x, weight, out),
        "2 threads, halves handed out beforehand": halves(two, x, weight, out),
        "1 thread": lambda: kernels.linear(one, x, weight, out),
    }
    rates: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in ways}
    for _ in range(TURNS):
        for busy in (False, True):
            with contextlib.ExitStack() as stack:
                if busy:
                    spinner = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN, str(cores[0])]))
                    stack.callback(spinner.kill)
                    time.sleep(0.5)
                for name, run in ways.items():
                    rates[name][busy].append(rate(run))
    alone = statistics.median(rates["2 threads"][False])
    table = Table(
        f"{ROWS} rows times 8192 x {HIDDEN}, q40 x q80, products a second, median of {TURNS}",
        "", "both cores free", "one core busy", "of 2 threads undisturbed",
    )  # fmt: skip
    for name, found in rates.items():
        free, busy = statistics.median(found[False]), statistics.median(found[True])
        table.row(name, free, busy, busy / alone)


if __name__ == "__main__":
    main()
