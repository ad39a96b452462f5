"""Classify: record where every value comes from, what its operator does, and what it is to the model.

After this pass every node that yields a tensor has a Site, for example
``Site(path="bn1", kind="pointwise", role="statistic", number=12, source="model.py:7", ...)``. The kind comes from the
table of rules. The role says what the value is computed from (state alone: weight, buffer, statistic; data: input,
activation) or, in the backward graph, what it becomes (the gradient of a weight: gradient; of anything else: error).
The direction is the pass that the value belongs to. The number is the stream of the node's random bits; no policy
changes it. An operator without a rule gets the kind "unknown" and a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.capture.gradient_marks import MARKED, MARKED_GRADIENT
from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.graph.dialect import is_loop, loops_of
from fxround.graph.site import (
    DIRECTION,
    META,
    PORT,
    PORTS,
    REPEATED,
    ROLE,
    TAKEN,
    Direction,
    Port,
    Site,
    Status,
    float_value,
    float_values,
    is_complex,
    located,
    operator_name,
    operator_of,
)
from fxround.graph.values import outputs_of
from fxround.operators.formulas.table import makes_statistics
from fxround.operators.rules import CONSTANTS, rule_of
from fxround.passes import streams
from fxround.passes.loops import carried_role, enter
from fxround.passes.rewrite import Plan, moved_by

_DIFFERENTIAL: Final = frozenset({"error", "gradient"})
_STATE: Final = frozenset({"weight", "buffer", "constant", "statistic"})
_ROLE_OF_PORT: Final = {
    "parameter": "weight",
    "buffer": "buffer",
    "argument": "input",
    "number": "constant",
    "tangent": "error",
    "carried": "activation",
    "random": "constant",
}
_ALIAS: Final = torch.ops.aten.alias.default
_COMPLEX: Final = "fxround has no formula for this operation on complex numbers"
_INDEX: Final = "it becomes an index and depends on no data: it only chooses elements"
# Operators that make integers, and those that make multiples of one half from such multiples.
_INTEGER_PARTS: Final = frozenset({"floor", "ceil", "round", "trunc"})
_CLOSED: Final = frozenset(
    {"add", "sub", "rsub", "neg", "abs", "fmod", "remainder", "clamp", "minimum", "maximum", "where", "clone"}
)


def classify(graph: fx.GraphModule, plan: Plan) -> None:
    """Give every node that yields a tensor its Site."""
    roles: dict[fx.Node, str] = {}
    coordinates = _coordinates(graph)
    gradients = _gradients(graph)
    numbers = _numbers(graph)
    for node in graph.graph.find_nodes(op="call_function", target=SUM_OF_PROCESSES):
        # One process has the sum where a process has its part.
        numbers[node] = numbers.get(node.args[0], -1)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if _is_number(node):  # an operand, like the number of the code that it stands for
            roles[node] = "constant"
            continue
        place = replace(_site(node, roles), direction=direction_of(node), number=numbers.get(node, -1))
        if node in gradients:
            place = replace(place, role="gradient")
        place = replace(place, role=node.meta.get(ROLE) or carried_role(node) or place.role)
        place = node.meta.get(REPEATED) or place
        roles[node] = place.role
        if node in coordinates:
            place = replace(place, kind="coordinate", role="coordinate", status="integer", reason=_INDEX)
        if _yields_tensor(node):
            node.meta[META] = place
    for loop, bodies in loops_of(graph):
        enter(loop, bodies, roles, gradients)


def _numbers(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """Return the stream of each value.

    Values that the results need come first, then inputs and constants, then gradients, then the rest. Values that are
    moved have numbers of their own, in the same order, and first those that are no view or copy of one other value. A
    value therefore has the same number with and without gradients, and the number does not depend on how data is moved,
    which differs if the batch is symbolic. Values that are computed again (``REPEATED``) have their numbers already,
    and new ones follow.
    """
    output = graph.graph.output_node()
    results = outputs_of(graph)
    ports: tuple[Port, ...] = output.meta.get(PORTS) or ()
    late = {value for value, port in zip(results, ports, strict=False) if port.kind == "gradient"}
    first = {value for value in pytree.tree_leaves(results) if isinstance(value, fx.Node) and value not in late}
    for node in reversed(graph.graph.nodes):
        if node in first:
            first.update(node.all_input_nodes)
        elif node.op == "placeholder" and direction_of(node) == "forward":
            first.add(node)
    values = [n for n in graph.graph.nodes if (float_value(n) is not None or is_loop(n)) and not _is_number(n)]
    own = [node for node in values if REPEATED not in node.meta and node.target is not _ALIAS]
    taken = output.meta.get(TAKEN, ())
    computed = sorted((n for n in own if not _only_moves(n)), key=lambda node: _turn(node, node in first))
    moved = sorted(filter(_only_moves, own), key=lambda node: (node not in first, moved_by(node) is not None))
    return {
        **dict(zip(computed, streams.of_values(taken, len(computed)), strict=True)),
        **dict(zip(moved, streams.of_values(taken, len(moved), moved=True), strict=True)),
    }


def _turn(node: fx.Node, first: bool) -> int:
    """Return the group of a node in the numbering.

    0: it computes results. 1: it enters. 2: it computes gradients. 3: everything else.
    """
    if node.op != "call_function" or str(node.target) in CONSTANTS:
        return 1 if first else 3
    return 0 if first else 2


def _only_moves(node: fx.Node) -> bool:
    """Whether the node moves values, and is no constant."""
    if node.op != "call_function" or str(node.target) in CONSTANTS:
        return False
    rule = rule_of(node)
    # The part of a sum that one process has draws what the whole draws in one process.
    marks = (MARKED, MARKED_GRADIENT, SUM_OF_PROCESSES, EXTREME_OF_PROCESSES)
    return node.target in marks or (rule is not None and rule.kind == "movement")


def _gradients(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the backward values that are the gradient of a parameter, or are used only by its sum and its layout."""
    output = graph.graph.output_node()
    results = outputs_of(graph)
    ports: tuple[Port, ...] = output.meta.get(PORTS) or ()
    gradients = {value for value, port in zip(results, ports, strict=False) if port.kind == "gradient" and port.name}
    for node in reversed(graph.graph.nodes):
        if node not in gradients and node.users and all(user in gradients and _carries(user) for user in node.users):
            gradients.add(node)
        elif node in gradients and (_is_moved(node) or node.target is SUM_OF_PROCESSES):
            gradients.update(node.all_input_nodes)
    return {node for node in gradients if isinstance(node, fx.Node) and direction_of(node) == "backward"}


