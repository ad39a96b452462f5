"""The gradients of a loss with respect to a model's results, which enter the backward part of a joint graph.

The loss is the caller's function, computed by PyTorch. Its derivatives continue those of the graph, so that the error
of a weight's gradient contains what the roundings of the forward part do to it by way of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.attribution.derivatives import differentiable
from fxround.attribution.linearized import Linearized
from fxround.attribution.losses import Loss
from fxround.attribution.states import State, is_float
from fxround.attribution.widening import widely
from fxround.errors import type_of
from fxround.graph.site import Site

_PLACE = Site("", "", "loss", "", "", "", "the loss")


@dataclass(frozen=True)
class Tangents:
    """The gradients of ``loss(result)``; ``spec`` is the structure of the model's result."""

    loss: Callable[[Any], Tensor]
    spec: Any

    def states(self, run: Linearized, results: list[State], wanted: list[int]) -> list[State]:
        """Return the states of the gradients of results at these positions."""
        floats = [i for i, state in enumerate(results) if is_float(state.bits)]
        places = [floats.index(i) for i in wanted]

        def gradients(*tensors: Tensor, further: bool = True) -> tuple[Tensor, ...]:
            given = dict(zip(floats, tensors, strict=True))
            with torch.enable_grad():
                leaves = [given.get(i, state.bits) for i, state in enumerate(results)]
                value = self._value(pytree.tree_unflatten(leaves, self.spec), states[0].bits.dtype)
                made = torch.autograd.grad(value, tensors, create_graph=further, allow_unused=True)
            return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(made, tensors, strict=True))

        def at(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return gradients(*(value.detach().requires_grad_() for value in values), further=False)

        states = [results[i] for i in floats]
        derived = gradients(*(s.derived if s.derived.requires_grad else s.derived.requires_grad_() for s in states))
        bits = at([state.bits for state in states])
        exact = at([state.shifted(0) for state in states])
        missed: list[Tensor | None] = [None] * len(floats)
        moving_to, other = exact, None
        moved: tuple[Tensor | None, ...] = (None,) * len(floats)
        if any(state.moves for state in states):
            plus, minus = (at([state.shifted(sign) for state in states]) for sign in (1, -1))
            missed = [(a + b) / 2 - c for a, b, c in zip(plus, minus, exact, strict=True)]
            if run.noise is not None:
                near = [state.nearby(run.noise) for state in states]
                moving_to = at([value.double() for value in near])
                other = [rounded.double() - wide for rounded, wide in zip(at(near), moving_to, strict=True)]
            middle = tuple(state.shifted(0) for state in states)
            moving = tuple(s.shifted(1) - m for s, m in zip(states, middle, strict=True))
            with differentiable(lambda: "loss"):
                moved = torch.autograd.functional.jvp(gradients, middle, moving, strict=False)[1]
        entered = []
        for place, index in zip(places, wanted, strict=True):
            passed = moved[place]
            error = bits[place].double() - exact[place]
            losses = [Loss(error=error)]
            if other is not None:
                more, steps = run.wandering(error, other[place], moving_to[place] - exact[place])
                losses += more
                if steps is not None:
                    missed[place] = steps
            state = State(bits[place], derived[place], None if passed is None else passed.to(derived[place].dtype))
            entered.append(run.enter(f"loss_{index}", _PLACE, state, losses, missed[place]))
        return entered

    def values(self, results: list[Any], wanted: list[int]) -> list[Tensor]:
        """Return the gradients of results at these positions for these results."""
        leaves = [value.detach().requires_grad_() if is_float(value) else value for value in results]
        own = next(leaf.dtype for leaf in leaves if is_float(leaf))
        with torch.enable_grad():
            value = self._value(pytree.tree_unflatten(leaves, self.spec), None if own == torch.float64 else own)
            made = torch.autograd.grad(value, [leaves[i] for i in wanted], allow_unused=True)
        return [torch.zeros_like(leaves[i]) if g is None else g for g, i in zip(made, wanted, strict=True)]

    def _value(self, made: Any, own: torch.dtype | None) -> Tensor:
        value: Any = widely(self.loss, made, own)
        if not is_float(value) or value.numel() != 1:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type_of(value)
            raise TypeError(f"loss returned {kind}; expected a floating-point tensor of one element")
        one: Tensor = value
        return one
