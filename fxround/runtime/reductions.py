"""The operators that reduce: sum, prod, their scans, scatter_add and accumulating index_put.

Several reduced dimensions count as one, in row-major order of their elements. Contributions to one destination are
added in the order of their source. Results are row-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from fxround.graph.dialect import CALLS, Call, IndexPut, ReductionCall, ScanCall, ScatterAdd, ScatterCall
from fxround.graph.dialect.reductions import dims_of
from fxround.runtime.contributions import contributions_of
from fxround.runtime.draw import Draw
from fxround.runtime.operands import storage_of
from fxround.runtime.run import run_reduce
from fxround.runtime.target import target_of


def reduce(call: ReductionCall[Tensor]) -> Tensor:
    """The sum or product over ``dims`` by the chains of the call's kernel, or exactly."""
    reduced = call.reduced()
    kernel = call.kernel((storage_of(call.x, f"{call.name}'s operand"),))
    draw = Draw.unread(call.rng, call.node)
    return run_reduce(draw.of_part(kernel), call.x, draw, reduced).reshape(call.size())


def scan(call: ScanCall[Tensor]) -> Tensor:
    """Every prefix sum or product along ``dim``, k ascending."""
    x = call.x
    kernel = call.kernel((storage_of(x, f"{call.name}'s operand"),))
    (axis,) = dims_of(x, [call.dim]) or (0,)
    draw = Draw.unread(call.rng, call.node)
    run = target_of(call.operands).scan
    return run(draw.of_part(kernel), x if x.dim() else x.reshape(1), draw, axis).reshape(x.shape)


def scatter(call: ScatterCall[Tensor]) -> Tensor:
    """``x`` with its contributions added, in the order of their source."""
    kernel = call.kernel(call.loads())
    draw = Draw.unread(call.rng, call.node)
    return target_of(call.operands).scatter(draw.of_part(kernel), call.x, contributions_of(call), draw)


REDUCTIONS: Final[dict[type[Call[Any]], Callable[[Any], Tensor]]] = {
    **{cls: reduce for cls in CALLS.values() if issubclass(cls, ReductionCall)},
    **{cls: scan for cls in CALLS.values() if issubclass(cls, ScanCall)},
    ScatterAdd: scatter,
    IndexPut: scatter,
}
