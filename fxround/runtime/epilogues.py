"""Epilogues as data: a contraction and the map after it, on any device; ``schedule.epilogues`` finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Call, Fused, Pointwise
from fxround.graph.dtypes import LOADS
from fxround.kernels.kinds import Map
from fxround.runtime.operands import map_of

# The number that stands for the contraction's result among those of the map.
CONTRACTION: Final = -1


@dataclass(frozen=True, eq=False)
class Followed:
    """A contraction that a map follows. Inputs are those of both.

    call        the function (*inputs) -> the contraction's call
    views       the function (the contraction's result, *inputs) -> the operands of the map
    map         the call of the map
    operands    the indices of its operands among the inputs; None for the contraction's result
    rng         the index of its random state
    one_rng     whether the contraction draws by the same state
    factors     the indices of the operands of a product of matrices; None for another contraction
    outside     the numbers of the map's results that are used outside, ``CONTRACTION`` for the contraction's
    """

    call: Callable[..., Call[Tensor]]
    views: Callable[..., Sequence[Tensor]]
    map: Pointwise[fx.Node] | Fused[fx.Node]
    operands: tuple[int | None, ...]
    rng: int
    one_rng: bool
    factors: tuple[int, int] | None
    outside: tuple[int, ...]

    def map_over(
        self, inputs: Sequence[Any], size: Sequence[int], dtype: torch.dtype
    ) -> tuple[Map, Sequence[Tensor]] | None:
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


def _meta(x: Any) -> Any:
    """A tensor's layout without its memory; anything else unchanged."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _readable(x: Tensor) -> bool:
    """Whether a kernel can read the tensor; if not, the map alone raises the error."""
    return x.layout == torch.strided and x.dtype in LOADS
