"""docs/from-verificarlo.md: every text of its tables, and Monte Carlo arithmetic of operands against a simulation."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.numerics.modes import GRID_MODES, MODES
from fxround.policy import monte_carlo

PAGE = (Path(__file__).parents[1] / "docs" / "from-verificarlo.md").read_text()
X = torch.linspace(-2, 3, 37) ** 3


def cells() -> list[tuple[str, str]]:
    """The first two cells of each row."""
    rows = re.findall(r"^\| ((?!-)[^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    return [(a, b) for a, b in rows if a not in ("Verificarlo", "Verrou")]


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def neighbours(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands, and the numbers below and above their exact product, by integers of 106 bits."""
    x, y = X.to(dtype) / 3, (X.flip(0).to(dtype) + 0.1) / 7
    exact = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    kind = np.float32 if dtype is torch.float32 else np.float64
    low, high = [], []
    for value in exact:
        near = kind(float(value))
        low.append(near if Fraction(float(near)) <= value else np.nextafter(near, kind(-np.inf)))
        high.append(near if Fraction(float(near)) >= value else np.nextafter(near, kind(np.inf)))
    return x, y, torch.tensor(np.array(low)), torch.tensor(np.array(high))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_mode_of_verrou(dtype: torch.dtype) -> None:
    x, y, low, high = neighbours(dtype)
    nearest, rises = x * y, low.abs() < high.abs()
    wanted = {
        "nearest_even": nearest,
        "toward_positive": high,
        "toward_negative": low,
        "toward_zero": torch.where(rises, low, high),
        "away_from_zero": torch.where(rises, high, low),
        "farthest": torch.where(nearest == low, high, low),
    }
    for mode, want in wanted.items():
        got = fxround.compile(product, Policy(mode, (Rule(rounding=f"dtype/{mode}"),)))(x, y)
        assert torch.equal(got, want), mode
    for mode, probability in (("stochastic_equal", 0.5), ("stochastic", None)):
        compiled, count = fxround.compile(product, Policy(mode, (Rule(rounding=f"dtype/{mode}"),))), 400
        every = torch.stack([compiled.reseed(0, sample=s)(x, y) for s in range(count)])
        assert bool(((every == low) | (every == high)).all())
        exact = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        parts = [
            float((v - Fraction(a)) / (Fraction(b) - Fraction(a))) if a != b else 0.0
            for v, a, b in zip(exact, low.tolist(), high.tolist(), strict=True)
        ]
        # The number of steps up of all elements that are not exact: beyond 6 sigma once in 5e8 seeds.
        chances = np.array([probability or p for p in parts])[(low != high).numpy()]
        steps = float(((every == high) & (low != high)).sum())
        spread = (count * (chances * (1 - chances)).sum()) ** 0.5
        assert abs(steps - count * chances.sum()) < 6 * spread


def random_words(stream: int, size: int, seed: int) -> list[int]:
    """The random words of an operation, read off the noise that 1.5 gets with one bit of virtual precision."""
    from fxround.eager.round import rounding_program
    from fxround.numerics.modes import Rounding
    from fxround.runtime.draw import Draw
    from fxround.runtime.run import run_map

    ones = torch.full((size,), 1.5, dtype=torch.float64)
    noisy = run_map(rounding_program(Rounding.parse("binary64/mca:1")), (ones,), ones.dtype, Draw(seed, 0, stream))
    return [int((Fraction(v) - Fraction(3, 2) + Fraction(1, 2)) * 2**32 - Fraction(1, 2)) for v in noisy.tolist()]


def inexact(value: Fraction, t: int, r: int) -> Fraction:
    if value == 0:
        return value
    e = next(k for k in range(-400, 400) if abs(value) < Fraction(2) ** k)
    xi = Fraction(2 * r + 1, 2**33) - Fraction(1, 2)
    return value + Fraction(2) ** (e - t) * (xi if value > 0 else -xi)


