"""Views of a graph whose nodes carry a ``Site``: text, table, coverage, networkx.

Every view reads the graph and changes nothing. Tables are data (``to_dict``, ``to_json``); text and HTML are made from
the same rows. A floating-point value without a Site is shown as native with the reason "not classified", so that an
omission of the passes is visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import networkx as nx
import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.graph.dialect import BODIES, is_loop, read_loop
from fxround.graph.site import PORT, Port, Site, enclosing, located, operator_name, site
from fxround.graph.values import outputs_of
from fxround.passes.rewrite import ROUND
from fxround.passes.round_fallbacks import OWN, is_own
from fxround.views.pictures import colourings_of, embedded
from fxround.views.size_names import size_names, spelled
from fxround.views.summaries import SILENT, Coverage, Operation, Summary, counted, coverage_of, summary_of

_UNCLASSIFIED: Final = "not classified"


def described(node: fx.Node) -> Site | None:
    """Return the node's Site; one with "not classified" if a float value has none; None for other values.

    The model's own ``fxround.round`` is rounded; its reason says so, and to what. Where a policy rounds its result
    again, that is a node of its own. Where it clamps is no floating-point number, but a mask.
    """
    place = site(node)
    if place is not None and is_own(node):
        own = replace(place, assignment=None, reason=f"{OWN}: {node.args[1]}")
        return replace(own, status="rounded" if _floats(node) else "integer")
    if place is None and node.op == "call_function" and _floats(node):
        return replace(located(node), status="native", reason=_UNCLASSIFIED)
    return place if node.op != "output" else None


def graph_text(gm: fx.GraphModule) -> str:
    """Return the graph as text, one line per node, with headings for module and source line."""
    return "\n".join(_lines(gm, size_names(gm)))


def _lines(gm: fx.GraphModule, names: Mapping[str, str]) -> list[str]:
    lines, heading = [], ""
    for node in gm.graph.nodes:
        entry = described(node)
        if entry is not None and node.op == "call_function" and _heading(entry) != heading:
            heading = _heading(entry)
            lines.append(f"# {heading}")
        lines.append(f"  {_statement(node, names)}")
        for name, body in _bodies(gm, node):
            lines.append(f"    # {name} of {node.name}")
            lines += [f"    {line}" for line in _lines(body, names) if not line.startswith("#")]
    return lines


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[tuple[str, fx.GraphModule]]:
    """Return the bodies of a loop with their names; nothing for any other node."""
    if not is_loop(node):
        return []
    bodies = [gm.get_submodule(name) for name in read_loop(node).bodies]
    return list(zip(BODIES[node.target], bodies, strict=True))  # type: ignore[arg-type]


def summary(gm: fx.GraphModule, *, movement: bool = False, backward: bool | None = None) -> Summary:
    """Return a table with one row per operation: node, operator, module path, source line, rounding, accumulator.

    movement: whether to include data movement and integer operations. backward: True for the backward pass alone, False
    for the other operations, None for all.
    """
    operations = _listed(gm, backward)
    return summary_of((o for o in operations if movement or o.status not in SILENT), note=counted(operations))


def coverage(gm: fx.GraphModule, *, backward: bool | None = None) -> Coverage:
    """Return how many nodes and operations are rounded, exact, native or data movement, with the reasons.

    Operations are counted at the sizes of the example for which the graph was captured; a multiply-add counts as two.
    backward: as in ``summary``.
    """
    return coverage_of(_listed(gm, backward))


def _listed(gm: fx.GraphModule, backward: bool | None) -> list[Operation]:
    """Return the operations of a graph, data movement included."""
    return [
        Operation(
            node=name,
            operator=entry.operator,
            module=entry.path,
            source=entry.source,
            **dict(zip(("rounding", "accumulate"), _decision(entry), strict=True)),
            status=entry.status,
            reason=entry.reason,
            direction=entry.direction,
            kind=entry.kind,
            role=entry.role,
            operations=times * operations(node, entry),
            code=entry.code,
        )
        for name, node, entry, times in located_nodes(gm)
        if backward is None or backward == (entry.direction == "backward")
    ]


def to_networkx(gm: fx.GraphModule) -> nx.DiGraph:
    """Return the whole graph, with texts and numbers as attributes of its nodes, which GraphML can store."""
    graph = nx.DiGraph()
    _add(graph, gm, size_names(gm))
    return graph


def _add(graph: nx.DiGraph, gm: fx.GraphModule, names: Mapping[str, str], within: str = "", times: int = 1) -> None:
    """Add the nodes of a graph and of the bodies of its loops, whose names begin with those of their loops.

    names: of symbolic sizes. times: how often the example runs the graph.
    """
    for node in gm.graph.nodes:
        if within and node.op == "output":
            continue
        name = f"{within}{node.name}"
        entry = described(node) or replace(located(node), status="integer")
        rounding, accumulate = _decision(entry)
        carried = within and node.op == "placeholder"
        graph.add_node(
            name,
            op="call_function" if carried else node.op,
            name="" if carried else _port_name(node),
            operator=entry.operator,
            path=entry.path,
            module_type=entry.module_type,
            kind=entry.kind,
            role=entry.role,
            source=entry.source,
            code=entry.code,
            status=entry.status if carried or node.op == "call_function" else node.op,
            reason=entry.reason,
            rounding=rounding,
            accumulate=accumulate,
            direction=entry.direction,
            modules=", ".join(f"{path}: {kind}" for path, kind in enclosing(node)),
            type=_type(node, names),
            tensor=node.op == "output" or any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(_value(node))),
            operations=times * operations(node, entry),
        )
        if not is_loop(node):
            graph.add_edges_from((f"{within}{used.name}", name) for used in node.all_input_nodes)
        for part, body in _bodies(gm, node):
            inside = f"{name}.{part}."
            _add(graph, body, names, inside, times * _iterations(node))
            entries = zip(read_loop(node).operands, body.graph.find_nodes(op="placeholder"), strict=True)
            graph.add_edges_from((f"{within}{x.name}", inside + e.name) for x, e in entries if isinstance(x, fx.Node))
            graph.add_edges_from((inside + x.name, name) for x in outputs_of(body) if isinstance(x, fx.Node))


def html(gm: fx.GraphModule, *, title: str = "") -> str:
    """Return coverage, picture and summary as one HTML fragment that needs no other file."""
    box = "max-height:50em;overflow:auto;border:1px solid #dee2e6;border-radius:6px;padding:6px;margin:8px 0"
    graph = to_networkx(gm)
    picture = embedded(graph, colourings_of(graph, None), title)
    views = (coverage(gm)._repr_html_(), picture, summary(gm)._repr_html_())
    return "".join(f'<div style="{box}">{view}</div>' for view in views)


def operations(node: fx.Node, entry: Site) -> int:
    """Return a node's operations at its example's sizes; an elementary function is one, a multiply-add two."""
    if entry.status in SILENT or node.op != "call_function":
        return 0
    tensors = [_value(used) for used in node.all_input_nodes]
    shapes = [example_shape(value) for value in tensors if isinstance(value, torch.Tensor)]
    outputs = [example_shape(v) for v in pytree.tree_leaves(_value(node)) if isinstance(v, torch.Tensor)]
    result = math.prod(outputs[0]) if outputs else 0
    name = entry.operator
    if "convolution" in name and len(shapes) > 1:
        transposed = bool(_arguments(node).get("transposed", False))
        return (
            2
            * math.prod(shapes[1][1:])
            * (math.prod(shapes[0]) // max(shapes[0][1], 1) * shapes[1][0] if transposed else result)
        )
    if entry.kind == "contraction" and entry.operator != ROUND:
        # Seed and sample are integers.
        factors = [example_shape(v) for v in tensors if isinstance(v, torch.Tensor) and not _is_integer(v)]
        return 2 * result * next((s[-1] for s in factors[-2:] if s), 1)
    return max([result, *map(math.prod, shapes)]) if entry.kind == "reduction" else result


def located_nodes(gm: fx.GraphModule, within: str = "", times: int = 1) -> Iterator[tuple[str, fx.Node, Site, int]]:
    """Yield the operations by name, with their Sites and how often the example runs each.

    The operations of a loop's body follow the loop. A ``while_loop`` counts as one iteration.
    """
    for node in gm.graph.nodes:
        entry = described(node)
        if entry is not None and node.op == "call_function":
            yield f"{within}{node.name}", node, entry, times
        for name, body in _bodies(gm, node):
            yield from located_nodes(body, f"{within}{node.name}.{name}.", times * _iterations(node))


def _iterations(node: fx.Node) -> int:
    """Return how often the example runs the body of a loop; 1 for a ``while_loop``, whose count is not known."""
    xs = read_loop(node).xs
    return example_shape(_value(xs[0]))[0] if xs else 1


def _decision(entry: Site) -> tuple[str, str]:
    """Return the texts of the columns rounding and accumulate."""
    if entry.status != "rounded" or entry.assignment is None:
        return (f"{entry.status}: {entry.reason}" if entry.reason else entry.status), ""
    if entry.reason:  # a fault: its field and probability
        return entry.reason, ""
    steps = entry.kind in ("contraction", "reduction", "scan", "scatter")
    return entry.assignment.said, str(entry.assignment.accumulate) if steps else ""


def _heading(entry: Site) -> str:
    module = f"{entry.path or '(root)'}{f' ({entry.module_type})' if entry.module_type else ''}"
    return "  ".join(part for part in (module, entry.source, entry.code) if part)


def _statement(node: fx.Node, names: Mapping[str, str]) -> str:
    """Return ``name: type = operator(arguments)`` without the run-time random key."""
    if node.op == "placeholder":
        return f"{node.name}: {_type(node, names)} = {_port_name(node)}"
    if node.op == "output":
        return f"return {', '.join(str(value) for value in pytree.tree_leaves(node.args))}"
    if node.op != "call_function":
        return f"{node.name}: {_type(node, names)} = {node.target}"
    arguments = [_shown(value) for key, value in _arguments(node).items() if key != "rng"]
    return f"{node.name}: {_type(node, names)} = {operator_name(node)}({', '.join(arguments)})"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value) if isinstance(value, str) else str(value)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else map(str, range(len(node.args)))
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _port_name(node: fx.Node) -> str:
    """Return the name of an input: a parameter's name, or its position among the arguments."""
    port: Port | None = node.meta.get(PORT)
    if port is None:
        return str(node.target)
    positions = {"random": "seed and sample", "tangent": f"gradient of result {port.index}"}
    return positions.get(port.kind) or port.name or f"argument {port.index}"


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _floats(node: fx.Node) -> bool:
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in pytree.tree_leaves(_value(node)))


def _is_integer(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def example_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of the captured example; converting a symbolic size to int would specialize the graph.

    A size that depends on the data (x[x > 0]) has no example and counts as 1.
    """
    return tuple(_example(size) if isinstance(size, torch.SymInt) else int(size) for size in value.shape)


def _example(size: torch.SymInt) -> int:
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def _type(node: fx.Node, names: Mapping[str, str]) -> str:
    """Return dtype and shape of a node's value, in these names of sizes; of the output node, those of the results."""
    value = [_value(used) for used in node.all_input_nodes] if node.op == "output" else _value(node)
    leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
    shapes = [", ".join(spelled(size, names) for size in v.shape) for v in leaves]
    texts = [f"{str(v.dtype).removeprefix('torch.')}[{shape}]" for v, shape in zip(leaves, shapes, strict=True)]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})" if texts else type(value).__name__