def direction_of(node: fx.Node) -> Direction:
    """Return the pass that an operation belongs to, by the tag that AOTAutograd gave it."""
    known: Direction | None = node.meta.get(DIRECTION)
    if known is not None:
        return known
    return "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"


def _carries(node: fx.Node) -> bool:
    """Whether the node only moves its operand, adds up the gradient of several uses, or finishes a sum."""
    return bool(node.meta.get("is_gradient_acc")) or _is_moved(node) or node.target is SUM_OF_PROCESSES


def _is_moved(node: fx.Node) -> bool:
    rule = rule_of(node) if node.op == "call_function" else None
    return rule is not None and rule.kind == "movement"


def _coordinates(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the floating-point values that become an index and depend on no data, or on integer parts of it alone.

    Examples are the source pixels of an interpolation, and floor(x) + 1 of a ``grid_sample``. Rounding one to a few
    bits, or changing it by an ulp, would read another element, or none. The weights of an interpolation, and the
    coordinates before their integer part is taken, are not among them.
    """
    data: set[fx.Node] = set()
    whole = _integer_parts(graph)
    for node in graph.graph.nodes:
        entering = node.op in ("placeholder", "get_attr") and bool(float_values(node)) and not _is_number(node)
        if entering or any(used in data for used in node.all_input_nodes):
            data.add(node)
    coordinates: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op != "call_function" or (node in data and node not in whole) or not float_values(node):
            continue
        if any(user in coordinates or _becomes_integer(user) for user in node.users):
            coordinates.add(node)
    return coordinates | _indices_as_numbers(graph, coordinates)


def _is_number(node: fx.Node) -> bool:
    """Whether a node is an attribute of the model that is a number."""
    return node.op == "placeholder" and PORT in node.meta and node.meta[PORT].kind == "number"


def _integer_parts(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the values that are computed from integer parts (``floor``) and small constants alone.

    Reflected coordinates divide such values, and take the integer part of the quotient: that quotient is one of them.
    """
    parts: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or not float_values(node):
            continue
        numbers = [x for x in node.args if not isinstance(x, fx.Node) or float_values(x)]
        computed = any(x in parts for x in node.all_input_nodes) and all(x in parts or _is_small(x) for x in numbers)
        closed = _is_moved(node) or _base(node) in _CLOSED
        divided = _base(node) == "div" and all(_base(user) in _INTEGER_PARTS for user in node.users)
        if _base(node) in _INTEGER_PARTS or (computed and (closed or divided)):
            parts.add(node)
    return parts


def _base(node: fx.Node) -> str:
    """Return the name of an operator without its namespace and overload, as in ``floor``."""
    return operator_name(node).split(".")[-2] if node.op == "call_function" and "." in operator_name(node) else ""


def _is_small(x: Any) -> bool:
    """Whether x is a multiple of one half (a reflection's border), a constant tensor of one, or no number."""
    if isinstance(x, fx.Node):
        return str(x.target) in CONSTANTS and all(_is_small(number) for number in x.args)
    return not isinstance(x, float) or (2 * x).is_integer()


def _indices_as_numbers(graph: fx.GraphModule, coordinates: set[fx.Node]) -> set[fx.Node]:
    """Return the indices made of ``coordinates`` that are converted to floating point.

    An example is weight = coordinate - index.
    """
    indices: set[fx.Node] = set()
    numbers: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if not any(used in coordinates or used in indices for used in node.all_input_nodes):
            continue
        if _yields_tensor(node) and not float_values(node):
            indices.add(node)
        elif str(node.target) == "aten._to_copy.default" and node.all_input_nodes[0] in indices:
            numbers.add(node)
    return numbers


def _becomes_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool
    return str(node.target) == "aten._to_copy.default" and whole


def _yields_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))


