"""Small tables: each lane looks up an entry, in registers where the processor can, else in memory.

``lookup`` writes a table as a constant array of the module and calls a function whose name gives its numbers of entries
and lanes; ``definitions`` gives the text of the functions that a module calls, for processors with 512-bit registers
and for others. The index counts modulo the number of entries. Entries are integers that are moved and never computed
with, so every definition gives the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir

_I32: Final = ir.IntType(32)
_PTR: Final = ir.PointerType()
_REGISTER: Final = 16
_INTRINSICS: Final = """\
declare <16 x i32> @llvm.x86.avx512.vpermi2var.d.512(<16 x i32>, <16 x i32>, <16 x i32>)
declare <16 x i32> @llvm.x86.avx512.permvar.si.512(<16 x i32>, <16 x i32>)
"""
_CALLED: Final = re.compile(r'@"?fxround\.lookup(\d+)\.v(\d+)"?\(')


def lookup(b: ir.IRBuilder, index: Any, entries: Sequence[ir.Constant], result: Any) -> Any:
    """Entry ``index`` of constants that are repeated over the lanes; ``result`` is i32 or a vector of it."""
    lanes = result.count if isinstance(result, ir.VectorType) else 1
    values = [e.constant[0] if isinstance(result, ir.VectorType) else e for e in entries]
    table = _table(b.module, [int(v.constant) for v in values])
    name = f"fxround.lookup{len(values)}.v{lanes}"
    callee = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, [_PTR, result]), name)
    return b.call(callee, [table, index])


def _table(module: ir.Module, values: list[int]) -> Any:
    """The constant array of these values, one for each module."""
    name = "table." + ".".join(f"{v:x}" for v in values)
    table = module.globals.get(name)
    if table is not None:
        return table
    kind = ir.ArrayType(_I32, len(values))
    made = ir.GlobalVariable(module, kind, name)
    made.initializer = ir.Constant(kind, values)
    made.linkage, made.global_constant, made.align = "internal", True, 64
    made.type = _PTR
    return made


def definitions(text: str, wide: bool) -> str:
    """The functions that a module's text calls and does not define. wide: registers have 512 bits."""
    called = sorted({(int(n), int(v)) for n, v in _CALLED.findall(text)})
    parts = [_define(entries, lanes, wide) for entries, lanes in called]
    return "\n".join([_INTRINSICS, *parts] if wide else parts)


def _define(entries: int, lanes: int, wide: bool) -> str:
    kind = f"<{lanes} x i32>" if lanes > 1 else "i32"
    if lanes == 1:
        body = _loaded_one(entries)
    elif wide and entries in (_REGISTER, 2 * _REGISTER) and lanes <= 2 * _REGISTER:
        body = _permuted(entries, lanes)
    else:
        body = _gathered(entries, lanes)
    name = f"fxround.lookup{entries}.v{lanes}"
    return f"define linkonce_odr {kind} @{name}(ptr %table, {kind} %index) alwaysinline {{\n{body}\n}}"


def _loaded_one(entries: int) -> str:
    return f"""\
  %low = and i32 %index, {entries - 1}
  %entry = getelementptr i32, ptr %table, i32 %low
  %value = load i32, ptr %entry
  ret i32 %value"""


def _gathered(entries: int, lanes: int) -> str:
    """One load for each lane."""
    kind = f"<{lanes} x i32>"
    lines = [f"  %low = and {kind} %index, splat (i32 {entries - 1})"]
    for i in range(lanes):
        before = f"%v{i - 1}" if i else "poison"
        lines += [
            f"  %i{i} = extractelement {kind} %low, i32 {i}",
            f"  %p{i} = getelementptr i32, ptr %table, i32 %i{i}",
            f"  %e{i} = load i32, ptr %p{i}",
            f"  %v{i} = insertelement {kind} {before}, i32 %e{i}, i32 {i}",
        ]
    return "\n".join([*lines, f"  ret {kind} %v{lanes - 1}"])


def _permuted(entries: int, lanes: int) -> str:
    """A permutation of one or two registers for 16 lanes; it ignores the bits of the index above those that count."""
    full, kind = f"<{_REGISTER} x i32>", f"<{lanes} x i32>"
    lines = [
        f"  %first = load {full}, ptr %table, align 64",
        f"  %rest = getelementptr i32, ptr %table, i32 {entries - _REGISTER}",
        f"  %second = load {full}, ptr %rest, align 64",
    ]
    parts = range(max(1, lanes // _REGISTER))
    for i in parts:
        index = f"{full} %i{i}"
        call = (
            f"vpermi2var.d.512({full} %first, {index}, {full} %second)"
            if entries > _REGISTER
            else f"permvar.si.512({full} %first, {index})"
        )
        lines += [
            f"  %i{i} = shufflevector {kind} %index, {kind} poison, {_places(i * _REGISTER, _REGISTER, lanes)}",
            f"  %v{i} = call {full} @llvm.x86.avx512.{call}",
        ]
    joined = f"{full} %v0, {full} %v{parts[-1]}, {_places(0, lanes, lanes)}"
    return "\n".join([*lines, f"  %value = shufflevector {joined}", f"  ret {kind} %value"])


def _places(start: int, count: int, lanes: int) -> str:
    """The mask of a shuffle: ``count`` lanes from ``start`` on; lanes beyond the last have no value."""
    chosen = (f"i32 {i}" if i < lanes else "i32 poison" for i in range(start, start + count))
    return f"<{count} x i32> <{', '.join(chosen)}>"
