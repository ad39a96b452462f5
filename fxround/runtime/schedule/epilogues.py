"""Epilogues: a contraction and the map after it run as one, a few items at a time, in the memory of one result.

A bias, a normalization, an activation or a residual addition reads the whole result of a product or a convolution and
writes another tensor. Here the map follows the contraction step by step: some items of the contraction, then the map
over the blocks that these completed, which are still in the cache. If nothing else reads the contraction's result, the
map writes its own result over it, so that one tensor is enough.

Both run the kernels that they run alone, and elements keep their numbers, so bits and random words are the same. A step
of the contraction has ended, and every item whose quick results did not count is done again, before the map reads;
``Work.complete`` says how many leading elements are then final, and blocks that are not final wait for the next step.
No item reads a result. The map reads an element of the contraction's result only for the same element of its own
result, and reads a block before it writes it.

On a CUDA device both are one kernel, whose threads compute the map for the elements of the contraction that they have
(``cuda.cpp.contract``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import (
    CONTRACTIONS,
    FUSED,
    MAPS,
    POINTWISE,
    Call,
    ContractionCall,
    Fused,
    Matmul,
    Pointwise,
    read,
    read_map,
)
from fxround.graph.dtypes import LOADS, dtype_of
from fxround.graph.grouping import Unit
from fxround.graph.values import copy_node
from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime import buffers
from fxround.runtime.contractions import Product
from fxround.runtime.cpu.begin import begin
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.contraction import Pending, Work
from fxround.runtime.cpu.matmul import Bound, bound_matmul
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.cuda.contraction import BEGUN, Following, run_followed
from fxround.runtime.cuda.launcher import runs_texts
from fxround.runtime.schedule.groups import Part, grouped, key_of, map_of, subgraph

_ATEN: Final = torch.ops.aten
# Operators that may only give a row-major tensor another shape; ``Epilogue._plan`` checks that they did, on real
# shapes.
_VIEWS: Final = frozenset(
    {
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default),
        *(_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    }
)
_MANY: Final = 32
_UNKNOWN: Final = "not planned yet"
# The bytes that a step completes for each thread: half of a second-level cache, which also holds the map's operands.
_STEP: Final = 1 << 19
# The operators of a map that a CUDA kernel computes after a contraction; a longer one has registers of its own.
_LONGEST: Final = 1 << 12
# The least items of a step for each thread: with fewer, threads would wait for the last one.
_ITEMS: Final = 4


# ---- which nodes ----


def join_epilogues(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with every contraction and the map after it as one module."""
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    groups: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in position:
        if node.target in MAPS:
            group = _group(node, position)
            if group and not any(part in groups for part in group):
                groups |= dict.fromkeys(group, group)

    def joins(a: Unit, b: Unit) -> bool:
        group = groups.get(a.nodes[0])
        return group is not None and groups.get(b.nodes[0]) is group

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> Epilogue | None:
        # If another path connects two nodes of a group, the group is not one unit, and stays as it is.
        whole = groups.get(unit.nodes[0], frozenset()) == set(unit.nodes)
        return Epilogue(graph, unit.nodes, inputs) if whole else None

    return grouped(graph, joins, build, "epilogue")


def _group(node: fx.Node, position: dict[fx.Node, int]) -> frozenset[fx.Node]:
    """A map and its results, the latest contraction that it reads, and the views between; empty if there is none."""
    chains = [tuple(_back(operand, node)) for operand in _map(node).xs]
    known = [chain for chain in chains if chain[-1].target in CONTRACTIONS]
    if not known:
        return frozenset()
    return frozenset((*max(known, key=lambda chain: position[chain[-1]]), node, *_taken(node)))


def _back(operand: fx.Node, user: fx.Node) -> Iterator[fx.Node]:
    """The nodes from an operand back over views that nothing else reads."""
    node = operand
    while True:
        yield node
        if node.target not in _VIEWS or set(node.users) != {user}:
            return
        node, user = node.all_input_nodes[0], node


def _map(node: fx.Node) -> Pointwise[fx.Node] | Fused[fx.Node]:
    """The call of a node that is known for a map."""
    call = read_map(node)
    assert call is not None
    return call


def _taken(node: fx.Node) -> tuple[fx.Node, ...]:
    """The results of a map that returns a list."""
    return tuple(node.users) if node.target is FUSED else ()


# ---- how they run ----


@dataclass(frozen=True)
class Stepping:
    """An epilogue for operands of given strides.

    call     the map's code
    draws    whether it draws random bits
    bound    the product, if the contraction is one
    dtypes   the dtypes of its results
    place    which of them overwrites the contraction's result; None if that needs memory of its own
    steps    items of the contraction, and the blocks of the map that are complete after them
    """

    call: MapCall
    draws: bool
    bound: Bound | None
    dtypes: tuple[torch.dtype, ...]
    place: int | None
    steps: tuple[tuple[range, range], ...]


