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
OTHERS = [name for name, i in isa.ISAS.items() if not i.missing(isa.target_features()) and i is not isa.ACTIVE]
X86 = {"avx2", "fma", "f16c"}


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


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (X86 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}, "avx512vnni"),
        (X86 | {"avx512f", "avx512bw", "avx512vl"}, "avx512"),
        (X86 | {"avxvnni"}, "avxvnni"),
        (X86, "avx2"),
        (X86 - {"f16c"}, "generic"),
        ({"neon", "dotprod", "lse"}, "neon-dotprod"),
        ({"neon"}, "neon"),
        (set(), "generic"),
    ],
)
def test_the_best_available_set_is_chosen(features, expected):
    assert isa.choose(None, frozenset(features)).name == expected
    assert isa.choose("", frozenset(features)).name == expected
    assert isa.choose("generic", frozenset(features)).name == "generic"


def test_vnni_in_either_encoding_runs_the_256_bit_kernels():
    assert isa.choose("avxvnni", frozenset(X86 | {"avxvnni"})).name == "avxvnni"
    assert isa.choose("avxvnni", frozenset(X86 | {"avx512vnni", "avx512vl"})).name == "avxvnni"
    with pytest.raises(InputError, match="avxvnni"):
        isa.choose("avxvnni", frozenset(X86 | {"avx512vnni"}))


def test_a_forced_set_is_validated():
    with pytest.raises(
        InputError, match=r"sse9.*not known.*avx512vnni, avxvnni, avx512, avx2, neon-dotprod, neon, gen"
    ):
        isa.choose("sse9", frozenset())
    with pytest.raises(InputError, match=r"'avx512vnni'.*x86-64 with avx512bw, avx512f, avx512vnni.*: avx2, generic"):
        isa.choose("avx512vnni", frozenset(X86))
    with pytest.raises(InputError, match=r"'neon-dotprod'.*ARM.*dotprod, neon.*usable here: generic"):
        isa.choose("neon-dotprod", frozenset())


PRODUCT = """
import hashlib
import numpy as np
from ddllm_vk import quants
from ddllm_vk.cpu import isa, kernels
rng, pool = np.random.default_rng(1), kernels.ThreadPool(2)
x = rng.integers(-127, 128, (7, 96)).astype(np.float32)
x[:, ::32] = 127  # so that a row's scales are 1
digest = hashlib.sha256()
for fmt in ("q40", "q80"):
    raw = quants.quantize(fmt, rng.standard_normal((37, 96), np.float32))
    expected = x.astype(np.float64) @ quants.dequantize(fmt, raw).T.astype(np.float64)
    for rows in (kernels.quantize_rows(pool, x), x):
        out = kernels.linear(pool, rows, kernels.pack(fmt, raw, (37, 96), pool), np.empty((7, 37), np.float32))
        assert abs(out - expected).max() < 1e-5 * abs(expected).max(), fmt
        digest.update(out.tobytes())
print(isa.ACTIVE.name, digest.hexdigest())
"""
AVX2 = "+avx,+avx2,+fma,+f16c"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"


@pytest.mark.parametrize(
    ("cpu", "features", "expected"),
    [
        ("generic", "", "generic"),
        ("haswell", "", "generic"),
        ("haswell", AVX2, "avx2"),
        ("skylake-avx512", AVX512, "avx512"),
        ("cascadelake", AVX512 + ",+avx512vnni", "avx512vnni"),
        ("znver3", AVX2, "avx2"),
        ("alderlake", AVX2 + ",+avxvnni", "avxvnni"),
    ],
)
def test_a_narrowed_code_generator_is_obeyed(cpu, features, expected):
    """No instruction is emitted that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES exclude: LLVM would abort the process."""
    if "avx2" not in isa.target_features() or not {f[1:] for f in features.split(",") if f} <= isa.target_features():
        pytest.skip("not an x86-64 machine with these features")
    run = python("-c", PRODUCT, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, DDLLM_VK_ISA="")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == expected


def test_every_set_gives_the_same_bits():
    """Integers are exact, and floats are multiplied and added in one order; all on a processor that fuses the two."""
    if not {"fma", "neon"} & isa.target_features():
        pytest.skip("no fused multiply-add")
    digests = set()
    for name, i in isa.ISAS.items():
        if not i.missing(isa.target_features()):
            run = python("-c", PRODUCT, DDLLM_VK_ISA=name)
            assert run.returncode == 0, run.stderr
            assert run.stdout.split()[0] == name
            digests.add(run.stdout.split()[1])
    assert len(digests) == 1


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ddllm_vk", *args, DDLLM_VK_ISA="")


def test_the_command_line_forces_a_set():
    """Before or after the command's name; the answer is the same, being the model's."""
    arguments = ("generate", "--quiet", "--seed", "1", "What is 2 + 3?")
    best = command(*arguments)
    assert best.returncode == 0, best.stderr
    for forced in (command("--isa", "generic", *arguments), command(*arguments, "--isa", "generic")):
        assert forced.returncode == 0, forced.stderr
        assert forced.stdout == best.stdout
    code = "from ddllm_vk.cli import run; run(['--isa', 'generic', 'inspect', '--help']); from ddllm_vk.cpu import isa"
    assert python("-c", code + "; print(isa.ACTIVE.name)").stdout.splitlines()[-1] == "generic"


def test_the_command_line_says_why_not():
    unknown = command("generate", "--isa", "sse9", "x")
    assert unknown.returncode == 2
    assert "'--isa'" in unknown.stderr
    assert "'sse9'" in unknown.stderr
    empty = command("generate", "--isa", "", "x")
    assert empty.returncode == 2
    assert "is empty" in empty.stderr
    foreign = next(name for name, i in isa.ISAS.items() if i.missing(isa.target_features()))
    unusable = command("bench", "--isa", foreign)
    assert unusable.returncode == 2
    assert "usable here: " in unusable.stderr
    assert "Traceback" not in unusable.stderr
    usage = "".join(command("generate", "--help").stdout.split())  # names with a hyphen may be wrapped
    assert all(name in usage for name in isa.ISAS)


def test_what_is_in_use_cannot_be_changed():
    code = "import sys; from ddllm_vk.cpu import isa; from ddllm_vk.cli import run; sys.exit(run(sys.argv[1:]))"
    other = "generic" if isa.choose(None, isa.target_features()).name != "generic" else "avx2"
    run = python("-c", code, "demo", "--isa", other, DDLLM_VK_ISA="")
    assert (run.returncode, "Traceback" in run.stderr) == (1, False)
    assert f"--isa {other}: the kernels of this process are in use already" in run.stderr


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
