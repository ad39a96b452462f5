"""Repeated blocks: AOTAutograd traces three of a model's equal blocks, and the others are copies.

A transformer's layers are equal but for their parameters. ``traced_once`` finds such blocks in Dynamo's graph, and
traces the graph without those after the third. The ATen nodes of the third are then copied for each of the others, with
the parameters, module path and source line of each. The result is the graph that a trace of all blocks gives, node for
node. The third block is copied only if it reads in every place what the second reads, one block later; otherwise all
blocks are traced. This is for graphs without gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.capture.dynamo import inputs_of
from fxround.capture.torch_private import TRACED_FROM, joint_of, traced_from

# The blocks of a run that are traced: what the first reads is not what the others read, the second is compared with the
# third, and the third is copied.
_TRACED: Final = 3
# A copy costs less than a trace, but the search costs something too: the least number of Dynamo's nodes to leave out.
_LEAST: Final = 24
# What a node of ATen's graph has from the node of Dynamo's graph that it was traced from.
_ORIGIN: Final = ("stack_trace", "nn_module_stack", "source_fn_stack")

_Node = fx.Node
# Where an argument of a block's node comes from: ("own", number) of the block itself, ("before", number) of the block
# before, ("parameter", name in the third block), or ("outside", a node that all blocks read).
_Place = tuple[str, Any]
# The number of an ATen node in its block: the index of Dynamo's node that it was traced from, whether it is a tensor,
# and which of those it is.
_Number = tuple[int, bool, int]


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of Dynamo's graph that differ in their parameters alone.

    parameters: for each block, the name of its parameter in place of one of the third block.
    """

    blocks: tuple[tuple[_Node, ...], ...]
    parameters: tuple[Mapping[str, str], ...]

    @property
    def left_out(self) -> tuple[tuple[_Node, ...], ...]:
        """The blocks that are not traced."""
        return self.blocks[_TRACED:]


def traced_once(stack: contextlib.ExitStack, graph: fx.GraphModule, args: Any, kwargs: Any, decompositions: Any) -> Any:
    """Return AOTAutograd's graph for Dynamo's graph, as ``joint_of`` does, with equal blocks traced once."""
    runs = () if torch.is_grad_enabled() else find_runs(graph, _parameters(graph, args, kwargs))
    if runs:
        whole = graph.graph
        graph.graph = _shortened(whole, runs)
        try:
            joint = joint_of(stack, graph, args, kwargs, decompositions)
        finally:
            graph.graph = whole
        if _restored(joint.graph_module, runs):
            return joint
    return joint_of(stack, graph, args, kwargs, decompositions)


def _parameters(graph: fx.GraphModule, args: Any, kwargs: Any) -> dict[_Node, str]:
    """Return the names of the parameters that enter Dynamo's graph; one with two names does not belong to a block."""
    found = [(id(tensor), name) for name, tensor in graph.named_parameters(remove_duplicate=False)]
    names, times = dict(found), Counter(key for key, _ in found)
    entering = zip(graph.graph.find_nodes(op="placeholder"), inputs_of(graph, args, kwargs), strict=True)
    return {node: names[id(value)] for node, value in entering if times[id(value)] == 1}


# ---- equal blocks of Dynamo's graph ----


