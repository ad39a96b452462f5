"""Schedule: the graph that runs. It calls kernels directly and releases memory as soon as nothing can reach it.

A kernel of ours is called as a Python function, without PyTorch's dispatcher. A chain over rows runs a few rows at a
time (``row_chains``), a contraction runs together with the map that follows it (``epilogues``), and a rounding to a
scaled format is one kernel (``scaled``). After the last use of a value that a kernel of ours made, and of everything
that may share its memory (``aliasing``), its buffer is released for the next result of that size. ``verify_schedule``
then checks that no released memory is read, released again or returned.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from torch import fx

from fxround.graph.dialect import draws_in_parts
from fxround.graph.values import copy_node, module_of
from fxround.runtime import buffers
from fxround.runtime.schedule.aliasing import is_kernel, is_known, is_view_of, may_share, returns_list
from fxround.runtime.schedule.epilogues import join_epilogues
from fxround.runtime.schedule.loops import Body, RepeatedPart, own_loops, owned
from fxround.runtime.schedule.row_chains import gather_rows
from fxround.runtime.schedule.scaled import join_scaled
from fxround.runtime.schedule.straight import SOURCE
from fxround.runtime.schedule.verify import verify_schedule
from fxround.runtime.torch_ops import CHOICES, KERNELS, MOVEMENTS

_FUNCTIONS: Final = KERNELS | MOVEMENTS | CHOICES


def schedule(graph: fx.GraphModule, fuse: bool = True) -> fx.GraphModule:
    """A graph of the same bits that calls kernels directly and reuses memory; it cannot be exported.

    fuse: whether a contraction and the map after it run as one.

    Raises VerificationError if the schedule would use memory after its release.
    """
    if draws_in_parts(graph):
        # What runs several kernels together gives them one random state.
        scheduled = fx.GraphModule(graph, _direct(graph, _dead_after(graph), begun=False))
        verify_schedule(scheduled)
        return scheduled
    return _scheduled(graph, fuse, begun=False)


def _body(graph: fx.GraphModule, fuse: bool) -> Body:
    """The body of a loop, whose call is a part of one that has begun."""
    return Body(_scheduled(graph, fuse, begun=True), owned(graph, _sharing, _owns), graph)


def _scheduled(graph: fx.GraphModule, fuse: bool, begun: bool) -> fx.GraphModule:
    looped = own_loops(graph, lambda body: _body(body, fuse))
    gathered = gather_rows(join_scaled(looped))
    gathered = join_epilogues(gathered) if fuse else gathered
    dead = _dead_after(gathered)
    for node in gathered.graph.find_nodes(op="call_module"):
        chain: Any = gathered.get_submodule(str(node.target))
        if isinstance(chain, RepeatedPart):
            continue
        given = {value: place for value in dead.get(node, ()) if (place := _place_of(value, node)) is not None}
        dead[node] = [value for value in dead.get(node, ()) if value not in given]
        chain.spent = tuple(given.values())
        inputs = chain.whole.graph.find_nodes(op="placeholder")
        inside = _direct(chain.whole, _dead_after(chain.whole, {inputs[i] for i in chain.spent}), begun=True)
        chain.whole = module_of(chain.whole, inside)  # most parts run by a plan
    scheduled = fx.GraphModule(gathered, _direct(gathered, dead, begun))
    verify_schedule(scheduled)
    scheduled.meta[SOURCE] = looped
    return scheduled


def _place_of(value: fx.Node, call: fx.Node) -> int | None:
    """The argument of a module's call that is the value or a view of it; None if several may share its memory.

    The module may then release the value itself, since it knows when that argument is read for the last time.
    """
    sharing = _sharing(value)
    places = [i for i, arg in enumerate(call.args) if arg in sharing]
    return places[0] if len(places) == 1 and is_view_of(call.args[places[0]], value) else None


def _direct(graph: fx.GraphModule, dead: Mapping[fx.Node, Sequence[fx.Node]], begun: bool) -> fx.Graph:
    """The graph with kernels called directly and dead memory released.

    begun: whether the graph is called from one whose call has already begun.
    """
    direct = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr") and not begun:
            direct.call_function(buffers.begin)
            begun = True
        made[node] = copy_node(direct, node, made)
        if node.op == "call_function":
            made[node].target = _FUNCTIONS.get(node.target, node.target)
        if dead.get(node):
            direct.call_function(buffers.release, tuple(made[value] for value in dead[node]))
    return direct


def _dead_after(graph: fx.GraphModule, given: Collection[fx.Node] = ()) -> dict[fx.Node, list[fx.Node]]:
    """The values of our kernels to release after each node: the last one that uses them or what shares their memory.

    given: inputs that our kernels made too and that belong to this graph alone.
    """
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    nodes = list(position)
    last: dict[fx.Node, float] = {}
    # In reverse order every user's own end is known before the node's.
    for node in reversed(nodes):
        ends = [_end_of_use(user, position, last) for user in node.users]
        last[node] = max([float(position[node]), *ends])
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if (node in given or _owns(node)) and last[node] != float("inf"):
            dead.setdefault(nodes[int(last[node])], []).append(node)
    return dead


def _end_of_use(user: fx.Node, position: dict[fx.Node, int], last: dict[fx.Node, float]) -> float:
    """The position after which a user needs its operands' memory no more: its own, that of its result, or none."""
    if user.op == "output" or not is_known(user):
        return float("inf")
    return last[user] if may_share(user) else float(position[user])


def _sharing(value: fx.Node) -> set[fx.Node]:
    """The value and all that may share its memory."""
    sharing, stack = {value}, [value]
    while stack:
        users = {user for user in stack.pop().users if may_share(user)} - sharing
        sharing |= users
        stack += users
    return sharing


def _owns(node: fx.Node) -> bool:
    """Whether the node is a tensor that a kernel of ours has just made, alone on its memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_kernel(source) and returns_list(source)
    return is_kernel(node) and not returns_list(node)
