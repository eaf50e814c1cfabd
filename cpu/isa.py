"""Which instruction set the emitted kernels use: decided once, from what numba's code generator may emit.

The host's name is no guide: asking LLVM for an instruction its target lacks aborts the process, and NUMBA_CPU_NAME or
NUMBA_CPU_FEATURES may have narrowed the target. DDLLM_VK_ISA forces one of ISAS, for tests and for measurements; the
command line's --isa sets it before anything here is imported.
"""

# numba comes without type information.
# pyright: reportAttributeAccessIssue=false

import os
from dataclasses import dataclass
from functools import cache

import llvmlite.binding
from numba.core.registry import cpu_target

from ddllm_vk.errors import InputError

#: A weight tile is this many rows of a weight matrix (output columns), on every instruction set: the packed layout.
TILE = 16


@dataclass(frozen=True)
class Isa:
    """One instruction set: its name, what it needs, and the shapes of its micro-kernels."""

    name: str
    processors: str  # those it is for, as an error message names them
    needs: tuple[frozenset[str], ...]  # the code generator's features: all of any one of these sets
    lanes: int  # 32-bit lanes of one register of the integer micro-kernels
    rows: int  # activation rows of one micro-kernel: their float sums and its operands fit into the registers
    held: int = (
        0  # registers for weights while int8 kernels keep sums in memory; 0: all rows' sums in registers as well
    )
    hardware_half: bool = True  # conversions from float16 are instructions
    lane_operands: bool = False  # instructions take one lane of a register as an operand

    def missing(self, features: frozenset[str]) -> frozenset[str]:
        """What `features` lack for this instruction set; nothing if it can be used."""
        return min((need - features for need in self.needs), key=len)


def _needs(*features: str) -> frozenset[str]:
    return frozenset(features)


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", *_AVX2)

#: From the best to the plainest. A new one is a line here and one in dots.DOTS.
ISAS = {
    isa.name: isa
    for isa in (
        Isa("avx512vnni", "x86-64", (_needs("avx512vnni", *_AVX512),), 16, 16),
        # AVX-512 encodes the same 256-bit instruction, so that what has VNNI in either form can run this
        Isa("avxvnni", "x86-64", (_needs("avxvnni", *_AVX2), _needs("avx512vnni", "avx512vl", *_AVX2)), 8, 6, 8),
        Isa("avx512", "x86-64", (_needs(*_AVX512),), 16, 14),
        Isa("avx2", "x86-64", (_needs(*_AVX2),), 8, 6, 8),
        Isa("neon-dotprod", "ARM (aarch64)", (_needs("neon", "dotprod"),), 4, 6, lane_operands=True),
        Isa("neon", "ARM (aarch64)", (_needs("neon"),), 4, 6, 8, lane_operands=True),
        Isa("generic", "all", (frozenset(),), 4, 2, hardware_half=False),
    )
}

# sdot is what code generators make of this, if the target has it; legal code if not
_DOT_PRODUCT = """
target triple = "{}"
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {{
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}}
"""


def features_of(triple: str, cpu: str, stated: str) -> frozenset[str]:
    """The features a code generator has. On x86-64 those it states as present; what it leaves unsaid counts as absent.

    On ARM it states what Linux reports under a name it knows, dot products not among them: the processor's name may
    imply those, so it is asked to compile some.
    """
    features = {name[1:] for name in stated.split(",") if name.startswith("+")}
    if triple.startswith(("aarch64", "arm64")):
        if "-neon" not in stated.split(","):
            features.add("neon")  # part of the architecture
        module = llvmlite.binding.parse_assembly(_DOT_PRODUCT.format(triple))
        target = llvmlite.binding.Target.from_triple(triple)
        machine = target.create_target_machine(cpu=cpu, features=stated, opt=2)
        if "sdot" in machine.emit_assembly(module):
            features.add("dotprod")
    return frozenset(features)


@cache
def target_features() -> frozenset[str]:
    """The features of numba's code generator."""
    return features_of(*cpu_target.target_context.codegen().magic_tuple())


def choose(forced: str | None, features: frozenset[str]) -> Isa:
    """The best instruction set `features` allow, or the forced one; InputError if that is unknown or not available."""
    if not forced:
        return next(isa for isa in ISAS.values() if not isa.missing(features))
    if forced not in ISAS:
        raise InputError(f"the instruction set {forced!r} (--isa or DDLLM_VK_ISA) is not known; use {', '.join(ISAS)}")
    isa = ISAS[forced]
    missing = isa.missing(features)
    if missing:
        usable = ", ".join(other.name for other in ISAS.values() if not other.missing(features))
        raise InputError(
            f"the instruction set {forced!r} (--isa or DDLLM_VK_ISA) is for {isa.processors} with "
            f"{', '.join(sorted(missing))}, which the code generator does not report here (NUMBA_CPU_NAME and "
            f"NUMBA_CPU_FEATURES narrow what it reports); usable here: {usable}"
        )
    return isa


ACTIVE = choose(os.environ.get("DDLLM_VK_ISA"), target_features())
