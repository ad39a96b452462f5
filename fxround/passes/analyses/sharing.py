"""Which part of a value a process has, where several processes share a model.

A capture knows how parameters are shared, and what the conversions of DTensors give. This analysis follows them through
a graph: a value is whole, or this process has a block of one dimension of it, or it is this process's part of a sum.
Where an operator is not known, or its operands do not fit together, nothing is known of its value: then nothing is
promised of it. A block may be inside of a dimension: of rows of several images, one process may have some of each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.graph.dialect import (
    AddProcesses,
    BlockExpand,
    HadamardTransform,
    IndexPut,
    Matmul,
    Pointwise,
    ReductionCall,
    ScanCall,
    Sum,
    is_loop,
    read,
)
from fxround.graph.dialect.blocks import BlockFigure
from fxround.graph.site import PORT, PORTS, SHARING, Port, Share, Sharing
from fxround.graph.values import outputs_of
from fxround.passes.analyses.draws import draws

aten = torch.ops.aten


@dataclass(frozen=True)
class Whole:
    """A value that every process has as a whole. uniform: all elements are one number."""

    uniform: bool = False


@dataclass(frozen=True)
class Block:
    """A value of which this process has a block of each of the equal pieces of a dimension.

    dim: the dimension. size: the number of its elements in a block, an expression of symbolic sizes. uneven: what this
    process has of the dimension that was shared where parts differ; None: equal parts.
    """

    dim: int
    size: Any
    uneven: Share | None = None


@dataclass(frozen=True)
class Nothing:
    """A value of which this process has no element: what an operation draws for it does not matter."""


@dataclass(frozen=True)
class Unfinished:
    """This process's part of a sum, or of a maximum."""


@dataclass(frozen=True)
class Own:
    """A value that this process computes from its rank, such as indices into its part: of another in each process."""


OWN: Final = Own()
State = Whole | Block | Nothing | Unfinished | Own | None
_CONSTANTS: Final = (
    *(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.zeros_like.default),
    aten.empty_permuted.default,  # has no numbers; what reads its sizes remains
)
_WHOLE: Final = Whole()
_NOTHING: Final = Nothing()
_VIEWS: Final = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def states_of(graph: fx.GraphModule, wanted: Collection[fx.Node]) -> dict[fx.Node, State]:
    """Return what this process has of the value of each node; None where that is not known.

    wanted: the nodes whose numbers of elements are needed. A view of a block may have a dimension of size 1 of which
    it cannot be told whether it is this process's part of one: a choice must fit the whole graph, and no other choice
    that fits it may give a wanted node other numbers.
    """
    for outermost in (False, True):
        states, doubts = _followed(graph, _Choices(outermost))
        if all(states[node] is not None for node in wanted):
            break
    chosen = outermost
    for view, dims in doubts.items():
        for dim in dims:
            others, _ = _followed(graph, _Choices(chosen, {view: dim}))
            if any(others[node] is None and state is not None for node, state in states.items()):
                continue
            for node in wanted:
                if not _same_numbers(node, states[node], others[node]):
                    states[node] = None
    return states


def _same_numbers(node: fx.Node, first: State, second: State) -> bool:
    """Whether the elements of a node have the same numbers in the whole."""
    if isinstance(first, Block) and isinstance(second, Block):
        shape = _shape(node)
        runs = (state.size * product(shape[state.dim + 1 :]) for state in (first, second))
        return first.uneven == second.uneven and equal(*runs)
    return first == second


@dataclass
class _Choices:
    """Which of several possible dimensions has the block of a view: the outermost or the innermost, or a given one."""

    outermost: bool
    given: Mapping[fx.Node, int] = field(default_factory=dict)
    doubts: dict[fx.Node, list[int]] = field(default_factory=dict)

    def of(self, view: fx.Node, dims: list[int], likely: int | None = None) -> int:
        """Return the dimension of a view, and note the others.

        dims: those that are possible, innermost first. likely: the one that is tried first, whichever of the two.
        """
        first = likely if likely is not None else dims[-1 if self.outermost else 0]
        chosen = self.given.get(view, first)
        if len(dims) > 1:
            self.doubts[view] = [dim for dim in dims if dim != chosen]
        return chosen


def _followed(graph: fx.GraphModule, choices: _Choices) -> tuple[dict[fx.Node, State], dict[fx.Node, list[int]]]:
    states: dict[fx.Node, State] = {}
    # The gradient of a result is shared as the result is, which the first time shows.
    for _ in range(2):
        results = _results(graph, states)
        states = {}
        for node in graph.graph.nodes:
            states[node] = _seeded(node) or _state(node, states, results, choices)
    return states, choices.doubts


