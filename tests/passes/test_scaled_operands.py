"""Scaled formats in a policy: operands of products are rounded in blocks along the sums, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import PolicyError, UnsupportedRounding
from fxround.policy import Policy, Rule

FORMS = ["mxfp8", "nvfp4", "int8:channel", "mxfp4:8x16", "bfp(6,16)", "fixed(12,8)"]


def operands_of(
    model: nn.Module, text: str, x: Tensor, tangent: Tensor
) -> tuple[fxround.RoundedModule, dict[str, tuple[Tensor, Tensor]]]:
    """For each operator, the operands that it read in a training step."""
    compiled = fxround.compile(model, text, example_inputs=x)
    values = dict(compiled.observe_step({0: tangent}, x))
    found: dict[str, Any] = {}
    assert compiled._latest is not None
    for node in compiled._latest.lowered.graph.nodes:
        read = [n for n in node.all_input_nodes if "_operand" in n.name or "_operand" in str(n.args[:1])]
        read = read if "conv" in str(node.target) or "mm" in str(node.target) else []
        if len(read) == 2:
            found[node.name] = tuple(values[n.name] for n in read)
    return compiled, found


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("text", FORMS)
def test_a_linear_layer_and_its_gradients(text: str) -> None:
    torch.manual_seed(0)
    layer, x, g = nn.Linear(40, 24, bias=False), torch.randn(36, 40, requires_grad=True), torch.randn(36, 24)
    _, found = operands_of(layer, text, x, g)
    w, x = layer.weight.detach(), x.detach()

    def q(value: Tensor, dim: int) -> Tensor:
        return fxround.round(value, text, dim=dim)

    assert len(found) == 3
    for a, b in ((q(x, -1), q(w.t(), 0)), (q(g.t(), -1), q(x, 0)), (q(g, -1), q(w, 0))):
        assert any(same(a, c) and same(b, d) for c, d in found.values())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_and_its_gradients(transposed: bool) -> None:
    torch.manual_seed(0)
    make: Callable[..., nn.Module] = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer, x = make(20, 12, 3, padding=1, bias=False), torch.randn(2, 20, 5, 6, requires_grad=True)
    g = torch.randn(2, 12, 5, 6)
    of_sums = 0 if transposed else 1
    for text, spatial in (("mxfp4:8", ()), ("int8:channel", (2, 3))):
        _, found = operands_of(layer, text, x, g)
        w, plain = layer.get_parameter("weight").detach(), x.detach()

        def q(value: Tensor, dim: int, text: str = text, spatial: tuple[int, ...] = spatial) -> Tensor:
            return fxround.round(value, text, dim=(dim, *spatial))

        wanted = [(q(plain, 1), q(w, of_sums)), (q(g, 1), q(w, 1 - of_sums)), (q(g, 0), q(plain, 0))]
        assert len(found) == 3
        for pair in wanted:
            assert any(all(any(same(t, u) for u in pair) for t in read) for read in found.values())


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_begin_anew_in_each_group_of_channels(transposed: bool) -> None:
    torch.manual_seed(0)
    make: Callable[..., nn.Module] = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer, x = make(20, 30, 1, groups=2, bias=False), torch.randn(3, 20, 4, requires_grad=True)
    g = torch.randn(3, 30, 4)
    _, found = operands_of(layer, "mxfp4:8", x, g)
    w, plain = layer.get_parameter("weight").detach(), x.detach()

    def q(value: Tensor, dim: int, groups: int = 2) -> Tensor:
        parts = value.chunk(groups, dim)
        return torch.cat([fxround.round(part, "mxfp4:8", dim=dim) for part in parts], dim)

    forward = (q(plain, 1), q(w, 0) if transposed else q(w, 1, 1))
    of_input = (q(g, 1), q(w, 1, 1) if transposed else q(w, 0))
    for pair in (forward, of_input, (q(g, 0, 1), q(plain, 0, 1))):
        assert any(all(any(same(t, u) for u in pair) for t in read) for read in found.values())


def test_a_product_of_a_tensor_with_itself_is_rounded_along_both_dimensions() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    x = torch.randn(40, 40)
    compiled = fxround.compile(Square(), "mxfp4", example_inputs=x)
    a, b = (v for name, v in compiled.observe(x) if "_operand" in name)
    assert torch.equal(a, fxround.round(x, "mxfp4", dim=1)) and torch.equal(b, fxround.round(x, "mxfp4", dim=0))


def test_training_with_stochastic_blocks_is_a_function_of_seed_and_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
    x = torch.randn(4, 3, 6, 6)

    def gradients(seed: int, fuse: bool = True) -> list[str]:
        compiled = fxround.compile(model, "nvfp4/stochastic", seed=seed, fuse=fuse)
        model.zero_grad()
        compiled(x).square().sum().backward()
        return [fxround.hash(p.grad) for p in model.parameters()]

    assert gradients(1) == gradients(1, fuse=False) != gradients(2)
    compiled = fxround.compile(model.eval(), "nvfp4/stochastic", seed=1)
    with torch.no_grad():
        want = compiled(x)
        compiled.export(tmp_path / "model.pt2", x)
        assert torch.equal(fxround.load(tmp_path / "model.pt2")(x), want)


def test_an_image_alone_has_the_bits_that_it_has_in_a_batch() -> None:
    """Blocks along the channels are of one image; a scale of the whole tensor is not."""
    model, x = nn.Conv2d(40, 8, 3), torch.randn(5, 40, 6, 6)
    rules = (Rule(operator="contraction", operands="mxfp8", rounding="dtype", accumulate="binary32"),)
    compiled = fxround.compile(model, Policy("blocks", rules))
    with torch.no_grad():
        assert torch.equal(compiled(x)[3:4], compiled(x[3:4]))


def test_policies_with_scaled_operands_are_stored_without_loss() -> None:
    policy = Policy.parse("nvfp4/stochastic")
    assert Policy.from_toml(policy.to_toml()) == policy and policy.draws and not Policy.parse("mxfp8").draws
    assert "scaled(e2m1fn;16,e4m3fn,nearest,binary32)/stochastic/saturate" in str(policy)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(PolicyError, match="format of operands; write operands="):
        Rule(rounding="mxfp8")
    with pytest.raises(PolicyError, match="format of operands"):
        Rule(accumulate="int8")
    with pytest.raises(PolicyError, match="2 to 16 bits"):
        Policy.parse("int40")
    with pytest.raises(UnsupportedRounding, match=r"aten.mm.default in the root module: .*precision 40"):
        fxround.compile(nn.Linear(3, 4), "fixed(40,8)", example_inputs=torch.zeros(2, 3))
