"""What a policy costs, read off a rounded graph: bits of parameters and operands, and multiply-adds by format.

A value counts with the bits of the codes of its format; one of a scaled format also with its part of the scales of its
blocks. What is known of a value (``passes.analyses.known``) decides its format, not what the policy says of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxround.graph.dialect import BlockExpand, Pointwise, graphs_of, is_loop, read, read_loop
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import PORT, Port, float_value, site
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding, short_name
from fxround.passes.analyses.known import Known, Origins, known
from fxround.passes.analyses.leaks import operand_source, unrounded
from fxround.passes.rewrite import ROUND, source_of
from fxround.passes.round_inputs import operands_of
from fxround.passes.scaled_results import LEFT
from fxround.tuning.weights import parameters_read
from fxround.views.graph_views import example_shape, located_nodes, operations


@dataclass(frozen=True)
class Costs:
    """What a call of a model costs under a policy.

    weight_bits      the mean over the elements of all parameters that the graph reads, in bits; one that is read in
                     several formats counts with the widest
    activation_bits  the mean over the elements of the operands of products that are no parameters, in bits; None if
                     there is none
    multiply_adds    the number of multiply-adds by the formats of the two operands, such as "int8 x e4m3fn"; "int8" if
                     both have one format

    Both means are None if the codes of a format are not defined. Sizes are those of the captured example.
    """

    weight_bits: float | None
    activation_bits: float | None
    multiply_adds: Mapping[str, int]


@dataclass(frozen=True)
class _Stored:
    """How a value is stored: the name of its format, and the bits of an element; None if its codes are not defined."""

    name: str
    bits: float | None


@dataclass(frozen=True)
class Operand:
    """What a product reads that is no parameter: the product's place, the number of elements, and how they are stored.

    A product in a loop counts with the steps of the example.
    """

    path: str
    operator: str
    elements: int
    bits: float | None


@dataclass(frozen=True)
class Stores:
    """The values that ``Costs`` counts: parameters by name, each with its elements and their bits, and operands."""

    parameters: Mapping[str, tuple[int, float | None]]
    operands: tuple[Operand, ...]
    multiply_adds: Mapping[str, int]


def costs_of(graph: fx.GraphModule) -> Costs:
    """Return the costs of a lowered graph."""
    stores = stores_of(graph)
    operands = [(operand.elements, operand.bits) for operand in stores.operands]
    return Costs(_mean(list(stores.parameters.values())), _mean(operands), stores.multiply_adds)


def stores_of(graph: fx.GraphModule) -> Stores:
    """Return the values of a lowered graph that have a cost."""
    origins, outer = known(graph), _entries_of_loops(graph)
    entering = {node: port.name for node, port in parameters_read(graph) if float_value(node) is not None}
    weights: dict[str, list[_Stored]] = {name: [] for name in entering.values()}
    operands: list[Operand] = []
    counted: Counter[str] = Counter()
    for _, node, place, times in located_nodes(graph):
        if place.kind != "contraction" or place.operator == ROUND:
            continue
        stored = []
        for operand in operands_of(node):
            stored.append(_stored(operand, origins))
            parameter = _parameter(operand, outer)
            if parameter is None:
                operands.append(Operand(place.path, place.operator, times * _count(operand), stored[-1].bits))
            else:
                weights[parameter].append(stored[-1])
        counted[" x ".join(dict.fromkeys(each.name for each in stored))] += times * operations(node, place) // 2
    sizes = {name: _count(node) for node, name in entering.items()}
    for node, name in entering.items():
        if not weights[name]:
            rounds = [user for user in node.users if _is_entry(user)]
            weights[name] = [_stored(read_as, origins) for read_as in rounds or [node]]
    return Stores(
        {name: (sizes[name], _widest(each).bits) for name, each in weights.items()}, tuple(operands), dict(counted)
    )


def _entries_of_loops(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return, for the inputs of the bodies of loops, the values that enter them first."""
    entries: dict[fx.Node, fx.Node] = {}
    for part in graphs_of(graph):
        for node in part.graph.nodes:
            for name in read_loop(node).bodies if is_loop(node) else ():
                body: Any = part.get_submodule(name)
                inputs = body.graph.find_nodes(op="placeholder")
                pairs = zip(inputs, read_loop(node).operands, strict=True)
                entries.update({inner: x for inner, x in pairs if isinstance(x, fx.Node)})
    return entries


