"""The values that choose elements are not rounded, also where they are computed from data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxround
from fxround.graph.site import site


def sampled(mode: str, padding: str, align_corners: bool) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A ``grid_sample`` of 9 x 9 pixels, in and around which each pixel's middle is asked for."""

    class Sampled(torch.nn.Module):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=align_corners)

    torch.manual_seed(0)
    pixels = torch.stack(torch.meshgrid(torch.arange(-3.0, 12), torch.arange(-3.0, 12), indexing="xy"), -1)[None]
    grid = pixels * 2 / 8 - 1 if align_corners else (pixels * 2 + 1) / 9 - 1
    return Sampled(), torch.randn(1, 2, 9, 9), grid


# Not bilinear reflection with aligned corners: it divides a perturbed coordinate by the image's width and takes the
# integer part, where PyTorch's formula jumps from one end of the image to the other.
@pytest.mark.part("bilinear-zeros-True", "bilinear-border-False")
@pytest.mark.parametrize(
    "mode, padding, align_corners",
    [("bilinear", "zeros", True), ("bilinear", "border", False), ("bicubic", "reflection", True)],
)
def test_grid_sample_reads_its_pixels_whatever_the_perturbation(mode: str, padding: str, align_corners: bool) -> None:
    module, x, grid = sampled(mode, padding, align_corners)
    compiled = fxround.compile(module, "up_down", example_inputs=(x, grid))
    # A tolerance: each operation changes its result by an ulp. Another pixel differs by 1 or so.
    torch.testing.assert_close(compiled(x, grid), module(x, grid), rtol=0, atol=1e-4)


def test_integer_parts_that_become_an_index_are_coordinates_and_others_are_rounded() -> None:
    def read(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.floor(x * 3)
        return table[(low + 1).to(torch.int64)], low + 0.75

    # No product is within an ulp of an integer.
    x, table = torch.tensor([0.1, 0.4, 0.7, 0.9]), torch.randn(8)
    compiled = fxround.compile(read, "up_down", example_inputs=(x, table))
    kinds = {node.name: found.kind for node in compiled.graph.graph.nodes if (found := site(node)) is not None}
    assert [kind for name, kind in kinds.items() if name.startswith(("floor", "add"))] == [
        "coordinate", "coordinate", "pointwise"
    ]  # fmt: skip
    assert torch.equal(compiled(x, table)[0], table[[1, 2, 3, 3]])
