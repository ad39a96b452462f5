"""Every element format of 8 bits or fewer, rounded from every binary16 number, with scales at their edges.

    python -m benchmarks.narrow

The reference decodes the codes of a format to a list of values, finds both neighbours of a number in it by bisection,
and decides by a sentence for each mode. A scale of 24 bits times a value, or times the middle of two values, has at
most 33 bits, so that comparisons in binary64 are exact; scales themselves are found over rational numbers. It shares
nothing with fxround. A row of the table has the number of formats, of roundings (format, scale, mode and overflow), of
numbers that were compared, and of those whose encodings differ.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch

import fxround
from benchmarks.harness import header, table

Array = Any
with np.errstate(invalid="ignore"):
    SHORT: Final = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    HALVES: Final = SHORT.astype(np.float64)
MODES: Final = (
    *("nearest_even", "nearest_away", "nearest_zero", "nearest_odd", "toward_zero", "away_from_zero"),
    *("toward_positive", "toward_negative", "to_odd"),
)
# Given scales: a power of two and its neighbours, subnormal numbers, the largest power of two.
SCALES: Final = (1.0, 1.0 - 2.0**-24, 1.0 + 2.0**-23, 2.0**-127, 2.0**-149, 0.1, 2.0**15, 2.0**-24, 2.0**127)


@dataclass(frozen=True)
class Element:
    """A format as a list of values.

    text      what fxround calls it
    values    its values of one sign, ascending; of both signs for integers that differ in them
    beyond    the value after the largest, if exponents had no bound; None: the largest is all that follows
    overflows what a number beyond the largest may become
    parity    "code": a value is odd if its number in the list is; "odd": every value but zero is odd
    signed    whether the opposites are values too
    minus     whether -0 is kept
    posit     whether no number becomes zero, and an infinity NaN; ``middles`` are then those of the posits
    """

    text: str
    values: Array
    beyond: float | None = None
    overflows: tuple[str, ...] = ("saturate",)
    parity: str = "code"
    signed: bool = True
    minus: bool = True
    posit: bool = False
    middles: Array | None = None


# ---- the formats, from their codes ----


def _floats(width: int, precision: int, bias: int, codes: int) -> Array:
    """Return the values of the first codes without their sign."""
    numbers = []
    for code in range(codes):
        field, rest = divmod(code, 1 << (precision - 1))
        significand = rest if field == 0 else rest + (1 << (precision - 1))
        numbers.append(float(Fraction(significand) * Fraction(2) ** (max(field, 1) - bias - precision + 1)))
    assert codes <= 1 << (width + precision - 1)
    return np.array(numbers)


def _floating(
    text: str, width: int, precision: int, *, bias: int, taken: int, overflows: str, **others: Any
) -> Element:
    """Return a format with a sign; taken: how many of the last codes are no numbers."""
    values = _floats(width, precision, bias, (1 << (width + precision - 1)) - taken)
    beyond = 2 * values[-1] - values[-2]
    return Element(text, values, beyond, tuple(overflows.split()), **others)


def floats() -> Iterator[Element]:
    """Yield the named formats of 8 bits or fewer, and those of IEEE 754's kind."""
    yield _floating("e5m2", 5, 3, bias=15, taken=4, overflows="inf saturate nan")
    yield _floating("e4m3", 4, 4, bias=7, taken=8, overflows="inf saturate nan")
    yield _floating("e4m3fn", 4, 4, bias=7, taken=1, overflows="nan saturate")
    for text, width, precision, bias in (("e5m2fnuz", 5, 3, 16), ("e4m3fnuz", 4, 4, 8), ("e4m3b11fnuz", 4, 4, 11)):
        yield _floating(text, width, precision, bias=bias, taken=0, overflows="nan saturate", minus=False)
    for text, width, precision, bias in (("e3m2fn", 3, 3, 3), ("e2m3fn", 2, 4, 1), ("e2m1fn", 2, 2, 1)):
        yield _floating(text, width, precision, bias=bias, taken=0, overflows="saturate")
    for width, precision in itertools.product(range(2, 7), range(2, 7)):
        if width + precision <= 8:
            taken, bias = 1 << (precision - 1), (1 << (width - 1)) - 1
            text = f"ieee({width},{precision})"
            yield _floating(text, width, precision, bias=bias, taken=taken, overflows="inf saturate nan")
    yield _floating("ue5m3", 5, 4, bias=15, taken=1, overflows="nan saturate", signed=False, minus=False)
    powers = np.exp2(np.arange(-127.0, 128.0))
    yield Element("e8m0fnu", powers, 2.0**128, ("nan", "saturate"), parity="odd", signed=False)


