"""The rounding algorithm, written once in the scalar IR.

The encoding of a float without its sign is its ordinal; consecutive floats have consecutive ordinals, across binades
too. Dropping the low d bits of an ordinal therefore truncates to a coarser grid, and adding 2^d gives the next value of
that grid, also where it carries into the exponent. d is constant where the format's precision limits, and grows below
the format's emin; below the quantum, zero and the quantum are the only neighbours.

The algorithm uses integer operators only, so contraction, flush-to-zero and fast-math cannot change it. The mode's rule
decides the step, as in the specification (``exact``); the tests compare the two on every 16-bit pattern and on the
boundaries of every format.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxround.numerics.arithmetic.forms.addition import is_one_addition, round_by_addition
from fxround.numerics.arithmetic.posits import round_to_posit
from fxround.numerics.arithmetic.scalar import (
    FLOAT_OF,
    WIDTH,
    Expr,
    Function,
    bits,
    const,
    from_bits,
    maximum,
    minimum,
    narrow,
    param,
    rarely,
    select,
    widen,
)
from fxround.numerics.arithmetic.tables import round_to_table
from fxround.numerics.arithmetic.thresholds import is_drawn
from fxround.numerics.formats import Format
from fxround.numerics.formats.carriers import CARRIERS, Carrier
from fxround.numerics.modes import Lost, Rounding


@dataclass(frozen=True)
class Grid:
    """The position of a magnitude on the format's grid: its neighbours as ordinals, and what truncation loses.

    ``shift`` is the number of low bits of ``significand`` that lie under the quantum, but at most two more than the
    carrier's trailing bits; ``far_shift`` is the same without this limit.
    """

    below: Expr
    above: Expr
    significand: Expr
    shift: Expr
    far_shift: Expr

    @property
    def low(self) -> Expr:
        """The part of the significand under the quantum."""
        return self.significand & ((const(self.shift.type, 1) << self.shift) - 1)


@dataclass(frozen=True)
class Rest:
    """What an exact value has below the last bit of a carrier's value next to it towards zero: f ulps, 0 <= f < 1.

    ``inexact``: f > 0. ``above``: the nearest value of the carrier, ties to even, is the one further from zero.
    ``fraction``: floor(f 2^32), a u32, for the modes that draw with a probability. ``whole``: f 2^32 is an integer.
    """

    inexact: Expr
    above: Expr
    fraction: Expr
    whole: Expr


def locate(ordinal: Expr, fmt: Format, carrier: Carrier) -> Grid:
    """Return the neighbours of a magnitude among the multiples of the format's quantum."""
    code, trailing = carrier.code, carrier.trailing
    one = const(code, 1)
    drop = const(code, carrier.format.precision - fmt.precision)
    first = fmt.emin + carrier.bias
    uniform = first == 1 and fmt.subnormals
    if uniform and fmt.precision > 1:
        below = (ordinal >> drop) << drop
        return Grid(below, below + (one << drop), ordinal, drop, drop)
    field = ordinal >> trailing
    fraction = ordinal & ((1 << trailing) - 1)
    significand = select(field.equals(0), fraction, fraction | (1 << trailing))
    # Below 2^emin the quantum stays that of 2^emin (or 2^emin itself, without subnormals).
    base = carrier.format.precision - fmt.precision if fmt.subnormals else trailing
    far = select(field < max(first, 1), const(code, base + first) - maximum(field, const(code, 1)), drop)
    # At trailing + 2 every significand is below half a quantum, so larger shifts give the same answers.
    shift = minimum(far, trailing + 2)
    tiny = const(code, trailing) < far
    below = select(tiny, 0, (ordinal >> shift) << shift)
    quantum = carrier.ordinal(2.0**fmt.quantum_exponent)
    return Grid(below, select(tiny, quantum, below + (one << shift)), significand, shift, far)


