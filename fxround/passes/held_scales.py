"""Held scales: those of an operand's blocks, which ``fxround.calibrate`` found and a compiled module keeps as state.

They belong to the forward pass. A weight has blocks as in any scaled format; any other operand has scales for groups
along the sum alone, because its rows come and go. A backward product reads the value that the forward product read,
moved as it needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import block_sizes
from fxround.graph.site import Site
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.formats.scaled.format import Block
from fxround.passes.contractions import summed_dims
from fxround.passes.delayed_scales import DelayedScales, numbered
from fxround.passes.rewrite import insert, moved_by, size_of, source_of

_ATEN: Final = torch.ops.aten
_COPIES: Final = (_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default)
_SHAPES: Final = (
    _ATEN.reshape.default,
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
)


@dataclass(frozen=True)
class Layout:
    """How the blocks of an operand lie in it.

    dims    the dimensions over which the product sums, those of channels first
    groups  the number of equal parts of the first of them, which becomes a dimension before it
    moves   the permutations and numbers of dimensions by which the operand comes from its source
    """

    dims: tuple[int, ...]
    groups: int
    moves: tuple[Any, ...]

    @staticmethod
    def of(node: fx.Node, operand: fx.Node) -> list[tuple[int, Layout]]:
        """Return each position at which a product reads an operand, and the layout there."""
        moves: list[Any] = []
        moved = operand
        while (before := moved_by(moved)) is not None:
            if moved.target is _ATEN.permute.default:
                dims: Any = moved.args[1]
                moves.append(tuple(dims))
            elif moved.target not in _COPIES:
                moves.append(moved.meta["val"].dim())
            moved = before
        return [(i, Layout(dims, groups, tuple(moves))) for i, dims, groups in summed_dims(node, operand)]

    def split(self, shape: Sequence[Any]) -> list[Any]:
        """Return the shape of an operand with the groups as a dimension."""
        first = self.dims[0] % len(shape)
        apart = [self.groups, shape[first] // self.groups] if self.groups > 1 else [shape[first]]
        return [*shape[:first], *apart, *shape[first + 1 :]]

    def sizes(self, block: Block, ndim: int, stays: bool) -> list[int]:
        """Return the sizes of blocks in each dimension of what ``split`` returns.

        ndim: of the operand. stays: whether it is a weight, whose other dimensions have scales of their own.
        """
        grouped = self.groups > 1
        dims = [d % ndim + grouped for d in self.dims]
        along = dims if block == "channel" else dims[:1]
        sizes = block_sizes(block, along, ndim + grouped)
        if stays or isinstance(block, str):
            return sizes if stays else [0] * len(sizes)
        # Blocks begin anew in each group of a convolution, as in ``sizes``.
        own = {dims[0], dims[0] - 1} if grouped else {dims[0]}
        return [n if d in own else 0 for d, n in enumerate(sizes)]


class HeldNames:
    """The names of held scales in the order of a graph: one for each layout of a value."""

    def __init__(self) -> None:
        self._named: dict[tuple[fx.Node, Layout], str] = {}
        self._names: Counter[str] = Counter()

    def name(self, source: fx.Node, layout: Layout, path: str, role: str) -> str:
        """Return the name of a value's scales. path, role: of the product that reads it, and of the value."""
        key = source, layout
        if key not in self._named:
            self._named[key] = numbered(self._names, path, role)
        return self._named[key]


# Returns an operand rounded before a product, with a stream of the layout and the placeholder of its scales.
Round = Callable[[fx.Node, Layout, fx.Node], fx.Node]


