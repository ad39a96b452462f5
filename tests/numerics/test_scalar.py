"""The scalar IR: the meaning of operators, shared and folded expressions, errors, and listings."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxround.numerics.arithmetic import scalar
from fxround.numerics.arithmetic.scalar import (
    BITS_OF,
    DTYPES,
    OPS,
    WIDTH,
    Expr,
    Function,
    Type,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    is_nan,
    lookup,
    maximum,
    minimum,
    narrow,
    negate,
    param,
    select,
    signed_to_f32,
    signed_to_f64,
    sqrt,
    substitute,
    widen,
)
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact

INTEGERS: tuple[Type, ...] = ("u32", "u64")
FLOATS: tuple[Type, ...] = ("f32", "f64")
SPECIAL = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 2.0**-149, 2.0**-126, 1e30, -3e-30)


def run(result: Expr, **values: object) -> np.ndarray:
    """The value of an expression, its parameters by name."""
    params = tuple(param(name, type) for name, type in _free(result).items())
    return Function("run", params, (result,)).evaluate(*(values[str(p.attr)] for p in params))[0]  # type: ignore[arg-type]


def _free(node: Expr) -> dict[str, Type]:
    if node.op == "param":
        return {str(node.attr): node.type}
    return {k: v for a in node.args for k, v in _free(a).items()}


def encoding(value: float, type: Type) -> int:
    return int.from_bytes(struct.pack("<f" if type == "f32" else "<d", value), "little")


# ---- operators ----


@pytest.mark.parametrize("type", INTEGERS)
@given(data=st.data())
def test_integers_wrap_and_compare_unsigned(type: Type, data: st.DataObject) -> None:
    width = WIDTH[type]
    number = st.integers(0, 2**width - 1)
    a, b, n = data.draw(number), data.draw(number), data.draw(st.integers(0, width - 1))
    x, y, places = param("x", type), param("y", type), param("n", type)
    want = {
        x + y: (a + b) % 2**width,
        x - y: (a - b) % 2**width,
        x * y: a * b % 2**width,
        x & y: a & b,
        x | y: a | b,
        x ^ y: a ^ b,
        ~x ^ y: (2**width - 1 - a) ^ b,
        x.equals(y): a == b,
        x < y: a < b,
        x <= y: a <= b,
        x > y: a > b,
        x >= y: a >= b,
        minimum(x, y): min(a, b),
        maximum(x, y): max(a, b),
        7 - x + y: (7 - a + b) % 2**width,
    }
    for expression, value in want.items():
        assert run(expression, x=np.array(a, DTYPES[type]), y=np.array(b, DTYPES[type])) == value, expression
    assert run(x << places, x=np.array(a, DTYPES[type]), n=np.array(n, DTYPES[type])) == (a << n) % 2**width
    assert run(x >> places, x=np.array(a, DTYPES[type]), n=np.array(n, DTYPES[type])) == a >> n


@pytest.mark.parametrize("type", FLOATS)
def test_floats_are_ieee(type: Type) -> None:
    """Each operation is nearest-even of the exact value (the specification), on special and ordinary operands."""
    own = Rounding.parse("binary32" if type == "f32" else "binary64")
    kind = DTYPES[type]
    some = np.random.default_rng(0).standard_normal(20)
    values = np.array([*SPECIAL, *some, 1 + 2.0**-20], kind)
    a, b = (v.ravel() for v in np.meshgrid(values, values))
    x, y = param("x", type), param("y", type)
    got = {op: run(e, x=a, y=b) for op, e in {"+": x + y, "-": x - y, "*": x * y, "/": x / y}.items()}
    order = {"<": run(x < y, x=a, y=b), "<=": run(x <= y, x=a, y=b), "==": run(x.equals(y), x=a, y=b)}
    for i, (p, q) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        assert (order["<"][i], order["<="][i], order["=="][i]) == (p < q, p <= q, p == q)
        if not (math.isfinite(p) and math.isfinite(q)):
            continue
        exact = {"+": Fraction(p) + Fraction(q), "-": Fraction(p) - Fraction(q), "*": Fraction(p) * Fraction(q)}
        if q:
            exact["/"] = Fraction(p) / Fraction(q)
        for op, value in exact.items():
            if value:
                assert float(got[op][i]) == round_exact(value, value < 0, own), (p, op, q)
    assert math.copysign(1, float(run(x + y, x=kind(-0.0), y=kind(-0.0)))) == -1
    assert np.isnan(run(x - y, x=kind(math.inf), y=kind(math.inf)))
    assert run(x / y, x=kind(-1), y=kind(0.0)) == -math.inf


@pytest.mark.parametrize("type", FLOATS)
def test_sqrt_is_correctly_rounded(type: Type) -> None:
    kind, p = DTYPES[type], 24 if type == "f32" else 53
    values = np.abs(np.random.default_rng(1).standard_normal(200)).astype(kind)
    roots = run(sqrt(param("x", type)), x=values)
    for v, r in zip(values.tolist(), roots.tolist(), strict=True):
        half = Fraction(math.ulp(r) if type == "f64" else 2.0 ** (math.frexp(r)[1] - p)) / 2
        assert (Fraction(r) - half) ** 2 < Fraction(v) < (Fraction(r) + half) ** 2
    assert math.copysign(1, float(run(sqrt(param("x", type)), x=kind(-0.0)))) == -1
    assert np.isnan(run(sqrt(param("x", type)), x=kind(-1)))


def fma_exact(a: float, b: float, c: float, rounding: Rounding) -> float | None:
    """a * b + c over rationals; None if an operand is not finite or the result is a zero."""
    if not all(map(math.isfinite, (a, b, c))):
        return None
    value = Fraction(a) * Fraction(b) + Fraction(c)
    return round_exact(value, value < 0, rounding) if value else None


@pytest.mark.parametrize("type", FLOATS)
@settings(max_examples=300)
@given(data=st.data())
def test_fma_rounds_once(type: Type, data: st.DataObject) -> None:
    width = 32 if type == "f32" else 64
    own = Rounding.parse("binary32" if type == "f32" else "binary64")
    a, b = (data.draw(st.floats(width=width)) for _ in range(2))
    with np.errstate(all="ignore"):
        product = float(DTYPES[type](DTYPES[type](a) * DTYPES[type](b)))  # type: ignore[operator]
        near = [-product, math.nextafter(product, math.inf), product * 2.0**-24, -product * 2.0**-53]
        c = data.draw(st.floats(width=width) | st.sampled_from(near))
        c = float(DTYPES[type](c))  # type: ignore[call-arg]
    got = float(run(fma(param("a", type), param("b", type), param("c", type)), a=a, b=b, c=c))
    want = fma_exact(a, b, c, own)
    if want is not None:
        assert got.hex() == want.hex()


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize(
    "a, b, c, result",
    [
        (math.inf, 0.0, 1.0, math.nan),
        (0.0, -math.inf, math.nan, math.nan),
        (math.inf, 1.0, -math.inf, math.nan),
        (math.inf, -1.0, 5.0, -math.inf),
        (1e30, 1e30, -math.inf, -math.inf),  # the product overflows in binary32, the addend decides
        (2.0, 3.0, math.inf, math.inf),
        (2.0, 3.0, math.nan, math.nan),
        (1.0, -1.0, 1.0, 0.0),
        (0.0, -1.0, -0.0, -0.0),
        (0.0, 1.0, -0.0, 0.0),
        (-0.0, 1.0, 0.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (0.0, -1.0, 3.0, 3.0),
    ],
)
def test_fma_of_special_values(type: Type, a: float, b: float, c: float, result: float) -> None:
    got = float(run(fma(param("a", type), param("b", type), param("c", type)), a=a, b=b, c=c))
    assert got.hex() == result.hex()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("nudge", [2.0**-60, -(2.0**-60), 2.0**-100, -(2.0**-100)])
def test_fma_where_two_roundings_would_differ(sign: float, nudge: float) -> None:
    """(1 + 2^-12)^2 is a tie between binary32 numbers; an addend that binary64 loses decides it."""
    a, b = sign * (1 + 2.0**-12), 1 + 2.0**-12
    got = float(run(fma(param("a", "f32"), param("b", "f32"), param("c", "f32")), a=a, b=b, c=sign * nudge))
    assert got == sign * (1 + 2.0**-11 + (2.0**-23 if nudge > 0 else 0))
    assert float(np.float32(np.float64(a) * b + sign * nudge)) == sign * (1 + 2.0**-11)


@pytest.mark.parametrize("type", FLOATS)
def test_bits_and_signs(type: Type) -> None:
    x = param("x", type)
    values = np.array(SPECIAL, DTYPES[type])
    code = [encoding(float(v), type) for v in values]
    top = 1 << (WIDTH[type] - 1)
    assert run(bits(x), x=values).tolist() == code
    for result, want in (
        (from_bits(bits(x)), code),
        (absolute(x), [c & (top - 1) for c in code]),
        (negate(x), [c ^ top for c in code]),
    ):
        assert run(result, x=values).view(DTYPES[BITS_OF[type]]).tolist() == want
    assert run(is_nan(x), x=values).tolist() == [math.isnan(v) for v in values]


def test_conversions() -> None:
    assert run(widen(param("x", "u32")), x=2**32 - 1) == 2**32 - 1
    assert run(narrow(param("x", "u64")), x=2**40 + 5) == 5
    assert run(widen(param("x", "f32")), x=np.float32(0.1)) == float(np.float32(0.1))
    assert run(narrow(param("x", "f64")), x=1 + 2.0**-24) == 1.0
    assert run(narrow(param("x", "f64")), x=1 + 2.0**-24 + 2.0**-50) == np.float32(1 + 2.0**-23)
    assert run(narrow(param("x", "f64")), x=1e300) == math.inf
    assert run(signed_to_f64(param("x", "u64")), x=np.uint64(2**64 - 3)) == -3.0
    assert run(signed_to_f64(param("x", "u64")), x=np.uint64(2**53 + 1)) == 2.0**53
    assert run(signed_to_f32(param("x", "u32")), x=np.uint32(2**32 - 3)) == -3.0
    assert run(signed_to_f32(param("x", "u32")), x=np.uint32(2**24 + 1)) == 2.0**24


@pytest.mark.parametrize("count", [2, 16, 32, 64])
def test_a_lookup_takes_its_index_modulo_the_number_of_entries(count: int) -> None:
    x, entries = param("x", "u32"), [(j * 0x9E3779B9) % 2**32 for j in range(count)]
    index = np.array([0, 1, count - 1, count, 2**32 - 1, 12345], np.uint32)
    assert run(lookup(x, entries), x=index).tolist() == [entries[i % count] for i in index.tolist()]
    assert lookup(const("u32", count + 1), entries) is const("u32", entries[1])
    with pytest.raises(TypeError, match="lookup does not take"):
        lookup(x, entries[1:])


def test_select_takes_either_side_of_any_type() -> None:
    c = param("c", "bool")
    choose = np.array([True, False])
    assert run(select(c, const("u64", 2**63), 1), c=choose).tolist() == [2**63, 1]
    assert run(select(c, 1.5, const("f32", -0.0)), c=choose).tolist() == [1.5, 0.0]
    with pytest.raises(TypeError, match="at least one Expr"):
        select(c, 1, 2)


@pytest.mark.parametrize("type", INTEGERS)
@pytest.mark.parametrize("shift", ["shl", "shr"])
def test_a_shift_by_the_width_is_refused(type: Type, shift: str) -> None:
    x, n = param("x", type), param("n", type)
    result = x << n if shift == "shl" else x >> n
    for places in (WIDTH[type], WIDTH[type] + 5, 2**32 - 1):
        with pytest.raises(ValueError, match="a shift by the width or more is undefined on the targets"):
            run(result, x=1, n=np.array([0, places], DTYPES[type]))
    with pytest.raises(ValueError, match="a shift by the width or more"):
        const(type, 1) << WIDTH[type]


# ---- constants ----


@pytest.mark.parametrize("type", FLOATS)
def test_float_constants_keep_their_encoding(type: Type) -> None:
    for v in SPECIAL:
        value = float(DTYPES[type](v))  # type: ignore[call-arg]
        assert int(run(bits(const(type, value)))) == encoding(value, type)


@example(0.1)
@example(2.0**-150)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_constant_is_never_rounded_in_silence(value: float) -> None:
    with np.errstate(over="ignore"):
        exact = float(np.float32(value)) == value
    if exact:
        assert float(run(const("f32", value) + 0.0)) == value
    else:
        with pytest.raises((ValueError, OverflowError)):
            const("f32", value)


def test_integer_constants_are_folded_float_ones_are_not() -> None:
    assert (const("u32", 5) << 2) is const("u32", 20)
    assert (const("u32", 3) < 4) is const("bool", 1)
    assert const("u32", -1) is const("u32", 2**32 - 1)
    # The host's float unit is not asked at build time.
    assert (const("f32", 1.0) + 2.0).op == "fadd"
    assert bits(const("f32", 1.0)).op == "bits"


# ---- sharing, listing, digest ----


def test_equal_expressions_are_one_object() -> None:
    x, y = param("x", "u32"), param("y", "u32")
    assert (x + y) is (x + y)
    assert (x + y) is not (y + x)
    assert param("x", "u32") is x
    assert param("x", "u64") is not x
    assert select(x < y, x, x) is x
    assert select(const("bool", 1), x, y) is x


def test_types_are_checked() -> None:
    x, y, f = param("x", "u32"), param("y", "u64"), param("f", "f32")
    for wrong in (lambda: x + y, lambda: x / x, lambda: x + f, lambda: sqrt(x), lambda: bits(x), lambda: widen(y)):
        with pytest.raises(TypeError, match=r"scalar IR: \w+ does not take \("):
            wrong()
    with pytest.raises(TypeError, match="select does not take"):
        select(x, x, const("u32", 1))


def example_function() -> Function:
    x, y = param("x", "f32"), param("y", "u32")
    kept = (bits(x) >> 16) << 16
    return Function("truncate", (x, y), (from_bits(kept), select(y < 3, kept, 0xFF)))


def test_listing_golden() -> None:
    assert example_function().text() == (
        "truncate(%x: f32, %y: u32)\n"
        "  %1: u32 = bits %x\n"
        "  %2: u32 = shr %1, u32:0x10\n"
        "  %3: u32 = shl %2, u32:0x10\n"
        "  %4: f32 = from_bits %3\n"
        "  %5: bool = lt %y, u32:0x3\n"
        "  %6: u32 = select %5, %3, u32:0xff\n"
        "  return %4, %6"
    )


def test_digest_is_that_of_the_listing_and_nothing_else() -> None:
    """The digest is a constant: if it changed, cached kernels would be missed, or wrong ones found."""
    assert example_function().digest == example_function().digest
    assert example_function().digest == "f26c2ea2b3888b9b157a4872f3b6898a2b50d6aca5d54634edde1d182a35f87e"
    x = param("x", "u32")
    digests = {Function("f", (x,), (e,)).digest for e in (x + 1, x + 2, x - 1, x | 1, x)}
    assert len(digests) == 5
    assert Function("g", (x,), (x + 1,)).digest not in digests


def test_a_schedule_has_operands_before_users_once_each() -> None:
    x = param("x", "u32")
    y = x
    for _ in range(200):  # 2^200 paths, 201 nodes
        y = y + y
    function = Function("double", (x,), (y,))
    assert len(function.schedule) == 201
    assert all(function.schedule.index(a) < i for i, node in enumerate(function.schedule[:50]) for a in node.args)
    assert function.evaluate(1)[0] == 0


def test_a_function_declares_its_parameters() -> None:
    x, y = param("x", "u32"), param("y", "u32")
    with pytest.raises(ValueError, match=r"f: free parameters \['y'\], declared \['x'\]"):
        Function("f", (x,), (x + y,))
    with pytest.raises(TypeError, match="f takes 1 arrays, got 2"):
        Function("f", (x,), (x,)).evaluate(1, 2)


def test_evaluation_broadcasts() -> None:
    x, y = param("x", "u32"), param("y", "u32")
    got = Function("f", (x, y), (x + y,)).evaluate(np.arange(3)[:, None], np.arange(2))[0]
    assert got.dtype == np.uint32
    assert got.tolist() == [[0, 1], [1, 2], [2, 3]]


def test_substitute_inlines_and_folds() -> None:
    x, y = param("x", "u32"), param("y", "u32")
    f = select(x < 10, (x + 1) * y, y)
    assert substitute((f,), {x: const("u32", 4)}) == (const("u32", 5) * y,)
    assert substitute((f,), {x: const("u32", 40)}) == (y,)
    assert substitute((f, x), {y: x}) == (select(x < 10, (x + 1) * x, x), x)
    assert substitute((f,), {}) == (f,)


def test_every_operator_has_a_numpy_meaning() -> None:
    assert all(callable(row.numpy) and callable(row.types) for row in OPS.values())
    assert set(scalar.DTYPES) == set(scalar.WIDTH)
