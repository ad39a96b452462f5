"""The formats in which tensors store values: PyTorch's floating-point dtypes; and masks, which are only read.

float32 and float64 tensors are their own carriers. Values of 16 and 8 bits are read into binary32, where each of them
is exact, and are written from values that were rounded to them before: loading and storing never round. A mask's byte
is read as 0.0 or 1.0. The conversions are integer operators and one exact subtraction of normal binary32 numbers, so
flush-to-zero modes cannot change them, and they give the same bits on every target.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from fxround.numerics.arithmetic.scalar import Expr, Type, bits, const, from_bits, minimum, select
from fxround.numerics.formats import FORMATS, Format, Overflow
from fxround.numerics.formats.encodings import Encoding

# Storages of 16 bits, and of 8, which have the names of their formats.
Half = Literal["f16", "bf16"]
Quarter = Literal["e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu"]
Storage = Literal["f32", "f64", Half, Quarter, "mask"]

HALVES: Final[tuple[Half, ...]] = get_args(Half)
QUARTERS: Final[tuple[Quarter, ...]] = get_args(Quarter)
FORMAT_OF: Final[dict[Storage, Format]] = {
    "f32": FORMATS["binary32"],
    "f64": FORMATS["binary64"],
    "f16": FORMATS["binary16"],
    "bf16": FORMATS["bfloat16"],
    **{name: FORMATS[name] for name in QUARTERS},
    "mask": Format.custom(precision=1, emin=0, maximum=1.0, signed=False, inf=False, nan=False, subnormals=False),
}
# How PyTorch's conversions overflow, where that is not the format's default.
_OVERFLOWS: Final[dict[str, Overflow]] = {"e4m3fn": "saturate"}
# The bytes of an element in memory.
BYTES_OF: Final[dict[Storage, int]] = {
    "f32": 4,
    "f64": 8,
    **dict.fromkeys(HALVES, 2),
    **dict.fromkeys(QUARTERS, 1),
    "mask": 1,
}
# The IR type of a stored element: a code shorter than 32 bits is in the low part of a u32.
_ELEMENTS: Final[dict[int, Type]] = {1: "u32", 2: "u32", 4: "f32", 8: "f64"}
ELEMENT_OF: Final[dict[Storage, Type]] = {storage: _ELEMENTS[size] for storage, size in BYTES_OF.items()}
CARRIER_OF: Final[dict[Storage, Type]] = {s: "f64" if n == 8 else "f32" for s, n in BYTES_OF.items()}


def own_overflow(name: str) -> Overflow:
    """Return how PyTorch's conversion to a tensor of the format overflows."""
    return _OVERFLOWS.get(name, FORMATS[name].default_overflow)


def load(element: Expr, storage: Storage) -> Expr:
    """Return a stored element as a value of its carrier."""
    if storage in ("f32", "f64"):
        return element
    if storage == "bf16":
        return from_bits(element << 16)
    if storage == "mask":
        return select(element.equals(0), const("f32", 0.0), 1.0)
    if storage == "e8m0fnu":
        return _load_power(element)
    return _load_code(element, FORMAT_OF[storage])


def store(value: Expr, storage: Storage) -> Expr:
    """Return the stored element of a carrier's value, which must be a value of the storage's format already.

    Raises ValueError for a mask.
    """
    if storage == "mask":
        raise ValueError("a result cannot be stored as a mask: masks are read, never written")
    if storage in ("f32", "f64"):
        return value
    if storage == "bf16":
        return bits(value) >> 16
    if storage == "e8m0fnu":
        return _store_power(value)
    return _store_code(value, FORMAT_OF[storage])


def _nan_of(fmt: Format) -> int:
    """Return the code of a NaN: the one that PyTorch's conversions make."""
    top = 1 << Encoding(fmt).magnitude
    if not fmt.minus_zero:
        return top
    return top - (1 << (fmt.precision - 2)) if fmt.name == "binary16" else top - 1


def _load_code(code: Expr, fmt: Format) -> Expr:
    """Return the value of a code of at most 16 bits: a sign, and the number of the magnitude."""
    layout = Encoding(fmt)
    top, places = 1 << layout.magnitude, 24 - fmt.precision
    sign, ordinal = (code & top) << (31 - layout.magnitude), code & (top - 1)
    normal = (ordinal << places) + ((fmt.emin + 126) << 23)
    # Adding 2^emin turns a subnormal of k quanta into a normal binary32 number; the subtraction is exact.
    lifted = from_bits((ordinal << places) + ((fmt.emin + 127) << 23))
    finite = select(ordinal < (1 << layout.trailing), bits(lifted - 2.0**fmt.emin), normal)
    if not fmt.minus_zero:
        return from_bits(select(code.equals(top), const("u32", 0x7FC00000), sign | finite))
    # The field of ones is that of binary32's infinity and NaNs; a format without infinity has one NaN for each sign.
    widest = 255 - ((top - 1) >> layout.trailing)
    special = (ordinal << places) + (widest << 23) if fmt.inf else const("u32", 0x7FC00000)
    return from_bits(sign | select(ordinal < layout.last + 1, finite, special))


def _store_code(value: Expr, fmt: Format) -> Expr:
    """Return the code of at most 16 bits of a value of the format."""
    layout = Encoding(fmt)
    places, lowest = 24 - fmt.precision, fmt.emin + 127
    encoding = bits(value)
    sign, ordinal = (encoding >> (31 - layout.magnitude)) & (1 << layout.magnitude), encoding & 0x7FFFFFFF
    normal = (ordinal - ((lowest - 1) << 23)) >> places
    # In units of the least quantum, 2^(lowest - 127 - trailing), the significand s * 2^(field - 150) is
    # s >> (lowest + 23 - trailing - field).
    base = lowest + 23 - layout.trailing
    field = ordinal >> 23
    shift = minimum(select(field < base, base - field, 0), 31)
    subnormal = ((ordinal & 0x7FFFFF) | 0x800000) >> shift
    finite = select(ordinal < (lowest << 23), subnormal, normal)
    nan = const("u32", _nan_of(fmt))
    if not fmt.minus_zero:
        return select(ordinal > 0x7F800000, nan, select(finite.equals(0), finite, sign | finite))
    special = select(ordinal.equals(0x7F800000), const("u32", layout.last + 1), nan) if fmt.inf else nan
    return sign | select(ordinal < 0x7F800000, finite, special)


def _load_power(code: Expr) -> Expr:
    """Return 2^(code - 127), or NaN for 255. The code is the field of the exponent, but 2^-127 is subnormal."""
    finite = select(code.equals(0), const("u32", 0x400000), code << 23)
    return from_bits(select(code.equals(255), const("u32", 0x7FC00000), finite))


def _store_power(value: Expr) -> Expr:
    return (bits(value) >> 23) & 0xFF
