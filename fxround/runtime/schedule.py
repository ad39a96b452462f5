"""Schedule: the graph that runs, with kernels called directly and memory given back as soon as it is dead.

What is true here. ``schedule(graph)`` computes what ``graph`` computes. A kernel of ours is called as the function that
it is, without PyTorch's dispatcher; a chain over rows runs a few rows at a time (``rows``), a contraction and the map
behind it as one (``epilogues``); after the last use of a value that such a kernel made, and of everything that may
share its memory, its buffer is released for the next result of that size.

Why it is safe. Whatever an operator that moves data returns, and whatever a schema says may alias, counts as sharing
the memory of its operands; an operator that is not in the table of rules keeps its operands for good; so does
the graph's output. Only memory that a kernel of ours allocated in this call is ever released.

    before   %a = fxround.fused(...); %b = fxround.sum(%a); %c = fxround.fused(...)
    after    a = fused(...); b = sum_(a); release(a); c = fused(...)              # in the memory of a
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fxround.ops import RULES, rule_of
from fxround.runtime import buffers
from fxround.runtime.epilogues import join_epilogues
from fxround.runtime.library import KERNELS
from fxround.runtime.rows import gather_rows

# An operator of these kinds returns memory of its own, if its schema says no more.
_FRESH: Final = frozenset({"pointwise", "elementary", "contraction", "reduction", "exact", "integer", "opaque"})


def schedule(graph: fx.GraphModule, fuse: bool = True) -> fx.GraphModule:
    """A graph of the same bits that calls kernels directly and reuses memory; it cannot be exported.

    fuse: whether a contraction and the map behind it run as one.
    """
    gathered = join_epilogues(gather_rows(graph)) if fuse else gather_rows(graph)
    dead = _dead_after(gathered)
    for node in gathered.graph.find_nodes(op="call_module"):
        chain: Any = gathered.get_submodule(str(node.target))
        read = {value: [i for i, arg in enumerate(node.args) if arg in _sharing(value)] for value in dead.get(node, ())}
        # Two arguments on one memory: the module would not know when the last of them is read.
        dead[node] = [value for value, places in read.items() if len(places) != 1]
        chain.spent = tuple(places[0] for places in read.values() if len(places) == 1)
        inputs = chain.whole.graph.find_nodes(op="placeholder")
        chain.whole = _direct(chain.whole, _dead_after(chain.whole, {inputs[i] for i in chain.spent}), begun=True)
    return _direct(gathered, dead, begun=False)


def _direct(graph: fx.GraphModule, dead: Mapping[fx.Node, Sequence[fx.Node]], begun: bool) -> fx.GraphModule:
    """The graph with kernels called directly and dead memory released; begun: whether a call of it is part of one."""
    direct = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr") and not begun:
            direct.call_function(buffers.begin)
            begun = True
        made[node] = direct.node_copy(node, lambda used: made[used])
        if node.target in KERNELS:
            made[node].target = KERNELS[node.target]
        if dead.get(node):
            direct.call_function(buffers.release, tuple(made[value] for value in dead[node]))
    scheduled = fx.GraphModule(graph, direct)
    scheduled.recompile()
    return scheduled


def _dead_after(graph: fx.GraphModule, given: Collection[fx.Node] = ()) -> dict[fx.Node, list[fx.Node]]:
    """The values of our kernels to release after a node: the last that uses them or what shares their memory.

    given: inputs that are such values too, and belong to this graph alone.
    """
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    nodes = list(position)
    last: dict[fx.Node, float] = {}
    for node in reversed(nodes):
        ends = [_end_of_use(user, position, last) for user in node.users]
        last[node] = max([float(position[node]), *ends])
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if (node in given or _owns(node)) and last[node] != float("inf"):
            dead.setdefault(nodes[int(last[node])], []).append(node)
    return dead


def _end_of_use(user: fx.Node, position: dict[fx.Node, int], last: dict[fx.Node, float]) -> float:
    """Where a user is done with its operands' memory: at once, or when what it returns is dead, or never."""
    if user.op == "output":
        return float("inf")
    if _reads_alone(user):
        return float(position[user])
    if user.target is operator.getitem:
        return last[user]
    known = user.op == "call_function" and rule_of(user) is not None and str(user.target) in RULES
    return last[user] if known else float("inf")


def _sharing(value: fx.Node) -> set[fx.Node]:
    """The value and what may share its memory."""
    found, stack = {value}, [value]
    while stack:
        users = {user for user in stack.pop().users if not _reads_alone(user)} - found
        found |= users
        stack += users
    return found


def _reads_alone(user: fx.Node) -> bool:
    """Whether a node is done with its operands' memory when it has run."""
    if user.target in KERNELS or _is_module(user):
        return True
    rule = rule_of(user) if user.op == "call_function" else None
    if rule is None or user.target is operator.getitem or str(user.target) not in RULES:
        return False
    return rule.kind in _FRESH and not _may_alias(user.target)


def _is_module(node: fx.Node) -> bool:
    return node.op == "call_module"


def _may_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _owns(node: fx.Node) -> bool:
    """Whether the node is a tensor that a kernel of ours has just made, alone on its memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and (source.target is torch.ops.fxround.fused.default or _is_module(source))
    return node.target in KERNELS and node.target is not torch.ops.fxround.fused.default
