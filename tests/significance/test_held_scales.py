"""Calibrated scales of tensors, channels and groups, which a compiled module keeps as state."""

from __future__ import annotations

import copy
import functools
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import FxroundError, PolicyError
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.policy import Policy
from fxround.policy.calibrated import CalibratedPolicy

BINARY32 = Rounding.parse("binary32/nearest_even/saturate")
# Sums in the order of their terms, each rounded to binary32.
ORDERED = fxround.Rule(accumulate="binary32")


def added(terms: Tensor) -> Tensor:
    """The sum of rows in their order, in NumPy's binary32."""
    return torch.from_numpy(functools.reduce(np.add, terms.detach().numpy()))


def scale_of(values: list[float], how: str, maximum: int) -> float:
    """The scale of a block, by brute force over rational numbers."""

    def binary32(number: Fraction) -> Fraction:
        return Fraction(round_exact(number, number < 0, BINARY32))

    def error(scale: Fraction) -> Fraction:
        quotients = [Fraction(v) / scale for v in values]
        kept = [max(-maximum, min(maximum, round(q))) for q in quotients]  # ties to even
        return sum(((Fraction(v) - k * scale) ** 2 for v, k in zip(values, kept, strict=True)), Fraction(0))

    magnitudes = sorted(map(abs, values))
    if how == "percentile":
        rank = next(r for r in range(1, len(values) + 1) if Fraction(r, len(values)) * 100 >= Fraction(80.0))
        return float(binary32(Fraction(magnitudes[rank - 1]) / maximum))
    shares = range(100, 20, -1) if how == "mse" else [100]
    scales = [binary32(Fraction(magnitudes[-1]) / binary32(Fraction(maximum) * 100 / share)) for share in shares]
    return float(min(scales, key=error))


class Net(nn.Module):
    """A convolution of groups, and two layers that read one value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.a, self.b = nn.Conv1d(4, 6, 2, groups=2), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).transpose(1, 2)
        z: Tensor = self.a(y) * self.b(y)
        return z


def data() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.distributions.StudentT(3.0).sample((n, 4, 3)) for n in (3, 2)]


def blocks_of(name: str, tensor: Tensor, block: str) -> list[tuple[Any, list[float]]]:
    """Return the elements of each block of a weight, or of an operand [rows, channels], with the scales' index."""
    if block == "tensor" or (block == "channel" and "weight" not in name):
        return [(0, tensor.flatten().tolist())]
    if block == "channel":
        return [(o, w.flatten().tolist()) for o, w in enumerate(tensor)]
    n, weight = int(block), "weight" in name
    found = []
    for start in range(0, tensor.shape[1], n):
        part = tensor[:, start : start + n]
        rows = part.flatten(2).permute(0, 2, 1).reshape(-1, part.shape[1]) if part.dim() == 3 else part
        found += [(None, row.tolist()) for row in rows] if weight else [(None, part.flatten().tolist())]
    return found


@pytest.mark.parametrize("block, how", [("tensor", "percentile"), ("channel", "mse"), ("4", "mse")])
def test_scales_are_those_of_brute_force(block: str, how: str) -> None:
    model, batches = Net().eval(), data()
    with torch.no_grad():
        y = torch.cat([model.conv(b).transpose(1, 2).reshape(-1, 6) for b in batches])
    tensors = {"conv.weight0": model.conv.weight, "a.weight0": model.a.weight, "b.weight0": model.b.weight}
    policy = fxround.calibrate(model, [(b,) for b in batches], f"int4:{block}", how, percentile=80.0)  # type: ignore[arg-type]
    assert isinstance(policy, CalibratedPolicy)
    # Both layers read one value, which has the name of the first.
    assert policy.scales.keys() == {"conv.input0", "a.activation0", *tensors}
    for name, tensor in tensors.items():
        wanted = sorted(scale_of(values, how, 7) for _, values in blocks_of(name, tensor.detach(), block))
        assert sorted(policy.scales[name].flatten().tolist()) == wanted, (name, how)
    wanted = [scale_of(values, how, 7) for _, values in blocks_of("activation", y, block)]
    assert policy.scales["a.activation0"].flatten().tolist() == wanted
    # Groups along the sum begin anew in each group of a convolution; other blocks do not.
    assert policy.scales["conv.input0"].numel() == (2 if block == "4" else 1)


