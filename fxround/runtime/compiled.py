"""Machine code by kernel: compiled once per digest and instruction set, kept in memory and on disk.

What is true here. A key names everything that the code depends on (the kernel's digest, how operands lie
in memory, the instruction set), so that looking one up can never return the code of another. On disk the key names
the processor, the compiler and fxround's source besides; code that is found there is neither built nor compiled.

Why it is safe. Two threads that ask for one kernel at once compile it once: the lock is held while compiling. A signal
handler that asks in the middle of it compiles the kernel itself, and a fork waits until it is there.

    before   compile, load and hope that the file name was unique
    after    native(variant.digest, build_map, variant, "map", signature)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fxround.locks import waited_for
from fxround.runtime import cache
from fxround.runtime.llvm.engine import Machine, identity, instruction_sets, link, machine_of, object_code

_LOCK: Final = waited_for()
_CODE: dict[tuple[str, str], Any] = {}
_ISA = ["host"]
_ORIGINS = {"compiled": 0, "stored": 0}


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the block's kernels as code for ``avx512``, ``avx2``, ``sse2`` or ``host``: the bits do not change.

    Raises ValueError for a set that this host lacks.
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
    """A void C function of 64-bit integers, then pointers; calling it releases the GIL."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * integers, *[ctypes.c_void_p] * pointers)


def native(digest: str, build: Callable[..., str], subject: Any, name: str, prototype: Any) -> Any:
    """The callable of ``build(subject)``'s function ``name``."""
    key = (digest, _ISA[0])
    found = _CODE.get(key)
    if found is not None:
        return found
    with _LOCK:
        if key not in _CODE:
            address = _address(digest, build, subject, name, _ISA[0])
            function = _CODE[key] = prototype(address)
            function.address = address
        return _CODE[key]


def address_of(function: Any) -> int:
    """Where the code of a function of ``native`` lies."""
    address: int = function.address
    return address


def _address(digest: str, build: Callable[..., str], subject: Any, name: str, isa: str) -> int:
    key = cache.key(identity(isa), f"{build.__module__}.{build.__qualname__}", name, digest)
    code, stored = cache.fetch(key, lambda: object_code(build(subject), isa))
    _ORIGINS["stored" if stored else "compiled"] += 1
    return link(code, (name,), isa)[name]


def origins() -> dict[str, int]:
    """How many kernels this process has ``compiled``, and how many it found ``stored`` on disk."""
    return dict(_ORIGINS)
