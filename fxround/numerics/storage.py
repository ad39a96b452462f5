"""The formats in which tensors store values: float32, float64, float16 and bfloat16; and masks, which are only read.

float32 and float64 tensors are their own carriers. float16 and bfloat16 values are read into binary32, where each of
them is exact, and are written from values that were rounded to them before: loading and storing never round. A mask's
byte is read as 0.0 or 1.0. The conversions are integer operators and one exact subtraction of normal binary32 numbers,
so flush-to-zero modes cannot change them, and they give the same bits on every target.
"""

from __future__ import annotations

from typing import Final, Literal

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.scalar import Expr, Type, bits, const, from_bits, minimum, select

Storage = Literal["f32", "f64", "f16", "bf16", "mask"]

FORMAT_OF: Final[dict[Storage, Format]] = {
    "f32": FORMATS["binary32"],
    "f64": FORMATS["binary64"],
    "f16": FORMATS["binary16"],
    "bf16": FORMATS["bfloat16"],
    "mask": Format.custom(precision=1, emin=0, maximum=1.0, signed=False, inf=False, nan=False, subnormals=False),
}
# The IR type of a stored element: a code shorter than 32 bits is in the low part of a u32.
ELEMENT_OF: Final[dict[Storage, Type]] = {"f32": "f32", "f64": "f64", "f16": "u32", "bf16": "u32", "mask": "u32"}
CARRIER_OF: Final[dict[Storage, Type]] = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32", "mask": "f32"}


def load(element: Expr, storage: Storage) -> Expr:
    """Return a stored element as a value of its carrier."""
    if storage == "bf16":
        return from_bits(element << 16)
    if storage == "f16":
        return _load_binary16(element)
    if storage == "mask":
        return select(element.equals(0), const("f32", 0.0), 1.0)
    return element


def store(value: Expr, storage: Storage) -> Expr:
    """Return the stored element of a carrier's value, which must be a value of the storage's format already.

    Raises ValueError for a mask.
    """
    if storage == "mask":
        raise ValueError("a result cannot be stored as a mask: masks are read, never written")
    if storage == "bf16":
        return bits(value) >> 16
    if storage == "f16":
        return _store_binary16(value)
    return value


def _load_binary16(code: Expr) -> Expr:
    sign, ordinal = (code & 0x8000) << 16, code & 0x7FFF
    normal = (ordinal << 13) + (112 << 23)
    special = (ordinal << 13) + (224 << 23)
    # Adding 2^-14 turns a subnormal k * 2^-24 into 2^-14 + k * 2^-24, a normal binary32 number; the subtraction is
    # exact.
    subnormal = bits(from_bits((ordinal << 13) + (113 << 23)) - 2.0**-14)
    finite = select(ordinal < 0x400, subnormal, normal)
    return from_bits(sign | select(ordinal < 0x7C00, finite, special))


def _store_binary16(value: Expr) -> Expr:
    encoding = bits(value)
    sign, ordinal = (encoding >> 16) & 0x8000, encoding & 0x7FFFFFFF
    normal = (ordinal - (112 << 23)) >> 13
    special = select(ordinal.equals(0x7F800000), const("u32", 0x7C00), 0x7E00)
    # In units of 2^-24 the significand s * 2^(field - 150) is s >> (126 - field).
    field = ordinal >> 23
    places = minimum(select(field < 126, 126 - field, 0), 31)
    subnormal = ((ordinal & 0x7FFFFF) | 0x800000) >> places
    finite = select(ordinal < (113 << 23), subnormal, normal)
    return sign | select(ordinal < 0x7F800000, finite, special)
