"""Scaled formats in a policy: operands of products are rounded in blocks along the sums, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import PolicyError, UnsupportedRounding
from fxround.numerics.arithmetic.hadamard import hadamard_matrix
from fxround.numerics.formats.hadamard import Hadamard
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.policy import Policy, Rule, block_scaling, current_scaling, delayed_scaling, nvfp4

FORMS = [
    *("mxfp8", "nvfp4", "int8:channel", "mxfp4:8x16", "bfp(6,16)", "fixed(12,8)"),
    *("uint8:channel", "int8:8,percentile=90", "nvfp4:16,fit=6:4", "scaled(e4m3fn;tensor,binary32,inverse)"),
    *("int8:scale=0.03125", "fixed(8,4)/nearest_even/wrap"),
]


def operands_of(
    model: nn.Module, text: str | Policy, x: Tensor, tangent: Tensor
) -> tuple[fxround.RoundedModule, dict[str, tuple[Tensor, Tensor]]]:
    """For each operator, the operands that it read in a training step."""
    compiled = fxround.compile(model, text, example_inputs=x)
    values = dict(compiled.observe_step({0: tangent}, x))
    found: dict[str, Any] = {}
    for node in compiled._called().lowered.graph.nodes:
        read = [n for n in node.all_input_nodes if "_operand" in n.name or "_operand" in str(n.args[:1])]
        read = read if "conv" in str(node.target) or "mm" in str(node.target) else []
        if len(read) == 2:
            found[node.name] = tuple(values[n.name] for n in read)
    return compiled, found


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.part(2)
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


@cache
def products() -> list[tuple[fxround.RoundedModule, tuple[Tensor, ...]]]:
    """Products of matrices, of many, and of images whose channels are adjacent. Policies share their captures."""
    torch.manual_seed(0)
    binades = torch.exp2(torch.arange(32.0) - 10)
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda a, b: a @ b, ((torch.randn(32, 48) * binades[:, None]).t(), torch.randn(16, 32).t())),
        (lambda a, b: a @ b, ((torch.randn(3, 32, 48) * binades[:, None]).mT, torch.randn(3, 16, 32).mT)),
        (nn.Conv1d(32, 12, 3, groups=2, bias=False), ((torch.randn(2, 20, 32) * binades).transpose(1, 2),)),
        (nn.Conv1d(32, 12, 3), ((torch.randn(2, 20, 32) * binades).transpose(1, 2),)),
    ]
    return [(fxround.compile(function, "binary32"), operands) for function, operands in calls]


@pytest.mark.parametrize("text", ["mxfp4:8", "mxfp4:8x16", "nvfp4:16x16", "int8:channel", "int8:tensor", "nvfp4"])
def test_the_layout_of_operands_changes_no_bit(text: str) -> None:
    """Under blocks, tiles and scales of channels."""
    policy = Policy("p", (Rule(rounding="binary32"), Rule(operator="contraction", operands=text)))
    for known, operands in products():
        compiled, results = known.with_policy(policy), []
        for given in (operands, [x.contiguous() for x in operands]):
            own = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in given]
            y = compiled(*own)
            y.square().sum().backward()
            # PyTorch computes the gradients of a transposed matrix as a transposed product, and tiles turn with it.
            results.append([y.detach(), *(x.grad for x in own if text != "mxfp4:8x16")])
        assert all(x is not None and y is not None and same(x, y) for x, y in zip(*results, strict=True))


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


@pytest.mark.part("True")
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
    with pytest.raises(PolicyError, match="a scale depends on values that are not known before a sum has ended"):
        Rule(accumulate="mxfp8")
    with pytest.raises(PolicyError, match="belong to operands; write operands="):
        Rule(rounding="hadamard(16)+nvfp4")
    with pytest.raises(PolicyError, match="2 to 16 bits"):
        Policy.parse("int40")
    with pytest.raises(UnsupportedRounding, match=r"mm.default in the root module: numbers .* 39 significant bits"):
        fxround.compile(nn.Linear(3, 4), "fixed(40,8)", example_inputs=torch.zeros(2, 3))


def transformed(value: Tensor, dim: int, transform: Hadamard) -> Tensor:
    """Each sum over rational numbers, rounded at every step to binary32."""
    x = value.movedim(dim, -1)
    rows, matrix = x.reshape(-1, transform.size).tolist(), hadamard_matrix(transform)
    found = []
    for row in rows:
        for j in range(transform.size):
            total = np.float32(0.0)
            for k, element in enumerate(row):
                exact = Fraction(element) * Fraction(matrix[k][j]) + Fraction(float(total))
                total = np.float32(round_exact(exact, exact < 0, Rounding.parse("binary32")))
            found.append(float(total))
    return torch.tensor(found).reshape(x.shape).movedim(-1, dim)


def test_a_hadamard_transform_is_orthogonal_and_rounded_at_every_step() -> None:
    for size in (4, 16, 64):
        matrix = torch.tensor(hadamard_matrix(Hadamard(size, 7)), dtype=torch.float64)
        # stock: powers of two, exact in any order
        assert torch.equal(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    assert hadamard_matrix(Hadamard(16, 1)) != hadamard_matrix(Hadamard(16, 2))
    x = torch.randn(3, 32, 2)
    for dim, transform in ((1, Hadamard(16, 3)), (1, Hadamard(4)), (-2, Hadamard(4))):
        got = torch.ops.fxround.hadamard(x, dim, transform.size, transform.seed)
        assert torch.equal(got, transformed(x, dim, transform))
    # Elements after the last complete group stay.
    longer = torch.randn(2, 38)
    got = torch.ops.fxround.hadamard(longer, 1, 16, 0)
    assert torch.equal(got[:, 32:], longer[:, 32:])
    assert torch.equal(got[:, :32], transformed(longer[:, :32], 1, Hadamard(16)))
    assert torch.equal(torch.ops.fxround.hadamard(x, 0, 16, 0), x)
    assert torch.ops.fxround.hadamard(torch.ones(0, 16), 1, 16, 0).shape == (0, 16)
    with pytest.raises(IndexError, match="out of range"):
        torch.ops.fxround.hadamard(x, 3, 16, 0)
    with pytest.raises(ValueError, match="4, 16, 64 or 256"):
        torch.ops.fxround.hadamard(x, 0, 8, 0)


def test_the_recipe_of_nvfp4() -> None:
    torch.manual_seed(0)
    layer, x, g = nn.Linear(48, 32, bias=False), torch.randn(64, 48, requires_grad=True), torch.randn(64, 32)
    _, found = operands_of(layer, nvfp4(stochastic_errors=False), x, g)
    w, plain, turn = layer.weight.detach(), x.detach(), Hadamard(16)

    def q(value: Tensor, text: str, dim: int) -> Tensor:
        return fxround.round(value, text, dim=dim)

    def t(value: Tensor) -> Tensor:
        return q(transformed(value, 0, turn), "nvfp4", 0)

    wanted = {
        "forward": (q(plain, "nvfp4", -1), q(w.t(), "nvfp4:16x16", -1)),
        "input": (q(g, "nvfp4", -1), q(w, "nvfp4:16x16", -1)),
        "weight": (t(g).t(), t(plain)),
    }
    for a, b in wanted.values():
        assert any(same(a, c) and same(b, d) for c, d in found.values())
    # The transforms cancel: the product's error is that of the formats.
    exact = g.double().t() @ plain.double()
    a, b = wanted["weight"]
    assert ((a.double() @ b.double() - exact).norm() / exact.norm()) < 0.2


def test_recipes_name_their_choices() -> None:
    assert Policy.parse("fp8") == current_scaling() and Policy.parse("fp8_blocks") == block_scaling()
    assert Policy.parse("fp8_delayed") == delayed_scaling()
    assert Policy.parse("nvfp4_training") == nvfp4()
    plain = nvfp4(stochastic_errors=False, square_weights=False, hadamard=None)
    assert plain.name == "nvfp4_training(stochastic_errors=False, square_weights=False, hadamard=None)"
    assert not plain.draws and "hadamard(" not in str(plain) and "16x16" not in str(plain) and nvfp4().draws
    assert "e8m0fnu" in str(current_scaling(power_of_two=True)) and "binary32" in str(block_scaling(power_of_two=False))
    with pytest.raises(PolicyError, match="4, 16, 64 or 256"):
        nvfp4(hadamard=8)
    for policy in (current_scaling(), block_scaling(), nvfp4()):
        assert Policy.from_toml(policy.to_toml()) == policy
    with pytest.raises(PolicyError, match="set operands="):
        Rule(result="gradient", rounding="bfloat16")
    with pytest.raises(PolicyError, match="no role is named 'gradients'"):
        Rule(result="gradients", operands="bfloat16")
    with pytest.raises(ValueError, match="round takes"):
        fxround.round(torch.ones(16), "hadamard(16)+nvfp4")


def test_a_convolution_s_tiles_are_of_channels() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(8, 12, 3, bias=False), torch.randn(2, 8, 5, 6, requires_grad=True)
    _, found = operands_of(layer, "mxfp4:4x8", x, torch.randn(2, 12, 3, 4))
    w = fxround.round(layer.weight.detach().permute(2, 3, 0, 1), "mxfp4:4x8").permute(2, 3, 0, 1)
    assert any(same(w, t) for read in found.values() for t in read)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(operator="contraction", role="input", operands="identity"),
        Rule(operator="contraction", direction="backward", operands="mxfp8"),
        Rule(operator="contraction", result="gradient", direction="backward", operands="hadamard(16,1)+nvfp4"),
    ],
)
def test_a_transform_of_one_operand_alone_is_an_error(rule: Rule) -> None:
    policy, x = nvfp4().with_rules(rule), torch.randn(64, 64)
    with pytest.raises(PolicyError, match=r"hadamard\(16\).*both operands have the same one"):
        fxround.compile(nn.Linear(64, 32, bias=False), policy, example_inputs=x)(x).sum().backward()


@pytest.mark.parametrize("text", ["nvfp4", "int8:channel", "int8:scale=0.1", "uint4:32"])
def test_a_number_alone_is_a_block_of_one(text: str) -> None:
    """An operand without dimensions: forward and, of the sum that is its gradient, backward."""
    scale, x = torch.tensor(1.37, requires_grad=True), torch.randn(3, 32)
    policy = Policy("p", (Rule(operator="mul", direction="forward", operands=text),))
    y = fxround.compile(lambda x, scale: x * scale, policy)(x, scale)
    one = fxround.round(scale.detach().reshape(1), text)
    assert torch.equal(y, fxround.round(x, text) * one)
    y.sum().backward()
    assert scale.grad is not None and scale.grad.dim() == 0


@pytest.mark.parametrize("policy", ["mxfp8", "mxfp8/stochastic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_weight_is_transposed_in_memory_as_the_weight_is(dtype: torch.dtype, policy: str) -> None:
    """PyTorch's own product of 16-bit formats takes ten times as long with the other layout."""
    layer, x = nn.Linear(40, 24, bias=False).to(dtype).eval(), torch.randn(36, 40).to(dtype)
    compiled = fxround.compile(layer, policy, example_inputs=x)
    (product,) = (node for node in compiled.graph.graph.nodes if node.target == torch.ops.aten.mm.default)
    assert product.args[1].meta["val"].stride() == (1, 40)
    if policy == "mxfp8":
        rounded = [fxround.round(value.detach(), policy) for value in (x, layer.weight)]
        with torch.no_grad():
            assert torch.equal(compiled(x), nn.functional.linear(*rounded))
