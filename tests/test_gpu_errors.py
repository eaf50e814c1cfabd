"""What can go wrong with a GPU: one GpuError with one line, no abort, no hang (gpu_fixtures.py)."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gpu_fixtures import RUNTIMES, missing

from ddllm_vk.errors import GpuError, InputError
from ddllm_vk.gpu import choice, kompute_runtime, selftest, shaders
from ddllm_vk.gpu.devices import list_devices, pick
from ddllm_vk.gpu.program import Program
from ddllm_vk.gpu.selftest import Verdict

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process from the tree's root."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def says(code: str, **environment: str) -> str:
    """The message, one line, of the GpuError that `code` raises in a new process, which ends well."""
    catch = f"from ddllm_vk.errors import GpuError\ntry:\n    {code}\nexcept GpuError as e:\n    print(e)"
    done = python(catch, **environment)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


LIST = "from ddllm_vk.gpu.devices import list_devices; list_devices()"
OPEN = "from ddllm_vk.gpu.choice import open_runtime; open_runtime({})"


@pytest.mark.parametrize("code", [LIST, OPEN.format(0)])
def test_no_driver(code, tmp_path):
    nothing = {"VK_ICD_FILENAMES": str(tmp_path / "none.json"), "VK_DRIVER_FILES": str(tmp_path / "none.json")}
    message = says(code, **nothing, VK_INSTANCE_LAYERS="", XDG_CACHE_HOME=str(tmp_path))
    assert "no Vulkan driver" in message
    assert "install" in message


def test_no_loader():
    # The package opens the library when it is imported: an import that fails as it does then.
    code = (
        "import sys, importlib.abc, importlib.machinery\n"
        "    class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "        def find_spec(self, name, path, target=None):\n"
        "            return importlib.machinery.ModuleSpec(name, self) if name == 'vulkan' else None\n"
        "        def exec_module(self, module): raise OSError('Cannot find Vulkan SDK version')\n"
        f"    sys.meta_path.insert(0, Broken())\n    {LIST}"
    )
    message = says(code)
    assert "no Vulkan loader (libvulkan.so.1)" in message
    assert "libvulkan1" in message


def test_a_wrong_index(gpu_device):
    for index in (99, -1):
        with pytest.raises(GpuError, match=f"no Vulkan device {index}; there are 0: "):
            pick(list_devices(), index)


def test_a_software_device_is_used_only_on_request(gpu_device):
    software = dataclasses.replace(gpu_device, type="cpu", name="soft")
    gpus = [dataclasses.replace(gpu_device, type=kind, index=1) for kind in ("integrated", "discrete")]
    with pytest.raises(GpuError, match=r"only software devices .*soft"):
        pick([software], None)
    assert pick([software], 0) is software
    assert pick([software, *gpus], None).type == "discrete"
    assert pick([software, gpus[0]], None).type == "integrated"


def test_an_unknown_runtime():
    with pytest.raises(InputError, match="auto, vulkan, kompute"):
        choice.open_runtime(0, "cuda")


@pytest.fixture(params=list(RUNTIMES))
def own_runtime(request, gpu_device, no_messages):
    """A runtime that the test may ruin."""
    try:
        opened = RUNTIMES[request.param](gpu_device)
    except GpuError as e:
        missing(str(e))
    yield opened
    opened.close()


def test_too_little_memory_is_known_before_allocating(own_runtime):
    with pytest.raises(GpuError, match=r"has .* free, the model needs 4000000 GB"):
        own_runtime.require(4 * 10**15, "the model")
    own_runtime.free_bytes = lambda: 1000
    assert own_runtime.allocate(1000).nbytes == 1000
    with pytest.raises(GpuError, match=r"has 1 kB free, a buffer needs 2 kB; use a smaller model"):
        own_runtime.allocate(2000)


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_the_driver_runs_out_of_memory(name, gpu_device, open_runtimes):
    """The process may not grow any more: vkAllocateMemory itself fails."""
    if gpu_device.type != "cpu":
        pytest.skip("memory of a software device is the process's")
    code = (
        "import resource, psutil; from ddllm_vk.gpu.choice import RUNTIMES, list_devices\n"
        f"    r = RUNTIMES[{name!r}](list_devices()[0])\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26,) * 2)\n"
        "    r.allocate(120 * 2**20)"
    )
    if not kompute_is_there() and name == "kompute":
        missing("kp is not installed")
    assert "cannot allocate a buffer of 125829120 bytes" in says(code, VK_INSTANCE_LAYERS="")


def kompute_is_there() -> bool:
    try:
        kompute_runtime.load_kompute()
    except GpuError:
        return False
    return True


def lose(runtime, recording, monkeypatch) -> None:
    """From now on the driver answers that the device is lost."""
    if runtime.name == "vulkan":

        def lost(*_):
            raise runtime.vk.VkErrorDeviceLost

        monkeypatch.setattr(runtime.vk, "vkWaitForFences", lost)
    else:

        class Lost:
            def eval(self):
                raise RuntimeError("vkWaitForFences: ErrorDeviceLost")

            def destroy(self): ...

        recording._sequence = Lost()


def test_a_lost_device_is_one_error_for_ever(own_runtime, monkeypatch):
    runtime = own_runtime
    buffer = runtime.allocate(40)
    program = Program()
    operands = {"x": buffer, "result": buffer}
    program.dispatch(runtime.pipeline("rms_norm_no_weight"), operands, {"columns": 10, "eps": 1e-6})
    recording = runtime.record(program)
    recording.run()
    with monkeypatch.context() as patch:
        lose(runtime, recording, patch)
        with pytest.raises(GpuError, match=r"failed: the driver lost the device .*; restart the program"):
            recording.run()
    later = [
        recording.run,
        lambda: runtime.record(program),
        lambda: runtime.allocate(4),
        lambda: runtime.pipeline("rms_norm"),
        lambda: runtime.upload(buffer, np.zeros(1, dtype=np.uint32)),
        lambda: runtime.download(buffer),
    ]
    for call in later:
        with pytest.raises(GpuError, match="lost the device"):
            call()


def test_a_program_that_never_ends_is_given_up(own_runtime, monkeypatch):
    runtime = own_runtime
    if runtime.name != "vulkan":
        pytest.skip("Kompute waits for ever")
    from ddllm_vk.gpu import vulkan_runtime

    buffer = runtime.allocate(40)
    program = Program()
    operands = {"x": buffer, "result": buffer}
    program.dispatch(runtime.pipeline("rms_norm_no_weight"), operands, {"columns": 10, "eps": 1e-6})
    recording = runtime.record(program)

    def not_yet(*_):
        raise runtime.vk.VkTimeout

    monkeypatch.setattr(vulkan_runtime, "RUN_LIMIT", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(runtime.vk, "vkWaitForFences", not_yet)
        started = time.monotonic()
        with pytest.raises(GpuError, match="did not finish within"):
            recording.run()
    assert time.monotonic() - started < 30


@pytest.fixture
def copied_shaders(tmp_path):
    for file in shaders.FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "not SPIR-V"])
def test_a_broken_shader_file_never_reaches_the_driver(copied_shaders, damage):
    file = copied_shaders / "rms_norm.spv"
    whole = file.read_bytes()
    broken = {
        "truncated": whole[:100],
        "flipped": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        "empty": b"",
        "not SPIR-V": b"GLSL" * 40,
    }
    file.unlink()
    if damage in broken:
        file.write_bytes(broken[damage])
    with pytest.raises(GpuError, match=r"rms_norm\.spv: the compiled shader (is damaged|cannot be read).*reinstall"):
        shaders.load("rms_norm", copied_shaders)
    assert shaders.load("add_rms_norm", copied_shaders).name == "add_rms_norm"


def test_a_broken_index(tmp_path):
    with pytest.raises(GpuError, match=r"index\.json"):
        shaders.load("rms_norm", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.json").write_text("{")
    with pytest.raises(GpuError, match=r"index\.json"):
        shaders.load("rms_norm", other)


def test_a_shader_needs_features_the_runtime_has(runtime):
    shader = dataclasses.replace(shaders.load("rms_norm"), features=frozenset({"cooperative_matrix", "warp_drive"}))
    with pytest.raises(GpuError, match=r"needs .*warp_drive, which is not there on device 0"):
        runtime.pipeline(shader)


def test_a_shader_needs_shared_memory_the_device_has(runtime):
    most = runtime.device.max_shared_memory
    shader = dataclasses.replace(shaders.load("rms_norm"), shared_bytes=["*", 512, "WORKGROUP_X"])
    assert runtime.pipeline(shader, {"WORKGROUP_X": 1}).invocations == 1
    with pytest.raises(GpuError, match=rf"needs {2 * most} bytes of shared memory .* has {most}"):
        runtime.pipeline(dataclasses.replace(shader, shared_bytes=["+", most, most]), {"WORKGROUP_X": 2})


def test_kompute_uses_no_features(runtime):
    if runtime.name != "kompute" or "int8" not in runtime.device.features:
        pytest.skip("for Kompute on a device with int8")
    shader = dataclasses.replace(shaders.load("rms_norm"), features=frozenset({"int8"}))
    with pytest.raises(GpuError, match="needs int8, which is not enabled by the runtime"):
        runtime.pipeline(shader)


def test_a_build_of_kompute_without_our_edits_is_refused(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "kp", types.SimpleNamespace(__version__="0.9.0"))
    with pytest.raises(GpuError, match=r"kp 0\.9\.0 lacks the barriers .*build_kompute\.py"):
        kompute_runtime.load_kompute()


def test_importing_kompute_leaves_the_logging_alone():
    code = "import logging; from ddllm_vk.gpu.kompute_runtime import load_kompute; load_kompute();"
    done = python(code + "print(logging.getLogger().handlers)")
    if "GpuError" in done.stderr:
        missing("kp is not installed")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddllm_vk" / "gpu"


def test_the_verdict_is_kept(gpu_device, cache, monkeypatch):
    found = selftest.judge(gpu_device, "vulkan")
    assert found.usable, found.reason
    assert found.seconds > 0
    monkeypatch.setattr(selftest, "_ask_process", lambda question: pytest.fail("asked again"))
    assert selftest.judge(gpu_device, "vulkan") == found
    newer = dataclasses.replace(gpu_device, driver_version=gpu_device.driver_version + 1)
    monkeypatch.setattr(
        selftest, "_ask_process", lambda question: Verdict(False, reason="new driver", time=time.time())
    )
    assert selftest.judge(newer, "vulkan").reason == "new driver"
    assert selftest.judge(newer, "vulkan").reason == "new driver"


def test_a_failure_is_tried_again_after_a_day(gpu_device, cache, monkeypatch):
    answers = [Verdict(False, reason="broken", time=time.time() - 2 * selftest.KEEP_FAILURE), Verdict(True, 0.5)]
    monkeypatch.setattr(selftest, "_ask_process", lambda question: answers.pop(0))
    assert not selftest.judge(gpu_device, "vulkan").usable
    assert selftest.judge(gpu_device, "vulkan").usable
    assert selftest.judge(gpu_device, "vulkan").usable


def test_a_damaged_or_unwritable_cache_does_no_harm(gpu_device, cache, monkeypatch):
    monkeypatch.setattr(selftest, "_ask_process", lambda question: Verdict(True, 0.25, time=1.0))
    assert selftest.judge(gpu_device, "vulkan").seconds == 0.25
    (file,) = cache.iterdir()
    for content in ("", "{", "[]", json.dumps({"usable": True, "unknown": 1})):
        file.write_text(content)
        assert selftest.judge(gpu_device, "vulkan").seconds == 0.25
    file.unlink()
    cache.rmdir()
    cache.touch()
    assert selftest.judge(gpu_device, "vulkan").seconds == 0.25


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("os.abort()", "was ended by SIGABRT"),
        ("os._exit(3)", "ended with status 3"),
        ("time.sleep(60)", "did not end within"),
        ("print('noise')", "ended with status 0"),
    ],
)
def test_a_driver_that_crashes_or_hangs_ends_only_the_probe(gpu_device, cache, monkeypatch, ending, reason):
    monkeypatch.setattr(selftest, "LIMIT", 5.0)
    program = f"import os, time; {ending}"
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **k: real([sys.executable, "-c", program], **k))
    verdict = selftest.judge(gpu_device, "vulkan")
    assert not verdict.usable
    assert reason in verdict.reason
    with pytest.raises(GpuError, match=rf"device 0 .* cannot be used \(vulkan: .*{reason}"):
        choice.best(gpu_device, {"vulkan": verdict})


def test_the_direct_runtime_is_taken_unless_kompute_is_clearly_faster(gpu_device):
    def taken(vulkan: Verdict, kompute: Verdict) -> str:
        return choice.best(gpu_device, {"vulkan": vulkan, "kompute": kompute})

    broken = Verdict(False, reason="broken")
    assert taken(Verdict(True, 1.0), Verdict(True, 1.0)) == "vulkan"
    assert taken(Verdict(True, 1.1), Verdict(True, 1.0)) == "vulkan"
    assert taken(Verdict(True, 2.0), Verdict(True, 1.0)) == "kompute"
    assert taken(broken, Verdict(True, 9.0)) == "kompute"
    assert taken(Verdict(True, 9.0), broken) == "vulkan"


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_memory_is_held_once(name, gpu_device, open_runtimes):
    """The host's peak while a software device is filled piece by piece: no second copy anywhere."""
    if gpu_device.type != "cpu":
        pytest.skip("memory of a software device is the process's")
    if not kompute_is_there() and name == "kompute":
        missing("kp is not installed")
    code = f"""
import numpy as np
from ddllm_vk.gpu.buffers import Arena
from ddllm_vk.gpu.choice import RUNTIMES
from ddllm_vk.gpu.devices import list_devices

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

runtime = RUNTIMES[{name!r}](list_devices()[0])
memory, piece = Arena(runtime, 24 * 2**24), np.full(2**22, 3, dtype=np.uint32)
before, parts = peak(), []
for i in range(24):
    parts.append(memory.take(piece.nbytes))
    piece[:] = i
    runtime.upload(parts[-1], piece)
print((peak() - before) / sum(b.nbytes for b in memory.buffers))
assert all((runtime.download(part, np.uint32)[::4095] == i).all() for i, part in enumerate(parts))
"""
    done = python(code, VK_INSTANCE_LAYERS="")
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1.15
