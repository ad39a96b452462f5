"""Cancellations, compared with math.frexp, and planted NaNs and infinities."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import cond, scan

from fxround.errors import UnsupportedOperator
from fxround.localization.cancellation import Cancellation, cancellations
from fxround.localization.nonfinite import first_nonfinite


def of(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, Cancellation]:
    return {n.operator.split(".")[1]: n for n in cancellations(model, inputs, **options).nodes}


class Everything(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a - b, a.sum(0), a @ b.T, a.cumsum(1)


def lost(largest: float, result: float, precision: int = 24) -> float:
    if largest == 0:
        return 0
    return precision if result == 0 else min(max(math.frexp(largest)[1] - math.frexp(result)[1], 0), precision)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_is_the_difference_of_exponents(seed: int) -> None:
    chosen = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 10, (5, 4), generator=chosen) * 2.0 ** torch.randint(-20, 3, (5, 4), generator=chosen)
    b = a + torch.randint(-2, 3, (5, 4), generator=chosen) * 2.0**-18
    found = of(Everything(), a, b, bits=7)
    x, y = a.tolist(), b.tolist()
    expected = {
        "sub": [lost(max(abs(p), abs(q)), p - q) for r, s in zip(x, y, strict=True) for p, q in zip(r, s, strict=True)],
        "sum": [lost(max(map(abs, c)), math.fsum(c)) for c in zip(*x, strict=True)],
        "cumsum": [lost(max(map(abs, r[: k + 1])), math.fsum(r[: k + 1])) for r in x for k in range(4)],
    }
    for name, bits in expected.items():
        assert (found[name].lost, found[name].many) == (max(bits), sum(b > 7 for b in bits)), name
        index = found[name].index
        position = index[0] * 4 + index[1] if len(index) == 2 else index[0]
        assert bits[position] == max(bits) and found[name].elements == len(bits)
    i, j = found["mm"].index
    products = [p * q for p, q in zip(x[i], y[j], strict=True)]
    assert found["mm"].lost == lost(sum(map(abs, products)), found["mm"].result)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_a_vanished_result_has_lost_everything_but_a_softmax_its_maximum_nothing() -> None:
    x = torch.tensor([[-8.0, -6.0, 1.0]])
    assert of(Difference(), x, x)["sub"].lost == 24 and of(Difference(), x.double(), x.double())["sub"].lost == 53
    assert of(Softmax(), x)["sub"].lost == 0
    assert of(Difference(), x, 0 * x)["sub"].lost == 0


def test_coordinates_of_an_interpolation_are_no_arithmetic_of_the_model() -> None:
    class Rise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)

    # a + w (b - a) along each dimension: three differences and three sums of pixels, beside those of coordinates.
    found = cancellations(Rise(), torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)).nodes
    assert sorted(n.operator.split(".")[1] for n in found) == ["add"] * 3 + ["sub"] * 3
    assert {n.elements for n in found} == {64}


def test_the_report_is_sorted_and_data() -> None:
    a = torch.ones(5, 4) + torch.arange(20).reshape(5, 4) * 2.0**-12
    found = cancellations(Everything(), (a, torch.ones(5, 4)), bits=3)
    assert [n.lost for n in found.nodes] == sorted((n.lost for n in found.nodes), reverse=True)
    assert json.loads(found.to_json())["nodes"][0]["operator"] == "aten.sub.Tensor"
    row = next(iter(found.table()))
    assert row["code"] == "return a - b, a.sum(0), a @ b.T, a.cumsum(1)" and row["> 3 bits"] == 19 + 1
    assert str(row["source"]).startswith("test_cancellation.py:") and "others lose none" in str(found)


# ---- births ----


class Chain(nn.Module):
    """exp overflows, and its inverse hides it; log(0); 0/0; inf - inf; and a mask with an intended -inf."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = 1 / x.exp()
        logs = (x - x[0]).log()
        masked = torch.where(x > 0, x, -torch.inf).amax()
        return hidden + masked, logs - logs


def births(model: nn.Module, x: Tensor, **options: Any) -> list[tuple[str, str, tuple[int, ...], bool]]:
    found = first_nonfinite(model, x, **options)
    return [(b.operator.split(".")[1], str(b.value), b.index, b.reaches) for b in found.births]


def test_births_are_distinguished_from_what_is_passed_on() -> None:
    x = torch.tensor([1.0, 2.0, 100.0])
    assert births(Chain(), x) == [
        ("exp", "inf", (2,), False),
        ("log", "-inf", (0,), True),
        ("sub", "nan", (0,), True),
    ]
    found = first_nonfinite(Chain(), x)
    assert found.first is not None and found.first.operands == (100.0,) and found.output == 1
    assert found.first.code == "hidden = 1 / x.exp()" and found.first.source.startswith("test_cancellation.py:")
    assert json.loads(found.to_json())["births"][2]["operands"] == ["-inf"]
    assert "1 elements of the output are not finite" in str(found) and "log" in str(found.table())


def test_a_policy_may_be_what_overflows() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    x = torch.tensor([3.0, 300.0])
    assert births(Square(), x) == [] and str(first_nonfinite(Square(), x)).endswith("The output is finite.")
    assert births(Square(), x, policy="binary16") == [("mul", "inf", (1,), True)]


class Growing(nn.Module):
    """A scan whose third step overflows, or a choice, whose operations are no sites."""

    def __init__(self, chooses: bool = False) -> None:
        super().__init__()
        self.chooses = chooses

    def forward(self, x: Tensor, us: Tensor) -> Any:
        if self.chooses:
            return cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))

        def step(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            return x.exp() * u, x * 2

        return scan(step, x, us)


def test_the_operation_of_the_first_step_that_overflows_is_named() -> None:
    # exp: 1, 2.7, 15.2, 3.9e6, and then infinity.
    report = first_nonfinite(Growing(), (torch.zeros(2), torch.ones(6, 1)))
    assert (report.first.node, report.first.operator, report.first.value) == ("exp_4", "aten.exp.default", math.inf)
    assert [round(x, -5) for x in report.first.operands] == [3_800_000.0]


def test_a_choice_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperator, match=r"cond in the root module.* chooses at run time"):
        first_nonfinite(Growing(chooses=True), (torch.zeros(2), torch.ones(6, 1)))


def test_an_infinity_is_born_where_the_policy_rounds_what_enters() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1e6)
    report = first_nonfinite(layer, torch.tensor([[1.0, 1e10], [torch.inf, 1.0]]), "binary16")
    found = [(b.operator, b.index, b.many, b.operands, b.reaches) for b in report.births]
    assert found == [
        ("rounding of parameter weight", (0, 0), 2, (1e6,), True),
        ("rounding of argument 0", (0, 1), 1, (1e10,), True),
    ]
