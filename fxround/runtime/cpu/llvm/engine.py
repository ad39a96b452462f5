"""From LLVM IR text to object code to callable addresses, for the host or for a lesser instruction set that it has.

``object_code`` optimizes for one named instruction set; ``link`` loads object code, of this process or of another one,
for as long as the process lives. An instruction set changes how many lanes an instruction has, never a bit of a result:
the optimizer gets no licence to change floating point, and the tests run the same kernels as avx512, avx2 and sse2.
Object code names the library functions that it calls (the C library's fma, where the processor has none) and is bound
to them when it is loaded. All code is linked in the same way, whether it is fresh or was stored.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm

from fxround.locks import waited_for
from fxround.runtime.cpu.llvm import environment, lookups
from fxround.runtime.cpu.llvm.environment import Architecture


@dataclass(frozen=True)
class Machine:
    """The registers of an instruction set: the bytes of a vector, and how many registers there are.

    wide_products: whether it multiplies 52-bit integers (AVX-512 IFMA). directed: whether it has a fused multiply-add
    that rounds in the direction that a kernel sets, and exception flags that a kernel reads.
    """

    vector_bytes: int
    registers: int
    wide_products: bool = False
    directed: bool = True


@dataclass(frozen=True)
class InstructionSet:
    """A named instruction set: its architecture, and the processor and features that LLVM compiles for.

    needs: the features, as LLVM names them, that a host must have to run it.
    """

    architecture: Architecture
    cpu: str
    features: str
    machine: Machine
    needs: tuple[str, ...] = ()


_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
# The widest of an architecture first. sse2 has no fused multiply-add: LLVM calls the C library's fma, which is
# correctly rounded by its contract. neon is a part of every AArch64 processor, so a host need not report it.
SETS: Final = MappingProxyType(
    {
        "avx512": InstructionSet(
            "x86-64",
            "skylake-avx512",
            "+avx512f,+avx512bw,+avx512dq,+avx512vl,+fma,-prefer-256-bit",
            Machine(64, 32),
            _AVX512,
        ),
        "avx2": InstructionSet("x86-64", "haswell", "+avx2,+fma", Machine(32, 16), ("avx2", "fma")),
        "sse2": InstructionSet("x86-64", "x86-64", "+sse2", Machine(16, 16, directed=False), ("sse2",)),
        "neon": InstructionSet("aarch64", "generic", "+neon", Machine(16, 32)),
    }
)
# The machine of a host of another architecture, which has no named set.
_UNKNOWN: Final = Machine(16, 16, directed=False)
_ARCHITECTURES: Final[dict[str, Architecture]] = {
    "x86_64": "x86-64",
    "AMD64": "x86-64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
}
_WIDE_BYTES: Final = 64
# A module of this name is not optimized: it is straight-line code whose values are in registers already.
STRAIGHT: Final = "straight"
# Modules that get all of LLVM's passes at its level 2 and have few instructions: it unrolls their loops, which makes
# them faster. The others are loops over vectors already, and get the few passes below: the whole of level 2 takes five
# times their time, more than the generation of code, and its kernels are no faster (measured for AVX-512 and AVX2).
_UNROLLED: Final = frozenset({"scatter"})
# The lock that every call into LLVM takes: in a forked child it must not be held by a thread of the parent.
_CALLS: Final = waited_for(llvm.ffi.lib._lock._lock)
_LOCK: Final = waited_for()
_DEPTH: Final = [0]


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def host_architecture() -> Architecture:
    """The architecture of the processor that this process runs on."""
    return _ARCHITECTURES.get(platform.machine(), "other")


@cache
def instruction_sets() -> tuple[str, ...]:
    """``host`` and the named instruction sets that this host can run, widest first."""
    _initialize()
    has = llvm.get_host_cpu_features()
    own = {name: row for name, row in SETS.items() if row.architecture == host_architecture()}
    return ("host", *(name for name, row in own.items() if all(has.get(f, False) for f in row.needs)))


@cache
def machine_of(isa: str) -> Machine:
    """The registers of a named instruction set; for ``host``, those of the widest one."""
    if isa != "host":
        return SETS[isa].machine
    name = next((n for n in instruction_sets() if n != "host"), None)
    if name is None:
        return _UNKNOWN
    wide_products = name == "avx512" and llvm.get_host_cpu_features().get("avx512ifma", False)
    return replace(SETS[name].machine, wide_products=wide_products)


def _target(isa: str) -> tuple[str, str]:
    """The processor's name and features as LLVM spells them; ValueError for a set that this host lacks."""
    _initialize()
    if isa not in instruction_sets():
        raise ValueError(f"this host cannot run {isa!r} code; it can: {', '.join(instruction_sets())}")
    if isa != "host":
        return SETS[isa].cpu, SETS[isa].features
    # LLVM prefers 256-bit vectors on some processors because 512-bit ones lower their clock; these kernels gain from
    # 512.
    wide = ",-prefer-256-bit" if "avx512" in instruction_sets() else ""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten() + wide


