"""Loops: their bodies are graphs of their own, to which the pipeline does what it does to the whole.

``own_bodies`` gives a lowered graph copies of the bodies, so that the captured ones stay as they are. ``enter`` tells a
body, after its surroundings are classified, what the values that enter it are to the model. ``add_states`` gives each
body the (seed, sample) of its iteration, which a scan reads from a table of all iterations, and the bodies of a
``while_loop`` and a ``cond`` compute from a counter, or from the number of the branch.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from fxround.graph.dialect import COND, SCAN, Iterations, Loop, loops_of
from fxround.graph.site import DIRECTION, META, ORIGIN, PORT, PORTS, Port, Site, site
from fxround.graph.values import evaluate, fake_mode, module_of, outputs_of
from fxround.passes import streams
from fxround.passes.rewrite import RNG, insert, rng_of, size_of, source_of

aten = torch.ops.aten
# What a node of a body takes over from the loop's node if tracing gave it none.
_INHERITED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag")


def own_bodies(graph: fx.GraphModule) -> None:
    """Replace the bodies of all loops by copies whose nodes and inputs have origins and ports."""
    for loop, bodies in loops_of(graph):
        for name, body in zip(loop.bodies, bodies, strict=True):
            own = module_of(body, copy.deepcopy(body.graph))
            setattr(graph, name, own)
            for i, node in enumerate(own.graph.nodes):
                node.meta[ORIGIN] = node.name
                if node.op == "placeholder":
                    node.meta[PORT] = Port("carried", index=i)
                for key in _INHERITED if node.op != "placeholder" else ():
                    if key in loop.node.meta:
                        node.meta.setdefault(key, loop.node.meta[key])
            own_bodies(own)


def enter(
    loop: Loop, bodies: tuple[fx.GraphModule, ...], roles: Mapping[fx.Node, str], gradients: Collection[fx.Node]
) -> None:
    """Give the inputs of a loop's bodies their roles and all nodes their direction, and the results their ports.

    gradients: the nodes of the graph around the loop that are gradients of parameters.
    """
    place = site(loop.node)
    assert place is not None
    operands = [(x, i < len(loop.carries)) for i, x in enumerate(loop.operands)]
    taken: dict[int, list[fx.Node]] = {}
    for user in loop.node.users:
        if user.target is operator.getitem:
            taken.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    for body in bodies:
        for node in body.graph.nodes:
            node.meta[DIRECTION] = place.direction
        inputs = zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
        for node, (operand, changes) in inputs:
            source = source_of(operand) if isinstance(operand, fx.Node) else None
            entering = site(source) if source is not None else None
            node.meta[_ROLE] = place.role if changes or source is None else roles.get(source, "activation")
            if entering is not None and not changes:
                node.meta[DIRECTION] = entering.direction
        ports = (_port(i, place, taken.get(i, ()), gradients) for i in range(len(outputs_of(body))))
        body.graph.output_node().meta[PORTS] = tuple(ports)


_ROLE = "fxround_carried_role"


def carried_role(node: fx.Node) -> str | None:
    """Return the role of an input of a body; None for any other node."""
    role: str | None = node.meta.get(_ROLE)
    return role


def _port(i: int, place: Site, taken: Collection[fx.Node], gradients: Collection[fx.Node]) -> Port:
    """Return a result's port. A value that a forward loop saves for the backward one counts as a gradient without name.

    So it is numbered after the values that the results need, and these have the same numbers without gradients.
    """
    if any(node in gradients for node in taken):
        return Port("gradient", name="loop", index=i)
    late = [_is_backward(user) for node in taken for user in node.users]
    saved = place.direction == "forward" and bool(late) and all(late)
    return Port("gradient" if saved else "result", index=i)


def _is_backward(node: fx.Node) -> bool:
    place = site(node)
    return place is not None and place.direction == "backward"


def add_states(graph: fx.GraphModule) -> None:
    """Give the bodies of a graph's loops their (seed, sample), which depend on that of the graph."""
    for loop, bodies in list(loops_of(graph)):
        node, place = loop.node, site(loop.node)
        assert place is not None
        rng = rng_of(graph)
        if node.target is SCAN:
            length = size_of(graph, node, loop.xs[0], 0)
            counters = insert(graph, node, aten.arange.start_step, (0, length, 1), dtype=torch.int64)
            call = Iterations(counters, rng, place.number)
            states = _silent(insert(graph, node, call.overload, call.arguments()))
            _entrance(bodies[0], len(loop.carries) + len(loop.xs)).meta[PORT] = Port("random")
            loop = Loop(node, loop.bodies, loop.carries, (*loop.xs, states), loop.others)
        elif node.target is COND:
            for i, body in enumerate(bodies):
                outer = _entrance(body, len(loop.others))
                counter = _first(body, aten.full.default, ([], i), dtype=torch.int64)
                _state(body, counter, outer, place.number)
            loop = Loop(node, loop.bodies, (), (), (*loop.others, rng), loop.predicate)
        else:
            begun = insert(graph, node, aten.full.default, ([], 0), dtype=torch.int64)
            for i, body in enumerate(bodies):
                counter = _entrance(body, len(loop.carries), shape=())
                outer = _entrance(body, len(loop.carries) + 1 + len(loop.others))
                # The test and the step draw from the two streams of the loop.
                _state(body, counter, outer, place.number if i else streams.second(place.number))
                if i:
                    output = body.graph.output_node()
                    following = insert(body, output, aten.add.Tensor, (counter, 1))
                    following.meta[META] = _nowhere(following, "integer")
                    results = outputs_of(body)
                    output.args = ((*results, following),)
                    output.meta[PORTS] = (*output.meta[PORTS], Port("result", index=len(results)))
            loop = Loop(node, loop.bodies, (*loop.carries, begun), (), (*loop.others, rng))
        with graph.graph.inserting_before(node):
            named = [graph.graph.get_attr(name) for name in loop.bodies]
        replaced = [used for used in node.all_input_nodes if used.op == "get_attr" and used.target in loop.bodies]
        node.args = loop.arguments(named)
        for used in replaced:
            if not used.users:
                graph.graph.erase_node(used)


