"""The effect of a rounding on the gradient that passes from its result to its operand.

A rounding is constant almost everywhere, so its derivative is useless for training. By default the gradient passes
unchanged; a policy can ask for one or both of two changes:

    straight_through       the gradient unchanged
    zero_clamped           0 where the rounding clamped: the value overflowed, and became the maximum
    R                      the gradient rounded by R
    zero_clamped R         both, in this order

For ``zero_clamped``, a saturating rounding is split into one of unbounded range (``unclamped``) and a clamp. Together
they give the same bits, and the value between them shows what the clamp changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from fxround.errors import shown
from fxround.numerics.formats import Format, spelt
from fxround.numerics.formats.scaled import ScaledRounding, any_rounding
from fxround.numerics.modes import Rounding

STRAIGHT: Final = "straight_through"
ZEROED: Final = "zero_clamped"


@dataclass(frozen=True)
class Gradient:
    """The treatment of a gradient that passes a rounding.

    ``zero_clamped``: the gradient is 0 where the rounding clamped. ``rounding``: the rounding of the gradient, or None.
    """

    zero_clamped: bool = False
    rounding: Rounding | ScaledRounding | None = None

    def __str__(self) -> str:
        said = [ZEROED] * self.zero_clamped + [str(self.rounding)] * (self.rounding is not None)
        return " ".join(said) or STRAIGHT

    @staticmethod
    def parse(text: Any) -> Gradient:
        """Parse ``straight_through``, ``zero_clamped``, a rounding, or the last two.

        Raises ValueError, which names the part that is wrong.
        """
        if isinstance(text, Gradient):
            return text
        text = str(text) if isinstance(text, Rounding | ScaledRounding) else spelt(text)
        words = text.split() if isinstance(text, str) else []
        if words == [STRAIGHT]:
            return Gradient()
        zeroed, rest = words[:1] == [ZEROED], words[words[:1] == [ZEROED] :]
        if not words or len(rest) > 1:
            raise ValueError(
                f"{shown(text)} is not a gradient setting; expected {STRAIGHT}, {ZEROED}, a rounding, or the last two"
            )
        near = get_close_matches(rest[0][:40], (STRAIGHT, ZEROED), n=1) if rest else []
        if near:
            raise ValueError(f"no gradient is named {shown(rest[0])}; did you mean {near[0]!r}?")
        rounding = any_rounding(rest[0]) if rest else None
        if isinstance(rounding, ScaledRounding) and rounding.of_products:
            raise ValueError(f"{rounding}: a transform and a delayed scale belong to operands of products")
        return Gradient(zeroed, rounding)


def clamps(rounding: Rounding) -> bool:
    """Whether the rounding clamps what overflows, and does nothing else to it.

    A mode that jitters also moves the maximum; a format without a sign also clamps negative values, at its other end.
    Tables and posits have no values to round to beyond their ends.
    """
    row = rounding.format
    return rounding.overflow == "saturate" and row.signed and row.is_grid and not rounding.mode.jitter


def clamps_elements(rounding: ScaledRounding) -> bool:
    """Whether a scaled rounding clamps elements, and does nothing else to them. Tables have no values beyond."""
    return rounding.overflow == "saturate" and rounding.format.element.is_grid and not rounding.mode.jitter


def unclamped(rounding: Rounding) -> Rounding:
    """Return the same rounding with binary32's range at least, beyond which values become infinite."""
    row = rounding.format
    top = max(row.emax, 127)
    wide = Format.custom(
        precision=row.precision,
        emin=row.emin,
        maximum=(2 - 2.0 ** (1 - row.precision)) * 2.0**top,
        signed=row.signed,
        zero=row.zero,
        subnormals=row.subnormals,
        minus_zero=row.minus_zero,
    )
    return replace(rounding, format=wide, overflow="inf")
