"""Several operators of the scalar IR as one instruction, where the processor has it.

What is true here. Two idioms of rounding are recognized: a sum with the high bits of 32 random ones, and the question
whether a binary64 value is finite and not zero, to be left as it is otherwise.

Why it is safe. Each instruction is defined as exactly these integer operators: ``vpmadd52huq`` adds bits 52 and up
of a product of 52-bit factors, so that a factor 2^(52-n) shifts right by n; ``vfixupimmpd`` answers by a
value's class.

    before   vpsrlq $3; vpaddq
    after    vpmadd52huq
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.numerics.carriers import CARRIERS
from fxround.numerics.scalar import Expr
from fxround.runtime.llvm.engine import Machine
from fxround.runtime.llvm.loops import declared
from fxround.runtime.llvm.render import Fusion, literal, llvm_type

# Four bits a class, from the lowest: quiet NaN, signalling NaN, zero, one, -inf, inf, negative, positive. 1: the value.
_SPECIAL: Final = 0x00110111


def fusions_for(machine: Machine, lanes: int) -> Fusion | None:
    """What the processor has for vectors of this many binary64 lanes."""
    if machine.vector_bytes != 64 or lanes != 8:
        return None

    def fuse(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any]) -> Any:
        if node.op == "add" and machine.wide_products:
            return _shifted_sum(node, b, env)
        return _choice(node, b, env) if node.op == "select" else None

    return fuse


def _shifted_sum(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any]) -> Any:
    """x + (y >> n), y of 32 bits."""
    x, shifted = node.args
    if node.type != "u64" or shifted.op != "shr" or shifted.args[0].op != "widen" or shifted.args[1].op != "const":
        return None
    factor = literal("u64", 1 << 52 - int(shifted.args[1].attr or 0), 8)
    kind = factor.type
    callee = declared(b, "llvm.x86.avx512.vpmadd52h.uq.512", ir.FunctionType(kind, [kind] * 3))
    return b.call(callee, [env[x], env[shifted.args[0]], factor])


def _choice(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any]) -> Any:
    """y if (x without sign) - 1 < infinity - 1, that is, if x is finite and not zero, else x."""
    carrier = CARRIERS["f64"]
    condition, y, x = node.args
    if condition.op != "lt" or condition.args[1].attr != carrier.infinity - 1 or condition.args[0].op != "sub":
        return None
    ordinal, one = condition.args[0].args
    if one.attr != 1 or ordinal.op != "and" or ordinal.args[0] is not x or ordinal.args[1].attr != (1 << 63) - 1:
        return None
    floats, word = llvm_type("f64", 8), ir.IntType(32)
    kind = ir.FunctionType(floats, [floats, floats, llvm_type("u64", 8), word, ir.IntType(8), word])
    callee = declared(b, "llvm.x86.avx512.mask.fixupimm.pd.512", kind)
    table = literal("u64", _SPECIAL, 8)
    # Every lane, the current rounding direction.
    operands = [b.bitcast(env[y], floats), b.bitcast(env[x], floats), table, word(0), ir.IntType(8)(-1), word(4)]
    return b.bitcast(b.call(callee, operands), llvm_type("u64", 8))