def _entrance(body: fx.GraphModule, position: int, shape: tuple[int, ...] = (2,)) -> fx.Node:
    """Insert a placeholder of int64 at a position among the placeholders."""
    entries = body.graph.find_nodes(op="placeholder")
    where = body.graph.inserting_before(entries[position]) if position < len(entries) else None
    if where is None:
        where = body.graph.inserting_after(entries[-1]) if entries else body.graph.inserting_before(_begin(body))
    with where:
        made = body.graph.placeholder(RNG if shape else "iteration")
    made.target = made.name
    made.meta.update({PORT: Port("carried", index=position), "val": _integers(body, shape)})
    made.meta[META] = _nowhere(made, "movement")
    return made


def _integers(graph: fx.GraphModule, shape: tuple[int, ...]) -> Any:
    return fake_mode(graph).from_tensor(torch.zeros(shape, dtype=torch.int64), static_shapes=True)


def _begin(body: fx.GraphModule) -> fx.Node:
    first: fx.Node = next(node for node in body.graph.nodes if node.op != "placeholder")
    return first


def _first(body: fx.GraphModule, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """Insert a call before all others of a body."""
    near = _begin(body)
    with body.graph.inserting_before(near):
        made = body.graph.call_function(target, args, kwargs)
    evaluate(body, made)
    made.meta[META] = _nowhere(made, "integer")
    return made


def _state(body: fx.GraphModule, counter: fx.Node, outer: fx.Node, number: int) -> None:
    """Insert the (seed, sample) of an iteration, which the operations of a body draw from."""
    made = _first(body, Iterations.overload, Iterations(counter, outer, number).arguments())
    if counter.op != "placeholder":
        made.append(counter)
        counter.append(made)
    made.meta[PORT] = Port("random")


def _silent(node: fx.Node) -> fx.Node:
    node.meta[META] = _nowhere(node, "integer")
    return node


def _nowhere(node: fx.Node, status: Any) -> Site:
    return Site("", "", node.op, "integer", "constant", "", "", status=status)
