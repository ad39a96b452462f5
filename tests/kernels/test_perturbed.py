"""Kernels of one statement for attributions: the policy's bits, exact losses, and PyTorch's derivatives."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jvp

from fxround.attribution.functions import function_of
from fxround.attribution.losses import moments
from fxround.kernels import from_text
from fxround.kernels.perturbed import Perturbed, perturbed_statement
from fxround.numerics.arithmetic.derivatives import is_derived
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.modes import Rounding
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_kernel

DERIVED = [name for name in OPERATORS if is_derived(name)]
SELECTING = [name for name in DERIVED if OPERATORS[name].selects]


def text(operator: str, rounding: str) -> str:
    operands = ", ".join(f"x{i}" for i in range(OPERATORS[operator].arity))
    return f"t0 = {operator}({operands}) @ {rounding}"


def operands(operator: str, size: float = 1e-7) -> tuple[list[Tensor], list[Tensor]]:
    """Positive values, some of them equal, and perturbations of both signs."""
    values = [torch.rand(200) + 0.5 for _ in range(OPERATORS[operator].arity)]
    for value in values[1:]:
        value[:20] = values[0][:20]
    if operator in ("abs", "relu", "sin", "cos", "tanh", "erf", "exp", "sigmoid"):
        values[0][::2] *= -1
        values[0][:4] = 0.0
    return values, [torch.randn(200) * size for _ in values]


def run(statement: str, xs: list[Tensor], by: list[Tensor], drawn: bool) -> tuple[Perturbed, list[Tensor]]:
    made = perturbed_statement(statement, ("f32",) * len(xs), "f32", (True,) * len(by), drawn)
    assert made is not None
    return made, run_kernel(made.kernel, [*xs, *by], Draw(5, 6, 7).key())


@pytest.mark.part(4)
@pytest.mark.parametrize(
    "rounding", ["binary32/stochastic/inf", "bfloat16/stochastic", "e4m3fn/stochastic", "bfloat16"]
)
@pytest.mark.parametrize("operator", DERIVED)
def test_a_statement_has_the_policys_bits_and_what_its_rounding_lost(operator: str, rounding: str) -> None:
    xs, by = operands(operator)
    by_rounding = Rounding.parse(rounding)
    drawn = not by_rounding.mode.deterministic
    statement = text(operator, str(by_rounding))
    made, results = run(statement, xs, by, drawn)
    plain = from_text.pointwise(statement, ("f32",) * len(xs), "f32")
    (expected,) = run_kernel(plain, xs, Draw(5, 6, 7).key())
    assert torch.equal(results[0].view(torch.int32), expected.view(torch.int32))
    exact = function_of(operator)(*(x.double() for x in xs))
    assert made.lost is not None
    lost = moments(by_rounding, exact)[1].sqrt() if drawn else expected.double() - exact
    # The exact values of elementary functions differ from those of PyTorch in binary64 by a few of its ulps.
    torch.testing.assert_close(results[made.lost].double(), lost, rtol=1e-5, atol=2e-12)


@pytest.mark.parametrize("operator", ["add", "sub", "mul", "fma"])
def test_the_variance_of_arithmetic_is_that_of_the_exact_value(operator: str) -> None:
    xs, by = operands(operator)
    made, results = run(text(operator, "binary32/stochastic/inf"), xs, by, True)
    assert made.lost is not None
    for value, lost, *of in zip(
        results[0].tolist(), results[made.lost].tolist(), *(x.tolist() for x in xs), strict=True
    ):
        a, b, *c = map(Fraction, of)
        exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + (c[0] if c else 0)}[operator]
        gap = Fraction(2) ** (exact.numerator.bit_length() - exact.denominator.bit_length() - 24)
        while gap * 2**24 <= abs(exact):
            gap *= 2
        own = abs(Fraction(value) - exact)
        # Not bits: the kernel computes a square root in binary64 of a variance in binary32.
        assert lost**2 == pytest.approx(float(own * (gap - own)), rel=1e-5, abs=1e-22)


@pytest.mark.parametrize("size", [1e-7, 0.3])
@pytest.mark.parametrize("operator", DERIVED)
def test_a_perturbation_passes_by_the_derivative_and_what_that_misses_is_said(operator: str, size: float) -> None:
    xs, by = operands(operator, size)
    made, results = run(text(operator, "exact" if operator in SELECTING else "bfloat16"), xs, by, False)
    function = function_of(operator)
    wide, small = tuple(x.double() for x in xs), tuple(m.double() for m in by)
    value, first = jvp(lambda *given: function(*given), wide, small)
    error = torch.zeros(200) if made.lost is None else results[made.lost]
    assert made.moved is not None
    # Not bits: derivatives in binary64 of two makers.
    torch.testing.assert_close(results[made.moved].double(), first + error.double(), rtol=1e-5, atol=1e-6 * size)
    if made.missed is None:
        assert operator in ("identity", "neg", "add", "sub")
        return
    up = function(*(x + m for x, m in zip(wide, small, strict=True))) - value - first
    down = function(*(x - m for x, m in zip(wide, small, strict=True))) - value + first
    missed = torch.where(up.abs() < down.abs(), down, up).nan_to_num(torch.inf, torch.inf, -torch.inf)
    missed = torch.where(missed.abs() <= results[made.moved].abs() / 1000, 0.0, missed)
    # Which of the two is the larger one is open where they are opposite.
    torch.testing.assert_close(results[made.missed].double().abs(), missed.abs(), rtol=1e-4, atol=1e-6 * size)


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 2.5])
def test_powers_of_a_number_have_the_derivative_of_pytorch(exponent: float) -> None:
    """Small exponents are products, also of zero and of negative numbers."""
    x = torch.tensor([0.0, 0.75, 1.0, 1.3] if exponent % 1 else [0.0, -1.3, -0.5, 0.75, 1.0, 1.3])
    by = torch.full_like(x, 1e-5)
    made = perturbed_statement(f"t0 = pow(x0, {exponent.hex()}) @ bfloat16", ("f32",), "f32", (True,), False)
    assert made is not None and made.moved is not None and made.lost is not None
    results = run_kernel(made.kernel, [x, by], Draw(5, 6, 7).key())
    _, first = jvp(lambda wide: wide**exponent, x.double(), by.double())
    # An infinite derivative passes nothing. Not bits: derivatives in binary64 of two makers.
    expected = first.nan_to_num(0.0, 0.0, 0.0) + results[made.lost].double()
    torch.testing.assert_close(results[made.moved].double(), expected, rtol=1e-5, atol=1e-11)


def test_signs_are_drawn_beside_the_bits_of_the_value() -> None:
    x = torch.rand(10_000) + 0.5
    made, results = run(text("sqrt", "binary32/stochastic/inf"), [x], [torch.zeros(10_000)], True)
    assert made.lost is not None and made.moved is not None
    lost, moved = results[made.lost], results[made.moved]
    assert torch.equal(moved.abs(), lost)
    positive = moved[lost > 0] > 0
    up = results[0].double()[lost > 0] > x.double().sqrt()[lost > 0]
    # Of 10,000 fair coins, four standard deviations are two hundredths.
    assert abs(float(positive.double().mean()) - 0.5) < 0.02
    assert abs(float((positive == up).double().mean()) - 0.5) < 0.02


@pytest.mark.parametrize(
    "statement",
    ["t0 = expm1(x0) @ binary32/stochastic/inf", "t0 = sqrt(x0) @ binary32/up_down", "t0 = sqrt(x0) @ bfloat16"],
)
def test_other_statements_have_no_kernel(statement: str) -> None:
    assert perturbed_statement(statement, ("f32",), "f32", (True,), True) is None
