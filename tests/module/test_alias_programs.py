"""Functions of views, operations in place and returned inputs share memory as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import alias_programs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import CaptureError

PROGRAMS = [alias_programs.drawn(seed) for seed in range(16)]


@pytest.mark.part(5)
@pytest.mark.parametrize("policy", alias_programs.POLICIES)
@pytest.mark.parametrize("seed", range(len(PROGRAMS)))
def test_drawn_functions_share_memory_as_in_eager_pytorch(seed: int, policy: str) -> None:
    fault = alias_programs.fault_of(PROGRAMS[seed], policy)
    assert not fault or fault.startswith("refused"), PROGRAMS[seed].text


@pytest.mark.parametrize(
    "read", [lambda x: x.T, lambda x: x.mT, lambda x: x.real, lambda x: x.data], ids=["T", "mT", "real", "data"]
)
def test_attributes_of_tensors_that_are_results_are_those_of_the_call(read: Callable[[Tensor], Tensor]) -> None:
    compiled = fxround.compile(lambda x: (read(x), x * 2), "reproducible")
    for x in (torch.ones(2, 4), torch.full((2, 4), 5.0)):
        seen = compiled(x)[0]
        assert torch.equal(seen, read(x)) and seen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("training, p", [(False, 0.5), (True, 0.0)])
def test_a_change_in_place_is_seen_through_a_dropout_that_drops_nothing(training: bool, p: float) -> None:
    def changed(x: Tensor) -> Tensor:
        kept = F.dropout(x, p, training=training)
        x.mul_(2)
        return kept + 1

    x = torch.ones(2, 4)
    assert torch.equal(fxround.compile(changed, "reproducible")(x), torch.full((2, 4), 3.0))
    assert torch.equal(x, torch.full((2, 4), 2.0))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.fc(x), y * 2


def test_results_of_a_call_in_eval_mode_that_depend_on_no_gradient_require_none() -> None:
    model, x, y = Half().eval(), torch.rand(3, 4), torch.rand(3)
    compiled = fxround.compile(model, "reproducible")
    assert [r.requires_grad for r in compiled(x, y)] == [True, False]
    assert [r.requires_grad for r in compiled(x, y.requires_grad_())] == [True, True]
    model.requires_grad_(False)
    first, second = compiled(x, y)
    assert not first.requires_grad and torch.autograd.grad(second.sum(), y)[0].tolist() == [2.0] * 3


def test_a_model_that_returns_only_what_it_was_given_is_refused_with_the_reason() -> None:
    def changed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return y, x

    with pytest.raises(CaptureError, match="returns arguments, parameters and buffers alone"):
        fxround.compile(changed, "reproducible")(torch.ones(2), torch.ones(3))
