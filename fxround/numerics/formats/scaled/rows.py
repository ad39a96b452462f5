"""The named scaled formats: one row each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.fixed_point import fixed_point
from fxround.numerics.formats.scaled.format import NAMED, POWERS, ScaledFormat, Scaling


def _microscaled(element: Format) -> ScaledFormat:
    """A row of OCP Microscaling: blocks of 32, scales that are powers of two."""
    return ScaledFormat(element, Scaling((32,), POWERS, "floor"))


# OCP Microscaling v1.0, table 1; NVFP4. mxint8's element is a fixed-point number with 6 fraction bits.
NAMED.update(
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
SCALED: Final = MappingProxyType(NAMED)