def lost_fraction(grid: Grid) -> Expr:
    """Return the lost fraction of a quantum, truncated to 32 bits, as a u32."""
    low, shift = grid.low, grid.far_shift
    code = low.type
    left = minimum(const(code, 32) - minimum(shift, 32), WIDTH[code] - 1)
    right = _bits_beyond(grid)
    fraction = select(shift <= 32, low << left, low >> right)
    return narrow(fraction) if code == "u64" else fraction


def _bits_beyond(grid: Grid) -> Expr:
    """Return how many low bits of the significand the lost fraction of 32 bits does not hold."""
    return minimum(maximum(grid.far_shift, 32) - 32, WIDTH[grid.low.type] - 1)


def _is_odd_code(kept: Expr, fmt: Format, carrier: Carrier) -> Expr:
    """Whether the code of a value of a one-bit significand is odd: zero's is 0, and 2^emin's is 1."""
    field = kept >> carrier.trailing
    first = fmt.emin + carrier.bias
    return ((field - first) & 1).equals(0) & ~kept.equals(0)


def observe(
    grid: Grid, negative: Expr, rounding: Rounding, random: Expr | None, rest: Rest | None = None
) -> Lost[Expr]:
    """Return what a mode's rule may look at, as IR values. rest: what the value has below the carrier's last bit.

    Where the carrier's last bit is the format's, a tie of f = 1/2 counts as decided to even.
    """
    never = const("bool", 0)
    one = const(grid.shift.type, 1)
    low = grid.low
    odd = ((grid.significand >> grid.shift) & 1).equals(1)
    if rounding.format.even_codes:
        odd = _is_odd_code(grid.below, rounding.format, CARRIERS[FLOAT_OF[low.type]])
    inexact = low > 0
    half, above = (low << 1).equals(one << grid.shift), (low << 1) > (one << grid.shift)
    if rest is not None:
        inexact = inexact | rest.inexact
        above = select(grid.shift.equals(0), rest.above, above | (half & rest.inexact))
        half = half & ~rest.inexact
    drawn, coin = never, never
    if random is not None:
        whole = (low & ((one << _bits_beyond(grid)) - 1)).equals(0)
        fraction = lost_fraction(grid)
        if rest is not None:
            fraction, whole = _with_rest(fraction, whole, grid, rest)
        drawn = is_drawn(fraction, whole, rounding.mode, random)
        coin = (random >> 31).equals(1)
    return Lost(
        negative=negative,
        positive=~negative,
        odd=odd,
        even=~odd,
        inexact=inexact,
        half=half,
        above=above,
        drawn=drawn,
        coin=coin,
        never=never,
    )


def _with_rest(fraction: Expr, whole: Expr, grid: Grid, rest: Rest) -> tuple[Expr, Expr]:
    """Return the lost fraction to 32 bits with the rest's bits below those of the carrier, and whether it is whole."""
    near = grid.far_shift < 32
    shift = minimum(grid.far_shift, 31)
    if shift.type == "u64":
        shift = narrow(shift)
    kept = rest.fraction >> shift
    fraction = select(near, fraction | kept, fraction)
    nothing = select(near, rest.whole & (kept << shift).equals(rest.fraction), ~rest.inexact)
    return fraction, whole & nothing


def jitter(ordinal: Expr, fmt: Format, carrier: Carrier, coin: Expr) -> Expr:
    """Move one ulp up or down from a value of the format. Zero stays; the maximum moves down only.

    The grid just below v is that of v's predecessor in the carrier, hence the truncation of ordinal - 1.
    """
    top = carrier.ordinal(fmt.maximum)
    up = coin & (ordinal < top)
    grid = locate(select(up, ordinal, ordinal - 1), fmt, carrier)
    return select(ordinal.equals(0), 0, select(up, grid.above, grid.below))


