"""Steps in binary32 have the bits of the general steps in binary64 wherever they say that a chain may go on.

The functions run as the C++ of the GPU (``cuda_host``), since NumPy has no fused multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from cuda_host import Functions, built
from neighbours import Array, encodings

from fxround.kernels.contractions import contract_kernel
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import chain_kernel, scatter_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order

STEPS = ["binary32/stochastic", "binary32/up_down"]
COUNT = 1 << 17
CORNERS = np.array(
    [
        *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x127FFFFF, 0x12800000, 0x33800000, 0x34000000),
        *(0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x4B800000, 0x7E7FFFFF, 0x7E800000, 0x7F7FFFFF, 0x7F800000),
        *(0x7F800001, 0x7FC00000, 0x7FFFFFFF),
    ],
    np.uint32,
)
WORDS = np.array([0, 1, 7, 8, 0x1FF, 0x200, 0x7FFFFFFF, 0x80000000, 0xFFFFFDFF, 0xFFFFFFF7, 0xFFFFFFFF], np.uint32)


@pytest.fixture(scope="module")
def functions(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Functions:
    """The step of each kernel, and that in binary32."""
    found = {}
    for step in STEPS:
        general = contract_kernel(Accumulation.parse(step), Rounding.parse("binary32"), ("f32", "f32"), "f32")
        assert general.single is not None
        found |= {step: general.step, f"{step}, single": general.single.step}
        sums = chain_kernel(Order("lanes", 16), step, Rounding.parse("binary32"), "f32", "f32")
        rows = scatter_kernel(Rounding.parse(step), "f32")
        for kernel, roles in ((sums, ("step", "combine", "finish")), (rows, ("lift",))):
            assert kernel.single is not None
            for role in roles:
                found |= {f"{step} {role}": getattr(kernel, role)}
                found |= {f"{step} {role}, single": getattr(kernel.single, role)}
        for operator in ("add", "sub", "mul"):
            value = map_kernel(Program.parse(f"t0 = {operator}(x0, x1) @ {step}"), ("f32", "f32"), "f32")
            assert value.single is not None
            found |= {f"{step} {operator}": value.body, f"{step} {operator}, single": value.single.body}
    return built(found, compiler, tmp_path_factory.mktemp("steps"))


def words(rng: np.random.Generator) -> Array:
    return np.where(rng.random(COUNT) < 0.5, rng.integers(0, 2**32, COUNT, dtype=np.uint64), rng.choice(WORDS, COUNT))


def any_encodings(rng: np.random.Generator) -> tuple[Array, ...]:
    return tuple(rng.integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(3))


def ordinary(rng: np.random.Generator) -> tuple[Array, ...]:
    a, b, acc = (rng.standard_normal(COUNT) for _ in range(3))
    return a, b, acc * np.exp2(rng.integers(-30, 30, COUNT))


def cancelling(rng: np.random.Generator) -> tuple[Array, ...]:
    """Sums of a few quanta of the product, or of less than one."""
    a, b = (rng.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    return a, b, rng.integers(-3, 4, COUNT) * np.spacing(a * b) - a * b


def integers(rng: np.random.Generator) -> tuple[Array, ...]:
    """Exact sums, zeros among them."""
    a, b, acc = (rng.integers(-8, 9, COUNT) for _ in range(3))
    return a, b, acc * a


def powers(rng: np.random.Generator) -> tuple[Array, ...]:
    """Sums next to a power of two, on both sides."""
    a, b = rng.standard_normal(COUNT) * 2.0**-22, rng.standard_normal(COUNT)
    return a, b, np.exp2(rng.integers(-3, 3, COUNT)) * rng.choice([-1.0, 1.0], COUNT)


def next_to_integers(rng: np.random.Generator) -> tuple[Array, ...]:
    """What is lost is a few 2^-29 of a quantum from half of one, or from none."""
    a = 1 + rng.integers(0, 4, COUNT) * 2.0**-23
    b = (rng.choice([1.0, 2.0], COUNT) + rng.integers(-4, 4, COUNT) * 2.0**-22) * 2.0**-25
    return a, b, (1 + rng.integers(0, 2**23, COUNT) * 2.0**-23) * rng.choice([-1.0, 1.0], COUNT)


def corners(_: np.random.Generator) -> tuple[Array, ...]:
    signed = np.concatenate([CORNERS, CORNERS | np.uint32(1 << 31)])
    found = np.array(list(product(signed, repeat=3)), np.uint32)
    return tuple(np.resize(found[:, i], COUNT).view(np.float32) for i in range(3))


SOURCES: dict[Callable[..., tuple[Array, ...]], float] = {
    any_encodings: 0.7,
    ordinary: 1.0,
    cancelling: 0.9,
    integers: 1.0,
    powers: 1.0,
    next_to_integers: 1.0,
    corners: 0.3,
}


@pytest.mark.part(3)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_has_the_bits_of_the_general_one(
    functions: Functions, step: str, source: Callable[..., tuple[Array, ...]]
) -> None:
    rng = np.random.default_rng(5)
    with np.errstate(all="ignore"):
        a, b, acc = (x.astype(np.float32) for x in source(rng))
        # A chain has sums within the range, and zero.
        within = (np.abs(acc) >= 2.0**-90) & (np.abs(acc) < 2.0**126)
        acc, random = np.where(within, acc, np.float32(0)), words(rng).astype(np.uint32)
        (want,) = functions.run(step, *(x.astype(np.float64) for x in (a, b, acc)), random)
        got, inside = functions.run(f"{step}, single", a, b, acc, random)
    assert np.mean(inside) >= SOURCES[source]
    np.testing.assert_array_equal(got.astype(np.float64).view(np.uint64)[inside], want.view(np.uint64)[inside])
    assert np.all((got[inside] == 0) | (np.abs(got[inside]) >= 2.0**-91) & (np.abs(got[inside]) <= 2.0**126))


def test_a_stochastic_step_is_the_specification(functions: Functions) -> None:
    """Over rational numbers: the sum of 53 bits and 29 random ones, cut to 24 bits."""
    rng = np.random.default_rng(6)
    for source in (ordinary, cancelling, powers, next_to_integers):
        a, b, acc = (x[:1000].astype(np.float32) for x in source(rng))
        random = words(rng)[:1000].astype(np.uint32)
        got, inside = functions.run("binary32/stochastic, single", a, b, acc, random)
        for i in np.flatnonzero(inside):
            assert got[i] == drawn(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(acc[i])), random[i])


def accumulators(rng: np.random.Generator, values: Array) -> tuple[Array, Array]:
    """Values of 24 bits in binary64 and as sums hold them; some are out of binary32's range."""
    wide = values.astype(np.float64) * np.where(rng.random(COUNT) < 0.1, np.exp2(rng.integers(-300, 300, COUNT)), 1.0)
    return wide, held(wide)