def test_scales_are_in_the_state_in_copies_and_in_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    policy: Any = fxround.calibrate(model, x, "int8:channel", "mse")
    compiled = fxround.compile(model, policy)
    with torch.no_grad():
        y = compiled(x)
        state = compiled.state_dict()
        assert torch.equal(state["fxround_scales.weight0"], policy.scales["weight0"])
        bare = Policy.from_toml(policy.to_toml())
        loaded = fxround.compile(model, bare)
        with pytest.raises(FxroundError, match=r"rounds '.*' with held scales, and the compiled module has none"):
            loaded(x)
        loaded.load_state_dict(state)
        path = compiled.export(tmp_path / "model.pt2", x)
        for same in (
            loaded,
            copy.deepcopy(compiled),
            fxround.compile(model, pickle.loads(pickle.dumps(policy))),
            fxround.compile(model, "bfloat16").with_policy(policy),
            compiled.with_policy(bare),
            fxround.load(path),
        ):
            assert torch.equal(same(x), y), same
        wrong = fxround.compile(model, Policy("groups", fxround.calibrate(model, x, "int8:2", "mse").rules))
        wrong.load_state_dict(state)
        with pytest.raises(FxroundError, match=r"the held scales '.*' have the shape .*, and the policy needs"):
            wrong(x)


def test_both_passes_read_elements_times_the_scales_of_their_blocks() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 1), torch.randn(5, 2, 6, requires_grad=True)
    policy: Any = fxround.calibrate(model, x.detach(), "int4:4", "mse")
    compiled = fxround.compile(model, policy.with_rules(ORDERED))
    compiled(x).sum().backward()
    with torch.no_grad():
        rounded = {tuple(v.shape): v for name, v in compiled.observe(x) if "_operand" in name}
    for name, exact in (("weight0", model.weight.detach().T), ("input0", x.detach().view(10, 6))):
        scales = policy.scales[name].repeat_interleave(4, int(name == "input0"))
        for i, j in np.ndindex(*exact.shape):
            scale = Fraction(float(scales[(i, 0) if name == "weight0" else (0, j)]))
            q = max(-7, min(7, round(Fraction(float(exact[i, j])) / scale)))  # ties to even
            assert float(rounded[tuple(exact.shape)][i, j]) == round_exact(q * scale, q < 0, BINARY32)
    assert x.grad is not None and torch.equal(x.grad, rounded[6, 1].T.expand(5, 2, 6))
    assert model.weight.grad is not None and torch.equal(model.weight.grad[0], added(rounded[10, 6]))
    assert not compiled.leaks()


def test_blocks_of_zeros_have_the_largest_scale() -> None:
    layer, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)
    with torch.no_grad():
        layer.weight[0], layer.weight[1] = 0.0, 7.0
        layer.weight[2] = 14.0
        x[:, 2:] = 0.0
    policy: Any = fxround.calibrate(layer, x, "int4:channel", "largest")
    assert policy.scales["weight0"].flatten().tolist() == [2.0, 1.0, 2.0]
    policy = fxround.calibrate(layer, x * 0, "int4:2", "mse")
    assert policy.scales["input0"].flatten().tolist() == [1.0, 1.0]


def test_what_cannot_be_held_is_said() -> None:
    model, x = Net().eval(), data()[0]
    for format, how, said in (
        ("int8:channel", "kl", "KL divergence chooses one scale"),
        ("mxfp8", "mse", "no binary32 numbers to nearest"),
        ("uint8:channel", "mse", "no binary32 numbers to nearest"),
        ("int8:2x2", "mse", "expected int2 to int16"),
        ("int8:4,percentile=99", "mse", "expected int2 to int16"),
        ("nvfp4", "mse", "expected int2 to int16"),
        ("fixed(8,4)", "mse", "expected int2 to int16"),
    ):
        with pytest.raises(ValueError, match=said):
            fxround.calibrate(model, x, format, how)  # type: ignore[arg-type]
    held = "scaled(int8;channel,binary32,held)"
    with pytest.raises(ValueError, match="a held scale is state of a compiled model"):
        fxround.round(x, held)
    with pytest.raises(PolicyError, match="a scale that is state belong to operands"):
        fxround.Rule(rounding=held)
    for text, said in (
        ("scaled(int8;2x2,binary32,held)", "not of tiles"),
        ("scaled(int8;4,e8m0fnu,held)", "in binary32"),
        ("scaled(int8;4,binary32,held,percentile=9)", "has no percentile"),
    ):
        with pytest.raises(ValueError, match=said):
            fxround.ScaledFormat.parse(text)
    assert "state of the compiled model" in str(fxround.describe(held))


class Moves(nn.Module):
    """Products of parts of one value, and of a value that is read in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.layer(x).chunk(2, -1)
        y: Tensor = self.head(q) + (q @ k.transpose(1, 2)).sum()
        return y


def test_backward_products_of_parts_read_the_parts_that_were_rounded() -> None:
    torch.manual_seed(0)
    model, x = Moves(), torch.randn(2, 3, 4)
    policy = fxround.calibrate(model, x, "int4:2", "mse")
    compiled = fxround.compile(model, policy.with_rules(ORDERED))
    y = compiled(x)
    y.sum().backward()
    with torch.no_grad():
        assert torch.equal(compiled(x), y)
        (q,) = (v for name, v in compiled.observe(x) if name == "mm_1_operand")
    assert model.head.weight.grad is not None and q.shape == (6, 3)
    assert torch.equal(model.head.weight.grad[0], added(q))
