"""Pointwise operators: the exact value, rounded once.

What is true here. ``apply`` returns R(f(x, ...)) for + - * / sqrt fma and friends with one rounding of
the exact value. Where R is the carrier's own nearest_even that is the hardware's operation. Elsewhere
the value is computed in binary64 together with the sign of what binary64 lost, rounded to odd there,
and then by R: with at least two bits more than R's format, to-odd makes the second rounding innocuous
in every deterministic mode (Boldo and Melquiond, IEEE TC 57(4), 2008). The modes that draw start from the
nearest binary64 value: their lost fraction is good to 2^-29 of a binary32 quantum.

Elementary functions (exp, tanh, ...) are evaluated in binary64 to within the bound that their own file
states, and rounded once.

Why it is safe. Error-free transformations: TwoSum (Knuth 1969) and the fused multiply-add residuals of
product, quotient and root are exact while nothing under- or overflows in binary64; for binary32
operands nothing can, and for binary64 operands ``require`` refuses the formats that could tell.

    before   (a.double() + b.double()).float()      # rounded twice, and only to nearest
    after    apply("add", (a, b), Rounding.parse("binary32/toward_positive"), "f32")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.errors import shown
from fxround.numerics.beyond import MODES_BEYOND, round_beyond
from fxround.numerics.carriers import CARRIERS, one_nan
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.elementary.quick import Quick
from fxround.numerics.elementary.single import Single
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding
from fxround.numerics.rounding import round_expr, widen_exactly
from fxround.numerics.scalar import (
    Expr,
    Type,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    narrow,
    negate,
    rarely,
    select,
    sqrt,
)

_BINARY32: Final = FORMATS["binary32"]
_BINARY64: Final = FORMATS["binary64"]
_HARDWARE: Final = "binary32/nearest_even/inf"
"""The rounding of the conversion from binary64 to binary32."""


@dataclass(frozen=True)
class Wide:
    """A binary64 value and the sign of what it lost: exact value = value + (something of error's sign).

    ``error`` None: nothing was lost, or (elementary functions) what was lost is bounded elsewhere.
    ``size``: what was lost, to a few ulps; None where ``error`` is that itself.
    """

    value: Expr
    error: Expr | None = None
    size: Expr | None = None


@dataclass(frozen=True)
class Operator:
    """A row: arity, how the exact value is formed in binary64, the hardware's nearest-even operation if
    there is one, whether the result is always a value of the operands' own format (``exact``), and, for the
    elementary functions, the evaluation to within a stated bound, rounded to odd (``sticky``) or by a rule
    that is shown what binary64 loses (``rounded_by``), and the short evaluations for binary32 (``quick``, ``single``).
    ``residual``: ``error`` is a fused residual of the first two operands, which can underflow."""

    name: str
    arity: int
    wide: Callable[..., Wide]
    native: Callable[..., Expr] | None = None
    exact: bool = False
    sticky: Callable[..., Expr] | None = None
    rounded_by: Callable[..., Expr] | None = None
    quick: Callable[..., Quick] | None = None
    single: Callable[..., Single] | None = None
    residual: bool = False


def two_sum(a: Expr, b: Expr) -> Wide:
    """a + b = value + error, exactly (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    return Wide(total, (a - (total - part)) + (b - part))


def _is_binary32(*args: Expr) -> bool:
    """Whether every operand is known to be a binary32 value, widened."""
    return all(a.op == "widen" for a in args)


def _clamped(x: Expr, low: Expr, high: Expr) -> Wide:
    """x within [low, high]: a zero keeps its sign beside a bound of zero, a NaN itself; ``high`` wins over ``low``."""
    risen = select(x < low, low, x)
    return Wide(select(high < risen, high, risen))


def _chosen(compared: Callable[[Expr, Expr], Expr]) -> Callable[..., Wide]:
    """(a, b, x, y) to x where ``compared(a, b)``, else y: no comparison holds of a NaN."""

    def choose(*operands: Expr) -> Wide:
        wide = any(o.type == "f64" for o in operands)
        a, b, x, y = map(widen_exactly, operands) if wide else operands
        return Wide(select(compared(a, b), x, y))

    return choose


def _product(a: Expr, b: Expr) -> Wide:
    value = a * b
    # 24 + 24 bits fit 53, and exponents of binary32 products stay far inside binary64.
    return Wide(value) if _is_binary32(a, b) else Wide(value, fma(a, b, negate(value)))


def _quotient(a: Expr, b: Expr) -> Wide:
    value = a / b
    remainder = fma(negate(value), b, a)
    return Wide(value, from_bits(bits(remainder) ^ (bits(b) & (1 << 63))), remainder / b)


def _root(x: Expr) -> Wide:
    value = sqrt(x)
    remainder = fma(negate(value), value, x)
    return Wide(value, remainder, remainder / (value + value))


def _fused(a: Expr, b: Expr, c: Expr) -> Wide:
    product = _product(a, b)
    if product.error is None:
        return two_sum(product.value, c)
    # The two small parts, rounded to odd, keep the sign of all that is below the large one; the large one and
    # the nearest value differ by a few ulps, exactly.
    value, total = fma(a, b, c), two_sum(product.value, c)
    assert total.error is not None
    return Wide(value, (total.value - value) + to_odd(two_sum(total.error, product.error)))


def to_odd(wide: Wide) -> Expr:
    """The exact value rounded to odd in binary64: inexact results end in a one."""
    if wide.error is None:
        return wide.value
    code = bits(wide.value)
    lost = (wide.error < 0.0) | (wide.error > 0.0)
    outward = (bits(wide.error) ^ code) < (1 << 63)
    moved = select(outward, code + 1, code - 1)
    return from_bits(select(lost & (code & 1).equals(0), moved, code))


def _elementary(name: str) -> Operator:
    row = ELEMENTARY[name]
    return Operator(
        name,
        row.arity,
        lambda *args: Wide(row.build(*args)),
        sticky=row.build_sticky,
        rounded_by=row.build_rounded_by,
        quick=row.quick,
        single=row.single,
    )


_ARITHMETIC: Final[tuple[Operator, ...]] = (
    Operator("identity", 1, Wide, exact=True),
    Operator("neg", 1, lambda x: Wide(negate(x)), exact=True),
    Operator("abs", 1, lambda x: Wide(absolute(x)), exact=True),
    Operator("relu", 1, lambda x: Wide(select(x < 0.0, 0.0, x)), exact=True),
    Operator("clamp", 3, _clamped, exact=True),
    Operator("where_lt", 4, _chosen(lambda a, b: a < b), exact=True),
    Operator("where_le", 4, _chosen(lambda a, b: (a < b) | a.equals(b)), exact=True),
    Operator("where_eq", 4, _chosen(lambda a, b: a.equals(b)), exact=True),
    Operator("add", 2, two_sum, lambda a, b: a + b),
    Operator("sub", 2, lambda a, b: two_sum(a, negate(b)), lambda a, b: a - b),
    Operator("mul", 2, _product, lambda a, b: a * b, residual=True),
    Operator("div", 2, _quotient, lambda a, b: a / b, residual=True),
    Operator(
        "reciprocal", 1, lambda x: _quotient(const("f64", 1.0), x), lambda x: const(x.type, 1.0) / x, residual=True
    ),
    Operator("sqrt", 1, _root, sqrt, residual=True),
    Operator("fma", 3, _fused, fma, residual=True),
)

# Every pointwise operator by name; one that is exact before rounding is never taken from the elementary table.
OPERATORS: Final = MappingProxyType({n: _elementary(n) for n in ELEMENTARY} | {row.name: row for row in _ARITHMETIC})

# What the steps of a contraction use on binary32 factors held in binary64, where a product is exact.
_STEPS: Final = MappingProxyType(
    {
        "mul_exact": Operator("mul_exact", 2, lambda a, b: Wide(a * b), lambda a, b: a * b),
        "fma_exact": Operator("fma_exact", 3, lambda a, b, c: two_sum(a * b, c), fma),
    }
)


def require(operator: Operator, carriers: tuple[Type, ...], rounding: Rounding) -> None:
    """Raise ValueError where the exact value cannot be had: see the module's text."""
    if operator.exact or all(c == "f32" for c in carriers) or _is_native(operator, carriers, rounding):
        return
    own = rounding.format == _BINARY64
    if own and (
        rounding.mode.name in ("up_down", *MODES_BEYOND) or (operator.sticky and rounding.mode.name == "nearest_even")
    ):
        return
    if rounding.format.precision > 51:
        raise ValueError(
            f"{operator.name} on float64 operands cannot be rounded to {rounding}: it needs two bits more than "
            f"binary64 has; use binary64 with nearest_even or a mode that draws, a precision up to 51, or float32"
        )
    if rounding.format.emin < -900 and operator.residual and rounding.mode.deterministic and "f64" in carriers[:2]:
        raise ValueError(
            f"{operator.name} on float64 operands cannot be rounded to {rounding}: its emin {rounding.format.emin} "
            f"is so near binary64's that the lost part underflows; use an emin of -900 or more"
        )


def _is_native(operator: Operator, carriers: tuple[Type, ...], rounding: Rounding) -> bool:
    if operator.native is None or rounding.mode.name != "nearest_even" or rounding.overflow != "inf":
        return False
    return rounding.format == _BINARY64 or (set(carriers) == {"f32"} and rounding.format == _BINARY32)


def apply(
    name: str,
    args: tuple[Expr, ...],
    rounding: Rounding | None,
    out: Type,
    random: Expr | None = None,
    any_nan: bool = False,
) -> Expr:
    """R(f(args)) as a value of the carrier ``out``.

    args: f32 or f64 values. rounding: None only for an exact operator whose operands fit ``out``.
    random: 32 random bits where the mode draws. any_nan: a NaN may come with any sign and payload, for
    a chain of steps whose last one gives the one NaN.
    """
    operator = OPERATORS.get(name) or _STEPS.get(name)
    if operator is None:
        raise ValueError(f"no pointwise operator is named {shown(name)}; known: {', '.join(OPERATORS)}")
    if len(args) != operator.arity:
        raise ValueError(f"{name} takes {operator.arity} operands, got {len(args)}")
    carriers = tuple(a.type for a in args)
    if rounding is None:
        return _exact(operator, args, out)
    CARRIERS[out].require(rounding.format)
    require(operator, carriers, rounding)
    if _is_native(operator, carriers, rounding) and operator.native is not None:
        result = operator.native(*(args if rounding.format == _BINARY32 else map(widen_exactly, args)))
        return _convert(result if any_nan else one_nan(result), out)
    if name == "identity" and str(rounding) == _HARDWARE and carriers == ("f64",) and out == "f32":
        # The conversion of the hardware is this rounding.
        return narrow(args[0]) if any_nan else one_nan(narrow(args[0]))
    if operator.exact:
        return _convert(round_expr(operator.wide(*args).value, rounding, random), out)
    if rounding.format == _BINARY64 and rounding.mode.name in MODES_BEYOND and random is not None:
        return _convert(_beyond(operator, tuple(map(widen_exactly, args)), rounding, random), out)
    if rounding.format == _BINARY64:
        # Nearest-even or up_down (nearest-even, then a step): rounding a binary64 value again is the identity.
        nearest = operator.native(*args) if operator.native else operator.wide(*map(widen_exactly, args)).value
        return _convert(round_expr(nearest, rounding, random), out)
    operands = tuple(map(widen_exactly, args))
    value = _convert(round_expr(_before_rounding(operator, operands, rounding), rounding, random, any_nan), out)
    if str(rounding) == _HARDWARE and {*carriers, out} == {"f32"}:
        return _short(operator, args, value)
    return value


def _short(operator: Operator, args: tuple[Expr, ...], value: Expr) -> Expr:
    """``value``, by shorter evaluations where these suffice: binary32 to nearest even, of binary32 operands."""
    if operator.quick:
        quick = operator.quick(*map(widen_exactly, args))
        value = rarely(quick.doubtful(), value, narrow(quick.value))
    if operator.single:
        single = operator.single(*args)
        value = rarely(single.doubtful(), value, single.value)
    return value


def _beyond(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding, random: Expr) -> Expr:
    """binary64 in a mode that draws: the nearest value, and what it lost."""
    if operator.rounded_by:
        return one_nan(operator.rounded_by(lambda t, e: round_beyond(t, e, rounding, random), *operands))
    wide = operator.wide(*operands)
    lost = wide.size or wide.error
    return one_nan(wide.value) if lost is None else round_beyond(wide.value, lost, rounding, random)


def _before_rounding(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding) -> Expr:
    """The binary64 value that R starts from: the nearest one for the modes that draw, else the one to odd.

    The two differ in what R makes of them only where the nearest value lies on a boundary of R: a value or a
    midpoint of its format, that is, where the bits under half a quantum are all zero.
    """
    if operator.sticky:
        return operator.sticky(*operands) if rounding.mode.deterministic else operator.wide(*operands).value
    wide = operator.wide(*operands)
    nearest = operator.native(*operands) if operator.native else wide.value
    if not rounding.mode.deterministic or wide.error is None:
        return nearest
    under_half = (1 << (_BINARY64.precision - 1 - rounding.format.precision)) - 1
    return rarely((bits(nearest) & under_half).equals(0), to_odd(wide), nearest)


def _exact(operator: Operator, args: tuple[Expr, ...], out: Type) -> Expr:
    if not operator.exact:
        raise ValueError(f"{operator.name} is not exact: it needs a rounding")
    if any(a.type == "f64" for a in args) and out == "f32":
        raise ValueError(f"{operator.name}: float64 operands do not fit a float32 result without a rounding")
    return _convert(operator.wide(*args).value, out)


def _convert(value: Expr, out: Type) -> Expr:
    """Between carriers; a value that was rounded to a format within ``out`` is exact there."""
    if value.type == out:
        return value
    return narrow(value) if out == "f32" else widen_exactly(value)
