"""Rounding to nearest twice: an operation in its carrier, and then to a format with the carrier's exponents.

The midpoints of the format's values are values of the carrier, because the format has at least one bit less and the
same exponents, subnormal numbers included. Rounding is monotone, so that the carrier's nearest value is on the same
side of every midpoint as the exact value, or is the midpoint itself. The second rounding can therefore go wrong only
where the carrier's value is a midpoint and the exact value is not (double rounding; Figueroa, SIGNUM Newsletter 30(3),
1995). ``is_doubtful`` finds these cases, and perhaps others that the general algorithm then decides as well.

- A sum s of a and b is exact if and only if s - a = b and s - b = a: the subtraction of the larger operand is exact
  (Dekker, Numerische Mathematik 18, 1971).
- What a product, a quotient or a root has lost is one fused multiply-add, of which the equality with zero is right
  unless it underflows. It is a multiple of 2^-2p of the product, the dividend or the radicand, for the carrier's
  precision p, and does not underflow if that is 2^(emin + 2 p) or more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.forms.addition import is_one_addition
from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, fma, negate, sqrt
from fxround.numerics.formats.carriers import CARRIERS, Carrier
from fxround.numerics.modes import Rounding

# up_down steps from the nearest value.
_MODES: Final = frozenset(("nearest_even", "nearest_away", "nearest_zero", "nearest_odd", "up_down"))

NEAREST: Final[MappingProxyType[str, Callable[..., Expr]]] = MappingProxyType(
    {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "sqrt": sqrt,
    }
)
"""The operators that ``is_doubtful`` knows, as the carrier's own operations."""


def rounds_twice(operator: str, rounding: Rounding, carrier: Carrier) -> bool:
    """Whether the operator in the carrier, rounded again, is right unless it ``is_doubtful``."""
    narrower = rounding.format.precision < carrier.format.precision
    known = operator in NEAREST and rounding.mode.name in _MODES
    return known and narrower and is_one_addition(rounding, carrier)


def is_doubtful(operator: str, operands: tuple[Expr, ...], nearest: Expr, rounding: Rounding) -> Expr:
    """Return bool: the carrier's nearest value is a midpoint, and not known to be the exact value.

    operands: of the type of ``nearest``.
    """
    unit = 1 << (CARRIERS[nearest.type].format.precision - rounding.format.precision)
    midpoint = (bits(nearest) & (unit - 1)).equals(unit >> 1)
    return midpoint & ~_is_exact(operator, operands, nearest)


def _is_exact(operator: str, operands: tuple[Expr, ...], nearest: Expr) -> Expr:
    if operator in ("add", "sub"):
        a, b = operands[0], operands[1] if operator == "add" else negate(operands[1])
        return (nearest - a).equals(b) & (nearest - b).equals(a)
    if operator == "mul":
        return _is_zero(fma(operands[0], operands[1], negate(nearest)), nearest)
    divisor = nearest if operator == "sqrt" else operands[1]
    return _is_zero(fma(negate(nearest), divisor, operands[0]), operands[0])


def _is_zero(residual: Expr, size: Expr) -> Expr:
    """Whether a residual is zero, and did not underflow to it."""
    fmt = CARRIERS[size.type].format
    return residual.equals(0.0) & (const(size.type, 2.0 ** (fmt.emin + 2 * fmt.precision)) <= absolute(size))