def _results(graph: fx.GraphModule, states: Mapping[fx.Node, State]) -> dict[int, State]:
    """Return the states of the results, by their positions."""
    ports: tuple[Port, ...] = graph.graph.output_node().meta.get(PORTS) or ()
    pairs = zip(ports, outputs_of(graph), strict=False)
    return {port.index: states.get(value) for port, value in pairs if port.kind == "result"}


def _seeded(node: fx.Node) -> State:
    """Return what the capture knows of a node."""
    known: Sharing | None = node.meta.get(SHARING)
    if known is None:
        return None
    if known.dim is None:
        return _WHOLE if known.size is None else OWN
    size = _shape(node)[known.dim] if known.size is None else known.size
    return Block(known.dim, expression(size), known.uneven) if not equal(expression(size), 0) else _NOTHING


def _state(node: fx.Node, states: Mapping[fx.Node, State], results: Mapping[int, State], choices: _Choices) -> State:
    if node.op == "placeholder":
        port: Port | None = node.meta.get(PORT)
        return results.get(port.index) if port is not None and port.kind == "tangent" else _WHOLE
    if node.op != "call_function" or is_loop(node):
        return None
    call, name = read(node), str(node.target)
    state = getattr(call, "rng", None)
    operands = [used for used in node.all_input_nodes if _is_tensors(used) and used is not state]
    given = [states[used] for used in operands]
    if node.target in _CONSTANTS:
        return Whole(uniform=True)
    if isinstance(call, AddProcesses) or node.target is EXTREME_OF_PROCESSES:
        return _WHOLE if isinstance(given[0], Unfinished) else None
    if name.startswith("_c10d_functional.") or None in given or any(isinstance(s, Unfinished | Own) for s in given):
        return None
    if _NOTHING in given:
        return _of_nothing(node, operands, states)
    if call is not None and draws(call) and all(isinstance(s, Whole) and s.uniform for s in given):
        return _beside(node, states)
    if all(isinstance(state, Whole) for state in given):
        return Whole(uniform=bool(given) and all(isinstance(s, Whole) and s.uniform for s in given) and call is None)
    if isinstance(call, Pointwise):
        return _joined(node, call.xs, states)
    if isinstance(call, Matmul):
        return _product(call, states)
    if isinstance(call, ReductionCall):
        return _reduced(node, call, states[call.x])
    if isinstance(call, ScanCall):
        state = states[call.x]
        return state if isinstance(state, Block) and state.dim != call.dim % len(_shape(call.x)) else None
    if isinstance(call, IndexPut):
        return _placed(call, states)
    if isinstance(call, BlockFigure):
        return _of_blocks(states[call.x], call.sizes)
    if isinstance(call, BlockExpand):
        x = states[call.x]
        return x if _of_blocks(x, call.sizes) == states[call.scales] is not None else None
    if isinstance(call, HadamardTransform):
        sizes = [call.size if d == call.dim % len(_shape(call.x)) else 1 for d in range(len(_shape(call.x)))]
        return states[call.x] if _of_blocks(states[call.x], sizes) is not None else None
    if call is not None:
        return None
    if node.target in _VIEWS:
        return _reshaped(node, states, choices)
    moved = _MOVED.get(node.target)
    if moved is not None:
        return moved(node, states)
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return _joined(node, operands, states) if elementwise and isinstance(node.meta["val"], Tensor) else None


def _of_nothing(node: fx.Node, operands: Sequence[fx.Node], states: Mapping[fx.Node, State]) -> State:
    """Return the state of what is computed of a value of which this process has no element."""
    if not isinstance(node.meta["val"], Tensor):
        return _NOTHING  # several values, of which each shows its own shape
    shape = _shape(node)
    empty = any(equal(expression(size), 0) for size in shape)
    tensors = [x for x in operands if states[x] == _NOTHING and isinstance(x.meta["val"], Tensor)]
    return _NOTHING if empty or any(_alike_in_size(_shape(x), shape) for x in tensors) else None


def _is_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value))


def _shape(node: Any) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def expression(size: Any) -> Any:
    """Return a size as an expression of symbolic sizes."""
    if isinstance(size, sympy.Basic):
        return size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def product(sizes: Sequence[Any]) -> Any:
    """Return the product of sizes as an expression."""
    return _product_of(tuple(map(expression, sizes)))


@lru_cache(maxsize=4096)
def _product_of(sizes: tuple[Any, ...]) -> Any:
    return sympy.prod(sizes)


@lru_cache(maxsize=4096)
def quotient(x: Any, y: Any) -> Any:
    """Return the quotient of two products of sizes, cancelled."""
    return sympy.cancel(x / y)


@lru_cache(maxsize=4096)
def equal(x: Any, y: Any) -> bool:
    """Whether two expressions are equal for all sizes."""
    return bool(sympy.expand(x - y) == 0)


