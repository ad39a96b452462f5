"""Repeated blocks: AOTAutograd traces three or four of a model's equal blocks, and the others are copies.

A transformer's layers are equal but for their parameters. ``traced_once`` finds such blocks in Dynamo's graph, and
traces the graph with the first three of them and, for gradients, the last. The ATen nodes of the third, forward and
backward, are then copied for each of the others, with the parameters, module path and source line of each. The result
is the graph that a trace of all blocks gives, node for node. The third block is copied only if it reads in every place
what the second reads, one block later; otherwise all blocks are traced.
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
from fxround.capture.torch_private import NOTE_OF_SUMS, TRACED_FROM, adds_gradients, is_backward, joint_of, traced_from

# The first blocks are traced: what the first reads is not what the others read, the second is compared with the third,
# and the third is copied.
_FIRST: Final = 3
# A copy costs less than a trace, but the search costs something too: the least number of Dynamo's nodes to leave out.
_LEAST: Final = 24
# What a node of ATen's graph has from the node of Dynamo's graph that it was traced from, forward and backward.
_ORIGIN: Final = {
    "stack_trace": "stack_trace",
    "nn_module_stack": "nn_module_stack",
    "source_fn_stack": "source_fn_stack",
}
_ORIGIN_OF_GRADIENT: Final = {
    "stack_trace": "stack_trace",
    "fwd_nn_module_stack": "nn_module_stack",
    "fwd_source_fn_stack": "source_fn_stack",
}

_Node = fx.Node
# Where an argument of a block's node comes from: ("own", number) of the block itself, ("before", number) of the block
# before, ("gradient", index) of the block's backward, ("after", index) of the backward of the block after,
# ("parameter", name in the third block), or ("outside", a node that all blocks read).
_Place = tuple[str, Any]
# The number of a forward ATen node in its block: the index of Dynamo's node that it was traced from, whether it is a
# tensor, and which of those it is.
_Number = tuple[int, bool, int]


@dataclass(frozen=True)
class Repetition:
    """Consecutive blocks of Dynamo's graph that differ in their parameters alone.

    parameters: for each block, the name of its parameter in place of one of the third block. last: how many of the last
    blocks are traced.
    """

    blocks: tuple[tuple[_Node, ...], ...]
    parameters: tuple[Mapping[str, str], ...]
    last: int

    @property
    def untraced(self) -> slice:
        """The places of the blocks that are not traced."""
        return slice(_FIRST, len(self.blocks) - self.last)

    @property
    def left_out(self) -> tuple[tuple[_Node, ...], ...]:
        """The blocks that are not traced."""
        return self.blocks[self.untraced]

    @property
    def third(self) -> tuple[_Node, ...]:
        """The block that stands for those that are not traced."""
        return self.blocks[_FIRST - 1]


def traced_once(stack: contextlib.ExitStack, graph: fx.GraphModule, args: Any, kwargs: Any, decompositions: Any) -> Any:
    """Return AOTAutograd's graph for Dynamo's graph, as ``joint_of`` does, with equal blocks traced once."""
    runs = find_runs(graph, _parameters(graph, args, kwargs))
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
    named = [(id(tensor), name) for name, tensor in graph.named_parameters(remove_duplicate=False)]
    names, times = dict(named), Counter(key for key, _ in named)
    entering = zip(graph.graph.find_nodes(op="placeholder"), inputs_of(graph, args, kwargs), strict=True)
    return {node: names[id(value)] for node, value in entering if times[id(value)] == 1}


# ---- equal blocks of Dynamo's graph ----


def find_runs(graph: fx.GraphModule, parameters: Mapping[_Node, str]) -> tuple[Repetition, ...]:
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

    def runs(self) -> Iterator[Repetition]:
        """Yield the run that leaves out the most nodes, between those before it and those after it."""
        start, period, times = max(self._candidates(), key=_left_out, default=(0, 0, 0))
        if not period:
            return
        end = start + period * times
        yield from self._part(0, start).runs()
        blocks = tuple(tuple(self.nodes[at : at + period]) for at in range(start, end, period))
        names = [_renamed(blocks[_FIRST - 1], block, self.parameters) for block in blocks]
        known = tuple(known_name for known_name in names if known_name is not None)
        if len(known) == times and not _is_read_later(blocks) and not self._add_gradients(blocks):
            yield Repetition(blocks, known, _last())
        yield from self._part(end, len(self.nodes)).runs()

    def _add_gradients(self, blocks: Sequence[Sequence[_Node]]) -> bool:
        """Whether a gradient is a sum over the blocks: they read a value outside of them that has a gradient."""
        own = {*self.parameters, *(node for block in blocks for node in block)}
        values = [used.meta.get("example_value") for n in blocks[-1] for used in _read(n) if used not in own]
        return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values)

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
                runs = ((start, period, (end - start) // period) for start, end in self._equal(period))
                yield from (run for run in runs if _left_out(run) >= _LEAST)

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
    return period * (times - _FIRST - _last())


def _last() -> int:
    """Return how many of the last blocks are traced: one with gradients, which are not those that the others read."""
    return int(torch.is_grad_enabled())


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
    read: list[_Node] = []

    def note(used: _Node) -> _Node:
        read.append(used)
        return used

    fx.map_arg((node.args, node.kwargs), note)
    return read


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


def _shortened(whole: fx.Graph, runs: Sequence[Repetition]) -> fx.Graph:
    """Return the graph without the blocks that are not traced; what reads the last of them reads the third."""
    short = fx.Graph()
    copies: dict[_Node, _Node] = {}
    dropped = {node for run in runs for block in run.left_out for node in block}
    stands_for = {node: third for run in runs for node, third in zip(run.left_out[-1], run.third, strict=True)}
    for node in whole.nodes:
        if node not in dropped:
            copies[node] = short.node_copy(node, lambda used: copies[stands_for.get(used, used)])
            for key, value in vars(node).items():
                copies[node].__dict__.setdefault(key, value)  # Dynamo's source of an input
    short.set_codegen(whole._codegen)
    return short


# ---- all blocks in ATen's graph ----


def _restored(graph: fx.GraphModule, runs: Sequence[Repetition]) -> bool:
    """Put the blocks that were left out into ATen's graph; False if a run's third block is not as its second is."""
    inputs = {node.meta["desc"].target: node for node in graph.graph.nodes if _is_parameter(node)}
    if any("Mutation" in type(desc).__name__ for desc in graph.graph.output_node().meta["desc"]):
        return False
    return all(_completed(graph.graph, run, inputs) for run in runs)


def _is_parameter(node: _Node) -> bool:
    return node.op == "placeholder" and type(node.meta["desc"]).__name__ == "ParamAOTInput"


@dataclass(frozen=True)
class _Block:
    """The ATen nodes of a block, and its parameters by their names in the third block."""

    forward: dict[_Number, _Node]
    backward: list[_Node]
    parameters: Mapping[str, _Node]

    @property
    def nodes(self) -> list[_Node]:
        """All nodes."""
        return [*self.forward.values(), *self.backward]

    def made(self) -> list[tuple[Any, ...]]:
        """Return all of each node but what it reads and where it comes from."""
        return [(n.op, n.target, _plain(n), _described(n.meta.get("val")), n.meta.keys()) for n in self.nodes]

    def places(self, before: _Block, after: _Block) -> list[list[_Place]]:
        """Return where each argument of each node comes from, given the block before this one and the block after.

        A size of the block before is outside: a trace computes it once, and all later blocks read it.
        """
        known: dict[_Node, _Place] = {node: ("before", n) for n, node in before.forward.items() if n[1]}
        known |= {node: ("after", i) for i, node in enumerate(after.backward)}
        known |= {node: ("own", number) for number, node in self.forward.items()}
        known |= {node: ("gradient", i) for i, node in enumerate(self.backward)}
        known |= {node: ("parameter", name) for name, node in self.parameters.items()}
        return [[known.get(used, ("outside", used)) for used in _read(node)] for node in self.nodes]

    def at(self, place: _Place, before: _Block, after: _Block) -> Any:
        """Return the node at a place."""
        kind, key = place
        if kind in ("gradient", "after"):
            return (self if kind == "gradient" else after).backward[key]
        if kind in ("own", "before"):
            return (self if kind == "own" else before).forward[key]
        return self.parameters[key] if kind == "parameter" else key

    def gradients(self, results: Mapping[str, _Node | None]) -> dict[str, int | None]:
        """Return which of the backward nodes is the gradient of each parameter; None: no gradient, -1: another node."""
        produced = {name: results.get(node.meta["desc"].target) for name, node in self.parameters.items()}
        index = {node: i for i, node in enumerate(self.backward)}
        return {name: None if node is None else index.get(node, -1) for name, node in produced.items()}


def _completed(graph: fx.Graph, run: Repetition, inputs: Mapping[str, _Node]) -> bool:
    """Insert a copy of a run's third block for each that was left out; False if the third is not as the second is."""
    if not all(name in inputs for names in run.parameters for name in names.values()):
        return False
    parameters = [{name: inputs[own] for name, own in names.items()} for names in run.parameters]
    blocks = _traced(graph, run, parameters)
    if blocks is None:
        return False
    first, second, third, *ends = blocks
    last = ends[0] if ends else third
    if third.backward and not ends:
        return False
    places, gradients = third.places(second, last), third.gradients(_gradients(graph))
    if second.places(first, third) != places or second.made() != third.made():
        return False
    if second.gradients(_gradients(graph)) != gradients or -1 in gradients.values():
        return False
    sources = _sources(second, third, run)
    if sources is None or len(last.backward) != len(third.backward):
        return False
    copies = [_Block({}, [], own) for own in parameters[run.untraced]]
    _copy(graph, third, places, sources, run.left_out, copies, last)
    _return_gradients(graph, copies, gradients)
    inside = {node for block in (third, *copies) for node in block.nodes}
    reading = {*last.nodes} if ends else {*graph.nodes} - inside
    for number, node in third.forward.items():
        node.replace_all_uses_with(copies[-1].forward[number], delete_user_cb=lambda user: user in reading)
    reading = {*third.backward}
    for node, copied in zip(last.backward, copies[0].backward, strict=True):
        node.replace_all_uses_with(copied, delete_user_cb=lambda user: user in reading)
    return True


