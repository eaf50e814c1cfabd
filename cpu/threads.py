"""Threads for the compiled kernels: the caller's own and a few that sleep until a kernel is run.

A kernel is called on every thread with the same arguments and takes its jobs from a shared counter, so who does what
changes from run to run and results do not: jobs are independent of each other. Knows nothing of what a kernel does.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import psutil
from numpy.typing import DTypeLike

from ddllm_vk.cpu.memory import aligned_empty
from ddllm_vk.errors import InputError

_pools: "weakref.WeakSet[ThreadPool]" = weakref.WeakSet()


def default_threads() -> int:
    """Physical cores, but no more than this process may run on."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, allowed))


class _Worker:
    """One sleeping thread. `wake` and `finished` are locks used as signals: cheaper than condition variables.

    `busy` is what tells whether a task is still running. A signal may interrupt the caller anywhere, even just after it
    acquired `finished`; then a release of that lock is left over, or missing, and does no harm.
    """

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.finished = threading.Lock()
        self.wake.acquire()
        self.finished.acquire()
        self.busy = False
        self.task: tuple[Callable, tuple] | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._serve, name="ddllm_vk-kernel", daemon=True).start()

    def start(self, kernel: Callable, args: tuple) -> None:
        self.task = (kernel, args)
        self.busy = True
        self.wake.release()

    def wait(self) -> BaseException | None:
        """Wait for the task, whatever comes meanwhile: it writes into arrays the caller may free. Returns its error,
        or the interrupt."""
        interrupt = None
        while self.busy:
            try:
                self.finished.acquire(timeout=1.0)
            except BaseException as signal:
                interrupt = signal
        error, self.error = self.error, None
        return error or interrupt

    def stop(self) -> None:
        self.task = None
        self.wake.release()

    def _serve(self) -> None:
        while True:
            self.wake.acquire()
            if self.task is None:
                return
            kernel, args = self.task
            self.task = None
            try:
                kernel(*args)
            except BaseException as error:  # handed to the caller of run
                self.error = error
            del kernel, args
            self.busy = False
            if self.finished.locked():
                self.finished.release()


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()


class ThreadPool:
    """Runs kernels on `threads` threads (default: default_threads()), the caller's included.

    Several Python threads may share a pool: `run` lets one in at a time. An operation of several runs that keeps data
    in `scratch` between them holds `lock` (re-entrant) meanwhile. Workers start at first use, also after a fork.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads}: at least one thread is needed")
        self.threads = threads or default_threads()
        self.lock = threading.RLock()
        self._workers: list[_Worker] = []
        self.profile: dict[str, list[float]] | None = None  #: kernel: [runs, seconds] of wall clock, where wanted
        self._counter = aligned_empty(8, np.int64)
        self._scratch: dict[str, np.ndarray] = {}
        self._finalizer = weakref.finalize(self, _stop, self._workers)
        _pools.add(self)

    def run(self, kernel: Callable, jobs: int, *args: object, grain: int = 1) -> None:
        """Call `kernel(*args, counter, jobs, grain)` on as many threads as there are grains of jobs for.

        counter: int64 [8], zeroed; the kernel takes its next `grain` jobs with intrinsics.take. With one grain (or
        none) of work nobody is woken. An exception on any thread is raised here once all threads are done.
        """
        if self.profile is None:
            self._run(kernel, jobs, *args, grain=grain)
            return
        started = time.perf_counter()
        self._run(kernel, jobs, *args, grain=grain)
        entry = self.profile.setdefault(kernel.__name__.lstrip("_"), [0, 0.0])
        entry[0] += 1
        entry[1] += time.perf_counter() - started

    def _run(self, kernel: Callable, jobs: int, *args: object, grain: int) -> None:
        helpers = min(self.threads, -(-jobs // grain)) - 1
        with self.lock:
            self._counter[0] = 0
            args = (*args, self._counter, jobs, grain)
            if helpers <= 0:
                if jobs > 0:
                    kernel(*args)
                return
            while len(self._workers) < self.threads - 1:
                self._workers.append(_Worker())
            try:
                for worker in self._workers[:helpers]:
                    worker.start(kernel, args)
                kernel(*args)
            finally:
                errors = [worker.wait() for worker in self._workers[:helpers]]
            for error in errors:
                if error is not None:
                    raise error

    def scratch(self, name: str, dtype: DTypeLike, count: int) -> np.ndarray:
        """An aligned 1-D array of at least `count` elements, uninitialised, valid until `name` is asked for again."""
        size = max(count, 1) * np.dtype(dtype).itemsize
        held = self._scratch.get(name)
        if held is None or held.size < size:
            self._scratch[name] = held = aligned_empty(-(-size // 4096) * 4096, np.uint8)
        return held[: size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)

    def close(self) -> None:
        """Let the workers end and free the scratch memory. The pool stays usable: they start again when needed."""
        with self.lock:
            _stop(self._workers)
            self._scratch.clear()

    def _after_fork(self) -> None:
        # Threads and the state of locks do not survive a fork; whatever was running belongs to the parent.
        self.lock = threading.RLock()
        self._workers.clear()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._after_fork()


with contextlib.suppress(AttributeError):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
