"""Reductions, scans, exact sums and scatters over CUDA tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from torch import Tensor

from fxround.graph.dialect import CALLS, Call, IndexPut, ReductionCall, ScanCall, ScatterAdd, ScatterCall
from fxround.graph.dialect.reductions import dims_of
from fxround.graph.dtypes import dtype_of
from fxround.kernels.shapes import Exact, Reduce, Scan, Scatter
from fxround.runtime import buffers
from fxround.runtime.contributions import Contributions, contributions_of
from fxround.runtime.cuda.arguments import count, key_of
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.loops import GROUP, loop_name, loop_text
from fxround.runtime.cuda.launcher import Text, device_of, launch
from fxround.runtime.draw import Draw
from fxround.runtime.operands import storage_of

_LONGEST_EXACT: Final = 1 << 35
# The least elements of an exact sum that a block of threads shares, where there are few sums: one thread would read all
# of them, one after the other.
_LONG_EXACT: Final = 1 << 11
_FEW_EXACT: Final = 1 << 14


@cache
def _text(kernel: Reduce | Scan | Scatter | Exact, shared: bool = False) -> Text:
    """The text of a kernel. shared: whether the threads of a block share an exact sum."""
    meets = shared or (isinstance(kernel, Reduce) and kernel.order.chains > 1)
    return Text(loop_name(kernel, shared), lambda: preamble(SHAPE) + loop_text(kernel, shared), GROUP, meets)


def reduce(call: ReductionCall[Tensor]) -> Tensor:
    """The sum or product over ``dims`` by the chains of the call's kernel, or exactly."""
    reduced = call.reduced()
    kernel = call.kernel((storage_of(call.x, f"{call.name}'s operand"),))
    return run_reduce(kernel, call.x, Draw.unread(call.rng, call.node), reduced).reshape(call.size())


def run_reduce(kernel: Reduce | Exact, x: Tensor, draw: Draw, dims: Sequence[int]) -> Tensor:
    """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    length, lines = math.prod(x.shape[d] for d in dims), math.prod(shape)
    if isinstance(kernel, Exact) and length >= _LONGEST_EXACT:
        raise ValueError(f"an exact sum of {length} elements: its limbs hold sums of fewer than 2^35")
    result = buffers.empty(shape, dtype_of(kernel.result), x.device)
    if lines:
        inner = math.prod(x.shape[d] for d in kept if dims and d > dims[-1])
        if list(dims) != list(range(dims[0], dims[-1] + 1) if dims else ()):
            # Lines of reduced dimensions that are not adjacent are gathered.
            x, inner = x.detach().permute(*kept, *dims), 1
        _run_lines(kernel, x, (lines, length, inner if dims else 1), result, draw)
    return result


def scan(call: ScanCall[Tensor]) -> Tensor:
    """Every prefix sum or product along ``dim``, k ascending."""
    x = call.x.detach()
    kernel = call.kernel((storage_of(x, f"{call.name}'s operand"),))
    (axis,) = dims_of(x, [call.dim]) or (0,)
    shape = x.shape or (1,)
    result = buffers.empty(shape, dtype_of(kernel.result), x.device)
    if result.numel():
        length, inner = shape[axis], math.prod(shape[axis + 1 :])
        _run_lines(kernel, x, (result.numel() // length, length, inner), result, Draw.unread(call.rng, call.node))
    return result.reshape(x.shape)


def _run_lines(
    kernel: Reduce | Scan | Exact, x: Tensor, sizes: tuple[int, int, int], result: Tensor, draw: Draw
) -> None:
    """Run a kernel over (lines, their length, the lines that are stored side by side)."""
    shared = isinstance(kernel, Exact) and sizes[1] >= _LONG_EXACT and sizes[0] <= _FEW_EXACT
    text = _text(kernel, shared)
    chains = kernel.order.chains if isinstance(kernel, Reduce) else 1
    items = -(-sizes[0] * chains // GROUP) if text.meets and not shared else sizes[0]
    arguments = [
        *map(count, sizes),
        result,
        x.detach().contiguous(),
        *key_of(draw.words((draw.node,)), draw.state, x.device),
    ]
    launch(text, items, arguments, x.device)


def scatter(call: ScatterCall[Tensor]) -> Tensor:
    """``x`` with its contributions added, in the order of their source."""
    kernel = call.kernel(call.loads())
    found = contributions_of(call)
    device_of([call.x, found.rows, found.source], call.name)
    return run_scatter(kernel, call.x, found, Draw.unread(call.rng, call.node))


def run_scatter(kernel: Scatter, x: Tensor, contributions: Contributions, draw: Draw) -> Tensor:
    """x with the contributions added, row-major."""
    x = x.detach().contiguous()
    result = buffers.empty(x.shape, x.dtype, x.device)
    if result.numel():
        source = contributions.source.contiguous()
        inner = source.shape[1]
        order, starts = contributions.sorted(x.numel() // inner)
        sizes = count(x.numel()), count(inner)
        launch(
            _text(kernel),
            x.numel(),
            [*sizes, result, x, source, starts, order, *key_of(draw.words((draw.node,)), draw.state, x.device)],
            x.device,
        )
    return result


KERNELS: Final[dict[type[Call[Any]], Callable[[Any], Tensor]]] = {
    **{cls: reduce for cls in CALLS.values() if issubclass(cls, ReductionCall)},
    **{cls: scan for cls in CALLS.values() if issubclass(cls, ScanCall)},
    ScatterAdd: scatter,
    IndexPut: scatter,
}
