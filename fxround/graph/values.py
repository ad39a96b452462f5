"""The fake values of a graph's nodes, recomputed where a pass changed a node."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxround.graph.dialect import CALLS
from fxround.graph.dialect.call import shared
from fxround.graph.dialect.loops import is_loop

T = TypeVar("T")
_SETTLED: Final = "fxround_settled"
# The attribute of a fake mode that keeps what it has computed.
_KNOWN: Final = "fxround_known"
_SET_ARGS: Final = vars(fx.Node)["args"].fset
_SET_KWARGS: Final = vars(fx.Node)["kwargs"].fset


def instances_in(values: Any, kind: type[T]) -> Iterator[T]:
    """Yield the instances of a class among values: of themselves, and in tuples, lists and dicts.

    ``pytree``, which knows more containers, takes most of the time of a small step.
    """
    if isinstance(values, kind):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from instances_in(value, kind)


def memory_of(x: torch.Tensor) -> int:
    """Return a number that tensors of the same memory share, empty ones too."""
    return int(x.untyped_storage()._cdata)


def drop_aliases(graph: fx.GraphModule, but: str | None = None) -> None:
    """Remove ``alias``, by which autograd keeps results and detaches values, from a graph that holds its gradients.

    but: the key in ``meta`` of those that stay.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        if but not in node.meta:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


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

    A loop keeps its own, because the values in its body are verified one by one. Nodes with the same operator on
    operands with equal fake values share one.
    """
    if is_loop(node):
        return
    mode = fake_mode(graph)
    known = vars(mode).setdefault(_KNOWN, _Known())
    key = known.key(node)
    if key not in known.values:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
        target: Any = node.target
        call = None if kwargs else CALLS.get(target)
        # As in a capture: PyTorch's C++ kernels of some operators, such as padding, would replace a symbolic size by
        # the number that it stands for, or fail.
        with mode, enable_python_dispatcher() if call is None else shared(known.empty):
            # What the dispatcher would call for an operator of the dialect, without the dispatcher.
            value = target(*args, **kwargs) if call is None else call.of(args).fake()
        if free_unbacked_symbols(value):
            node.meta["val"] = value  # every such call has sizes of its own
            return
        known.values[key] = value
    node.meta["val"] = known.values[key]


def forget_values(mode: Any) -> None:
    """Forget the fake values that a mode has computed; ``evaluate`` computes them again."""
    vars(mode).pop(_KNOWN, None)


@dataclass(frozen=True)
class _Known:
    """The fake values that one mode has computed.

    numbers     of fake values that were operands, by description: equal values have one number
    owners      the number of each of these objects, which is kept so that no other object gets its id
    values      by operator and numbers of operands
    empty       results of the dialect's calls, by dtype, device and sizes
    """

    numbers: dict[Any, int] = field(default_factory=dict)
    owners: dict[int, tuple[Any, int]] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    empty: dict[Any, torch.Tensor] = field(default_factory=dict)

    def key(self, node: fx.Node) -> Any:
        """Return what the fake value of a node depends on; the number of a node is not a part of it."""
        args = CALLS[node.target].unnumbered(node.args) if node.target in CALLS else node.args
        return node.target, self._plain(args), self._plain(tuple(node.kwargs.items()))

    def _plain(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return "value", self._number(argument.meta["val"])
        if isinstance(argument, list | tuple):
            return type(argument).__name__, *map(self._plain, argument)
        if isinstance(argument, slice):
            return "slice", *map(self._plain, (argument.start, argument.stop, argument.step))
        return type(argument), argument

    def _number(self, value: Any) -> int:
        owner = self.owners.get(id(value))
        if owner is None:
            leaves, structure = pytree.tree_flatten(value)
            number = self.numbers.setdefault((structure, *map(described, leaves)), len(self.numbers))
            owner = self.owners[id(value)] = value, number
        return owner[1]


def described(value: Any) -> tuple[Any, ...]:
    """Return everything of a fake value that an operator can ask for; the object itself where that is not known."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        # The hash of the value itself would make its present number a condition of the graph.
        return type(value), value.node.expr
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.constant is not None:
        return type(value), value if isinstance(value, Hashable) else id(value)
    sizes = [s.node.expr if isinstance(s, torch.SymInt) else s for s in (*value.shape, *value.stride())]
    flags = value.requires_grad, value.is_conj(), value.is_neg(), str(value.storage_offset())
    return FakeTensor, value.dtype, value.device, *flags, *sizes


def outputs_of(graph: fx.GraphModule) -> list[Any]:
    """Return what the graph returns as a list, whether it returns one value or several."""
    returned: Any = graph.graph.output_node().args[0]
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def copy_node(graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of a node at the end of another graph. made: the copies of what the node reads.

    Arguments are set after the node is made: PyTorch looks through those of a new node for symbolic numbers. They are
    set by the properties themselves: an assignment would take the node out of the table of the graph, and put it back.
    """
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    _SET_ARGS(new, args)
    if kwargs:
        _SET_KWARGS(new, kwargs)
    new.meta.update(node.meta)
    return new


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Return a module that computes the graph. Its Python code is written when it is first called or printed.

    Most graphs are only read by the next pass, and writing their code would take as long as the passes.
    """
    return _LazyGraphModule(root, graph)


def write_code(graph: fx.GraphModule) -> None:
    """Write the code of a graph before it is called: a first call that writes it would be one that hooks see."""
    _LazyGraphModule.force_recompile(graph)


def fake_mode(graph: fx.GraphModule) -> Any:
    """Return the mode that owns the graph's fake values (and its symbolic sizes)."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
