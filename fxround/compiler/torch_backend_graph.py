"""The graph that Dynamo passes to a backend, converted to the graph that fxround's own capture gives.

AOTAutograd, the formulas and the switches are those of ``capture``. Dynamo passes the parameters and buffers that
a model uses as arguments, in the order of their use. This module restores their names and the model's order, and adds
those that the model does not use, so that the nodes' numbers, which select their random bits, are those of
``fxround.compile``. A graph that a break cut off is refused, because Python would run the rest without rounding.
Dynamo's guards decide which calls may use a graph.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxround.capture import Captured, Decompositions, describe, refuse_unsupported_nodes
from fxround.capture.aliases import aliases_of, positions_of
from fxround.capture.dynamo import alone
from fxround.capture.gradient_marks import mark_values
from fxround.capture.loops import own_loops
from fxround.capture.processes import is_shared
from fxround.capture.refusals import explained, refuse_unsupported_tensors
from fxround.capture.torch_private import (
    copy_results,
    joint_of,
    quickened,
    redefine,
    traced_frame,
    tracing_switches,
    uncollected,
)
from fxround.capture.undifferentiated import mark_constants
from fxround.compiler.executable import Owner, owner_of
from fxround.errors import CaptureError
from fxround.graph.site import PORT, PORTS, Port
from fxround.graph.values import fake_mode


def received(
    graph: fx.GraphModule, inputs: Sequence[Any], decompositions: Decompositions, marked: bool = False
) -> tuple[Captured, tuple[Owner, ...], nn.Module | None]:
    """Return the ATen graph of Dynamo's graph, the owner of each of its inputs (None for an argument), and the model.

    The model is None if Dynamo traces a function. It must be called inside a backend, and changes ``graph``. Raises
    CaptureError for a part of a model, and for what ``capture`` refuses.
    """
    name, model = traced_frame()
    _refuse_parts(graph, name)
    if any(map(is_shared, inputs)):
        raise CaptureError(
            "the model computes with tensors that several processes share (DTensor), which a backend of torch.compile "
            "does not take: call fxround.compile(model, policy) in place of torch.compile"
        )
    refuse_unsupported_tensors(nn.Module(), inputs, {})
    with alone(name), uncollected():
        captured = _captured(graph, inputs, decompositions, marked, model)
    if model is None:
        return captured, (None,) * len(captured.entering), None
    captured = _in_order(captured, model, inputs)
    owners = tuple(owner_of(model, port) if port.index < 0 else None for port in captured.entering)
    return captured, owners, model


def _captured(
    graph: fx.GraphModule, inputs: Sequence[Any], decompositions: Decompositions, marked: bool, model: nn.Module | None
) -> Captured:
    placeholders = enumerate(graph.graph.find_nodes(op="placeholder"))
    state = {} if model is None else _state(model)
    names = [replace(state.get(id(inputs[i])) or _port_of(node, i), index=i) for i, node in placeholders]
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_switches(by_dynamo=True))
        stack.enter_context(quickened())
        try:
            outputs: Any = graph.graph.output_node().args[0]
            returned = [i if isinstance(node, fx.Node) else None for i, node in enumerate(outputs)]
            aliases = aliases_of(
                graph, returned, dict(zip(graph.graph.find_nodes(op="placeholder"), names, strict=True))
            )
            redefine(graph, decompositions)
            own_loops(graph)
            if torch.is_grad_enabled():
                copy_results(graph, positions_of(aliases, returned))
                if marked:
                    mark_values(graph)
            joint = joint_of(stack, graph, tuple(inputs), {}, decompositions)
        except Exception as e:  # whatever the model's own code raises
            raise explained(model or graph, e) from e
    refuse_unsupported_nodes(joint.graph_module)
    once = mark_constants(graph, joint.graph_module) if torch.is_grad_enabled() else ""
    captured = _named(describe(joint, len(inputs)), names)
    return replace(captured, aliases=aliases, once=once)


def _refuse_parts(graph: fx.GraphModule, function: str) -> None:
    """Raise CaptureError for a graph that is only a part of the compiled function."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    advice = (
        "What Dynamo leaves to Python would not be rounded. torch.compile(..., fullgraph=True) tells the line at once; "
        "fxround.compile captures recurrent layers and some models that torch.compile breaks."
    )
    if reason is not None and reason.graph_break:
        frames = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in reason.user_stack[-1:]]
        said = reason.reason.strip().partition("\n")[0]
        raise CaptureError(
            f"{function} is not a single graph.\n  at      {''.join(frames)}\n  reason  {said}\n  {advice}"
        )
    if function.startswith("torch_dynamo_resume_in"):
        raise CaptureError(
            f"{function.removeprefix('torch_dynamo_resume_in_')}: this code runs after a graph break.\n  {advice}"
        )


