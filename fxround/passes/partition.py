"""Partition: split a lowered joint graph into a forward and a backward graph.

    joint(state, arguments, tangents, multipliers, rng) -> (results, gradients, magnitudes)
    forward(state, arguments, multipliers, rng) -> (results, magnitudes, saved)
    backward(saved, tangents, rng) -> (gradients, magnitudes)

The forward graph holds what the results need, and nothing that depends on a tangent; the backward graph holds the rest.
The tensors and sizes that the backward graph takes from the forward one are returned after the results. Both graphs get
(seed, sample), so a node draws the same bits in either. Nodes are copied and never changed: the two graphs together
compute what the joint graph computes, node for node. What is saved follows from the edges; nothing is recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.graph.site import PORT, PORTS, Port, site
from fxround.graph.values import module_of
from fxround.passes.rewrite import rng_of

aten = torch.ops.aten
_BACKWARD: Final = ("tangent", "gradient")


@dataclass(frozen=True)
class Parts:
    """The two graphs of a training step.

    reached: for every gradient the positions of the tangents that it depends on. early, late: the names of the delayed
    scales whose magnitudes the forward and the backward graph return.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    reached: tuple[frozenset[int], ...]
    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


def partition(joint: fx.GraphModule) -> Parts:
    """Return the forward and the backward part of a lowered joint graph, which is not changed."""
    output = joint.graph.output_node()
    values: Any = output.args[0]
    ports: tuple[Port, ...] = output.meta[PORTS]
    late = _depend_on_tangents(joint)
    pairs = list(zip(values, ports, strict=True))
    later = [(v, port) for v, port in pairs if port.kind == "magnitude" and v in late]
    sooner = [(v, port) for v, port in pairs if port.kind == "magnitude" and v not in late]
    returned = [port for port in ports if port.kind not in ("gradient", "magnitude")]
    results = [_uncopied(joint, v) for v, port in pairs if port in returned] + [v for v, _ in sooner]
    gradients = [value for value, port in pairs if port.kind == "gradient"]
    forward = _needed(joint, [*results, *_effects(joint, late)])
    wanted = _needed(joint, [*gradients, *(v for v, _ in later)])
    for node in joint.graph.nodes:
        if node in wanted and (_is_taken(node, forward) or _is_early_size(node, forward, late)):
            forward.add(node)
    backward = wanted - forward
    saved = [node for node in joint.graph.nodes if _crosses(node, forward, backward)]
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder" and n.meta[PORT].kind not in _BACKWARD]
    tangents = [n for n in joint.graph.nodes if n.op == "placeholder" and n.meta[PORT].kind == "tangent"]
    result_ports = (*returned, *(port for _, port in sooner))
    late_ports = (*(port for port in ports if port.kind == "gradient"), *(port for _, port in later))
    values = [*gradients, *(v for v, _ in later)]
    return Parts(
        _extracted(joint, inputs, forward, [*results, *saved], result_ports),
        _extracted(joint, [*saved, *tangents, rng_of(joint)], backward, values, late_ports),
        _reached(joint, tangents, gradients),
        tuple(port.name for _, port in sooner),
        tuple(port.name for _, port in later),
    )


def _uncopied(joint: fx.GraphModule, value: Any) -> Any:
    """Return the operand of a result's copy if it can be the result: it is computed here, and returned once."""
    if not isinstance(value, fx.Node) or value.target is not aten.clone.default:
        return value
    source: Any = value.args[0]
    place = site(source)
    returned = sum(clone.target is aten.clone.default for clone in source.users)
    computed = source.op == "call_function" and place is not None and place.status != "movement"
    return source if computed and returned == 1 else value


def _depend_on_tangents(joint: fx.GraphModule) -> set[fx.Node]:
    late: set[fx.Node] = set()
    for node in joint.graph.nodes:
        tangent = node.op == "placeholder" and node.meta[PORT].kind == "tangent"
        if tangent or any(used in late for used in node.all_input_nodes):
            late.add(node)
    return late


def _needed(joint: fx.GraphModule, wanted: Iterable[Any]) -> set[fx.Node]:
    """Return the operators that compute the wanted values."""
    needed = {value for value in wanted if isinstance(value, fx.Node)}
    for node in reversed(joint.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return {node for node in needed if node.op == "call_function"}


def _effects(joint: fx.GraphModule, late: set[fx.Node]) -> list[fx.Node]:
    """Return checks that a model asks for: they yield no value and have to run."""
    return [n for n in joint.graph.nodes if n.op == "call_function" and n not in late and n.is_impure()]


def _is_taken(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether the node takes one of the results of an operator of the forward graph, such as a loop."""
    return node.target is operator.getitem and node.args[0] in forward


def _is_early_size(node: fx.Node, forward: set[fx.Node], late: set[fx.Node]) -> bool:
    """Whether the forward graph can compute a number that the backward needs.

    Then no tensor is kept for its shape alone.
    """
    leaves = pytree.tree_leaves(node.meta.get("val"))
    if node in late or not leaves or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    return all(used in forward or used.op != "call_function" for used in node.all_input_nodes)


def _crosses(node: fx.Node, forward: set[fx.Node], backward: set[fx.Node]) -> bool:
    """Whether the backward graph needs a value that the forward graph has."""
    enters = node.op == "placeholder" and node.meta[PORT].kind not in (*_BACKWARD, "random")
    return (node in forward or enters) and any(user in backward for user in node.users)


def _extracted(
    joint: fx.GraphModule,
    inputs: Sequence[fx.Node],
    kept: set[fx.Node],
    outputs: Sequence[Any],
    ports: tuple[Port, ...],
) -> fx.GraphModule:
    """Return a graph of the kept operators, whose placeholders are the inputs; constants are copied along."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if (node.op == "get_attr" and any(user in kept for user in node.users)) or node in kept:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = part.create_node(node.op, node.target, args, kwargs, node.name)
            copies[node].meta = dict(node.meta)
    part.output(fx.map_arg(tuple(outputs), copies.__getitem__))
    part.output_node().meta[PORTS] = ports
    return module_of(joint, part)


def _reached(
    joint: fx.GraphModule, tangents: Sequence[fx.Node], gradients: Sequence[Any]
) -> tuple[frozenset[int], ...]:
    reached = {node: frozenset([i]) for i, node in enumerate(tangents)}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            reached[node] = frozenset().union(*(reached.get(used, frozenset()) for used in node.all_input_nodes))
    return tuple(reached.get(value, frozenset()) for value in gradients)
