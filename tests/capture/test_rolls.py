"""Rolled tensors as pieces are PyTorch's, in graphs and at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxround
from fxround.capture.rolls import as_pieces

ROLLS = [
    *((3, 0), (-1, -1), ((2, -5), (0, 1)), (7, 1), (0, 0)),
    *(((4, 5), (0, 1)), ((1, 1), (0, 0)), (-9, 0), (2, ()), ((3,), ())),
]


@pytest.mark.parametrize("shifts, dims", ROLLS)
@pytest.mark.parametrize("shape", [(4, 5), (1, 3), (0, 3)])
def test_pieces_are_rolled(shape: tuple[int, int], shifts: Any, dims: Any) -> None:
    x = torch.arange(shape[0] * shape[1]).reshape(shape)
    rolled = as_pieces(torch.roll)(x, shifts, dims)
    assert torch.equal(rolled, x.roll(shifts, dims))
    # A functional graph returns what is no argument.
    assert rolled is not x


def test_wrong_dimensions_are_pytorch_s_errors() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        as_pieces(torch.roll)(torch.rand(3), 1, 1)
    with pytest.raises(RuntimeError, match="shifts and dimensions must align"):
        as_pieces(torch.roll)(torch.rand(3), (1, 2), 0)


def test_graphs_of_rolls_have_slices_where_sizes_are_fixed() -> None:
    """Numbers select along the batch alone, whose size varies; gradients are rolled back."""
    compiled = fxround.compile(lambda x: x.roll((1, -2), (0, 1)) * x, "reproducible")
    for rows in (4, 6):
        x = torch.rand(rows, 5, requires_grad=True)
        result = compiled(x)
        assert torch.equal(result, x.roll((1, -2), (0, 1)) * x)
        (found,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(found, (x + 0).roll((-1, 2), (0, 1)) + x.roll((1, -2), (0, 1)))
    assert len(compiled.captures()) == 1 and "aten.cat" in compiled.graph_text()
