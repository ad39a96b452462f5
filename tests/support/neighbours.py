"""Rounding by search: an oracle that searches the list of a format's values, and arguments to test.

``Neighbours`` shares with fxround only ``Format.magnitudes`` (which numbers exist). It knows no quantum and no rule of
``modes``: it finds the two listed values around x, measures the two distances, and each mode is a sentence of
its own below. It is vectorized, so whole 16-bit spaces cost milliseconds; formats up to 16 bits can be listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import MODES, Mode, Rounding

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Seen:
    """Arrays: the distances to the value below and to the value above, as magnitudes; the lower value's parity; the
    sign; the random words; the gap as a fraction of which ``down / gap`` is lost."""

    down: Array
    up: Array
    odd: Array
    negative: Array
    random: Array
    gap: Array


def _draw(seen: Seen, n: int, integer: Callable[[Array], Array] = np.floor) -> Array:
    """P(up) = integer(lost * 2^n) / 2^n. The gap is a power of two, so the quotient is exact."""
    lost = integer(seen.down / seen.gap * 2.0**n)
    return lost + (seen.random >> np.uint32(32 - n)) >= 2.0**n


# How lost 2^n becomes an integer; np.rint takes ties to even.
INTEGERS: dict[str, Callable[[Array], Array]] = {
    "stochastic": np.floor,
    "stochastic_b": lambda x: np.floor(x + 0.5),
    "stochastic_c": np.rint,
}


def _nearest(seen: Seen, tie: Array | bool) -> Array:
    return (seen.up < seen.down) | ((seen.up == seen.down) & tie)


GOES_UP: dict[str, Callable[[Seen], Array]] = {
    "nearest_even": lambda s: _nearest(s, s.odd),
    "nearest_away": lambda s: _nearest(s, True),
    "nearest_zero": lambda s: _nearest(s, False),
    "nearest_odd": lambda s: _nearest(s, ~s.odd),
    "toward_zero": lambda s: np.zeros_like(s.odd),
    "toward_positive": lambda s: ~s.negative,
    "toward_negative": lambda s: s.negative,
    "away_from_zero": lambda s: np.ones_like(s.odd),
    "to_odd": lambda s: ~s.odd,
    "stochastic": lambda s: _draw(s, 32),
    "stochastic_b": lambda s: _draw(s, 31, INTEGERS["stochastic_b"]),
    "stochastic_c": lambda s: _draw(s, 31, INTEGERS["stochastic_c"]),
    "stochastic_equal": lambda s: s.random >= 2**31,
    "up_down": lambda s: _nearest(s, s.odd),
}
# Where a finite value beyond the maximum does not leave the range.
STAYS: dict[str, Callable[[Array], Array]] = {
    "toward_zero": np.ones_like,
    "to_odd": np.ones_like,
    "toward_positive": lambda negative: negative,
    "toward_negative": lambda negative: ~negative,
}


class Neighbours:
    """The values of one format, listed; and as many above its maximum as rounding can tell apart."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        beyond = replace(fmt, maximum=2.0 ** (fmt.emax + 2))
        self.values = np.array(sorted({0.0, *beyond.magnitudes()}))
        self.finite = np.array(sorted({0.0, *fmt.magnitudes()}))
        # Codes alternate between even and odd; a one-bit significand is always odd, except zero's.
        full = {v: i for i, v in enumerate(replace(beyond, zero=True, subnormals=True).magnitudes())}
        parity = [(full[v] % 2 if fmt.precision > 1 else 1) if v else 0 for v in self.values]
        self.odd = np.array(parity, dtype=bool)

    def round(self, x: Array, mode: Mode, overflow: str, random: Array) -> Array:
        """R(x) in binary64 for an array of binary32 or binary64 values and their random words."""
        fmt = self.fmt
        with np.errstate(all="ignore"):
            wide = np.asarray(x, np.float64)
            negative = np.signbit(wide)
            magnitude = self._magnitude(np.abs(wide), mode, negative, random)
            left = magnitude > fmt.maximum
            stays = STAYS.get(mode.name, np.zeros_like)(negative) if overflow != "saturate" else np.ones_like(negative)
            magnitude = np.minimum(magnitude, fmt.maximum)
            if mode.name == "up_down":
                magnitude = self._jump(magnitude, random >= 2**31)
            if not fmt.zero:
                least = 2.0**fmt.emin
                magnitude = np.where((wide == 0) & (overflow == "nan"), np.nan, np.maximum(magnitude, least))
            past = {"inf": np.inf, "nan": np.nan, "saturate": fmt.maximum}[overflow]
            magnitude = np.where((left & ~stays) | np.isinf(wide), past, magnitude)
            result = np.where(np.isnan(magnitude), np.nan, np.copysign(magnitude, np.where(negative, -1.0, 1.0)))
            if not fmt.minus_zero:
                result = np.where(result == 0, 0.0, result)
            if not fmt.signed:
                floor = self.finite[0 if fmt.zero else 1] if overflow == "saturate" else np.nan
                result = np.where(negative & (wide != 0), floor, np.where(wide == 0, np.abs(result), result))
        return np.where(np.isnan(wide), np.nan, result)

    def _magnitude(self, x: Array, mode: Mode, negative: Array, random: Array) -> Array:
        i = np.clip(np.searchsorted(self.values, x, side="right") - 1, 0, self.values.size - 2)
        low, high = self.values[i], self.values[i + 1]
        seen = Seen(x - low, high - x, self.odd[i], negative, random, high - low)
        rule = GOES_UP[mode.name] if mode.random_bits in (0, MODES[mode.name].random_bits) else _few(mode)
        inside = np.where((x != low) & rule(seen), high, low)
        return np.where(x >= high, np.inf, inside)

    def _jump(self, magnitude: Array, up: Array) -> Array:
        last = self.finite.size - 1
        i = np.searchsorted(self.finite, magnitude)
        to = np.where(up & (i < last), i + 1, i - 1)
        return np.where(i == 0, 0.0, self.finite[np.clip(to, 0, last)])


