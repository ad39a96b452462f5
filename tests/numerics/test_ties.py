"""Rounding to nearest twice: operands whose sum, product, quotient or root in the carrier is a midpoint."""

from __future__ import annotations

import math
from fractions import Fraction

import gmpy2
import numpy as np
import pytest
import torch
from torch import Tensor

import fxround
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.forms.ties import rounds_twice
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact, round_float
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

ROUNDINGS = [
    *(("f32", f"ieee(8,{p})/{mode}") for p, mode in ((2, "nearest_even"), (13, "nearest_zero"), (23, "nearest_even"))),
    *(("f32", f"bfloat16/{mode}") for mode in ("nearest_even", "nearest_away", "nearest_odd")),
    *(("f64", f"ieee(11,{p})/{mode}") for p, mode in ((2, "nearest_odd"), (13, "nearest_even"), (51, "nearest_even"))),
]


def operands_of(operator: str, storage: str, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Numbers of all sizes whose result in the carrier is a midpoint, a neighbour of one, or a value of the format."""
    rng, fmt = np.random.default_rng(0), CARRIERS[storage].format
    dtype = np.float32 if storage == "f32" else np.float64
    count = 600
    exponents = rng.integers(fmt.emin - rounding.format.precision - 1, fmt.emax, count)
    exponents[::3] = rng.integers(-5, 5, len(exponents[::3]))
    halves = rng.integers(1 << rounding.format.precision, 2 << rounding.format.precision, count) | 1
    with np.errstate(all="ignore"):
        target = np.ldexp(halves.astype(dtype), exponents - rounding.format.precision)
        target[::7] = np.nextafter(target[::7], dtype(0))
        if operator in ("add", "sub"):
            # The other number is far below, comparable, or zero.
            below = rng.integers(-2, 2 * fmt.precision, count)
            other = np.ldexp(rng.uniform(-1, 1, count).astype(dtype), exponents - below)
            other[::5] = 0
            x = target - other if operator == "add" else target + other
        elif operator == "sqrt":
            x, other = target * target, target
        else:
            other = np.ldexp(rng.uniform(1, 2, count).astype(dtype), rng.integers(fmt.emin - 9, fmt.emax, count))
            few = len(other[::2])
            other[::2] = np.ldexp(rng.integers(1, 9, few).astype(dtype), rng.integers(-4, 4, few))
            x = target * other if operator == "div" else target / other
    special = dtype([0, -0.0, math.inf, -math.inf, math.nan, fmt.maximum, 5e-324, 1e-45])
    x, other = np.concatenate([x, special, special]), np.concatenate([other, special, special[::-1]])
    return torch.from_numpy(x.astype(dtype)), torch.from_numpy(other.astype(dtype))


def expected(operator: str, a: float, b: float, rounding: Rounding) -> float:
    if operator == "sqrt":
        if not (math.isfinite(a) and a > 0):
            return round_float(a if a == 0 or a == math.inf else math.nan, rounding)
        # So many bits distinguish the root from every midpoint of a format that is no root itself.
        with gmpy2.context(precision=400):
            root = gmpy2.sqrt(gmpy2.mpfr(a))
        return round_exact(Fraction(*map(int, root.as_integer_ratio())), False, rounding)
    with np.errstate(all="ignore"):
        plain = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[operator]
        special = float(plain(np.float64(a), np.float64(b)))
    if not (math.isfinite(a) and math.isfinite(b)) or (operator == "div" and b == 0):
        return round_float(special, rounding)
    x, y = Fraction(a), Fraction(b)
    value = {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "div": lambda: x / y}[operator]()
    negative = value < 0 if value else math.copysign(1, special) < 0
    return round_exact(value, negative, rounding)


@pytest.mark.part(4)
@pytest.mark.parametrize("storage, text", ROUNDINGS)
@pytest.mark.parametrize("operator", ["add", "sub", "mul", "div", "sqrt"])
def test_operations_beside_midpoints(operator: str, storage: str, text: str) -> None:
    rounding = Rounding.parse(text)
    assert rounds_twice(operator, rounding, CARRIERS[storage])
    x, other = operands_of(operator, storage, rounding)
    operands = (x,) if operator == "sqrt" else (x, other)
    names = ", ".join(f"x{i}" for i in range(len(operands)))
    program = Program.parse(f"t0 = {operator}({names}) @ {rounding}")
    wanted = torch.tensor(
        [expected(operator, a, b, rounding) for a, b in zip(x.tolist(), other.tolist(), strict=True)],
        dtype=torch.float64,
    )
    wanted[wanted.isnan()] = math.nan
    for isa in instruction_sets():
        with fxround.instruction_set(isa):
            got = run_map(program, operands, x.dtype, Draw())
        code = torch.int32 if storage == "f32" else torch.int64
        assert torch.equal(got.view(code), wanted.to(x.dtype).view(code)), isa


def test_some_midpoints_are_no_exact_results() -> None:
    """The operands reach the case that rounding twice gets wrong: in binary64 the nearest values give other results."""
    rounding = Rounding.parse("ieee(11,13)/nearest_even")
    for operator, plain in (("add", torch.add), ("mul", torch.mul), ("div", torch.div)):
        x, other = operands_of(operator, "f64", rounding)
        twice = fxround.round(plain(x, other), str(rounding))
        once = run_map(Program.parse(f"t0 = {operator}(x0, x1) @ {rounding}"), (x, other), x.dtype, Draw())
        assert not torch.equal(twice, once), operator


def test_other_roundings_keep_the_general_algorithm() -> None:
    # Other modes, the carrier itself, other exponents, an overflow that saturates.
    saturating = "bfloat16/nearest_even/saturate"
    for text in ("bfloat16/toward_zero", "bfloat16/stochastic", "binary32", "binary16", saturating):
        assert not rounds_twice("add", Rounding.parse(text), CARRIERS["f32"]), text
