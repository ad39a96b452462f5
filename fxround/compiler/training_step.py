"""One autograd function for a forward and a backward graph.

The forward graph saves the values that the backward graph reads; the backward graph runs with the (seed, sample) of its
own forward, even if the module's has changed. A result that no loss uses has the gradient zero; a gradient that depends
on unused results alone is None, as in PyTorch. In eval mode nothing is saved until a gradient is first requested; then
the forward graph runs again, with the same bits. Values are saved by ``save_for_backward``, so that a change in place
raises, memory is freed after the backward, and ``retain_graph=True`` keeps it. Gradients that are computed under
``create_graph=True`` can be differentiated again (``derivatives``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, fx

from fxround.capture.transforms import by_rows, will_run
from fxround.compiler.derivatives import Derivatives
from fxround.errors import FxroundError
from fxround.float_state import require_ieee_arithmetic
from fxround.locks import applied
from fxround.numerics.lazy import cached_property
from fxround.passes.delayed_scales import DelayedScale
from fxround.passes.partition import Parts
from fxround.python_model.method_dispatch import unwatched
from fxround.runtime.schedule.straight import Straight


class Differentiated(Protocol):
    """What a backward pass needs of a training step; ``TrainingStep`` has the meanings."""

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
    @property
    def derivatives(self) -> Derivatives | None: ...


@dataclass(frozen=True)
class TrainingStep:
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
    derivatives those of the gradients
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
    derivatives: Derivatives | None = None

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


def differentiable(
    step: TrainingStep, inputs: Sequence[Any], rng: Tensor, record: Record | None = None
) -> tuple[Any, ...]:
    """Return the results of the forward graph, which autograd can differentiate if they have a tangent.

    record: takes the largest magnitudes that the backward graph returns.
    """
    results: tuple[Any, ...] = applied(_Step, step, rng.clone(), record, *inputs)
    return results


def differentiable_later(
    results: Sequence[Any],
    chosen: Sequence[bool],
    step: Callable[[], tuple[Differentiated, Sequence[int], Sequence[Tensor]]],
    inputs: Sequence[Any],
    rng: Tensor,
) -> tuple[Any, ...]:
    """Return computed results, of which the chosen ones have a step that is only made when one is differentiated.

    ``step()`` returns the step, the positions of its inputs among ``inputs``, and its multipliers. Its forward graph
    runs again.
    """
    given = tuple(result if later else None for result, later in zip(results, chosen, strict=True))
    if not any(chosen):
        return tuple(results)
    shown: Any = applied(_Later, given, step, rng.clone(), *inputs)
    return tuple(shown[i] if later else results[i] for i, later in enumerate(chosen))


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
    def forward(ctx: Any, step: TrainingStep, rng: Tensor, record: Record | None, *inputs: Any) -> tuple[Any, ...]:
        outputs = step.forwards(*inputs, rng)
        results, saved = outputs[: step.results], _kept(step, inputs, outputs[step.results :])
        ctx.step, ctx.rng, ctx.record, ctx.inputs = step, rng, record, _Inputs(step, inputs)
        _save(ctx, saved)
        ctx.set_materialize_grads(False)
        ctx.like = [(results[i].shape, results[i].dtype, results[i].device) for i in step.tangents]
        passive = [r for i, r in enumerate(results) if isinstance(r, Tensor) and i not in step.tangents]
        ctx.mark_non_differentiable(*passive)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        saved, inputs, number = _saved(ctx), ctx.inputs, len(ctx.needs_input_grad) - 3
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.inputs = None

        def gradients(tangents: Sequence[Any]) -> Sequence[Any]:
            with unwatched():
                results = _gradients(ctx.step, saved, tangents, ctx.like, ctx.rng, ctx.record)
            if torch.is_grad_enabled():
                results = _again(results, ctx.step, inputs.unchanged(ctx.step), tangents, ctx.like, ctx.rng)
            return [results.get(i) for i in range(number)]

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
        def computed() -> tuple[Differentiated, Sequence[int], Sequence[Any], tuple[Any, ...]]:
            step, positions, multipliers = ctx.step()
            entering = [*(inputs[i] for i in positions), *multipliers]
            with torch.no_grad():
                return step, positions, entering, step.forwards(*entering, ctx.rng)

        def gradients(tangents: Sequence[Any]) -> Sequence[Any]:
            with unwatched():
                step, positions, entering, outputs = computed()
                like = [(outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in step.tangents]
                results = _gradients(step, outputs[step.results :], tangents, like, ctx.rng)
            if torch.is_grad_enabled():
                results = _again(results, step, entering, tangents, like, ctx.rng)
            by_input = {positions[i]: gradient for i, gradient in results.items()}
            return [by_input.get(i) for i in range(len(inputs))]

        return None, None, None, *by_rows(gradients, given)


class _Again(torch.autograd.Function):
    """Gradients that can be differentiated again.

    The step that does it is made when it is needed: its forward graph computes the gradients once more.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: tuple[Any, ...], derivatives: Derivatives, rng: Tensor, *inputs: Any
    ) -> tuple[Any, ...]:
        ctx.derivatives, ctx.rng = derivatives, rng
        _save(ctx, inputs)
        ctx.set_materialize_grads(False)
        return gradients

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        inputs, wanted = _saved(ctx), _asked(ctx)

        def gradients(tangents: Sequence[Any]) -> Sequence[Any]:
            shown = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
            reached = wanted & frozenset().union(*(ctx.derivatives.sources[i] for i in shown))
            zeros = {i: torch.zeros_like(inputs[i], memory_format=torch.contiguous_format) for i in reached}
            with unwatched():
                step = ctx.derivatives.step(shown, wanted, inputs)
                if step is None:
                    return [zeros.get(i) for i in range(len(inputs))]
                with torch.no_grad():
                    outputs = step.forwards(*inputs, ctx.rng)
                like = [(outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in step.tangents]
                chosen = [tangents[i] for i in shown]
                results = _gradients(step, outputs[step.results :], chosen, like, ctx.rng)
            if torch.is_grad_enabled():
                results = _again(results, step, inputs, chosen, like, ctx.rng)
            return [results.get(i, zeros.get(i)) for i in range(len(inputs))]

        return None, None, None, *by_rows(gradients, given)


def _asked(ctx: Any) -> frozenset[int]:
    """Return the positions of the inputs of ``_Again`` whose gradients this backward pass may need."""
    edges = iter(ctx.next_functions[1:])  # the first is that of (seed, sample)
    asked = set()
    for i, (value, needed) in enumerate(zip(ctx.others, ctx.needs_input_grad[3:], strict=True)):
        if value is not Tensor:
            continue
        node, _ = next(edges)
        if needed and node is not None and will_run(node):
            asked.add(i)
    return frozenset(asked)


class _Inputs:
    """What entered a forward pass, and the versions that it had.

    A second derivative needs all of it, and the backward pass may need less: it must not matter to a backward pass that
    running statistics change between a forward pass and it. Inputs that the call itself writes are copied.
    """

    __slots__ = ("_values", "_versions")

    def __init__(self, step: TrainingStep, values: Sequence[Any]) -> None:
        if step.mutated and step.derivatives is not None:
            written = step.mutated & step.derivatives.needed
            values = [value.clone() if i in written else value for i, value in enumerate(values)]
        self._values = values
        self._versions = [_version(value) for value in values]

    def unchanged(self, step: TrainingStep) -> Sequence[Any]:
        """Return the values; raise FxroundError if one that the gradients are computed from was changed in place."""
        derivatives = step.derivatives
        needed = derivatives.needed if derivatives is not None else frozenset()
        for i, (value, version) in enumerate(zip(self._values, self._versions, strict=True)):
            if derivatives is not None and i in needed and _version(value) != version:
                raise FxroundError(
                    f"{derivatives.name(i)} was changed in place between a call and its backward pass with "
                    "create_graph=True, which keeps it for second derivatives: change it after them, or pass a copy."
                )
        return self._values


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


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
    known = [given[i] for i in step.tangents]
    require_ieee_arithmetic()
    with torch.no_grad():
        tangents = [t.resolve_neg() for t in _tangents(step, given, like)]
        values = step.backwards(*saved, *tangents, rng)
        gradients = values[: len(step.gradients)]
        if record is not None and step.late:
            record(step.late, values[len(step.gradients) :])
    used = {i for i, tangent in enumerate(known) if tangent is not None}
    rows = zip(step.gradients, step.reached, gradients, strict=True)
    kept = {i: g if reached else g.clone() for i, reached, g in rows if g is not None and used & (reached or used)}
    return _owned(kept, [*saved, *tangents])


def _tangents(step: Differentiated, given: Sequence[Any], like: Sequence[Any]) -> list[Tensor]:
    """Return the gradients of the results that have one in the graph; zeros for a result that no loss uses."""
    pairs = zip((given[i] for i in step.tangents), like, strict=True)
    return [torch.zeros(s, dtype=dtype, device=device) if t is None else t for t, (s, dtype, device) in pairs]


def _kept(step: TrainingStep, inputs: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
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


def _again(
    gradients: dict[int, Tensor],
    step: Differentiated,
    inputs: Sequence[Any],
    given: Sequence[Any],
    like: Sequence[Any],
    rng: Tensor,
) -> dict[int, Tensor]:
    """Return gradients that can be differentiated again, by the position of their input.

    inputs: what entered the step, with its history. given: the tangents by the numbers of the results.
    """
    derivatives = step.derivatives
    if derivatives is None:
        depended = [value for value in (*inputs, *given) if isinstance(value, Tensor) and value.requires_grad]
        final: tuple[Tensor, ...] = applied(_Final, tuple(gradients.values()), *depended)
        return dict(zip(gradients, final, strict=True))
    values = [*inputs, *_tangents(step, given, like)]
    requires = {i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad}
    varying = [
        gradients.get(position) if sources & requires else None
        for position, sources in zip(step.gradients, derivatives.sources, strict=True)
    ]
    needed = [value if i in derivatives.needed else shaped(value) for i, value in enumerate(values)]
    again = applied(_Again, tuple(varying), derivatives, rng, *needed)
    pairs = zip(step.gradients, again, strict=True)
    return gradients | {position: gradient for position, gradient in pairs if gradient is not None}


def shaped(value: Any) -> Any:
    """Return a tensor of the same shape, dtype and device that takes no memory; another value as it is."""
    return value.detach().new_zeros(()).expand(value.shape) if isinstance(value, Tensor) else value


class _Final(torch.autograd.Function):
    """Gradients that raise if they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *depended: Tensor) -> tuple[Tensor, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise FxroundError(
            "this gradient was computed by a loaded program, which has no second derivatives: compile the model in "
            "this process, with fxround.compile, or export one that calls torch.autograd.grad itself."
        )
