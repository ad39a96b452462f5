"""Results in scaled formats, and what their roundings do to gradients: as autograd functions made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import PolicyError
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.specification.exact import round_exact
from fxround.numerics.specification.exact_scaled import best_scale, largest, round_block
from fxround.policy import Policy, Rule

BINARY32 = FORMATS["binary32"]
FORMS = [
    "mxfp8",
    "mxfp4",
    "int4:channel",
    "bfp(4,32)",
    "nvfp4",
    "fixed(6,4)",
    "int8:scale=0.0625",
    "uint4:scale=0.25,zero=3",
]


def rows(x: Tensor) -> list[list[float]]:
    """The blocks: a row of at most 16 elements is one."""
    found: list[list[float]] = x.detach().reshape(-1, x.shape[-1]).tolist()
    return found


def specified(x: Tensor, text: str) -> Tensor:
    rounding, whole = ScaledRounding.parse(text), largest(x.detach().reshape(-1).tolist())
    found = [round_block(row, rounding, BINARY32, (), whole) for row in rows(x)]
    return torch.tensor(found).reshape(x.shape)


def clamped(x: Tensor, text: str) -> Tensor:
    """Where the quotient by the scale, rounded as if elements had any size, is beyond the elements' bounds."""
    rounding, whole = ScaledRounding.parse(text), largest(x.detach().reshape(-1).tolist())
    form, element = rounding.format, rounding.element
    unbounded = Format.custom(precision=element.format.precision, emin=element.format.emin, maximum=2.0**127)
    least, most = form.span or (-element.format.maximum, element.format.maximum)
    found = []
    for row in rows(x):
        scale = Fraction(form.unit or 1)
        if form.scaling is not None:
            scale = best_scale(row, largest(row), whole, rounding, BINARY32)
        wide = replace(element, format=unbounded, overflow="inf")
        found.append([not least <= round_exact(Fraction(v) / scale, v < 0, wide) <= most for v in row])
    return torch.tensor(found).reshape(x.shape)


class ByHand(torch.autograd.Function):
    """A scaled rounding; its gradient passes, is zeroed where elements are clamped, and is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str, zeroed: bool, gradient: str | None) -> Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(clamped(x, text) if zeroed else torch.zeros(x.shape, dtype=torch.bool))
        return specified(x, text)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (mask,), g = ctx.saved_tensors, gradients[0]
        g = torch.where(mask, torch.zeros(()), g)
        return (g if ctx.gradient is None else specified(g, ctx.gradient)), None, None, None


class Products(nn.Module):
    """Two products: every other operation of a step is a product too, or a zero, so that PyTorch rounds it once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.v = nn.Parameter(torch.randn(6, 12)), nn.Parameter(torch.randn(6, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.v


@pytest.mark.part(3)
@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("how", ["straight_through", "zero_clamped", "zero_clamped mxfp4", "int4:channel"])
def test_results_and_gradients_are_those_of_an_autograd_function(text: str, how: str) -> None:
    model = Products()
    x = torch.randn(6, 12) * torch.exp2(torch.arange(12.0) - 8)
    g = torch.randn(6, 12)
    x[2], x[0, 0] = 0.0, 63.9
    zeroed, gradient = "zero_clamped" in how, how.rpartition(" ")[2] if "4" in how else None
    policy = Policy("blocks", (Rule(direction="forward", rounding=text, gradient=how),))
    got = fxround.compile(model, policy)(x)
    got.backward(g)
    found = [p.grad.clone() for p in (model.w, model.v) if p.grad is not None]
    model.zero_grad()
    inner = ByHand.apply(x * model.w, text, zeroed, gradient)  # type: ignore[no-untyped-call]
    wanted = ByHand.apply(inner * model.v, text, zeroed, gradient)  # type: ignore[no-untyped-call]
    wanted.backward(g)
    assert torch.equal(got, wanted)
    assert not zeroed or bool(clamped(x, text).any()) == (text not in ("int4:channel", "nvfp4"))
    for mine, parameter in zip(found, (model.w, model.v), strict=True):
        assert parameter.grad is not None and torch.equal(mine, parameter.grad)
    leaf = x.clone().requires_grad_()
    fxround.round(leaf, text, gradient=how).backward(g)
    other = x.clone().requires_grad_()
    ByHand.apply(other, text, zeroed, gradient).backward(g)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and other.grad is not None and torch.equal(leaf.grad, other.grad)


def test_weights_arguments_scalars_and_results_of_products_are_rounded_in_blocks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.layer(x).relu()
            return h, h.sum()

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(5, 16)
    entering = [Rule(role=role, rounding="int8:channel") for role in ("weight", "input")]
    policy = Policy("all", (Rule(rounding="mxfp6/stochastic", accumulate="binary32"), *entering))
    compiled = fxround.compile(model, policy, seed=4, example_inputs=x)
    with torch.no_grad():
        values = dict(compiled.observe(x))
        h, total = compiled(x)
    assert torch.equal(values["input_0_rounded"], fxround.round(x, "int8:channel"))
    assert torch.equal(values["layer_weight_rounded"], fxround.round(model.layer.weight.detach(), "int8:channel"))
    assert torch.equal(h, values["add_rounded"].relu()) and torch.equal(total, values["sum_1_rounded"].reshape(()))
    for name in ("mm", "add", "sum_1"):
        wide, narrow = (
            values[name].reshape(-1, values[name].shape[-1] if values[name].dim() else 1),
            values[f"{name}_rounded"],
        )
        step = [row.abs().max() for row in wide]
        assert len(narrow.unique()) < 200 and all(math.isfinite(s) for s in step)
        low, high = (fxround.round(values[name], f"mxfp6/{mode}") for mode in ("toward_negative", "toward_positive"))
        assert ((narrow.reshape(low.shape) == low) | (narrow.reshape(low.shape) == high)).all()
    assert not compiled.coverage().unrounded and not compiled.leaks()
    unfused = fxround.compile(model, policy, seed=4, fuse=False)
    with torch.no_grad():
        assert torch.equal(unfused(x)[0], h)
    assert Policy.from_toml(policy.to_toml()) == policy and policy.draws


def test_a_step_of_an_optimizer_can_keep_its_state_in_blocks() -> None:
    model = nn.Linear(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    compiled = fxround.compile_optimizer(optimizer, Policy("8 bits", (Rule(role="state", rounding="int8:32"),)))
    for _ in range(3):
        model(torch.randn(4, 64)).square().sum().backward()
        compiled.step()
        optimizer.zero_grad()
    (buffer,) = (optimizer.state[p]["momentum_buffer"] for p in [model.weight])
    assert torch.equal(fxround.round(buffer, "int8:32"), buffer)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(PolicyError, match="clamps nothing"):
        Rule(rounding="fixed(8,4)/nearest_even/wrap", gradient="zero_clamped")
    with pytest.raises(PolicyError, match="belong to operands of products"):
        Rule(gradient="hadamard(16)+nvfp4")
    with pytest.raises(PolicyError, match=r"flips bits of the scales of blocks, and .* has no such"):
        Policy("faults", (Rule(rounding="fixed(8,4)", faults="scale.any:0.1"),)).assign(
            path="", operator="aten.mul.Tensor", kind="pointwise", role="activation", dtype="binary32"
        )
    with pytest.raises(ValueError, match="clamps nothing"):
        fxround.round(torch.ones(2), "fixed(8,4)/nearest_even/wrap", gradient="zero_clamped")
