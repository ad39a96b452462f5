"""Scaled formats: elements of a small format that share scales, such as MXFP8, NVFP4, int8 and fixed point.

A scaled rounding is an element format, a mode and an overflow, as any rounding, and a *scaling*: which elements share a
scale, and how the scale is made of the largest finite magnitude among them. With the scale s of its block, the value of
an element is R(x / s) * s: the quotient is rounded once, by the element's rounding, and the product once, to the
tensor's own format. A NaN stays a NaN in its place and an infinity overflows as the element's rounding says; neither
takes part in the scale. A scale that would be zero is the smallest positive value of its format.

Sources: OCP Microscaling Formats v1.0, sections 5 and 6; NVIDIA's description of NVFP4 (blocks of 16, E4M3 scales, one
binary32 scale for the tensor).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal

from fxround.errors import shown
from fxround.numerics.formats import FORMATS, Format, Overflow
from fxround.numerics.modes import MODES, Mode, Rounding

# How a scale is made of the largest magnitude m. With the element format's largest value M and the largest power of two
# 2^e in it: floor, ceil: m / 2^e, to the power of two below or above. even: floor of m rounded to the element's
# precision, ties away. up: m / M, to the scale format's value above. nearest: m / M, to nearest.
How = Literal["floor", "ceil", "even", "up", "nearest"]
_HOWS: Final = ("floor", "ceil", "even", "up", "nearest")
# Elements that share a scale: consecutive ones along a dimension, a tile of the last two dimensions, all along the
# given dimensions, or all of the tensor.
Block = tuple[int, ...] | Literal["channel", "tensor"]


@dataclass(frozen=True)
class Scaling:
    """Which elements share a scale, and how it is found.

    block       (n,): n consecutive elements along a dimension; (m, n): a tile of the last two dimensions; "channel":
                all along the dimensions given at the call; "tensor": all
    format      the format of the scale
    how         how it is made of the largest magnitude (``How``)
    whole       the format of a scale of the whole tensor, by which the block's scales are divided first; None for none
    """

    block: Block
    format: Format
    how: How
    whole: Format | None = None

    def __post_init__(self) -> None:
        if self.how not in _HOWS:
            raise ValueError(f"a scale is made by {', '.join(_HOWS)}, got {shown(self.how)}")
        if not isinstance(self.block, str) and (len(self.block) not in (1, 2) or min(self.block) < 1):
            raise ValueError(f"a block has one or two sizes of at least 1, got {shown(self.block)}")
        if isinstance(self.block, str) and self.block not in ("channel", "tensor"):
            raise ValueError(f"a block is sizes, channel or tensor, got {shown(self.block)}")
        if self.how in ("floor", "ceil", "even") and self.format.precision != 1:
            raise ValueError(f"{self.how} makes powers of two; {self.format} has other scales: use up or nearest")

    @property
    def rounding(self) -> Rounding:
        """The rounding of a quotient to a scale."""
        modes = {"floor": "toward_zero", "even": "toward_zero", "ceil": "toward_positive", "up": "toward_positive"}
        return Rounding(self.format, MODES[modes.get(self.how, "nearest_even")], "saturate")

    def divisor(self, element: Format) -> float:
        """The number by which the largest magnitude is divided."""
        return 2.0**element.emax if self.how in ("floor", "ceil", "even") else element.maximum

    def __str__(self) -> str:
        block = self.block if isinstance(self.block, str) else "x".join(map(str, self.block))
        whole = f",{self.whole}" if self.whole is not None else ""
        return f"{block},{self.format},{self.how}{whole}"


@dataclass(frozen=True)
class ScaledFormat:
    """An element format, the least value if it is not minus the largest, and a scaling (None: fixed point).

    ``ScaledFormat.parse(str(f)) == f``. ``name`` is how it is spelled, which does not count for equality.
    """

    element: Format
    scaling: Scaling | None
    lowest: float | None = None

    def __post_init__(self) -> None:
        if self.scaling is None or self.scaling.whole is None:
            return
        most = self.scaling.divisor(self.element) * self.scaling.format.maximum
        if not most <= min(self.scaling.whole.maximum, FORMATS["binary32"].maximum):
            raise ValueError(
                f"{self}: a scale of the tensor in {self.scaling.whole} cannot be relative to {most:.3g}, the largest "
                f"element times the largest scale of a block; leave {self.scaling.whole} out"
            )

    def __str__(self) -> str:
        lowest = "" if self.lowest is None else f";{self.lowest.hex()}"
        return f"scaled({self.element};{self.scaling or 'fixed'}{lowest})"

    @staticmethod
    def parse(text: str) -> ScaledFormat:
        """Parse a name of SCALED, with another block after a colon; int2 to int16, bfp(bits,block), fixed(...), or the
        full text ``scaled(element;block,scale,how[,whole][;lowest])``.

        Raises ValueError for anything else, with the nearest names.
        """
        found = _parsed(text.strip())
        if found is None:
            near = get_close_matches(text[:40], SCALED, n=2, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"no scaled format is named {shown(text)}{hint} Known: {', '.join(SCALED)}, int2 to int16, "
                "bfp(bits,block), fixed(bits,fraction), each but fixed with :block, :channel or :tensor"
            )
        return found


@dataclass(frozen=True)
class ScaledRounding:
    """A rounding to a scaled format: the mode and the overflow are those of its elements.

    ``ScaledRounding.parse(str(r)) == r``. Example::

        fxround.round(x, "mxfp8/stochastic", dim=-1, seed=1)
    """

    format: ScaledFormat
    mode: Mode
    overflow: Overflow

    def __post_init__(self) -> None:
        Rounding(self.format.element, self.mode, self.overflow)  # raises for an overflow that elements cannot have

    @property
    def element(self) -> Rounding:
        """The rounding of a quotient to an element."""
        return Rounding(self.format.element, self.mode, self.overflow)

    def __str__(self) -> str:
        return f"{self.format}/{self.mode}/{self.overflow}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (ScaledRounding.parse, (str(self),))

    @staticmethod
    def parse(text: str) -> ScaledRounding:
        """Parse ``scaled_format[/mode[/overflow]]``: to nearest even and saturating unless the text says otherwise.

        Raises ValueError, which names the part that is wrong.
        """
        parts = [p.strip() for p in text.split("/")]
        if len(parts) > 3:
            raise ValueError(f"{shown(text)} has {len(parts)} parts; expected format[/mode[/overflow]]")
        mode = Mode.parse(parts[1]) if len(parts) > 1 else MODES["nearest_even"]
        overflow: Any = parts[2] if len(parts) > 2 else "saturate"
        return ScaledRounding(ScaledFormat.parse(parts[0]), mode, overflow)


def any_rounding(text: Any) -> Rounding | ScaledRounding:
    """Parse a rounding to a scaled format or to any other; raises what ``Rounding.parse`` raises for neither."""
    if isinstance(text, ScaledRounding):
        return text
    if is_scaled(text):
        return ScaledRounding.parse(text)
    try:
        return Rounding.parse(text)
    except ValueError as error:
        near = get_close_matches(str(text).partition("/")[0][:40].lower(), SCALED, n=2, cutoff=0.6)
        if not near:
            raise
        raise ValueError(f"{error}; or a scaled format: did you mean {' or '.join(near)}?") from error


def is_scaled(text: Any) -> bool:
    """Whether a text names a scaled format, or a rounding to one."""
    return isinstance(text, str) and _parsed(text.partition("/")[0].strip()) is not None


def integers(bits: int) -> Format:
    """Return the integers -(2^(bits-1) - 1) to 2^(bits-1) - 1 as a format. Raises ValueError but for 2 to 53 bits."""
    return fixed_point(bits, 0)


def fixed_point(bits: int, fraction: int) -> Format:
    """Return the multiples of 2^-fraction of at most bits - 1 binary digits, with both signs, as a format.

    Raises ValueError for fewer than 2 or more than 53 bits, and for a fraction beyond 1000.
    """
    if not 2 <= bits <= 53 or abs(fraction) > 1000:
        raise ValueError(f"fixed point of {bits} bits and 2^{-fraction}: expected 2 to 53 bits, 2^-1000 to 2^1000")
    magnitude = bits - 1
    largest = (2.0**magnitude - 1) * 2.0**-fraction
    return Format.custom(precision=magnitude, emin=magnitude - 1 - fraction, maximum=largest, inf=False, nan=False)


_POWERS: Final = FORMATS["e8m0fnu"]


def _microscaled(element: Format) -> ScaledFormat:
    """A row of OCP Microscaling: blocks of 32, scales that are powers of two."""
    return ScaledFormat(element, Scaling((32,), _POWERS, "floor"))


# OCP Microscaling v1.0, table 1; NVFP4. mxint8's element is a fixed-point number with 6 fraction bits.
SCALED: Final = MappingProxyType(
    {
        "mxfp8": _microscaled(FORMATS["e4m3fn"]),
        "mxfp8_e4m3": _microscaled(FORMATS["e4m3fn"]),
        "mxfp8_e5m2": _microscaled(FORMATS["e5m2"]),
        "mxfp6": _microscaled(FORMATS["e2m3fn"]),
        "mxfp6_e2m3": _microscaled(FORMATS["e2m3fn"]),
        "mxfp6_e3m2": _microscaled(FORMATS["e3m2fn"]),
        "mxfp4": _microscaled(FORMATS["e2m1fn"]),
        "mxint8": _microscaled(fixed_point(8, 6)),
        "nvfp4": ScaledFormat(
            FORMATS["e2m1fn"], Scaling((16,), FORMATS["e4m3fn"], "nearest", whole=FORMATS["binary32"])
        ),
    }
)


def _parsed(text: str) -> ScaledFormat | None:
    """The format of a text; None for a text of another kind. Raises ValueError for wrong numbers in a known kind."""
    full = re.fullmatch(r"scaled\((.{1,8200})\)", text)
    if full:
        return _full(full[1], text)
    base, colon, block = text.partition(":")
    found = _named(base)
    if found is None or not colon:
        return found
    if found.scaling is None:
        raise ValueError(f"{shown(text)}: fixed point has no scale, and so no block")
    scaling = found.scaling
    return ScaledFormat(found.element, Scaling(_block(block, text), scaling.format, scaling.how, scaling.whole))


def _named(base: str) -> ScaledFormat | None:
    if base in SCALED:
        return SCALED[base]
    whole = re.fullmatch(r"int([0-9]{1,2})", base)
    if whole:
        if not 2 <= int(whole[1]) <= 16:
            raise ValueError(f"{shown(base)}: integers have 2 to 16 bits")
        return ScaledFormat(integers(int(whole[1])), Scaling("tensor", FORMATS["binary32"], "nearest"))
    floating = re.fullmatch(r"bfp\(([0-9]{1,2}),\s*([0-9]{1,6})\)", base)
    if floating:
        bits = int(floating[1])
        return ScaledFormat(fixed_point(bits, bits - 2), Scaling((int(floating[2]),), _POWERS, "floor"))
    fixed = re.fullmatch(r"fixed\(([0-9]{1,2}),\s*(-?[0-9]{1,4})\)", base)
    if fixed:
        bits, fraction = int(fixed[1]), int(fixed[2])
        held = fixed_point(bits, fraction)
        lowest = -(2.0 ** (bits - 1 - fraction))
        # One more value below: the format has it on both sides, and the program removes the one above.
        wide = Format.custom(precision=bits, emin=bits - 1 - fraction, maximum=-lowest, inf=False, nan=False)
        return ScaledFormat(wide, None, lowest if held.maximum < wide.maximum else None)
    return None


def _full(inside: str, text: str) -> ScaledFormat:
    element, _, rest = inside.partition(";")
    how, _, lowest = rest.partition(";")
    least = float.fromhex(lowest) if lowest else None
    if how == "fixed":
        return ScaledFormat(Format.parse(element), None, least)
    parts = re.split(r",(?![^()]*\))", how)
    if len(parts) not in (3, 4):
        raise ValueError(f"{shown(text)}: expected scaled(element;block,scale,how[,whole][;lowest])")
    block, scale, made, *whole = parts
    wide = Format.parse(whole[0]) if whole else None
    return ScaledFormat(Format.parse(element), Scaling(_block(block, text), Format.parse(scale), made, wide), least)  # type: ignore[arg-type]


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