class HeldScales:
    """The held scales of one graph, which is changed."""

    def __init__(self, graph: fx.GraphModule, scales: DelayedScales) -> None:
        self.graph, self._scales, self._names = graph, scales, HeldNames()
        self._entered: dict[str, fx.Node] = {}
        self._read: dict[tuple[fx.Node, ScaledRounding], list[tuple[fx.Node, Layout, fx.Node]]] = {}

    def round(self, node: fx.Node, operand: fx.Node, place: Site, rounding: ScaledRounding, rounded: Round) -> None:
        """Let a product read an operand that is rounded with held scales.

        Raises UnsupportedRounding for sizes that are not fixed, and for a backward product of a value that no forward
        product reads, or reads in another view that cannot be undone.
        """
        source = source_of(operand)
        if place.direction == "backward":
            self._round_backward(node, operand, source, place, rounding, rounded)
            return
        for position, layout in Layout.of(node, operand):
            scales = self._scales_of(operand, source, layout, place, rounding)
            self._read.setdefault((source, rounding), []).append((operand, layout, scales))
            node.update_arg(position, rounded(operand, layout, scales))

    def _scales_of(
        self, operand: fx.Node, source: fx.Node, layout: Layout, place: Site, rounding: ScaledRounding
    ) -> fx.Node:
        name = self._names.name(source, layout, place.path, place.role)
        if name not in self._entered:
            scaling, value = rounding.format.scaling, operand.meta["val"]
            assert scaling is not None
            sizes = layout.sizes(scaling.block, value.dim(), place.role == "weight")
            pairs = list(zip(layout.split(value.shape), sizes, strict=True))
            if any(n and not isinstance(size, int) for size, n in pairs):
                raise UnsupportedRounding(
                    f"{place}: held scales have a fixed number of blocks, and the operand has the shape "
                    f"{tuple(value.shape)}; use the block 'tensor', or a model whose sums have a fixed length"
                )
            shape = tuple(-(-size // n) if n else 1 for size, n in pairs)
            self._entered[name] = self._scales.entering(source, name, rounding, shape)
        return self._entered[name]

    def _round_backward(
        self, node: fx.Node, operand: fx.Node, source: fx.Node, place: Site, rounding: ScaledRounding, rounded: Round
    ) -> None:
        read = self._read.get((source, rounding))
        if not read:
            raise UnsupportedRounding(
                f"{place}: no forward product reads this operand, so that it has no held scales: call the model under "
                "torch.no_grad(), or keep the operand by a rule with operands='identity'"
            )
        # Of several forward operands, the one that is the same view of the source for the longest part of the way.
        way = _way(operand)
        shared = [next(at for at in _way(forward) if at in way) for forward, _, _ in read]
        nearest = min(range(len(read)), key=lambda i: way.index(shared[i]))
        forward, layout, scales = read[nearest]
        value = self._moved_back(rounded(forward, layout, scales), forward, shared[nearest], node, place)
        node.replace_input_with(operand, self._moved(operand, shared[nearest], value, node))

    def _moved_back(self, value: fx.Node, operand: fx.Node, to: fx.Node, near: fx.Node, place: Site) -> fx.Node:
        """Return a value of the shape of an operand in that of a value of which the operand is a view."""
        while operand is not to and (before := moved_by(operand)) is not None:
            same = str(operand.meta["val"].shape) == str(before.meta["val"].shape)
            if operand.target is _ATEN.permute.default:
                dims: Any = operand.args[1]
                inverse = [[d % len(dims) for d in dims].index(i) for i in range(len(dims))]
                value = insert(self.graph, near, _ATEN.permute.default, (value, inverse))
            elif operand.target in _SHAPES:
                size = [size_of(self.graph, near, before, d) for d in range(before.meta["val"].dim())]
                value = insert(self.graph, near, _ATEN.reshape.default, (value, size))
            elif not (operand.target in _COPIES or (same and operand.target is _ATEN.expand.default)):
                raise UnsupportedRounding(
                    f"{place}: its operand is read through {operand.target}, which a backward pass with held scales "
                    "cannot undo: call the model under torch.no_grad(), or keep the operand by a rule with "
                    "operands='identity'"
                )
            operand = before
        return value

    def _moved(self, operand: fx.Node, start: fx.Node, value: fx.Node, near: fx.Node) -> fx.Node:
        """Return a value in place of one of which an operand is a view, moved as the operand is."""
        before = moved_by(operand)
        if operand is start or before is None:
            return value
        moved = self._moved(before, start, value, near)
        args = fx.map_arg(operand.args, lambda n: moved if n is before else n)
        return insert(self.graph, near, operand.target, args, **operand.kwargs)


def _way(operand: fx.Node) -> list[fx.Node]:
    """Return an operand, and the values of which it is a view, back to its source."""
    way = [operand]
    while (before := moved_by(way[-1])) is not None:
        way.append(before)
    return way


__all__ = ["HeldNames", "HeldScales", "Layout"]
