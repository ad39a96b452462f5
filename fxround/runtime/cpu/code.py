"""Machine code by kernel: compiled once for each digest and instruction set, kept in memory and on disk.

A key names everything that the code depends on (the kernel's digest, the layouts of operands, the instruction set), so
a lookup cannot return the code of another kernel. On disk it also names the processor, the compiler and the source
files that build the code; code that is found there is neither built nor compiled. Two threads that ask for one kernel
compile it once: the lock is held while compiling. A signal handler that asks in the meantime compiles the kernel
itself, and a fork waits until the compilation has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fxround.locks import waited_for
from fxround.runtime import disk_cache
from fxround.runtime.cpu.llvm.engine import Machine, identity, instruction_sets, link, machine_of, object_code

# The modules that write a kernel as LLVM, and those that give a variant of a kernel its digest.
SOURCES: Final = (*disk_cache.SOURCES_OF_KERNELS, "runtime/cpu/llvm/*.py", "runtime/cpu/*.py")
_LOCK: Final = waited_for()
_CODE: dict[tuple[str, str], Any] = {}
_ISA = ["host"]
_ORIGINS = {"compiled": 0, "stored": 0}


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the kernels of a ``with`` block as code for this instruction set; the bits do not change.

    name: ``avx512``, ``avx2`` or ``sse2`` on x86-64, ``neon`` on AArch64, or ``host``, which has all features of the
    processor. Raises ValueError for an instruction set that the processor lacks. Example::

        with fxround.instruction_set("sse2"):
            y = compiled(x)
    """
    if name not in instruction_sets():
        raise ValueError(f"this host cannot run {name!r} code; it can: {', '.join(instruction_sets())}")
    before = _ISA[0]
    _ISA[0] = name
    try:
        yield
    finally:
        _ISA[0] = before


def current_set() -> str:
    """The name of the instruction set that kernels run as now."""
    return _ISA[0]


def current_machine() -> Machine:
    """The registers that code compiled now may use."""
    return machine_of(_ISA[0])


def signature(integers: int, pointers: int) -> Any:
    """The ctypes prototype of a void function of 64-bit integers, then pointers; a call releases the GIL."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * integers, *[ctypes.c_void_p] * pointers)


def native(digest: str, build: Callable[..., str], subject: Any, name: str, prototype: Any) -> Any:
    """The callable for function ``name`` of ``build(subject)``, compiled or loaded at its first use."""
    key = (digest, _ISA[0])
    code = _CODE.get(key)
    if code is not None:
        return code
    with _LOCK:
        # Another thread may have compiled it while this one waited for the lock.
        if key not in _CODE:
            _CODE[key] = _function(digest, build, subject, name, prototype, _ISA[0])
        return _CODE[key]


def address_of(function: Any) -> int:
    """The address of the code of a function that ``native`` returned."""
    address: int = function.address
    return address


def _function(digest: str, build: Callable[..., str], subject: Any, name: str, prototype: Any, isa: str) -> Any:
    """The callable, which knows its address."""
    address = _address(digest, build, subject, name, isa)
    function = prototype(address)
    function.address = address
    return function


def _address(digest: str, build: Callable[..., str], subject: Any, name: str, isa: str) -> int:
    """Fetch or compile the code, and load it."""
    key = disk_cache.key(SOURCES, identity(isa), f"{build.__module__}.{build.__qualname__}", name, digest)
    code, stored = disk_cache.fetch(key, lambda: object_code(build(subject), isa))
    _ORIGINS["stored" if stored else "compiled"] += 1
    return link(code, (name,), isa)[name]


def origins() -> dict[str, int]:
    """How many kernels this process has ``compiled``, and how many it found ``stored`` on disk."""
    return dict(_ORIGINS)
