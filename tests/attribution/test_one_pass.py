"""Operations of an attribution that are evaluated once: what they pass on is the derivative that PyTorch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layers import Calls
from torch import Tensor
from torch.autograd.functional import jvp
from torch.nn import functional as F

from fxround.attribution.graphs import plan_of
from fxround.attribution.subject import Subject
from fxround.policy import Policy

_Choice = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    "choice",
    [
        lambda h: h.amax((1, 2)),
        lambda h: h.amin(-1, keepdim=True),
        lambda h: h.amax(),
        lambda h: F.max_pool2d(h, 2, stride=1, padding=1),
        lambda h: h.max(0).values,
        lambda h: h.sort(-1).values,
    ],
    ids=["amax", "amin", "whole", "pooled", "max", "sorted"],
)
def test_a_choice_passes_the_derivative_in_the_direction_of_the_perturbation(choice: _Choice) -> None:
    x, one = torch.randn(2, 3, 4, 5), torch.full((2, 3, 4, 5), 1.25)
    # Elements that are equal, after a rounding that moves them in several directions.
    x[..., :3] = x.amax() + 1
    model = Calls(lambda a, b: choice(a * b) * 1.0)
    subject = Subject.of(model, (x, one), Policy.parse("stochastic"), None, None, 0, 0)
    steps = plan_of(subject.entry.lowered).steps
    (product, *_), (*_, chosen) = (
        [s.node.name for s in steps if s.call is not None],
        [s for s in steps if s.kind == "exact"],
    )
    run, _ = subject.linearized(torch.Generator().manual_seed(0), (product, chosen.node.name), ())
    of, state = run.seen[product], run.seen[chosen.node.name]
    passed = state.moved[0] if chosen.several else state.moved
    _, expected = jvp(choice, of.bits, of.moved)
    assert bool(of.moved.any()) and passed.shape == (state.bits[0] if chosen.several else state.bits).shape
    # Not bits: two means of equal elements.
    torch.testing.assert_close(passed.reshape(expected.shape), expected, rtol=1e-6, atol=0)
