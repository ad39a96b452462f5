"""Rounding to a posit, in the scalar IR, by the encoding of the carrier.

After its regime, a posit has the low bits of the exponent and then the fraction, as a carrier's encoding does if its
bias is a multiple of 2^exponent_bits. Rounding therefore drops low bits of the encoding, and how many depends on the
regime: on the exponent's high bits. Where bits of the exponent are dropped too, the middle of two posits is still the
one with the highest dropped bit: the posit between them with one bit more, as the standard asks for.

``exact.round_to_posit`` is the specification, which decodes codes and knows nothing of encodings of the carrier.
"""

from __future__ import annotations

from fxround.numerics.arithmetic.scalar import WIDTH, Expr, bits, const, from_bits, maximum, minimum, select
from fxround.numerics.arithmetic.tables import lost_fraction
from fxround.numerics.arithmetic.thresholds import is_drawn
from fxround.numerics.formats.carriers import CARRIERS, Carrier, ordinal_of
from fxround.numerics.modes import Lost, Rounding


def round_to_posit(x: Expr, posit: tuple[int, int], rounding: Rounding, random: Expr | None) -> Expr:
    """Return R(x) in x's carrier. posit: its bits and exponent bits. random: 32 random bits, if the mode draws."""
    carrier, mode = CARRIERS[x.type], rounding.mode
    code, trailing = carrier.code, carrier.trailing
    ordinal = ordinal_of(bits(x), carrier)
    sign = bits(x) ^ ordinal
    least, most = carrier.ordinal(2.0**rounding.format.emin), carrier.ordinal(rounding.format.maximum)
    one_more = 1 << trailing
    encoding = maximum(minimum(ordinal, most), least) + one_more

    def places(encoding: Expr) -> tuple[Expr, Expr, Expr]:
        return _places(encoding, posit, carrier)

    is_positive, kept_bits, dropped = places(encoding)
    unit = const(code, 1) << dropped
    low = encoding & (unit - 1)
    below = encoding - low
    above = below + unit
    # A code without bits after its regime ends with the regime's last bit: 0 if k is not negative, else 1.
    odd = select(kept_bits.equals(0), ~is_positive, ((encoding >> dropped) & 1).equals(1))
    inexact = low > 0
    negative = ~sign.equals(0)
    never = const("bool", 0)
    drawn, coin = never, never
    if random is not None and not mode.deterministic:
        magnitude, kept, other = (from_bits(e - one_more) for e in (encoding, below, above))
        fraction, whole = lost_fraction(magnitude, kept, other)
        drawn, coin = inexact & is_drawn(fraction, whole, mode, random), (random >> 31).equals(1)
    seen = Lost(
        negative=negative,
        positive=~negative,
        odd=odd,
        even=~odd,
        inexact=inexact,
        half=(low << 1).equals(unit),
        above=(low << 1) > unit,
        drawn=drawn,
        coin=coin,
        never=never,
    )
    rounded = select(mode.away(seen), above, below)
    if mode.jitter:
        assert random is not None
        up = rounded + (const(code, 1) << places(rounded)[2])
        # What is just below a posit drops the bits that the posit below it drops.
        down = (rounded - 1) >> (cut := places(rounded - 1)[2]) << cut
        down = select(rounded.equals(least + one_more), one_more, down)
        rounded = select((random >> 31).equals(1) & (rounded < most + one_more), up, down)
        # The smallest posit steps to zero, which has no sign.
        sign = select(rounded.equals(one_more), 0, sign)
    rounded = rounded - one_more
    finite = select(ordinal.equals(0), 0, rounded | sign)
    return from_bits(select(const(code, carrier.infinity) <= ordinal, carrier.nan, finite))


def _zero_of(exponent_bits: int, carrier: Carrier) -> int:
    """Return the regime 0 of an encoding with a bias of one more, 2^7 or 2^10: a multiple of 2^exponent_bits."""
    return (carrier.bias + 1) >> exponent_bits


def _places(encoding: Expr, posit: tuple[int, int], carrier: Carrier) -> tuple[Expr, Expr, Expr]:
    """Return whether the regime is not negative, how many bits follow it, and how many are dropped.

    encoding: the carrier's, with a bias of one more.
    """
    size, exponent_bits = posit
    zero, low = _zero_of(exponent_bits, carrier), carrier.trailing + exponent_bits
    regime = encoding >> low
    # The regime k takes k + 2 bits if it is not negative, else 1 - k; the sign takes one.
    positive = regime >= zero
    kept = select(positive, (size - 3 + zero) - minimum(regime, size - 3 + zero), regime - (zero - (size - 2)))
    return positive, kept, const(carrier.code, low) - kept


def code_of_posit(x: Expr, posit: tuple[int, int]) -> Expr:
    """Return the code of a posit, which is no NaR, in two's complement, as an integer of the carrier's width."""
    carrier, (size, exponent_bits) = CARRIERS[x.type], posit
    code, top = carrier.code, 1 << (size - 1)
    ordinal, last = ordinal_of(bits(x), carrier), (size - 2) << exponent_bits
    # Zero and NaR have no regime: their results are not used.
    inside = maximum(minimum(ordinal, carrier.ordinal(2.0**last)), carrier.ordinal(2.0**-last))
    encoding = inside + (1 << carrier.trailing)
    positive, kept, dropped = _places(encoding, posit, carrier)
    # The regime: ones and a zero, or zeros and a one. That of the largest posit has no room for the zero.
    head = select(positive, const(code, top) - (const(code, 2) << kept), const(code, 1) << kept)
    word = head | ((encoding >> dropped) & ((const(code, 1) << kept) - 1))
    word = select(ordinal.equals(0), 0, select(inside.equals(carrier.ordinal(2.0**last)), top - 1, word))
    return select(ordinal.equals(bits(x)), word, (const(code, 2 * top) - word) & (2 * top - 1))


def posit_of_code(code: Expr, posit: tuple[int, int], carrier: Carrier) -> Expr:
    """Return the posit of a code of ``code_of_posit``, as a value of the carrier; NaN for NaR."""
    size, exponent_bits = posit
    top, rest = 1 << (size - 1), size - 1
    negative = code >= top
    magnitude = select(negative, const(code.type, 2 * top) - code, code) & (top - 1)
    ones = magnitude >= top >> 1
    # The regime is as long as the zeros at the head of the code, or of its complement.
    length, left = const(code.type, 0), select(ones, magnitude ^ (top - 1), magnitude)
    for step in (16, 8, 4, 2, 1):
        large = left >= 1 << step
        length, left = select(large, length + step, length), select(large, left >> step, left)
    length = length + left
    after = length - minimum(length, 1)
    zero, low = _zero_of(exponent_bits, carrier), carrier.trailing + exponent_bits
    regime = select(ones, (zero - 1 + rest) - length, length + (zero - rest))
    tail = magnitude & ((const(code.type, 1) << after) - 1)
    encoding = (regime << low) | (tail << (const(code.type, low) - after))
    ordinal = encoding - (1 << carrier.trailing)
    sign = select(negative, 1 << (WIDTH[code.type] - 1), const(code.type, 0))
    word = select(code.equals(0), 0, ordinal | sign)
    return from_bits(select(code.equals(top), carrier.nan, word))
