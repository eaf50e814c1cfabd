"""Generation through the public API: what a caller may ask for, and what is promised about the answer."""

import gc
import subprocess
import sys

import numpy as np
import psutil
import pytest
from conftest import ORACLE, oracle_case

import ddllm_vk
from ddllm_vk import GenerationConfig, InputError

CHECKPOINT = ORACLE / "case_3_multi_canvas/checkpoint"
SHORT = GenerationConfig(max_new_tokens=64, max_denoising_steps=4, seed=3, eos_token_ids=())


@pytest.fixture(scope="module")
def model() -> ddllm_vk.Model:
    return ddllm_vk.load_model(CHECKPOINT, weights="q40")


@pytest.fixture
def prompt() -> np.ndarray:
    return oracle_case("case_3_multi_canvas").vectors["input_ids"]


def test_same_seed_same_ids(model, prompt):
    first = model.generate(prompt, SHORT)
    again = model.generate(prompt.tolist(), SHORT)
    other = model.generate(prompt, GenerationConfig(max_new_tokens=64, max_denoising_steps=4, seed=4, eos_token_ids=()))
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other.ids)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(model, prompt, threads: int):
    expected = model.generate(prompt, SHORT)
    other = ddllm_vk.load_model(CHECKPOINT, weights="q40", threads=threads)
    steps: list[ddllm_vk.StepInfo] = []
    assert np.array_equal(other.generate(prompt, SHORT, on_step=steps.append).ids, expected.ids)
    same: list[ddllm_vk.StepInfo] = []
    model.generate(prompt, SHORT, on_step=same.append)
    assert all(np.array_equal(a.entropy, b.entropy) for a, b in zip(steps, same, strict=True))


def test_two_processes_agree(model, prompt):
    code = (
        "import sys, ddllm_vk\n"
        "m = ddllm_vk.load_model(sys.argv[1], weights='q40')\n"
        "c = ddllm_vk.GenerationConfig(max_new_tokens=64, max_denoising_steps=4, seed=3, eos_token_ids=())\n"
        "print(m.generate([int(i) for i in sys.argv[2].split()], c).ids.tolist())\n"
    )
    argument = " ".join(map(str, prompt))
    run = subprocess.run(
        [sys.executable, "-c", code, str(CHECKPOINT), argument], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == str(model.generate(prompt, SHORT).ids.tolist())


def test_a_long_prompt_does_not_depend_on_how_it_is_fed():
    """700 tokens: several encoder chunks and many times the window."""
    model = ddllm_vk.load_model(CHECKPOINT, weights="f32")
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, 700)
    canvas = ids[:32]
    whole, pieces = model.session(), model.session()
    whole.encode(ids)
    for piece in np.array_split(ids, [1, 5, 300, 301]):
        pieces.encode(piece)
    assert np.abs(whole.canvas_logits(canvas) - pieces.canvas_logits(canvas)).max() < 1e-3


def test_a_canvas_pass_leaves_the_cache_as_it_was(model, prompt):
    session = model.session()
    session.encode(prompt)
    canvas = prompt[:1].repeat(32)
    first = session.canvas_logits(canvas)
    session.canvas_logits(canvas[::-1].copy(), first)
    assert session.length == len(prompt)
    assert np.array_equal(session.canvas_logits(canvas), first)


def test_a_reset_session_is_a_fresh_one(model, prompt):
    used, fresh = model.session(), model.session()
    used.encode(prompt)
    used.reset()
    used.encode(prompt[::-1].copy())
    fresh.encode(prompt[::-1].copy())
    assert np.array_equal(used.canvas_logits(prompt[:1].repeat(32)), fresh.canvas_logits(prompt[:1].repeat(32)))