def p3109() -> Iterator[Element]:
    """Yield the formats of IEEE P3109 of 3 to 8 bits."""
    for bits, precision, sign, domain in itertools.product(range(3, 9), range(1, 9), "su", "ef"):
        signed, extended = sign == "s", domain == "e"
        width = bits - precision + (not signed)
        if precision >= bits + (not signed) or width < 1:
            continue
        bias = 1 << (width - 1)
        codes = (1 << (bits - signed)) - extended - (not signed)
        values = _floats(width, precision, bias, codes)
        beyond = float(_floats(width + 1, precision, bias, codes + 1)[-1])
        overflows = ("inf", "saturate") if extended else ("nan", "saturate")
        yield Element(f"binary{bits}p{precision}{sign}{domain}", values, beyond, overflows, signed=signed, minus=False)


def posits() -> Iterator[Element]:
    """Yield the posits of 3 to 8 bits."""
    for bits, exponent in itertools.product(range(3, 9), range(5)):
        values = np.array([0.0, *(_posit(code, bits, exponent) for code in range(1, 1 << (bits - 1)))])
        longer = [_posit(2 * code + 1, bits + 1, exponent) for code in range((1 << (bits - 1)) - 1)]
        yield Element(f"posit({bits},{exponent})", values, minus=False, posit=True, middles=np.array(longer))


def _posit(code: int, bits: int, exponent: int) -> float:
    """Return the value of a positive posit, by the standard's fields."""
    digits = [(code >> i) & 1 for i in range(bits - 2, -1, -1)]
    run = len(list(itertools.takewhile(lambda d: d == digits[0], digits)))
    regime = run - 1 if digits[0] else -run
    rest = digits[run + 1 :] + [0] * (exponent + 1)
    power = int("0" + "".join(map(str, rest[:exponent])), 2)
    fraction = sum((Fraction(d, 2**i) for i, d in enumerate(rest[exponent:], 1)), Fraction(1))
    return float(fraction * Fraction(2) ** (regime * 2**exponent + power))


def integers() -> Iterator[Element]:
    """Yield symmetric integers of 2 to 8 bits, and fixed point with and without a sign."""
    for bits in range(2, 9):
        yield Element(f"int{bits}", np.arange(2.0 ** (bits - 1)))
        for fraction in (0, bits - 1, bits + 3, -2):
            unit, half = 2.0**-fraction, 1 << (bits - 1)
            yield Element(f"fixed({bits},{fraction})", np.arange(-half, half) * unit, overflows=("saturate", "wrap"))
            yield Element(f"ufixed({bits},{fraction})", np.arange(2 * half) * unit, overflows=("saturate", "wrap"))


# ---- the rounding ----


def _away(mode: str, negative: Array, odd: Array, above: Array, half: Array) -> Array:
    """Whether a number that lies strictly between two values becomes the one further from zero."""
    sentences = {
        "nearest_even": above | (half & odd),
        "nearest_odd": above | (half & ~odd),
        "nearest_away": above | half,
        "nearest_zero": above,
        "toward_zero": np.zeros_like(odd),
        "away_from_zero": np.ones_like(odd),
        "toward_positive": ~negative,
        "toward_negative": negative,
        "to_odd": ~odd,
    }
    return sentences[mode]


def rounded(x: Array, element: Element, mode: str, overflow: str, scale: float = 1.0) -> Array:
    """Return the values of the element to which x / scale is rounded."""
    if "fixed" in element.text:
        return _multiples(x, element, mode, overflow, scale)
    negative, size = np.signbit(x), np.abs(x)
    grid = element.values if element.beyond is None else np.append(element.values, element.beyond)
    finite = np.isfinite(x)
    size = np.where(finite, size, 0.0)
    low = np.clip(np.searchsorted(grid * scale, size, side="right") - 1, 0, len(grid) - 2)
    middles = (grid[:-1] + grid[1:]) / 2 if element.middles is None else element.middles
    edge = middles[low] * scale
    odd = (low % 2 == 1) if element.parity == "code" else grid[low] > 0
    beyond = size >= grid[-1] * scale
    away = _away(mode, negative, odd, size > edge, size == edge) & (size > grid[low] * scale) & ~beyond
    nearest = grid[low + away]
    if element.beyond is None:
        nearest = np.where(beyond, grid[-1], nearest)
    else:
        lost = (nearest > element.values[-1]) | beyond
        ones = np.ones_like(lost)
        lost_up = _away(mode, negative, ones, ones, ~ones)
        past = {"inf": np.inf, "saturate": element.values[-1], "nan": np.nan}[overflow]
        nearest = np.where(lost, np.where(lost_up, past, element.values[-1]), nearest)
    if element.posit:
        nearest = np.where((nearest == 0) & (size > 0), element.values[1], nearest)
    infinite = {"inf": np.inf, "saturate": element.values[-1], "nan": np.nan}[overflow]
    nearest = np.where(finite, nearest, np.nan if element.posit else infinite)
    if not element.signed:
        nearest = np.where(negative & (x != 0), 0.0 if overflow == "saturate" else np.nan, nearest)
        negative = np.zeros_like(negative)
    signs = negative if element.minus else negative & (nearest != 0)
    return np.where(np.isnan(x), np.nan, np.where(signs, -nearest, nearest))