def find_runs(graph: fx.GraphModule, parameters: Mapping[_Node, str]) -> tuple[Run, ...]:
    """Return runs of equal blocks that do not overlap, in the order of the graph.

    parameters: the names of those placeholders that are parameters.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    return tuple(_Search(nodes, [_text(node, parameters) for node in nodes], parameters).runs())


@dataclass(frozen=True)
class _Search:
    """A search for equal blocks among consecutive nodes with these texts."""

    nodes: Sequence[_Node]
    texts: Sequence[str]
    parameters: Mapping[_Node, str]

    def runs(self) -> Iterator[Run]:
        """Yield the run that leaves out the most nodes, between those before it and those after it."""
        start, period, times = max(self._candidates(), key=_left_out, default=(0, 0, 0))
        if not period:
            return
        end = start + period * times
        yield from self._part(0, start).runs()
        blocks = tuple(tuple(self.nodes[at : at + period]) for at in range(start, end, period))
        names = [_renamed(blocks[_TRACED - 1], block, self.parameters) for block in blocks]
        known = tuple(found for found in names if found is not None)
        if len(known) == times and not _is_read_later(blocks):
            yield Run(blocks, known)
        yield from self._part(end, len(self.nodes)).runs()

    def _part(self, start: int, end: int) -> _Search:
        return _Search(self.nodes[start:end], self.texts[start:end], self.parameters)

    def _candidates(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first node, the length and the number of equal blocks that leave out enough nodes."""
        last: dict[str, int] = {}
        distances: Counter[int] = Counter()
        for i, text in enumerate(self.texts):
            distances[i - last.get(text, i)] += 1
            last[text] = i
        for period, times in distances.items():
            if period and times >= _LEAST:
                found = ((start, period, (end - start) // period) for start, end in self._equal(period))
                yield from (run for run in found if _left_out(run) >= _LEAST)

    def _equal(self, period: int) -> Iterator[tuple[int, int]]:
        """Yield ranges in which every node equals the node one period before it.

        What the nodes of the second block read may differ in place from what those of the first read.
        """
        start = 0
        for i in range(period, len(self.nodes) + 1):
            if i == len(self.nodes) or self.texts[i] != self.texts[i - period]:
                yield start, i
                start = i - period + 1
            elif i >= start + 2 * period and not self._follows(i, period, start):
                yield start, i
                start = i - 2 * period + 1

    def _follows(self, i: int, period: int, start: int) -> bool:
        """Whether a node reads in every place a parameter, the same as the node one period before it, or one later.

        What it reads one period later is in its own block or the one before; the blocks begin at ``start``.
        """
        before = start + (i - start) // period * period - period
        for a, b in zip(_read(self.nodes[i]), _read(self.nodes[i - period]), strict=True):
            at = self._position.get(a, -1)
            same = a is b and at < start
            later = at >= before and at - period == self._position.get(b)
            if not (same or later or a in self.parameters):
                return False
        return True

    @cached_property
    def _position(self) -> dict[_Node, int]:
        return {node: i for i, node in enumerate(self.nodes)}


def _left_out(run: tuple[int, int, int]) -> int:
    """Return how many nodes of a run, as its first node and the length and number of blocks, are not traced."""
    _, period, times = run
    return period * (times - _TRACED)


def _is_read_later(blocks: Sequence[Sequence[_Node]]) -> bool:
    """Whether a node after the run, or in a later block than the next, reads a block that is not the last."""
    number = {node: i for i, block in enumerate(blocks) for node in block}
    inner = [node for block in blocks[1:-1] for node in block]
    return any(number.get(user, len(blocks)) > number[node] + 1 for node in inner for user in node.users)


def _renamed(block: Sequence[_Node], other: Sequence[_Node], parameters: Mapping[_Node, str]) -> dict[str, str] | None:
    """Return the parameter of another block for each of a block; None if one stands for two."""
    names: dict[str, str] = {}
    for node, same in zip(block, other, strict=True):
        for a, b in zip(_read(node), _read(same), strict=True):
            if a in parameters and names.setdefault(parameters[a], parameters[b]) != parameters[b]:
                return None
    return names if len(set(names.values())) == len(names) else None


def _read(node: _Node) -> list[_Node]:
    """Return the nodes among the arguments, one for each place."""
    found: list[_Node] = []

    def note(used: _Node) -> _Node:
        found.append(used)
        return used

    fx.map_arg((node.args, node.kwargs), note)
    return found


def _text(node: _Node, parameters: Mapping[_Node, str]) -> str:
    """Return the operation, its arguments but for nodes, its result, and the kinds of its parameters."""
    kinds = [_described(used.meta.get("example_value")) if used in parameters else "" for used in _read(node)]
    return f"{node.op} {node.target!r} {_plain(node)} {_described(node.meta.get('example_value'))} {kinds}"


class _Slot:
    """The place of a node among arguments."""

    def __repr__(self) -> str:
        return "_"


def _plain(node: _Node) -> str:
    """Return the arguments as text, with each node as a place."""
    places: Any = _Slot()
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: places))


def _described(value: Any) -> str:
    """Return everything about a fake value that a trace can ask for."""
    return repr(pytree.tree_map(lambda leaf: _tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, value))


def _tensor(value: torch.Tensor) -> tuple[Any, ...]:
    kind = (type(value), value.dtype, value.device, value.layout, value.requires_grad)
    strided = value.layout is torch.strided
    return (*kind, tuple(value.shape), value.stride() if strided else (), value.storage_offset() if strided else 0)


# ---- fewer blocks in Dynamo's graph ----


def _shortened(whole: fx.Graph, runs: Sequence[Run]) -> fx.Graph:
    """Return the graph without the blocks that are not traced; what follows them reads the last traced one."""
    short = fx.Graph()
    copies: dict[_Node, _Node] = {}
    dropped = {node for run in runs for block in run.left_out for node in block}
    stands_for = {
        node: copied for run in runs for node, copied in zip(run.blocks[-1], run.blocks[_TRACED - 1], strict=True)
    }
    for node in whole.nodes:
        if node not in dropped:
            copies[node] = short.node_copy(node, lambda used: copies[stands_for.get(used, used)])
            for key, value in vars(node).items():
                copies[node].__dict__.setdefault(key, value)  # Dynamo's source of an input
    short.set_codegen(whole._codegen)
    return short


