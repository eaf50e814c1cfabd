""".ci/build_kompute.py: its edits apply to a source they fit exactly, and to no other."""

import importlib.util
from pathlib import Path

import pytest

from ddllm_vk.gpu.kompute_runtime import MARKER

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "build_kompute.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("build_kompute", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(script, tmp_path):
    """The places the edits look for, and nothing else."""
    for name in {name for name, _, _ in script.EDITS}:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(f"<<{old}>>" for edited, old, _ in script.EDITS if edited == name))
    return tmp_path


def test_every_edit_is_made(script, source):
    script.apply_edits(source)
    for name, _, new in script.EDITS:
        assert f"<<{new}>>" in (source / name).read_text()
    assert "pybind11>=2.12" in (source / "pyproject.toml").read_text()


def test_a_source_that_fits_twice_or_not_at_all_is_refused(script, source):
    name, old, _ = script.EDITS[-1]
    file = source / name
    whole = file.read_text()
    for text in (whole + old, whole.replace(old, "")):
        file.write_text(text)
        with pytest.raises(SystemExit, match="expected exactly one"):
            script.apply_edits(source)


def test_the_runtime_knows_the_build_by_its_version(script):
    assert script.MARKER.startswith(MARKER)
