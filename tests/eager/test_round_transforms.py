"""``fxround.round`` in torch.compile, torch.func and compiled models: the bits of a plain call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxround

TEXTS = ["mxfp8", "bfloat16/stochastic", "nvfp4/stochastic", "fixed(6,4)", "int8:channel"]
HOWS = ["straight_through", "zero_clamped", "e5m2/stochastic", "zero_clamped mxfp4"]


def plain(x: Tensor, text: str, how: str) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    result = fxround.round(leaf, text, seed=3, gradient=how)
    (gradient,) = torch.autograd.grad(result, leaf, weight(x))
    return result.detach(), gradient


def weight(x: Tensor) -> Tensor:
    return torch.linspace(-2, 3, x.numel()).reshape(x.shape)


@pytest.mark.part(3)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("how", HOWS)
def test_transforms_have_the_bits_of_plain_calls(text: str, how: str) -> None:
    if text.startswith("bfloat16") and "clamped" in how:
        text = "e4m3fn/stochastic/saturate"
    torch.manual_seed(0)
    x = torch.randn(3, 40) * 4

    def rounded(v: Tensor) -> Tensor:
        return fxround.round(v, text, seed=3, gradient=how)

    result, gradient = plain(x, text, how)
    assert torch.equal(torch.func.grad(lambda v: (rounded(v) * weight(v)).sum())(x), gradient)
    value, pullback = torch.func.vjp(rounded, x)
    assert torch.equal(value, result) and torch.equal(pullback(weight(x))[0], gradient)
    rows = torch.stack([rounded(row) for row in x])
    assert torch.equal(torch.func.vmap(rounded)(x), rows)
    assert torch.equal(torch.func.vmap(rounded, in_dims=1)(x.t()), rows)
    each = torch.stack([plain(row, text, how)[1] for row in x])
    found = torch.func.vmap(torch.func.grad(lambda v: (rounded(v) * weight(v)).sum()))(x)
    assert torch.equal(found, each)
    if how in ("straight_through", "zero_clamped"):
        primal, tangent = torch.func.jvp(rounded, (x,), (weight(x),))
        assert torch.equal(primal, result) and torch.equal(tangent, gradient)
    else:
        with pytest.raises(ValueError, match="a tangent of forward mode is not rounded"):
            torch.func.jvp(rounded, (x,), (weight(x),))


@pytest.mark.part(3)
@pytest.mark.parametrize("text", TEXTS)
def test_torch_compile_holds_the_operator(text: str) -> None:
    x = torch.randn(3, 40)
    for how in HOWS:
        if "clamped" in how and text.startswith("bfloat16"):
            continue
        torch._dynamo.reset()
        function: Callable[[Tensor], Tensor] = torch.compile(
            lambda v, how=how: fxround.round(v, text, seed=3, gradient=how), backend="aot_eager", fullgraph=True
        )
        leaf = x.clone().requires_grad_()
        found = function(leaf)
        found.backward(weight(x))
        result, gradient = plain(x, text, how)
        assert leaf.grad is not None and torch.equal(found, result) and torch.equal(leaf.grad, gradient)


class Net(nn.Module):
    """A model that rounds its own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, fxround.round(self.layer.weight, "int4:channel"))


@pytest.mark.parametrize("gradient", ["zero_clamped", "estimate"])
def test_no_gradient_of_a_models_own_rounding_counts_as_unrounded(gradient: str) -> None:
    weight = torch.randn(3, 16, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        return nn.functional.linear(x, fxround.round(weight, "e4m3fn/nearest_even/saturate", gradient=gradient))

    compiled = fxround.compile(product, "reproducible")
    compiled(torch.randn(4, 16)).sum().backward()
    rows = [o for o in compiled.coverage().operations if o.operator.startswith("fxround.round_")]
    assert [o.status for o in rows] == ["rounded", "integer" if gradient == "zero_clamped" else "rounded"]
    assert not compiled.coverage().unrounded


def test_compiled_models_may_round_by_themselves(tmp_path: Path) -> None:
    model, x = Net(), torch.randint(-3, 4, (4, 16)).float()  # sums of integers are exact in any order
    compiled = fxround.compile(model, "identity")
    compiled(x).sum().backward()
    found = model.layer.weight.grad
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    assert found is not None and model.layer.weight.grad is not None and torch.equal(found, model.layer.weight.grad)
    model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(x), result)
        compiled.export(tmp_path / "model.pt2", x)
        assert torch.equal(fxround.load(tmp_path / "model.pt2")(x), result)
        narrow = dict(fxround.compile(model, "bfloat16").observe(x))
        strict = fxround.compile(model, "reproducible")
        weights = [value for name, value in strict.observe(x) if "round_tensor" in name]
    assert torch.equal(weights[0], fxround.round(model.layer.weight.detach(), "int4:channel"))
    (own,) = strict.summary().filter(operator="fxround.round_*").operations
    assert own.status == "rounded" and own.reason == "the model's own fxround.round: int4:channel"
    assert own.source.startswith("test_round_transforms.py:") and not strict.coverage().unrounded
    rounded = fxround.round(model.layer.weight.detach().bfloat16().float(), "int4:channel").bfloat16().float()
    assert any(torch.equal(value, rounded) for value in narrow.values() if value.shape == rounded.shape)


def test_what_cannot_be_is_said() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="out= cannot be differentiated"):
        torch.func.vmap(lambda v: fxround.round(v, "mxfp8", out=torch.empty(4)))(x)
    with pytest.raises(Exception, match="out= is for calls that run at once"):
        torch.compile(lambda v: fxround.round(v, "mxfp8", out=torch.empty(3, 4)), backend="eager", fullgraph=True)(x)
