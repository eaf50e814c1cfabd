#!/usr/bin/env python3
"""Builds Kompute's Python package (kp 0.9.0) from its PyPI source, with the edits the `kompute` runtime needs.

    python .ci/build_kompute.py FOLDER     # leaves one wheel in FOLDER, prints its path

Needs pip, cmake, a C++ compiler, the Vulkan headers and loader, and fmt (Debian: cmake g++ libvulkan-dev libfmt-dev,
and python3-dev for Debian's own Python). Kompute is Apache-2.0. Each edit must match exactly once; the wheel's version
ends in +ddllm1, by which the runtime knows an edited build.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.9.0"
SHA256 = "98e583dc6e9731ff6d7a3e3317817e4d93f7b2945929619e29a56325db279949"
MARKER = "+ddllm1"
BUILD_REQUIRES = ["setuptools", "wheel", "pybind11>=2.12"]  # older pybind11 corrupts data under numpy 2

# What CMake reads from the environment: everything from the system, nothing fetched, no validation layers of its own.
OPTIONS = {
    "KOMPUTE_OPT_INSTALL": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_FMT": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_PYBIND11": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER": "OFF",
    "KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS": "ON",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


def checked(call: str, what: str) -> str:
    """C++ that throws where Kompute ignores the VkResult of `call`; the runtime reads the name of the result."""
    return (
        f"{{\n        const vk::Result outcome = {call};\n"
        f"        if (outcome != vk::Result::eSuccess)\n"
        f'            throw std::runtime_error("{what}: " + vk::to_string(outcome));\n    }}'
    )


# (file, text that occurs exactly once, its replacement)
EDITS = [
    ("setup.py", "version='0.9.0'", f"version='{VERSION}{MARKER}'"),
    ("setup.py", '"numpy<2.0.0"', '"numpy"'),
    # the missing comma joined two options into one
    (
        "setup.py",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON'\n",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON',\n"
        "                      '-Dpybind11_DIR=' + __import__('pybind11').get_cmake_dir(),\n",
    ),
    # a dispatch waits for the dispatches before it: reads and writes after writes, writes after reads
    (
        "src/OpAlgoDispatch.cpp",
        "    if (this->mPushConstantsSize) {\n        this->mAlgorithm->setPushConstants(",
        "    commandBuffer.pipelineBarrier(\n"
        "      vk::PipelineStageFlagBits::eComputeShader,\n"
        "      vk::PipelineStageFlagBits::eComputeShader,\n"
        "      vk::DependencyFlags(),\n"
        "      vk::MemoryBarrier(vk::AccessFlagBits::eShaderWrite,\n"
        "                        vk::AccessFlagBits::eShaderRead | vk::AccessFlagBits::eShaderWrite),\n"
        "      nullptr,\n"
        "      nullptr);\n\n"
        "    if (this->mPushConstantsSize) {\n        this->mAlgorithm->setPushConstants(",
    ),
    # what a sequence leaves is seen by the host and by the next sequence
    (
        "src/Sequence.cpp",
        "        this->mCommandBuffer->end();",
        "        this->mCommandBuffer->pipelineBarrier(\n"
        "          vk::PipelineStageFlagBits::eComputeShader | vk::PipelineStageFlagBits::eTransfer,\n"
        "          vk::PipelineStageFlagBits::eAllCommands | vk::PipelineStageFlagBits::eHost,\n"
        "          vk::DependencyFlags(),\n"
        "          vk::MemoryBarrier(vk::AccessFlagBits::eShaderWrite | vk::AccessFlagBits::eTransferWrite,\n"
        "                            vk::AccessFlagBits::eMemoryRead | vk::AccessFlagBits::eMemoryWrite |\n"
        "                              vk::AccessFlagBits::eHostRead),\n"
        "          nullptr,\n"
        "          nullptr);\n"
        "        this->mCommandBuffer->end();",
    ),
    # results that Kompute ignores
    (
        "src/Manager.cpp",
        "    vk::createInstance(\n      &computeInstanceCreateInfo, nullptr, this->mInstance.get());",
        "    "
        + checked("vk::createInstance(&computeInstanceCreateInfo, nullptr, this->mInstance.get())", "vkCreateInstance"),
    ),
    (
        "src/Manager.cpp",
        "    physicalDevice.createDevice(\n      &deviceCreateInfo, nullptr, this->mDevice.get());",
        "    "
        + checked("physicalDevice.createDevice(&deviceCreateInfo, nullptr, this->mDevice.get())", "vkCreateDevice"),
    ),
    (
        "src/Tensor.cpp",
        "    this->mDevice->createBuffer(&bufferInfo, nullptr, buffer.get());",
        "    " + checked("this->mDevice->createBuffer(&bufferInfo, nullptr, buffer.get())", "vkCreateBuffer"),
    ),
    (
        "src/Tensor.cpp",
        "    this->mDevice->allocateMemory(&memoryAllocateInfo, nullptr, memory.get());",
        "    "
        + checked("this->mDevice->allocateMemory(&memoryAllocateInfo, nullptr, memory.get())", "vkAllocateMemory"),
    ),
    (
        "src/Sequence.cpp",
        "    this->mComputeQueue->submit(1, &submitInfo, this->mFence);",
        "    " + checked("this->mComputeQueue->submit(1, &submitInfo, this->mFence)", "vkQueueSubmit"),
    ),
    (
        "src/Sequence.cpp",
        "    if (result == vk::Result::eTimeout) {",
        "    if (result != vk::Result::eSuccess && result != vk::Result::eTimeout)\n"
        '        throw std::runtime_error("vkWaitForFences: " + vk::to_string(result));\n\n'
        "    if (result == vk::Result::eTimeout) {",
    ),
    # one pipeline for dispatches of different sizes
    (
        "python/src/main.cpp",
        '      .def("is_init", &kp::Algorithm::isInit, DOC(kp, Algorithm, isInit));',
        '      .def("set_workgroup",\n'
        "           [](kp::Algorithm& self, const kp::Workgroup& workgroup) { self.setWorkgroup(workgroup); })\n"
        '      .def("is_init", &kp::Algorithm::isInit, DOC(kp, Algorithm, isInit));',
    ),
    # other Python threads run while the device works
    (
        "python/src/main.cpp",
        '        "eval",\n        [](kp::Sequence& self) { return self.eval(); },\n',
        '        "eval",\n        [](kp::Sequence& self) {\n'
        "            py::gil_scoped_release release;\n            return self.eval();\n        },\n",
    ),
]


def apply_edits(source: Path) -> None:
    """Edits the unpacked source; an edit that does not match exactly once ends the program."""
    for name, old, new in EDITS:
        file = source / name
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            sys.exit(f"{name}: expected exactly one {old!r}, found {text.count(old)}; is this kp {VERSION}?")
        file.write_text(text.replace(old, new), encoding="utf-8")
    requires = ", ".join(f'"{r}"' for r in BUILD_REQUIRES)
    (source / "pyproject.toml").write_text(
        f'[build-system]\nrequires = [{requires}]\nbuild-backend = "setuptools.build_meta"\n', encoding="utf-8"
    )


def main(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory(prefix="kompute-") as temporary:
        work = Path(temporary)
        download = [*pip, "download", "--no-deps", "--no-binary", "kp", "--dest", str(work), f"kp=={VERSION}"]
        subprocess.run(download, check=True, stdin=subprocess.DEVNULL)
        archive = work / f"kp-{VERSION}.tar.gz"
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            sys.exit(f"{archive.name}: SHA-256 is {digest}, expected {SHA256}; not built")
        with tarfile.open(archive) as tar:
            tar.extractall(work)  # of a known digest
        source = work / f"kp-{VERSION}"
        apply_edits(source)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = str(min(os.cpu_count() or 1, 9))  # setup.py takes one digit
        environment = {**os.environ, **OPTIONS, "KOMPUTE_PYTHON_NUM_PARALLEL_THREADS": jobs}
        build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)]
        subprocess.run(build, check=True, env=environment, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob(f"kp-{VERSION}{MARKER}-*.whl")
    print(wheel)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except subprocess.CalledProcessError as e:
        sys.exit(f"pip failed with status {e.returncode}, see above")
