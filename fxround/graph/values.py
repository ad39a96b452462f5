"""The fake values of a graph's nodes, recomputed where a pass changed a node."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxround.graph.dialect import CALLS
from fxround.graph.dialect.loops import is_loop

if TYPE_CHECKING:
    pass


_SETTLED: Final = "fxround_settled"


def settle(graph: fx.GraphModule, but: Collection[fx.Node] = ()) -> None:
    """Declare every node's fake value right for its present arguments.

    ``refresh`` recomputes what changes from here on. but: nodes whose fake value ``refresh`` is to recompute.
    """
    for node in graph.graph.nodes:
        node.meta[_SETTLED] = None if node in but else (node.target, node.args, node.kwargs)


def refresh(graph: fx.GraphModule) -> dict[str, tuple[Any, Any]]:
    """Recompute the fake value of every node that was added or changed since: name -> (value before, value now).

    A node that only gained uses, or whose operands were replaced by equal ones, keeps its value.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for node in graph.graph.nodes:
        state = (node.target, node.args, node.kwargs)
        if node.op != "call_function" or node.meta.get(_SETTLED) == state:
            continue
        before = node.meta.get("val")
        evaluate(graph, node)
        node.meta[_SETTLED] = state
        changed[node.name] = (before, node.meta["val"])
    return changed


def evaluate(graph: fx.GraphModule, node: fx.Node) -> None:
    """Give a call_function node the fake value of its operator on its operands' fake values.

    A loop keeps its own, because the values in its body are verified one by one.
    """
    if is_loop(node):
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    target: Any = node.target
    call = None if kwargs else CALLS.get(target)
    with fake_mode(graph):
        # What the dispatcher would call for an operator of the dialect, without the dispatcher.
        node.meta["val"] = target(*args, **kwargs) if call is None else call.of(args).fake()


def outputs_of(graph: fx.GraphModule) -> list[Any]:
    """Return what the graph returns as a list, whether it returns one value or several."""
    found: Any = graph.graph.output_node().args[0]
    return list(found) if isinstance(found, list | tuple) else [found]


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Return a module that computes the graph. Its Python code is written when it is first called or printed.

    Most graphs are only read by the next pass, and writing their code would take as long as the passes.
    """
    return _LazyGraphModule(root, graph)


def fake_mode(graph: fx.GraphModule) -> Any:
    """Return the mode that owns the graph's fake values (and its symbolic sizes)."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
