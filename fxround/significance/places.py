"""Sites: the values of a model that are measured, and policies restricted to one site.

``results`` names the floating-point tensors of a result. ``places`` lists the nodes that ``capture=`` selects: the last
operation of every module (``"layers"``) or every floating-point operation (``"nodes"``). Places are nodes of the graph
that runs. The same place in another run of the model (binary64) is found by module path, operator and occurrence; it is
None if that run has no such operation. A ``Restricted`` policy applies its base to one module or operator only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.errors import shown
from fxround.graph.dialect import graphs_of
from fxround.graph.dtypes import FORMAT_OF, real_numbers
from fxround.graph.site import Site, float_values, site
from fxround.numerics.formats import Format
from fxround.policy import Assignment, Policy
from fxround.significance.figures import Place
from fxround.views.summaries import SILENT

Capture = Literal["outputs", "layers", "nodes"]
Isolate = Literal["layers", "operators"]
RESULT: Final = "output"
OUTPUT: Final = "output"
ROOT: Final = "(root)"
# The names that a line lists before "...".
SHOWN: Final = 8


def known_capture(capture: str) -> Capture:
    """Return the word. Raises ValueError listing the words."""
    if capture not in get_args(Capture):
        raise ValueError(f"capture is {shown(capture)}; expected one of {', '.join(map(repr, get_args(Capture)))}")
    return capture  # type: ignore[return-value]


def known_isolate(isolate: str | None) -> Isolate | None:
    """Return the word. Raises ValueError listing the words."""
    if isolate is not None and isolate not in get_args(Isolate):
        words = ", ".join(map(repr, get_args(Isolate)))
        raise ValueError(f"isolate is {shown(isolate)}; expected one of {words}, or None")
    return isolate  # type: ignore[return-value]


def results(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a result: "output", or "output.logits", "output[0]" inside a structure.

    Complex tensors are those of their parts.
    """
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if (numbers := real_numbers(leaf)) is not None:
            yield RESULT + "".join(map(_step, path)), numbers


def _step(key: Any) -> str:
    name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def places(graph: fx.GraphModule, capture: Capture) -> dict[str, Place]:
    """Return the place of each selected node, in the order of the graph."""
    if capture == "outputs":
        return {}
    nodes = [(node, entry) for node in graph.graph.nodes if (entry := operation(node)) is not None]
    if capture == "nodes":
        return {node.name: _place(node, entry, node.name, "node") for node, entry in nodes}
    last = {entry.path: (node, entry) for node, entry in nodes}
    chosen = {node.name: _place(node, entry, path or ROOT, "layer") for path, (node, entry) in last.items()}
    order = {path: i for i, path in enumerate(dict.fromkeys(entry.path or ROOT for _, entry in nodes))}
    return dict(sorted(chosen.items(), key=lambda item: order[item[1].name]))


def operation(node: fx.Node) -> Site | None:
    """Return the Site of a node that computes floating-point numbers; None for data movement, integers and ports."""
    entry = site(node)
    if node.op != "call_function" or entry is None or entry.status in SILENT or not float_values(node):
        return None
    return entry


def undrawn(graph: fx.GraphModule) -> tuple[str, ...]:
    """Return the operations whose roundings the policy draws and that are nevertheless the same in every sample.

    A stock kernel computes such an operation, and a drawn rounding of its result changes nothing, because the result's
    dtype has no values that the format lacks. A text begins with the node's name, and says where it is.
    """
    nodes = ((node, site(node)) for part in graphs_of(graph) for node in part.graph.nodes)
    return tuple(f"{node.name}: {entry}" for node, entry in nodes if entry is not None and _is_fixed(node, entry))


def _is_fixed(node: fx.Node, entry: Site) -> bool:
    if entry.status != "native" or entry.kind == "random" or entry.assignment is None:
        return False
    rounding = entry.assignment.rounding
    if rounding is None or rounding.mode.deterministic or rounding.mode.moves:
        return False
    return all(Format.parse(FORMAT_OF[value.dtype]).within(rounding.format) for value in float_values(node))


def said_of_undrawn(texts: tuple[str, ...]) -> str:
    """Return a line about operations that draw nothing, with the names of the first ones."""
    names = ", ".join(text.partition(":")[0] for text in texts[:SHOWN]) + (", ..." if len(texts) > SHOWN else "")
    one = len(texts) == 1
    return (
        f"{len(texts)} {'operation' if one else 'operations'} of this model {'draws' if one else 'draw'} nothing: "
        f"{names}. Stock kernels compute {'it' if one else 'them'} with the same result in every sample, so that no "
        f"figure contains {'its' if one else 'their'} rounding errors"
    )


def _place(node: fx.Node, entry: Site, name: str, kind: str) -> Place:
    return Place(name, kind, node.name, entry.path, entry.operator, entry.source, entry.code)


def counterparts(graph: fx.GraphModule, other: fx.GraphModule) -> dict[str, str]:
    """Return nodes of ``other`` by nodes of ``graph``: the same occurrence of the same operator in the same module."""
    return {a: b for key, a in _keyed(graph).items() if (b := _keyed(other).get(key)) is not None}


def _keyed(graph: fx.GraphModule) -> dict[tuple[str, str, int], str]:
    seen: Counter[tuple[str, str]] = Counter()
    keyed = {}
    for node in graph.graph.nodes:
        if (entry := operation(node)) is not None:
            keyed[entry.path, entry.operator, seen[entry.path, entry.operator]] = node.name
            seen[entry.path, entry.operator] += 1
    return keyed


def value_of(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of a node's value."""
    return next((v for v in map(real_numbers, pytree.tree_leaves(value)) if v is not None), None)


@dataclass(frozen=True)
class Restricted(Policy):
    """A policy that assigns roundings inside one module path only, or to one operator only."""

    path: str | None = None
    operator: str | None = None

    @staticmethod
    def of(base: Policy, isolate: Isolate, name: str) -> Restricted:
        """Return ``base`` restricted to one layer (by its path) or one operator."""
        path, operator = (name, None) if isolate == "layers" else (None, name)
        title = f"{base.name}, {name or ROOT} alone"
        return Restricted(title, base.rules, False, base.definitions, path, operator)

    def assign(
        self, *, path: str, operator: str, kind: str, role: str, dtype: str, direction: str = "forward"
    ) -> Assignment | None:
        """Return the base's assignment inside the site; None outside."""
        if not self._is_inside(path, operator):
            return None
        return super().assign(path=path, operator=operator, kind=kind, role=role, dtype=dtype, direction=direction)

    def assign_operand(
        self, *, path: str, operator: str, kind: str, role: str, direction: str, dtype: str, result: str = ""
    ) -> Assignment | None:
        """Return the base's rounding of an operand of an operation inside the site; None outside."""
        if not self._is_inside(path, operator):
            return None
        return super().assign_operand(
            path=path, operator=operator, kind=kind, role=role, direction=direction, dtype=dtype, result=result
        )

    def _is_inside(self, path: str, operator: str) -> bool:
        return self.path in (None, path) and self.operator in (None, operator)


def isolated(graph: fx.GraphModule, isolate: Isolate) -> tuple[str, ...]:
    """Return the sites to perturb one by one: paths or operators of rounded operations, in the order of the graph."""
    entries = [e for node in graph.graph.nodes if (e := operation(node)) is not None and e.status == "rounded"]
    return tuple(dict.fromkeys(e.path if isolate == "layers" else e.operator for e in entries))
