"""Values and derivatives of scalar operators in binary64, without a rounding of a policy.

The derivatives at kinks are those of PyTorch: that of relu at zero is 0, that of an absolute value too. A comparison
has none with respect to what it compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.arithmetic.scalar import Expr, const, constant_array, negate, select
from fxround.numerics.elementary import ELEMENTARY

_ZERO: Final = const("f64", 0.0)
_ONE: Final = const("f64", 1.0)
# Exponents of which a power is a product of so many factors.
_FACTORS: Final = frozenset((1.0, 2.0, 3.0, 4.0))

# From the value and the operands to the derivative with respect to each operand.
Partials = Callable[..., Sequence[Expr]]


def _where(compared: Callable[[Expr, Expr], Expr]) -> Partials:
    def partials(value: Expr, a: Expr, b: Expr, x: Expr, y: Expr) -> Sequence[Expr]:
        holds = compared(a, b)
        return _ZERO, _ZERO, select(holds, _ONE, 0.0), select(holds, _ZERO, 1.0)

    return partials


def _elementary(name: str, *operands: Expr) -> Expr:
    return ELEMENTARY[name].build(*operands)


def _pow(value: Expr, x: Expr, y: Expr) -> Sequence[Expr]:
    of_exponent = select(value.equals(0.0), _ZERO, value * _elementary("log", x))
    count = _count(y)
    if count is not None:
        return _power(x, count - 1) * float(count), of_exponent
    at_zero = select(y.equals(1.0), _ONE, select(y > 1.0, _ZERO, math.inf))
    return select(x.equals(0.0), select(y.equals(0.0), _ZERO, at_zero), y * (value / x)), of_exponent


def _count(exponent: Expr) -> int | None:
    """Return an exponent that is a small number of factors; None for any other."""
    if exponent.op != "const":
        return None
    number = float(constant_array(exponent))
    return int(number) if number in _FACTORS else None


def _power(x: Expr, count: int) -> Expr:
    """Return a product of equal factors, whose roundings in binary64 add up to fewer than ``count`` ulps."""
    product = _ONE
    for _ in range(count):
        product = x if product is _ONE else product * x
    return product


_PARTIALS: Final[Mapping[str, Partials]] = MappingProxyType(
    {
        "identity": lambda v, x: (_ONE,),
        "neg": lambda v, x: (const("f64", -1.0),),
        "abs": lambda v, x: (select(x.equals(0.0), 0.0, select(x < 0.0, const("f64", -1.0), 1.0)),),
        "relu": lambda v, x: (select(x <= 0.0, _ZERO, 1.0),),
        "where_lt": _where(lambda a, b: a < b),
        "where_le": _where(lambda a, b: a <= b),
        "where_eq": _where(lambda a, b: a.equals(b)),
        "add": lambda v, a, b: (_ONE, _ONE),
        "sub": lambda v, a, b: (_ONE, const("f64", -1.0)),
        "mul": lambda v, a, b: (b, a),
        "div": lambda v, a, b: (_ONE / b, negate(v / b)),
        "reciprocal": lambda v, x: (negate(v * v),),
        "sqrt": lambda v, x: (0.5 / v,),
        "rsqrt": lambda v, x: (-0.5 * (v / x),),
        "fma": lambda v, a, b, c: (b, a, _ONE),
        "exp": lambda v, x: (v,),
        "log": lambda v, x: (_ONE / x,),
        "tanh": lambda v, x: (_ONE - v * v,),
        "sigmoid": lambda v, x: (v * (_ONE - v),),
        "erf": lambda v, x: (_elementary("exp", negate(x * x)) * (2 / math.sqrt(math.pi)),),
        "sin": lambda v, x: (_elementary("cos", x),),
        "cos": lambda v, x: (negate(_elementary("sin", x)),),
        "pow": _pow,
    }
)


def is_derived(operator: str) -> bool:
    """Whether ``partials`` knows an operator."""
    return operator in _PARTIALS


def exact(operator: str, operands: Sequence[Expr]) -> Expr:
    """Return the value of an operator of ``operators.OPERATORS`` for f64 operands, as good as binary64 has it."""
    if operator == "pow" and (count := _count(operands[1])) is not None:
        return _power(operands[0], count)
    row = OPERATORS[operator]
    return row.native(*operands) if row.native else row.wide(*operands).value


def partials(operator: str, operands: Sequence[Expr], value: Expr) -> Sequence[Expr]:
    """Return the derivatives of an operator for which ``is_derived`` holds; ``value``: its exact value."""
    return _PARTIALS[operator](value, *operands)
