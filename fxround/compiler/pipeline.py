"""The pipeline: capture, lower, optimize, schedule, in this order, for every caller.

``fxround.compile``, the backend of ``torch.compile`` and ``compile_optimizer`` differ in where a graph comes from. What
is done to it is written here alone. A joint graph is lowered as one graph, so that a value has one rounding in the
forward and the backward pass, and is then parted; each part is optimized and scheduled. Optimizing and scheduling
change no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from fxround.capture import Captured, Decompositions, Dimension, capture
from fxround.capture.derivatives import differentiated
from fxround.capture.leftovers import forget_computed
from fxround.capture.loops import unrolled_loops
from fxround.capture.numbers import Number
from fxround.capture.recurrent import recurrent_layers
from fxround.capture.torch_private import uncollected
from fxround.compiler.delayed_state import DelayedState
from fxround.compiler.derivatives import Derivatives
from fxround.compiler.executable import Entry, Owner
from fxround.compiler.rounded_aliases import rounded_aliases
from fxround.compiler.torch_backend_graph import received
from fxround.compiler.torch_version import require_working_torch
from fxround.compiler.training_step import TrainingStep
from fxround.errors import PolicyError
from fxround.graph.dialect import draws_in_parts, graphs_of
from fxround.graph.generated_code import forgotten_sources
from fxround.graph.site import META, Port
from fxround.operators.formulas import decompositions
from fxround.passes import Plan, classified, lower, optimize
from fxround.passes.delayed_scales import DelayedScale, delayed_scales
from fxround.passes.partition import partition
from fxround.policy import Policy
from fxround.runtime.schedule import schedule


@dataclass(frozen=True)
class Graphs:
    """A graph after each part of the pipeline.

    lowered     every rounding explicit, one node per operation
    fused       the same bits in fewer passes over memory
    running     the graph that a call runs
    """

    lowered: fx.GraphModule
    fused: fx.GraphModule
    running: fx.GraphModule


@dataclass(frozen=True)
class Pipeline:
    """From a model to graphs that run, under one policy.

    strict: whether an operation that cannot be rounded is an error. fuse: whether operations share passes over memory.
    unroll: whether the iterations of loops are captured one by one.
    """

    policy: Policy
    strict: bool
    fuse: bool = True
    unroll: bool = False

    def capture(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        varying: Collection[Dimension] = (),
        numbers: Collection[Number] = (),
    ) -> Captured:
        """Return the ATen graph of a model for arguments like these; raises what ``capture`` raises.

        varying: further dimensions of arguments that stay symbolic. numbers: attributes that become inputs if they can:
        if every operation is to the policy what it is with constants in their places.
        """
        formulas, marked = self._formulas(), self.policy.treats_gradients
        with self._loops():
            captured = capture(model, args, kwargs, formulas, marked, varying, numbers)
            if captured.constants is None:
                return captured
            if self._sites(captured.graph) == self._sites(captured.constants):
                return replace(captured, constants=None)
            return capture(model, args, kwargs, formulas, marked, varying)

    def _sites(self, graph: fx.GraphModule) -> list[Any]:
        """Return what each value of a captured graph is to the passes."""
        parts = graphs_of(classified(graph, Plan(self.policy, self.strict)))
        return [node.meta[META] for part in parts for node in part.graph.nodes if META in node.meta]

    def receive(
        self, graph: fx.GraphModule, inputs: Sequence[Any], state: DelayedState | None = None
    ) -> tuple[Entry, nn.Module | None]:
        """Return the entry of a graph that Dynamo passes to a backend, and the model; None for a function."""
        with self._loops():
            captured, owners, model = received(graph, inputs, self._formulas(), self.policy.treats_gradients)
        return self.entry(captured, owners, state), model

    def differentiate(
        self, graph: fx.GraphModule, gradients: Sequence[int], wanted: Collection[int], shapes: Sequence[Any] | None
    ) -> Captured:
        """Return the derivative of a joint graph; arguments and errors as of ``differentiated``."""
        with self._loops():
            return differentiated(graph, gradients, wanted, shapes, self._formulas())

    @contextlib.contextmanager
    def _loops(self) -> Iterator[None]:
        """Let recurrent layers run as loops, unless the policy has what loops cannot have; then they are unrolled."""
        unrolled = self.unroll or self.policy.treats_gradients or self.policy.delays_scales
        with unrolled_loops() if self.unroll else contextlib.nullcontext(), recurrent_layers(not unrolled):
            yield

    def _formulas(self) -> Decompositions:
        """Return the formulas for a capture.

        Warns of a PyTorch that is not among the tested versions, and raises CaptureError for one that fails.
        """
        require_working_torch()
        return decompositions(self.policy.definitions)

    @uncollected()
    @forgotten_sources()
    def entry(self, captured: Captured, owners: tuple[Owner, ...], state: DelayedState | None = None) -> Entry:
        """Return a captured graph, ready to run; state: of delayed scales. Raises what ``lower`` raises."""
        try:
            return self._entry(captured, owners, state)
        finally:
            forget_computed(captured.graph)

    def _entry(self, captured: Captured, owners: tuple[Owner, ...], state: DelayedState | None) -> Entry:
        lowered = lower(captured.graph, Plan(self.policy, self.strict))
        step, delayed = self._step(captured, lowered), delayed_scales(lowered)
        if state is None:
            _refuse(delayed)
        own = (delayed, state or DelayedState(), rounded_aliases(captured, lowered))
        own[1].multipliers(delayed)  # made now: a call can run where tensors are traced
        if step is not None:
            return Entry(captured, lowered, lowered, lowered, owners, step, *own)
        graphs = self.scheduled(lowered)
        return Entry(captured, lowered, graphs.fused, graphs.running, owners, None, *own)

    @uncollected()
    @forgotten_sources()
    def step(self, captured: Captured) -> TrainingStep | None:
        """Return the training step of a captured joint graph; None for a graph without gradients."""
        try:
            return self._step(captured, lower(captured.graph, Plan(self.policy, self.strict)))
        finally:
            forget_computed(captured.graph)

    @forgotten_sources()
    def graphs(self, graph: fx.GraphModule) -> Graphs:
        """Return a captured graph without gradients after each part of the pipeline."""
        lowered = lower(graph, Plan(self.policy, self.strict))
        _refuse(delayed_scales(lowered))
        return self.scheduled(lowered)

    def scheduled(self, lowered: fx.GraphModule) -> Graphs:
        """Optimize and schedule a lowered graph."""
        fused = optimize(lowered) if self.fuse and not draws_in_parts(lowered) else lowered
        return Graphs(lowered, fused, schedule(fused, self.fuse))

    def _step(self, captured: Captured, lowered: fx.GraphModule) -> TrainingStep | None:
        """Return the training step of a lowered joint graph; None for a graph without gradients."""
        tangents = [port for port in captured.inputs if port.kind == "tangent"]
        if not tangents:
            return None
        parts = partition(lowered)
        entering, results = captured.entering, captured.results
        delayed = {scale.name: scale for scale in delayed_scales(lowered)}
        return TrainingStep(
            parts,
            self.scheduled(parts.forward).running,
            self.scheduled(parts.backward).running,
            len(results) + len(parts.early),
            tuple(_position(entering, port) for port in captured.outputs if port.kind == "gradient"),
            parts.reached,
            tuple(next(i for i, r in enumerate(results) if r == replace(t, kind="result")) for t in tangents),
            frozenset(_position(entering, port) for port in results if port.mutation),
            tuple(delayed[name] for name in parts.early),
            tuple(delayed[name] for name in parts.late),
            Derivatives(captured, self),
        )


def _refuse(delayed: Sequence[DelayedScale]) -> None:
    """Raise PolicyError for delayed scales where nothing keeps their state."""
    if delayed:
        kind = "delayed" if delayed[0].shape is None else "held"
        raise PolicyError(
            f"{delayed[0].rounding.format} is a {kind} scale, which is state of a compiled module: use fxround.compile"
            " on the model, or a scale that needs no state, as in current_scaling"
        )


def _position(entering: Sequence[Port], port: Port) -> int:
    """Return the position of the input to which a gradient or a mutation belongs."""
    return next(i for i, p in enumerate(entering) if (p.name, p.index) == (port.name, port.index))
