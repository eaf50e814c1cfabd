"""The compiled kernels' cache on disk: used again, and no danger when its files are damaged."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import numpy as np
from ddllm_vk.cpu import jit, kernels
from ddllm_vk.cpu.threads import ThreadPool
x = np.arange(64, dtype=np.float32).reshape(2, 32)
out = np.empty_like(x)
kernels.add(ThreadPool(1), x, x, out)
assert (out == 2 * x).all()
print(jit.CACHE_FOLDER)
"""


def use_a_kernel(home: Path) -> Path:
    """Runs one kernel in a process of its own; the folder of its cache."""
    environment = os.environ | {"XDG_CACHE_HOME": str(home)}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return Path(run.stdout.strip())


def test_damaged_files_cost_a_compilation_only(tmp_path: Path):
    folder = use_a_kernel(tmp_path)
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert folder.is_relative_to(tmp_path)
    assert files
    for damage in (b"", b"\xda not a pickle", os.urandom(500)):
        for file in files:
            file.write_bytes(damage)
        assert use_a_kernel(tmp_path) == folder
