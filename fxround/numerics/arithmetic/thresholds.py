"""The comparison of random bits with a lost fraction, for the modes that draw with a probability.

With n random bits r, a step is drawn if r + I(lost 2^n) >= 2^n, where I is the mode's cut. Here both sides are scaled
to the 32 bits of a random word.
"""

from __future__ import annotations

from fxround.numerics.arithmetic.scalar import Expr, const, select
from fxround.numerics.modes import Mode


def drawn_word(random: Expr, mode: Mode) -> Expr:
    """Return the word w for which a step is drawn if floor(lost 2^32) + w >= 2^32. It has the random bits r on top.

    For I = floor, r + I(lost 2^n) >= 2^n is floor(lost 2^32) + r 2^(32-n) >= 2^32. If I rounds half up, I(lost 2^n) =
    floor(lost 2^n + 1/2), and w is (r + 1/2) 2^(32-n). If I rounds half to even, w is less by one where lost 2^n is an
    even integer and a half, and there alone: the callers subtract it.
    """
    unused = 32 - mode.random_bits
    word = (random >> unused) << unused if unused else random
    return word if mode.cut == "down" else word | 1 << (unused - 1)


def is_drawn(fraction: Expr, whole: Expr, mode: Mode, random: Expr) -> Expr:
    """Whether a step is drawn. fraction: floor(lost 2^32), a u32. whole: whether lost 2^32 is an integer."""
    word = drawn_word(random, mode)
    if mode.cut == "half_even":
        unused = 32 - mode.random_bits
        tie = (fraction & ((2 << unused) - 1)).equals(1 << (unused - 1))
        word = word - select(tie & whole, const("u32", 1), 0)
    return fraction > ~word