def _joined(node: fx.Node, operands: Sequence[fx.Node], states: Mapping[fx.Node, State]) -> State:
    """Return the state of a map over operands that broadcast."""
    dims, block = len(_shape(node)), None
    for operand in operands:
        state = states[operand]
        if isinstance(state, Block):
            placed = replace(state, dim=state.dim + dims - len(_shape(operand)))
            if block is not None and not _alike(placed, block):
                return None
            block = placed
    assert block is not None
    for operand in operands:
        state, place = states[operand], block.dim - dims + len(_shape(operand))
        # A whole operand would have elements of other processes, too, unless it is one for all.
        if (
            isinstance(state, Whole)
            and not state.uniform
            and place >= 0
            and not equal(product([_shape(operand)[place]]), 1)
        ):
            return None
    return block


def _alike(first: Block, second: Block) -> bool:
    """Whether two values have blocks of the same dimension, of the same elements."""
    return first.dim == second.dim and first.uneven == second.uneven and equal(first.size, second.size)


def _beside(node: fx.Node, states: Mapping[fx.Node, State]) -> State:
    """Return the state of random numbers, as a mask of dropout: that of what they are multiplied with."""
    shape, found = _shape(node), set[State]()
    for user in node.users:
        for other in user.all_input_nodes:
            same = other is not node and _is_tensors(other) and isinstance(other.meta["val"], Tensor)
            if same and len(_shape(other)) == len(shape) and other in states:
                found.add(states[other])
    return found.pop() if len(found) == 1 else None


def _placed(call: IndexPut[fx.Node], states: Mapping[fx.Node, State]) -> State:
    """Return the state of rows that are added to zeros, of which a process has some columns."""
    zeros, values = states[call.x], states[call.values]
    rows = len(call.indices) == 1 and isinstance(call.indices[0], fx.Node) and states[call.indices[0]] == _WHOLE
    if not rows or not isinstance(values, Block) or not isinstance(zeros, Whole) or not zeros.uniform:
        return None
    dim = values.dim - len(_shape(call.values)) + len(_shape(call.x))
    return replace(values, dim=dim) if dim >= 1 else None


def _of_blocks(state: State, sizes: Sequence[int]) -> State:
    """Return the state of figures of blocks, of which a process must have whole ones: it begins where one does."""
    if not isinstance(state, Block):
        return state if isinstance(state, Whole) else None
    size = sizes[state.dim]
    number = quotient(state.size, sympy.Integer(size)) if size else None
    return replace(state, size=number) if number is not None and _is_multiple(number) else None


def _product(call: Matmul[fx.Node], states: Mapping[fx.Node, State]) -> State:
    a, b, dims = states[call.a], states[call.b], len(_shape(call.a))
    if isinstance(a, Block) and isinstance(b, Block):
        if a.dim == 0 and dims == 3 and _alike(a, b):
            return a
        both = (a.dim, b.dim, a.uneven, b.uneven) == (dims - 1, dims - 2, None, None)
        whole = equal(a.size, product([_shape(call.a)[-1]])) and equal(b.size, product([_shape(call.b)[-2]]))
        return Unfinished() if both and whole else None
    if isinstance(a, Block):
        return a if a.dim == dims - 2 else None
    assert isinstance(b, Block)
    return b if b.dim == dims - 1 else None


def _reduced(node: fx.Node, call: ReductionCall[fx.Node], state: State) -> State:
    assert isinstance(state, Block)
    shape = _shape(call.x)
    dims = sorted(d % len(shape) for d in call.dims) or list(range(len(shape)))
    reduced = _without(state, shape, dims, call.keepdim)
    return reduced if isinstance(call, Sum) or not isinstance(reduced, Unfinished) else None


def _without(state: Block, shape: Sequence[Any], dims: Sequence[int], keepdim: bool) -> State:
    """Return the state of a value after a reduction of these dimensions, ascending."""
    if state.dim in dims:
        first = next(d for d in dims if d == state.dim or not equal(product([shape[d]]), 1))
        whole = first == state.dim and state.uneven is None and equal(state.size, product([shape[state.dim]]))
        return Unfinished() if whole else None
    return state if keepdim else replace(state, dim=state.dim - sum(d < state.dim for d in dims))


# ---- what moves values ----


def _same(node: Any, states: Mapping[fx.Node, State]) -> State:
    return states[node.args[0]]


def _permuted(node: Any, states: Mapping[fx.Node, State]) -> State:
    x, dims = node.args
    state = states[x]
    assert isinstance(state, Block)
    order = [d % len(_shape(x)) for d in dims]
    return replace(state, dim=order.index(state.dim))


