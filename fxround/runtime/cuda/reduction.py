"""Reductions, scans, exact sums and scatters over CUDA tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Exact, Reduce, Scan, Scatter
from fxround.runtime import buffers
from fxround.runtime.contributions import Contributions
from fxround.runtime.cuda.arguments import LineSteps, count, key_of, shards_of_length
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.lines import GROUP, PLAIN, LineLoop, Staging, loop_name
from fxround.runtime.cuda.cpp.loops import loop_text, parts_size
from fxround.runtime.cuda.launcher import Text, device_of, for_device, launch
from fxround.runtime.draw import Draw
from fxround.runtime.layouts import collapse

_LONGEST_EXACT: Final = 1 << 35
# The least elements of an exact sum that a block of threads shares, where there are few sums: one thread would read all
# of them, one after the other.
_LONG_EXACT: Final = 1 << 11
_FEW_EXACT: Final = 1 << 14
# The least elements of a block's part of an exact sum that several blocks share.
_PART: Final = 1 << 12
# A GPU has about this many multiprocessors; fewer blocks would leave some without work.
_ENOUGH: Final = 128
# Shorter lines are not worth two barriers.
_LONG: Final = 64
# Lines of several chains pass through shared memory where they are few and long: their chains alone would have few
# elements on the way.
_FEW: Final = 2048
_LONG_CHAINS: Final = 512
# Neighbouring lines of which fewer are side by side do not fill a sector of memory.
_SIDE_BY_SIDE: Final = 8


@cache
def _text(kernel: Reduce | Scan | Scatter | Exact, shape: LineLoop = PLAIN) -> Text:
    """The text of a kernel, for threads that share the work in this way."""
    several = isinstance(kernel, Reduce) and (kernel.order.chains > 1 or kernel.order.shards > 1)
    meets = several or bool(shape.exact) or shape.staging is not None
    return Text(loop_name(kernel, shape), lambda: preamble(SHAPE) + loop_text(kernel, shape), shape.threads, meets)


def run_reduce(kernel: Reduce | Exact, x: Tensor, draw: Draw, dims: Sequence[int]) -> Tensor:
    """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    length, lines = math.prod(x.shape[d] for d in dims), math.prod(shape)
    if isinstance(kernel, Exact) and length >= _LONGEST_EXACT:
        raise ValueError(f"an exact sum of {length} elements: its limbs hold sums of fewer than 2^35")
    result = buffers.empty(shape, dtype_of(kernel.result), x.device)
    if isinstance(kernel, Reduce):
        kernel = for_device(kernel, x.device)
    if lines:
        x = x.detach()
        places = _lines(x, (kept,), dims)
        if places is None:
            x = x.permute(*kept, *dims).contiguous()
            places = _lines(x, (range(len(kept)),), range(len(kept), x.dim()))
        _run_lines(kernel, x, places, result, draw)
    return result


def run_scan(kernel: Scan, x: Tensor, draw: Draw, dim: int) -> Tensor:
    """Every prefix along ``dim``; returns the shape of x."""
    x = x.detach()
    kernel = for_device(kernel, x.device)
    result = buffers.empty(x.shape, dtype_of(kernel.result), x.device)
    if result.numel():
        around = range(dim), range(dim + 1, x.dim())
        lines = _lines(x, around, (dim,))
        if lines is None:
            x = x.contiguous()
            lines = _lines(x, around, (dim,))
        _run_lines(kernel, x, lines, result, draw)
    return result


def _lines(x: Tensor, around: Sequence[Sequence[int]], dims: Sequence[int]) -> LineSteps | None:
    """Where the elements of x's lines along ``dims`` are; None if it takes more than two steps to say it.

    around: the other dimensions, which lines are numbered by: all together, or those before and those after.
    """
    outer, inner = [(1, 0)], [(1, 0)]
    if len(around) == 1:
        *outer, last = _merged(x, around[0]) or inner
        inner = [last]
    else:
        outer, inner = (_merged(x, part) for part in around)
    along = _merged(x, dims)
    if len(outer) > 1 or len(inner) > 1 or len(along) > 2:
        return None
    length = math.prod(size for size, _ in along)
    count = math.prod(x.shape[d] for part in around for d in part)
    side_by_side, inner_step = (inner or [(1, 0)])[0]
    run, near = along[-1] if length and along else (1, 0)
    far = along[0][1] if len(along) > 1 else 0
    nearer = near != 0 and (side_by_side < _SIDE_BY_SIDE or inner_step == 0 or near < inner_step)
    return LineSteps(count, length, side_by_side, run, nearer, outer[0][1] if outer else 0, inner_step, far, near)