def _traced(graph: fx.Graph, run: Repetition, parameters: Sequence[Mapping[str, _Node]]) -> list[_Block] | None:
    """Return the traced blocks of a run; None if they are not one after the other."""
    numbers = range(len(run.blocks))
    traced = tuple(i for i in numbers if i not in numbers[run.untraced])
    index = {node.name: (i, j) for i in traced for j, node in enumerate(run.blocks[i])}
    forward = [(*index[traced_from(node)], node) for node in graph.nodes if traced_from(node) in index]
    blocks = {i: _Block(_numbered((j, n) for k, j, n in forward if k == i), [], parameters[i]) for i in traced}
    owners = {node.meta.get("seq_nr"): i for i, _, node in forward}
    order: list[int | None] = []
    for node in graph.nodes:
        if is_backward(node):
            # A sum of gradients has no number of its own; it follows the gradients that it adds.
            order.append(order[-1] if adds_gradients(node) and order else owners.get(node.meta.get("seq_nr")))
            if order[-1] is not None:
                blocks[order[-1]].backward.append(node)
    while order and order[0] is None:
        order.pop(0)
    while order and order[-1] is None:
        order.pop()
    places = [i for i, _, _ in forward]
    backwards = [i for i in order if i is not None]
    in_order = places == sorted(places) and set(places) == {*traced} and len(backwards) == len(order)
    return list(blocks.values()) if in_order and backwards == sorted(backwards, reverse=True) else None


