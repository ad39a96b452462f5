"""Rounding by one addition: values, midpoints and their neighbours, and quotients and products beside ties."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fxround
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.forms import short as short_rounding
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact, round_float
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_kernel, run_map

ROUNDINGS = [
    *("e4m3fn/nearest_even/saturate", "e4m3fn/nearest_even/nan", "e5m2/nearest_even/inf", "e5m2/nearest_even/saturate"),
    *("e2m1fn/nearest_even/saturate", "binary16/nearest_even/inf", "ieee(3,4)/nearest_even/saturate"),
    # 22 bits, the most that the algorithm takes, and the integers of int8.
    *(
        "custom(22,-20,0x1.0p+15,signed+zero)/nearest_even/saturate",
        "custom(7,6,0x1.fcp+6,signed+zero)/nearest_even/saturate",
    ),
]
EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "div": operator.truediv,
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
}


def edges(rounding: Rounding, rng: np.random.Generator, dtype: Any = np.float32) -> Tensor:
    """Values of the format, midpoints of neighbours, the numbers of the dtype beside both, and what is special."""
    fmt = rounding.format
    exponents = rng.integers(fmt.emin - fmt.precision - 1, fmt.emax + 3, 400)
    halves = rng.integers(0, 2 << fmt.precision, 400) * np.exp2(exponents - fmt.precision)
    near = dtype(np.concatenate([halves, [fmt.maximum, 2.0**fmt.emin, 2.0 ** (fmt.emax + 1)]]))
    beside = [np.nextafter(near, dtype(side)) for side in (-math.inf, math.inf)]
    special = dtype(
        [0, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).tiny, np.finfo(dtype).max, math.inf, math.nan]
    )
    found = np.concatenate([near, *beside, special])
    return torch.from_numpy(np.concatenate([found, -found]))


def same(found: Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected, dtype=torch.float64).to(found.dtype)
    wanted[wanted.isnan()] = math.nan
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("text", ROUNDINGS)
def test_edges_are_the_specification_s(text: str, dtype: Any) -> None:
    rounding = Rounding.parse(text)
    assert short_rounding.is_short(rounding, CARRIERS["f32" if dtype is np.float32 else "f64"])
    x = edges(rounding, np.random.default_rng(0), dtype)
    expected = [round_float(v, rounding) for v in x.double().tolist()]
    for isa in instruction_sets():
        with fxround.instruction_set(isa):
            assert same(fxround.round(x, text), expected), isa


@pytest.mark.part(3)
@pytest.mark.parametrize("text", ROUNDINGS)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_beside_ties(dtype: Any, name: str, text: str) -> None:
    """Numbers whose result in the dtype is a tie, which the exact result may be or not; small and large operands."""
    rounding, rng = Rounding.parse(text), np.random.default_rng(1)
    target = edges(rounding, rng, dtype).numpy()
    other = dtype(rng.choice([1, -1], len(target)) * rng.uniform(1, 2, len(target)))
    other[::3] = np.round(other[::3] * 4) / 4
    far = 100 if dtype is np.float32 else 600
    other = np.ldexp(other, rng.integers(-far, far, len(target)))
    if name in ("add", "sub"):
        other = np.where(rng.random(len(target)) < 0.5, target * dtype(0.75), other).astype(dtype)
    with np.errstate(all="ignore"):
        inverse = {"div": np.multiply, "mul": np.divide, "add": np.subtract, "sub": np.add}[name]
        x = dtype(inverse(target, other))
    program = Program.parse(f"t0 = {name}(x0, x1) @ {text}")
    operands = torch.from_numpy(x), torch.from_numpy(other)
    found = run_map(program, operands, operands[0].dtype, Draw())

    def exact(a: float, b: float) -> float:
        result = EXACT[name](dtype(a), dtype(b))
        if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or float(result) == 0:
            return round_float(float(result), rounding)
        value = EXACT[name](Fraction(a), Fraction(b))
        return round_exact(value, value < 0, rounding)

    with np.errstate(all="ignore"):
        assert same(found, [exact(a, b) for a, b in zip(*(o.double().tolist() for o in operands), strict=True)])


@pytest.mark.part(5)
@pytest.mark.parametrize("text", [*ROUNDINGS, "bfloat16", "binary16", "binary32", "ieee(7,11)", "e8m0fnu"])
@pytest.mark.parametrize("name", ["add", "sub"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_values_of_the_format(dtype: Any, name: str, text: str) -> None:
    """Numbers that are apart by any power of two, among them those beside which a sum would be a tie in the dtype."""
    rounding, rng = Rounding.parse(text), np.random.default_rng(3)
    fmt = rounding.format
    with np.errstate(all="ignore"):
        x = edges(rounding, rng, dtype).numpy()
        x = np.concatenate([x, np.exp2(rng.integers(fmt.emin, fmt.emax + 1, len(x))).astype(dtype)])
        apart = np.exp2(-rng.integers(0, min(70, fmt.emax - fmt.emin + fmt.precision), len(x)).astype(float))
        other = dtype(x * apart * rng.choice([1, -1, 0.5, 0.75, -1.25], len(x)))
    program = Program.parse(f"t0 = identity(x0) @ {text}; t1 = identity(x1) @ {text}; t2 = {name}(t0, t1) @ {text}")
    found = run_map(program, (torch.from_numpy(x), torch.from_numpy(other)), torch.from_numpy(x).dtype, Draw())

    def exact(a: float, b: float) -> float:
        a, b = round_float(a, rounding), round_float(b, rounding)
        result = EXACT[name](a, b)
        if not math.isfinite(result) or result == 0:
            return round_float(result, rounding)
        value = EXACT[name](Fraction(a), Fraction(b))
        return round_exact(value, value < 0, rounding)

    with np.errstate(all="ignore"):
        assert same(found, [exact(a, b) for a, b in zip(x.astype(float), other.astype(float), strict=True)])


def test_quotients_by_powers_of_two() -> None:
    """The scale of a block from its least to its largest value, and elements up to those that overflow or vanish."""
    text = "e4m3fn/nearest_even/saturate"
    rounding, rng = Rounding.parse(text), np.random.default_rng(2)
    x = edges(rounding, rng).numpy()
    powers = np.exp2(rng.choice([-127, -126, -1, 0, 1, 100, 126, 127], len(x))).astype(np.float32)
    x = np.where(rng.random(len(x)) < 0.8, x * np.minimum(powers, np.float32(2.0**100)), x).astype(np.float32)
    program = Program.parse(f"t0 = div(x0, x1) @ {text}")
    kernel = map_kernel(program, ("f32", "f32"), "f32", ("x1",))
    (found,) = run_kernel(kernel, [torch.from_numpy(x), torch.from_numpy(powers)], Draw().key())
    quotients = x.astype(np.float64) / powers
    assert same(found, [round_float(float(q), rounding) for q in quotients])


@pytest.mark.parametrize("result", ["bfloat16", "binary16", "ieee(5,6)", "e5m2", "bfloat16/toward_zero", "e4m3fn"])
@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e2m1fn", "bfloat16"])
def test_products_with_powers_of_two(element: str, result: str) -> None:
    """All powers, so that products are subnormal, vanish and overflow; bfloat16's may be too small for binary32."""
    of_elements, rounding, rng = Rounding.parse(element), Rounding.parse(result), np.random.default_rng(2)
    powers = np.repeat(np.exp2(np.arange(-127, 128)), 12).astype(np.float32)
    x = rng.choice(edges(of_elements, rng).numpy(), len(powers))
    special = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    x, powers = np.concatenate([x, special]), np.concatenate([powers, [1, 4, 4, np.nan]]).astype(np.float32)
    program = Program.parse(f"t0 = identity(x0) @ {element}; t1 = mul(t0, x1) @ {result}")
    kernel = map_kernel(program, ("f32", "f32"), "f32", ("x1",))
    (found,) = run_kernel(kernel, [torch.from_numpy(x), torch.from_numpy(powers)], Draw().key())
    factors = [round_float(float(a), of_elements) for a in x]
    # Exact in binary64: 24 bits, and no exponent below -260.
    assert same(found, [round_float(a * float(p), rounding) for a, p in zip(factors, powers, strict=True)])


def test_other_roundings_keep_the_general_algorithm() -> None:
    # Fields that the algorithm cannot serve: no zeros with signs, ties of one bit, binary32's exponents, other modes.
    for text in ("e4m3fnuz/nearest_even/nan", "e8m0fnu", "bfloat16", "e4m3fn/stochastic", "e4m3fn/nearest_away", "nf4"):
        assert not any(short_rounding.is_short(Rounding.parse(text), carrier) for carrier in CARRIERS.values()), text
