"""Loops: their bodies are graphs of their own, to which the pipeline does what it does to the whole.

``own_bodies`` gives a lowered graph copies of the bodies, so that the captured ones stay as they are. ``enter`` tells a
body, after its surroundings are classified, what the values that enter it are to the model.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping

from torch import fx

from fxround.graph.dialect import Loop, loops_of
from fxround.graph.site import DIRECTION, ORIGIN, PORT, PORTS, Port, Site, site
from fxround.graph.values import module_of, outputs_of
from fxround.passes.rewrite import source_of

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
