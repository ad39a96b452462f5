"""The effect of a rounding on the gradient that passes from its result to its operand.

A rounding is constant almost everywhere, so its derivative is useless for training. By default the gradient passes
unchanged; a policy can ask for another factor, for a rounding of the gradient, or for both in this order:

    straight_through       the gradient unchanged
    zero_clamped           0 where the rounding clamped: the value overflowed, and became the maximum
    estimate               times the derivative of a smooth curve that resembles the steps of the format
    R                      the gradient rounded by R
    zero_clamped R         zeros, then the rounding
    estimate R             the derivative, then the rounding

For ``zero_clamped``, a saturating rounding is split into one of unbounded range (``unclamped``) and a clamp. Together
they give the same bits, and the value between them shows what the clamp changed.

The curve of ``estimate`` is that of Wang et al., Optimizing large language model training using FP4 quantization, ICML
2025, section 3.1. Between two neighbours a < b of the format, with t = 2 (x - a) / (b - a) - 1, the value is
(a + b) / 2 + (b - a) / 2 sign(t) |t|^(1/k), with the derivative 1/k |t|^(1/k - 1): large halfway between a and b, where
the rounding jumps. k is 5, and the derivative is at most 3. A number of the format has 1/k, and so has one beyond its
ends that is rounded to the end to nearest, without a bound; one further away has 0.
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
ESTIMATED: Final = "estimate"
# k of the curve, and the largest derivative.
SHARPNESS: Final = 5.0
STEEPEST: Final = 3.0


@dataclass(frozen=True)
class Gradient:
    """The treatment of a gradient that passes a rounding.

    ``zero_clamped``: the gradient is 0 where the rounding clamped. ``estimated``: it is multiplied by the derivative of
    the curve. At most one of both is set. ``rounding``: the rounding of the gradient, or None.
    """

    zero_clamped: bool = False
    rounding: Rounding | ScaledRounding | None = None
    estimated: bool = False

    def __str__(self) -> str:
        said = [ZEROED] * self.zero_clamped + [ESTIMATED] * self.estimated
        said += [str(self.rounding)] * (self.rounding is not None)
        return " ".join(said) or STRAIGHT

    @staticmethod
    def parse(text: Any) -> Gradient:
        """Parse ``straight_through``, ``zero_clamped``, ``estimate``, a rounding, or one of both and a rounding.

        Raises ValueError, which names the part that is wrong.
        """
        if isinstance(text, Gradient):
            return text
        text = str(text) if isinstance(text, Rounding | ScaledRounding) else spelt(text)
        words = text.split() if isinstance(text, str) else []
        if words == [STRAIGHT]:
            return Gradient()
        factor = words[0] if words[:1] in ([ZEROED], [ESTIMATED]) else None
        rest = words[factor is not None :]
        if not words or len(rest) > 1:
            raise ValueError(
                f"{shown(text)} is not a gradient setting; expected {STRAIGHT}, {ZEROED}, {ESTIMATED}, a rounding, or "
                f"{ZEROED} or {ESTIMATED} and a rounding"
            )
        near = get_close_matches(rest[0][:40], (STRAIGHT, ZEROED, ESTIMATED), n=1) if rest else []
        if near:
            raise ValueError(f"no gradient is named {shown(rest[0])}; did you mean {near[0]!r}?")
        rounding = any_rounding(rest[0]) if rest else None
        if isinstance(rounding, ScaledRounding) and rounding.of_products:
            raise ValueError(f"{rounding}: a transform and a delayed scale belong to operands of products")
        return Gradient(factor == ZEROED, rounding, factor == ESTIMATED)

    def refusal(self, rounding: Rounding | ScaledRounding) -> str:
        """Return why the factor does not apply to a rounding; "" if it does.

        The factor of 0 for what is clamped needs a clamp, and the estimate neighbours of every value in range.
        """
        if isinstance(rounding, ScaledRounding):
            clamped, grid = clamps_elements(rounding), rounding.format.element
        else:
            clamped, grid = clamps(rounding), rounding.format
        if self.zero_clamped and not clamped:
            if isinstance(rounding, ScaledRounding):
                return f"{rounding} clamps nothing"
            mode = "nearest_even" if rounding.mode.moves else rounding.mode
            return f"{rounding} clamps nothing; write {rounding.format}/{mode}/saturate"
        if self.estimated and not (grid.is_grid and not rounding.mode.moves and rounding.overflow != "wrap"):
            return (
                f"{rounding} has no smooth curve: that needs a floating-point format, fixed point or integers, a mode "
                "without jitter, and an overflow other than wrap"
            )
        return ""


def clamps(rounding: Rounding) -> bool:
    """Whether the rounding clamps what overflows, and does nothing else to it.

    A mode that jitters also moves the maximum; a format without a sign also clamps negative values, at its other end.
    Tables and posits have no values to round to beyond their ends.
    """
    row = rounding.format
    return rounding.overflow == "saturate" and row.signed and row.is_grid and not rounding.mode.moves


def clamps_elements(rounding: ScaledRounding) -> bool:
    """Whether a scaled rounding clamps elements, and does nothing else to them. Tables have no values beyond."""
    return rounding.overflow == "saturate" and rounding.format.element.is_grid and not rounding.mode.moves


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
