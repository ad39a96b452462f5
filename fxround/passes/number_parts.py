"""Number parts: where processes share a model, elements draw random bits by their numbers in the whole.

A kernel numbers the elements of its result. A process that has a part of a value gives it the random state of this part
(``StateOfPart``), so that each element has the bits that it has in one process. Operations of which this process's part
is not known are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.errors import UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import (
    AddProcesses,
    Call,
    Pointwise,
    ScanCall,
    StateOfPart,
    graphs_of,
    read,
)
from fxround.graph.dialect.blocks import BlockCall
from fxround.graph.site import META, PORT, SAME, SHARING, Port, Share, Sharing, Site, float_values
from fxround.kernels import from_text
from fxround.numerics.faults import numbers_of
from fxround.passes import streams
from fxround.passes.analyses.draws import draws
from fxround.passes.analyses.sharing import Block, Own, State, Unfinished, Whole, equal, expression, states_of
from fxround.passes.rewrite import Plan, insert, rng_of, sites
from fxround.passes.shared_sums import shards_of_call


def number_parts(graph: fx.GraphModule, plan: Plan) -> None:
    """Let each operation that draws take the random state of the part that this process has of its result.

    Raises UnsupportedRounding where the part is not known, UnsupportedOperator for random numbers of PyTorch's.
    """
    sharing = _sharing(graph)
    if sharing is None:
        return
    drawing: list[tuple[fx.Node, Site, Any]] = []
    scaled: list[tuple[fx.Node, Site]] = []
    for node, place in sites(graph):
        call = read(node)
        if call is None and place.kind == "random" and float_values(node):
            raise UnsupportedOperator(f"{place} draws random numbers. {_ADVICE}")
        if isinstance(call, BlockCall):
            scaled.append((node, place))
        if call is None or not draws(call):
            continue
        if _flips(call):
            raise UnsupportedRounding(f"{place} flips bits by chance. {_ADVICE}")
        drawing.append((node, place, call))
    wanted = [*(node for node, _, _ in drawing), *(node for node, _ in scaled)]
    states = states_of(graph, wanted) if wanted else {}
    for node, place in scaled:
        if states[node] is None:
            raise UnsupportedRounding(
                f"{place} has a format with scales, and this process does not have whole blocks of it, or fxround does "
                "not know which part it has: scales would be those of a part. Use blocks that divide what each process "
                "has, or a format without scales here"
            )
    if drawing:
        graph.meta[SAME] = _of_all(states)
    for node, place, call in drawing:
        _number(graph, node, place, call, states, sharing)
    for body in graphs_of(graph):
        if body is not graph and any(draws(call) for call in map(read, body.graph.nodes) if call is not None):
            raise UnsupportedRounding(f"the policy {plan.policy.name!r} draws random bits in a loop. {_ADVICE}")


def _of_all(states: dict[fx.Node, State]) -> str:
    """Return what computes the values that all processes have as a whole: it must be the same in all of them.

    A model that computes such a value from its rank would draw other bits in other processes.
    """
    # DTensor takes parts by the rank: nothing else is made of what is moved for them.
    parts: set[fx.Node] = set()
    for node in reversed(states):
        moved = node.users and read(node) is None and all(user in parts for user in node.users)
        if SHARING in node.meta or moved:
            parts.add(node)
    return "\n".join(
        _computed(node, state)
        for node, state in states.items()
        if isinstance(state, Whole) and isinstance(node.meta.get("val"), Tensor) and node not in parts
    )


def _computed(node: fx.Node, state: Whole) -> str:
    """Return what computes a value, without its operands; of one number for all elements, without their number."""
    args = [arg for arg in node.args if not (state.uniform and isinstance(arg, list | tuple))]
    return str((str(node.target), fx.map_arg((args, node.kwargs), lambda _: None)))


def _flips(call: Any) -> bool:
    """Whether bits of a call's values or accumulators flip."""
    if isinstance(call, Pointwise):
        return any(numbers_of(s.operator) is not None for s in from_text.program(call.program).statements)
    return from_text.accumulation(call.accumulate).flips is not None


def _sharing(graph: fx.GraphModule) -> Sharing | None:
    """Return how processes share a value of the graph; None for a model of one process."""
    known = [n.meta[SHARING] for n in graph.graph.nodes if SHARING in n.meta]
    return next((sharing for sharing in known if sharing.processes > 1), None)


def _number(
    graph: fx.GraphModule,
    node: fx.Node,
    place: Site,
    call: Any,
    states: Mapping[fx.Node, State],
    sharing: Sharing,
) -> None:
    state = states[node]
    if state is None or isinstance(state, Own) or streams.is_moved(call.node):
        raise UnsupportedRounding(
            f"{place} draws random bits, and fxround does not know which part of its result this process has. {_ADVICE}"
        )
    if isinstance(state, Whole) and not isinstance(call, AddProcesses):
        return
    if isinstance(call, AddProcesses) and not call.length:
        raise UnsupportedRounding(f"{place} draws random bits in a sum whose length may change. {_ADVICE}")
    if call.kernel(call.loads()) is None:
        raise UnsupportedRounding(f"{place} draws random bits in a program that is too long for one kernel. {_ADVICE}")
    chunk, share = list[Any](), Share(0, 1, 1)
    if isinstance(state, Block):
        sizes = _numbered(node, call)
        chunk = [_as_argument(graph, node, size) for size in (state.size, *sizes[state.dim + 1 :])]
        share = state.uneven or Share(sharing.rank, 1, sharing.processes)
    shards = shards_of_call(call)
    whole = shards * sharing.processes if isinstance(state, Unfinished) else shards
    part = StateOfPart(
        rng_of(graph),
        chunk,
        *share,
        whole,
        shards * sharing.rank if isinstance(state, Unfinished) else 0,
    )
    made = insert(graph, node, part.overload, part.arguments())
    made.meta[META] = replace(made.meta[META], status="integer")
    node.args = replace(call, rng=made).arguments()


def _numbered(node: fx.Node, call: Call[fx.Node]) -> Sequence[Any]:
    """Return the sizes of what a kernel numbers: elements of its result; of a scan, lines."""
    shape = list(node.meta["val"].shape)
    if isinstance(call, ScanCall):
        shape[call.dim % len(shape)] = 1
    return shape


def _as_argument(graph: fx.GraphModule, near: fx.Node, size: Any) -> Any:
    """Return a size as an argument of a node: a number, or a node that computes it."""
    wanted = expression(size)
    if wanted.is_Integer:
        return int(wanted)
    # The forward part of a graph has no gradients of results, of which a size could be taken.
    earlier = itertools.takewhile(lambda node: node is not near, graph.graph.nodes)
    for node in (*near.all_input_nodes, *(node for node in earlier if not _is_tangent(node))):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and equal(expression(value), wanted):
            return node
        if isinstance(value, Tensor):
            dim = next((d for d, n in enumerate(value.shape) if equal(expression(n), wanted)), None)
            if dim is not None:
                return insert(graph, near, torch.ops.aten.sym_size.int, (node, dim))
    raise UnsupportedRounding(
        f"{near.name} draws random bits for {wanted} elements, a size that no value has. {_ADVICE}"
    )


def _is_tangent(node: fx.Node) -> bool:
    port: Port | None = node.meta.get(PORT)
    return port is not None and port.kind == "tangent"


_ADVICE: Final = (
    "Processes share this model, and each must draw the bits that its elements have in one process: use a policy that "
    "draws nothing here, or eval mode where dropout draws"
)
