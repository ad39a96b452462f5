"""Helpers that the passes share: the type of a pass, and how a node is replaced by another.

A replacement inherits everything that is known of the node that it replaces (module path, source line, fake value) and
its Site, of which only the status changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import Call, Pointwise
from fxround.graph.site import META, ORIGIN, PORT, Port, Site, float_value, site
from fxround.graph.values import evaluate
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.operators.rules import rule_of
from fxround.policy import Assignment, Policy

RNG: Final = "rng"
# The operator of a rounding that a pass inserts, as summaries show it.
ROUND: Final = "fxround.round"


@dataclass(frozen=True)
class Plan:
    """The policy that the passes follow, and whether an operator that they cannot round is an error."""

    policy: Policy
    strict: bool


Pass = Callable[[fx.GraphModule, Plan], None]


def sites(graph: fx.GraphModule) -> list[tuple[fx.Node, Site]]:
    """Return the nodes that have a Site, in graph order, with their Sites."""
    pairs = [(node, site(node)) for node in graph.graph.nodes]
    return [(node, place) for node, place in pairs if place is not None]


def decided(place: Site) -> tuple[Assignment, Rounding] | None:
    """Return the assignment of a Site and its rounding; None if the policy wants no rounding."""
    assignment = place.assignment
    return (assignment, assignment.rounding) if assignment is not None and assignment.rounding is not None else None


def rng_of(graph: fx.GraphModule) -> fx.Node:
    """Return the placeholder of (seed, sample)."""
    rng: fx.Node = next(node for node in graph.graph.nodes if is_random_state(node))
    return rng


def is_random_state(node: fx.Node) -> bool:
    """Whether a node is (seed, sample): a placeholder, or in a loop's body what is computed from it.

    A buffer of the model may have its name.
    """
    port: Port | None = node.meta.get(PORT)
    return port is not None and port.kind == "random"


def become(graph: fx.GraphModule, node: fx.Node, call: Call[fx.Node]) -> None:
    """Turn a node into the call of an operator that rounds it. Name, uses and origin stay.

    Raises UnsupportedRounding, with the place of the node, if the operator has no kernel for these roundings.
    """
    place = site(node)
    assert place is not None
    with locating(place):
        call.kernel(call.loads())
    node.target, node.args, node.kwargs = call.overload, call.arguments(), {}
    node.meta[META] = replace(place, status="rounded", reason="")


def insert(graph: fx.GraphModule, near: fx.Node, target: Any, args: Sequence[Any], **kwargs: Any) -> fx.Node:
    """Insert a node (data movement, or exact) before ``near``, with its origin, a fake value and no number."""
    with graph.graph.inserting_before(near):
        new = graph.graph.create_node("call_function", target, tuple(args), kwargs, target.overloadpacket.__name__)
    kept = (
        *("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr", "original_aten"),
        *("source_fn_stack", "fwd_source_fn_stack", ORIGIN),
    )
    new.meta = {key: near.meta[key] for key in kept if key in near.meta}
    place = site(near)
    if place is not None:
        operator = str(target)
        new.meta[META] = replace(
            place, operator=operator, kind="movement", status="movement", number=-1, assignment=None, reason=""
        )
    evaluate(graph, new)
    return new


def source_of(node: fx.Node) -> fx.Node:
    """Return the value that a node is a view or a copy of, element for element."""
    while (moved := moved_by(node)) is not None:
        node = moved
    return node


def moved_by(node: fx.Node) -> fx.Node | None:
    """Return the operand of an operator that moves one tensor and keeps its dtype; None for any other node."""
    rule = rule_of(node) if node.op == "call_function" else None
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    value, before = float_value(node), float_value(inputs[0]) if len(inputs) == 1 else None
    moves = rule is not None and rule.kind == "movement" and value is not None and before is not None
    return inputs[0] if moves and value.dtype == before.dtype else None  # type: ignore[union-attr]


def drop_dead(graph: fx.GraphModule, may_go: Callable[[fx.Node], bool]) -> None:
    """Erase the nodes that nothing uses and that may go. PyTorch's own function erases nodes of loops' bodies too."""
    for node in reversed(graph.graph.nodes):
        if not node.users and may_go(node):
            graph.graph.erase_node(node)


def size_of(graph: fx.GraphModule, near: fx.Node, tensor: fx.Node, dim: int) -> Any:
    """Return a size of the tensor: a number, or a new node before ``near`` that computes it."""
    size = tensor.meta["val"].shape[dim]
    return size if isinstance(size, int) else insert(graph, near, torch.ops.aten.sym_size.int, (tensor, dim))


def round_after(
    graph: fx.GraphModule, node: fx.Node, rounding: Rounding, stream: int, dtype: torch.dtype | None = None
) -> fx.Node:
    """Insert ``identity @ rounding`` after a node, and let every use of the node as a tensor use the new one.

    dtype: of the rounded value; None for the node's own.
    """
    value, place = float_value(node), site(node)
    assert value is not None and place is not None
    call = rounded(graph, node, rounding, stream, dtype or value.dtype)
    after = replace(place, operator=ROUND, status="rounded", reason="")
    new = follow(graph, node, call, after, f"{node.name}_rounded")
    if dtype is not None:
        evaluate(graph, new)
    return new


def follow(graph: fx.GraphModule, node: fx.Node, call: Call[fx.Node], place: Site, name: str) -> fx.Node:
    """Insert a call that reads a node after it, and let every use of the node as a tensor use the new one."""
    after = last_placeholder(graph) if node.op == "placeholder" else node
    with graph.graph.inserting_after(after):
        new = graph.graph.create_node("call_function", call.overload, call.arguments(), name=name)
    new.meta = {**node.meta, META: place}
    new.meta.pop(PORT, None)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and not _is_size(user))
    return new


def rounded(
    graph: fx.GraphModule, node: fx.Node, rounding: Rounding, stream: int, dtype: torch.dtype
) -> Pointwise[fx.Node]:
    """Return the call that rounds the value of a node to a value of the dtype."""
    return Pointwise([node], f"t0 = identity(x0) @ {rounding}", dtype, rng_of(graph), stream)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def last_placeholder(graph: fx.GraphModule) -> fx.Node:
    """Return the last node through which something enters the graph."""
    last: fx.Node = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    return last


def keeps(rounding: Rounding, grid: Format) -> bool:
    """Whether the rounding changes no value of the format."""
    return grid.within(rounding.format) and rounding.overflow == "inf" and not rounding.mode.moves


@contextmanager
def locating(place: Site) -> Iterator[None]:
    """Turn the ValueError of a kernel that cannot be built into an UnsupportedRounding.

    It names the operator's place.
    """
    try:
        yield
    except ValueError as error:
        raise UnsupportedRounding(f"{place}: {error}") from error