def _few(mode: Mode) -> Callable[[Seen], Array]:
    return lambda seen: _draw(seen, mode.random_bits, INTEGERS[mode.name])


@cache
def neighbours(fmt: Format) -> Neighbours:
    return Neighbours(fmt)


FLUSHED = tuple(FORMATS[n].without_subnormals() for n in ("binary16", "bfloat16", "e4m3fn", "e2m1fn"))
ODD_ONES = (
    Format.ieee(exponent_bits=6, precision=10),
    Format.ieee(exponent_bits=2, precision=2),
    Format.ieee(exponent_bits=8, precision=18),
    Format.ieee(exponent_bits=11, precision=12),
    Format.ieee(exponent_bits=11, precision=40),
    Format.custom(precision=24, emin=-10, maximum=100.0, inf=False),
    Format.custom(precision=3, emin=-120, maximum=96.0, signed=False),
    Format.custom(precision=1, emin=-3, maximum=8.0),
    Format.custom(precision=2, emin=-4, maximum=12.0, zero=False, subnormals=False),
    Format.custom(precision=11, emin=-126, maximum=2.0**127, minus_zero=False),
)
ALL_FORMATS = (*FORMATS.values(), *FLUSHED, *ODD_ONES)
FEW_BITS = ("stochastic:1", "stochastic:3", "stochastic:14", "stochastic_b:2", "stochastic_c:3")
ALL_MODES = (*MODES.values(), *map(Mode.parse, FEW_BITS))


def held(fmt: Format, carrier: str) -> bool:
    """Whether the carrier can be rounded to this format; ``numerics/test_rounding.py`` states which cannot."""
    try:
        CARRIERS[carrier].require(fmt)
    except ValueError:
        return False
    return True


def every_rounding(carrier: str) -> list[Rounding]:
    """Format x mode x overflow, everything that the carrier holds."""
    formats = [f for f in ALL_FORMATS if held(f, carrier)]
    return [Rounding(f, m, o) for f in formats for m in ALL_MODES for o in f.overflows]


def float_type(carrier: str) -> Any:
    return np.float32 if carrier == "f32" else np.float64


def encodings(x: Array) -> Array:
    """The bits of an array of floats: equality of these is equality."""
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint64)


def boundaries(fmt: Format, carrier: str, spread: int = 12) -> Array:
    """Carrier values that test a rounding: the format's ends, halfway points, their carrier neighbours, both
    signs, zeros, infinities, a NaN, and the carrier's own ends. ``spread`` random binades between the ends."""
    kind = float_type(carrier)
    least = fmt.quantum_exponent
    anchors = [0.0, 1.0, 3.0, fmt.maximum, math.ldexp(1.0, fmt.emin)]
    anchors += [math.ldexp(m, least) for m in (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]
    anchors += [math.ldexp(m, fmt.emin) for m in (0.5, 0.75, 1.25, 2.5)]
    scatter = np.random.default_rng(1).uniform(max(least - 4, -1073), min(fmt.emax + 2, 1023), spread)
    with np.errstate(all="ignore"):
        last = math.ldexp(1.0, fmt.emax - fmt.precision + 1)
        top = np.array([fmt.maximum + last / 2, fmt.maximum + last, fmt.maximum + 1.5 * last])
        points = np.concatenate([np.array(anchors), np.exp2(scatter), top]).astype(kind)
        exponent = np.maximum(np.frexp(points.astype(np.float64))[1] - 1, fmt.emin)
        quantum = np.exp2((exponent - fmt.precision + 1).astype(np.float64))
        middle = ((np.floor(points / quantum) + 0.5) * quantum).astype(kind)
        points = np.concatenate([points, middle])
        points = np.concatenate([points, np.nextafter(points, kind(np.inf)), np.nextafter(points, kind(0))])
    ends = np.finfo(kind)
    extremes = np.array([ends.smallest_subnormal, ends.tiny, ends.max, np.inf, np.nan], kind)
    points = np.unique(np.concatenate([points, extremes]))
    return np.concatenate([points, -points])


def random_words(size: int, seed: int = 2) -> Array:
    """Random words, the extreme ones among them."""
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    words[::5], words[1::7], words[2::11] = 0, 2**32 - 1, 2**31
    return words
