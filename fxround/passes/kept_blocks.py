"""Whether a value still has the blocks in which it was rounded, where an operation reads it.

Elements of a block share a scale. A permutation of dimensions keeps the blocks, and so does a view that divides or
joins rows between blocks. ``regrouping`` moves the numbers of blocks in place of values, with the sizes of the capture,
and finds the first operation after which runs along no dimension lie inside of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect.blocks import block_sizes
from fxround.graph.site import float_value
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes.analyses.known import Known, Origins, joined, passes_on

# They keep the block of every element: as it is, or a zero in its place, or its opposite.
_KEEP: Final = ("aten.alias.default", "aten.detach.default", "aten.clone.default", "aten._to_copy.default")
_ZEROS: Final = ("aten.relu.default", "aten.where.self")
_SIGNED: Final = ("aten.neg.default", "aten.abs.default")
_PERMUTE: Final = ("aten.permute.default", "aten.t.default", "aten.transpose.int", "aten.unsqueeze.default")
# They select by position.
_VIEWS: Final = (
    *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default"),
    *("aten.squeeze.dim", "aten.squeeze.dims", "aten.slice.Tensor", "aten.select.int", "aten.flip.default"),
)
# What is known of a mask, and of zeros.
_NOTHING: Final = (Known(), Known(numbers=frozenset({0.0})))


def regrouping(
    used: fx.Node, origin: fx.Node, origins: Mapping[fx.Node, Origins], rounding: ScaledRounding
) -> fx.Node | None:
    """Return the operation between a value that was rounded in blocks and a use of it that regroups them, or None.

    origins: of ``known``. used: an operand that has values of ``origin``.
    """
    path: list[tuple[fx.Node, fx.Node]] = []
    node = used
    while node is not origin:
        sources = [x for x in node.all_input_nodes if origin in origins.get(x, {})]
        if not passes_on(node) or len(sources) != 1:
            return node
        path.append((node, sources[0]))
        node = sources[0]
    value, sizes = float_value(origin), sizes_of(origin, rounding)
    keep = (*_KEEP, *_ZEROS, *(() if rounding.format.span else _SIGNED))
    numbers = None
    for step, source in reversed(path):
        name = str(step.target)
        if name in keep and all(
            joined(origins.get(x, {})) in _NOTHING for x in step.all_input_nodes if x is not source
        ):
            continue
        if name not in (*_PERMUTE, *_VIEWS):
            return step
        if sizes is None or value is None:
            continue
        if numbers is None:
            numbers = _numbers([_size(n) for n in value.shape], sizes)
        view: Any = step.target
        numbers = view(*_arguments(step, numbers), **step.kwargs)
        if name in _VIEWS and not _together(numbers, max(sizes)):
            return step
    return None


def sizes_of(origin: fx.Node, rounding: ScaledRounding) -> Sequence[int] | None:
    """Return the sizes of the blocks of a value that a rule rounds; None for a format without scales of blocks."""
    value, scaling = float_value(origin), rounding.format.scaling
    return None if value is None or scaling is None else block_sizes(scaling.block, (-1,), max(1, value.dim()))


def _arguments(node: fx.Node, numbers: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a node with the numbers of blocks as its tensor, and sizes as they were captured."""

    def of(x: fx.Node) -> Any:
        value = x.meta.get("val")
        return numbers if isinstance(value, Tensor) else _size(value)

    return fx.map_arg(node.args, of)


def _size(n: Any) -> int:
    """Return a size, or that of the capture for one that only a run knows."""
    return n if isinstance(n, int) else int(n.node.hint)


def _numbers(shape: list[int], sizes: Sequence[int]) -> Tensor:
    """Return the number of its block for each element of a tensor."""
    numbers = torch.zeros([1] * len(shape), dtype=torch.int64)
    for dim, (length, size) in enumerate(zip(shape, sizes, strict=True)):
        blocks = torch.arange(length) // (size or max(length, 1))
        count = 1 if not size else -(-length // size)
        numbers = numbers * max(count, 1) + blocks.view([-1 if d == dim else 1 for d in range(len(shape))])
    return numbers


def _together(numbers: Tensor, size: int) -> bool:
    """Whether runs of ``size`` elements along some dimension lie inside of one block each; 0: whole lines."""
    if numbers.numel() == 0 or numbers.dim() == 0:
        return True
    for dim in range(numbers.dim()):
        first = torch.arange(numbers.shape[dim])
        first = first // (size or len(first)) * (size or len(first))
        if numbers.shape[dim] > 1 and torch.equal(numbers.index_select(dim, first), numbers):
            return True
    return len(numbers.unique()) == 1
