"""The oracle's cases: what the reference implementation computed on small random checkpoints (MODEL.md).

Weights as stored, computed in float32: logits to 1e-3, every discrete decision of a trace exact.
"""

import numpy as np
import pytest
from conftest import TEXT_CASES, OracleCase, RecordedNoise, oracle_case

import ddllm_vk
import ddllm_vk.loader
from ddllm_vk.model import encoder_pass

BACKENDS = ("reference", "cpu", "vulkan")
TRACES = [(name, trace) for name in TEXT_CASES for trace in oracle_case(name).meta["traces"]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "vulkan":  # under synchronization validation, as the shaders' own tests
        request.getfixturevalue("gpu_device")
        request.getfixturevalue("no_messages")
    return request.param


_models: dict[tuple, ddllm_vk.loader.Model] = {}


def load(case: OracleCase, backend: str, **options) -> ddllm_vk.loader.Model:
    """Models are kept: a device compiles its pipelines anew for each."""
    key = (case.name, backend, *sorted(options.items()))
    if key not in _models:
        _models[key] = ddllm_vk.load_model(case.checkpoint, backend=backend, **options)
    return _models[key]


@pytest.fixture(scope="module", autouse=True)
def close_models():
    yield
    while _models:
        _models.popitem()[1].close()


class Recorder:
    """Ops that also keep what the router, the layers and the canvas input gave; everything else passes through."""

    def __init__(self, ops):
        self.ops = ops
        self.ids, self.weights, self.hidden, self.first_norm = [], [], [], []

    def __getattr__(self, name):
        return getattr(self.ops, name)

    def router(self, *args):
        ids, weights = self.ops.router(*args)
        self.ids.append(np.array(ids))
        self.weights.append(np.array(weights))
        return ids, weights

    def rms_norm(self, x, weight):
        y = self.ops.rms_norm(x, weight)
        if weight is None:  # in a forward pass only the canvas input is normed without a weight
            self.first_norm.append(np.array(y))
        return y

    def add_rms_norm(self, x, y, weight, scale=1.0, out=None):
        result = self.ops.add_rms_norm(x, y, weight, scale, out)
        if out is not None:  # the end of a layer
            self.hidden.append(np.array(result))
        return result


def encoded(case: OracleCase, backend: str, **options):
    model = load(case, backend, **options)
    session = model.session()
    session.encode(case.vectors["input_ids"])
    return model, session


def test_logits(case: OracleCase, backend: str):
    v = case.vectors
    _, session = encoded(case, backend, weights="f32")
    positions = v["logits_positions"]
    for step, canvas, conditioning in ((1, "canvas", None), (2, "canvas_step2", case.self_conditioning)):
        logits = session.canvas_logits(v[canvas], conditioning)
        assert logits.dtype == np.float32
        assert logits.shape == (case.meta["canvas_length"], case.meta["vocab_size"])
        assert np.abs(logits[positions] - v[f"logits_step{step}"]).max() < 1e-3
        assert np.array_equal(logits.argmax(axis=-1), v[f"logits_step{step}_argmax"])
        maximum, lse = v[f"logits_step{step}_max_lse"].T
        assert np.abs(logits.max(axis=-1) - maximum).max() < 1e-3
        wide = logits.astype(np.float64)
        assert np.abs(np.log(np.exp(wide).sum(axis=-1)) - lse).max() < 1e-3


def test_stored_weights_compute_the_same(case: OracleCase):
    _, stored = encoded(case, "cpu")
    logits = stored.canvas_logits(case.vectors["canvas"])
    assert np.abs(logits[case.vectors["logits_positions"]] - case.vectors["logits_step1"]).max() < 1e-3


def test_cached_keys_and_values(case: OracleCase, backend: str):
    v = case.vectors
    _, session = encoded(case, backend, weights="f32")
    for layer, name in ((0, "layer0"), (-1, "last")):
        cache = session.cache.layers[layer]
        count = session.length - cache.base
        for kind in ("k", "v"):
            expected = v[f"enc_{kind}_{name}_full"][:, cache.base :]
            rows = session.ops.cache_to_host(getattr(cache, kind))
            assert np.abs(rows[:, :count] - expected).max() < 1e-4
    first = session.cache.layers[0]
    kept = v["enc_k_layer0_cache"]
    count = session.length - first.base
    assert np.abs(session.ops.cache_to_host(first.k)[:, count - kept.shape[1] : count] - kept).max() < 1e-4


def test_hidden_states_and_routing(case: OracleCase, backend: str):
    v = case.vectors
    model, session = encoded(case, backend, weights="f32")
    rows = len(v["input_ids"])

    recorder = Recorder(session.ops)
    session.reset()
    with session.ops.scope():
        last = encoder_pass(recorder, session.weights, model.config, session.cache, v["input_ids"], last_hidden=True)
        assert last.shape == (rows, model.config.hidden_size)
        assert np.abs(np.array(last) - v["enc_last_hidden"]).max() < 1e-3
    assert np.array_equal(recorder.ids[1], v["enc_router_topk_layer1"])
    assert np.abs(recorder.weights[1] - v["enc_router_weight_layer1"]).max() < 1e-4
    if "enc_hidden" in v:
        assert np.abs(np.stack(recorder.hidden) - v["enc_hidden"]).max() < 1e-3

    positions = v["logits_positions"]
    for step, canvas, conditioning in ((1, "canvas", None), (2, "canvas_step2", case.self_conditioning)):
        session.ops = recorder = Recorder(model.session().ops)
        session.canvas_logits(v[canvas], conditioning)
        embeds = recorder.first_norm[0]
        at = positions if len(v[f"dec_input_embeds_step{step}"]) == len(positions) else slice(None)
        assert np.abs(embeds[at] - v[f"dec_input_embeds_step{step}"]).max() < 1e-3
        if f"dec_hidden_step{step}" in v:
            assert np.abs(np.stack(recorder.hidden) - v[f"dec_hidden_step{step}"]).max() < 1e-3
        if step == 1:
            assert np.array_equal(np.stack(recorder.ids), v["dec_router_topk_all"])
            assert np.abs(recorder.weights[1] - v["dec_router_weight_layer1"]).max() < 1e-4


@pytest.mark.parametrize(("name", "trace"), TRACES)
def test_traces_are_exact(name: str, trace: str, backend: str):
    case = oracle_case(name)
    v, prefix, recorded = case.vectors, f"trace_{trace}__", case.meta["traces"][trace]
    g = recorded["generation_config"]
    config = ddllm_vk.GenerationConfig(
        max_new_tokens=g["max_new_tokens"],
        max_denoising_steps=g["max_denoising_steps"],
        t_max=g["t_max"],
        t_min=g["t_min"],
        entropy_bound=g["sampler_config"]["entropy_bound"],
        stability_threshold=g["stability_threshold"],
        confidence_threshold=g["confidence_threshold"],
        eos_token_ids=g["eos_token_id"],
        pad_token_id=g["pad_token_id"],
        guard_empty_reply=False,
    )
    model = load(case, backend, weights="f32")
    steps: list[ddllm_vk.StepInfo] = []
    result = model.generate(v["input_ids"], config, on_step=steps.append, noise=RecordedNoise(case, trace))

    assert len(steps) == len(v[prefix + "canvas_index"])
    for i, step in enumerate(steps):
        assert step.canvas_index == v[prefix + "canvas_index"][i]
        assert step.temperature == pytest.approx(v[prefix + "temperature"][i])
        for ours, name_ in (
            (step.sampled, "sampled"),
            (step.accepted, "accepted_mask"),
            (step.canvas, "canvas_out"),
            (step.ids, "argmax_canvas"),
        ):
            assert np.array_equal(ours, v[prefix + name_][i]), f"{name_} at step {i}"
        assert np.abs(step.entropy - v[prefix + "entropy"][i]).max() < 1e-3
        assert step.finished == bool(v[prefix + "finished"][i])
    assert [c.steps for c in result.canvases] == recorded["steps_per_canvas"]
    sequence = np.concatenate([v["input_ids"], *(c.ids for c in result.canvases)])
    assert np.array_equal(sequence, v[prefix + "sequences"])
    assert result.finish_reason == ("stop" if recorded["eos_positions_in_output"] else "length")


@pytest.mark.parametrize("name", ["case_1_base", "case_2_long_prompt"])
def test_q40_weights_reproduce_the_references(name: str, backend: str):
    case = oracle_case(name)
    _, session = encoded(case, backend, weights="q40", embedding="q40", activations="f32")
    logits = session.canvas_logits(case.vectors["canvas"])[case.vectors["logits_positions"]]
    expected = case.vectors["logits_q4_0_step1"]
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)