def held(wide: Array) -> Array:
    magnitude = np.abs(wide)
    near = (magnitude >= 2.0**-90) & (magnitude < 2.0**126) | (wide.view(np.uint64) == 0)
    codes = wide.astype(np.float32).view(np.uint32).astype(np.uint64)
    return np.where(near, codes.view(np.float64), wide)


def values_of(accumulators: Array) -> Array:
    codes = accumulators.view(np.uint64)
    return np.where(codes >> 32 == 0, codes.astype(np.uint32).view(np.float32).astype(np.float64), accumulators)


def assert_same(got: Array, want: Array) -> None:
    """The encodings are equal, with one for all NaNs."""
    got, want = (np.where(np.isnan(x), x.dtype.type(np.nan), x) for x in (got, want))
    np.testing.assert_array_equal(encodings(got), encodings(want))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("step", STEPS)
def test_a_sum_has_the_bits_of_the_general_one(
    functions: Functions, step: str, source: Callable[..., tuple[Array, ...]]
) -> None:
    """The addition of an element and of another accumulator, the store, and a destination as an accumulator."""
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        a, b, acc = (x.astype(np.float32) for x in source(rng))
        x, random = a * b, words(rng).astype(np.uint32)
        wide, sums = accumulators(rng, acc)
        others = accumulators(rng, x)
        for role, operands in (("step", (x, x)), ("combine", others)):
            (want,) = functions.run(f"{step} {role}", wide, operands[0], random)
            (got,) = functions.run(f"{step} {role}, single", sums, operands[1], random)
            assert_same(values_of(got), want)
            # Sums return to binary32; those that a step takes out of the range may still be in it.
            well_inside = (np.abs(want) >= 2.0**-89) & (np.abs(want) < 2.0**125)
            assert np.all(got.view(np.uint64)[well_inside] >> 32 == 0)
        (want,), (got,) = (
            functions.run(f"{step} finish", wide, random),
            functions.run(f"{step} finish, single", sums, random),
        )
        assert_same(got, want)
        (lifted,) = functions.run(f"{step} lift, single", acc)
        assert_same(lifted, held(acc.astype(np.float64)))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("step", STEPS)
def test_a_value_of_a_map_has_the_bits_of_the_general_one(
    functions: Functions, step: str, source: Callable[..., tuple[Array, ...]]
) -> None:
    rng = np.random.default_rng(8)
    with np.errstate(all="ignore"):
        a, b, acc = (x.astype(np.float32) for x in source(rng))
        random = words(rng).astype(np.uint32)
        for operator, x, y in (("add", a * b, acc), ("sub", acc, a * b), ("mul", a, b), ("mul", a, acc)):
            (want,) = functions.run(f"{step} {operator}", x, y, random)
            (got,) = functions.run(f"{step} {operator}, single", x, y, random)
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def drawn(value: Fraction, random: int) -> float:
    """A sum rounded to 53 bits, to nearest even, then to 24 bits by the 29 highest random bits."""
    if value == 0:
        return 0.0
    # float() of a fraction rounds to nearest even.
    nearest = Fraction(float(value))
    magnitude, sign = abs(nearest), -1 if nearest < 0 else 1
    quantum = Fraction(2) ** (math.frexp(float(magnitude))[1] - 24)
    whole, rest = divmod(magnitude / quantum, 1)
    return float(sign * quantum * (whole + (rest * 2**29 + (int(random) >> 3) >= 2**29)))
