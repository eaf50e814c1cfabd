"""Which instruction set the emitted kernels use: decided once, from what numba's code generator may emit.

The host's name is no guide: asking LLVM for an instruction its target lacks aborts the process, and NUMBA_CPU_NAME or
NUMBA_CPU_FEATURES may have narrowed the target. DDLLM_VK_ISA forces one of ISAS, for tests and for measurements.
"""

# numba comes without type information.
# pyright: reportAttributeAccessIssue=false

import os
from dataclasses import dataclass

from numba.core.registry import cpu_target

from ddllm_vk.errors import InputError

#: A weight tile is this many rows of a weight matrix (output columns), on every instruction set: the packed layout.
TILE = 16


@dataclass(frozen=True)
class Isa:
    """One instruction set: its name, the code generator's features it needs, and the shapes of its micro-kernels."""

    name: str
    needs: frozenset[str]
    lanes: int  # 32-bit lanes of one register of the integer micro-kernels
    rows: int  # activation rows of one micro-kernel, limited by the registers there are for its accumulators
    hardware_half: bool  # conversions from float16 are instructions


# A new one (sdot, NEON without it, AVX-VNNI) is a line here and a branch in emit._block_dot.
ISAS = {
    isa.name: isa
    for isa in (
        Isa("avx512vnni", frozenset({"avx512f", "avx512bw", "avx512vnni", "avx2", "fma", "f16c"}), 16, 16, True),
        Isa("avx2", frozenset({"avx2", "fma", "f16c"}), 8, 6, True),
        Isa("generic", frozenset(), 4, 2, False),
    )
}


def target_features() -> frozenset[str]:
    """Features numba's code generator states as present. What it leaves unsaid counts as absent: that is safe."""
    stated = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in stated.split(",") if name.startswith("+"))


def choose(forced: str | None, features: frozenset[str]) -> Isa:
    """The best instruction set `features` allow, or the forced one; InputError if that is unknown or not available."""
    if not forced:
        return next(isa for isa in ISAS.values() if isa.needs <= features)
    if forced not in ISAS:
        raise InputError(f"DDLLM_VK_ISA={forced!r} is not known; use one of {', '.join(ISAS)}")
    missing = ISAS[forced].needs - features
    if missing:
        raise InputError(
            f"DDLLM_VK_ISA={forced!r} needs {', '.join(sorted(missing))}, which the code generator's target lacks "
            f"(see NUMBA_CPU_NAME and NUMBA_CPU_FEATURES); unset it to let the best available set be chosen"
        )
    return ISAS[forced]


ACTIVE = choose(os.environ.get("DDLLM_VK_ISA"), target_features())
