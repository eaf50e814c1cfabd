"""Synthetic models: true shapes, sane spreads, the same bytes for the same seed, a tokenizer that works."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from ddllm_vk.checkpoint import expected_tensors, open_checkpoint, staging, synth
from ddllm_vk.checkpoint.presets import PRESETS
from ddllm_vk.checkpoint.synth import synthesize
from ddllm_vk.checkpoint.synthetic_tokenizer import tokenizer_files
from ddllm_vk.cli.synth import synth as command
from ddllm_vk.config import parse_config
from ddllm_vk.errors import CheckpointError, ConfigError, InputError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("synth") / "tiny"
    synthesize(target, "tiny")
    return target


def weights(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors")))


def test_formats(tiny: Path) -> None:
    formats = {"matrix": "q40", "embedding": "q80", "float": "f32"}
    with open_checkpoint(tiny) as c:
        assert {t.format == formats[t.role] for t in c.tensors.values() if t.role} == {True}
        assert 1e6 < c.total_bytes < 1e7
        c.check_finite()


def test_full_preset_has_the_real_shapes() -> None:
    """The figures of MODEL.md, counted by hand."""
    c = parse_config(PRESETS["26b-a4b"], Path("config.json"))
    t = expected_tensors(c)
    assert t["model.decoder.embed_tokens.weight"].shape == (262144, 2816)
    assert t["model.decoder.layers.0.self_attn.q_proj.weight"].shape == (4096, 2816)
    assert t["model.decoder.layers.0.self_attn.k_proj.weight"].shape == (2048, 2816)
    assert t["model.decoder.layers.5.self_attn.q_proj.weight"].shape == (8192, 2816)
    assert t["model.decoder.layers.5.self_attn.k_proj.weight"].shape == (1024, 2816)
    assert "model.decoder.layers.5.self_attn.v_proj.weight" not in t
    assert t["model.decoder.layers.29.experts.gate_up_proj"].shape == (128, 1408, 2816)
    assert t["model.decoder.layers.29.experts.down_proj"].shape == (128, 2816, 704)
    assert [i for i, layer in enumerate(c.layers) if not layer.sliding] == [5, 11, 17, 23, 29]
    assert (c.canvas_length, c.sliding_window, c.top_k_experts) == (256, 1024, 8)
    assert (c.final_logit_softcapping, c.max_position_embeddings) == (30.0, 262144)
    assert sum(int(np.prod(s.shape)) for s in t.values()) == pytest.approx(25.25e9, rel=1e-3)


def test_spread_of_the_weights(tiny: Path) -> None:
    with open_checkpoint(tiny) as c:
        for name, tensor in c.tensors.items():
            x = tensor.float32()
            if tensor.role != "float":
                assert x.std() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.03), name
                assert abs(x.mean()) < 5 * x.std() / np.sqrt(x.size / 32), name
        q_norm = c.tensors["model.decoder.layers.0.self_attn.q_norm.weight"].float32()
        np.testing.assert_allclose(q_norm, 1.2 * 64**-0.25, rtol=1e-6)
        for side in ("model.decoder.layers.3", "model.encoder.language_model.layers.3"):
            assert c.tensors[f"{side}.layer_scalar"].float32() == [1.0]


def test_tensors_are_not_alike(tiny: Path) -> None:
    with open_checkpoint(tiny) as c:
        seen = {t.raw().reshape(-1)[:4096].tobytes() for t in c.tensors.values() if t.role == "matrix"}
        assert len(seen) == sum(t.role == "matrix" for t in c.tensors.values())


def test_seed_decides_the_bytes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesize(tmp_path / "again", "tiny", threads=1)
    synthesize(tmp_path / "other", "tiny", seed=1)
    assert weights(tmp_path / "again") == weights(tiny)
    assert weights(tmp_path / "other") != weights(tiny)
    monkeypatch.setattr(synth, "PIECE_BYTES", 100_000)  # several pieces a tensor, drawn by several threads
    synthesize(tmp_path / "one", "tiny", threads=1)
    synthesize(tmp_path / "three", "tiny", threads=3)
    assert weights(tmp_path / "one") == weights(tmp_path / "three")


def test_fewer_layers(tiny: Path, tmp_path: Path) -> None:
    synthesize(tmp_path / "cut", "tiny", layers=2)
    with open_checkpoint(tmp_path / "cut") as cut, open_checkpoint(tiny) as whole:
        assert cut.config.num_hidden_layers == 2
        for name, tensor in cut.tensors.items():
            np.testing.assert_array_equal(tensor.raw(), whole.tensors[name].raw())


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    config = json.loads(json.dumps(PRESETS["tiny"]))
    config["text_config"]["moe_intermediate_size"] = 40  # no whole blocks: those matrices are float32
    synthesize(tmp_path / "own", config, layers=1)
    with open_checkpoint(tmp_path / "own") as c:
        down = c.tensors["model.decoder.layers.0.experts.down_proj"]
        assert (down.format, down.shape) == ("f32", (8, 256, 40))
        assert down.float32().std() == pytest.approx(40**-0.5, rel=0.03)


@pytest.mark.parametrize("vocab_size", [267, 1024, 32768])
def test_tokenizer(vocab_size: int) -> None:
    files = tokenizer_files(vocab_size, 4096)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.get_vocab_size() == vocab_size
    text = " Hello,  wörld\n\t日本 🙂 "
    ids = tokenizer.encode(text).ids
    assert ids[0] == 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|turn>user\nx<turn|>", add_special_tokens=False).ids[0] == 5
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<image|>")] == [
        0, 1, 2, 3, 6, 9,
    ]  # fmt: skip
    for i in {266, 267, vocab_size - 1} - {vocab_size}:
        assert tokenizer.decode([i]).isprintable()
    if vocab_size > 12345:
        assert tokenizer.decode([12345]) == " t12345"


def test_generation_defaults(tiny: Path) -> None:
    with open_checkpoint(tiny) as c:
        d = c.generation_defaults
        assert (d.max_denoising_steps, d.t_max, d.t_min, d.entropy_bound) == (48, 0.8, 0.4, 0.1)
        assert d.eos_token_ids == (1, 6)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="26b-a4b, small, tiny"):
        synthesize(tmp_path / "out", "huge")
    for layers in (0, 7):
        with pytest.raises(InputError, match="layers must be 1 to 6"):
            synthesize(tmp_path / "out", "tiny", layers=layers)
    with pytest.raises(InputError, match="seed"):
        synthesize(tmp_path / "out", "tiny", seed=-1)
    with pytest.raises(ConfigError, match="model_type"):
        synthesize(tmp_path / "out", {})
    config = json.loads(json.dumps(PRESETS["tiny"]))
    config["text_config"]["vocab_size"] = 100
    with pytest.raises(InputError, match="vocab_size must be at least 267"):
        synthesize(tmp_path / "out", config)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_for_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10_000_000_000
    usage = staging.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"needs 14,6\d\d.\d\d MB more, but only 10,000.00 MB are free"):
        synthesize(tmp_path / "out", "26b-a4b")
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    result = CliRunner().invoke(command, ["--preset", "tiny", "--layers", "1", "--quiet", target])
    assert (result.exit_code, result.output) == (0, "")
    result = CliRunner().invoke(command, [target])
    assert isinstance(result.exception, CheckpointError)
    assert CliRunner().invoke(command, ["--layers", "0", target]).exit_code == 2
    assert CliRunner().invoke(command, ["--preset", "huge", target]).exit_code == 2
