"""Several operators of the scalar IR as one instruction, where the processor has it.

Four idioms are recognized: the sum with the high bits of a 32-bit random word, the next state of a random stream, the
test whether a binary64 value is finite and not zero, which is left as it is otherwise, and sums and multiply-adds that
are rounded towards zero. Each instruction is defined as exactly these operators, so the bits are the same.
``vpmadd52huq`` adds bits 52 and up of a product of two numbers, of which it reads the 52 lowest bits, so a factor of
2^(52-n) shifts right by n; ``vpmadd52luq`` adds the bits below; ``vfixupimmpd`` chooses by a value's class; and
``vfmadd213pd`` has a rounding direction of its own.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.numerics.arithmetic.scalar import WIDTH, Expr
from fxround.numerics.formats.carriers import CARRIERS
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.loops import declared
from fxround.runtime.cpu.llvm.render import Fusion, literal, llvm_type

# Four bits for each class, from the lowest: quiet NaN, signalling NaN, zero, one, -inf, inf, negative, positive. The
# code 1 keeps the value.
_SPECIAL: Final = 0x00110111
# The 64-bit lanes of a 512-bit vector, and the bits of a factor that a 52-bit product reads.
_LANES: Final = 8
_FACTOR_BITS: Final = 52
# The operand of an instruction that rounds towards zero, without exceptions.
_TOWARD_ZERO: Final = 11
_ONE: Final = 1023 << 52


def fusions_for(machine: Machine, lanes: int) -> Fusion | None:
    """The fusions that the processor has for vectors of this many 64-bit lanes; None if it has none."""
    wide = machine.vector_bytes == 64 and lanes % _LANES == 0
    # AVX-512 has a product of 64 bits.
    halved = machine.vector_bytes == 32 and lanes > 1
    if not wide and not halved:
        return None

    def fuse(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any]) -> Any:
        if node.op == "add" and wide and machine.wide_products:
            return _shifted_sum(node, b, env, lanes) or _congruential(node, b, env, lanes)
        if node.op == "add" and halved:
            return _short_congruential(node, b, env, lanes)
        if node.op == "toward_zero" and wide:
            return _truncated(node.args[0], b, env, lanes)
        return _choice(node, b, env) if node.op == "select" and wide and lanes == _LANES else None

    return fuse


def _shifted_sum(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any], lanes: int) -> Any:
    """x + (y >> n) for a 32-bit y; if y is bits 20 and up of a word z, computed from z itself."""
    x, shifted = node.args
    if node.type != "u64" or shifted.op != "shr" or shifted.args[0].op != "widen" or shifted.args[1].op != "const":
        return None
    word, left = shifted.args[0], _FACTOR_BITS - int(shifted.args[1].attr or 0)
    # (z >> 20) cut to 32 bits, then >> n, is bits 20 + n to 51 of z: the product reads no bit above 51, and shifts by
    # both.
    narrowed = word.args[0]
    if narrowed.op == "narrow" and _is_shift(narrowed.args[0], _FACTOR_BITS - WIDTH["u32"]):
        word, left = narrowed.args[0].args[0], left - (_FACTOR_BITS - WIDTH["u32"])
    return _wide_product("h", b, env[x], env[word], 1 << left, lanes)


def _step(node: Expr) -> tuple[Expr, int, int] | None:
    """(x, A, C) of (x * A mod 2^52) + C, the next state of a stream; None for any other node."""
    product, constant = node.args
    if node.type != "u64" or product.op != "and" or constant.op != "const":
        return None
    whole, mask = product.args
    if mask.attr != (1 << _FACTOR_BITS) - 1 or whole.op != "mul" or whole.args[1].op != "const":
        return None
    return whole.args[0], int(whole.args[1].attr or 0), int(constant.attr or 0)


def _congruential(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any], lanes: int) -> Any:
    """(x * A mod 2^52) + C, the next state of a stream; A must have at most 52 bits."""
    step = _step(node)
    if step is None or step[1] >> _FACTOR_BITS:
        return None
    return _wide_product("l", b, literal("u64", step[2], lanes), env[step[0]], step[1], lanes)


def _short_congruential(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any], lanes: int) -> Any:
    """x * A + C, of which only the 52 lowest bits count, for a factor A below 2^32: two products of 32 bits.

    The product of the high half, which ``vpmulld`` leaves in its place, is added to that of the low half, ``vpmuludq``.
    """
    step = _step(node)
    if step is None or step[1] >> WIDTH["u32"]:
        return None
    x, factor, constant = env[step[0]], step[1], literal("u64", step[2], lanes)
    word = ir.IntType(WIDTH["u32"])
    halves = ir.VectorType(word, 2 * lanes)
    upper = b.mul(b.bitcast(x, halves), ir.Constant(halves, [word(0), word(factor)] * lanes))
    low = b.mul(b.and_(x, literal("u64", (1 << WIDTH["u32"]) - 1, lanes)), literal("u64", factor, lanes))
    return b.add(b.add(low, constant), b.bitcast(upper, llvm_type("u64", lanes)))


def _is_shift(node: Expr, places: int) -> bool:
    return node.op == "shr" and node.type == "u64" and node.args[1].op == "const" and node.args[1].attr == places


def _wide_product(half: str, b: ir.IRBuilder, addend: Any, x: Any, factor: int, lanes: int) -> Any:
    """addend + the low (``l``) or high (``h``) 52 bits of (x mod 2^52) * factor."""
    if lanes > _LANES:
        parts = [
            _wide_product(half, b, _part(b, addend, first, lanes), _part(b, x, first, lanes), factor, lanes // 2)
            for first in (0, lanes // 2)
        ]
        return b.shuffle_vector(*parts, _numbers(0, lanes))
    kind = llvm_type("u64", _LANES)
    callee = declared(b, f"llvm.x86.avx512.vpmadd52{half}.uq.512", ir.FunctionType(kind, [kind] * 3))
    return b.call(callee, [addend, x, literal("u64", factor, _LANES)])


def _truncated(nearest: Expr, b: ir.IRBuilder, env: dict[Expr, Any], lanes: int) -> Any:
    """The value of a binary64 multiply-add or sum, rounded towards zero; None for another operator."""
    if nearest.op not in ("fma", "fadd") or any(x not in env for x in nearest.args):
        return None
    operands = [env[x] for x in nearest.args]
    if nearest.op == "fadd":
        # x * 1 + y: such code has more additions than products, which some processors have units apart for.
        operands.insert(1, literal("f64", _ONE, lanes))
    return _multiply_add(b, operands, lanes)


def _multiply_add(b: ir.IRBuilder, operands: list[Any], lanes: int) -> Any:
    """A multiply-add that is rounded towards zero."""
    if lanes > _LANES:
        parts = [
            _multiply_add(b, [_part(b, x, first, lanes) for x in operands], lanes // 2) for first in (0, lanes // 2)
        ]
        return b.shuffle_vector(*parts, _numbers(0, lanes))
    kind, word = llvm_type("f64", _LANES), ir.IntType(32)
    callee = declared(b, "llvm.x86.avx512.vfmadd.pd.512", ir.FunctionType(kind, [kind] * 3 + [word]))
    return b.call(callee, [*operands, word(_TOWARD_ZERO)])


def _part(b: ir.IRBuilder, x: Any, first: int, lanes: int) -> Any:
    """Half of the lanes, from ``first`` on."""
    return b.shuffle_vector(x, x, _numbers(first, lanes // 2))


def _numbers(first: int, count: int) -> ir.Constant:
    word = ir.IntType(32)
    return ir.Constant(ir.VectorType(word, count), [word(first + i) for i in range(count)])


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
    # All lanes are computed; 4 is the current rounding direction.
    operands = [b.bitcast(env[y], floats), b.bitcast(env[x], floats), table, word(0), ir.IntType(8)(-1), word(4)]
    return b.bitcast(b.call(callee, operands), llvm_type("u64", 8))
