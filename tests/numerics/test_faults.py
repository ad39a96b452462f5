"""Faults flip bits of the encodings that other packages have, as the random word says."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from neighbours import ALL_FORMATS

from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.faults import Fault, Faults, flip_operator, numbers_of, words_per_bit
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.encodings import FIELDS, Encoding
from fxround.numerics.formats.fixed_point import fixed_point, integers
from fxround.numerics.formats.scaled import ScaledFormat
from fxround.numerics.specification.exact_faults import code_of, flip, value_of

# The encodings of formats elsewhere, and the unsigned integers of their codes.
ELSEWHERE = {
    "binary64": (np.float64, np.uint64),
    "binary32": (np.float32, np.uint32),
    "binary16": (np.float16, np.uint16),
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "e5m2": (ml_dtypes.float8_e5m2, np.uint8),
    "e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
    "e4m3": (ml_dtypes.float8_e4m3, np.uint8),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, np.uint8),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, np.uint8),
    "e4m3b11fnuz": (ml_dtypes.float8_e4m3b11fnuz, np.uint8),
    "e3m2fn": (ml_dtypes.float6_e3m2fn, np.uint8),
    "e2m3fn": (ml_dtypes.float6_e2m3fn, np.uint8),
    "e2m1fn": (ml_dtypes.float4_e2m1fn, np.uint8),
    "e8m0fnu": (ml_dtypes.float8_e8m0fnu, np.uint8),
}
P3109 = [Format.parse(name) for name in ("binary8p3se", "binary8p3sf", "binary8p4ue", "binary8p1uf", "binary4p2sf")]
ZERO_POINTS = ("uint8:scale=0.5,zero=131", "int8:scale=0.5,zero=3", "uint4:channel", "ufixed(5,7)")
SPANS = ("fixed(8,4)", "fixed(2,0)", "fixed(25,3)", "fixed(53,10)", "ufixed(53,-3)", *ZERO_POINTS)
TABLES = ("nf4", "table(-1,0,1)", "table(-3,1e-30,0.5,7)")
POSITS = ("posit(3,0)", "posit(8,2)", "posit(5,3)", "posit(16,1)", "posit(32,2)", "posit(20,4)")
OTHERS = [
    *(Encoding.of_elements(ScaledFormat.parse(text)) for text in SPANS),
    *(Encoding(Format.parse(text)) for text in (*TABLES, *POSITS, "e8m0fnu")),
    Encoding(fixed_point(8, 0), (-100.0, 100.0)),  # no power of two: two's complement
]
WITH_ZERO = [fmt for fmt in (*ALL_FORMATS, *P3109) if fmt.zero and fmt.emin >= -1022]
INTEGERS = [integers(2), integers(3), integers(8), integers(16), fixed_point(8, 6), fixed_point(12, -3)]
RANDOM = np.random.default_rng(0)


def said(encoding: Encoding) -> str:
    return f"{encoding.format.said[:30]} {encoding.span or ''}"


def codes(fmt: Format | Encoding) -> list[int]:
    """Every code of a small format; else those at the ends of fields, and some at random."""
    encoding = fmt if isinstance(fmt, Encoding) else Encoding(fmt)
    width, last = encoding.field("any")[1], encoding.last if encoding.format.is_grid else 0
    if width <= 10:
        return list(range(1 << width))
    ends = {c + d for b in range(width + 1) for c in (1 << b, last, last + 1) for d in (-1, 0, 1)}
    ends |= {int(c) % (1 << width) for c in RANDOM.integers(0, 1 << 62, 60)}
    return sorted({c % (1 << width) for c in ends} | {c % (1 << width) | 1 << width - 1 for c in ends})


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_codes_are_those_of_other_packages(name: str) -> None:
    fmt, (dtype, unsigned) = FORMATS[name], ELSEWHERE[name]
    for code in codes(fmt):
        value = float(np.array([code], unsigned).view(dtype)[0])
        assert same(value_of(code, fmt), value), (code, value)
        if not math.isnan(value):
            assert code_of(value, fmt) == code


@pytest.mark.parametrize("fmt", WITH_ZERO, ids=str)
def test_a_code_is_the_number_of_its_magnitude(fmt: Format) -> None:
    """For formats that no package has: value and code are inverse, and magnitudes ascend with their codes."""
    encoding = Encoding(fmt)
    found = [c for c in codes(fmt) if c <= encoding.last]
    values = [value_of(c, fmt) for c in found]
    assert values == sorted(values) and value_of(encoding.last, fmt) == fmt.maximum
    assert [code_of(v, fmt) for v in values] == [c if v else 0 for c, v in zip(found, values, strict=True)]
    if fmt.subnormals and fmt.precision <= 4:
        assert [value_of(c, fmt) for c in range(encoding.last + 1)] == list(fmt.magnitudes())
    assert bool(np.all(fmt.contains(values)))


def kernel(encoding: Encoding, operator: str, carrier: str, values: list[float], randoms: list[int]) -> list[float]:
    """The NumPy rendering of the kernel of one fault."""
    fmt = encoding.format
    operands = ", ".join(["x0", *(bound.hex() for bound in encoding.span or ())])
    text = f"t0 = {operator}({operands}) @ {fmt}/stochastic/{fmt.default_overflow}"
    body = map_kernel(Program.parse(text), (carrier,), carrier).body  # type: ignore[arg-type]
    dtype = np.float32 if carrier == "f32" else np.float64
    (found,) = body.evaluate(np.array(values, dtype), np.array(randoms, np.uint32))
    return [float(v) for v in found]


def test_every_field_has_bits_in_some_encoding() -> None:
    encodings = [*map(Encoding, (*WITH_ZERO, *INTEGERS)), *OTHERS]
    assert {name for e in encodings for name, (_, count) in e.fields.items() if count} == set(FIELDS)


@pytest.mark.part(9)
@pytest.mark.parametrize("encoding", [*map(Encoding, (*WITH_ZERO, *INTEGERS)), *OTHERS], ids=said)
def test_the_kernel_flips_what_the_specification_flips(encoding: Encoding) -> None:
    """Every bit of every field, of every value of a small format, with words at the ends of each bit's range."""
    fmt = encoding.format
    held = [v for c in codes(encoding) if not math.isnan(v := value_of(c, encoding))] + [math.nan]
    carriers = [c for c, least in (("f32", "binary32"), ("f64", "binary64")) if fmt.within(FORMATS[least])]
    for field in FIELDS:
        try:
            first, count = encoding.field(field)
        except ValueError:
            continue
        for probability in (1.0, 0.3, 1e-3):
            operator = flip_operator(Fault(field, probability), encoding)
            numbers = numbers_of(operator)
            assert numbers is not None and numbers[:2] == (first, count)
            q = numbers[2]
            words = [0, 1, q - 1, q % 2**32, (q * count - 1) % 2**32, q * count % 2**32, 2**32 - 1]
            words += [int(RANDOM.integers(0, 2**32)) for _ in range(3)] + [i * q for i in range(0, count, 3)]
            values = [v for v in held[:: 1 + len(held) // 150] for _ in words]
            drawn = words * (len(values) // len(words))
            expected = [flip(v, encoding, numbers, r) for v, r in zip(values, drawn, strict=True)]
            for carrier in carriers:
                if fmt.zero and fmt.emin < (-126 if carrier == "f32" else -1022):
                    continue
                found = kernel(encoding, operator, carrier, values, drawn)
                wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not same(a, b)]
                assert not wrong, (field, values[wrong[0]], drawn[wrong[0]], found[wrong[0]], expected[wrong[0]])


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integers_flip_in_two_s_complement(fmt: Format) -> None:
    """Python's integers have as many sign bits as anyone asks for; the sign's bit can make the least number."""
    quantum, width = 2.0**fmt.quantum_exponent, Encoding(fmt).magnitude + 1
    assert fmt.maximum == ((1 << width - 1) - 1) * quantum
    assert [Encoding(fmt).field(name) for name in ("significand", "sign")] == [(0, width - 1), (width - 1, 1)]
    for number in {0, 1, -1, (1 << width - 1) - 1, 1 - (1 << width - 1), -(1 << width - 1)}:
        for bit in range(width):
            code = (number ^ 1 << bit) % (1 << width)
            want = code - (1 << width) if code >> width - 1 else code
            assert flip(number * quantum, fmt, (bit, 1, 1 << 32), 0) == want * quantum
    with pytest.raises(ValueError, match="no bits of the exponent"):
        Encoding(fmt).field("exponent")


def test_each_bit_is_as_likely_as_any_other() -> None:
    fmt, fault = FORMATS["e4m3fn"], Fault("any", 0.75)
    q = words_per_bit(fault, 8)
    for bit in range(8):
        words = (bit * q, bit * q + q - 1)
        assert [code_of(flip(1.5, fmt, (0, 8, q), r), fmt) ^ code_of(1.5, fmt) for r in words] == [1 << bit] * 2
    assert flip(1.5, fmt, (0, 8, q), 8 * q) == 1.5
    assert Fraction(8 * q, 2**32) == Fraction(3, 4)


def test_special_codes() -> None:
    e4m3fn, e5m2, four = FORMATS["e4m3fn"], FORMATS["e5m2"], FORMATS["e2m1fn"]
    assert math.isnan(flip(448.0, e4m3fn, (0, 1, 2**32), 0))  # the last code
    assert flip(49152.0, e5m2, (0, 2, 1 << 31), 1 << 31) == 32768.0  # 0 11110 10 -> 0 11110 00
    assert flip(32768.0, e5m2, (2, 1, 2**32), 5) == math.inf  # 0 11110 00 -> 0 11111 00
    assert flip(math.inf, e5m2, (2, 1, 2**32), 5) == 32768.0
    assert math.isnan(flip(math.inf, e5m2, (0, 1, 2**32), 5))
    assert flip(0.0, four, (3, 1, 2**32), 9) == 0.0 and math.copysign(1, flip(0.0, four, (3, 1, 2**32), 9)) == -1
    assert math.isnan(flip(0.0, FORMATS["e4m3fnuz"], (7, 1, 2**32), 9))


@pytest.mark.parametrize("fmt", P3109, ids=str)
def test_codes_of_p3109(fmt: Format) -> None:
    """The NaN has the code of minus zero, or the last one without a sign; infinity follows the maximum."""
    encoding, bits = Encoding(fmt), int(fmt.name[6])
    assert encoding.magnitude + fmt.signed == bits
    nans = [code for code in range(1 << bits) if math.isnan(value_of(code, fmt))]
    assert nans == ([1 << (bits - 1)] if fmt.signed else [(1 << bits) - 1])
    finite = sorted(value_of(c, fmt) for c in range(1 << bits) if math.isfinite(value_of(c, fmt)))
    assert finite == sorted({v * s for v in fmt.magnitudes() for s in ((1.0, -1.0) if fmt.signed else (1.0,))})


def test_texts() -> None:
    faults = Faults.parse("significand:1e-6  sign:0.5")
    assert str(faults) == "significand:1e-06 sign:0.5" and Faults.parse(str(faults)) == faults
    for text, message in (
        ("mantissa:1e-3", "no field is named 'mantissa'; expected significand, exponent, sign, any"),
        ("sign:2", "the probability is 2.0; expected 0 to 1"),
        ("sign:nan", "the probability is nan"),
        ("sign:much", "'much' is no probability; expected sign:1e-6"),
        ("sign", "'' is no probability"),
        ("sign:0.1 sign:0.2", "each field once"),
        ("", "expected faults like"),
    ):
        with pytest.raises(ValueError, match=message):
            Faults.parse(text)
    with pytest.raises(ValueError, match="each field once"):
        Faults((Fault("sign", 0.1), Fault("sign", 0.2)))
    with pytest.raises(ValueError, match=r"can flip with probability 1\.86e-09, the smallest"):
        words_per_bit(Fault("any", 1e-10), 8)
    assert words_per_bit(Fault("any", 0.0), 8) == 0
    with pytest.raises(ValueError, match="ue5m3 has no bits of the sign"):
        Encoding(FORMATS["ue5m3"]).field("sign")
    with pytest.raises(ValueError, match="has no zero and several digits"):
        Encoding(Format.custom(precision=2, emin=-3, maximum=8.0, zero=False))
    for text, message in (
        ("nf4", "nf4 has no bits of the sign: the code of a table's value is its position; write any:"),
        ("posit8", "has no bits of the exponent: the fields of a posit begin where its regime ends; write sign: or"),
        ("uint4", "has no bits of the exponent: it consists of integers or fixed point, which have significand, any"),
    ):
        fmt = ScaledFormat.parse(f"{text}:32" if text == "uint4" else f"scaled({text};fixed)")
        with pytest.raises(ValueError, match=message):
            Encoding.of_elements(fmt).field("sign" if text == "nf4" else "exponent")
    faults = Faults.parse("any:0.1 scale.exponent:0.25")
    assert str(faults) == "any:0.1 scale.exponent:0.25" and [f.part for f in faults.of_scales] == ["exponent"]
    with pytest.raises(ValueError, match=r"no field is named 'scale\.much'"):
        Faults.parse("scale.much:0.1")


def test_the_codes_of_fixed_point_and_zero_points_are_the_words_that_memory_holds() -> None:
    """NumPy's integers of 8 bits are the words: two's complement, and the stored integer with a zero point."""
    for bit in range(8):
        fixed = Encoding.of_elements(ScaledFormat.parse("fixed(8,4)"))
        for text, dtype, zero in (("uint8:scale=0.5,zero=131", np.uint8, 131), ("int8:scale=0.5,zero=3", np.int8, 3)):
            affine, ends = Encoding.of_elements(ScaledFormat.parse(text)), np.iinfo(dtype)
            for stored in range(ends.min, ends.max + 1):
                word = (np.array([stored], dtype).view(np.uint8) ^ np.uint8(1 << bit)).view(dtype)
                assert flip(stored - zero, affine, (bit, 1, 1 << 32), 0) == int(word[0]) - zero
        for stored in range(-128, 128):
            word = (np.array([stored], np.int8).view(np.uint8) ^ np.uint8(1 << bit)).view(np.int8)
            assert flip(stored / 16, fixed, (bit, 1, 1 << 32), 0) == int(word[0]) / 16


def test_the_code_of_a_table_is_a_position_and_that_of_a_posit_its_own() -> None:
    """QLoRA's codes: -1 is 0, 0 is 7 and 1 is 15. A code that the table lacks is its last value. 2022's posits."""
    nf4, three, posit = (Format.parse(text) for text in ("nf4", "table(-1,0,1)", "posit(8,2)"))
    assert [code_of(v, nf4) for v in (-1.0, 0.0, 1.0)] == [0, 7, 15]
    assert flip(0.0, nf4, (3, 1, 1 << 32), 0) == 1.0 and flip(0.0, three, (1, 1, 1 << 32), 0) == 1.0
    assert [code_of(v, posit) for v in (0.0, 1.0, -1.0, 2.0**24, -(2.0**-24))] == [0, 0x40, 0xC0, 0x7F, 0xFF]
    assert math.isnan(flip(0.0, posit, (7, 1, 1 << 32), 0)) and flip(1.0, posit, (7, 1, 1 << 32), 0) == -1.0
