"""GPTQ against a plain reference: the published update, column by column, without blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.policy.policy import of_operands
from fxround.policy.rule import Rule
from fxround.tuning.gptq import GPTQ
from fxround.tuning.grid import Grid

Array = NDArray[np.float64]


def reference(w: Tensor, inputs: Tensor, grid: Grid, damp: float, act_order: bool) -> Tensor:
    """Algorithm 1 with a block of all columns: float64, NumPy's Cholesky, one column at a time."""
    x = inputs.double().numpy()
    h: Array = x.T @ x
    n = len(h)
    for i in range(n):
        if h[i, i] == 0:
            h[i, i] = 1.0
    order = sorted(range(n), key=lambda i: -h[i, i]) if act_order else list(range(n))
    h = h[np.ix_(order, order)]
    h += damp * np.mean(np.diag(h)) * np.eye(n)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    rest, kept = w.double().numpy().copy(), torch.empty_like(w)
    for i, column in enumerate(order):
        scales = tuple(scale.expand(w.shape)[:, column].contiguous() for scale in grid.scales)
        q = Grid(grid.rounding, scales).nearest(torch.from_numpy(rest[:, column].copy()).to(w.dtype))
        error = (rest[:, column] - q.double().numpy()) / upper[i, i]
        for j in range(i + 1, n):
            rest[:, order[j]] -= error * upper[i, j]
        kept[:, column] = q
    return kept


def only_weights(text: str) -> fxround.Policy:
    return of_operands(f"weights {text}", Rule(role="weight", operands=text))


FORMATS = ["int3:channel", "int4:8", "uint4:16", "nvfp4", "mxfp4", "scaled(nf4;16,binary32,nearest)", "e2m1fn"]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("text", FORMATS)
def test_a_linear_layer_is_the_reference_s_bit_for_bit(text: str, act_order: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 24), torch.randn(96, 40) @ torch.randn(40, 40)
    x[:, 7] = 0.0
    small = fxround.quantize_weights(
        layer, only_weights(text), x, "gptq", batch_size=32, act_order=act_order, block=16, damp=0.02
    )
    w = layer.weight.detach()
    assert torch.equal(small.weight, reference(w, x, Grid.of(w, text), 0.02, act_order))
    assert small.quantization["weight"].changed > 0
    # Nothing is learned about a column without inputs, and no error reaches it.
    assert torch.equal(small.weight[:, 7], fxround.round(w, text)[:, 7])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_the_reference_on_its_patches(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, padding=1, stride=2, dilation=1, groups=groups)
    x = torch.randn(8, 4, 9, 7)
    small = fxround.quantize_weights(layer, only_weights("int3:channel"), x, "gptq")
    w = layer.weight.detach().reshape(6, -1)
    grid = Grid.of(w, "int3:channel")
    for group, part in enumerate(x.chunk(groups, 1)):
        patches = F.unfold(part, 3, padding=1, stride=2).transpose(1, 2).reshape(-1, w.shape[1])
        rows = slice(group * 6 // groups, (group + 1) * 6 // groups)
        own = Grid(grid.rounding, tuple(scale.expand(w.shape)[rows] for scale in grid.scales))
        assert torch.equal(small.weight.reshape(6, -1)[rows], reference(w[rows], patches, own, 0.01, False))


def test_a_weight_of_another_layout_has_the_same_values() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(8, 4, 9, 7)
    small = fxround.quantize_weights(layer, only_weights("int3:channel"), x, "gptq")
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = fxround.quantize_weights(layer, only_weights("int3:channel"), x, "gptq")
    assert torch.equal(small.weight, other.weight)


def test_a_later_layer_sees_the_rounded_earlier_ones() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), torch.randn(64, 16)
    small = fxround.quantize_weights(model, only_weights("int2:channel"), x, "gptq")
    w = model[1].weight.detach()
    inner = small[0](x).detach()
    assert torch.equal(small[1].weight, reference(w, inner, Grid.of(w, "int2:channel"), 0.01, False))


class Experts(nn.Module):
    """A weight for each item of a batch of matrices, from the left and from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.left = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.left, torch.bmm(x, self.right))


def test_batches_of_matrices_and_weights_on_either_side() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(3, 10, 8)
    small = fxround.quantize_weights(model, only_weights("e2m1fn"), x, "gptq")
    grid = Grid.of(model.right.detach(), "e2m1fn")
    for e in range(3):
        w = model.right[e].detach().T.contiguous()
        assert torch.equal(small.right[e].T, reference(w, x[e], grid, 0.01, False))
        inner = (x[e] @ small.right[e]).detach()
        assert torch.equal(small.left[e], reference(model.left[e].detach(), inner.T, grid, 0.01, False))


def test_products_are_nearer_than_those_of_nearest_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(512, 32) @ torch.randn(32, 32)
    plain = fxround.quantize_weights(model, only_weights("int3:channel"), x).quantization
    learned = fxround.quantize_weights(model, only_weights("int3:channel"), x, "gptq").quantization
    for row, other in zip(learned.weights, plain.weights, strict=True):
        assert row.output_sqnr is not None and other.output_sqnr is not None
        assert row.output_sqnr > other.output_sqnr + 1 and row.weight_sqnr < other.weight_sqnr


def test_refusals() -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="read more than once"):
        fxround.quantize_weights(nn.LSTM(8, 4), only_weights("int4:channel"), x, "gptq")
    with pytest.raises(ValueError, match="transposed convolution, no product"):
        fxround.quantize_weights(nn.ConvTranspose1d(5, 4, 3), only_weights("int4:channel"), x, "gptq")
    broken = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        broken[0].bias[0] = torch.inf
    with pytest.raises(ValueError, match=r"inputs of 1\.weight have NaNs or infinities"):
        fxround.quantize_weights(broken, only_weights("int4:channel"), x, "gptq")
    for option, said in (({"damp": 0}, "positive number"), ({"block": 0}, "block is 0")):
        with pytest.raises(ValueError, match=said):
            fxround.quantize_weights(nn.Linear(8, 4), only_weights("int4:channel"), x, "gptq", **option)
    with pytest.raises(TypeError, match="its options are damp, act_order, block"):
        fxround.quantize_weights(nn.Linear(8, 4), only_weights("int4:channel"), x, "gptq", rate=1)


def test_constant_data_are_no_obstacle() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 4)
    for x in (torch.ones(5, 12), torch.zeros(5, 12)):
        small = fxround.quantize_weights(layer, only_weights("int4:channel"), x, "gptq")
        w = layer.weight.detach()
        assert torch.equal(small.weight, reference(w, x, Grid.of(w, "int4:channel"), 0.01, False))


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), torch.randn(64, 16)
    whole = fxround.quantize_weights(model, only_weights("int2:channel"), x, "gptq")
    ran = GPTQ.run

    def pressed(self: GPTQ, task: object) -> object:
        import signal

        for step in ran(self, task):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)
            yield step

    monkeypatch.setattr(GPTQ, "run", pressed)
    part = fxround.quantize_weights(model, only_weights("int2:channel"), x, "gptq")
    assert part.quantization.interrupted and "interrupted" in str(part.quantization)
    assert [row.method for row in part.quantization.weights] == ["gptq", "nearest"]
    assert torch.equal(part[0].weight, whole[0].weight)
    assert torch.equal(part[1].weight, fxround.round(model[1].weight, "int2:channel"))