def _multiples(x: Array, element: Element, mode: str, overflow: str, scale: float) -> Array:
    """Return multiples of a unit, within the words of fixed point."""
    least, most = element.values[0], element.values[-1]
    unit = element.values[1] - least
    finite, negative = np.isfinite(x), np.signbit(x)
    size = np.where(finite, np.abs(x), 0.0)
    # A quotient by a power of two; ``scale`` is one.
    quotient = size / unit
    low = np.floor(quotient)
    part = quotient - low
    away = _away(mode, negative, low % 2 == 1, part > 0.5, part == 0.5) & (part > 0)
    number = np.where(negative, -(low + away), low + away)
    if overflow == "wrap":
        count = len(element.values)
        multiples = (number - least / unit) % count * unit + least
        return np.where(finite, np.where(multiples == 0, np.copysign(0.0, 1.0), multiples), np.nan)
    exact = np.where(number == 0, np.copysign(0.0, x), number * unit)
    exact = np.where(np.isinf(x), x, exact)
    kept = np.where(exact < least, least, np.where(exact > most, most, exact))
    return np.where(np.isnan(x), np.nan, kept)


# ---- scales of blocks ----


@dataclass(frozen=True)
class Scaling:
    """How a scale is made, and the values of its format."""

    how: str
    form: str
    values: Sequence[Fraction]


def _powers() -> list[Fraction]:
    return [Fraction(2) ** k for k in range(-127, 128)]


def scalings() -> Iterator[Scaling]:
    """Yield the ways to make a scale from the largest magnitude of a block."""
    for how in ("floor", "ceil", "even", "up", "nearest", "inverse"):
        yield Scaling(how, "e8m0fnu", _powers())
    e4m3 = [Fraction(v) for v in _floats(4, 4, 7, 127)][1:]
    for how in ("up", "nearest"):
        yield Scaling(how, "e4m3fn", e4m3)


def _scale(most: Fraction, element: Element, scaling: Scaling) -> Fraction:
    """Return the scale of a block whose largest magnitude ``most`` is positive; for inverse the multiplier."""
    largest = Fraction(element.values[-1])
    top = Fraction(2) ** _power(largest)
    if scaling.how == "even":
        precision = _digits(element)
        unit = Fraction(2) ** (_power(most) - precision + 1)
        most = ((most / unit + Fraction(1, 2)).__floor__()) * unit
    quotient = {"floor": most / top, "ceil": most / top, "even": most / top, "inverse": largest / most}.get(
        scaling.how, most / largest
    )
    below = [v for v in scaling.values if v <= quotient]
    above = [v for v in scaling.values if v >= quotient]
    if not below:
        return scaling.values[0]
    if not above:
        return scaling.values[-1]
    low, high = below[-1], above[0]
    if scaling.how in ("floor", "even", "inverse") or low == high:
        return low
    if scaling.how in ("ceil", "up"):
        return high
    middle = (low + high) / 2
    if quotient == middle:
        # A power of two has an odd significand; of E4M3's values, those with an even place from zero are even.
        even = len(below) % 2 == 0 if scaling.form == "e4m3fn" else False
        return low if even else high
    return low if quotient < middle else high


def _power(value: Fraction) -> int:
    """Return floor(log2(value))."""
    power = value.numerator.bit_length() - value.denominator.bit_length()
    return power - (Fraction(2) ** power > value)


