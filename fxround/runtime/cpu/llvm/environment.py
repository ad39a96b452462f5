"""The floating-point environment that a kernel runs in: entered and left by functions of the processor's own.

A kernel calls functions whose names say what is wanted, ``fxround.enter.up.watched``; ``definitions`` gives their text
for an architecture. So the text of a kernel is the same for every processor. On an architecture without definitions
a kernel runs in the caller's environment.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from llvmlite import ir

from fxround.numerics.arithmetic.forms.truncation import Direction

Architecture = Literal["x86-64", "aarch64", "other"]
_I32: Final = ir.IntType(32)
_PTR: Final = ir.PointerType()
_CALLED: Final = re.compile(r'@"?(fxround\.(enter|leave)\.(\w+)\.(\w+))"?\(')
# The words that the caller's environment and the kernel's own take.
WORDS: Final = 2

# MXCSR. The state in which a process starts: all exceptions masked, round to nearest, subnormals kept.
_MXCSR: Final = 0x1F80
_MXCSR_DIRECTIONS: Final[dict[str, int]] = {"nearest": 0, "down": 0x2000, "up": 0x4000, "zero": 0x6000}
# Flush subnormal results to zero; this raises underflow even where the result was exact.
_MXCSR_FLUSH: Final = 0x8000
# The flags for a subnormal operand, overflow and underflow.
_MXCSR_RAISED: Final = 0x1A

# FPCR and FPSR. FPCR starts as 0: no traps, round to nearest, subnormals kept, NaNs keep their payload.
_FPCR_DIRECTIONS: Final[dict[str, int]] = {"nearest": 0, "up": 1 << 22, "down": 2 << 22, "zero": 3 << 22}
# FZ: a subnormal result becomes zero and raises underflow, whether it was exact or not. Unlike x86's, it makes a zero
# of a subnormal operand as well, and raises the flag below: such results do not count, so no bit of them is seen.
_FPCR_FLUSH: Final = 1 << 24
_FPSR_RAISED: Final = 1 << 7 | 1 << 3 | 1 << 2


def enter(b: ir.IRBuilder, theirs: Any, ours: Any, direction: Direction, watched: bool) -> None:
    """Keep the caller's environment in ``theirs``; begin one that rounds in ``direction``, all flags clear.

    A ``watched`` one flushes subnormal results to zero. ``theirs`` and ``ours`` are arrays of WORDS i32.
    """
    name = f"fxround.enter.{direction}.{'watched' if watched else 'plain'}"
    b.call(ir.Function(b.module, ir.FunctionType(ir.VoidType(), [_PTR, _PTR]), name), [theirs, ours])


def leave(b: ir.IRBuilder, theirs: Any, ours: Any, flags: Any = None) -> None:
    """Restore the caller's environment.

    ``flags``, an i32 that may be given, becomes nonzero if anything overflowed or was subnormal.
    """
    if flags is None:
        kind, name = ir.FunctionType(ir.VoidType(), [_PTR]), "fxround.leave.any.plain"
        b.call(ir.Function(b.module, kind, name), [theirs])
        return
    kind, name = ir.FunctionType(ir.VoidType(), [_PTR] * 3), "fxround.leave.any.watched"
    b.call(ir.Function(b.module, kind, name), [theirs, ours, flags])


def definitions(text: str, architecture: Architecture) -> str:
    """The functions of this module that a module's text calls."""
    called = sorted(set(_CALLED.findall(text)))
    if not called:
        return ""
    declarations, enter, leave = _WRITERS.get(architecture, ("", _enter_nothing, _leave_nothing))
    parts = [declarations]
    for name, verb, direction, kind in called:
        watched = kind == "watched"
        signature = "ptr %theirs" if verb == "leave" and not watched else "ptr %theirs, ptr %ours"
        signature += ", ptr %flags" if verb == "leave" and watched else ""
        body = enter(direction, watched) if verb == "enter" else leave(watched)
        parts.append(f"define linkonce_odr void @{name}({signature}) alwaysinline {{\n{body}\n  ret void\n}}")
    return "\n".join(parts)


def _enter_mxcsr(direction: str, watched: bool) -> str:
    control = _MXCSR | _MXCSR_DIRECTIONS[direction] | (_MXCSR_FLUSH if watched else 0)
    return f"""\
  store i32 {control}, ptr %ours
  call void @llvm.x86.sse.stmxcsr(ptr %theirs)
  call void @llvm.x86.sse.ldmxcsr(ptr %ours)"""


def _leave_mxcsr(watched: bool) -> str:
    collect = f"""\
  call void @llvm.x86.sse.stmxcsr(ptr %ours)
  %before = load i32, ptr %flags
  %state = load i32, ptr %ours
  %raised = and i32 %state, {_MXCSR_RAISED}
  %after = or i32 %before, %raised
  store i32 %after, ptr %flags
"""
    return (collect if watched else "") + "  call void @llvm.x86.sse.ldmxcsr(ptr %theirs)"


def _enter_fpcr(direction: str, watched: bool) -> str:
    control = _FPCR_DIRECTIONS[direction] | (_FPCR_FLUSH if watched else 0)
    # Bits 32 and up of both registers are reserved. The caller's flags are kept and restored, as they are in MXCSR.
    return f"""\
  %control = call i64 @llvm.aarch64.get.fpcr()
  %flags = call i64 @llvm.aarch64.get.fpsr()
  %low = trunc i64 %control to i32
  store i32 %low, ptr %theirs
  %second = getelementptr i32, ptr %theirs, i64 1
  %state = trunc i64 %flags to i32
  store i32 %state, ptr %second
  call void @llvm.aarch64.set.fpcr(i64 {control})
  call void @llvm.aarch64.set.fpsr(i64 0)"""


def _leave_fpcr(watched: bool) -> str:
    collect = f"""\
  %state = call i64 @llvm.aarch64.get.fpsr()
  %seen = trunc i64 %state to i32
  %before = load i32, ptr %flags
  %raised = and i32 %seen, {_FPSR_RAISED}
  %after = or i32 %before, %raised
  store i32 %after, ptr %flags
"""
    restore = """\
  %low = load i32, ptr %theirs
  %control = zext i32 %low to i64
  call void @llvm.aarch64.set.fpcr(i64 %control)
  %second = getelementptr i32, ptr %theirs, i64 1
  %kept = load i32, ptr %second
  %wide = zext i32 %kept to i64
  call void @llvm.aarch64.set.fpsr(i64 %wide)"""
    return (collect if watched else "") + restore


def _enter_nothing(direction: str, watched: bool) -> str:
    assert direction == "nearest" and not watched, "this processor's rounding direction and flags are not set here"
    return ""


def _leave_nothing(watched: bool) -> str:
    assert not watched, "this processor's exception flags are not read here"
    return ""


_X86: Final = """\
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)"""
_ARM: Final = """\
declare i64 @llvm.aarch64.get.fpcr()
declare i64 @llvm.aarch64.get.fpsr()
declare void @llvm.aarch64.set.fpcr(i64)
declare void @llvm.aarch64.set.fpsr(i64)"""
_WRITERS: Final[dict[str, Any]] = {
    "x86-64": (_X86, _enter_mxcsr, _leave_mxcsr),
    "aarch64": (_ARM, _enter_fpcr, _leave_fpcr),
}
