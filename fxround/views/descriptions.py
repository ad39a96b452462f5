"""``fxround.describe``: everything that a format or a scaled format decides, as data and as a text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding, Scaling, any_rounding
from fxround.numerics.modes import Rounding
from fxround.short_reprs import Short

# Formats of at most 8 bits list their values.
_LISTED: Final = 256
_PER_LINE: Final = 8
_HOW: Final = {
    "floor": "largest magnitude / 2^emax of the element, to the power of two below",
    "ceil": "largest magnitude / 2^emax of the element, to the power of two above",
    "even": "largest magnitude, rounded to the element's precision, / 2^emax of the element, to the power of two below",
    "shift": "largest magnitude / 2^(emax + 1) of the element, to the power of two whose logarithm is nearest",
    "up": "largest magnitude / largest element, to the scale format's value above",
    "nearest": "largest magnitude / largest element, to the scale format's nearest value",
    "inverse": "largest element / largest magnitude is rounded, and elements are multiplied by it",
    "delayed": "largest element / largest magnitude of earlier steps is rounded, and elements are multiplied by it",
    "held": "none is made: the scale is state of the compiled model, as fxround.calibrate found it",
    "affine": "range of the block and zero / largest element, with a zero point",
}


@dataclass(frozen=True, repr=False)
class FormatDescription(Short):
    """The numbers that a format can represent, and how rounding to it treats special cases.

    name              the name of the format
    rounding          the rounding as graphs show it, "format/mode/overflow"
    precision         bits of the significand, with the implicit one; for a posit, near 1; for a table, the bits that
                      its values need
    emin              the exponent of the smallest normal number
    emax              the exponent of the largest magnitude
    largest           the largest finite value
    lowest            the lowest finite value; not negative in a format without a sign
    smallest_normal   2^emin; None for a table
    smallest          the smallest positive value, which is less than 2^emin in a format with subnormals; None if no
                      value is positive
    unit_roundoff     2^-precision, the largest relative error of a normal number rounded to nearest; for a posit, near
                      1; None for a table
    special           those of "inf", "nan" and "-0" that the format has
    decisions         pairs of texts: how ties, subnormals, minus zero and overflow are treated
    values            for a table all values; for another format all values that are not negative, if they are at most
                      256, else ()
    """

    name: str
    rounding: str
    precision: int
    emin: int
    emax: int
    largest: float
    lowest: float
    smallest_normal: float | None
    smallest: float | None
    unit_roundoff: float | None
    special: tuple[str, ...]
    decisions: tuple[tuple[str, str], ...]
    values: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = [
            ("rounding", self.rounding),
            ("precision", f"{self.precision} bits"),
            ("exponents", f"emin {self.emin}, emax {self.emax}"),
            ("largest", _number(self.largest)),
            ("lowest", _number(self.lowest)),
            ("smallest normal", _number(self.smallest_normal)),
            ("smallest positive", _number(self.smallest)),
            ("unit roundoff", _number(self.unit_roundoff)),
            ("special values", ", ".join(self.special) or "none"),
            *self.decisions,
        ]
        return "\n".join([self.name, *_lines(rows), *self._listed()])

    def _listed(self) -> list[str]:
        if not self.values:
            return []
        # With one bit, all values but zero are powers of two.
        texts = [
            f"2^{math.frexp(v)[1] - 1}"
            if v and self.smallest_normal is not None and self.precision == 1
            else f"{v:.9g}"
            for v in self.values
        ]
        width = max(map(len, texts))
        opposite = " and their opposites" if self.lowest < 0 <= self.values[0] else ""
        lines = [texts[i : i + _PER_LINE] for i in range(0, len(texts), _PER_LINE)]
        return [
            f"  {len(texts)} values{opposite}",
            *("    " + "  ".join(t.rjust(width) for t in line) for line in lines),
        ]


@dataclass(frozen=True, repr=False)
class ScaledDescription(Short):
    """The elements, blocks and scales of a scaled format.

    name      the name of the scaled format
    rounding  the rounding as graphs show it, "format/mode/overflow"
    element   the description of the format of the elements
    block     which elements share a scale, in words
    scale     the description of the format of scales; None for fixed point
    how       how a scale is computed from the block's largest magnitude, in words
    whole     the format of a further scale for the whole tensor; None if there is none
    span      the least and the largest element; None if they are those of the element's format
    unit      the given scale, the same for all elements; None if there is none
    """

    name: str
    rounding: str
    element: FormatDescription
    block: str
    scale: FormatDescription | None
    how: str
    whole: str | None
    span: tuple[float, float] | None
    unit: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = [("rounding", self.rounding), ("block", self.block)]
        if self.scale is not None:
            rows += [("scale", f"{self.scale.name}, up to {_number(self.scale.largest)}"), ("how", self.how)]
        rows += [("tensor's scale", self.whole)] if self.whole else []
        rows += [("given scale", _number(self.unit))] if self.unit is not None else []
        rows += [("elements", " to ".join(map(_number, self.span)))] if self.span is not None else []
        element = str(self.element).replace("\n", "\n  ")
        return "\n".join([self.name, *_lines(rows), f"  element {element}"])


def describe(rounding: Any) -> FormatDescription | ScaledDescription:
    """Return the numbers of a format, and how rounding to it treats special cases; ``print`` shows all of it.

    rounding: a name of a format or a scaled format, or anything else that ``fxround.round`` takes. Raises ValueError
    for an unknown name, TypeError for another type. Example::

        print(fxround.describe("mxfp8"))
        fxround.describe("e4m3fn").unit_roundoff        # 0.0625
    """
    parsed = any_rounding(rounding)
    if isinstance(parsed, ScaledRounding):
        return _scaled(parsed, rounding)
    return _described(parsed)


def _described(rounding: Rounding) -> FormatDescription:
    fmt = rounding.format
    special = {"inf": fmt.inf, "nan": fmt.nan, "-0": fmt.has_minus_zero}
    lines = (line.strip() for line in fmt.describe().splitlines()[1:])
    return FormatDescription(
        name=fmt.said,
        rounding=str(rounding),
        precision=fmt.precision,
        emin=fmt.emin,
        emax=fmt.emax,
        largest=fmt.values[-1] if fmt.values else fmt.maximum,
        lowest=_lowest(fmt),
        smallest_normal=None if fmt.values else math.ldexp(1.0, fmt.emin),
        smallest=_smallest(fmt),
        unit_roundoff=None if fmt.values else math.ldexp(1.0, -fmt.precision),
        special=tuple(name for name, held in special.items() if held),
        decisions=tuple((line[:12].strip(), line[12:].strip()) for line in lines),
        values=_values(fmt),
    )


def _smallest(fmt: Format) -> float | None:
    if fmt.values:
        return min((v for v in fmt.values if v > 0), default=None)
    return math.ldexp(1.0, fmt.quantum_exponent)


def _lowest(fmt: Format) -> float:
    if fmt.values:
        return fmt.values[0]
    return -fmt.maximum if fmt.signed else 0.0 if fmt.zero else math.ldexp(1.0, fmt.emin)


def _values(fmt: Format) -> tuple[float, ...]:
    if fmt.values:
        return fmt.values
    # A binade has 2^(precision - 1) values, and a posit one code for each positive value.
    count = 2 ** (fmt.posit[0] - 1) if fmt.posit else (fmt.emax - fmt.emin + 1) << (fmt.precision - 1)
    return tuple(fmt.magnitudes()) if count <= _LISTED else ()


def _scaled(rounding: ScaledRounding, named: Any) -> ScaledDescription:
    form = rounding.format
    name = named.partition("/")[0].strip() if isinstance(named, str) else str(form)
    scaling = form.scaling
    return ScaledDescription(
        name=name,
        rounding=str(rounding),
        element=_element(rounding),
        block="no scale: fixed point" if scaling is None else _block(scaling),
        scale=None if scaling is None else _described(scaling.rounding),
        how="" if scaling is None else _how(scaling),
        whole=str(scaling.whole) if scaling is not None and scaling.whole is not None else None,
        span=form.span,
        unit=form.unit,
    )


def _how(scaling: Scaling) -> str:
    said = _HOW[scaling.how]
    if scaling.history:
        said = said.replace("earlier steps", f"{scaling.history} earlier steps")
        said = said.replace(" is rounded", f" / 2^{scaling.margin} is rounded") if scaling.margin else said
    if scaling.percentile is not None:
        said = said.replace("largest magnitude", f"magnitude that {scaling.percentile:g} % do not exceed")
    if scaling.fit:
        targets = " or ".join(f"{v:g}" for v in scaling.fit)
        said = said.replace("largest element", f"{targets}, by the least error")
    return said


def _element(rounding: ScaledRounding) -> FormatDescription:
    """Return the description of the elements within their bounds."""
    form = rounding.format
    description = _described(rounding.element)
    affine = form.scaling is not None and form.scaling.how == "affine"
    span = (0.0, form.element.maximum) if affine else form.span
    if span is None:
        return description
    text = description.rounding.rpartition("/")[0] + f"/{rounding.overflow}"
    values = tuple(v for v in description.values if v <= span[1])
    return replace(description, rounding=text, lowest=span[0], largest=span[1], values=values)


def _block(scaling: Scaling) -> str:
    if scaling.block == "tensor":
        return "all elements of the tensor"
    if scaling.block == "channel":
        return "all elements along the given dimensions"
    if len(scaling.block) == 1:
        return f"{scaling.block[0]} consecutive elements"
    return f"{scaling.block[0]} x {scaling.block[1]} elements of the last two dimensions"


def _number(value: float | None) -> str:
    """Return a number, and the power of two that it is, if it is one other than 1; "none" for None."""
    if value is None:
        return "none"
    significand, exponent = math.frexp(value)
    power = f" = 2^{exponent - 1}" if significand == 0.5 and exponent != 1 else ""
    return f"{value:.9g}{power}"


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {text}" for name, text in rows]
