"""`devices`: the CPU always, Vulkan devices or why there are none."""

import json
import os
import subprocess
import sys

import pytest

from ddllm_vk.cpu import isa


def devices(*args: str, **environment: str) -> str:
    command = [sys.executable, "-m", "ddllm_vk", "devices", *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def no_driver(tmp_path):
    missing = str(tmp_path / "none.json")
    return {"VK_ICD_FILENAMES": missing, "VK_DRIVER_FILES": missing, "XDG_CACHE_HOME": str(tmp_path)}


def test_the_cpu_is_described_without_any_driver(no_driver):
    described = json.loads(devices("--json", **no_driver))
    cpu = described["cpu"]
    assert cpu["isa"] == isa.ACTIVE.name
    assert [i["name"] for i in cpu["isas"]] == list(isa.ISAS)
    assert 1 <= cpu["default_threads"] <= cpu["threads"]
    assert cpu["memory_available"] <= cpu["memory"]
    assert described["vulkan"]["devices"] == []
    assert described["vulkan"]["default"] is None
    assert "Vulkan" in described["vulkan"]["reason"]
    text = devices(**no_driver)
    assert f"{isa.ACTIVE.name} in use" in text
    assert text.rstrip().splitlines()[-1].startswith("Used unless a device is named: the CPU; there is no Vulkan")


def test_every_vulkan_device_is_described(gpu_device, no_messages, tmp_path):
    described = json.loads(devices("--json", XDG_CACHE_HOME=str(tmp_path)))["vulkan"]
    device = described["devices"][gpu_device.index]
    assert device["name"] == gpu_device.name
    assert device["memory"] == gpu_device.memory > 0
    assert device["features"] == sorted(gpu_device.features)
    assert device["runtimes"]["vulkan"]["usable"]
    assert device["runtime"] in device["runtimes"]
    assert set(device["runtimes"]) == {"vulkan", "kompute"}
    for verdict in device["runtimes"].values():
        assert verdict["usable"] != bool(verdict["reason"])
    if gpu_device.type == "cpu" and len(described["devices"]) == 1:
        assert described["default"] is None
        assert "software" in described["reason"]
    text = devices(XDG_CACHE_HOME=str(tmp_path))
    assert f"Vulkan device {gpu_device.index}: {gpu_device.name}" in text
    assert "µs a dispatch" in text