def _digits(element: Element) -> int:
    """Return the precision of a format: the significant bits of its values."""
    most = 0
    for value in element.values[1:]:
        exact = Fraction(value)
        unit = exact.numerator & -exact.numerator
        most = max(most, (exact.numerator // unit).bit_length())
    return most


def tops(element: Element, scaling: Scaling) -> list[float]:
    """Return largest magnitudes, in binary32, at the edges of scales: where one scale turns into the next."""
    largest = Fraction(element.values[-1])
    top = Fraction(2) ** _power(largest)
    scales = scaling.values
    if scaling.form == "e8m0fnu":
        inside = [*scales[:2], *scales[117:142:6], *scales[-2:]]
    else:
        inside = [*scales[:4], *scales[6:10], *scales[60:64], *scales[-3:]]
    edges = {e * d for e in (*inside, *((a + b) / 2 for a, b in itertools.pairwise(inside))) for d in (largest, top)}
    values: set[float] = set()
    with np.errstate(over="ignore"):
        for edge in edges:
            near = np.float32(float(edge))
            ends = np.array([0, np.inf], np.float32)
            values |= {float(near), *map(float, np.nextafter(near, ends))}
    return sorted(v for v in values if 0 < v < np.inf)


# ---- comparisons ----


def _differing(got: torch.Tensor, want: Array) -> int:
    """Return how many encodings differ; a NaN is equal to any other."""
    own = got.numpy()
    with np.errstate(over="ignore"):
        other = want.astype(np.float32)
    same = (own.view(np.uint32) == other.view(np.uint32)) | (np.isnan(own) & np.isnan(other))
    return int((~same).sum())


@dataclass
class Count:
    """What was compared."""

    roundings: int = 0
    numbers: int = 0
    wrong: int = 0
    first: str = ""

    def add(self, text: str, size: int, wrong: int) -> None:
        """Count a rounding."""
        self.roundings += 1
        self.numbers += size
        self.wrong += wrong
        self.first = self.first or (text if wrong else "")


def plain(element: Element, modes: Sequence[str] = MODES) -> Count:
    """Compare a format without a scale, in every mode and overflow."""
    kept = HALVES > 0 if element.text == "e8m0fnu" else np.ones(HALVES.size, bool)
    count, form = Count(), f"scaled({element.text};fixed)" if element.text.startswith("int") else element.text
    for mode, overflow in itertools.product(modes, element.overflows):
        text = f"{form}/{mode}/{overflow}"
        got = fxround.round(torch.from_numpy(SHORT[kept]), text)
        count.add(text, got.numel(), _differing(got, rounded(HALVES[kept], element, mode, overflow)))
    return count


def given(element: Element, scales: Sequence[float] = SCALES, modes: Sequence[str] = MODES[:1]) -> Count:
    """Compare a format with given scales."""
    count = Count()
    for scale, mode in itertools.product(scales, modes):
        text = f"scaled({element.text};fixed,scale={scale!r})/{mode}"
        scale = float(np.float32(scale))
        got = fxround.round(torch.from_numpy(SHORT), text)
        want = rounded(HALVES, element, mode, "saturate", scale) * scale
        count.add(text, HALVES.size, _differing(got, want))
    return count


def blocks(element: Element, scaling: Scaling, modes: Sequence[str] = MODES[:1]) -> Count:
    """Compare blocks of two: a number, and a largest magnitude at an edge of the scale."""
    rows: list[Array] = []
    made: list[tuple[float, Array]] = []
    for top in tops(element, scaling):
        x = HALVES[np.abs(HALVES) <= top]
        rows.append(np.stack([x, np.full_like(x, top)], 1).astype(np.float32))
        made.append((float(_scale(Fraction(top), element, scaling)), rows[-1].astype(np.float64)))
    count = Count()
    for mode in modes:
        text = f"scaled({element.text};2,{scaling.form},{scaling.how})/{mode}"
        got = fxround.round(torch.from_numpy(np.concatenate(rows)), text)
        want = [_block(x, element, scaling, scale, mode) for scale, x in made]
        count.add(text, got.numel(), _differing(got, np.concatenate(want)))
    return count


def _block(x: Array, element: Element, scaling: Scaling, scale: float, mode: str) -> Array:
    if scaling.how == "inverse":
        return rounded(x * scale, element, mode, "saturate") / scale
    return rounded(x, element, mode, "saturate", scale) * scale


def scaled_elements() -> list[Element]:
    """Return the elements that are compared in blocks: those with a sign and a zero."""
    return [e for e in (*floats(), *integers()) if e.signed and "fixed" not in e.text and e.text != "e8m0fnu"]


def report() -> Iterator[list[str]]:
    """Yield the rows of the table."""
    kinds: dict[str, list[Element]] = {
        "floating point": list(floats()),
        "IEEE P3109": list(p3109()),
        "posits": list(posits()),
        "integers and fixed point": list(integers()),
    }
    runs = [(f"{kind}, no scale", [plain(e) for e in elements]) for kind, elements in kinds.items()]
    elements = scaled_elements()
    runs.append(("given scales", [given(e) for e in elements]))
    for scaling in scalings():
        tried = MODES if scaling.how == "floor" else MODES[:1]
        name = f"blocks, {scaling.form} by {scaling.how}"
        runs.append((name, [blocks(e, scaling, tried) for e in elements]))
    for name, counts in runs:
        sums = [sum(getattr(count, what) for count in counts) for what in ("roundings", "numbers", "wrong")]
        first = next((count.first for count in counts if count.first), "")
        yield [name, str(len(counts)), *(f"{n:,}" for n in sums), first]


def main() -> int:
    """Print the table; the exit status is 1 if any encoding differs."""
    torch.set_num_threads(1)
    print(header(("torch", "numpy", "llvmlite")))
    rows = list(report())
    print(table(["", "formats", "roundings", "numbers", "differ", "the first that differs"], rows))
    return int(any(row[4] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