def _numbered(nodes: Iterable[tuple[int, _Node]]) -> dict[_Number, _Node]:
    """Return the nodes by their numbers, given the index of Dynamo's node for each."""
    known: Counter[tuple[int, bool]] = Counter()
    numbered = {}
    for index, node in nodes:
        key = index, isinstance(node.meta.get("val"), torch.Tensor)
        numbered[*key, known[key]] = node
        known[key] += 1
    return numbered


def _sources(second: _Block, third: _Block, run: Repetition) -> list[int | None] | None:
    """Return the index of Dynamo's node from which each node of the third block has its origin, None for no origin.

    Returns None if a node has another origin. A gradient has the origin of a forward node of the same number, a sum of
    gradients that of any node.
    """
    numbered: dict[Any, list[int]] = {}
    for number, node in third.forward.items():
        numbered.setdefault(node.meta.get("seq_nr"), []).append(number[0])
    candidates: list[Iterable[int]] = [[number[0]] for number in third.forward]
    for node in third.backward:
        anywhere = adds_gradients(node)
        candidates.append(range(len(run.third)) if anywhere else numbered.get(node.meta.get("seq_nr"), ()))
    sources: list[int | None] = []
    for a, b, indices in zip(second.nodes, third.nodes, candidates, strict=True):
        fits = (i for i in indices if _is_from(a, run.blocks[_FIRST - 2][i]) and _is_from(b, run.third[i]))
        source = next(fits, None)
        if source is None and any(key in b.meta for key in _keys(b)):
            return None
        sources.append(source)
    return sources


