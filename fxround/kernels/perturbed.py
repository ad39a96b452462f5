"""Kernels of one statement, or of the store of a chain, with all that an attribution asks of them in one pass.

The results are, each only where it exists:

    value    the rounded value, with the bits of the policy's own kernel
    lost     what the rounding lost: the standard deviation of its error if it is drawn, else its error, binary32
    moved    the perturbation of the value, binary32: the derivatives times the perturbations of the operands, and the
             error, or the deviation with a drawn sign
    missed   what the derivatives miss for the perturbation of the operands or for its opposite, of both the larger one,
             because a kink is on one side only, binary32; zero where it is at most a thousandth of ``moved``

The exact value and the derivatives are in binary64. What is not finite is no loss. The sign of an error is the draw
after that of the statement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from fxround.kernels import from_text
from fxround.kernels.kinds import Contract, Map, Reduce, Word
from fxround.kernels.losses import unpacked_expr, variance_of
from fxround.kernels.program import Statement
from fxround.numerics.arithmetic.derivatives import exact, is_derived, partials
from fxround.numerics.arithmetic.rounding import widen_exactly
from fxround.numerics.arithmetic.scalar import (
    Expr,
    Function,
    absolute,
    bits,
    const,
    is_nan,
    narrow,
    negate,
    param,
    select,
    sqrt,
    substitute,
)
from fxround.numerics.formats.storage import CARRIER_OF, Storage, load
from fxround.numerics.modes import Rounding

_LINEAR: Final = frozenset(("identity", "neg", "add", "sub"))
_BILINEAR: Final = frozenset(("mul", "fma"))
_NARROW: Final[Storage] = "f32"
_STORE: Final[tuple[Storage, ...]] = ("f64", "f32", "f32")
_ZERO: Final = const("f64", 0.0)
_INFINITE: Final = const("f64", math.inf)


@dataclass(frozen=True)
class Perturbed:
    """A kernel, and which of its results is what; None for a result that it does not have.

    kernel   its operands are those of the statement, and the perturbations of those that move; those of a store are the
             packed accumulators, and the perturbation if there is one
    """

    kernel: Map
    lost: int | None
    moved: int | None
    missed: int | None


@lru_cache(maxsize=4096)
def perturbed_statement(
    text: str, loads: tuple[Storage, ...], result: Storage, moving: tuple[bool, ...], drawn: bool
) -> Perturbed | None:
    """Return the kernel of a program's text, of one statement; None if there is none.

    moving: for each operand, whether it is perturbed. drawn: whether the perturbation consists of drawn errors; False
    for the known errors of roundings that draw nothing.
    """
    program = from_text.program(text)
    if len(program.statements) != 1:
        return None
    (statement,) = program.statements
    rounding = statement.rounding
    narrow_ones = {CARRIER_OF[s] for s in (*loads, result)} == {"f32"}
    if not narrow_ones or not is_derived(statement.operator) or not _suits(rounding, drawn):
        return None
    base = from_text.pointwise(text, loads, result)
    elements, words = base.body.params[: len(loads)], base.body.params[len(loads) :]
    places = [i for i, moves in enumerate(moving) if moves]
    passed = {f"x{i}": param(f"m{i}", "f32") for i in places}
    wide = {f"x{i}": widen_exactly(load(x, s)) for i, (x, s) in enumerate(zip(elements, loads, strict=True))}
    operands = [wide[o] if isinstance(o, str) else const("f64", o) for o in statement.operands]
    by = [widen_exactly(passed[o]) if isinstance(o, str) and o in passed else None for o in statement.operands]
    value = exact(statement.operator, operands)
    lost = None
    if rounding is not None:
        own = widen_exactly(base.values[0])
        lost = sqrt(_positive(variance_of(value, rounding, own))) if drawn else _finite(own - value)
    first = _derivative(statement, operands, by, value)
    sign = param("sign", "u32") if drawn and lost is not None else None
    moved = _moved(first, lost, sign)
    missed = None
    if first is not None and moved is not None and not passes_exactly(statement, sum(one is not None for one in by)):
        missed = _missed(statement, operands, by, value, first, moved)
    kernel = Map(
        Function("map", (*elements, *passed.values(), *words, *(() if sign is None else (sign,))), ()),
        (*loads, *(_NARROW for _ in places)),
        (),
        (*base.draws, *(() if sign is None else (Word(0, 1, 1),))),
    )
    return _with_results(kernel, base.body.results[0], result, base.values[0], lost, moved, missed)


@lru_cache(maxsize=1024)
def perturbed_store(chain: Contract | Reduce, given: int) -> Perturbed:
    """Return the store in binary32 of packed accumulators (``losses.contract_losses``).

    given: how many operands follow the accumulators: none, or the perturbation that the operands of the chain pass on,
    or that and what the derivatives miss. The value is NaN where it depends on the random bits of the store: a result
    that overflows, or is subnormal.
    """
    acc, random = chain.finish.params
    packed, before, beyond = param("x0", "f64"), param("x1", "f32"), param("x2", "f32")
    sign = param("sign", "u32")
    accumulator, variance = unpacked_expr(packed)
    # Every mode is monotone in its random bits.
    low, high = (
        substitute(chain.finish.results, {acc: accumulator, random: const("u32", word)})[0]
        for word in (0, (1 << 32) - 1)
    )
    stored = select(bits(low).equals(bits(high)), low, const("f32", math.nan))
    lost = sqrt(_positive(variance))
    moved = _moved(widen_exactly(before) if given else None, lost, sign)
    assert moved is not None
    missed = _counted(widen_exactly(beyond), accumulator, moved) if given > 1 else None
    kernel = Map(
        Function("map", (*(packed, before, beyond)[: 1 + given], sign), ()), _STORE[: 1 + given], (), (Word(0, 0, 1),)
    )
    return _with_results(kernel, stored, chain.result, None, lost, moved, missed)


def _suits(rounding: Rounding | None, drawn: bool) -> bool:
    """Whether what a rounding loses is all drawn, or all known."""
    if rounding is None:
        return True
    if drawn:
        return rounding.mode.graded and rounding.mode.random_bits == 32 and not rounding.format.posit
    return rounding.mode.deterministic


def _with_results(kernel: Map, stored: Expr, result: Storage, value: Expr | None, *others: Expr | None) -> Perturbed:
    """Return the kernel with the stored value and the other results, lost, moved and missed, where they exist."""
    existing = [one for one in others if one is not None]
    at = [None if one is None else 1 + existing.index(one) for one in others]
    body = replace(kernel.body, results=(stored, *map(narrow, existing)))
    values = tuple(existing) if value is None else (value, *existing)
    made = replace(kernel, body=body, results=(result, *(_NARROW for _ in existing)), values=values)
    return Perturbed(made, *at)


def passes_exactly(statement: Statement, moving: int) -> bool:
    """Whether a perturbation passes a statement exactly. moving: how many of its operands are perturbed."""
    names = [o for o in statement.operands if isinstance(o, str)]
    alone = len(set(names)) == len(names) and moving <= 1
    return statement.operator in _LINEAR or (statement.operator in _BILINEAR and alone)


def _derivative(statement: Statement, operands: Sequence[Expr], by: Sequence[Expr | None], value: Expr) -> Expr | None:
    """Return the derivative in the direction of the perturbation; None if no operand is perturbed.

    An infinite partial derivative passes nothing: without a perturbation nothing changes, else all is missed.
    """
    total: Expr | None = None
    for partial, one in zip(partials(statement.operator, operands, value), by, strict=True):
        if one is not None:
            part = _finite(partial * one)
            total = part if total is None else total + part
    return total


def _moved(first: Expr | None, lost: Expr | None, sign: Expr | None) -> Expr | None:
    """Return the perturbation of a value with its own error, whose sign is the highest bit of a word."""
    if lost is None:
        return first
    error = lost if sign is None else select((sign >> 31).equals(0), lost, negate(lost))
    return error if first is None else first + error


def _missed(
    statement: Statement, operands: Sequence[Expr], by: Sequence[Expr | None], value: Expr, first: Expr, moved: Expr
) -> Expr:
    pairs = list(zip(operands, by, strict=True))
    plus = exact(statement.operator, [x if one is None else x + one for x, one in pairs])
    minus = exact(statement.operator, [x if one is None else x - one for x, one in pairs])
    up, down = plus - value - first, minus - value + first
    larger = select(absolute(up) < absolute(down), down, up)
    return _counted(larger, value, moved)


def _counted(missed: Expr, value: Expr, moved: Expr) -> Expr:
    """Return what the derivatives miss of a finite value where it is more than a thousandth of the perturbation."""
    known = select(absolute(value) < math.inf, select(is_nan(missed), _INFINITE, missed), _ZERO)
    return select(absolute(known) <= absolute(moved) * 1e-3, _ZERO, known)


def _finite(x: Expr) -> Expr:
    return select(absolute(x) < math.inf, x, _ZERO)


def _positive(x: Expr) -> Expr:
    """Return a finite positive number, and zero for any other."""
    return select((x > _ZERO) & (x < math.inf), x, _ZERO)
