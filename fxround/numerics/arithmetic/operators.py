"""Pointwise operators: the exact value, rounded once.

``apply`` returns R(f(x, ...)) for + - * / sqrt, fma and others, with one rounding of the exact value. If R is the
carrier's own nearest_even, this is the hardware's operation. Otherwise the value is computed in binary64 together with
the sign of what binary64 lost (``residuals``), rounded to odd there, and then rounded by R. With at least two bits more
than R's format, the rounding to odd makes the second rounding innocuous (Boldo and Melquiond, IEEE TC 57(4), 2008), in
every deterministic mode and in stochastic_equal and up_down, whose coin chooses between values that the rounding to odd
determines. The modes that draw with a probability (``graded``) start from the nearest binary64 value: their lost
fraction is good to 2^-29 of a binary32 quantum. Elementary functions are evaluated in binary64 to within the bound that
their file states, and rounded once.

The sign of what binary64 lost is right for all operands for which ``require`` accepts the format, also where binary64
itself under- or overflows. An exact sum of zero of operands that are not both +0 is -0 towards negative infinity;
otherwise its sign follows from the operands (IEEE 754-2019, 6.3). The steps of a chain, which are in ``STEPS`` and not
in ``OPERATORS``, give +0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from fxround.errors import shown
from fxround.numerics.arithmetic.flipping import flipped
from fxround.numerics.arithmetic.forms.beyond import can_round, is_beyond, round_beyond
from fxround.numerics.arithmetic.forms.dithered import dithered, is_dithered
from fxround.numerics.arithmetic.forms.noise import with_noise
from fxround.numerics.arithmetic.forms.ties import is_doubtful, rounds_twice
from fxround.numerics.arithmetic.residuals import (
    Wide,
    are_binary32,
    exact_difference,
    exact_fused,
    exact_product,
    exact_quotient,
    exact_reciprocal,
    exact_root,
    exact_sum,
    fused_below,
    fused_beyond,
    fused_inside,
    product_below,
    quotient_below,
    to_odd,
    two_sum,
)
from fxround.numerics.arithmetic.rounding import has_wide_range, near_the_ends, round_expr, round_inside, widen_exactly
from fxround.numerics.arithmetic.scalar import (
    Expr,
    Type,
    absolute,
    bits,
    const,
    constant_array,
    fma,
    from_bits,
    narrow,
    negate,
    rarely,
    select,
    sqrt,
)
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.elementary.approximation import Loss
from fxround.numerics.elementary.quick import Quick
from fxround.numerics.elementary.single import Single
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.carriers import CARRIERS, one_nan
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.modes import MODES, Rounding

_BINARY32: Final = FORMATS["binary32"]
_BINARY64: Final = FORMATS["binary64"]
# The least exponent of a format for which residuals do not underflow.
_LEAST: Final = -900
_WIDE_24: Final = _BINARY32.with_range_of(_BINARY64)
HARDWARE: Final = "binary32/nearest_even/inf"
"""The rounding of the conversion from binary64 to binary32."""


@dataclass(frozen=True)
class Operator:
    """One row of the operator table.

    ``wide`` forms the exact value in binary64; ``native`` is the hardware's nearest-even operation, if there is one.
    ``selects``: the result is always a value of the operands' own format, and nothing is rounded. For elementary
    functions: ``sticky`` evaluates to within a stated bound, rounded to odd; ``lost`` is the nearest value and what it
    lost; ``nearest`` is that nearest value; ``quick`` and ``single`` are short evaluations for binary32. ``below`` is
    ``wide`` for formats with an emin below -900, where the residual of ``wide`` can underflow. ``beyond`` has the sign
    of its error for all operands; None if ``below`` or ``wide`` does. ``sign``: the sign, in the highest bit, of an
    exact sum of zero that is rounded towards negative infinity.
    """

    name: str
    arity: int
    wide: Callable[..., Wide]
    native: Callable[..., Expr] | None = None
    selects: bool = False
    sticky: Callable[..., Expr] | None = None
    lost: Callable[..., Loss] | None = None
    nearest: Callable[..., Expr] | None = None
    quick: Callable[..., Quick] | None = None
    single: Callable[..., Single] | None = None
    below: Callable[..., Wide] | None = None
    beyond: Callable[..., Wide] | None = None
    sign: Callable[..., Expr] | None = None


def _clamped(x: Expr, low: Expr, high: Expr) -> Wide:
    """Keep x within [low, high]; ``high`` wins over ``low``.

    A zero keeps its sign next to a bound of zero, and a NaN stays.
    """
    risen = select(x < low, low, x)
    return Wide(select(high < risen, high, risen))


def _chosen(compared: Callable[[Expr, Expr], Expr]) -> Callable[..., Wide]:
    """Return the operator (a, b, x, y) to x where ``compared(a, b)``, else y. No comparison with a NaN holds."""

    def choose(*operands: Expr) -> Wide:
        wide = any(o.type == "f64" for o in operands)
        a, b, x, y = map(widen_exactly, operands) if wide else operands
        return Wide(select(compared(a, b), x, y))

    return choose


def _elementary(name: str) -> Operator:
    row = ELEMENTARY[name]
    return Operator(
        name,
        row.arity,
        lambda *args: Wide(row.build(*args)),
        sticky=row.build_sticky,
        lost=row.build_lost,
        nearest=row.build_nearest,
        quick=row.quick,
        single=row.single,
    )


_ARITHMETIC: Final[tuple[Operator, ...]] = (
    Operator("identity", 1, Wide, selects=True),
    Operator("neg", 1, lambda x: Wide(negate(x)), selects=True),
    Operator("abs", 1, lambda x: Wide(absolute(x)), selects=True),
    Operator("relu", 1, lambda x: Wide(select(x < 0.0, 0.0, x)), selects=True),
    Operator("clamp", 3, _clamped, selects=True),
    Operator("where_lt", 4, _chosen(lambda a, b: a < b), selects=True),
    Operator("where_le", 4, _chosen(lambda a, b: (a < b) | a.equals(b)), selects=True),
    Operator("where_eq", 4, _chosen(lambda a, b: a.equals(b)), selects=True),
    Operator("add", 2, exact_sum, lambda a, b: a + b, sign=lambda a, b: bits(a) | bits(b)),
    Operator(
        "sub",
        2,
        exact_difference,
        lambda a, b: a - b,
        sign=lambda a, b: bits(a) | bits(negate(b)),
    ),
    Operator("mul", 2, exact_product, lambda a, b: a * b, below=product_below),
    Operator("div", 2, exact_quotient, lambda a, b: a / b, below=quotient_below),
    Operator("reciprocal", 1, exact_reciprocal, lambda x: const(x.type, 1.0) / x),
    Operator("sqrt", 1, exact_root, sqrt),
    Operator(
        "fma",
        3,
        exact_fused,
        fma,
        below=fused_below,
        beyond=fused_beyond,
        sign=lambda a, b, c: (bits(a) ^ bits(b)) | bits(c),
    ),
)

# Every pointwise operator by name. A row of _ARITHMETIC overrides an elementary function of the same name.
OPERATORS: Final = MappingProxyType({n: _elementary(n) for n in ELEMENTARY} | {row.name: row for row in _ARITHMETIC})

# The operators of a chain's steps: an exact zero is +0, like the zero that a chain begins with. Those named ``_inside``
# have operands of which no product underflows and no sum overflows: binary32 factors held in binary64.
STEPS: Final = MappingProxyType(
    {
        "add_step": replace(OPERATORS["add"], name="add_step", sign=None),
        "fma_step": replace(OPERATORS["fma"], name="fma_step", sign=None),
        "add_inside": Operator("add_inside", 2, two_sum, lambda a, b: a + b),
        "mul_inside": Operator("mul_inside", 2, lambda a, b: Wide(a * b), lambda a, b: a * b),
        "fma_inside": Operator("fma_inside", 3, fused_inside, fma),
    }
)


def require(operator: Operator, carriers: tuple[Type, ...], rounding: Rounding) -> None:
    """Raise ValueError where the operator's exact value is not available for this rounding: see the module's text."""
    if (operator.selects and rounding.mode.noise is None) or _is_native(operator, carriers, rounding):
        return
    if not is_beyond(rounding) or can_round(rounding):
        return
    narrow_operands = all(c == "f32" for c in carriers)
    operands = "float32" if narrow_operands else "float64"
    raise ValueError(
        f"{operator.name} on {operands} operands cannot be rounded to {shown(str(rounding))}: it needs two bits more "
        "than binary64 has; use a precision up to 52, a float32 result, or binary64 in a mode without a rule of its "
        "own for ties: nearest_even, the directed ones and those that draw"
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
    """Return R(f(args)) as a value of the carrier ``out``.

    name: of OPERATORS, of STEPS, or a fault (``numerics.faults``) of a value of the rounding's format, which is not
    rounded again. args: f32 or f64 values. rounding: None only for a selecting operator whose operands fit ``out``.
    random: 32 random bits (u32), required where the mode draws. any_nan: the result may be a NaN of any sign and
    payload, for a step of a chain whose last step gives the one NaN. Raises ValueError for an unknown operator, a wrong
    number of operands, or a rounding that ``require`` refuses.
    """
    fault = numbers_of(name)
    if fault is not None and rounding is not None and random is not None and len(args) in (1, 3):
        bounds = [float(constant_array(bound)) for bound in args[1:]]
        encoding = Encoding(rounding.format, (bounds[0], bounds[1]) if bounds else None)
        return flipped(_convert(args[0], out), encoding, fault, random)
    operator = OPERATORS.get(name) or STEPS.get(name)
    if operator is None:
        raise ValueError(f"no pointwise operator is named {shown(name)}; known: {', '.join(OPERATORS)}")
    if len(args) != operator.arity:
        raise ValueError(f"{name} takes {operator.arity} operands, got {len(args)}")
    carriers = tuple(a.type for a in args)
    if rounding is None:
        return _selected(operator, args, out)
    CARRIERS[out].require(rounding.format)
    require(operator, carriers, rounding)
    if _is_native(operator, carriers, rounding) and operator.native is not None:
        result = operator.native(*(args if rounding.format == _BINARY32 else map(widen_exactly, args)))
        return _convert(result if any_nan else one_nan(result), out)
    if name == "identity" and str(rounding) == HARDWARE and carriers == ("f64",) and out == "f32":
        # The hardware's conversion is this rounding.
        return narrow(args[0]) if any_nan else one_nan(narrow(args[0]))
    if operator.selects and rounding.mode.noise is None:
        return _convert(round_expr(operator.wide(*args).value, rounding, random), out)
    operands = tuple(map(widen_exactly, args))
    if rounding.mode.noise is not None and random is not None:
        noisy = with_noise(_lossless(operator, operands, rounding), rounding, random)
        return _convert(round_beyond(noisy, replace(rounding, mode=MODES["nearest_even"]), None), out)
    if rounding.format == _BINARY64 and (rounding.mode.jitter or rounding.mode.name == "nearest_even"):
        # For nearest_even and up_down (nearest_even, then a step), rounding the nearest value again changes nothing.
        nearest = _nearest_binary64(operator, operands, rounding)
        return _convert(round_expr(_finite(operator, nearest, operands, rounding), rounding, random), out)
    if is_beyond(rounding):
        return _convert(_beyond(operator, operands, rounding, random), out)
    value = _convert(round_expr(_before_rounding(operator, operands, rounding), rounding, random, any_nan), out)
    if {*carriers, out} != {"f32"} or operator.quick is None:
        return value
    if str(rounding) == HARDWARE:
        return _short(operator, args, value, rounding)
    single = operator.single(*args) if operator.single is not None and rounding.format == _BINARY32 else None
    return _bracketed(operator.quick(*operands), single, value, rounding, random)


def _nearest_binary64(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding) -> Expr:
    """Return the nearest binary64 value; for up_down of an elementary function, by its longest evaluation."""
    if operator.native:
        return operator.native(*operands)
    if operator.nearest and rounding.mode.jitter:
        return operator.nearest(*operands)
    return operator.wide(*operands).value


def _short(operator: Operator, args: tuple[Expr, ...], value: Expr, rounding: Rounding) -> Expr:
    """Return ``value`` by shorter evaluations where these suffice: binary32 to nearest even, of binary32 operands."""
    if operator.quick is None:
        return value
    quick = operator.quick(*map(widen_exactly, args))
    if operator.single is None:
        return _unless(quick.doubtful(), quick, rounding, value, narrow(quick.value))
    single = operator.single(*args)
    value = rarely(quick.doubtful(), value, narrow(quick.value))
    return _unless(single.doubtful(), quick, rounding, value, single.value)


def _unless(doubtful: Expr, quick: Quick, rounding: Rounding, value: Expr, short: Expr) -> Expr:
    """Return ``short``, an f32, but ``value`` where ``doubtful``, and zero where the exact value vanishes.

    The second test is within the branch of the first, so that other lanes do not pay for it. A softmax of masked scores
    has many lanes of this kind.
    """
    fmt = rounding.format
    if quick.vanishes is not None and rounding.mode.vanishes and fmt.quantum_exponent >= _BINARY32.quantum_exponent:
        value = rarely(doubtful & ~quick.vanishes, value, const("f32", 0.0))
    return rarely(doubtful, value, short)


def _bracketed(quick: Quick, single: Single | None, value: Expr, rounding: Rounding, random: Expr | None) -> Expr:
    """Return ``value`` by the short evaluations where both ends of the interval that one is good to round alike.

    Every mode is monotone for given random bits, so what lies between the ends rounds as they do (Ziv 1991).
    """
    if not has_wide_range(rounding.format, CARRIERS["f64"]):
        return value
    low, high = (round_inside(end, rounding, random) for end in quick.ends(rounding.mode.graded))
    doubtful = ~bits(low).equals(bits(high)) | ~quick.trusted | near_the_ends(quick.value, rounding, CARRIERS["f64"])
    first = None if single is None else single.rounded(rounding.mode, random)
    if first is None:
        return _unless(doubtful, quick, rounding, value, narrow(low))
    return _unless(first.doubtful, quick, rounding, rarely(doubtful, value, narrow(low)), first.value)


def _beyond(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding, random: Expr | None) -> Expr:
    """Round the nearest binary64 value with what it lost."""
    wide = _lossless(operator, operands, rounding)
    if random is not None and is_dithered(operator.name, rounding):
        return dithered(operator.name, operands, rounding, random, round_beyond(wide, rounding, random))
    if operator.sign is None or rounding.mode.name != "toward_negative":
        return round_beyond(wide, rounding, random)
    # Only an exact sum is zero.
    zero = from_bits(operator.sign(*operands) & (1 << 63))
    exact = wide.value.equals(0.0) & (wide.error.equals(0.0) if wide.error is not None else const("bool", 1))
    return round_beyond(replace(wide, value=select(exact, zero, wide.value)), rounding, random)


def _lossless(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding) -> Wide:
    """Return the nearest binary64 value with what it lost."""
    if operator.lost:
        graded = rounding.mode.graded or rounding.mode.noise is not None
        near, sign, size, _ = operator.lost(graded, *operands)
        return Wide(one_nan(near), sign, size)
    low = rounding.format.emin < _LEAST
    return (operator.beyond or (operator.below if low else None) or operator.wide)(*operands)


def _before_rounding(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding) -> Expr:
    """Return the binary64 value that R starts from.

    This is the nearest one for the graded modes, else the one rounded to odd. R distinguishes the two only where the
    nearest value lies on a boundary of R, a value or a midpoint of its format: that is, where all bits below half a
    quantum are zero. Elsewhere the nearest value is cheaper.
    """
    if rounding.format.posit and rounding.mode.graded:
        # A finite nonzero value becomes no NaR and no zero, also where the nearest binary64 value is infinite or zero.
        nearest = operator.native(*operands) if operator.native else operator.wide(*operands).value
        to_an_end = nearest.equals(0.0) | absolute(nearest).equals(math.inf)
        return rarely(to_an_end, _before_rounding(operator, operands, _truncated(rounding)), nearest)
    if operator.sticky:
        return operator.wide(*operands).value if rounding.mode.graded else operator.sticky(*operands)
    form = operator.below if operator.below is not None and rounding.format.emin < _LEAST else operator.wide
    wide = form(*operands)
    nearest = operator.native(*operands) if operator.native else wide.value
    if rounding.mode.graded or (wide.error is None and wide.odd is None) or _keeps_sides(operator, operands, rounding):
        return nearest
    if rounds_twice(operator.name, rounding, CARRIERS["f64"]):
        return rarely(is_doubtful(operator.name, operands, nearest, rounding), to_odd(wide), nearest)
    under_half = (1 << (_BINARY64.precision - rounding.format.boundary_precision)) - 1
    odd = to_odd(wide)
    if rounding.mode.random_bits and not rounding.mode.jitter and rounding.format.emax == _BINARY64.emax:
        # Beyond binary64's range the coin decides nothing.
        odd = select(absolute(nearest).equals(math.inf), nearest, odd)
    value = rarely((bits(nearest) & under_half).equals(0), odd, nearest)
    if operator.sign is None or rounding.mode.name != "toward_negative":
        return value
    return select(value.equals(0.0), from_bits(operator.sign(*operands) & (1 << 63)), value)


def _keeps_sides(operator: Operator, operands: tuple[Expr, ...], rounding: Rounding) -> bool:
    """Whether rounding to binary64 first changes nothing for up_down, whose step follows a rounding to nearest.

    This holds for + - * / sqrt of numbers of 24 bits that are rounded to 24 bits, because 53 >= 2 * 24 + 2 (Figueroa
    1995). The accumulator of a sum, to which ``add_inside`` adds an element that is widened, has as many bits as R.
    """
    of_24_bits = are_binary32(*operands) or (operator.name == "add_inside" and any(map(are_binary32, operands)))
    to_24_bits = rounding.mode.jitter and rounding.format in (_BINARY32, _WIDE_24)
    return to_24_bits and of_24_bits and not operator.name.startswith("fma")


def _truncated(rounding: Rounding) -> Rounding:
    return replace(rounding, mode=MODES["toward_zero"])


def _finite(operator: Operator, nearest: Expr, operands: tuple[Expr, ...], rounding: Rounding) -> Expr:
    """Return ``nearest``, made finite for up_down with saturation where a finite exact value overflowed.

    The largest binary64 number then saturates and steps down from the format's maximum, whereas an infinity is the
    maximum itself.
    """
    known = operator.sticky is not None or not rounding.mode.jitter or are_binary32(*operands)
    if known or rounding.overflow != "saturate":
        return nearest
    wide = operator.wide(*operands)
    return select(absolute(nearest).equals(math.inf), to_odd(wide), nearest)


def _selected(operator: Operator, args: tuple[Expr, ...], out: Type) -> Expr:
    if not operator.selects:
        raise ValueError(f"{operator.name} computes a new value: it needs a rounding")
    if any(a.type == "f64" for a in args) and out == "f32":
        raise ValueError(f"{operator.name}: float64 operands do not fit a float32 result without a rounding")
    return _convert(operator.wide(*args).value, out)


def _convert(value: Expr, out: Type) -> Expr:
    """Convert between carriers. The conversion is exact: the value was rounded to a format within ``out``."""
    if value.type == out:
        return value
    return narrow(value) if out == "f32" else widen_exactly(value)