def round_expr(x: Expr, rounding: Rounding, random: Expr | None = None, any_nan: bool = False) -> Expr:
    """Return R(x) in x's carrier.

    x: an f32 or f64 value. random: 32 random bits (u32), required by the modes that draw. any_nan: the caller promises
    that a NaN's low bits are zero, and accepts a NaN of any sign and payload. Raises ValueError for a format that the
    carrier does not hold, or if ``random`` is missing.
    """
    carrier, fmt, mode = CARRIERS[x.type], rounding.format, rounding.mode
    carrier.require(fmt)
    if mode.random_bits and random is None:
        raise ValueError(f"{rounding} draws random bits; none were given")
    if mode.noise is not None:
        raise ValueError(f"{rounding} adds noise to the exact value of an operation: round the operator identity")
    if fmt.values:
        return round_to_table(x, rounding, random)
    if fmt.posit:
        return round_to_posit(x, fmt.posit, rounding, random)
    if fmt.span is not None:
        if rounding.overflow == "wrap":
            raise ValueError(f"{rounding}: only the sums of an accumulator wrap; use saturate")
        return kept_inside(_round_general(x, rounding, random), fmt)
    if is_one_addition(rounding, carrier):
        return round_by_addition(x, rounding, carrier, random, any_nan)
    if has_wide_range(fmt, carrier):
        return rarely(
            near_the_ends(x, rounding, carrier),
            _round_general(x, rounding, random),
            round_inside(x, rounding, random),
        )
    return _round_general(x, rounding, random)


def kept_inside(x: Expr, fmt: Format) -> Expr:
    """Return a multiple of fixed point's quantum within the least and the largest value; a NaN stays."""
    assert fmt.span is not None
    low, high = (const(x.type, bound) for bound in fmt.span)
    return select(x < low, low, select(high < x, high, x))


def has_wide_range(fmt: Format, carrier: Carrier) -> bool:
    """Whether values near the ends of the format's exponents are rare: it has binary32's range or more, in binary64."""
    narrower = fmt.emin > carrier.format.emin and fmt.emax < carrier.format.emax
    return narrower and fmt.emin <= -126 and fmt.emax >= 127 and fmt.has_minus_zero and fmt.precision > 1


def near_the_ends(x: Expr, rounding: Rounding, carrier: Carrier) -> Expr:
    """Return bool: x is nonzero and outside [2^emin, 2^emax), in which no rounding can leave the normal numbers.

    The interval is one binade smaller at either end for a mode that jitters: 2^emin steps down into the subnormals.
    """
    fmt, margin = rounding.format, int(rounding.mode.jitter)
    ordinal = bits(x) & ((1 << (WIDTH[carrier.code] - 1)) - 1)
    first, last = carrier.ordinal(2.0 ** (fmt.emin + margin)), carrier.ordinal(2.0 ** (fmt.emax - margin))
    return (const(carrier.code, last - first) <= ordinal - first) & (ordinal > 0)


def round_inside(x: Expr, rounding: Rounding, random: Expr | None) -> Expr:
    """Return R(x) away from the ends of the range.

    There the format has the same values as its precision with the carrier's exponents. A NaN is near the ends, so the
    result for it is not used.
    """
    carrier = CARRIERS[x.type]
    inside = Rounding(rounding.format.with_range_of(carrier.format), rounding.mode, "inf")
    return round_expr(x, inside, random, any_nan=True)


def round_with_rest(x: Expr, rest: Rest, rounding: Rounding, random: Expr | None = None) -> Expr:
    """Return R of the exact value with the part x towards zero in the carrier and the given rest.

    The format is one of multiples of a quantum, with any number of bits that the carrier has.
    """
    CARRIERS[x.type].require(rounding.format)
    return _round_general(x, rounding, random, rest)


