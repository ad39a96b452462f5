"""Gradients of exported programs: a second program, which computes the forward pass again and then the backward pass.

The joint graph of a training step has the bits of the graph without gradients, so a loaded module computes results by
the first program. When autograd asks for gradients, the second one gets the state, arguments and (seed, sample) of that
call, and the gradients of its results. The second program holds no state of its own: the parameters are inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture import export_graph
from fxround.capture.dynamo import aside
from fxround.compiler.executable import Entry
from fxround.compiler.samples_of_calls import give_back_to, read_per_call, reading, take_from
from fxround.compiler.training_step import differentiable_later, shaped
from fxround.errors import FxroundError, shown
from fxround.runtime.operands import resolved


@dataclass(frozen=True)
class Gradients:
    """What a program of gradients takes and returns: ``program(*inputs, *tangents, rng) -> gradients``.

    inputs      kind ("parameter", "buffer", "argument"), name and position of each input
    gradients   the position among the inputs to which each gradient belongs
    reached     the tangents on which each gradient depends, by their positions
    tangents    the position among the leaves of the result to which each tangent belongs
    changed     the positions of the inputs that the forward pass changes in place
    trains      whether a call advances the sample: the model was exported in training mode
    """

    inputs: tuple[tuple[str, str, int], ...]
    gradients: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    tangents: tuple[int, ...]
    changed: tuple[int, ...]
    trains: bool

    def __post_init__(self) -> None:
        """Raise ValueError for a kind, or a position, that cannot be."""
        kinds, inputs, tangents = {row[0] for row in self.inputs}, len(self.inputs), len(self.tangents)
        if not kinds <= {"parameter", "buffer", "argument"}:
            raise ValueError(f"gradients of {shown(sorted(kinds))}; expected parameter, buffer or argument")
        reached = [position for row in self.reached for position in row]
        for positions, most in ((self.gradients, inputs), (self.changed, inputs), (reached, tangents)):
            if not all(0 <= position < most for position in positions):
                raise ValueError(f"a gradient has the positions {shown(positions)}; expected 0 to {most - 1}")
        if len(self.reached) != len(self.gradients) or min(self.tangents, default=0) < 0:
            raise ValueError("gradients, and the tangents that they depend on, do not fit together")

    @staticmethod
    def of(entry: Entry, trains: bool) -> Gradients:
        """Describe the joint graph of an entry."""
        assert entry.step is not None
        captured, step = entry.captured, entry.step
        results = [port for port in captured.results if not port.mutation]
        tangents = [port.index for port in captured.inputs if port.kind == "tangent"]
        return Gradients(
            tuple((port.kind, port.name, port.index) for port in captured.entering),
            step.gradients,
            tuple(tuple(sorted(reached)) for reached in step.reached),
            tuple(next(i for i, port in enumerate(results) if port.index == index) for index in tangents),
            tuple(sorted(step.mutated)),
            trains,
        )

    def require_fit(self, program: nn.Module, arguments: int) -> None:
        """Raise ValueError unless every input is a parameter or buffer of the program, or one of its arguments."""
        state = {
            "parameter": {name for name, _ in program.named_parameters(remove_duplicate=False)},
            "buffer": {name for name, _ in program.named_buffers(remove_duplicate=False)},
        }
        for kind, name, index in self.inputs:
            if not (0 <= index < arguments if kind == "argument" else name in state[kind]):
                raise ValueError(f"its gradients take {kind} {shown(name or index)}, which its program does not have")


class _Joint(nn.Module):
    """A joint graph that returns its gradients alone."""

    def __init__(self, graph: fx.GraphModule, kept: Sequence[int]) -> None:
        super().__init__()
        # Not ``graph``: constants under that name would collide with ``GraphModule.graph`` in the exported program.
        self.joint, self.kept = graph, kept

    def forward(self, given: Sequence[Any]) -> list[Any]:
        """Return the gradients for everything that enters the graph."""
        outputs = self.joint(*given)
        return [outputs[i] for i in self.kept]


def gradients_of(joint: Entry, entry: Entry, arguments: Any, rng: Tensor, trains: bool) -> tuple[Any, Gradients]:
    """Return ``torch.export.export`` of a joint graph, and what that takes.

    entry: the same model captured without gradients. arguments: (args, kwargs) like those of a call.

    Raises FxroundError if nothing requires a gradient, or for delayed scales, which are state of a compiled module.
    """
    if joint.step is None:
        raise FxroundError("no result of this model depends on anything that requires a gradient")
    if joint.delayed:
        raise FxroundError(
            f"{joint.delayed[0].rounding.format} is a scale that is state, which a program with gradients does not "
            "hold: export without gradients=True, or use a scale that needs no state, as in current_scaling"
        )
    captured, leaves = joint.captured, pytree.tree_leaves(arguments)
    with torch.no_grad():
        results = pytree.tree_leaves(entry.evaluate(leaves, rng))
    tangents = {p.index: torch.ones_like(results[p.index]) for p in captured.inputs if p.kind == "tangent"}
    kept = [i for i, port in enumerate(captured.outputs) if port.kind == "gradient"]
    with torch.no_grad():
        given = [*joint.entering(leaves, tangents), rng.clone()]
        return export_graph(_Joint(joint.lowered, kept), joint.lowered, given), Gradients.of(joint, trains)


class LoadedGradients:
    """The gradients of a loaded program.

    program     the loaded program of gradients
    given       what that takes and returns
    results     the loaded program of results, which owns parameters and buffers
    rng         the name of its buffer with (seed, sample)
    """

    def __init__(self, program: nn.Module, given: Gradients, results: nn.Module, rng: str) -> None:
        self._program, self._given, self._results = program, given, results
        if given.trains:
            read_per_call(results, rng)
        for position, (kind, name, _) in enumerate(given.inputs):
            if kind == "parameter":
                results.get_parameter(name).requires_grad_(position in given.gradients)

    def wanted(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these flat arguments records gradients.

        Raises FxroundError if it needs a gradient that the program does not compute.
        """
        if not torch.is_grad_enabled():
            return False
        wanted = False
        for position, (kind, name, index) in enumerate(self._given.inputs):
            value = self._value(kind, name, index, leaves)
            if not (isinstance(value, Tensor) and value.requires_grad):
                continue
            if position not in self._given.gradients:
                what = f"{kind} {name}" if name else f"argument {index}"
                raise FxroundError(
                    f"{what} requires a gradient, which the program does not compute: it did not require one when the "
                    "program was exported. Export it again with such an argument, or pass it without (.detach())."
                )
            wanted = True
        return wanted

    def differentiable(self, compute: Callable[[], Any], leaves: Sequence[Any], rng: Tensor) -> Any:
        """Return the leaves of compute() as results that autograd can differentiate.

        rng: (seed, sample). If the program trains, the call takes its own, and the tensor then has the next.
        """
        if not self._given.trains:
            return self._differentiable(compute, leaves, rng)
        own = take_from(rng)
        try:
            with reading(rng, own):
                return self._differentiable(compute, leaves, own)
        except BaseException:
            give_back_to(rng, own)
            raise

    def _differentiable(self, compute: Callable[[], Any], leaves: Sequence[Any], rng: Tensor) -> Any:
        values = [self._value(*row, leaves) for row in self._given.inputs]
        # The call writes to them, and the gradients are those of the values before.
        values = [v.clone() if i in self._given.changed else v for i, v in enumerate(values)]
        results = compute()
        step = _LoadedStep(self._program, self._given, [shaped(result) for result in results])
        return differentiable_later(
            results, [True] * len(results), lambda: (step, range(len(values)), ()), resolved(values), rng
        )

    def _value(self, kind: str, name: str, index: int, leaves: Sequence[Any]) -> Any:
        if kind == "argument":
            return leaves[index]
        return self._results.get_parameter(name) if kind == "parameter" else self._results.get_buffer(name)


@dataclass(frozen=True)
class _LoadedStep:
    """A loaded program of gradients as a ``training_step.Differentiated``, whose forward graph saves its inputs.

    like: tensors of the shapes, dtypes and devices of the results.
    """

    program: nn.Module
    given: Gradients
    like: Sequence[Any]
    late: tuple[()] = ()
    derivatives: None = None

    @property
    def results(self) -> int:
        return len(self.like)

    @property
    def gradients(self) -> tuple[int, ...]:
        return self.given.gradients

    @property
    def tangents(self) -> tuple[int, ...]:
        return self.given.tangents

    @property
    def reached(self) -> tuple[frozenset[int], ...]:
        return tuple(map(frozenset, self.given.reached))

    def forwards(self, *values: Any) -> tuple[Any, ...]:
        return (*self.like, *values[:-1])

    def backwards(self, *values: Any) -> Any:
        with aside():
            return self.program(list(values))
