"""The thread pool: every job once, whatever the number of threads, callers, forks and errors."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ddllm_vk.cpu.intrinsics import take
from ddllm_vk.cpu.jit import kernel
from ddllm_vk.cpu.threads import ThreadPool, default_threads
from ddllm_vk.errors import InputError


@kernel
def _count(done, counter, jobs, grain):
    while True:
        first = take(counter, grain)
        if first >= jobs:
            return
        for job in range(first, min(first + grain, jobs)):
            done[job] += 1


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("jobs", "grain"), [(0, 1), (1, 1), (7, 1), (1000, 3), (1000, 2000)])
def test_every_job_is_done_once(threads, jobs, grain):
    pool = ThreadPool(threads)
    done = np.zeros(jobs, np.int64)
    for _ in range(20):
        pool.run(_count, jobs, done, grain=grain)
    assert np.all(done == 20)
    pool.close()
    pool.run(_count, jobs, done, grain=grain)
    assert np.all(done == 21)


def test_default_is_at_most_the_cores_of_this_process():
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))
    assert ThreadPool().threads == default_threads()


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads):
    with pytest.raises(InputError):
        ThreadPool(threads)


def test_several_python_threads_share_a_pool():
    pool = ThreadPool(3)
    results = [np.zeros(5000, np.int64) for _ in range(4)]

    def work(done: np.ndarray) -> None:
        for _ in range(50):
            pool.run(_count, done.size, done, grain=10)

    callers = [threading.Thread(target=work, args=(done,)) for done in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(np.all(done == 50) for done in results)


@pytest.mark.parametrize("failing", ["caller", "worker"])
def test_an_error_on_any_thread_reaches_the_caller(failing):
    pool = ThreadPool(2)
    main = threading.current_thread()
    arrived = threading.Barrier(2, timeout=10)

    def fails(counter: np.ndarray, jobs: int, grain: int) -> None:
        arrived.wait()
        if (threading.current_thread() is main) == (failing == "caller"):
            raise ValueError("broken kernel")

    with pytest.raises(ValueError, match="broken kernel"):
        pool.run(fails, 2)
    done = np.zeros(100, np.int64)
    pool.run(_count, 100, done)
    assert np.all(done == 1)


def test_an_interrupt_waits_for_the_workers():
    pool = ThreadPool(2)
    main = threading.current_thread()
    finished = []

    def slow(counter: np.ndarray, jobs: int, grain: int) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        time.sleep(0.2)
        finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        pool.run(slow, 2)
    assert finished


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_workers():
    pool = ThreadPool(3)
    done = np.zeros(1000, np.int64)
    pool.run(_count, 1000, done)
    child = os.fork()
    if child == 0:
        pool.run(_count, 1000, done)
        os._exit(0 if np.all(done == 2) else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    pool.run(_count, 1000, done)
    assert np.all(done == 2)


def test_idle_workers_end_with_their_pool():
    before = set(threading.enumerate())
    pool = ThreadPool(4)
    pool.run(_count, 100, np.zeros(100, np.int64))
    workers = set(threading.enumerate()) - before  # workers of earlier tests' pools may be ending meanwhile
    assert len(workers) == 3
    del pool
    for worker in workers:
        worker.join(5)
    assert not any(worker.is_alive() for worker in workers)


def test_scratch_is_aligned_and_kept():
    pool = ThreadPool(1)
    first = pool.scratch("a", np.float32, 1000)
    assert first.size == 1000
    assert first.__array_interface__["data"][0] % 64 == 0
    assert np.shares_memory(first, pool.scratch("a", np.int8, 10))
    assert not np.shares_memory(first, pool.scratch("b", np.float32, 10))


ALONE = """
import sys, threading
from pathlib import Path
import numpy as np
import ddllm_vk

def others():
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    return {t.name: sum(map(int, (t / "stat").read_text().rpartition(")")[2].split()[11:13]))  # utime, stime
            for t in Path("/proc/self/task").iterdir() if t.name not in ours}

def use(model):
    session = model.session()
    session.encode([1, 2, 3])
    canvas = np.zeros(model.config.canvas_length, np.int32)
    session.canvas_logits(canvas, self_conditioning=session.canvas_logits(canvas))
    for _ in range(3):
        session.canvas_step(canvas, 1.0, np.zeros(len(canvas)))

a = np.ones((1000, 1000), np.float32)
a @ a  # numpy's BLAS has started its threads
for choice in ("q80", "f32"):
    model = ddllm_vk.load_model(sys.argv[1], weights="q40", activations=choice, threads=2)
    use(model)
    time_before = others()
    use(model)
    print({t: time - time_before.get(t, 0) for t, time in others().items() if time != time_before.get(t, 0)})
from numba.np.ufunc import parallel
print(parallel._is_initialized)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads' times are read from Linux's /proc")
def test_no_other_pool_of_threads_works():
    """numpy's BLAS and numba have pools of their own, which would compete for the cores with the kernels."""
    folder = Path(__file__).parent / "oracle" / "case_6_canvas256" / "checkpoint"
    run = subprocess.run([sys.executable, "-c", ALONE, folder], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.split("\n")[:3] == ["{}", "{}", "False"]