def _round_general(x: Expr, rounding: Rounding, random: Expr | None, rest: Rest | None = None) -> Expr:
    carrier, fmt, mode = CARRIERS[x.type], rounding.format, rounding.mode
    encoding = bits(x)
    ordinal = encoding & ((1 << (WIDTH[carrier.code] - 1)) - 1)
    sign = encoding ^ ordinal
    negative = ~sign.equals(0)
    grid = locate(ordinal, fmt, carrier)
    step = mode.away(observe(grid, negative, rounding, random, rest))
    rounded = select(step, grid.above, grid.below)
    finite = _bound(rounded, negative, rounding, carrier, random)
    # Zero with a rest is no zero.
    value = ordinal if rest is None else select(rest.inexact & ordinal.equals(0), 1, ordinal)
    signed = _apply_sign(finite, value, sign, negative, rounding, carrier)
    return from_bits(_special(signed, ordinal, sign, negative, rounding, carrier))


def _bound(rounded: Expr, negative: Expr, rounding: Rounding, carrier: Carrier, random: Expr | None) -> Expr:
    """Apply jitter and overflow to a magnitude rounded as if exponents were unbounded."""
    mode, top = rounding.mode, carrier.ordinal(rounding.format.maximum)
    kept = minimum(rounded, top)
    if mode.jitter and random is not None:
        kept = jitter(kept, rounding.format, carrier, (random >> 31).equals(1))
    if rounding.overflow == "saturate":
        return kept
    beyond = carrier.infinity if rounding.overflow == "inf" else carrier.nan
    leaves = select(negative, *(const("bool", mode.overflows(s)) for s in (True, False)))
    return select((rounded > top) & leaves, beyond, kept)


def _apply_sign(finite: Expr, ordinal: Expr, sign: Expr, negative: Expr, rounding: Rounding, carrier: Carrier) -> Expr:
    fmt = rounding.format
    least = carrier.ordinal(2.0**fmt.emin)
    if not fmt.zero:
        nothing = const(carrier.code, carrier.nan if rounding.overflow == "nan" else least)
        finite = select(finite < least, select(ordinal.equals(0), nothing, least), finite)
    if fmt.has_minus_zero or (fmt.signed and not fmt.zero):
        return finite | sign
    if fmt.signed:
        return select(finite.equals(0), 0, finite | sign)
    floor = (0 if fmt.zero else least) if rounding.overflow == "saturate" else carrier.nan
    below = negative & ~ordinal.equals(0)
    return select(below, floor, finite)


def _special(result: Expr, ordinal: Expr, sign: Expr, negative: Expr, rounding: Rounding, carrier: Carrier) -> Expr:
    """Apply the rules for NaN and infinity: every NaN is the one NaN, and an infinity overflows."""
    top = const(carrier.code, carrier.ordinal(rounding.format.maximum))
    if rounding.overflow == "nan":
        infinite: Expr = const(carrier.code, carrier.nan)
    else:
        infinite = const(carrier.code, carrier.infinity) if rounding.overflow == "inf" else top
    if rounding.format.signed:
        infinite = infinite | sign
    elif rounding.overflow == "saturate":
        infinite = select(negative, 0 if rounding.format.zero else carrier.ordinal(2.0**rounding.format.emin), infinite)
    else:
        infinite = select(negative, carrier.nan, infinite)
    if rounding.overflow == "nan":
        # _apply_sign gave a sign to a NaN made by overflow: return the one NaN.
        magnitude = result & ((1 << (WIDTH[carrier.code] - 1)) - 1)
        result = select(magnitude.equals(carrier.nan), carrier.nan, result)
        infinite = const(carrier.code, carrier.nan)
    special = select(const(carrier.code, carrier.infinity) < ordinal, carrier.nan, infinite)
    return select(const(carrier.code, carrier.infinity) <= ordinal, special, result)


def rounding_function(rounding: Rounding, carrier: str) -> Function:
    """Return the rounding as a function of the IR: (x, random) in the carrier named f32 or f64."""
    x, random = param("x", CARRIERS[carrier].type), param("random", "u32")
    return Function("round", (x, random), (round_expr(x, rounding, random),))


def widen_exactly(x: Expr) -> Expr:
    """Return an f32 value as f64, an f64 value unchanged."""
    return widen(x) if x.type == "f32" else x
