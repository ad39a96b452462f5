"""Random states: the (seed, sample) from which the operations of a graph, and of the bodies of its loops, draw.

That of a graph is its last placeholder. Each iteration of a loop has one of its own: a scan reads it from a table of
all iterations, and the bodies of a ``while_loop`` and a ``cond`` compute it from a counter, or from the number of the
branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxround.graph.dialect import COND, SCAN, Iterations, Loop, loops_of
from fxround.graph.site import META, PORT, PORTS, Port, Site, site
from fxround.graph.values import evaluate, fake_mode, outputs_of
from fxround.passes import streams
from fxround.passes.rewrite import RNG, Plan, insert, is_random_state, rng_of, size_of

aten = torch.ops.aten


def add_random_state(graph: fx.GraphModule, plan: Plan) -> None:
    """Append the placeholder of (seed, sample), and give each loop's body the (seed, sample) of its iteration."""
    if not any(map(is_random_state, graph.graph.nodes)):
        _append_state(graph)
    _add_to_loops(graph)


def _append_state(graph: fx.GraphModule) -> None:
    last = [node for node in graph.graph.nodes if node.op == "placeholder"]
    mode = fake_mode(graph)
    with graph.graph.inserting_after(last[-1]) if last else graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        rng = graph.graph.placeholder(RNG)
    # The placeholder's target becomes a parameter of the generated code; a buffer of the model may already have this
    # name.
    rng.target = rng.name
    rng.meta[PORT] = Port("random")
    rng.meta["val"] = mode.from_tensor(torch.zeros(2, dtype=torch.int64), static_shapes=True)


def _add_to_loops(graph: fx.GraphModule) -> None:
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