def test_production_statistics_agree_with_the_full_logits(model, prompt):
    session = model.session()
    session.encode(prompt)
    rng = np.random.default_rng(0)
    canvas, u, t = rng.integers(0, 512, 32), rng.random(32), 0.7
    logits = session.canvas_logits(canvas).astype(np.float64) / t
    session.begin_canvas()
    stats = session.canvas_step(canvas, t, u)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    assert np.array_equal(stats.argmax, logits.argmax(axis=-1))
    assert np.allclose(stats.entropy, -(p * np.log(p)).sum(axis=-1), atol=1e-5)
    cdf = np.cumsum(p, axis=-1)
    assert np.array_equal(stats.sampled, [np.searchsorted(c, x, side="right") for c, x in zip(cdf, u, strict=True)])
    # the second step is conditioned on the first's logits at its temperature
    after = session.canvas_step(canvas, t, u)
    again = session.canvas_logits(canvas, logits.astype(np.float32)).astype(np.float64) / t
    assert np.array_equal(after.argmax, again.argmax(axis=-1))


def test_max_new_tokens_cuts_inside_a_canvas(model, prompt):
    result = model.generate(prompt, GenerationConfig(max_new_tokens=40, max_denoising_steps=2, eos_token_ids=()))
    assert len(result.ids) == 40
    assert len(result.canvases) == 2
    assert result.finish_reason == "length"
    assert np.array_equal(result.ids[:32], result.canvases[0].ids)


def test_ids_end_with_the_first_end_of_sequence(model, prompt):
    free = model.generate(prompt, SHORT)
    end = int(free.ids[5])
    result = model.generate(
        prompt,
        GenerationConfig(
            max_new_tokens=64,
            max_denoising_steps=4,
            seed=3,
            eos_token_ids=[end],
            pad_token_id=9,
            guard_empty_reply=False,
        ),
    )
    first = int(np.flatnonzero(free.ids == end)[0])
    assert np.array_equal(result.ids, free.ids[: first + 1])
    assert result.finish_reason == "stop"
    assert set(result.canvases[0].ids[first + 1 :]) == {9}


class AlwaysFirst:
    """Noise whose uniforms sample the first possible token."""

    def __init__(self, canvas_length: int):
        self.length = canvas_length

    def initial_canvas(self, canvas_index):
        return np.zeros(self.length, dtype=np.int64)

    renoise = lambda self, canvas_index, step: np.zeros(self.length, dtype=np.int64)  # noqa: E731

    def uniforms(self, canvas_index, step):
        return np.zeros(self.length)


def test_the_guard_forbids_an_empty_reply(model, prompt):
    """With every token that row 0 would take declared an end of sequence, the reply still is not empty."""
    steps: list[ddllm_vk.StepInfo] = []
    base = {"max_new_tokens": 32, "max_denoising_steps": 3}
    noise = AlwaysFirst(32)
    free = model.generate(prompt, GenerationConfig(**base, eos_token_ids=()), noise=noise)
    end = int(free.ids[0])
    empty = model.generate(prompt, GenerationConfig(**base, eos_token_ids=[end], guard_empty_reply=False), noise=noise)
    assert empty.ids.tolist() == [end]
    guarded = model.generate(prompt, GenerationConfig(**base, eos_token_ids=[end]), on_step=steps.append, noise=noise)
    assert guarded.ids[0] != end
    assert all(s.ids[0] != end and s.sampled[0] != end for s in steps)


def test_the_guard_touches_row_0_of_the_first_step_only(model, prompt):
    plain, guarded = [], []
    base = {"max_new_tokens": 32, "max_denoising_steps": 1, "eos_token_ids": list(range(200))}
    model.generate(prompt, GenerationConfig(**base, guard_empty_reply=False), on_step=plain.append)
    model.generate(prompt, GenerationConfig(**base), on_step=guarded.append)
    assert guarded[0].ids[0] >= 200
    assert guarded[0].sampled[0] >= 200
    for name in ("ids", "sampled", "entropy"):
        assert np.array_equal(getattr(plain[0], name)[1:], getattr(guarded[0], name)[1:])


def test_returning_false_cancels(model, prompt):
    seen = []

    def stop(step):
        seen.append(step)
        return not (step.canvas_index == 1 and step.step == 1)

    result = model.generate(prompt, SHORT, on_step=stop)
    assert result.finish_reason == "cancelled"
    assert len(result.canvases) == 1
    assert len(result.ids) == 32
    assert len(seen) == result.canvases[0].steps + 2


