"""The compiled shaders of the package: SPIR-V and what each binds, from the index that build_shaders.py writes."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import GpuError
from .spirv import Expression

FOLDER = Path(__file__).resolve().parent.parent / "shaders"


@dataclass(frozen=True)
class Binding:
    name: str
    access: str  #: "read", "write" or "read_write"

    @property
    def reads(self) -> bool:
        return self.access != "write"

    @property
    def writes(self) -> bool:
        return self.access != "read"


@dataclass(frozen=True)
class Constant:
    """A push constant or a specialisation constant: four bytes."""

    name: str
    type: str  #: "uint", "int" or "float"
    default: int | float = 0  #: of a specialisation constant


@dataclass(frozen=True)
class Shader:
    """One variant of a compute shader. Bindings, push constants and specialisation constants are in their order."""

    name: str
    spirv: bytes
    bindings: tuple[Binding, ...]
    push_constants: tuple[Constant, ...]
    constants: tuple[Constant, ...]
    workgroup: tuple[int | str, int | str, int | str]  #: invocations in x, y, z; a str names a specialisation constant
    shared_bytes: Expression  #: shared memory of a workgroup
    features: frozenset[str]  #: what the device must have, names as in devices.py


@cache
def _index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "index.json").read_text(encoding="utf-8"))["shaders"]
    except (OSError, ValueError, KeyError) as e:
        raise GpuError(f"{folder / 'index.json'}: the index of compiled shaders cannot be read ({e}); reinstall") from e


def names(folder: Path = FOLDER) -> list[str]:
    """All shaders of the index."""
    return list(_index(folder))


def digest(folder: Path = FOLDER) -> str:
    """Changes when any compiled shader does."""
    return hashlib.sha256(json.dumps(_index(folder), sort_keys=True).encode()).hexdigest()[:16]


def load(name: str, folder: Path = FOLDER) -> Shader:
    """The shader of that name. A file that is not what the index describes is refused: drivers crash on such."""
    entry = _index(folder).get(name)
    if entry is None:
        raise GpuError(f"there is no shader {name!r}; the index has {', '.join(_index(folder))}")
    file = folder / f"{name}.spv"
    try:
        spirv = file.read_bytes()
    except OSError as e:
        raise GpuError(f"{file}: the compiled shader cannot be read ({e.strerror}); reinstall") from None
    if hashlib.sha256(spirv).hexdigest() != entry["spirv_sha256"]:
        raise GpuError(f"{file}: the compiled shader is damaged; reinstall, or run build_shaders.py in a checkout")
    x, y, z = entry["workgroup"]
    return Shader(
        name=name,
        spirv=spirv,
        bindings=tuple(Binding(b["name"], b["access"]) for b in entry["bindings"]),
        push_constants=tuple(Constant(p["name"], p["type"]) for p in entry["push_constants"]),
        constants=tuple(Constant(c["name"], c["type"], c["default"]) for c in entry["constants"]),
        workgroup=(x, y, z),
        shared_bytes=entry["shared_bytes"],
        features=frozenset(entry["features"]),
    )
