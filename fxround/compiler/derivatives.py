"""Derivatives of gradients: training steps that are made when a gradient is differentiated again.

A training step computes gradients once, as a function of what entered it and of the tangents of its results. If they
were computed with ``create_graph=True``, ``Derivatives.step`` returns a training step of that function: its forward
graph computes the gradients again, and its backward graph their derivatives. The captured graph is differentiated, and
the result is lowered by the same policy. There is one step for each set of gradients that are differentiated and of
inputs whose derivatives are asked for. Each step can be differentiated in the same way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from fxround.capture import Captured
from fxround.capture.derivatives import gradients_of
from fxround.capture.leftovers import forget_computed
from fxround.capture.processes import is_shared_out
from fxround.capture.torch_private import capturing
from fxround.capture.undifferentiated import CONSTANT
from fxround.errors import CaptureError, FxroundError
from fxround.graph.site import float_values, is_complex
from fxround.numerics.lazy import cached_property
from fxround.passes import Plan, classified

if TYPE_CHECKING:
    from fxround.compiler.pipeline import Pipeline
    from fxround.compiler.training_step import TrainingStep


@dataclass(frozen=True)
class Derivatives:
    """The derivatives of the gradients of one captured joint graph, under one policy.

    Positions of inputs count all inputs of the graph: state, arguments, tangents.
    """

    captured: Captured
    pipeline: Pipeline
    _steps: dict[Any, list[tuple[Captured, TrainingStep | None]]] = field(default_factory=dict, repr=False)
    # The time that each of them took to make.
    _seconds: list[float] = field(default_factory=list, repr=False)

    def all_made(self) -> Iterator[float]:
        """Yield, for each graph that was made for these gradients or for derivatives of them, the seconds it took."""
        yield from self._seconds
        for _, step in itertools.chain.from_iterable(self._steps.values()):
            if step is not None and step.derivatives is not None:
                yield from step.derivatives.all_made()

    @cached_property
    def needed(self) -> frozenset[int]:
        """The positions of the inputs that the gradients are computed from."""
        graph = self.captured.graph.graph
        reaching = {value for value in gradients_of(self.captured.graph) if value is not None}
        for node in reversed(graph.nodes):
            if node in reaching:
                reaching.update(node.all_input_nodes)
        return frozenset(i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in reaching)

    @cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        """For each gradient the positions of the inputs on which it depends by numbers that have a derivative."""
        graph = self.captured.graph.graph
        reached = {node: frozenset([i]) for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        for node in graph.nodes:
            if node.op == "call_function" and (float_values(node) or is_complex(node)) and CONSTANT not in node.meta:
                reached[node] = frozenset().union(*(reached.get(used, frozenset()) for used in node.all_input_nodes))
        return tuple(reached.get(value, frozenset()) for value in gradients_of(self.captured.graph))

    def name(self, position: int) -> str:
        """Return an input in words, for messages."""
        port = self.captured.inputs[position]
        return f"{port.kind} {port.name or port.index}"

    def step(self, gradients: tuple[int, ...], wanted: frozenset[int], values: Sequence[Any]) -> TrainingStep | None:
        """Return a training step from all inputs to these gradients, and to their derivatives.

        Args:
            gradients: the numbers of the gradients.
            wanted: the positions of the inputs for which derivatives are wanted.
            values: the inputs, of which those that are not needed may have any numbers.

        Returns:
            The step; None if none of the derivatives depends on anything.

        Raises:
            FxroundError: for what has no second derivative.
        """
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in values]
        derivative = self._known(gradients, wanted, shapes)
        if derivative is None:
            with capturing():
                derivative = self._known(gradients, wanted, shapes) or self._made(gradients, wanted, shapes)
        return derivative[1]

    def _known(self, gradients: Any, wanted: Any, shapes: Sequence[Any]) -> tuple[Captured, TrainingStep | None] | None:
        made = self._steps.get((gradients, wanted), ())
        return next((pair for pair in made if pair[0].sizes.admit(shapes)), None)

    def _made(self, gradients: tuple[int, ...], wanted: frozenset[int], shapes: Sequence[Any]) -> Any:
        self._require()
        began, captured = time.perf_counter(), None
        for sizes in (None, shapes):
            try:
                captured = self.pipeline.differentiate(self._graph, gradients, wanted, sizes)
            except CaptureError:
                if sizes is not None:
                    raise
                continue
            if captured.sizes.admit(shapes):
                break
        assert captured is not None
        pipeline = replace(self.pipeline, policy=self.pipeline.policy.with_optional_rules())
        pair = captured, pipeline.step(captured)
        self._steps.setdefault((gradients, wanted), []).append(pair)
        self._seconds.append(time.perf_counter() - began)
        return pair

    def _require(self) -> None:
        """Raise FxroundError for what makes a second derivative impossible."""
        if is_shared_out(self.captured.graph):
            raise FxroundError(
                "a gradient of a model that processes share cannot be differentiated again: each process would have "
                "the derivative of its own part. Compute second derivatives with the model as it is before "
                "parallelize_module or distribute_module."
            )
        if self.captured.once:
            raise FxroundError(f"a gradient of this model cannot be differentiated again. {self.captured.once}.")
        if self.pipeline.policy.treats_gradients:
            raise FxroundError(
                "a gradient that was rounded by a rule's gradient= cannot be differentiated again: use a policy whose "
                'rules have gradient="straight_through"'
            )
        if self.pipeline.policy.delays_scales:
            raise FxroundError(
                "a gradient under delayed scales, or held ones, cannot be differentiated again, because they are "
                "those of values and first gradients: use a scale of the values themselves, as in current_scaling"
            )

    @cached_property
    def _graph(self) -> fx.GraphModule:
        try:
            return classified(self.captured.graph, Plan(self.pipeline.policy, self.pipeline.strict))
        finally:
            forget_computed(self.captured.graph)