def test_encoding_is_told_and_can_be_cancelled():
    model = ddllm_vk.load_model(CHECKPOINT, weights="q40")
    long = np.random.default_rng(0).integers(7, 500, 600)
    told, limit = [], 10_000

    def on_encode(done, total):
        told.append((done, total))
        return done < limit

    result = model.generate(long, SHORT, on_encode=on_encode)
    assert told == [(256, 600), (512, 600), (600, 600), (32, 32)]  # the prompt, then the first canvas
    assert result.finish_reason == "length"

    told, limit, steps = [], 512, []
    result = model.generate(long, SHORT, on_step=steps.append, on_encode=on_encode)
    assert told == [(256, 600), (512, 600)]
    assert (result.finish_reason, len(result.ids), result.canvases, steps) == ("cancelled", 0, [], [])
    assert result.stats.encode_seconds > 0

    told, limit = [], 10_000
    session = model.session()
    assert session.encode(long, on_encode)
    limit = 256
    assert not session.encode(long, on_encode)
    assert session.length == 600 + 256


def test_canvases_are_told_as_they_finish(model, prompt):
    told = []
    result = model.generate(prompt, SHORT, on_canvas=told.append)
    assert [c.index for c in told] == [0, 1]
    assert np.array_equal(np.concatenate([c.ids for c in told]), result.ids)
    assert result.stats.steps == [c.steps for c in result.canvases]
    assert result.stats.new_tokens == len(result.ids) == 64
    assert result.stats.prompt_tokens == len(prompt)
    assert result.stats.peak_memory_bytes > 0


def test_a_string_is_one_user_message(model):
    messages = [{"role": "user", "content": "why blue"}]
    assert np.array_equal(model.prompt_ids("why blue"), model.prompt_ids(messages))
    assert np.array_equal(model.prompt_ids(messages), oracle_case("case_3_multi_canvas").vectors["input_ids"])


def test_the_context_bounds_the_canvases(model):
    context, length = model.config.max_position_embeddings, model.config.canvas_length
    config = GenerationConfig(max_new_tokens=10 * length, max_denoising_steps=1, eos_token_ids=())
    result = model.generate(np.zeros(context - 2 * length - 1, dtype=int) + 3, config)
    assert len(result.canvases) == 2
    assert result.finish_reason == "length"
    with pytest.raises(InputError, match=f"context of {context}"):
        model.generate(np.zeros(context - length + 1, dtype=int), config)


@pytest.mark.parametrize("prompt", [[], np.zeros((2, 2), dtype=int), [1.5], np.array([], dtype=int), [[1]], None])
def test_prompts_that_cannot_be_used(model, prompt):
    with pytest.raises(InputError):
        model.generate(prompt)


@pytest.mark.parametrize("ids", [[512], [-1], [2, 3, 10**9]])
def test_ids_outside_the_vocabulary(model, ids):
    with pytest.raises(InputError, match="vocabulary"):
        model.generate(ids)
    with pytest.raises(InputError, match="vocabulary"):
        model.session().canvas_logits(ids + [0] * (32 - len(ids)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_denoising_steps": -3}, "max_denoising_steps must be at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
        ({"t_max": 0.0}, "t_max must be a positive number"),
        ({"t_min": float("nan")}, "t_min must be a positive number"),
        ({"entropy_bound": -0.1}, "entropy_bound must not be negative"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold must not be negative"),
        ({"stability_threshold": -1}, "stability_threshold must be at least 0"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"t_max": "x"}, "t_max must be a number"),
        ({"entropy_bound": [1]}, "entropy_bound must be a number"),
    ],
)
def test_settings_that_cannot_be_used(options, message):
    with pytest.raises(InputError, match=message):
        GenerationConfig(**options)