@cache
def identity(isa: str) -> str:
    """What object code depends on beside its text: the processor as LLVM sees it, and the compiler's versions."""
    version = ".".join(map(str, llvm.llvm_version_info))
    return "\n".join((isa, llvm.get_default_triple(), *_target(isa), f"llvmlite {llvmlite.__version__}", version))


def _target_machine(isa: str) -> Any:
    cpu, features = _target(isa)
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


@cache
def _compiler(isa: str) -> Any:
    return _target_machine(isa)


@cache
def _cross_compiler(isa: str, triple: str) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    row = SETS[isa]
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=row.cpu, features=row.features, opt=3, reloc="pic")


@cache
def _linker(isa: str, depth: int) -> Any:
    # The execution engine owns its target machine. A signal handler that links in the middle of a link has an engine of
    # its own: in a shared one, looking a name up could find the function of the other object.
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(isa))


def _optimize(module: Any, machine: Any, name: str) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=0 if name == STRAIGHT else 2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    if name == STRAIGHT or name in _UNROLLED:
        builder.getModulePassManager().run(module, builder)
        return
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.add_new_gvn_pass()
    passes.add_dead_code_elimination_pass()
    passes.run(module, builder)


def _optimized(text: str, isa: str, machine: Any) -> Any:
    module = llvm.parse_assembly(text)
    architecture = host_architecture() if isa == "host" else SETS[isa].architecture
    tables = lookups.definitions(text, machine_of(isa).vector_bytes == _WIDE_BYTES)
    defined = f"{tables}\n{environment.definitions(text, architecture)}".strip()
    if defined:
        module.link_in(llvm.parse_assembly(defined))
    module.verify()
    _optimize(module, machine, text.removeprefix('; ModuleID = "').partition('"')[0])
    return module


def object_code(text: str, isa: str = "host") -> bytes:
    """The relocatable object file (ELF) of an LLVM module, as bytes."""
    with _LOCK:
        machine = _compiler(isa)
        code: bytes = machine.emit_object(_optimized(text, isa, machine))
        return code


def object_for(text: str, isa: str, triple: str) -> bytes:
    """The object file of an LLVM module for another machine: position-independent code of a named instruction set.

    triple: the machine as LLVM spells it, for example ``aarch64-unknown-linux-gnu``. The code is that of
    ``object_code`` on such a host, but for the way in which it addresses its constants. Raises ValueError for a set of
    another architecture than the triple's.
    """
    if SETS[isa].architecture != _ARCHITECTURES.get(triple.partition("-")[0]):
        raise ValueError(f"{triple} cannot run {isa!r} code; it is code of {SETS[isa].architecture}")
    with _LOCK:
        machine = _cross_compiler(isa, triple)
        code: bytes = machine.emit_object(_optimized(text, isa, machine))
        return code


def link(code: bytes, names: tuple[str, ...], isa: str = "host") -> dict[str, int]:
    """Load object code for the life of the process; returns the addresses of its functions with these names."""
    with _LOCK:
        _DEPTH[0] += 1
        try:
            linker = _linker(isa, _DEPTH[0])
            linker.add_object_file(llvm.ObjectFileRef.from_data(code))
            linker.finalize_object()
            # A later object may define the same names; the addresses found here are those of this one.
            return {name: linker.get_function_address(name) for name in names}
        finally:
            _DEPTH[0] -= 1


def compile_module(text: str, names: tuple[str, ...], isa: str = "host") -> dict[str, int]:
    """Compile and load an LLVM module; returns the addresses of the named functions."""
    return link(object_code(text, isa), names, isa)
