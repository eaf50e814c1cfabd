"""ARM machine code on any machine: LLVM compiles emitted functions for aarch64, Unicorn runs them."""

import struct
from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import unicorn
from llvmlite import ir
from unicorn import arm64_const as arm

from ddllm_vk.cpu.emit import Emit
from ddllm_vk.cpu.intrinsics import I64

TRIPLE = "aarch64-unknown-linux-gnu"
_CODE, _DATA, _STACK, _SIZE = 0x10000000, 0x20000000, 0x30000000, 0x1000000
#: Emulated processors by LLVM's names; Unicorn has no Cortex-A76, its MAX has dot products as that does.
_MODELS = {"cortex-a72": arm.UC_CPU_ARM64_A72, "cortex-a76": arm.UC_CPU_ARM64_MAX}


def compile_for(triple: str, cpu: str, features: str, functions: dict[str, tuple[int, Emit]]) -> tuple[str, bytes]:
    """Assembly and object code. functions: name -> (count of int64 arguments, what writes it); each is called with the
    address of an array of its arguments."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    for name, (count, emit) in functions.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        array = builder.inttoptr(function.args[0], I64.as_pointer())
        emit(builder, [builder.load(builder.gep(array, [I64(i)])) for i in range(count)])
        if not builder.block.is_terminated:
            builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(compiled, passes)
    return machine.emit_assembly(compiled), machine.emit_object(compiled)


class Emulated:
    """Functions on an emulated processor, called with int64 numbers and arrays, which are copied in and back."""

    def __init__(self, cpu: str, functions: dict[str, tuple[int, Emit]]) -> None:
        self.assembly, code = compile_for(TRIPLE, cpu, "", functions)
        self.machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.machine.ctl_set_cpu_model(_MODELS[cpu])
        for base in (_CODE, _DATA, _STACK):
            self.machine.mem_map(base, _SIZE)
        self.machine.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point allowed
        self.symbols = _load(code, self.machine.mem_write)

    def __call__(self, name: str, *args: "int | np.ndarray") -> None:
        here, numbers, arrays = _DATA, [], []
        for arg in args:
            if isinstance(arg, np.ndarray):
                self.machine.mem_write(here, arg.tobytes())
                arrays.append((arg, here))
                numbers.append(here)
                here += (arg.nbytes + 127) // 64 * 64
            else:
                numbers.append(int(arg))
        self.machine.mem_write(here, struct.pack(f"<{len(numbers)}q", *numbers))
        end = _CODE + _SIZE - 16
        for register, value in (("X0", here), ("SP", _STACK + _SIZE - 256), ("LR", end)):
            self.machine.reg_write(getattr(arm, f"UC_ARM64_REG_{register}"), value)
        self.machine.emu_start(self.symbols[name], end)
        for array, at in arrays:
            array[...] = np.frombuffer(self.machine.mem_read(at, array.nbytes), array.dtype).reshape(array.shape)


def _load(code: bytes, write: Callable[[int, bytes], None]) -> dict[str, int]:
    """Links an ELF object at _CODE: sections one after the other, and the relocations small functions have."""
    table, size, count = struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HH", code, 58)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    image, addresses = bytearray(), {}
    for i, (_, kind, flags, _, offset, length, _, _, alignment, _) in enumerate(sections):
        if kind == 1 and flags & 2:  # SHT_PROGBITS, SHF_ALLOC
            image += bytes(-len(image) % max(alignment, 1))
            addresses[i] = _CODE + len(image)
            image += code[offset : offset + length]
    values, names = [], {}
    for _, kind, _, _, offset, length, link, _, _, _ in sections:
        if kind == 2:  # SHT_SYMTAB
            for at in range(offset, offset + length, 24):
                name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
                values.append(addresses.get(section, 0) + value)
                text = sections[link][4] + name
                names[code[text : code.index(b"\0", text)].decode()] = values[-1]
    for _, kind, _, _, offset, length, _, target, _, _ in sections:
        if kind == 4 and target in addresses and sections[target][2] & 4:  # SHT_RELA of code
            for at in range(offset, offset + length, 24):
                where, info, addend = struct.unpack_from("<QQq", code, at)
                _relocate(image, addresses[target] + where, info & 0xFFFFFFFF, values[info >> 32] + addend)
    write(_CODE, bytes(image))
    return names


def _relocate(image: bytearray, place: int, kind: int, value: int) -> None:
    at = place - _CODE
    (word,) = struct.unpack_from("<I", image, at)
    if kind == 275:  # R_AARCH64_ADR_PREL_PG_HI21
        pages = (value >> 12) - (place >> 12)
        word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif kind in (282, 283):  # R_AARCH64_JUMP26, CALL26
        word |= (value - place) >> 2 & 0x3FFFFFF
    else:  # R_AARCH64_ADD_ABS_LO12_NC, LDST{8,16,32,64,128}_ABS_LO12_NC
        scale = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}[kind]
        word |= (value & 0xFFF) >> scale << 10
    struct.pack_into("<I", image, at, word)
