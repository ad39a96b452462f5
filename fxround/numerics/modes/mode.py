"""``Mode``: a rule as data; ``Rounding``: format x mode x overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, Generic, Literal, TypeVar

from fxround.errors import shown
from fxround.numerics.formats import Format, Overflow, spelt
from fxround.short_reprs import Short

B = TypeVar("B")

# How lost * 2^n becomes an integer: down, to the nearest with ties up, or to the nearest with ties to even.
Cut = Literal["down", "half_up", "half_even"]


@dataclass(frozen=True)
class Lost(Generic[B]):
    """Everything that a rule may look at.

    ``odd`` and ``even``: the parity of the kept significand. ``half`` and ``above``: the lost part is half a quantum,
    or more. ``drawn``: the random number fell below the lost fraction of a quantum, as the mode cuts it. ``coin``: one
    fair random bit.
    """

    negative: B
    positive: B
    odd: B
    even: B
    inexact: B
    half: B
    above: B
    drawn: B
    coin: B
    never: B


@dataclass(frozen=True, repr=False)
class Mode(Short):
    """A rounding mode: a rule and the random bits that it draws.

    ``away``: the rule, *step away from zero?* ``random_bits``: how many it draws, n (0: deterministic). ``jitter``:
    whether the result is then moved by one ulp up or down. ``cut``: the random bits r draw a step if
    r + I(lost * 2^n) >= 2^n, and this names I, which makes an integer of lost * 2^n. ``noise``: the virtual precision t
    of the noise that is added before the rule, 0 for the format's own; None: no noise. ``sparing``: numbers of t bits
    get no noise.

    The noise of a number x with 2^E <= |x| < 2^(E+1) is 2^(E+1-t) xi, in the direction of x, where xi is
    (r + 1/2) / 2^32 - 1/2 for 32 random bits r, if |x| >= ``LEAST_NOISY``; other numbers, zero among them, get none.
    """

    name: str
    away: Callable[[Lost[Any]], Any]
    random_bits: int = 0
    jitter: bool = False
    cut: Cut = "down"
    noise: int | None = None
    sparing: bool = False

    def __str__(self) -> str:
        if self.noise is not None:
            return f"{self.name}:{self.noise}" if self.noise else self.name
        if self.name in GRID_MODES:
            return self.name
        return self.name if self.random_bits in (0, NAMED[self.name].random_bits) else f"{self.name}:{self.random_bits}"

    @property
    def deterministic(self) -> bool:
        """Whether the same value always gives the same result."""
        return self.random_bits == 0

    @property
    def moves(self) -> bool:
        """Whether a value that the format contains may move."""
        return self.jitter or self.noise is not None

    @property
    def graded(self) -> bool:
        """Whether the probability of a step depends on how much is lost, not only on which values are neighbours."""
        tiny = Lost(False, True, False, True, True, False, False, False, False, False)
        return bool(self.away(tiny)) != bool(self.away(replace(tiny, drawn=True)))

    @property
    def ties_to_even(self) -> bool:
        """Whether a tie may count as decided to even: as more than half if the kept significand is odd, else less.

        This holds for nearest_even, and for every rule to which half a quantum is nothing special.
        """
        tie = Lost(False, True, False, True, True, True, False, False, False, False)
        below, above = replace(tie, half=False), replace(tie, half=False, odd=True, even=False, above=True)
        odd = replace(tie, odd=True, even=False)
        return all(
            bool(self.away(replace(a, drawn=d, coin=c))) == bool(self.away(replace(b, drawn=d, coin=c)))
            for a, b in ((tie, below), (odd, above))
            for d in (False, True)
            for c in (False, True)
        )

    def overflows(self, negative: bool) -> bool:
        """Whether a finite value beyond the maximum leaves the range; otherwise it stays at the maximum.

        The answer is the rule's, for an odd maximum with more than half a quantum lost. This agrees with IEEE 754-2019,
        section 7.4, for its five modes; to_odd stays, the random modes leave.
        """
        past = Lost(negative, not negative, True, False, True, False, True, True, True, False)
        return bool(self.away(past))

    @property
    def vanishes(self) -> bool:
        """Whether a positive value below 2^-33 of a quantum becomes zero, for all random bits.

        No I makes more than zero of lost * 2^n for n up to 32, so that nothing is drawn.
        """
        tiny = Lost(False, True, False, True, True, False, False, False, True, False)
        return not self.away(tiny)

    @staticmethod
    def parse(text: str) -> Mode:
        """Parse a mode's name.

        ``stochastic:n`` draws n random bits, 1 to 32; ``stochastic_b:n`` and ``stochastic_c:n`` 1 to 31. ``mca:t`` and
        ``mca_rr:t`` have the virtual precision t, 1 to 53. Raises
        ValueError for anything else.
        """
        name, colon, count = text.strip().partition(":")
        if name in GRID_MODES:
            return _with_precision(GRID_MODES[name], count, text) if colon else GRID_MODES[name]
        if name not in NAMED:
            known = [*NAMED, *GRID_MODES]
            near = get_close_matches(name[:40], known, n=2, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ValueError(f"no rounding mode is named {shown(name)}{hint} Known: {', '.join(known)}")
        mode = NAMED[name]
        if not colon:
            return mode
        most = mode.random_bits
        if most < 2 or not count.isdecimal() or len(count) > 2 or not 1 <= int(count) <= most:
            counted = ", ".join(f"{m}:1 to {m}:{m.random_bits}" for m in NAMED.values() if m.random_bits > 1)
            raise ValueError(f"{shown(text)}: only stochastic modes take a number of random bits: {counted}")
        return replace(mode, random_bits=int(count))


# The named modes. ``rows`` fills it, and shows it as MODES.
NAMED: Final[dict[str, Mode]] = {}
# Those of floating-point formats alone.
GRID_MODES: Final[dict[str, Mode]] = {}
LEAST_NOISY: Final = 2.0**-900
"""The smallest magnitude that gets noise: binary64 holds the noise of all numbers from here on exactly."""


def _with_precision(mode: Mode, precision: str, text: str) -> Mode:
    if mode.noise is None:
        raise ValueError(f"{shown(text)}: {mode.name} takes no number")
    if not precision.isdecimal() or len(precision) > 2 or not 1 <= int(precision) <= 53:
        raise ValueError(f"{shown(text)}: expected a virtual precision of 1 to 53 bits, as in {mode.name}:24")
    return replace(mode, noise=int(precision))


@dataclass(frozen=True, repr=False)
class Rounding(Short):
    """A rounding: a format, a mode and an overflow behaviour, which are independent of each other.

    format    a ``Format``
    mode      one of ``fxround.modes``, for example ``fxround.modes["stochastic"]``
    overflow  "inf", "nan" or "saturate" (the largest finite value)

    Overflow applies to every value beyond the maximum, infinities included, unless the mode keeps a finite value at the
    maximum (as toward_zero does). ``Rounding.parse(str(r)) == r``. Raises ValueError if the format cannot express the
    overflow. Example::

        fxround.round(x, fxround.Rounding.parse("e4m3fn/stochastic/saturate"), seed=1)
    """

    format: Format
    mode: Mode
    overflow: Overflow

    def __post_init__(self) -> None:
        if self.overflow not in self.format.overflows:
            possible = ", ".join(self.format.overflows)
            raise ValueError(f"{self.format.said} cannot overflow to {shown(self.overflow)}; it can: {possible}")
        if self.mode.name not in GRID_MODES:
            return
        if not self.format.is_grid or self.format.span is not None:
            raise ValueError(f"{self.mode} is a mode of floating-point formats, which {self.format.said} is not")
        if (self.mode.noise or 0) > self.format.precision:
            raise ValueError(
                f"{self.mode}: the virtual precision is more than the {self.format.precision} bits of "
                f"{self.format.said}; expected 1 to {self.format.precision}"
            )

    @property
    def virtual_precision(self) -> int:
        """The bits that the noise of the mode leaves; the format's precision for a mode without a number."""
        return self.mode.noise or self.format.precision

    def __str__(self) -> str:
        return f"{self.format}/{self.mode}/{self.overflow}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rounding.parse, (str(self),))

    @staticmethod
    def parse(text: Any) -> Rounding:
        """Parse ``format[/mode[/overflow]]``. The mode defaults to nearest_even, the overflow to the format's own.

        text: a str; or a Rounding, or anything that ``Format.parse`` takes: a Format, or a dtype of PyTorch or NumPy.
        Raises ValueError, which names the part that is wrong, and TypeError for anything else.
        """
        text = spelt(text)
        if isinstance(text, Rounding):
            return text
        if not isinstance(text, str):
            raise TypeError(
                "a rounding is a text like 'e4m3fn/stochastic/saturate' or a floating-point dtype, got "
                f"{type(text).__name__}"
            )
        parts = [p.strip() for p in text.split("/")]
        if len(parts) > 3:
            raise ValueError(f"{shown(text)} has {len(parts)} parts; expected format[/mode[/overflow]]")
        fmt = Format.parse(parts[0])
        mode = Mode.parse(parts[1]) if len(parts) > 1 else NAMED["nearest_even"]
        overflow: Any = parts[2] if len(parts) > 2 else fmt.default_overflow
        return Rounding(fmt, mode, overflow)