@pytest.mark.parametrize("t", [11, 40])
def test_operands_are_those_of_a_simulation_with_the_same_random_numbers(t: int) -> None:
    seed = 5
    x, y = X.double() / 3, (X.flip(0).double() + 0.1) / 7
    compiled = fxround.compile(product, monte_carlo(t), example_inputs=(x, y))
    got = compiled.reseed(seed)(x, y)
    calls = [n for n in compiled.graph.graph.nodes if "fxround.pointwise" in str(n.target)]
    assert [re.match(r"t0 = (\w+)", n.args[1])[1] for n in calls] == ["identity", "identity", "mul"]  # type: ignore[index]
    first, second, third = (random_words(n.args[-1], len(x), seed) for n in calls)
    names = [str(n.args[0][0]) for n in calls[:2]]
    words = dict(zip(names, (first, second), strict=True))
    left, right = (words[str(n)] for n in compiled.graph.graph.nodes if n.op == "placeholder" and str(n) in words)
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        operands = (Fraction(float(inexact(Fraction(v), t, w[i]))) for v, w in ((a, left), (b, right)))
        p, q = operands
        assert got[i].item() == float(inexact(p * q, t, third[i]))


def test_at_the_dtypes_precision_operands_do_not_move() -> None:
    x, y = X / 3, X.flip(0)
    for precision in (24, None):
        got = fxround.compile(product, monte_carlo(precision, "pb"))(x, y)
        assert torch.equal(got, x * y)
    assert not torch.equal(fxround.compile(product, monte_carlo(20, "pb"))(x, y), x * y)


def test_a_product_of_matrices_is_perturbed_at_each_step() -> None:
    a = torch.ones(1, 4, dtype=torch.float64)
    compiled = fxround.compile(torch.mm, monte_carlo(6, "rr"))
    # 1, 2, 3 and 4 have few bits: random rounding leaves them, and Monte Carlo arithmetic does not.
    assert compiled(a, a.T).item() == 4
    assert fxround.compile(torch.mm, Policy("m", (Rule(accumulate="wide/mca:6"),)))(a, a.T).item() != 4
    # Steps to nearest, and noise of the result alone.
    assert fxround.compile(torch.mm, Policy("m", (Rule(rounding="dtype/mca:6"),)))(a, a.T).item() != 4


@pytest.mark.parametrize("precision, mode", [(0, "mca"), (54, "rr"), (2.0, "pb"), (True, "mca"), (24, "full")])
def test_what_monte_carlo_refuses(precision: object, mode: str) -> None:
    with pytest.raises(PolicyError, match="expected"):
        monte_carlo(precision, mode)  # type: ignore[arg-type]


def test_a_virtual_precision_beyond_the_dtype() -> None:
    with pytest.raises(PolicyError, match="more than the 24 bits of binary32; expected 1 to 24"):
        fxround.compile(product, monte_carlo(25))(X, X)


def test_every_text_of_the_page_is_one() -> None:
    assert len(cells()) == 24
    texts = [text for _, cell in cells() for text in re.findall(r'"([^"]+)"', cell)]
    known = 0
    for text in texts:
        for part in text.replace(":t", ":5").replace("(r,p+1)", "(5,11)").split():
            head, _, mode = part.partition("/")
            if head == "dtype":
                known += mode.partition(":")[0] in {**MODES, **GRID_MODES}
                assert mode.partition(":")[0] in {**MODES, **GRID_MODES}, part
            elif head not in ("native", "rr", "pb"):
                Policy.parse(part)
    assert known >= 10


@pytest.mark.parametrize("text, said", [("dtype/mca:10", "Monte Carlo"), ("ieee(11,52)", "rounding to 52 bits loses")])
def test_attribution_refuses_what_it_cannot_know(text: str, said: str) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.1).sum()

    policy = Policy("p", (Rule(rounding=text, operator="aten.mul.Tensor"),))
    with pytest.raises(fxround.UnsupportedRounding, match=said):
        fxround.attribute(Scaled(), X.double(), policy=policy)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "rule", [Rule(rounding="dtype/mca:12", operands="dtype/mca:12"), Rule(operands="bfloat16/stochastic")]
)
@pytest.mark.parametrize("function", [torch.fft.rfft, torch.linalg.cholesky])
def test_a_call_with_gradients_draws_the_bits_of_one_without(function: Any, rule: Rule) -> None:
    """Stages of a transform and blocks of a factorization read concatenations, which no operation computes."""
    matrix = X[:36].reshape(6, 6)
    matrix = matrix @ matrix.T + 100 * torch.eye(6)
    compiled = fxround.compile(function, Policy("drawn", (rule,)))
    result = compiled(matrix)
    assert torch.equal(compiled(matrix.clone().requires_grad_()), result)
    assert not torch.equal(fxround.compile(function, "reproducible")(matrix), result)