class Spoilt(ddllm_vk.PhiloxNoise):
    """Noise of which one method gives something else."""

    def __init__(self, name: str, value: np.ndarray):
        super().__init__(0, 32, 512)
        setattr(self, name, lambda *_: value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uniforms", np.full(32, 1.5)),
        ("uniforms", np.full(32, np.nan)),
        ("uniforms", np.zeros(31)),
        ("renoise", np.zeros(32)),
        ("renoise", np.full(32, 512)),
        ("initial_canvas", np.full(32, -1)),
        ("initial_canvas", np.zeros((2, 32), dtype=int)),
    ],
)
def test_noise_that_cannot_be_used(model, prompt, name, value):
    with pytest.raises(InputError, match="noise must give 32"):
        model.generate(prompt, SHORT, noise=Spoilt(name, value))


def test_every_token_an_end_of_sequence(model, prompt):
    with pytest.raises(InputError, match="every token ends the sequence"):
        model.generate(prompt, GenerationConfig(eos_token_ids=range(512)))


def test_self_conditioning_that_is_not_finite(model, prompt):
    session = model.session()
    with pytest.raises(InputError, match="not finite"):
        session.canvas_logits(prompt[:1].repeat(32), np.full((32, 512), np.inf))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_and_forks_share_a_model(model, prompt):
    import os
    import threading

    expected = model.generate(prompt, SHORT).ids
    answers: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: model.generate(prompt, SHORT).ids})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 4
    assert all(np.array_equal(ids, expected) for ids in answers.values())
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(model.generate(prompt, SHORT).ids, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_t_min_above_the_checkpoints_t_max(model, prompt):
    with pytest.raises(InputError, match=r"t_min 0\.9 is above t_max 0\.8"):
        model.generate(prompt, GenerationConfig(t_min=0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "q4"}, "weights must be one of"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"embedding": "q80"}, "embedding can be chosen"),
        ({"threads": 0}, "threads must be 1 to 1024"),
        ({"device": 1}, "device 1"),
        ({"activations": "f16"}, "activations must be one of"),
        ({"kv_cache": "bf16"}, "kv_cache must be one of"),
    ],
)
def test_load_options_that_cannot_be_used(options, message):
    with pytest.raises(InputError, match=message):
        ddllm_vk.load_model(CHECKPOINT, **options)


def logits_of(prompt, **options) -> np.ndarray:
    session = ddllm_vk.load_model(CHECKPOINT, **options).session()
    session.encode(prompt)
    return session.canvas_logits(prompt[:1].repeat(32)).astype(np.float64)


@pytest.mark.parametrize("options", [{"weights": "f32"}, {"weights": "q40", "activations": "f32"}])
def test_cpu_kernels_agree_with_the_numpy_reference(options, prompt):
    reference, cpu = (logits_of(prompt, backend=backend, **options) for backend in ("reference", "cpu"))
    assert np.abs(cpu - reference).max() < 1e-3


def test_q80_activations_differ_from_the_numpy_reference_by_rounding_only(prompt):
    """A value on a rounding boundary may fall either way, so the two differ, but by less than Q80 itself costs."""
    quantized, cpu, exact = (
        logits_of(prompt, backend=backend, weights="q40", activations=activations, kv_cache="f32")
        for backend, activations in (("reference", "q80"), ("cpu", "q80"), ("cpu", "f32"))
    )
    assert np.linalg.norm(cpu - quantized) < np.linalg.norm(cpu - exact)


@pytest.mark.parametrize(
    ("options", "fmt"),
    [
        ({}, "f32"),  # the folder's weights are float16 or wider
        ({"weights": "f32"}, "f32"),
        ({"weights": "q40"}, "f16"),
        ({"weights": "q40", "activations": "f32"}, "f32"),
        ({"weights": "f32", "kv_cache": "q80"}, "q80"),
        ({"weights": "q40", "kv_cache": "f32"}, "f32"),
    ],
)
def test_the_cache_is_rounded_where_other_things_are(options, fmt):
    model = ddllm_vk.load_model(CHECKPOINT, **options)
    cache = model.session().cache
    assert model.kv_cache == cache.format == fmt
    assert {array.format for layer in cache.layers for array in (layer.k, layer.v)} == {fmt}


