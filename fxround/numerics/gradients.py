"""What a rounding does to the gradient that passes it, from its result to its operand.

What is true here. A rounding has no derivative worth following, so the gradient passes straight through, unless one
asks for one or both of these:

    straight_through       the gradient as it is
    zero_clamped           0 where the rounding clamped: the value overflowed, and became the maximum
    R                      the gradient rounded by R
    zero_clamped R         both, in this order

Why it is safe. A saturating rounding is one of unbounded range, ``unclamped``, and then a clamp: the two together have
its bits, and what the clamp moved is seen in between.

    before   "saturating cast"                        # and where it saturates, what does the weight learn?
    after    Gradient.parse("zero_clamped e5m2/stochastic")
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from fxround.errors import shown
from fxround.numerics.formats import Format, spelt
from fxround.numerics.modes import Rounding

STRAIGHT: Final = "straight_through"
ZEROED: Final = "zero_clamped"


@dataclass(frozen=True)
class Gradient:
    """``zero_clamped``: whether it is 0 where the rounding clamped; ``rounding``: of what is left, None: none."""

    zero_clamped: bool = False
    rounding: Rounding | None = None

    def __str__(self) -> str:
        said = [ZEROED] * self.zero_clamped + [str(self.rounding)] * (self.rounding is not None)
        return " ".join(said) or STRAIGHT

    @staticmethod
    def parse(text: Any) -> Gradient:
        """``straight_through``, or ``zero_clamped``, a rounding, or both; raises ValueError naming the wrong part."""
        if isinstance(text, Gradient):
            return text
        text = str(text) if isinstance(text, Rounding) else spelt(text)
        words = text.split() if isinstance(text, str) else []
        if words == [STRAIGHT]:
            return Gradient()
        zeroed, rest = words[:1] == [ZEROED], words[words[:1] == [ZEROED] :]
        if not words or len(rest) > 1:
            raise ValueError(
                f"{shown(text)} is no gradient; expected {STRAIGHT}, {ZEROED}, a rounding, or the last two"
            )
        near = get_close_matches(rest[0][:40], (STRAIGHT, ZEROED), n=1) if rest else []
        if near:
            raise ValueError(f"no gradient is named {shown(rest[0])}; did you mean {near[0]!r}?")
        return Gradient(zeroed, Rounding.parse(rest[0]) if rest else None)


def clamps(rounding: Rounding) -> bool:
    """Whether the rounding clamps what overflows, and nothing else.

    One that jitters moves the maximum too; a format without a sign clamps what is negative, at its other end.
    """
    return rounding.overflow == "saturate" and rounding.format.signed and not rounding.mode.jitter


def unclamped(rounding: Rounding) -> Rounding:
    """The same rounding where nothing overflows below binary32's range; what does is infinite."""
    row = rounding.format
    top = max(row.emax, 127)
    wide = Format.custom(
        precision=row.precision,
        emin=row.emin,
        maximum=(2 - 2.0 ** (1 - row.precision)) * 2.0**top,
        signed=row.signed,
        zero=row.zero,
        subnormals=row.subnormals,
    )
    return replace(rounding, format=wide, overflow="inf")