def _parameter(operand: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> str | None:
    """Return the name of the parameter that an operand is a view or a rounding of; None if it is of another value."""
    before, node = None, operand
    while node is not before:
        before, node = node, source_of(unrounded(operand_source(node)))
        node = outer.get(node, node)
    port: Port | None = node.meta.get(PORT)
    return port.name if port is not None and port.kind == "parameter" else None


def _is_entry(node: fx.Node) -> bool:
    """Whether the node rounds a value as it enters."""
    place = site(node)
    return place is not None and place.operator == ROUND and place.kind == "placeholder"


def _stored(node: fx.Node, origins: Mapping[fx.Node, Origins]) -> _Stored:
    """Return how the value of a node is stored: in the widest of the formats that it may have."""
    kinds: list[_Stored] = []
    rest: list[Known] = []
    for origin, own in origins[node].items():
        rounding = _blocks(origin)
        if rounding is None:
            rest.append(own)
        else:
            kinds.append(_Stored(short_name(rounding.format), _scaled_bits(origin, rounding)))
    formats = frozenset(fmt for own in rest for fmt in own.formats)
    if not kinds and not formats:
        value = float_value(node)
        assert value is not None
        formats = frozenset([Format.parse(FORMAT_OF[value.dtype])])
    kinds += [_Stored(fmt.said, _bits(Encoding, fmt)) for fmt in sorted(formats, key=str)]
    return _Stored(" or ".join(dict.fromkeys(kind.name for kind in kinds)), _widest(kinds).bits)


def _blocks(node: fx.Node) -> ScaledRounding | None:
    """Return the scaled format to which a node rounds; None for any other node."""
    place = site(node)
    if place is None or place.assignment is None or not isinstance(read(node), Pointwise):
        return None
    if place.assignment.scaled is not None:
        return place.assignment.scaled
    return place.assignment.blocks if place.kind not in LEFT else None


def _scaled_bits(node: fx.Node, rounding: ScaledRounding) -> float | None:
    """Return the bits of an element with its part of the scales that the node reads."""
    form, scaling = rounding.format, rounding.format.scaling
    element = _bits(Encoding.of_elements, form)
    if scaling is None or element is None:
        return element
    scale = _bits(Encoding, scaling.format)
    whole = 0 if scaling.whole is None else _bits(Encoding, scaling.whole)
    if scale is None or whole is None:
        return None
    call = read(node)
    assert isinstance(call, Pointwise)
    blocks = max((_count(b.scales) for x in call.xs[1:] if isinstance(b := read(x), BlockExpand)), default=1)
    zero_point = element if scaling.how == "affine" else 0
    return element + ((scale + zero_point) * blocks + whole) / max(_count(node), 1)


def _bits(encoding: Callable[[Any], Encoding], form: Format | ScaledFormat) -> int | None:
    """Return the bits of a code; None if the codes are not defined."""
    try:
        return encoding(form).field("any")[1]
    except ValueError:
        return None


def _widest(kinds: Iterable[_Stored]) -> _Stored:
    return max(kinds, key=lambda kind: math.inf if kind.bits is None else kind.bits)


def _mean(counted: Sequence[tuple[int, float | None]]) -> float | None:
    total = sum(count for count, _ in counted)
    known_bits = [count * bits for count, bits in counted if bits is not None]
    return sum(known_bits) / total if total and len(known_bits) == len(counted) else None


def _count(node: fx.Node) -> int:
    value = float_value(node)
    assert value is not None
    return math.prod(example_shape(value))