class Epilogue(Part):
    """A contraction and its map as a module: (*inputs) -> a list of the values that are used outside."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        own = set(nodes)
        self.whole = subgraph(graph, nodes, inputs)
        (contraction,) = (node for node in nodes if node.target in CONTRACTIONS)
        (mapped,) = (node for node in nodes if node.target in MAPS)
        self.map = _map(mapped)
        views = [node for node in nodes if node.target in _VIEWS]
        self.call = _function(graph, inputs, contraction)
        self.views = _operands(graph, inputs, contraction, views, self.map.xs)
        self.place = place = {node: i for i, node in enumerate(inputs)}
        # Indices of the map's operands among the inputs; None for the contraction's result.
        self.operands = tuple(place.get(node) for node in self.map.xs)
        self.rng = place[self.map.rng]
        product: Any = read(contraction)
        self.contraction: Call[fx.Node] = product
        self.one_rng = product.rng is self.map.rng
        self.product = product if isinstance(product, Matmul) else None
        # Indices of a product's factors among the inputs.
        self.factors = (place[product.a], place[product.b]) if isinstance(product, Matmul) else (0, 0)
        self.outside = tuple(_number(node) for node in nodes if any(user not in own for user in node.users))
        self.plans: dict[Any, Stepping | None] = {}
        self.texts: dict[Any, Following | None] = {}
        # Indices of inputs that nothing reaches after a call; the schedule sets them.
        self.spent: tuple[int, ...] = ()

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Run as the graph says, or step by step: the same bits."""
        if runs_texts(inputs):
            return self._as_text(inputs)
        layout = ((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in inputs)
        key = (current_set(), torch.get_num_threads(), *layout)
        plan = self.plans.get(key, _UNKNOWN)
        if isinstance(plan, str):
            plan = self._plan(inputs)
            if len(self.plans) > _MANY:
                self.plans.clear()
            self.plans[key] = plan
        if plan is None:
            whole: list[Tensor] = self.whole.forward(*inputs)
            return whole
        results = self._run(plan, inputs)
        buffers.release(*(inputs[i] for i in self.spent))
        return results

    def _as_text(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run as one CUDA kernel, or as the graph says where there is none: the same bits."""
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in inputs)
        following = self.texts.get(key, _UNKNOWN)
        if following is None:
            return list(self.whole.forward(*inputs))
        arguments = fx.map_arg(self.contraction.arguments(), lambda node: inputs[self.place[node]])
        call = type(self.contraction).of(arguments)
        operands = [inputs[i] for i in self.operands if i is not None]
        try:
            product = BEGUN[type(call)](call)
            if isinstance(following, str):
                following = None if isinstance(product, Tensor) else self._following(inputs, product)
                if len(self.texts) > _MANY:
                    self.texts.clear()
                self.texts[key] = following
            if following is None or isinstance(product, Tensor):
                return list(self.whole.forward(*inputs))
            kept, made = run_followed(product, following, operands)
        except torch.OutOfMemoryError as error:
            what, read = f"{call.name} and the map after it", [*call.operands, *operands]
            raise buffers.out_of_memory(error, what, read) from error
        buffers.release(*(inputs[i] for i in self.spent))
        values = dict(enumerate(made)) | ({} if kept is None else {_CONTRACTION: kept})
        return [values[number] for number in self.outside]

    def _following(self, inputs: Sequence[Any], product: Product) -> Following | None:
        """The map as it follows a contraction in its text; None if the graph is to run as it says."""
        mapped = self._map_over(inputs, product.size, dtype_of(product.kernel.result))
        if mapped is None or product.is_empty or not self.one_rng:
            return None
        kernel, operands = mapped
        if len(kernel.body.schedule) > _LONGEST:
            return None
        nodes = self.map.nodes if isinstance(self.map, Fused) else (self.map.node,)
        taken = [i is None for i in self.operands]
        layouts = [(tuple(x.shape), x.stride()) for x in operands]
        return Following.of(kernel, layouts, taken, _CONTRACTION in self.outside, nodes)

    def _map_over(
        self, inputs: Sequence[Any], size: Sequence[int], dtype: torch.dtype
    ) -> tuple[Map, list[Tensor]] | None:
        """The map's kernel and the layouts of its operands, for a contraction's result of this size and dtype.

        None unless the map reads element i of the contraction's result for its own element i alone.
        """
        operands = self.views(torch.empty(size, dtype=dtype, device="meta"), *(_meta(x) for x in inputs))
        read = [x for x, i in zip(operands, self.operands, strict=True) if i is None]
        total = math.prod(torch.broadcast_shapes(*(x.shape for x in operands)))
        # Such an operand is row-major and has all elements, so it is neither permuted nor broadcast.
        if total != math.prod(size) or any(x.numel() != total or not x.is_contiguous() for x in read):
            return None
        if not all(_readable(inputs[i]) for i in self.operands if i is not None):
            return None
        kernel = map_of(self.map, operands)
        return None if kernel is None else (kernel, operands)

    def _plan(self, inputs: Sequence[Any]) -> Stepping | None:
        """The plan for inputs of these layouts; None if the graph is to run as it says."""
        pending = begin(self.call(*inputs))
        mapped = self._map_over(inputs, pending.shape, pending.dtype)
        if pending.plan is None or mapped is None or any(isinstance(x, Tensor) and not x.is_cpu for x in inputs):
            return None
        kernel, operands = mapped
        call = MapCall.of(kernel, [(x.shape, x.stride()) for x in operands])
        dtypes = tuple(dtype_of(storage) for storage in kernel.results)
        steps = tuple(_steps(pending.plan, math.prod(pending.shape), pending.dtype.itemsize))
        place = dtypes.index(pending.dtype) if pending.dtype in dtypes and _CONTRACTION not in self.outside else None
        return (
            None
            if call is None or (place is None and len(steps) == 1)
            else Stepping(call, bool(kernel.draws), self._bound(inputs), dtypes, place, steps)
        )

    def _bound(self, inputs: Sequence[Any]) -> Bound | None:
        if self.product is None:
            return None
        a, b = (inputs[i] for i in self.factors)
        how = self.product
        return bound_matmul(Matmul(a, b, how.accumulate, how.rounding, inputs[self.rng], how.node))

    def _begin(self, plan: Stepping, inputs: Sequence[Any]) -> Pending:
        """Begin the contraction; a product of operands of known layouts needs no second look at them."""
        if plan.bound is None or self.product is None:
            return begin(self.call(*inputs))
        a, b = self.factors
        return plan.bound.begin(inputs[a], inputs[b], inputs[self.rng], self.product.node)

    def _run(self, plan: Stepping, inputs: Sequence[Any]) -> list[Tensor]:
        """Run the steps: items of the contraction, then the blocks of the map that are complete."""
        pending = self._begin(plan, inputs)
        results = [buffers.empty(plan.call.shape, dtype) for dtype in plan.dtypes]
        made = buffers.empty(pending.shape, pending.dtype) if plan.place is None else results[plan.place]
        sources = array(addresses([made if i is None else inputs[i] for i in self.operands]))
        targets, key = array(addresses(results)), key_of(self.map, inputs[self.rng], plan.draws)
        for items, blocks in plan.steps:
            # Returns when all items are final, those included whose quick results did not count.
            pending.run(made.data_ptr(), items)
            plan.call.over(blocks, sources, targets, key)
        if plan.place is None and _CONTRACTION not in self.outside:
            buffers.release(made)
        return [made if number == _CONTRACTION else results[number] for number in self.outside]


# The number that stands for the contraction's result among those of the map.
_CONTRACTION: Final = -1


def _number(node: fx.Node) -> int:
    """The number of the map's result that a node is; ``_CONTRACTION`` for the contraction."""
    if node.target in CONTRACTIONS:
        return _CONTRACTION
    return 0 if node.target is POINTWISE else int(node.args[1])  # type: ignore[arg-type]


def _steps(contraction: Work, total: int, itemsize: int) -> Iterator[tuple[range, range]]:
    """Items, and the blocks that are complete after them: about as much at a time as the caches hold."""
    threads, complete, items = torch.get_num_threads(), contraction.complete, contraction.items
    wanted, least = max(1, _STEP * threads // itemsize), 1 if threads == 1 else _ITEMS * threads
    begin = block = 0
    while begin < items:
        done = block * BLOCK + wanted
        end = min(items, max(bisect_left(range(items + 1), done, lo=begin + 1, key=complete), begin + least))
        if 2 * (total - complete(end)) < wanted or 2 * (items - end) < least:
            end = items
        # Only whole blocks below ``complete`` are final; the last step takes what is left, a short block included.
        until = -(-total // BLOCK) if end == items else complete(end) // BLOCK
        yield range(begin, end), range(block, until)
        begin, block = end, until


def _function(graph: fx.GraphModule, inputs: Sequence[fx.Node], contraction: fx.Node) -> Any:
    """The function (*inputs) -> the contraction's call."""
    cls = type(read(contraction))
    assert issubclass(cls, ContractionCall)

    def call_of(*arguments: Any) -> Call[Tensor]:
        return cls.of(arguments)

    inside = fx.Graph()
    made = {node: inside.placeholder(node.name) for node in inputs}
    begun = inside.node_copy(contraction, lambda used: made[used])
    begun.target = call_of
    inside.output(begun)
    return fx.GraphModule(graph, inside).forward


def _operands(
    graph: fx.GraphModule,
    inputs: Sequence[fx.Node],
    contraction: fx.Node,
    views: Sequence[fx.Node],
    operands: Sequence[fx.Node],
) -> Any:
    """The function (the contraction's result, *inputs) -> the operands of the map."""
    inside = fx.Graph()
    made = {node: inside.placeholder(node.name) for node in (contraction, *inputs)}
    for view in views:
        made[view] = copy_node(inside, view, made)
    inside.output([made[node] for node in operands])
    return fx.GraphModule(graph, inside).forward


def _meta(x: Any) -> Any:
    """A tensor's layout without its memory; anything else unchanged."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _readable(x: Tensor) -> bool:
    """Whether a kernel can read the tensor; if not, the map alone raises the error."""
    return x.layout == torch.strided and x.dtype in LOADS
