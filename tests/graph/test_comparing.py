"""Comparisons of tensors and dicts by few calls: what differs is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxround.graph.comparing import comparing, versions

X = torch.rand(4, 3)
OTHERS: dict[str, Tensor] = {
    "another size": torch.rand(4, 2),
    "another rank": torch.rand(12),
    "another dtype": X.double(),
    "another device": torch.empty(4, 3, device="meta"),
    "another class": nn.Parameter(X, requires_grad=False),
    "a gradient": torch.rand(4, 3, requires_grad=True),
    "a negative view": torch._neg_view(X),
    "a sparse tensor": X.to_sparse(),
}


@pytest.mark.parametrize("strides", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_a_tensor_that_differs_is_not_alike(other: str, strides: bool) -> None:
    alike = comparing([X, X], strides)
    assert alike(X, torch.rand(4, 3))
    assert not alike(X, OTHERS[other])


def test_strides_count_where_they_are_asked_for() -> None:
    turned = torch.rand(3, 4).t()
    assert comparing([X])(turned)
    assert not comparing([X], strides=True)(turned)


def test_values_that_are_no_tensors_are_never_alike() -> None:
    assert not comparing([X, 1])(X, 1)


def test_every_assignment_gives_a_dict_another_version() -> None:
    layer = nn.Linear(2, 2)
    watched = [vars(layer), layer._parameters, layer._buffers]
    before = versions(watched)
    assert versions(watched) == before
    changes = [
        lambda: setattr(layer, "training", False),
        lambda: setattr(layer, "scale", 2.0),
        lambda: delattr(layer, "scale"),
        lambda: setattr(layer, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda: layer.register_buffer("mean", torch.zeros(1)),
        lambda: layer._buffers.clear(),
    ]
    for change in changes:
        change()
        after = versions(watched)
        assert after != before
        before = after