# ---- all blocks in ATen's graph ----


def _restored(graph: fx.GraphModule, runs: Sequence[Run]) -> bool:
    """Put the blocks that were left out into ATen's graph; False if a run's third block is not as its second is."""
    inputs = {node.meta["desc"].target: node for node in graph.graph.nodes if _is_parameter(node)}
    if any("Mutation" in type(desc).__name__ for desc in graph.graph.output_node().meta["desc"]):
        return False
    return all(_is_completed(graph.graph, run, inputs) for run in runs)


def _is_parameter(node: _Node) -> bool:
    return node.op == "placeholder" and type(node.meta["desc"]).__name__ == "ParamAOTInput"


@dataclass(frozen=True)
class _Block:
    """The ATen nodes of a block by their numbers, and its parameters by their names in the third block."""

    nodes: dict[_Number, _Node]
    parameters: Mapping[str, _Node]

    def made(self) -> list[tuple[Any, ...]]:
        """Return all of each node but what it reads and where it comes from."""
        return [(n.op, n.target, _plain(n), _described(n.meta.get("val")), n.meta.keys()) for n in self.nodes.values()]

    def places(self, before: _Block) -> list[list[_Place]]:
        """Return where each argument of each node comes from; before: the block before this one.

        A size of the block before is outside: a trace computes it once, and all later blocks read it.
        """
        known: dict[_Node, _Place] = {node: ("before", n) for n, node in before.nodes.items() if n[1]}
        known |= {node: ("own", number) for number, node in self.nodes.items()}
        known |= {node: ("parameter", name) for name, node in self.parameters.items()}
        return [[known.get(used, ("outside", used)) for used in _read(node)] for node in self.nodes.values()]

    def at(self, place: _Place, before: _Block) -> Any:
        """Return the node at a place."""
        kind, key = place
        if kind == "outside":
            return key
        return self.parameters[key] if kind == "parameter" else (self if kind == "own" else before).nodes[key]


def _is_completed(graph: fx.Graph, run: Run, inputs: Mapping[str, _Node]) -> bool:
    """Insert a copy of a run's third block for each that was left out; False if the third is not as the second is."""
    index = {node.name: (i, j) for i, block in enumerate(run.blocks[:_TRACED]) for j, node in enumerate(block)}
    traced = [(*index[traced_from(node)], node) for node in graph.nodes if traced_from(node) in index]
    in_order = [i for i, _, _ in traced] == sorted(i for i, _, _ in traced)
    if not in_order or not all(name in inputs for names in run.parameters for name in names.values()):
        return False
    parameters = [{name: inputs[own] for name, own in names.items()} for names in run.parameters]
    first, second, third = (
        _Block(_numbered((j, node) for i, j, node in traced if i == block), parameters[block])
        for block in range(_TRACED)
    )
    places = third.places(second)
    if not third.nodes or second.places(first) != places or second.made() != third.made():
        return False
    if any(_origin(node) != _origin(run.blocks[_TRACED - 1][number[0]]) for number, node in third.nodes.items()):
        return False
    blocks = [third]
    for sources, own in zip(run.left_out, parameters[_TRACED:], strict=True):
        blocks.append(_copied(graph, third, places, _Block({}, own), blocks[-1], sources))
    near = {*third.nodes.values(), *blocks[1].nodes.values()}
    for number, node in third.nodes.items():
        node.replace_all_uses_with(blocks[-1].nodes[number], delete_user_cb=lambda user: user not in near)
    return True


def _numbered(nodes: Iterable[tuple[int, _Node]]) -> dict[_Number, _Node]:
    """Return the nodes by their numbers, given the index of Dynamo's node for each."""
    known: Counter[tuple[int, bool]] = Counter()
    numbered = {}
    for index, node in nodes:
        key = index, isinstance(node.meta.get("val"), torch.Tensor)
        numbered[*key, known[key]] = node
        known[key] += 1
    return numbered


def _origin(node: _Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def _copied(
    graph: fx.Graph,
    third: _Block,
    places: Sequence[Sequence[_Place]],
    block: _Block,
    before: _Block,
    sources: Sequence[_Node],
) -> _Block:
    """Return the block with a copy of the third as its nodes; sources: its nodes in Dynamo's graph."""
    after = list(before.nodes.values())[-1]
    for (number, node), read in zip(third.nodes.items(), places, strict=True):
        operands = iter([block.at(place, before) for place in read])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _, operands=operands: next(operands))  # type: ignore[misc]
        with graph.inserting_after(after):
            after = graph.create_node(node.op, node.target, args, kwargs, re.sub(r"_\d+$", "", node.name))
        after.meta = {**node.meta, **_origin(sources[number[0]])}
        after.meta.pop(TRACED_FROM)
        block.nodes[number] = after
    return block
