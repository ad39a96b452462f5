"""AdaRound: the published relaxation, its start, its choices, and what they gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.policy.policy import of_operands
from fxround.policy.rule import Rule
from fxround.tuning.choices import place_of
from fxround.tuning.grid import Grid

INT3 = of_operands("int3", Rule(role="weight", operands="int3:channel"))


def correlated(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) @ torch.randn(columns, columns)


def test_a_layer_whose_inputs_are_apart_is_rounded_to_nearest() -> None:
    """With orthogonal inputs every weight has an error of its own, which is least to nearest."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8), 4 * torch.eye(16)
    small = fxround.quantize_weights(layer, INT3, x, "adaround", steps=200, rows=64, rate=0.05, regular=0.01)
    w = layer.weight.detach()
    down, up = Grid.of(w, "int3:channel").neighbours(w)
    near = (place_of(w, down, up) - 0.5).abs() < 0.05
    assert torch.equal(small.weight[~near], fxround.round(w, "int3:channel")[~near])
    left = small.quantization["weight"].left
    assert left is not None and left < 0.5


def test_products_are_nearer_than_those_of_nearest_weights() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 24), correlated(256, 24)
    plain = fxround.quantize_weights(layer, INT3, x).quantization["weight"]
    learned = fxround.quantize_weights(layer, INT3, x, "adaround", steps=300, rate=0.03).quantization["weight"]
    assert learned.output_sqnr is not None and plain.output_sqnr is not None
    assert learned.output_sqnr > plain.output_sqnr + 1 and 0 < learned.changed < 0.5


def test_a_step_is_the_gradient_of_the_published_objective() -> None:
    """One step of Adam moves v by the rate against the sign of the gradient, wherever that is not zero."""
    from fxround.tuning.adaround import AdaRound, _stretched

    torch.manual_seed(0)
    x, wanted = torch.rand(1, 3, 5), torch.randn(1, 7, 3)
    down, inputs = torch.randn(1, 3, 5), torch.randn(1, 7, 5)
    up = down + 0.25
    method = AdaRound(steps=1, rows=4, rate=0.01, regular=0.3, warmup=0.0, beta=(4.0, 2.0))
    got = method._learned(x, down, up, inputs, wanted, torch.Generator().manual_seed(3))
    v = -torch.log(1.2 / (x + 0.1) - 1)
    assert torch.allclose(_stretched(v), x, atol=1e-6)  # the inverse of a sigmoid, in float32
    v = v.double().requires_grad_()
    h = (1.2 * torch.sigmoid(v) - 0.1).clamp(0, 1)
    rows = torch.randint(7, (4,), generator=torch.Generator().manual_seed(3))
    lost = inputs[0, rows].double() @ (down + h * 0.25)[0].T - wanted[0, rows]
    loss = lost.square().sum() / 4 + 0.3 * (1 - (2 * h - 1).abs() ** 4).sum()
    loss.backward()
    assert v.grad is not None
    moved = (1.2 * torch.sigmoid(v.detach() - 0.01 * v.grad.sign()) - 0.1).clamp(0, 1)
    clear = v.grad.abs() > 1e-4  # Adam divides by the magnitude plus 1e-8
    assert clear.float().mean() > 0.9
    # Not bits: the step is computed in float32, the expected one in float64.
    assert torch.allclose(got[clear], moved[clear].float(), atol=1e-5)


def test_another_seed_draws_other_rows() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 24), correlated(256, 24)
    options: dict[str, Any] = {"steps": 20, "rate": 0.1, "rows": 8}
    first, again, other = (
        fxround.quantize_weights(layer, INT3, x, "adaround", seed=seed, **options) for seed in (0, 0, 1)
    )
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)


def test_wrong_options() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    wrong: list[tuple[dict[str, Any], str]] = [({"steps": 0}, "steps is 0"), ({"rate": -1.0}, "rate is -1.0")]
    for option, said in [*wrong, ({"warmup": 1.0}, "warmup is 1.0")]:
        with pytest.raises(ValueError, match=said):
            fxround.quantize_weights(layer, INT3, x, "adaround", **option)
    with pytest.raises(ValueError, match="read more than once"):
        fxround.quantize_weights(nn.LSTM(4, 4), INT3, torch.randn(2, 3, 4), "adaround", steps=1)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"warmup": "a"}, "warmup is 'a'"),
        ({"beta": (20.0,)}, r"beta is \(20.0,\); expected two exponents"),
        ({"beta": 3.0}, "expected two exponents"),
        ({"beta": (1, 2, 3)}, "expected two exponents"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fxround.quantize_weights(nn.Linear(8, 4), "int4:channel", torch.randn(4, 8), "adaround", **options)
