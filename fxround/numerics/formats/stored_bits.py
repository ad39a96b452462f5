"""Significand bits alone: ``sbits(t)``, with the exponents of the dtype in which a value is stored.

The literature on climate models counts the t bits that are stored, without the implicit one, of a precision of t + 1:
``sbits(10)`` rounds a binary64 value to ``ieee(11,11)``, and a binary32 value to ``ieee(8,11)``. Source of the name:
Paxton, Chantry, Kloewer, Saffin and Palmer, Climate modeling in low precision: effects of both deterministic and
stochastic rounding, Journal of Climate 35, 2022.
"""

from __future__ import annotations

import re
from typing import Any, Final

from fxround.numerics.formats.rows import FORMATS

# The bits of the exponents of a dtype's format.
_EXPONENTS: Final = {"binary64": 11, "binary32": 8, "bfloat16": 8, "binary16": 5}
_WRITTEN: Final = re.compile(r"\bsbits\(\s*(-?[0-9]{1,4})\s*\)")


def has_stored_bits(text: Any) -> bool:
    """Whether a text of a rounding names a format by its stored bits."""
    return isinstance(text, str) and _WRITTEN.search(text) is not None


def with_stored_bits(text: str, dtype: str, at_most: bool = False) -> str:
    """Return the text with the formats of a dtype ("binary64") in place of ``sbits(t)``.

    at_most: a dtype that stores fewer bits keeps all of its own. Raises ValueError for a t that the dtype does not
    store, and for a dtype of 8 bits.
    """

    def format_of(written: re.Match[str]) -> str:
        bits = int(written[1])
        if dtype not in _EXPONENTS:
            raise ValueError(
                f"{written[0]} of {dtype} values: expected values of binary64, binary32, bfloat16 or binary16"
            )
        stored = FORMATS[dtype].precision - 1
        if at_most and stored < bits < FORMATS["binary64"].precision:
            return dtype
        if not 1 <= bits <= stored:
            raise ValueError(f"{written[0]} of {dtype} values, which have {stored} stored bits: expected 1 to {stored}")
        return dtype if bits == stored else f"ieee({_EXPONENTS[dtype]},{bits + 1})"

    return _WRITTEN.sub(format_of, text)
