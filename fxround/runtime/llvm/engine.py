"""From LLVM IR text to callable addresses, for the host or for a lesser instruction set of it.

What is true here. ``compile_module`` optimizes for one named instruction set and keeps the machine code alive as
long as the process. An instruction set changes how many lanes an instruction holds, never a bit
of a result: the tests run the same kernels as avx512, avx2 and sse2.

Why it is safe. Only instruction sets that the host has are accepted; the optimizer gets no licence to
change floating point.

    before   cc -O3 -march=native -ffast-math
    after    compile_module(text, "host")
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm

# sse2 has no fused multiply-add: LLVM calls the C library's fma, correctly rounded by its contract.
_FEATURES: Final[dict[str, tuple[str, str]]] = {
    "avx512": ("skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+fma,-prefer-256-bit"),
    "avx2": ("haswell", "+avx2,+fma"),
    "sse2": ("x86-64", "+sse2"),
}
_LOCK = threading.Lock()
_ALIVE: list[Any] = []


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def instruction_sets() -> tuple[str, ...]:
    """``host`` and the named sets that this host can run, widest first."""
    _initialize()
    has = llvm.get_host_cpu_features()
    wide = all(has.get(f, False) for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"))
    middle = has.get("avx2", False) and has.get("fma", False)
    return ("host", *(["avx512"] if wide else []), *(["avx2"] if middle else []), *(["sse2"] if "sse2" in has else []))


@dataclass(frozen=True)
class Machine:
    """What a loop nest may want to know of an instruction set: how wide, and how many, its registers are."""

    vector_bytes: int
    registers: int


@cache
def machine_of(isa: str) -> Machine:
    """The registers of a named instruction set; of the widest one for ``host``."""
    name = next((n for n in instruction_sets() if n != "host"), "sse2") if isa == "host" else isa
    return {"avx512": Machine(64, 32), "avx2": Machine(32, 16), "sse2": Machine(16, 16)}[name]


@cache
def _target_machine(isa: str) -> Any:
    _initialize()
    if isa not in instruction_sets():
        raise ValueError(f"this host cannot run {isa!r} code; it can: {', '.join(instruction_sets())}")
    target = llvm.Target.from_default_triple()
    if isa != "host":
        cpu, features = _FEATURES[isa]
        return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    cpu = llvm.get_host_cpu_name()
    # Some targets prefer 256-bit vectors for old clocks' sake; these kernels are dense.
    features = llvm.get_host_cpu_features().flatten() + (",-prefer-256-bit" if "avx512" in instruction_sets() else "")
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


@cache
def _linker(isa: str) -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(isa))


def _optimize(module: Any, machine: Any) -> None:
    # The kernels are vector code already: the loop and SLP vectorizers have nothing to add.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def compile_module(text: str, names: tuple[str, ...], isa: str = "host") -> dict[str, int]:
    """The addresses of the named functions of an LLVM module."""
    with _LOCK:
        machine = _target_machine(isa)
        module = llvm.parse_assembly(text)
        module.verify()
        _optimize(module, machine)
        linker = _linker(isa)
        linker.add_module(module)
        linker.finalize_object()
        _ALIVE.append(module)
        return {name: linker.get_function_address(name) for name in names}


def assembly(text: str, isa: str = "host") -> str:
    """The optimized machine code of a module, to be read."""
    with _LOCK:
        machine = _target_machine(isa)
        module = llvm.parse_assembly(text)
        _optimize(module, machine)
        return str(machine.emit_assembly(module))
