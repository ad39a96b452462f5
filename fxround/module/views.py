"""The views of a compiled module: graphs, summary, coverage, drawing and printed form.

All of them read the graph that the latest call captured, and capture nothing.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import networkx as nx
from torch import Tensor, fx

from fxround.capture import Captured
from fxround.compiler.executable import Entry
from fxround.errors import NotCaptured
from fxround.module.attributes import Reaching
from fxround.policy import Policy
from fxround.views import graph_views
from fxround.views.summaries import Coverage, Summary


class Shown(Reaching):
    """The part of a compiled module that shows its graphs; ``_latest`` is the entry of the latest call."""

    policy: Policy
    rng: Tensor
    _latest: Entry | None

    @property
    def _graphs(self) -> int:
        """The number of captured graphs. ``RoundedModule`` defines it."""
        raise NotImplementedError

    def graph_text(self, backward: bool = False) -> str:
        """Return the forward or the backward graph of the latest call as text, with one line per node.

        Raises ValueError before the first call, and for a backward graph if the latest call wanted no gradients.
        """
        return graph_views.graph_text(self.backward_graph if backward else self.graph)

    def summary(self, backward: bool | None = None) -> Summary:
        """Return a table of the latest call's operations: node, operator, module, source, rounding, accumulate.

        backward: True for the backward pass alone, False for the forward pass alone, None for both. Raises ValueError
        before the first call, and for a backward pass if the latest call wanted no gradients.
        """
        self._require_backward(backward)
        return graph_views.summary(self._called.lowered, backward=backward)

    def coverage(self, backward: bool | None = None) -> Coverage:
        """Return how many operations of the latest call are rounded, exact, native (with the reason) or data movement.

        backward and errors: as in ``summary``.
        """
        self._require_backward(backward)
        return graph_views.coverage(self._called.lowered, backward=backward)

    def draw(self, path: str | Path) -> Path:
        """Draw the forward graph of the latest call as an SVG file; returns the path.

        Raises ValueError before the first call, and for a path that does not end in .svg.
        """
        return graph_views.draw(self.graph, path, title=type(self.source).__name__)

    def to_networkx(self) -> nx.DiGraph:
        """Return the forward graph of the latest call as a ``networkx.DiGraph``.

        Raises ValueError before the first call.
        """
        return graph_views.to_networkx(self.graph)

    def extra_repr(self) -> str:
        """Return the policy, and the coverage and cost of the latest call if there was one; nothing is captured."""
        seed, sample = self.rng.tolist()
        lines = [f"policy={self.policy.name!r}, seed={seed}, sample={sample}"]
        if self._latest is None:
            return f"{lines[0]}\n(not captured yet: call it, or prepare(*example_inputs))"
        found = graph_views.coverage(self._latest.lowered)
        operations = sum(o.operations for o in found.operations)
        graphs = f"{self._graphs} captured graph{'s' * (self._graphs != 1)}"
        return "\n".join([*lines, f"coverage: {found.line}", f"cost: {operations:,} operations, {graphs}"])

    def __repr__(self) -> str:
        """Return the lines of ``extra_repr``, then the model."""
        shown = "\n".join([*self.extra_repr().splitlines(), f"(source): {self.source!r}"])
        return f"{type(self).__name__}(\n{textwrap.indent(shown, '  ')}\n)"

    def _repr_html_(self) -> str:
        title = f"{type(self.source).__name__}, policy {self.policy.name}"
        return graph_views.html(self.graph, title=title) if self._latest else f"<pre>{title}: not captured yet</pre>"

    @property
    def _called(self) -> Entry:
        if self._latest is None:
            raise NotCaptured("nothing is captured yet: call the module once, or pass example_inputs= to compile")
        return self._latest

    @property
    def graph(self) -> fx.GraphModule:
        """The lowered (forward) graph that ran or was captured last. Raises ValueError before that."""
        return self._called.step.shown.forward if self._called.step else self._called.lowered

    @property
    def lowered(self) -> fx.GraphModule:
        """The whole lowered graph of the latest call, forward and backward; ``observe_step`` runs its nodes."""
        return self._called.lowered

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward graph of the latest call. Raises ValueError if it wanted no gradients."""
        self._require_backward(True)
        assert self._called.step is not None
        return self._called.step.shown.backward

    def _require_backward(self, wanted: bool | None) -> None:
        if wanted and self._called.step is None:
            raise NotCaptured(
                "the latest call recorded no gradients, so there is no backward graph: call the module with gradients "
                "enabled, and parameters or arguments that require them"
            )

    @property
    def captured(self) -> Captured:
        """The graph before any pass, of the same call as ``graph``; the joint graph if gradients were wanted."""
        return self._called.captured
