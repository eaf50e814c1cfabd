"""Which positions a row may see (MODEL.md, Attention masks), and that the cache keeps what is needed and no more."""

import numpy as np
import pytest
from conftest import ORACLE

from ddllm_vk.backends.arena import Arena
from ddllm_vk.backends.reference import ReferenceOps
from ddllm_vk.cache import KVCache, canvas_ranges, encoder_ranges
from ddllm_vk.config import load_config


def test_encoder_rows_see_backwards_only():
    for start in (0, 3, 40):
        for window in (None, 2, 16):
            lo, hi = encoder_ranges(start, 9, window)
            for i in range(9):
                position = start + i
                visible = [j for j in range(60) if j <= position and (window is None or j > position - window)]
                assert (lo[i], hi[i]) == (visible[0], visible[-1] + 1)


def test_canvas_rows_all_see_the_same():
    for length in (0, 5, 15, 16, 40):
        lo, hi = canvas_ranges(length, 8, None)
        assert set(lo) == {0}
        assert set(hi) == {length + 8}
        lo, hi = canvas_ranges(length, 8, 16)
        assert set(lo) == {max(0, length - 15)}
        assert set(hi) == {length + 8}


@pytest.mark.parametrize("chunks", [[1] * 500, [256, 256, 7], [3, 132, 1, 16, 256, 90]])
def test_every_visible_position_is_in_its_slot(chunks: list[int]):
    config = load_config(ORACLE / "case_1_base/checkpoint")
    ops = ReferenceOps(1e-6)
    cache = KVCache(ops, config, "f32")
    for rows in chunks:
        cache.reserve(rows)
        for i, layer in enumerate(cache.layers):
            spec = config.layers[i]
            positions = np.arange(cache.length, cache.length + rows, dtype=np.float32)
            x = np.repeat(positions[:, None], spec.num_key_value_heads * spec.head_dim, axis=1)
            ops.store_rows(x, layer.k, cache.length - layer.base)
            for ranges in (encoder_ranges, canvas_ranges):
                lo, hi = ranges(cache.length, rows, cache.layer_window(i))
                for a, b in zip(lo, hi, strict=True):
                    assert layer.k.rows[0, a - layer.base : b - layer.base, 0].tolist() == list(range(a, b))
        cache.length += rows
    sliding = cache.layers[0]
    assert sliding.capacity == 384  # a window less one and a pass of 256 rows, in multiples of 128


def test_arena_reuses_its_memory_and_never_overlaps_live_arrays():
    arena = Arena()
    for _ in range(2):
        with arena.scope():
            a = arena.take((3, 5))
            with arena.scope():
                b = arena.take((100,), np.int32)
                assert not np.shares_memory(a, b)
            c = arena.take((7, 7))
            assert not np.shares_memory(a, c)
            assert a.ctypes.data % 64 == c.ctypes.data % 64 == 0
    assert np.shares_memory(b, c)  # the second time everything lies in one buffer
    with pytest.raises(RuntimeError):
        arena.take((1,))