def _merged(x: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and steps of dimensions, neighbours merged."""
    sizes, (steps,) = collapse([x.shape[d] for d in dims], [[x.stride(d) for d in dims]])
    return list(zip(sizes, steps, strict=True))


def _loop(kernel: Reduce | Scan | Exact, x: Tensor, lines: LineSteps, result: Tensor) -> LineLoop:
    """How threads share the work."""
    if isinstance(kernel, Exact):
        return LineLoop(exact="shared" if lines.length >= _LONG_EXACT and lines.count <= _FEW_EXACT else "")
    chains = kernel.order.chains if isinstance(kernel, Reduce) else 1
    # A scan's results are stored in the order of its lines.
    side_by_side = lines.inner > 1 if isinstance(kernel, Scan) else not lines.along
    sharded = isinstance(kernel, Reduce) and kernel.order.shards > 1
    if sharded or side_by_side or lines.length < (_LONG if chains == 1 else _LONG_CHAINS):
        few = chains > 1 and -(-lines.count * chains // GROUP) < _ENOUGH
        return LineLoop(threads=GROUP // 2 if few else GROUP)
    if chains > 1:
        return LineLoop(Staging(1, _piece(kernel, x, lines, result))) if lines.count <= _FEW else LineLoop()
    at_once = next((n for n in (128, 32, 8) if lines.count >= n * _ENOUGH), 1)
    return LineLoop(Staging(at_once, _piece(kernel, x, lines, result)))


def _piece(kernel: Reduce | Scan, x: Tensor, lines: LineSteps, result: Tensor) -> int:
    """The adjacent elements that a thread reads at once: 16 bytes, if all pieces begin at multiples of their size."""
    stores = [result] if isinstance(kernel, Scan) else []
    whole = min(8, 16 // max(each.itemsize for each in (x, *stores)))
    steps = [lines.run, lines.far, lines.outer_step, lines.inner_step if lines.inner > 1 else 0]
    steps += [lines.length] if stores else []
    aligned = all(each.data_ptr() % (whole * each.itemsize) == 0 for each in (x, *stores))
    return whole if lines.near == 1 and aligned and all(step % whole == 0 for step in steps) else 1


def _run_lines(kernel: Reduce | Scan | Exact, x: Tensor, lines: LineSteps | None, result: Tensor, draw: Draw) -> None:
    """Run a kernel over lines, of which there is at least one."""
    assert lines is not None
    shape = _loop(kernel, x, lines, result)
    chains, items = kernel.order.chains if isinstance(kernel, Reduce) else 1, lines.count
    if shape.staging:
        items = -(-items // shape.staging.lines)
    elif chains > 1 or (isinstance(kernel, Reduce) and kernel.order.shards > 1):
        items = -(-items * chains // shape.threads)
    key = key_of(draw.words((draw.node,)), draw.state, x.device)
    parts = min(-(-_ENOUGH // lines.count), lines.length // _PART)
    if isinstance(kernel, Exact) and shape.exact and parts > 1:
        partial = torch.empty(lines.count * parts * parts_size(kernel), dtype=torch.int64, device=x.device)
        among = [count(parts), partial]
        launch(_text(kernel, LineLoop(exact="parts")), lines.count * parts, [lines, x, *among], x.device)
        launch(_text(kernel, LineLoop(exact="joined")), lines.count, [lines, result, *among, *key], x.device)
        return
    shards = []
    if isinstance(kernel, Reduce) and kernel.order.shards > 1:
        shards.append(shards_of_length(lines.length, kernel.order.shards))
    arguments = [lines, *shards, result, x, *key]
    launch(_text(kernel, shape), items, arguments, x.device)


def run_scatter(kernel: Scatter, x: Tensor, contributions: Contributions, draw: Draw) -> Tensor:
    """x with the contributions added, row-major."""
    device_of([x, contributions.rows, contributions.source], "a scatter")
    x = x.detach().contiguous()
    kernel = for_device(kernel, x.device)
    result = buffers.empty(x.shape, x.dtype, x.device)
    if result.numel():
        source = contributions.source.contiguous()
        inner = source.shape[1]
        order, starts = contributions.sorted(x.numel() // inner)
        # A thread computes 16 bytes of a row, if all pieces begin at multiples of that and enough threads are left.
        piece = min(8, 16 // x.itemsize)
        aligned = all(each.data_ptr() % (piece * each.itemsize) == 0 for each in (x, source, result))
        whole = aligned and inner % piece == 0 and x.numel() >= piece * GROUP * _ENOUGH
        shape = LineLoop(piece=piece if whole else 1)
        operands = [count(x.numel()), count(inner), result, x, source, starts, order]
        key = key_of(draw.words((draw.node,)), draw.state, x.device)
        launch(_text(kernel, shape), x.numel() // shape.piece, [*operands, *key], x.device)
    return result