def _is_from(node: _Node, source: _Node) -> bool:
    return all(node.meta[key] == value for key, value in _origin(node, source).items())


def _keys(node: _Node) -> Mapping[str, str]:
    return _ORIGIN_OF_GRADIENT if is_backward(node) else _ORIGIN


def _origin(node: _Node, source: _Node) -> dict[str, Any]:
    """Return what tells the origin of such a node, if it is traced from this node of Dynamo's graph.

    A sum of gradients has the stack of the operation before it, and a note.
    """
    meta = {key: source.meta.get(theirs) for key, theirs in _keys(node).items() if key in node.meta}
    if adds_gradients(node) and meta.get("stack_trace"):
        _, note, rest = node.meta["stack_trace"].partition(NOTE_OF_SUMS)
        meta["stack_trace"] += note + rest
    return meta


def _copy(
    graph: fx.Graph,
    third: _Block,
    places: Sequence[Sequence[_Place]],
    sources: Sequence[int | None],
    dynamo: Sequence[Sequence[_Node]],
    copies: Sequence[_Block],
    last: _Block,
) -> None:
    """Fill the blocks that were left out with copies of the third; dynamo: their nodes in Dynamo's graph."""

    nodes = third.nodes

    def copied(i: int, block: int, before: _Block, after: _Block, place: _Node) -> _Node:
        node, source = nodes[i], sources[i]
        operands = iter([copies[block].at(used, before, after) for used in places[i]])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(operands))
        with graph.inserting_after(place):
            new = graph.create_node(node.op, node.target, args, kwargs, re.sub(r"_\d+$", "", node.name))
        new.meta = {**node.meta, **({} if source is None else _origin(node, dynamo[block][source]))}
        new.meta.pop(TRACED_FROM, None)
        return new

    row = [third, *copies, last]
    at = list(third.forward.values())[-1]
    for block, before in enumerate(row[:-2]):
        for i, number in enumerate(third.forward):
            at = copies[block].forward[number] = copied(i, block, before, last, at)
    if third.backward:
        at = last.backward[-1]
        for block in reversed(range(len(copies))):
            for i in range(len(third.backward)):
                at = copied(len(third.forward) + i, block, row[block], row[block + 2], at)
                copies[block].backward.append(at)


def _gradients(graph: fx.Graph) -> dict[str, _Node | None]:
    """Return the gradient of each parameter by the parameter's name, None where there is none."""
    output = graph.output_node()
    results: Any = output.args[0]
    return {target: results[i] for target, i in _returned(output).items()}


def _returned(output: _Node) -> dict[str, int]:
    """Return the position of the gradient of each parameter among the results."""
    of: dict[int, Any] = {i: getattr(desc, "grad_of", None) for i, desc in enumerate(output.meta["desc"])}
    return {parameter.target: i for i, parameter in of.items() if type(parameter).__name__ == "ParamAOTInput"}


def _return_gradients(graph: fx.Graph, copies: Sequence[_Block], gradients: Mapping[str, int | None]) -> None:
    output = graph.output_node()
    positions, values = _returned(output), output.args[0]
    assert isinstance(values, list | tuple)
    results = list(values)
    for block in copies:
        for name, i in gradients.items():
            if i is not None:
                results[positions[block.parameters[name].meta["desc"].target]] = block.backward[i]
    output.args = (type(values)(results),)
