"""What a compiled model returns besides tensors has the types of the model's own results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround

LAYER = nn.Linear(3, 3)
CONSTANT = np.arange(2)

RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "sizes": lambda x: (LAYER(x), x.shape, (x * 2).shape, x.shape[1:], torch.Size([1, 2])),
    "sizes in a dict": lambda x: {"y": LAYER(x), "inside": [x.size(), (x.shape, LAYER.weight)], "n": (x * 2).numel()},
    "sizes alone": lambda x: (x * 2).shape,
    "tuples of sizes": lambda x: (LAYER(x), (x.shape[0], x.shape[1]), tuple((x * 2).shape)),
    "an array": lambda x: (x * 2).numpy(),
    "arrays": lambda x: {"y": x * 2, "array": (x.numpy(), np.asarray((x + 1).numpy() * 2, dtype=np.float64))},
    "arrays beside a constant": lambda x: ((x * 2).numpy(), CONSTANT),
    "a tensor of an array": lambda x: torch.from_numpy(x.numpy() * 2),
}


def kinds(value: Any) -> Any:
    """The types of a result and of its parts, and their sizes and numbers."""
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value), [kinds(part) for part in value]
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype, tuple(value.shape)
    return type(value), value


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_types_of_the_models(name: str, gradients: bool) -> None:
    function = RESULTS[name]
    compiled = fxround.compile(function, "reproducible")
    with torch.set_grad_enabled(gradients):
        for batch in (4, 3, 4, 2):
            x = torch.randn(batch, 3)
            assert kinds(compiled(x)) == kinds(function(x))


def test_models_that_return_sizes_are_observed_exported_and_made_for_several_samples(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
            return x * 2, x.shape

    compiled, x = fxround.compile(Sized().eval(), "stochastic"), torch.randn(4, 3)
    assert type(compiled.evaluate(x)[1]) is torch.Size and any(True for _ in compiled.observe(x))
    for gradients in (False, True):
        loaded = fxround.load(compiled.export(tmp_path / "sized.pt2", x.requires_grad_(), gradients=gradients))
        for program in (loaded, copy.deepcopy(loaded)):
            assert kinds(program(torch.randn(5, 3))) == kinds(Sized()(torch.randn(5, 3)))
    assert fxround.variability(Sized().eval(), x, samples=10, reference=None).samples == (10,)


@pytest.mark.parametrize(
    "function",
    [lambda x: {"y": x * 2, "largest": float(x.max())}, lambda x: x.sum().item(), lambda x: (x, x[0].item())],
)
def test_a_number_that_a_model_returns_is_refused_with_its_line(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(fxround.CaptureError, match=r"test_result_types\.py:\d+.*takes a number out of the graph"):
        fxround.compile(function, "reproducible")(torch.randn(6))
