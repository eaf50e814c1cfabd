"""The self-test of a runtime on a device, in a process of its own: a driver that crashes or hangs ends only that.

`run` is the test, `judge` its verdict: cached for the device, its driver, the runtime and the shaders.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import GpuError
from . import shaders
from .devices import Device, list_devices
from .program import Program
from .runtime import Runtime

LIMIT = 120.0  #: seconds a self-test may take; pipelines of a cold software device take a few
KEEP_FAILURE = 24 * 3600.0  #: seconds after which a runtime that failed is tried again
PACKAGES = {"vulkan": "vulkan", "kompute": "kp"}  #: what a runtime is installed as


@dataclass(frozen=True)
class Verdict:
    """What the self-test of one runtime on one device found."""

    usable: bool
    seconds: float = 0.0  #: of one replay of 200 small dependent dispatches
    reason: str = ""  #: why it is not usable
    time: float = 0.0  #: when it was found, seconds since the epoch


def run(runtime: Runtime) -> float:
    """Moves data both ways, runs dependent dispatches, compares; GpuError if anything differs. Returns the seconds
    of one replay of 200 dependent dispatches."""
    words = 3000
    span = runtime.allocate(12, host=True)
    span.array()[:] = [0, 0, words]
    buffers = [runtime.allocate(4 * words) for _ in range(3)]
    data = np.arange(words, dtype=np.uint32) * np.uint32(2654435761)
    runtime.upload(buffers[0], data)
    copy = runtime.pipeline("copy_words")
    chain = Program()
    for i in range(200):
        operands = {"source": buffers[i % 3], "destination": buffers[(i + 1) % 3], "span": span}
        chain.dispatch(copy, operands, groups=(4,))
    recording = runtime.record(chain)
    recording.run()
    if not np.array_equal(runtime.download(buffers[200 % 3], np.uint32), data):
        raise GpuError("the self-test computed something wrong: dispatches did not see each other's results")
    _check_arithmetic(runtime)
    return min(_seconds(recording.run) for _ in range(5))


def _check_arithmetic(runtime: Runtime) -> None:
    """One norm with offsets, floats in push constants and a specialisation constant."""
    rows, columns, eps = 3, 70, 1e-5
    x = np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(rows, columns)
    buffer = runtime.allocate(2 * x.nbytes + 256)
    source, result = buffer.slice(256, x.nbytes), buffer.slice(256 + x.nbytes, x.nbytes)
    runtime.upload(source, x)
    norm = Program()
    pipeline = runtime.pipeline("rms_norm_no_weight", {"WORKGROUP_X": 32})
    norm.dispatch(pipeline, {"x": source, "result": result}, {"columns": columns, "eps": eps}, (rows,))
    runtime.record(norm).run()
    expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    if not np.allclose(runtime.download(result, np.float32), expected.reshape(-1), rtol=1e-5, atol=1e-6):
        raise GpuError("the self-test computed something wrong: a norm differs")


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def judge(device: Device, runtime: str) -> Verdict:
    """Whether `runtime` can be used on `device`: from the cache, or found by a new process and cached."""
    try:
        version = importlib.metadata.version(PACKAGES[runtime])
    except importlib.metadata.PackageNotFoundError:
        return Verdict(False, reason=f"the package {PACKAGES[runtime]} is not installed")
    about = [device.uuid, device.name, device.driver_version, device.api_version, runtime, version, shaders.digest()]
    return _cached(about, [runtime, str(device.index)])


def check_drivers() -> None:
    """GpuError if listing the devices ends a process: so broken a driver must not be met in this one."""
    folders = [Path(f) / "vulkan" / "icd.d" for f in (*_data_folders(), "/etc")]
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    about = [[str(file), file.stat().st_mtime_ns] for file in files]
    verdict = _cached([*about, sorted((k, v) for k, v in os.environ.items() if k.startswith("VK_"))], ["list"])
    if not verdict.usable:
        raise GpuError(f"the Vulkan drivers that are installed cannot be used: {verdict.reason}")


def _data_folders() -> list[str]:
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    return [os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share"), *shared.split(":")]


def _cached(about: list[Any], question: list[str]) -> Verdict:
    """The kept verdict about a thing described by `about`, or a new one that is then kept."""
    key = hashlib.sha256(json.dumps([__version__, about, question]).encode()).hexdigest()[:24]
    file = _cache_folder() / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        verdict = Verdict(**json.loads(file.read_text(encoding="utf-8")))
        if verdict.usable or 0 <= time.time() - verdict.time < KEEP_FAILURE:
            return verdict
    verdict = _ask_process(question)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(asdict(verdict), part)
        os.replace(part.name, file)
    return verdict


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddllm_vk" / "gpu"


def _ask_process(question: list[str]) -> Verdict:
    # The new process finds modules where this one does, whatever its current folder is.
    code = f"import sys; sys.path[:] = {sys.path!r}; from ddllm_vk.gpu.selftest import main; main()"
    command = [sys.executable, "-c", code, *question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return Verdict(False, reason=f"the self-test did not end within {LIMIT:.0f} s", time=time.time())
    except OSError as e:
        return Verdict(False, reason=f"the self-test could not be started ({e})", time=time.time())
    lines = done.stdout.splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        found = {}
    if done.returncode == 0 and "seconds" in found:
        return Verdict(True, seconds=found["seconds"], time=time.time())
    reason = found.get("error") or f"the self-test {_how_it_ended(done.returncode)}"
    return Verdict(False, reason=reason, time=time.time())


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def main() -> None:
    """In the process of its own: argv is (-c, "list") or (-c, runtime, device index); the last line of stdout is the
    result. That there is no driver or no device is an answer too, when it is only to list them."""
    from .choice import RUNTIMES

    result: dict[str, Any] = {"seconds": 0.0}
    try:
        if sys.argv[1:] == ["list"]:
            with contextlib.suppress(GpuError):
                list_devices()
        else:
            name, index = sys.argv[1:]
            with RUNTIMES[name](list_devices()[int(index)]) as runtime:
                result["seconds"] = run(runtime)
    except GpuError as e:
        result = {"error": str(e)}
    print(json.dumps(result), flush=True)
