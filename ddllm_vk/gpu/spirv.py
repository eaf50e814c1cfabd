"""Reading SPIR-V: what a compute shader binds and needs, and the same module without names.

Enough of the format (SPIR-V specification, 2.3 and 3) for modules that glslang makes of shaders/*.comp.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import GpuError

MAGIC = 0x07230203

#: capability -> the name of the device feature it needs; absent ones come with every Vulkan device
CAPABILITY_FEATURES = {
    9: "float16",
    10: "float64",
    11: "int64",
    22: "int16",
    39: "int8",
    61: "subgroup_basic",
    62: "subgroup_vote",
    63: "subgroup_arithmetic",
    64: "subgroup_ballot",
    65: "subgroup_shuffle",
    66: "subgroup_shuffle_relative",
    67: "subgroup_clustered",
    68: "subgroup_quad",
    4433: "storage16",
    4434: "storage16",
    4448: "storage8",
    4449: "storage8",
    5345: "vulkan_memory_model",
    6016: "integer_dot_product",
    6017: "integer_dot_product",
    6018: "integer_dot_product",
    6019: "integer_dot_product",
    6022: "cooperative_matrix",
}
_UNIVERSAL = {0, 1}  # Matrix, Shader

_NAMING = {3, 4, 5, 6, 7, 8, 317, 330}  # OpSource*, OpName, OpMemberName, OpString, OpLine, OpNoLine, OpModuleProcessed
_STORAGE_BUFFER, _PUSH_CONSTANT, _WORKGROUP = 12, 9, 4
_SPEC_ID, _BUILT_IN, _NON_WRITABLE, _NON_READABLE, _BINDING, _SET, _OFFSET = 1, 11, 24, 25, 33, 34, 35
_WORKGROUP_SIZE = 25
_COMPOSITE_EXTRACT = 81
#: instructions of OpSpecConstantOp in sizes of arrays -> the operator in an Expression
_OPERATORS = {128: "+", 130: "-", 132: "*", 134: "//", 135: "//", 137: "%", 194: ">>", 196: "<<"}

#: A number that depends on specialisation constants: itself, a constant's name, or [operator, left, right].
Expression = int | str | list[Any]


def evaluate(expression: Expression, constants: Mapping[str, int | float]) -> int:
    """The number, given the specialisation constants."""
    if isinstance(expression, str):
        return int(constants[expression])
    if isinstance(expression, int):
        return expression
    left, right = (evaluate(e, constants) for e in expression[1:])
    match expression[0]:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return left // max(right, 1)
        case "%":
            return left % max(right, 1)
        case ">>":
            return left >> right
        case "<<":
            return left << right
    raise GpuError(f"{expression[0]!r} is no operator of a size")


@dataclass
class Interface:
    """What a compute shader is bound to. Lists are in the order of binding, offset and constant id."""

    bindings: list[dict[str, str]]  #: {"name", "access": "read" | "write" | "read_write"}
    push_constants: list[dict[str, Any]]  #: {"name", "offset" in bytes, "type": "uint" | "int" | "float"}
    constants: list[dict[str, Any]]  #: specialisation constants {"name", "type", "default"}, ids 0, 1, ...
    workgroup: list[int | str]  #: invocations in x, y, z; a name is a specialisation constant's
    shared_bytes: Expression  #: shared memory of a workgroup
    features: list[str]  #: device features needed, sorted


@dataclass
class _Module:
    names: dict[int, str] = field(default_factory=dict)
    member_names: dict[tuple[int, int], str] = field(default_factory=dict)
    decorations: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    member_decorations: dict[tuple[int, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    types: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # id -> (opcode, operands)
    constants: dict[int, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)  # id -> (opcode, type, words)
    variables: list[tuple[int, int, int]] = field(default_factory=list)  # (id, pointer type, storage class)
    capabilities: set[int] = field(default_factory=set)
    local_size: tuple[int, ...] = (1, 1, 1)


def instructions(spirv: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """(opcode, operand words) of every instruction; GpuError if `spirv` is not a whole SPIR-V module."""
    if len(spirv) < 20 or len(spirv) % 4 or struct.unpack_from("<I", spirv)[0] != MAGIC:
        raise GpuError("not a SPIR-V module")
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    found, at = [], 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        if count == 0 or at + count > len(words):
            raise GpuError("a SPIR-V module that is cut short or damaged")
        found.append((opcode, words[at + 1 : at + count]))
        at += count
    return found


def strip_names(spirv: bytes) -> bytes:
    """The module without names and source lines, which have no effect on what it computes."""
    kept = [spirv[:20]]
    for opcode, operands in instructions(spirv):
        if opcode not in _NAMING:
            kept.append(struct.pack(f"<{len(operands) + 1}I", (len(operands) + 1) << 16 | opcode, *operands))
    return b"".join(kept)


def reflect(spirv: bytes) -> Interface:
    """The interface of a compute shader that still has its names; GpuError where it breaks the rules of
    shaders/README.md: set 0, bindings and constant ids from 0 without gaps, 32-bit push constants and constants."""
    module = _read(spirv)
    unknown = module.capabilities - _UNIVERSAL - set(CAPABILITY_FEATURES)
    if unknown:
        raise GpuError(f"capability {min(unknown)} is not known to ddllm_vk/gpu/spirv.py; add it with its feature")
    constants = _spec_constants(module)
    names = {i: c["name"] for i, c in constants.items()}
    return Interface(
        bindings=_bindings(module),
        push_constants=_push_constants(module),
        constants=list(constants.values()),
        workgroup=_workgroup(module, names),
        shared_bytes=_shared_bytes(module, names),
        features=sorted({CAPABILITY_FEATURES[c] for c in module.capabilities - _UNIVERSAL}),
    )


def _read(spirv: bytes) -> _Module:
    module = _Module()
    for opcode, w in instructions(spirv):
        if opcode == 5:
            module.names[w[0]] = _string(w[1:])
        elif opcode == 6:
            module.member_names[w[0], w[1]] = _string(w[2:])
        elif opcode == 16 and w[1] == 17:  # OpExecutionMode LocalSize
            module.local_size = w[2:5]
        elif opcode == 17:
            module.capabilities.add(w[0])
        elif 19 <= opcode <= 39:
            module.types[w[0]] = (opcode, w[1:])
        elif 41 <= opcode <= 52:
            module.constants[w[1]] = (opcode, w[0], w[2:])
        elif opcode == 59:
            module.variables.append((w[1], w[0], w[2]))
        elif opcode == 71:
            module.decorations.setdefault(w[0], {})[w[1]] = w[2:]
        elif opcode == 72:
            module.member_decorations.setdefault((w[0], w[1]), {})[w[2]] = w[3:]
    return module


def _string(words: tuple[int, ...]) -> str:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode()


def _bindings(module: _Module) -> list[dict[str, str]]:
    found = {}
    for variable, pointer, storage in module.variables:
        if storage != _STORAGE_BUFFER:
            continue
        block = module.types[pointer][1][1]
        members = range(len(module.types[block][1]))
        decorations = module.decorations.get(variable, {})
        name = module.names.get(variable) or ", ".join(module.member_names[block, m] for m in members)

        def all_are(decoration: int, block=block, members=members, own=decorations) -> bool:
            in_members = all(decoration in module.member_decorations.get((block, m), {}) for m in members)
            return decoration in own or in_members

        if decorations.get(_SET, (0,))[0] != 0:
            raise GpuError(f"the buffer {name} is not in descriptor set 0")
        access = "read" if all_are(_NON_WRITABLE) else "write" if all_are(_NON_READABLE) else "read_write"
        found[decorations[_BINDING][0]] = {"name": name, "access": access}
    if sorted(found) != list(range(len(found))):
        raise GpuError(f"bindings must be 0, 1, ... without gaps and all used, not {sorted(found)}")
    names = [found[i]["name"] for i in range(len(found))]
    if len(set(names)) != len(names):
        raise GpuError(f"two buffers have one name: {', '.join(names)}")
    return [found[i] for i in range(len(found))]


def _push_constants(module: _Module) -> list[dict[str, Any]]:
    found = []
    for _, pointer, storage in module.variables:
        if storage != _PUSH_CONSTANT:
            continue
        block = module.types[pointer][1][1]
        for m, member in enumerate(module.types[block][1]):
            name = module.member_names[block, m]
            offset = module.member_decorations[block, m][_OFFSET][0]
            found.append({"name": name, "offset": offset, "type": _scalar(module, member, f"push constant {name}")})
    found.sort(key=lambda p: p["offset"])
    if [p["offset"] for p in found] != [4 * i for i in range(len(found))]:
        raise GpuError("push constants must lie one after the other, four bytes each")
    return found


def _spec_constants(module: _Module) -> dict[int, dict[str, Any]]:
    """By the constant's id in the module, ordered by its specialisation id. Those of local_size_?_id have no name of
    their own: they are called WORKGROUP_X, _Y, _Z."""
    found = {}
    sizes = {part: f"WORKGROUP_{axis}" for axis, part in zip("XYZ", _workgroup_parts(module), strict=False)}
    for i, (opcode, kind, words) in module.constants.items():
        spec_id = module.decorations.get(i, {}).get(_SPEC_ID)
        if spec_id is None:
            continue
        name = module.names.get(i, "") or sizes.get(i, "")
        if opcode != 50 or not name:
            raise GpuError(f"specialisation constant {spec_id[0]} must be a named uint, int or float (not bool)")
        scalar = _scalar(module, kind, f"specialisation constant {name}")
        found[spec_id[0]] = (i, {"name": name, "type": scalar, "default": _value(scalar, words[0])})
    if sorted(found) != list(range(len(found))):
        raise GpuError(f"ids of specialisation constants must be 0, 1, ... without gaps, not {sorted(found)}")
    return dict(found[i] for i in range(len(found)))


def _workgroup_parts(module: _Module) -> tuple[int, ...]:
    """Ids of the constants that make gl_WorkGroupSize, where it is specialised."""
    for i, decorations in module.decorations.items():
        if decorations.get(_BUILT_IN) == (_WORKGROUP_SIZE,) and i in module.constants:
            return module.constants[i][2]
    return ()


def _workgroup(module: _Module, spec_names: dict[int, str]) -> list[int | str]:
    parts = _workgroup_parts(module)
    fixed = [spec_names[p] if p in spec_names else module.constants[p][2][0] for p in parts]
    return fixed or list(module.local_size)


def _shared_bytes(module: _Module, spec_names: dict[int, str]) -> Expression:
    """The sum over the variables in shared memory."""
    total: Expression = 0
    for _, pointer, storage in module.variables:
        if storage == _WORKGROUP:
            total = _combine("+", total, _type_bytes(module, module.types[pointer][1][1], spec_names))
    return total


def _type_bytes(module: _Module, kind: int, spec_names: dict[int, str]) -> Expression:
    opcode, w = module.types[kind]
    if opcode == 20:  # bool
        return 4
    if opcode in (21, 22):
        return w[0] // 8
    if opcode in (23, 24):  # vector, matrix
        return _combine("*", w[1], _type_bytes(module, w[0], spec_names))
    if opcode == 28:  # array
        length = _constant(module, w[1], spec_names)
        return _combine("*", length, _type_bytes(module, w[0], spec_names))
    if opcode == 30:  # struct
        total: Expression = 0
        for member in w:
            total = _combine("+", total, _type_bytes(module, member, spec_names))
        return total
    raise GpuError(f"shared memory of a type that is not known (opcode {opcode})")


def _constant(module: _Module, i: int, spec_names: dict[int, str]) -> Expression:
    opcode, _, words = module.constants[i]
    if i in spec_names:
        return spec_names[i]
    if opcode in (43, 50):
        return words[0]
    if opcode == 52 and words[0] == _COMPOSITE_EXTRACT:  # gl_WorkGroupSize.x
        return _constant(module, module.constants[words[1]][2][words[2]], spec_names)
    if opcode == 52 and words[0] in _OPERATORS:
        left, right = (_constant(module, w, spec_names) for w in words[1:3])
        return _combine(_OPERATORS[words[0]], left, right)
    raise GpuError("the size of an array in shared memory is computed in a way that is not known; use + - * / % << >>")


def _combine(operator: str, left: Expression, right: Expression) -> Expression:
    expression = [operator, left, right]
    return evaluate(expression, {}) if isinstance(left, int) and isinstance(right, int) else expression


def _scalar(module: _Module, kind: int, what: str) -> str:
    opcode, w = module.types[kind]
    if opcode == 21 and w[0] == 32:
        return "int" if w[1] else "uint"
    if opcode == 22 and w[0] == 32:
        return "float"
    raise GpuError(f"{what} is not a 32-bit uint, int or float")


def _value(scalar: str, word: int) -> int | float:
    return struct.unpack({"uint": "<I", "int": "<i", "float": "<f"}[scalar], struct.pack("<I", word))[0]
