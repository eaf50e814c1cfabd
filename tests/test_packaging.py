"""The wheel: what is in it, and that it works from a clean venv, away from the checkout and inside it."""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "ddllm_vk" / "models" / "demo"
needs_bundled_model = pytest.mark.skipif(
    not (BUNDLED / "config.json").is_file(), reason="the tree has no bundled model (ddllm_vk/models/demo)"
)


def major(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    for name in ("ddllm_vk", "cpu", "net"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source)]
    if major("setuptools") >= 77 and major("wheel"):
        pip.append("--no-build-isolation")
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a venv that holds the wheel; the dependencies are those of the running interpreter."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, with_pip=False)
    interpreter = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needed = ("click", "jinja2", "llvmlite", "numba", "numpy", "psutil", "rich", "safetensors", "tokenizers")
    folders = {str(Path(str(importlib.import_module(name).__file__)).parent.parent) for name in needed}
    # Such folders come last on the path, and .pth files inside them (of an editable install) have no effect.
    (site_packages(interpreter) / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n")
    return interpreter


def site_packages(interpreter: Path) -> Path:
    (found,) = interpreter.parent.parent.glob("lib/python*/site-packages")
    return found


def run(python: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    return subprocess.run(
        [str(python), *args], capture_output=True, text=True, cwd=cwd, env=clean, stdin=subprocess.DEVNULL
    )


def test_only_our_name_lands_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ddllm_vk"}
    for name in ("ddllm_vk/__main__.py", "ddllm_vk/cli/generate.py", "ddllm_vk/cpu/reference.py", "ddllm_vk/py.typed"):
        assert name in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_of_the_tree_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    trees = {"ddllm_vk": "ddllm_vk", "cpu": "ddllm_vk/cpu", "net": "ddllm_vk/net"}
    for folder, inside in trees.items():
        for file in (ROOT / folder).rglob("*.py"):
            assert f"{inside}/{file.relative_to(ROOT / folder).as_posix()}" in names


def test_the_wheel_works_away_from_the_checkout(python, tmp_path):
    done = run(python, "-c", "import ddllm_vk.cpu.reference as r, ddllm_vk.net; print(r.__file__)", cwd=tmp_path)
    assert done.stdout.startswith(str(site_packages(python))), done.stdout + done.stderr
    script = python.parent / "ddllm_vk"
    done = subprocess.run([str(script), "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("ddllm_vk "), done.stderr


def test_the_installed_package_works_from_the_checkouts_root(python):
    """There Python finds the checkout's ddllm_vk first, which has cpu/ and net/ beside it."""
    done = run(python, "-c", "import ddllm_vk, ddllm_vk.cpu.reference as r, ddllm_vk.net; print(r.__file__)", cwd=ROOT)
    assert done.stdout.strip() == str(ROOT / "cpu" / "reference.py"), done.stdout + done.stderr
    done = run(python, "-c", "import cpu", cwd=python.parent)
    assert done.returncode != 0
    done = run(python, "-m", "ddllm_vk", "generate", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_the_compiled_shaders(wheel, python, tmp_path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"ddllm_vk/shaders/{file.name}" for file in (ROOT / "ddllm_vk" / "shaders").iterdir()} <= names
    done = run(
        python, "-c", "from ddllm_vk.gpu import shaders as s; print(len([*map(s.load, s.names())]))", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(name.endswith(".spv") for name in names)


@needs_bundled_model
def test_the_wheel_has_the_bundled_model(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"ddllm_vk/models/demo/{file.name}" for file in BUNDLED.iterdir()} <= names


@needs_bundled_model
@pytest.mark.parametrize("place", ["outside", "checkout"])
def test_generate_from_the_wheel(python, tmp_path, place):
    cwd = tmp_path if place == "outside" else ROOT
    done = run(python, "-m", "ddllm_vk", "generate", "What is the capital of France?", cwd=cwd)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr
