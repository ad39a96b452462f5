"""Scaled formats: elements of a small format that share scales, such as MXFP8, NVFP4, int8 and fixed point.

A scaled rounding is an element format, a mode and an overflow, as any rounding, and a *scaling*: which elements share a
scale, and how the scale is made of the largest finite magnitude among them. With the scale s of its block, the value of
an element is R(x / s) * s: the quotient is rounded once, by the element's rounding, and the product once, to the
tensor's own format. A NaN stays a NaN in its place and an infinity overflows as the element's rounding says; neither
takes part in the scale. A scale that would be zero is the smallest positive value of its format.

Sources: OCP Microscaling Formats v1.0, sections 5 and 6; NVIDIA's description of NVFP4 (blocks of 16, E4M3 scales, one
binary32 scale for the tensor).
"""

from fxround.numerics.formats.scaled.format import (
    OTHERS,
    ROOT_OF_TWO,
    SPELLINGS,
    ScaledFormat,
    ScaledRounding,
    Scaling,
    any_rounding,
    is_scaled,
)
from fxround.numerics.formats.scaled.names import short_name
from fxround.numerics.formats.scaled.rows import SCALED

__all__ = [
    "OTHERS",
    "ROOT_OF_TWO",
    "SCALED",
    "SPELLINGS",
    "ScaledFormat",
    "ScaledRounding",
    "Scaling",
    "any_rounding",
    "is_scaled",
    "short_name",
]
