"""The choice of an instruction set, the kernel cache, and every kernel test again on the other instruction sets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddllm_vk.cpu import isa, jit
from ddllm_vk.errors import InputError

TESTS = Path(__file__).parent
KERNEL_TESTS = [f"test_kernels_{name}.py" for name in ("matmul", "attention", "rowwise", "head")]
OTHERS = [name for name, i in isa.ISAS.items() if i.needs <= isa.target_features() and i is not isa.ACTIVE]


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif("DDLLM_VK_ISA" in os.environ, reason="an instruction set is forced already")
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_on(name):
    run = python("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS, DDLLM_VK_ISA=name)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]


def test_the_best_available_set_is_chosen():
    vnni, avx2 = isa.ISAS["avx512vnni"].needs, isa.ISAS["avx2"].needs
    assert isa.choose(None, vnni).name == "avx512vnni"
    assert isa.choose(None, avx2).name == "avx2"
    assert isa.choose("", avx2 - {"f16c"}).name == "generic"
    assert isa.choose(None, frozenset()).name == "generic"
    assert isa.choose("generic", vnni).name == "generic"


def test_a_forced_set_is_validated():
    with pytest.raises(InputError, match=r"sse9.*avx512vnni, avx2, generic"):
        isa.choose("sse9", frozenset())
    with pytest.raises(InputError, match=r"avx512vnni.*avx512f"):
        isa.choose("avx512vnni", isa.ISAS["avx2"].needs)


@pytest.mark.skipif(sys.platform != "linux", reason="x86 names")
@pytest.mark.parametrize(("cpu", "features"), [("generic", ""), ("haswell", "+avx,+avx2,+fma,+f16c"), ("haswell", "")])
def test_a_narrowed_code_generator_is_obeyed(cpu, features):
    """No instruction is emitted that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES exclude: LLVM would abort the process."""
    if not isa.ISAS["avx2"].needs <= isa.target_features():
        pytest.skip("not a machine with AVX2")
    code = (
        "from ddllm_vk.cpu import isa, kernels as k; import numpy as np; pool = k.ThreadPool(1);"
        "raw = np.zeros((16, 1, 18), np.uint8); raw[:, :, 1] = 60; w = k.pack('q40', raw, (16, 32), pool);"
        "out = k.linear(pool, k.quantize_rows(pool, np.ones((3, 32), np.float32)), w, np.empty((3, 16), np.float32));"
        "assert (abs(out + 256) < 1e-3).all(), out; print(isa.ACTIVE.name)"
    )
    run = python("-c", code, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ("avx2" if "avx2" in features else "generic")


def test_kernels_have_a_cache_of_their_own(tmp_path):
    """Two instruction sets never share a folder, and numba's own setting is left alone."""
    code = "import numba; from ddllm_vk.cpu import jit, kernels; print(jit.CACHE_FOLDER); print(numba.config.CACHE_DIR)"
    ours = {}
    for name in ("generic", ""):
        run = python("-c", code, XDG_CACHE_HOME=str(tmp_path), DDLLM_VK_ISA=name, NUMBA_CACHE_DIR="/elsewhere")
        assert run.returncode == 0, run.stderr
        folder, numbas = run.stdout.splitlines()
        assert Path(folder).is_relative_to(tmp_path / "ddllm_vk" / "kernels")
        assert numbas == "/elsewhere"
        ours[name] = folder
    if isa.choose(None, isa.target_features()).name != "generic":
        assert ours["generic"] != ours[""]


def test_an_unwritable_home_is_no_obstacle(tmp_path):
    (tmp_path / "file").touch()
    code = "from ddllm_vk.cpu import jit; print(jit.CACHE_FOLDER)"
    run = python("-c", code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(tmp_path)
    assert Path(jit.CACHE_FOLDER).is_dir()
