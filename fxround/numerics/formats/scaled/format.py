"""``Scaling``, ``ScaledFormat`` and ``ScaledRounding``, and the texts that name them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, Literal

from fxround.errors import shown
from fxround.numerics.formats import FORMATS, Format, Overflow
from fxround.numerics.formats.fixed_point import element_of, fixed_point, integers
from fxround.numerics.formats.hadamard import Hadamard
from fxround.numerics.modes import MODES, Mode, Rounding
from fxround.short_reprs import Short

# How a scale is made of the largest magnitude m. With the element format's largest value M and the largest power of two
# 2^e in it: floor, ceil: m / 2^e, to the power of two below or above. even: floor of m rounded to the element's
# precision, ties away. shift: m / 2^(e+1), to the power of two whose logarithm is nearest. up: m / M, to the scale
# format's value above. nearest: m / M, to nearest. inverse: the multiplier M / m is rounded in place of the scale, and
# elements are multiplied by it. affine: the range from the least to the largest value, with a zero point. delayed: as
# inverse, with m the largest magnitude of earlier steps. held: none is made; the scale is state of a compiled model.
How = Literal["floor", "ceil", "even", "shift", "up", "nearest", "inverse", "affine", "delayed", "held"]
_HOWS: Final = ("floor", "ceil", "even", "shift", "up", "nearest", "inverse", "affine", "delayed", "held")
# Scales that are state of a compiled model.
_STATES: Final = ("delayed", "held")
# Those that make powers of two alone.
_POWERS: Final = ("floor", "ceil", "even", "shift")
# The smallest binary32 number above the square root of 2: a binary32 number is above sqrt(2) 2^k if it is at least
# ROOT_OF_TWO 2^k. The power of two below m / 2^e / ROOT_OF_TWO therefore has the logarithm nearest to m / 2^(e+1)'s.
ROOT_OF_TWO: Final = float.fromhex("0x1.6a09e8p0")
# TransformerEngine's default.
_HISTORY: Final = 1024
# A choice between more scales takes more passes over the tensor than it is worth.
_MOST_FITS: Final = 8
# Elements that share a scale: consecutive ones along a dimension, a tile of the last two dimensions, all along the
# given dimensions, or all of the tensor.
Block = tuple[int, ...] | Literal["channel", "tensor"]


@dataclass(frozen=True, repr=False)
class Scaling(Short):
    """Which elements share a scale, and how it is found.

    block       (n,): n consecutive elements along a dimension; (m, n): a tile of the last two dimensions; "channel":
                all along the dimensions given at the call; "tensor": all
    format      the format of the scale
    how         how it is made of the largest magnitude (``How``)
    whole       the format of a scale of the whole tensor, by which the block's scales are divided first; None for none
    percentile  m is the least magnitude that this percentage of the finite ones do not exceed; None: the largest
    fit         element values to which m is mapped in turn, in place of M: of these scales, each block takes the one
                with the least sum of squared errors, the first of equal ones
    history     for delayed: the number of earlier steps of which m is the largest magnitude; 0 for others
    margin      for delayed: the multiplier is M / m / 2^margin
    """

    block: Block
    format: Format
    how: How
    whole: Format | None = None
    percentile: float | None = None
    fit: tuple[float, ...] = ()
    history: int = 0
    margin: int = 0

    def __post_init__(self) -> None:
        delayed = self.how == "delayed"
        if delayed and self.block != "tensor":
            raise ValueError(f"delayed scales belong to whole tensors, got the block {self.block}")
        if delayed != (1 <= self.history <= 1 << 16) or not (abs(self.margin) <= 32 if delayed else self.margin == 0):
            raise ValueError(
                f"history={self.history}, margin={self.margin}: expected 1 to 65536 steps and a margin of -32 to 32 "
                "for delayed scales, 0 for others"
            )
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise ValueError(f"percentile={self.percentile}: expected more than 0 and at most 100")
        if self.fit and not (2 <= len(self.fit) <= _MOST_FITS and all(_is_short(v) and v > 0 for v in self.fit)):
            raise ValueError(f"fit={list(self.fit)}: expected 2 to {_MOST_FITS} positive binary32 numbers")
        if self.fit and self.how not in ("up", "nearest"):
            raise ValueError(f"fit chooses between scales that are made by up or nearest, got {self.how}")
        if self.how == "held" and (self.format != FORMATS["binary32"] or self.is_tile):
            raise ValueError(
                f"held scales are in binary32, and not of tiles; got {self.format} and the block {self.block}"
            )
        if self.how in ("inverse", "affine", "delayed", "held") and (
            self.whole is not None or self.percentile is not None
        ):
            reads = {"affine": "range of a block", "held": "scale that was found before"}
            read = reads.get(self.how, "largest magnitude")
            raise ValueError(f"{self.how} takes the {read}; it has no percentile and no scale of the tensor")
        if self.how in ("inverse", "delayed") and not (
            self.format == FORMATS["binary32"] or self.format.precision == 1
        ):
            raise ValueError(f"{self.how} makes multipliers in binary32 or powers of two, got {self.format}")
        if self.how not in _HOWS:
            raise ValueError(f"a scale is made by {', '.join(_HOWS)}, got {shown(self.how)}")
        if not isinstance(self.block, str) and (len(self.block) not in (1, 2) or min(self.block) < 1):
            raise ValueError(f"a block has one or two sizes of at least 1, got {shown(self.block)}")
        if isinstance(self.block, str) and self.block not in ("channel", "tensor"):
            raise ValueError(f"a block is sizes, channel or tensor, got {shown(self.block)}")
        if self.how in _POWERS and self.format.precision != 1:
            raise ValueError(f"{self.how} makes powers of two; {self.format} has other scales: use up or nearest")

    @property
    def is_tile(self) -> bool:
        """Whether a block is a tile of two dimensions."""
        return not isinstance(self.block, str) and len(self.block) == 2

    @property
    def is_state(self) -> bool:
        """Whether scales are state of a compiled model."""
        return self.how in _STATES

    @property
    def rounding(self) -> Rounding:
        """The rounding of a quotient to a scale."""
        modes = dict.fromkeys(("floor", "even", "shift"), "toward_zero")
        modes |= dict.fromkeys(("ceil", "up"), "toward_positive")
        if self.how in ("inverse", "delayed") and self.format.precision == 1:
            modes[self.how] = "toward_zero"
        return Rounding(self.format, MODES[modes.get(self.how, "nearest_even")], "saturate")

    def divisor(self, element: Format) -> float:
        """The number by which the largest magnitude is divided."""
        if self.how in _POWERS:
            return math.ldexp(ROOT_OF_TWO if self.how == "shift" else 1.0, element.emax)
        return math.ldexp(element.maximum, -self.margin)

    def __str__(self) -> str:
        block = self.block if isinstance(self.block, str) else "x".join(map(str, self.block))
        whole = f",{self.whole}" if self.whole is not None else ""
        percentile = f",percentile={self.percentile!r}" if self.percentile is not None else ""
        fit = f",fit={':'.join(map(repr, self.fit))}" if self.fit else ""
        delayed = f",history={self.history}" if self.history else ""
        margin = f",margin={self.margin}" if self.margin else ""
        return f"{block},{self.format},{self.how}{whole}{percentile}{fit}{delayed}{margin}"


@dataclass(frozen=True, repr=False)
class ScaledFormat(Short):
    """A scaled format: a value is an element times a scale, which a block of elements shares.

    element   the format of the elements
    scaling   how the scale of a block is made; None for fixed point and for elements with a given scale
    span      the least and the largest element, for two's complement, unsigned elements and zero points; None if they
              are those of the element's format
    unit      the given scale, the same for all elements; None for 1

    ``ScaledFormat.parse(str(f)) == f``. Example::

        fxround.ScaledFormat.parse("mxfp8").element.name        # "e4m3fn"
    """

    element: Format
    scaling: Scaling | None
    span: tuple[float, float] | None = None
    unit: float | None = None

    def __post_init__(self) -> None:
        if self.span is not None and not (self.scaling is None and self.span[0] <= 0 <= self.span[1]):
            raise ValueError(f"{self}: bounds belong to elements without a scale of their blocks, and contain zero")
        if self.unit is not None and not (self.scaling is None and self.unit > 0 and _is_short(self.unit)):
            raise ValueError(f"{self}: a given scale is a positive number of binary32")
        if self.scaling is not None and self.scaling.how == "affine" and not _is_integer(self.element):
            raise ValueError(f"{self}: affine goes with integers, as in uint8")
        scales = () if self.scaling is None else (self.scaling.format, self.scaling.whole)
        fixed = [row for row in (self.element, *scales) if row is not None and row.span is not None]
        if fixed:
            raise ValueError(f"{self}: {fixed[0]} has no scale; write it alone, or int2 to int16 for elements")
        if self.scaling is None or self.scaling.whole is None:
            return
        most = self.scaling.divisor(self.element) * self.scaling.format.maximum
        if not most <= min(self.scaling.whole.maximum, FORMATS["binary32"].maximum):
            raise ValueError(
                f"{self}: a scale of the tensor in {self.scaling.whole} cannot be relative to {most:.3g}, the largest "
                f"element times the largest scale of a block; leave {self.scaling.whole} out"
            )

    def __str__(self) -> str:
        unit = "" if self.unit is None else f",scale={self.unit!r}"
        span = "" if self.span is None else f";{self.span[0]!r}:{self.span[1]!r}"
        return f"scaled({self.element};{self.scaling or 'fixed' + unit}{span})"

    def _line(self) -> str:
        return ", ".join([*(name for name, known in NAMED.items() if known == self), str(self)])

    @staticmethod
    def parse(text: str) -> ScaledFormat:
        """Parse the name of a scaled format, or a full text.

        The names are those of the table in docs/scaled.md (mxfp8, nvfp4, ...), int2 to int16, uint2 to uint16,
        bfp(bits,block), fixed(bits,fraction) and ufixed(bits,fraction). A name may be followed by a colon, another
        block and options: ``int8:channel,percentile=99.9``. The full texts are
        ``scaled(element;block,scale,how[,whole][,option])`` and ``scaled(element;fixed[,scale=number][;least:most])``.

        Raises ValueError for anything else, with the nearest names.
        """
        parsed = _parsed(text.strip())
        if parsed is None:
            near = get_close_matches(text[:40], NAMED, n=2, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ValueError(
                f"no scaled format is named {shown(text)}{hint} Known: {', '.join(NAMED)}, int2 to int16, uint2 to "
                "uint16, bfp(bits,block), each with :block, :channel or :tensor; fixed(bits,fraction), "
                "ufixed(bits,fraction)"
            )
        return parsed


@dataclass(frozen=True, repr=False)
class ScaledRounding(Short):
    """A rounding to a scaled format: a scaled format, and the mode and overflow of its elements.

    format    a ``ScaledFormat``
    mode      one of ``fxround.modes``
    overflow  "saturate", "inf", "nan", or for fixed point "wrap", which keeps the low bits of two's complement
    hadamard  a transform of the operand before it is rounded, the same for both operands of a product; None for none

    ``ScaledRounding.parse(str(r)) == r``. Example::

        fxround.round(x, "mxfp8/stochastic", dim=-1, seed=1)
    """

    format: ScaledFormat
    mode: Mode
    overflow: Overflow | Literal["wrap"]
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        if self.overflow == "wrap" and self.format.span is None:
            raise ValueError(f"{self}: wrap goes with fixed point, as in fixed(8,4)/nearest_even/wrap")
        if self.hadamard is not None and self.format.scaling is not None and self.format.scaling.is_state:
            raise ValueError(
                f"{self}: a {self.format.scaling.how} scale belongs to a value itself, and goes without a transform"
            )
        known = ", ".join([*self.format.element.overflows, *(["wrap"] if self.format.span else [])])
        if self.overflow not in known.split(", "):
            raise ValueError(f"elements of {self.format} cannot overflow to {self.overflow!r}; they can: {known}")

    @property
    def element(self) -> Rounding:
        """The rounding of a quotient to an element; for ``wrap``, of one that does not overflow."""
        fmt = self.format.element
        return Rounding(fmt, self.mode, fmt.default_overflow if self.overflow == "wrap" else self.overflow)

    @property
    def of_products(self) -> bool:
        """Whether the rounding is one of operands alone: a transform that cancels, or a scale that is state."""
        scaling = self.format.scaling
        return self.hadamard is not None or (scaling is not None and scaling.is_state)

    def multiples(self, carrier: Format) -> Rounding:
        """The rounding to multiples of the element's quantum, without a bound on their size.

        carrier: the format of the tensor. Its numbers above a certain size are all multiples.
        """
        precision = carrier.precision
        emin = self.format.element.quantum_exponent + precision - 1
        return Rounding(Format.custom(precision=precision, emin=emin, maximum=carrier.maximum), self.mode, "inf")

    def __str__(self) -> str:
        return f"{f'{self.hadamard}+' if self.hadamard else ''}{self.format}/{self.mode}/{self.overflow}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (ScaledRounding.parse, (str(self),))

    @staticmethod
    def parse(text: str) -> ScaledRounding:
        """Parse ``[hadamard(n)+]scaled_format[/mode[/overflow]]``.

        The mode defaults to nearest_even, the overflow to saturate. Raises ValueError, which names the part that is
        wrong.
        """
        transform, rest = _transform(text)
        parts = [p.strip() for p in rest.split("/")]
        if len(parts) > 3:
            raise ValueError(f"{shown(text)} has {len(parts)} parts; expected format[/mode[/overflow]]")
        mode = Mode.parse(parts[1]) if len(parts) > 1 else MODES["nearest_even"]
        overflow: Any = parts[2] if len(parts) > 2 else "saturate"
        return ScaledRounding(ScaledFormat.parse(parts[0]), mode, overflow, transform)


def any_rounding(text: Any) -> Rounding | ScaledRounding:
    """Parse a rounding to a scaled format or to any other; raises what ``Rounding.parse`` raises for neither."""
    if isinstance(text, ScaledRounding):
        return text
    # Fixed point is scaled wherever it is no accumulator.
    fmt = text.format if isinstance(text, Rounding) else text
    text = str(text) if isinstance(fmt, Format) and fmt.span is not None else text
    if is_scaled(text):
        return ScaledRounding.parse(text)
    try:
        return Rounding.parse(text)
    except ValueError as error:
        head = str(text).partition("/")[0].strip()[:40].lower()
        if head in _RECIPES:
            raise ValueError(
                f"no format is named {shown(text)}; {_RECIPES[head]} is a policy, for fxround.compile. As a format: "
                "e4m3fn or e5m2; mxfp8; or with one scale of the tensor scaled(e4m3fn;tensor,binary32,inverse)"
            ) from error
        near = get_close_matches(head, SPELLINGS, n=2, cutoff=0.6)
        if not near:
            raise
        raise ValueError(f"{error}; or did you mean {' or '.join(near)}?") from error


# Recipes of training that are typed where a format is expected.
_RECIPES: Final = MappingProxyType({"float8": "fp8", **{name: name for name in ("fp8", "fp8_delayed", "fp8_blocks")}})
# What a misspelt name of another kind than a plain format may be meant for, and how such names are listed.
SPELLINGS: Final = (
    *("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "int4", "int8", "uint4", "uint8", "bfp(8,32)", "fixed(16,8)"),
    *("nf4", "posit8", "posit16", "posit32", "binary8p3", "binary8p4"),
)
OTHERS: Final = (
    "nf4, int2 to int16, uint2 to uint16, bfp(bits,block), fixed(bits,fraction), ufixed(bits,fraction), "
    "scaled(element;block,scale,how), ieee(exponent_bits,precision), table(value,value,...), "
    "posit(bits,exponent_bits), binary8p3"
)


def is_scaled(text: Any) -> bool:
    """Whether a text names a scaled format, or a rounding to one."""
    if not isinstance(text, str):
        return False
    transform, rest = _transform(text)
    return transform is not None or _parsed(rest.partition("/")[0].strip()) is not None


def _transform(text: str) -> tuple[Hadamard | None, str]:
    """Return the transform of a text, and the text after it."""
    match = re.match(r"\s*hadamard\(([0-9]{1,4})(?:,\s*([0-9]{1,9}))?\)\+", text)
    return (Hadamard(int(match[1]), int(match[2] or 0)), text[match.end() :]) if match else (None, text)


# The named scaled formats. ``rows`` fills it, and shows it as SCALED.
NAMED: Final[dict[str, ScaledFormat]] = {}
# Scales that are powers of two, as those of OCP Microscaling.
POWERS: Final = FORMATS["e8m0fnu"]


def _parsed(text: str) -> ScaledFormat | None:
    """The format of a text; None for a text of another kind. Raises ValueError for wrong numbers in a known kind."""
    full = re.fullmatch(r"scaled\((.{1,8200})\)", text)
    if full:
        return _full(full[1], text)
    base, colon, rest = text.partition(":")
    named = _named(base)
    if named is None or not colon:
        return named
    words = rest.split(",")
    block = words.pop(0) if "=" not in words[0] else None
    options = _options(words, text)
    if "zero" in options and "scale" not in options:
        raise ValueError(f"{shown(text)}: a zero point is given with a scale, as in uint8:scale=0.05,zero=128")
    if "scale" in options:
        return _given(named, base, options, text)
    if named.scaling is None:
        raise ValueError(f"{shown(text)}: fixed point has no scale, and so no block")
    scaling = named.scaling if block is None else replace(named.scaling, block=_block(block, text))
    return replace(named, scaling=replace(scaling, **_known(options, ("percentile", "fit"), text)))


def _named(base: str) -> ScaledFormat | None:
    if base in NAMED:
        return NAMED[base]
    whole = re.fullmatch(r"(u?)int([0-9]{1,2})", base)
    if whole:
        bits, how = int(whole[2]), "affine" if whole[1] else "nearest"
        if not 2 <= bits <= 16:
            raise ValueError(f"{shown(base)}: integers have 2 to 16 bits")
        # An unsigned integer has no sign's bit.
        element = integers(bits + 1 if whole[1] else bits)
        return ScaledFormat(element, Scaling("tensor", FORMATS["binary32"], how))  # type: ignore[arg-type]
    floating = re.fullmatch(r"bfp\(([0-9]{1,2}),\s*([0-9]{1,6})\)", base)
    if floating:
        bits = int(floating[1])
        return ScaledFormat(fixed_point(bits, bits - 2), Scaling((int(floating[2]),), POWERS, "floor"))
    fixed = re.fullmatch(r"(u?)fixed\(([0-9]{1,2}),\s*(-?[0-9]{1,4})\)", base)
    if fixed:
        bits, fraction, unsigned = int(fixed[2]), int(fixed[3]), bool(fixed[1])
        fixed_point(bits, fraction)  # raises for numbers out of range
        return _spanning(0 if unsigned else -(1 << (bits - 1)), (1 << bits) - 1, -fraction)
    return None


def _spanning(least: int, more: int, exponent: int) -> ScaledFormat:
    """Return the multiples of 2^exponent from ``least`` to ``least + more`` of them, without a scale."""
    most = least + more
    unit = 2.0**exponent
    # The format has the same values on both sides of zero; the span removes those that are too many.
    magnitude = max(-least, most)
    precision = magnitude.bit_length() - (magnitude & (magnitude - 1) == 0)
    precision = max(2, min(53, precision))
    wide = Format.custom(
        precision=precision, emin=precision - 1 + exponent, maximum=magnitude * unit, inf=False, nan=False
    )
    return ScaledFormat(wide, None, (least * unit, most * unit))


def _given(named: ScaledFormat, base: str, options: dict[str, Any], text: str) -> ScaledFormat:
    """Return a format with a scale that is given, and perhaps a zero point."""
    known = _known(options, ("scale", "zero"), text)
    if named.scaling is None or not re.fullmatch(r"u?int[0-9]+", base):
        raise ValueError(f"{shown(text)}: a scale is given to integers; write scaled(element;fixed,scale=number)")
    if "zero" not in known and not base.startswith("u"):
        return ScaledFormat(named.element, None, unit=known["scale"])
    bits, zero = int(base.rpartition("t")[2]), known.get("zero", 0.0)
    least = 0 if base.startswith("u") else -(1 << (bits - 1))
    if not (float(zero).is_integer() and least <= zero <= least + (1 << bits) - 1):
        raise ValueError(f"{shown(text)}: a zero point is one of the integers, got {zero}")
    return replace(_spanning(least - int(zero), (1 << bits) - 1, 0), unit=known["scale"])


def _full(inside: str, text: str) -> ScaledFormat:
    element, _, rest = inside.partition(";")
    how, _, bounds = rest.partition(";")
    words = re.split(r",(?![^()]*\))", how)
    options = _options([word for word in words if "=" in word], text)
    words = [word for word in words if "=" not in word]
    if words == ["fixed"]:
        span = tuple(_number(v, text) for v in bounds.split(":")) if bounds else None
        if span is not None and len(span) != 2:
            raise ValueError(f"{shown(text)}: expected the bounds least:most, got {shown(bounds)}")
        return ScaledFormat(element_of(element, "fixed"), None, span, _known(options, ("scale",), text).get("scale"))
    if len(words) not in (3, 4) or bounds:
        raise ValueError(f"{shown(text)}: expected scaled(element;block,scale,how[,whole][,option])")
    block, scale, made, *whole = words
    wide = Format.parse(whole[0]) if whole else None
    extra = _known(options, ("percentile", "fit", "history", "margin"), text)
    if made == "delayed":
        extra = {"history": _HISTORY, **extra}
    for key in ("history", "margin"):
        if not float(extra.get(key, 0)).is_integer():
            raise ValueError(f"{shown(text)}: expected an integer for {key}, got {extra[key]}")
        extra |= {key: int(extra[key])} if key in extra else {}
    scaling = Scaling(_block(block, text), Format.parse(scale), made, wide, **extra)  # type: ignore[arg-type]
    return ScaledFormat(element_of(element, made), scaling)


def _options(words: list[str], text: str) -> dict[str, Any]:
    """Return ``key=number`` and ``fit=number:number`` as a dict; scales and fits to the nearest of binary32."""
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in given:
            raise ValueError(f"{shown(text)}: expected options as in percentile=99.9, each once, got {shown(word)}")
        numbers = tuple(_number(v, text) for v in value.split(":"))
        # Programs have scales in binary32.
        numbers = numbers if key in ("percentile", "zero") else tuple(map(_short, numbers))
        given[key] = numbers if key == "fit" else numbers[0]
    return given


def _known(options: dict[str, Any], names: tuple[str, ...], text: str) -> dict[str, Any]:
    """Return the options. Raises ValueError for one of another name."""
    others = set(options) - set(names)
    if others:
        raise ValueError(f"{shown(text)}: no option {', '.join(sorted(others))} here; known: {', '.join(names)}")
    return options


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{shown(whole)}: expected a finite number, got {shown(text)}")
    return value


def _short(value: float) -> float:
    """Return the nearest number of binary32, infinite beyond its range."""
    binary32 = FORMATS["binary32"]
    # Rational numbers: the processor's own conversion may flush subnormals to zero. ``round`` takes the even neighbour.
    unit = max(math.frexp(value)[1] - binary32.precision, binary32.quantum_exponent)
    quantum = Fraction(2) ** unit
    magnitude = round(Fraction(abs(value)) / quantum) * quantum
    return math.copysign(float(magnitude) if magnitude <= binary32.maximum else math.inf, value)


def _is_short(value: float) -> bool:
    """Whether a number is one of binary32."""
    return math.isfinite(value) and _short(value) == value


def _is_integer(element: Format) -> bool:
    """Whether a format's values are all integers up to 2^n - 1."""
    return element.quantum_exponent == 0 and element.maximum == 2.0**element.precision - 1


def _block(text: str, whole: str) -> Block:
    if text == "channel":
        return "channel"
    if text == "tensor":
        return "tensor"
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})?", text):
        raise ValueError(
            f"{shown(whole)}: a block is a size of at most 9 digits, as in 32 or 16x16, channel or tensor; got "
            f"{shown(text)}"
        )
    return tuple(int(n) for n in text.split("x"))
