"""One autograd function for a forward and a backward graph.

The forward graph saves the values that the backward graph reads; the backward graph runs with the (seed, sample) of its
own forward, even if the module's has changed. A result that no loss uses has the gradient zero; a gradient that depends
on unused results alone is None, as in PyTorch. In eval mode nothing is saved until a gradient is first requested; then
the forward graph runs again, with the same bits. Values are saved by ``save_for_backward``, so that a change in place
raises, memory is freed after the backward, and ``retain_graph=True`` keeps it. A second derivative raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, fx

from fxround.capture.transforms import by_rows
from fxround.compiler.method_dispatch import unwatched
from fxround.errors import FxroundError
from fxround.float_state import require_ieee_arithmetic
from fxround.numerics.lazy import cached_property
from fxround.passes.delayed_scales import DelayedScale
from fxround.passes.partition import Parts
from fxround.runtime.schedule.straight import Straight


class Differentiated(Protocol):
    """What a backward pass needs of a training step; ``Step`` has the meanings."""

    @property
    def results(self) -> int: ...
    @property
    def gradients(self) -> tuple[int, ...]: ...
    @property
    def reached(self) -> tuple[frozenset[int], ...]: ...
    @property
    def tangents(self) -> tuple[int, ...]: ...
    @property
    def late(self) -> tuple[DelayedScale, ...]: ...
    @property
    def forwards(self) -> Callable[..., Any]: ...
    @property
    def backwards(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Step:
    """A training step, as two graphs.

    shown       the parts of the lowered graph, one node per operation
    forward     the running graph (*inputs, rng) -> (*results, *saved)
    backward    the running graph (*saved, *tangents, rng) -> gradients
    results     how many of the forward graph's outputs are the model's
    gradients   the position among the inputs to which each gradient belongs
    reached     the tangents on which each gradient depends
    tangents    the position among the results to which each tangent belongs
    early       the delayed scales whose magnitudes are the last ones of ``results``
    late        those whose magnitudes follow the gradients
    mutated     the positions of the inputs to which results are written after the forward
    """

    shown: Parts
    forward: fx.GraphModule
    backward: fx.GraphModule
    results: int
    gradients: tuple[int, ...]
    reached: tuple[frozenset[int], ...]
    tangents: tuple[int, ...]
    mutated: frozenset[int]
    early: tuple[DelayedScale, ...] = ()
    late: tuple[DelayedScale, ...] = ()

    @cached_property
    def forwards(self) -> Straight:
        """The forward graph, by way of plans for small inputs."""
        return Straight(self.forward)

    @cached_property
    def backwards(self) -> Straight:
        """The backward graph, by way of plans for small inputs."""
        return Straight(self.backward)


# Takes the largest magnitudes of a step.
Record = Callable[[Sequence[DelayedScale], Sequence[Tensor]], None]


def differentiable(step: Step, inputs: Sequence[Any], rng: Tensor, record: Record | None = None) -> tuple[Any, ...]:
    """Return the results of the forward graph, which autograd can differentiate if they have a tangent.

    record: takes the largest magnitudes that the backward graph returns.
    """
    results: tuple[Any, ...] = _Step.apply(step, rng.clone(), record, *inputs)  # type: ignore[no-untyped-call]
    return results


def differentiable_later(
    results: Sequence[Any],
    step: Callable[[], tuple[Differentiated, Sequence[int], Sequence[Tensor]]],
    inputs: Sequence[Any],
    rng: Tensor,
) -> tuple[Any, ...]:
    """Return computed results with a step that is only made when one of them is differentiated.

    ``step()`` returns the step, the positions of its inputs among ``inputs``, and its multipliers. Its forward graph
    runs again.
    """
    later: tuple[Any, ...] = _Later.apply(tuple(results), step, rng.clone(), *inputs)  # type: ignore[no-untyped-call]
    return later


def _save(ctx: Any, values: Sequence[Any]) -> None:
    """Save tensors and other values, ``None`` among them, for the backward pass."""
    ctx.others = [Tensor if isinstance(value, Tensor) else value for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))


def _saved(ctx: Any) -> list[Any]:
    """Return what ``_save`` saved."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if value is Tensor else value for value in ctx.others]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, rng: Tensor, record: Record | None, *inputs: Any) -> tuple[Any, ...]:
        outputs = step.forwards(*inputs, rng)
        results, saved = outputs[: step.results], _kept(step, inputs, outputs[step.results :])
        ctx.step, ctx.rng, ctx.record, ctx.inputs = step, rng, record, inputs
        _save(ctx, saved)
        ctx.set_materialize_grads(False)
        ctx.like = [(results[i].shape, results[i].dtype, results[i].device) for i in step.tangents]
        passive = [r for i, r in enumerate(results) if isinstance(r, Tensor) and i not in step.tangents]
        ctx.mark_non_differentiable(*passive)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        saved, inputs = _saved(ctx), _released(ctx)

        def gradients(tangents: Sequence[Any]) -> Sequence[Any]:
            with unwatched():
                found = _gradients(ctx.step, saved, tangents, ctx.like, ctx.rng, ctx.record)
            return _final([found.get(i) for i in range(len(inputs))], [*inputs, *tangents])

        return None, None, None, *by_rows(gradients, given)


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: tuple[Any, ...], step: Any, rng: Tensor, *inputs: Any) -> tuple[Any, ...]:
        ctx.step, ctx.rng = step, rng
        _save(ctx, inputs)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        inputs = _saved(ctx)

        @functools.cache
        def computed() -> tuple[Differentiated, Sequence[int], tuple[Any, ...]]:
            step, positions, multipliers = ctx.step()
            with torch.no_grad():
                return step, positions, step.forwards(*(inputs[i] for i in positions), *multipliers, ctx.rng)

        def gradients(tangents: Sequence[Any]) -> Sequence[Any]:
            with unwatched():
                step, positions, outputs = computed()
                like = [(outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in step.tangents]
                found = _gradients(step, outputs[step.results :], tangents, like, ctx.rng)
            by_input = {positions[i]: gradient for i, gradient in found.items()}
            return _final([by_input.get(i) for i in range(len(inputs))], [*inputs, *tangents])

        return None, None, None, *by_rows(gradients, given)


def _gradients(
    step: Differentiated,
    saved: Sequence[Any],
    given: Sequence[Any],
    like: Any,
    rng: Tensor,
    record: Record | None = None,
) -> dict[int, Tensor]:
    """Return the gradients of the step's inputs, by position, except those that depend on unused results alone.

    One that depends on no tangent, and may be a constant of the graph, is returned as a copy.
    """
    found = [given[i] for i in step.tangents]
    pairs = zip(found, like, strict=True)
    tangents = [
        torch.zeros(shape, dtype=dtype, device=device) if t is None else t.resolve_neg()
        for t, (shape, dtype, device) in pairs
    ]
    require_ieee_arithmetic()
    with torch.no_grad():
        values = step.backwards(*saved, *tangents, rng)
        gradients = values[: len(step.gradients)]
        if record is not None and step.late:
            record(step.late, values[len(step.gradients) :])
    used = {i for i, tangent in enumerate(found) if tangent is not None}
    rows = zip(step.gradients, step.reached, gradients, strict=True)
    kept = {i: g if reached else g.clone() for i, reached, g in rows if g is not None and used & (reached or used)}
    return _owned(kept, [*saved, *tangents])


def _kept(step: Step, inputs: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
    """Return the values to save: copies of inputs that the call is about to overwrite, and detached views."""
    overwritten = {id(inputs[i]) for i in step.mutated}
    kept = [value.clone() if id(value) in overwritten else value for value in saved]
    return [value.detach() if isinstance(value, Tensor) and value._is_view() else value for value in kept]


def _owned(gradients: dict[int, Tensor], others: Sequence[Any]) -> dict[int, Tensor]:
    """Return gradients that own their memory, because autograd adds to them in place."""
    taken = {value.untyped_storage().data_ptr() for value in others if isinstance(value, Tensor)}
    owned = {}
    for position, gradient in gradients.items():
        if gradient.layout != torch.strided:
            # The indices and values of nn.Embedding(sparse=True) have no storage that this tensor could name.
            owned[position] = gradient.clone()
            continue
        address = gradient.untyped_storage().data_ptr()
        owned[position] = gradient.clone() if address in taken else gradient
        taken.add(address)
    return owned


def _released(ctx: Any) -> Any:
    """Return the inputs of the forward pass; those of a graph that is not retained are freed, as saved values are."""
    inputs = ctx.inputs
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.inputs = (None,) * len(inputs)
    return inputs


def _final(gradients: Sequence[Tensor | None], sources: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the gradients; under ``create_graph=True``, ones that raise if they are differentiated again.

    sources: the values on which they depend, so that autograd finds a way from a second derivative's loss to each.
    """
    if not torch.is_grad_enabled():
        return gradients
    depended = [value for value in sources if isinstance(value, Tensor) and value.requires_grad]
    final: Sequence[Tensor | None] = _Final.apply(tuple(gradients), *depended)  # type: ignore[no-untyped-call]
    return final


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *sources: Tensor) -> tuple[Tensor | None, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise FxroundError(
            "this gradient was computed by fxround's backward graph, which cannot be differentiated: for second "
            "derivatives, call torch.autograd.grad inside of the model that is compiled, or use the original model."
        )
