"""A whole number that .item() takes out of a graph may be a size: one graph serves all of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError

LENGTHS = ([5, 3, 2], [2, 2, 1], [5, 5, 5], [1, 0, 1])


class Masked(nn.Module):
    """As torchaudio's Conformer: the mask has the length of the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3) - 5)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(lengths.max().item())
        padding = torch.arange(longest).expand(len(x), longest) >= lengths[:, None]
        y = (x[:, :longest] @ self.weight).masked_fill(padding[..., None], 0.0)
        first = x[0, : lengths[1].item()]
        return y * longest, first.t() @ (first @ self.weight)  # a product of no terms, if the row is empty


def test_bits_are_those_of_the_model_for_every_number(tmp_path: Path) -> None:
    model = Masked()
    compiled = fxround.compile(model, "reproducible")
    x = torch.arange(60.0).reshape(3, 5, 4) - 30  # whole numbers, so that stock PyTorch's results are exact
    if torch.__version__ < "2.12":  # it cannot trace the derivative of a slice of such a size
        with pytest.raises(CaptureError, match=r"Masked.*\n.*x\[:, :longest\].*\n.*memo disaster"):
            compiled(x, torch.tensor(LENGTHS[0]))
        return
    for numbers in LENGTHS * 2:
        gradients = []
        for module in (compiled, model):
            model.zero_grad()
            y, z = module(x, torch.tensor(numbers))
            (y.sum() + z.sum()).backward()
            assert model.weight.grad is not None
            gradients.append((y, z, model.weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(compiled.captures()) == 1
    with torch.no_grad():
        loaded = fxround.load(compiled.eval().export(tmp_path / "masked.pt2", (x, torch.tensor(LENGTHS[0]))))
        for numbers in LENGTHS * 3:  # the third call runs a plan of the first
            lengths = torch.tensor(numbers)
            expected = model(x, lengths)
            for found in (compiled(x, lengths), loaded(x, lengths), dict(compiled.observe(x, lengths))["output"]):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def doubled(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(n.item())):
        x = x * 2
    return x


def chosen(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if n.item() > 2 else x * 3


@pytest.mark.parametrize(
    "function, n, advice",
    [(doubled, 3, "torch.while_loop"), (chosen, 3, "torch.where"), (chosen, 2.5, "torch.where")],
)
def test_a_number_that_decides_is_refused_with_its_line(function: Any, n: float, advice: str) -> None:
    """The graph would be that of the first number, for all of them."""
    number = torch.tensor(n, dtype=torch.float64 if isinstance(n, float) else torch.int64)
    with pytest.raises(fxround.CaptureError, match=r"test_sizes_from_data\.py:\d+.*n\.item\(\)") as error:
        fxround.compile(function, "bfloat16")(torch.ones(2), number)
    assert advice in str(error.value)


class Loops(nn.Module):
    """As PyTorch Geometric's GATConv: edges from a node to itself are removed, then every node gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3) - 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = torch.arange(len(x))
        edges = torch.cat([edges[:, edges[0] != edges[1]], torch.stack([nodes, nodes])], 1)
        values = x @ self.weight
        if edges[1].numel() == 0:
            return values
        return torch.zeros_like(values).index_add(0, edges[1], values[edges[0]])


def test_one_graph_serves_rows_that_a_mask_leaves_and_rows_of_an_argument() -> None:
    model = Loops()
    compiled = fxround.compile(model, "reproducible")
    for nodes, count in ((5, 9), (7, 11), (2, 40), (30, 3), (1, 6)):
        x = torch.arange(4.0 * nodes).reshape(nodes, 4)  # whole numbers, so that stock PyTorch's results are exact
        edges = torch.randint(0, nodes, (2, count))
        assert torch.equal(compiled(x, edges), model(x, edges))
    assert len(compiled.captures()) == 1
    x, edges = torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.long)
    assert compiled(x, edges).shape == (0, 3)
    assert len(compiled.captures()) == 2
