"""The named formats and tables of values: one row each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fxround.numerics.formats.format import NAMED, NAMED_TABLES, Format

_FORMATS: Final[tuple[Format, ...]] = (
    Format("binary64", 53, -1022, float.fromhex("0x1.fffffffffffffp+1023")),
    Format("binary32", 24, -126, float.fromhex("0x1.fffffep+127")),
    Format("binary16", 11, -14, 65504.0),
    Format("bfloat16", 8, -126, float.fromhex("0x1.fep+127")),
    # NVIDIA TensorFloat-32: binary32's exponent, binary16's significand.
    Format("tf32", 11, -126, float.fromhex("0x1.ffcp+127")),
    # OCP 8-bit floating point 1.0: e5m2 is IEEE style; e4m3fn uses the codes of inf for one more binade.
    Format("e5m2", 3, -14, 57344.0),
    Format("e4m3fn", 4, -6, 448.0, inf=False),
    Format("e4m3", 4, -6, 240.0),
    # Graphcore and AMD: the code of minus zero is the only NaN, and every other code a finite number.
    Format("e5m2fnuz", 3, -15, 57344.0, inf=False, minus_zero=False),
    Format("e4m3fnuz", 4, -7, 240.0, inf=False, minus_zero=False),
    Format("e4m3b11fnuz", 4, -10, 30.0, inf=False, minus_zero=False),
    # OCP Microscaling 1.0, element formats: neither inf nor NaN.
    Format("e3m2fn", 3, -2, 28.0, inf=False, nan=False),
    Format("e2m3fn", 4, 0, 7.5, inf=False, nan=False),
    Format("e2m1fn", 2, 0, 6.0, inf=False, nan=False),
    # Scales: powers of two (OCP Microscaling 1.0), and the unsigned e5m3 with its last code a NaN.
    Format("e8m0fnu", 1, -127, 2.0**127, signed=False, inf=False, zero=False, subnormals=False),
    Format("ue5m3", 4, -14, 114688.0, signed=False, inf=False),
)

# Dettmers et al., "QLoRA: Efficient finetuning of quantized LLMs", NeurIPS 2023, appendix E: the binary32 numbers of
# bitsandbytes.
_NF4: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TABLES: Final = [
    Format.table(_NF4, name="nf4"),
]

NAMED.update({row.name: row for row in _FORMATS})
NAMED_TABLES.update({row.name: row for row in _TABLES})
FORMATS: Final = MappingProxyType(NAMED)
TABLES: Final = MappingProxyType(NAMED_TABLES)
