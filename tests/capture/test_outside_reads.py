"""Tensors from outside (attributes that are no buffers, globals) in models that change tensors in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError


class Edges(nn.Module):
    """Makes a tensor of an attribute alone, and writes its columns, as CHGNet's ``BatchedGraph.from_graphs`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.arange(12).reshape(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.edges.new_zeros([4, 3])
        shifted[:, 0] = self.edges[:, 0] + 1
        shifted[:, 1] = self.edges[:, 2] + 7
        return x + shifted


class Counting(nn.Module):
    """Changes a view of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.total.T[1].add_(x[:, 1])
        return x + self.total


@pytest.mark.parametrize("gradients", [False, True])
def test_a_tensor_made_of_attributes_is_changed_in_place(gradients: bool, tmp_path: Path) -> None:
    model, x = Edges(), torch.rand(4, 3)
    compiled = fxround.compile(model, "reproducible")
    with torch.set_grad_enabled(gradients):
        assert torch.equal(compiled(x), model(x))  # exact: one addition of small integers to each element
        model.edges = model.edges * 3
        assert torch.equal(compiled(x), model(x))  # exact, as above
        model.edges.mul_(2)
        assert torch.equal(compiled(x), model(x))  # exact, as above
    assert torch.equal(fxround.load(compiled.export(tmp_path / "edges.pt2", x))(x), compiled(x))


def test_an_attribute_that_is_changed_in_place_is_changed_by_a_call_and_refused_elsewhere(tmp_path: Path) -> None:
    model, eager, x = Counting(), Counting(), torch.rand(4, 3)
    compiled = fxround.compile(model, "reproducible")
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x)) and torch.equal(model.total, eager.total)  # exact: single additions
    with pytest.raises(CaptureError, match=r"changes self.total \(Tensor\) at .*: self.total.T\[1\].add_"):
        compiled.export(tmp_path / "total.pt2", x)
