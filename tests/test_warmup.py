"""warmup: afterwards nothing is compiled any more, whatever the model's formats and however it is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ORACLE

from ddllm_vk.warmup import _is_complete, _state

# Kernels that others contain are not loaded by themselves: the cache's files tell what was compiled.
MISSING = """
from pathlib import Path
from ddllm_vk.backends import cpu
from ddllm_vk.cpu import jit
files = [path.name for path in Path(jit.CACHE_FOLDER).rglob("*.nbi")]
print([k.__name__ for k in jit.KERNELS if not any(f".{k.__name__}-" in name for name in files)])
"""

USE = """
import sys
import numpy as np
import ddllm_vk
from ddllm_vk.cpu import jit
path, weights, activations, kv_cache = sys.argv[1:]
compiled = []
with jit.compilations(compiled.append):
    model = ddllm_vk.load_model(path or None, weights=weights, activations=activations, kv_cache=kv_cache, threads=2)
    model.generate([2, 3, 4], ddllm_vk.GenerationConfig(max_denoising_steps=2, guard_empty_reply=False))
    model.generate([2, 3, 4], ddllm_vk.GenerationConfig(max_denoising_steps=2))
    session = model.session()
    canvas = np.zeros(model.config.canvas_length, np.int32)
    session.canvas_logits(canvas, self_conditioning=session.canvas_logits(canvas))
print(compiled)
"""


def python(*args: str) -> str:
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True, timeout=600)
    return run.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    python("-m", "ddllm_vk", "warmup")


def test_a_second_run_finds_nothing_to_do():
    assert python("-m", "ddllm_vk", "warmup").startswith("nothing to do")


def test_every_kernel_is_compiled():
    assert python("-c", MISSING) == "[]"


def test_generate_adds_nothing_to_the_cache():
    folder = Path(python("-c", "from ddllm_vk.cpu import jit; print(jit.CACHE_FOLDER)"))
    before = sorted(folder.rglob("*"))
    assert python("-m", "ddllm_vk", "generate", "-q", "What is the capital of France?")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("activations", "kv_cache"), [("q80", "f16"), ("f32", "f32"), ("q80", "q80")])
@pytest.mark.parametrize(
    ("path", "weights"),
    [
        ("", "stored"),  # the bundled model
        ("case_1_base", "stored"),  # float32
        ("case_3_multi_canvas", "stored"),  # bfloat16
        ("case_3_multi_canvas", "q40"),
    ],
)
def test_no_model_needs_more(path, weights, activations, kv_cache):
    folder = str(ORACLE / path / "checkpoint") if path else ""
    assert python("-c", USE, folder, weights, activations, kv_cache) == "[]"


def test_a_lost_file_is_noticed(tmp_path):
    (tmp_path / "a.nbi").write_bytes(b"1")
    (tmp_path / "b.nbc").write_bytes(b"22")
    assert not _is_complete(tmp_path)
    (tmp_path / "complete.json").write_text(json.dumps(_state(tmp_path)))
    assert _is_complete(tmp_path)
    (tmp_path / "another.nbi").write_bytes(b"1")
    assert _is_complete(tmp_path)
    (tmp_path / "b.nbc").write_bytes(b"")
    assert not _is_complete(tmp_path)
    (tmp_path / "b.nbc").unlink()
    assert not _is_complete(tmp_path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"sources": 1, "files": 2}', "\udcff"])
def test_a_damaged_note_is_no_note(tmp_path, damage):
    (tmp_path / "complete.json").write_text(damage, errors="surrogateescape")
    assert not _is_complete(tmp_path)
