"""What a compiled module shows of itself: graphs, summary, coverage, drawing, and what it prints as.

Everything here is read from what the latest call captured, and captures nothing.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import networkx as nx
from torch import Tensor, fx

from fxround import inspection
from fxround.attributes import Reaching
from fxround.entry import Entry
from fxround.graph import Captured
from fxround.policy import Policy
from fxround.summaries import Coverage, Summary


class Shown(Reaching):
    """A compiled module as far as it is looked at: ``_latest`` is what the latest call captured."""

    policy: Policy
    rng: Tensor
    _latest: Entry | None

    @property
    def _graphs(self) -> int:
        """How many graphs are captured."""
        raise NotImplementedError

    def graph_text(self, backward: bool = False) -> str:
        """The latest graph as text, one line a node: the forward graph, or the backward one.

        Raises ValueError for a backward graph where the latest call wanted no gradients.
        """
        return inspection.graph_text(self.backward_graph if backward else self.graph)

    def summary(self, backward: bool | None = None) -> Summary:
        """A table of the latest call's operations: node, operator, module, source, rounding; ``Operation`` has more.

        backward: True for the backward pass alone, False for the forward pass alone, None for both. Raises ValueError
        before the first call, and for a backward pass where the latest call wanted no gradients.
        """
        self._require_backward(backward)
        return inspection.summary(self._called.lowered, backward=backward)

    def coverage(self, backward: bool | None = None) -> Coverage:
        """What is rounded, native (with the reason) and data movement in the latest call; backward: as in summary."""
        self._require_backward(backward)
        return inspection.coverage(self._called.lowered, backward=backward)

    def draw(self, path: str | Path) -> Path:
        """Write the latest graph to an SVG file."""
        return inspection.draw(self.graph, path, title=type(self.source).__name__)

    def to_networkx(self) -> nx.DiGraph:
        """The latest graph for networkx."""
        return inspection.to_networkx(self.graph)

    def extra_repr(self) -> str:
        """The policy and, of what is captured, the coverage and the cost of the latest call; nothing is captured."""
        seed, sample = self.rng.tolist()
        lines = [f"policy={self.policy.name!r}, seed={seed}, sample={sample}"]
        if self._latest is None:
            return f"{lines[0]}\n(not captured yet: call it, or prepare(*example_inputs))"
        found = inspection.coverage(self._latest.lowered)
        operations = sum(o.operations for o in found.operations)
        graphs = f"{self._graphs} captured graph{'s' * (self._graphs != 1)}"
        return "\n".join([*lines, f"coverage: {found.line}", f"cost: {operations:,} operations, {graphs}"])

    def __repr__(self) -> str:
        """The lines of ``extra_repr``, then the model."""
        shown = "\n".join([*self.extra_repr().splitlines(), f"(source): {self.source!r}"])
        return f"{type(self).__name__}(\n{textwrap.indent(shown, '  ')}\n)"

    def _repr_html_(self) -> str:
        title = f"{type(self.source).__name__}, policy {self.policy.name}"
        return inspection.html(self.graph, title=title) if self._latest else f"<pre>{title}: not captured yet</pre>"

    @property
    def _called(self) -> Entry:
        if self._latest is None:
            raise ValueError("nothing is captured yet: call the module once, or pass example_inputs= to compile")
        return self._latest

    @property
    def graph(self) -> fx.GraphModule:
        """The lowered (forward) graph that ran or was captured last. Raises ValueError before that."""
        return self._called.step.shown.forward if self._called.step else self._called.lowered

    @property
    def lowered(self) -> fx.GraphModule:
        """The whole lowered graph of the latest call, forward and backward: what ``observe_step`` walks along."""
        return self._called.lowered

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward graph of the latest call. Raises ValueError where it wanted no gradients."""
        self._require_backward(True)
        assert self._called.step is not None
        return self._called.step.shown.backward

    def _require_backward(self, wanted: bool | None) -> None:
        if wanted and self._called.step is None:
            raise ValueError(
                "the latest call wanted no gradients, so there is no backward graph: call the module with gradients "
                "enabled, and parameters or arguments that require them"
            )

    @property
    def captured(self) -> Captured:
        """The graph before any pass, of the same call as ``graph`` (the joint graph, where gradients were wanted)."""
        return self._called.captured