def _site(node: fx.Node, roles: Mapping[fx.Node, str]) -> Site:
    if node.op == "placeholder":
        port: Port = node.meta[PORT]
        path = port.name.rpartition(".")[0] or located(node).path
        return Site(path, "", node.op, "placeholder", _ROLE_OF_PORT[port.kind], "", "", status="movement")
    if node.op == "get_attr":
        return Site("", "", node.op, "constant", "constant", "", str(node.target), status="movement")
    place, rule = located(_consumer(node)), rule_of(node)
    kind = rule.kind if rule else "unknown"
    if is_complex(node):
        return replace(place, operator=operator_of(node), kind="opaque", role="activation", status="integer")
    if node.target is torch.ops.aten.view_as_real.default:
        return replace(place, operator=operator_of(node), kind="movement", role="activation", status="movement")
    if any(map(is_complex, node.all_input_nodes)) and not _is_result_of_loop(node):
        # The parts stand for the operation that made the numbers.
        is_part = node.target is torch.ops.aten.view_as_real_copy.default
        maker = node.all_input_nodes[0] if is_part else node
        if maker.op == "placeholder":
            return _site(maker, roles)
        if _is_result_of_loop(maker):
            return replace(place, operator=operator_of(node), kind="movement", role="activation", status="movement")
        return replace(place, operator=operator_of(maker), kind="opaque", role="activation", reason=_COMPLEX)
    if is_loop(node):
        return replace(place, kind=kind, role=_role(node, kind, roles), status="integer")
    status, reason = _status(node, kind, rule.reason if rule else f"fxround has no rule for {place.operator}")
    named = replace(place, operator=operator_of(node), kind=kind, role=_role(node, kind, roles))
    return replace(named, status=status, reason=reason)


def _is_result_of_loop(node: fx.Node) -> bool:
    """Whether the node takes a result of a loop, whose body has rounded it."""
    return node.target is operator.getitem and is_loop(node.args[0])  # type: ignore[arg-type]


def _consumer(node: fx.Node) -> fx.Node:
    """Return the node itself; for a sum of gradients, the node that uses it: both belong to one module."""
    while node.meta.get("is_gradient_acc") and node.users:
        node = next(iter(node.users))
    return node


def _status(node: fx.Node, kind: str, reason: str) -> tuple[Status, str]:
    if kind != "unknown" and not float_values(node):
        return "integer", ""
    if node.target is operator.getitem:
        return "movement", ""
    if kind == "movement" or kind == "exact":
        return kind, ""  # type: ignore[return-value]
    if kind == "integer":
        # The rule does not cover this result: without a reason it would look like a value that the policy left alone.
        return "native", f"fxround has no rule for a floating-point result of {operator_of(node)}"
    return "native", reason


def _role(node: fx.Node, kind: str, roles: Mapping[fx.Node, str]) -> str:
    if str(node.target) in CONSTANTS:
        return "constant"
    sources = {roles[n] for n in node.all_input_nodes if _yields_tensor(n) or n.op == "call_function"}
    if node.target in (SUM_OF_PROCESSES, EXTREME_OF_PROCESSES):
        return sources.pop()
    if kind == "loop":
        return "error" if sources & _DIFFERENTIAL else "activation"
    if kind == "movement" and len(sources) == 1:
        return sources.pop()
    statistic = kind == "reduction" or str(node.target) in ("aten.amax.default", "aten.amin.default")
    if sources & _DIFFERENTIAL:
        return "error"
    if sources <= _STATE or (statistic and makes_statistics(node.meta.get("original_aten"))):
        return "statistic"
    return "activation"
