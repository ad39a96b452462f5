"""Exported programs whose arguments have free sizes that are added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxround


class Joined(nn.Module):
    """Reads the sum of the first sizes of its arguments, of which no one is the size of a tensor that enters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *parts: Tensor) -> Tensor:
        whole = torch.cat(parts)
        rows = 2 * whole.shape[0] + 1
        return self.linear(whole).reshape(rows - 1, 2) * rows


class Normalized(nn.Module):
    """A graph convolution that gives every node an edge to itself, as those of torch_geometric do."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        own = torch.arange(nodes.shape[0])
        sources, targets = torch.cat([edges, torch.stack([own, own])], 1)
        weights = nodes.new_ones(sources.shape[0])
        degrees = nodes.new_zeros(nodes.shape[0]).scatter_add(0, targets, weights)
        messages = (nodes / degrees[:, None])[sources] * weights[:, None]
        return torch.zeros_like(nodes).index_add(0, targets, messages)


@pytest.mark.parametrize("count, gradients", [(2, True), (3, False)])
def test_the_sum_of_several_sizes_is_written(count: int, gradients: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Joined().eval()
    compiled = fxround.compile(model, "reproducible")
    example = tuple(torch.rand(3 + i, 4) for i in range(count))
    loaded = fxround.load(compiled.export(tmp_path / "joined.pt2", example, gradients=gradients))
    for sizes in ((5, 3, 4), (1, 2, 1)):
        parts = tuple(torch.rand(size, 4) for size in sizes[:count])
        assert torch.equal(loaded(*parts), compiled(*parts))
        if gradients:
            there = [loaded.program.get_parameter(name) for name, _ in model.named_parameters()]
            here = torch.autograd.grad(compiled(*parts).sum(), list(model.parameters()))
            assert all(map(torch.equal, torch.autograd.grad(loaded(*parts).sum(), there), here))


def test_a_graph_convolution_with_edges_to_itself_is_written(tmp_path: Path) -> None:
    compiled = fxround.compile(Normalized(), "reproducible")
    loaded = fxround.load(compiled.export(tmp_path / "g.pt2", (torch.rand(5, 4), torch.randint(0, 5, (2, 9)))))
    for nodes, edges in ((7, 3), (4, 4), (6, 30)):
        given = torch.rand(nodes, 4), torch.randint(0, nodes, (2, edges))
        assert torch.equal(loaded(*given), compiled(*given))