def _reshaped(node: Any, states: Mapping[fx.Node, State], choices: _Choices) -> State:
    """Return the state of a view: the elements of a run stay neighbours."""
    x = node.args[0]
    state, before, after = states[x], _shape(x), _shape(node)
    assert isinstance(state, Block)
    if _alike_in_size(before, after):
        # In the whole, a view may have made each part of a row a row: (rows, parts * size) is (rows * parts, size).
        if not state.dim or not equal(state.size, product([before[state.dim]])):
            return state
        place = choices.of(node, [state.dim, state.dim - 1], likely=state.dim)
        return state if place == state.dim else replace(state, dim=place, size=sympy.Integer(1))
    run = state.size * product(before[state.dim + 1 :])
    behind: Any = sympy.Integer(1)
    for dim in reversed(range(len(after))):
        wide = behind * product([after[dim]])
        if _is_multiple(quotient(wide, run)):
            size = quotient(run, behind)
            if not _is_multiple(size):
                return None
            ones = _ones(after, dim)
            sure = ones <= _ones(before, state.dim) and not equal(state.size, 1)
            place = choices.of(node, [dim - i for i in range(1 if sure else ones + 1)])
            return replace(state, dim=place, size=size if place == dim else sympy.Integer(1))
        behind = wide
    return None


def _alike_in_size(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether two shapes are the same for all sizes."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(equal(expression(m), expression(n)) for m, n in pairs)


@lru_cache(maxsize=4096)
def _is_multiple(ratio: Any) -> bool:
    """Whether a quotient of products of sizes has no denominator."""
    return bool(sympy.fraction(sympy.together(ratio))[1] == 1)


def _ones(shape: Sequence[Any], dim: int) -> int:
    """Return the number of dimensions of size 1 just before one."""
    count = 0
    while dim - count > 0 and shape[dim - count - 1] == 1 and isinstance(shape[dim - count - 1], int):
        count += 1
    return count


def _expanded(node: Any, states: Mapping[fx.Node, State]) -> State:
    x = node.args[0]
    state, before, after = states[x], _shape(x), _shape(node)
    assert isinstance(state, Block)
    dim = state.dim + len(after) - len(before)
    return replace(state, dim=dim) if equal(product([before[state.dim]]), product([after[dim]])) else None


def _unsqueezed(node: Any, states: Mapping[fx.Node, State]) -> State:
    state, dim = states[node.args[0]], node.args[1] % len(_shape(node))
    assert isinstance(state, Block)
    return replace(state, dim=state.dim + (dim <= state.dim))


def _selected(node: Any, states: Mapping[fx.Node, State]) -> State:
    x, dim = node.args[:2]
    state, chosen = states[x], dim % len(_shape(x))
    assert isinstance(state, Block)
    return None if chosen == state.dim else replace(state, dim=state.dim - (chosen < state.dim))


def _cut(node: Any, states: Mapping[fx.Node, State]) -> State:
    """Return the state of a part of another dimension, or of all of this one."""
    x = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    state = states[x]
    assert isinstance(state, Block)
    if dim % len(_shape(x)) != state.dim:
        return state
    return state if equal(product([_shape(x)[state.dim]]), product([_shape(node)[state.dim]])) else None


def _split(node: Any, states: Mapping[fx.Node, State]) -> State:
    x = node.args[0]
    dim = node.args[2] if len(node.args) > 2 else 0
    state = states[x]
    return state if isinstance(state, Block) and dim % len(_shape(x)) != state.dim else None


def _joined_along(node: Any, states: Mapping[fx.Node, State]) -> State:
    """Return the state of parts that are put side by side in another dimension."""
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    given = [states[part] for part in parts]
    first = given[0]
    if not isinstance(first, Block) or dim % len(_shape(node)) == first.dim:
        return None
    return first if all(s == first for s in given) else None


def _looked_up(node: Any, states: Mapping[fx.Node, State]) -> State:
    """Return the state of rows of a table."""
    weight, indices = (states[used] for used in node.args[:2])
    if isinstance(weight, Block) and weight.dim == 1 and isinstance(indices, Whole):
        return replace(weight, dim=len(_shape(node)) - 1)
    return indices if isinstance(weight, Whole) and isinstance(indices, Block) else None


def _largest(node: Any, states: Mapping[fx.Node, State]) -> State:
    x, dims = node.args[0], list(node.args[1]) if len(node.args) > 1 else []
    state = states[x]
    assert isinstance(state, Block)
    shape = _shape(x)
    chosen = sorted(d % len(shape) for d in dims) or list(range(len(shape)))
    return _without(state, shape, chosen, len(node.args) > 2 and bool(node.args[2]))


_MOVED: Final[dict[Any, Callable[[Any, Mapping[fx.Node, State]], State]]] = {
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default), _same),
    operator.getitem: _same,
    aten.permute.default: _permuted,
    aten.expand.default: _expanded,
    aten.unsqueeze.default: _unsqueezed,
    aten.select.int: _selected,
    aten.slice.Tensor: _cut,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _joined_along,
    aten.embedding.default: _looked_up,
    aten.amax.default: _largest,
    aten.amin.default: _largest,
}
