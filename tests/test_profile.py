"""bench --profile: the clock changes no result, and the arithmetic it states is the model's."""

import json

import numpy as np
import pytest

import ddllm_vk
from ddllm_vk.backends.profile import ProfiledOps, Work, profile
from ddllm_vk.cli import run
from ddllm_vk.cpu.peak import Peaks

PEAKS = Peaks(threads=2, dot=4e9, fma=1e9, narrow=2e9, read=1e8)


@pytest.fixture(scope="module")
def model():
    model = ddllm_vk.load_model(threads=2)
    yield model
    model.close()


def steps(session, count):
    rows = session.config.canvas_length
    canvas, uniforms = np.arange(rows, dtype=np.int32), np.linspace(0, 0.99, rows)
    return [session.canvas_step(canvas, 0.7, uniforms, (1,)) for _ in range(count)]


def test_results_are_those_without_a_profile(model):
    plain, profiled = model.session(), model.session()
    profiled.ops = ProfiledOps(profiled.ops)
    for a, b in zip(steps(plain, 2), steps(profiled, 2), strict=True):
        assert np.array_equal(a.argmax, b.argmax)
        assert np.array_equal(a.sampled, b.sampled)
        assert np.array_equal(a.entropy, b.entropy)


def test_the_arithmetic_is_that_of_the_models_shapes(model):
    c, session = model.config, model.session()
    ids = np.arange(10, dtype=np.int32)
    session.encode(ids)
    session.ops = profiled = ProfiledOps(session.ops)
    steps(session, 2)
    first_and_second = {name: entry.dot + entry.fma + entry.narrow for name, entry in profiled.entries.items()}
    rows, hidden = c.canvas_length, c.hidden_size
    linear = attention = 0
    for layer in c.layers:
        heads, kv = c.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        linear += hidden * (2 * heads + (2 if layer.has_v_proj else 1) * kv) + 3 * hidden * c.intermediate_size
        attention += 2 * heads * (10 + rows)  # scores and values; the prompt is shorter than the window
    layers = c.num_hidden_layers
    conditioning = 3 * hidden * c.intermediate_size  # in the second step
    assert first_and_second["linear"] == 2 * rows * (2 * linear + conditioning)
    assert first_and_second["attention"] == 2 * 2 * rows * attention
    assert first_and_second["experts"] == 2 * 2 * rows * layers * c.top_k_experts * 3 * hidden * c.moe_intermediate_size
    assert first_and_second["router"] == 2 * 2 * rows * layers * hidden * c.num_experts
    assert first_and_second["head_statistics"] == 2 * 2 * (rows + 1) * hidden * c.vocab_size  # row 0 twice: the guard
    assert profiled.entries["attention"].dot == profiled.entries["router"].dot == 0
    assert profiled.entries["experts"].fma == 0
    assert profiled.entries["experts"].calls == 2 * layers


def test_the_time_at_the_peak_is_that_of_the_slower_of_arithmetic_and_memory():
    assert Work(dot=8 * 10**9, fma=10**9, weight_bytes=10**8).seconds(PEAKS) == 3
    assert Work(fma=10**9, narrow=4 * 10**9).seconds(PEAKS) == 3
    assert Work(dot=10**9, weight_bytes=5 * 10**8).seconds(PEAKS) == 5


def test_parts_add_up_to_no_more_than_the_pass(model):
    session = model.session()
    ops = session.ops
    found = profile(session, lambda: steps(session, 1), 3, PEAKS)
    assert session.ops is ops
    assert ops.pool.profile is None
    operations = sum(e["seconds"] for e in found["operations"].values())
    kernels = sum(e["seconds"] for e in found["kernels"].values())
    assert 0 < kernels <= operations <= found["seconds"]
    assert found["operations"]["head_statistics"]["calls"] == 1
    assert found["kernels"]["finish"]["runs"] == 1


def test_bench_shows_it(capsys):
    assert run(["bench", "--context", "8", "--repeat", "1", "--profile", "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert figures["peaks"]["dot"] > figures["peaks"]["fma"] > 0
    assert figures["contexts"][0]["profile"]["operations"]["linear"]["peak_seconds"] > 0
    assert "of the peak" in captured.err
    assert "grouped_int8" in captured.err