@pytest.mark.parametrize("fmt", ["f16", "q80"])
def test_rounding_the_cache_costs_no_more_than_q80_activations_do(fmt):
    """Of the bundled model's logits, in the mean of several prompts."""
    measured, allowed = [], []
    for prompt in ("What is 47 + 38?", "Sort the letters: PLANET", "What is the capital of France?"):
        logits = []
        for options in ({}, {"activations": "q80"}, {"kv_cache": fmt}):
            model = ddllm_vk.load_model(**{"activations": "f32", "kv_cache": "f32", **options})
            session = model.session()
            session.encode(model.prompt_ids(prompt))
            canvas = np.random.default_rng(2).integers(0, model.config.vocab_size, model.config.canvas_length)
            logits.append(session.canvas_logits(canvas).astype(np.float64))
        exact, activations, cache = logits
        measured.append(np.linalg.norm(cache - exact) / np.linalg.norm(exact))
        allowed.append(np.linalg.norm(activations - exact) / np.linalg.norm(exact))
    # measured: f16 about a third of it, q80 about as much
    assert 0 < np.mean(measured) < np.mean(allowed) * (1 if fmt == "f16" else 1.5)


@pytest.mark.parametrize("fmt", ["f16", "q80"])
def test_the_cpus_cache_is_the_references(fmt):
    """Both round what they store alike, so what the first layer holds is the same but for a rare tie."""
    ids = np.arange(20, 320)
    rows = []
    for backend in ("reference", "cpu"):
        session = ddllm_vk.load_model(CHECKPOINT, backend=backend, weights="f32", kv_cache=fmt).session()
        session.encode(ids)
        layer = session.cache.layers[0]
        rows.append(session.ops.cache_to_host(layer.k)[:, : session.length - layer.base])
    same = np.isclose(*rows, rtol=1e-3 if fmt == "f16" else 0, atol=0 if fmt == "f16" else 1e-4)
    assert same.mean() > 0.98
    assert np.abs(rows[0] - rows[1]).max() < 0.02 * np.abs(rows[0]).max()


def test_a_context_of_random_numbers():
    """It has the size of an encoded one: passes after it run, and encoding goes on from it."""
    model = ddllm_vk.load_model(CHECKPOINT, weights="q40")
    session, canvas = model.session(), np.zeros(32, np.int32)
    session.fill_with_random_context(700)
    assert session.length == 700
    logits = session.canvas_logits(canvas)
    assert np.isfinite(logits).all()
    session.fill_with_random_context(700, seed=1)
    assert not np.array_equal(session.canvas_logits(canvas), logits)
    session.fill_with_random_context(700)
    assert np.array_equal(session.canvas_logits(canvas), logits)
    session.encode([5, 6])
    assert session.length == 702
    encoded = model.session()
    encoded.encode(np.full(702, 5))
    assert encoded.cache.nbytes == session.cache.nbytes
    with pytest.raises(InputError, match="length must be 0 to"):
        session.fill_with_random_context(10**9)


def test_a_sessions_buffers_are_allocated_once():
    model = ddllm_vk.load_model(CHECKPOINT, weights="q40")
    session, canvas, uniforms = model.session(), np.zeros(32, np.int32), np.full(32, 0.5)
    session.encode(np.full(800, 9))
    session.canvas_step(canvas, 0.8, uniforms)

    def buffers():
        arrays = [array.data for layer in session.cache.layers for array in (layer.k, layer.v)]
        return [a.ctypes.data for a in (*arrays, session.ops.pool.scratch("attention", np.uint8, 1))]

    before = buffers()
    session.canvas_step(canvas, 0.8, uniforms)
    session.reset()
    session.encode(np.full(800, 9))
    session.canvas_step(canvas, 0.8, uniforms)
    assert buffers() == before


def test_memory_does_not_grow_with_requests(model, prompt):
    process = psutil.Process()
    sizes = []
    for i in range(30):
        model.generate(prompt, GenerationConfig(max_new_tokens=96, max_denoising_steps=3, seed=i, eos_token_ids=()))
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[29] <= sizes[9] * 1.01
