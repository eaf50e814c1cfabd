"""Programs and memory as values: where barriers stand, how rows are split."""

import itertools
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from ddllm_vk.errors import GpuError
from ddllm_vk.gpu.buffers import ALIGNMENT, Buffer, largest_buffer, split_rows
from ddllm_vk.gpu.devices import Device, Heap, free_bytes
from ddllm_vk.gpu.program import Pipeline, Program, plan_barriers
from ddllm_vk.gpu.shaders import Binding, Constant, Shader


def pipeline(*accesses: str, push: tuple[str, ...] = ()) -> Pipeline:
    bindings = tuple(Binding(f"b{i}", access) for i, access in enumerate(accesses))
    constants = tuple(Constant(name, "uint") for name in push)
    return Pipeline(Shader("test", b"", bindings, constants, (), (1, 1, 1), 0, frozenset()), {}, (1, 1, 1), None)


COPY = pipeline("read", "write", push=("b0_at", "b1_at"))
UPDATE = pipeline("read_write", push=("b0_at",))


def memory() -> Buffer:
    return Buffer(1000, False, None, None)


def planned(*steps) -> list[bool]:
    """Steps: a pipeline and its operands."""
    program = Program()
    for kind, *operands in steps:
        program.dispatch(kind, {f"b{i}": o for i, o in enumerate(operands)})
    return plan_barriers(program.dispatches)


def test_a_barrier_stands_where_something_depends():
    a, b, c = memory(), memory(), memory()
    assert planned((COPY, a, b), (COPY, b, c)) == [False, True]  # read after write
    assert planned((COPY, a, c), (COPY, b, c)) == [False, True]  # write after write
    assert planned((COPY, a, b), (COPY, c, a)) == [False, True]  # write after read
    assert planned((UPDATE, a), (UPDATE, a)) == [False, True]
    assert planned((COPY, a, b), (COPY, a, c)) == [False, False]  # both only read a
    assert planned((UPDATE, a), (UPDATE, b), (UPDATE, c)) == [False] * 3


def test_a_barrier_orders_everything_before_it():
    a, b, c = memory(), memory(), memory()
    assert planned((UPDATE, a), (UPDATE, b), (COPY, a, c), (UPDATE, b)) == [False, False, True, False]
    assert planned((UPDATE, a), (COPY, a, b), (COPY, a, c), (COPY, b, a)) == [False, True, False, True]


def test_slices_that_do_not_overlap_do_not_wait():
    a = memory()
    first, second, across = a.slice(0, 400), a.slice(400, 600), a.slice(396, 8)
    assert planned((UPDATE, first), (UPDATE, second)) == [False, False]
    assert planned((UPDATE, first), (UPDATE, second), (UPDATE, across)) == [False, False, True]
    assert planned((UPDATE, a), (UPDATE, a.slice(996, 4))) == [False, True]


def test_barriers_of_random_programs_separate_all_that_depends():
    """Between two dispatches of which one writes what the other touches, some barrier stands."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = [memory() for _ in range(3)]
        parts = [b.slice(4 * int(o), 4 * int(n)) for b in buffers for o, n in rng.integers(1, 120, (3, 2))]
        program = Program()
        for _ in range(12):
            operands = {f"b{i}": parts[rng.integers(len(parts))] for i in range(2)}
            program.dispatch(COPY, operands)
        barriers = plan_barriers(program.dispatches)
        for (i, early), (j, late) in itertools.combinations(enumerate(program.dispatches), 2):
            pairs = [(x, y) for x in early.writes for y in late.reads + late.writes]
            pairs += [(x, y) for x in early.reads for y in late.writes]
            if any(x.overlaps(y) for x, y in pairs):
                assert any(barriers[i + 1 : j + 1])


def test_offsets_are_filled_in():
    a = memory()
    kind = pipeline("read", "write", push=("b1_at", "n", "b0_at"))
    program = Program()
    program.dispatch(kind, {"b0": a.slice(400, 40), "b1": a.slice(800)}, {"n": 7})
    (dispatch,) = program.dispatches
    assert np.frombuffer(dispatch.push_bytes([0, 0]), np.uint32).tolist() == [200, 7, 100]
    assert np.frombuffer(dispatch.push_bytes([256, 800]), np.uint32).tolist() == [0, 7, 36]


def test_rows_are_split_evenly():
    assert split_rows(10, 10, 1000) == [10]
    assert split_rows(10, 10, 39) == [3, 3, 3, 1]
    assert split_rows(10, 10, 50) == [5, 5]
    assert split_rows(11, 10, 100) == [6, 5]
    assert split_rows(0, 10, 100) == []
    with pytest.raises(GpuError, match="one row of 101 bytes"):
        split_rows(1, 101, 100)
    for rows, row_bytes, most in np.random.default_rng(1).integers(1, 500, (200, 3)):
        if row_bytes <= most:
            parts = split_rows(int(rows), int(row_bytes), int(most))
            assert sum(parts) == rows
            assert all(0 < part * row_bytes <= most for part in parts)


def test_no_buffer_reaches_two_gibibytes():
    assert largest_buffer(2**27, 2**31) == 2**27
    assert largest_buffer(2**32 - 1, 2**30) == 2**30
    most = largest_buffer(2**32 - 1, 2**40)
    assert most < 2**31
    assert most % ALIGNMENT == 0


def device(kind: str) -> Device:
    sizes = (1024, 1024, 64)
    return Device(
        0, "test", kind, "1.3.0", "", 1, "00", (), frozenset(), 32, 2**31, 2**31, 2**15, 128, 1024, sizes, sizes, 256, 0
    )


def test_free_memory_is_what_the_driver_says_else_a_share_of_the_heap():
    local, told = Heap(10**9, True, None), Heap(10**9, True, 3 * 10**8)
    host = Heap(64 * 10**9, False, 64 * 10**9)
    assert free_bytes(device("discrete"), 10**8, [local, host]) == 8 * 10**8
    assert free_bytes(device("discrete"), 10**8, [told, host]) == 3 * 10**8  # ours are counted by the driver
    assert free_bytes(device("discrete"), 10**8, [told, local]) == 17 * 10**8
    assert free_bytes(device("discrete"), 2 * 10**9, [local]) < 0


def test_free_memory_of_the_host_bounds_devices_that_share_it(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * 10**8, total=10**9))
    heap = Heap(2**31, True, None)
    assert free_bytes(device("cpu"), 0, [heap]) == 5 * 10**8
    assert free_bytes(device("integrated"), 0, [heap]) == 5 * 10**8
    assert free_bytes(device("discrete"), 0, [heap]) == int(0.9 * 2**31)
    assert device("cpu").memory == 10**9