def _state(model: nn.Module) -> dict[int, Port]:
    """Return parameters and buffers by id: a model that sets attributes reads them under other paths."""
    buffers = {id(tensor): Port("buffer", name) for name, tensor in model.named_buffers()}
    return buffers | {id(tensor): Port("parameter", name) for name, tensor in model.named_parameters()}


def _port_of(placeholder: fx.Node, index: int) -> Port:
    """Return the port of an input from Dynamo's source: L['self']._modules['fc']._parameters['weight'] is fc.weight."""
    source = str(getattr(placeholder, "_dynamo_source").name)  # noqa: B009 (no attribute of the class)
    kinds = {"_parameters": "parameter", "_buffers": "buffer"}
    attribute = re.search(r"\.(_parameters|_buffers)\['([^']+)'\]$", source)
    if attribute is None:
        return Port("argument", index=index)
    path = re.findall(r"\._modules\['([^']+)'\]", source)
    return Port(kinds[attribute[1]], ".".join([*path, attribute[2]]), index)  # type: ignore[arg-type]


def _named(captured: Captured, ports: Sequence[Port]) -> Captured:
    """Return the same graph with ports that name state."""

    def named(port: Port) -> Port:
        known = ports[port.index] if port.kind in ("argument", "gradient") or port.mutation else port
        kind = known.kind if port.kind == "argument" else port.kind
        return replace(port, kind=kind, name=known.name, index=known.index)

    inputs, outputs = tuple(map(named, captured.inputs)), tuple(map(named, captured.outputs))
    for node, port in zip(captured.graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta[PORT] = port
    captured.graph.graph.output_node().meta[PORTS] = outputs
    return replace(captured, inputs=inputs, outputs=outputs)


def _in_order(captured: Captured, model: nn.Module, inputs: Sequence[Any]) -> Captured:
    """Return the graph with an input for each parameter and buffer of the model, in the order of ``capture``."""
    graph = captured.graph
    mode = fake_mode(graph)
    placeholders = dict(zip(captured.inputs, graph.graph.find_nodes(op="placeholder"), strict=True))
    by_tensor = {id(inputs[p.index]): p for p in captured.inputs if p.kind in ("parameter", "buffer")}
    state: dict[Port, fx.Node] = {}
    first = next(iter(graph.graph.nodes))
    for kind, tensors in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        for name, tensor in tensors(remove_duplicate=False):
            port = by_tensor.pop(id(tensor), None)
            if port is not None:
                state[port] = placeholders.pop(port)
                continue
            port = Port(kind, name)  # type: ignore[arg-type]
            with graph.graph.inserting_before(first):
                node = state[port] = graph.graph.placeholder(name.replace(".", "_"))
            node.meta = {PORT: port, "val": mode.from_tensor(tensor, static_shapes=True)}
    ordered = state | placeholders
    anchor = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in ordered.values():
        anchor.prepend(node)
    graph.recompile()
    return replace(captured, inputs=tuple(ordered))
