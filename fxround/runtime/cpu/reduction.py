"""Chains over CPU tensors: which loops reduce or scan the lines of an operand, before any pointer is passed.

Operands may have any strides, and any dimensions may be reduced without a copy (but for operands of more dimensions
than a description holds). Results are new and row-major. Sizes and strides alone decide which loops run, and the choice
changes no bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Reduce, Scan
from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_machine, current_set, native, signature
from fxround.runtime.cpu.llvm.reduce import across_lanes, build_across, build_along, build_scan, one_register
from fxround.runtime.cpu.llvm.sequential import build_rows
from fxround.runtime.cpu.pointwise import addresses
from fxround.runtime.cpu.strides import Lines
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.draw import Draw

_REDUCE: Final = signature(2, 4)
# The scalar steps that make another thread worth its start.
_ENOUGH: Final = 1 << 16


def run_reduce(kernel: Reduce, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""
    call = reduction_for(kernel, x, dims)
    if call is None:
        kept = [d for d in range(x.dim()) if d not in dims]
        return run_reduce(kernel, x.detach().permute(*kept, *dims).contiguous(), draw, range(len(kept), x.dim()))
    result = buffers.empty(call.shape, dtype_of(kernel.result))
    if call.items:
        call.run(x, result, draw.key())
    return result


def reduction_for(kernel: Reduce, x: Tensor, dims: Sequence[int]) -> Reduction | None:
    """The call that reduces ``dims`` of operands of this layout; None if no kernel takes their lines in place."""
    return _reduction(kernel, tuple(x.shape), x.stride(), tuple(dims), current_set())


@dataclass(frozen=True)
class Reduction:
    """A kernel's code for operands of one layout, the description of their lines, and the number of items."""

    function: Any
    shape: tuple[int, ...]
    lines: Any
    items: int
    enough: int

    def run(self, x: Tensor, result: Tensor, key: Any) -> None:
        """Do every item, split over threads."""
        arguments = (ctypes.addressof(self.lines), *addresses((x, result)), ctypes.addressof(key))
        spread(self.function, range(self.items), pieces_of(self.items, self.enough), arguments)


@lru_cache(maxsize=4096)
def _reduction(
    kernel: Reduce, shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], isa: str
) -> Reduction | None:
    """How operands of one layout are reduced; None if no kernel takes their lines in place."""
    lines = Lines.of(torch.empty_strided(shape, strides, device="meta"), dims)
    kept = tuple(n for d, n in enumerate(shape) if d not in dims)
    if lines.count == 0:
        return Reduction(None, kept, lines.array(), 0, 1)
    if not lines.fits or (kernel.order.shards > 1 and not lines.dense and not _across(kernel, lines)):
        return None
    loops = loops_for(kernel, lines)
    return Reduction(
        loops.function, kept, lines.array(kernel.order.shards), *_items(lines, loops.lanes, loops.neighbours)
    )


@dataclass(frozen=True)
class Loops:
    """The code for some lines, the number of lines of an item, and whether these are adjacent in memory."""

    function: Any
    lanes: int
    neighbours: bool


def loops_for(kernel: Reduce, lines: Lines, grouped: bool = True) -> Loops:
    """The loops for these lines. grouped: whether one item may be several lines, in the lanes of a register."""
    one, neighbours, machine = one_register(kernel), _neighbours(kernel, lines) if grouped else 0, current_machine()
    many, whole = grouped and lines.count >= one, kernel.order.shards == 1
    if kernel.order.kind == "sequential" and whole and many and lines.k[-1].x == 1 and lines.k[-1].size >= one:
        run, lanes = native(f"{kernel.digest}:rows", build_rows, (kernel, machine), "reduce", _REDUCE), one
    elif grouped and _across(kernel, lines):
        lanes, name = neighbours or one, "neighbours" if neighbours else "scattered"
        variant = (kernel, lanes, bool(neighbours), machine)
        run = native(f"{kernel.digest}:across:{lanes}:{name}", build_across, variant, "reduce", _REDUCE)
    else:
        lanes, name = 1, "dense" if lines.dense else "panels"
        run = native(f"{kernel.digest}:along:{name}", build_along, (kernel, lines.dense, machine), "reduce", _REDUCE)
    return Loops(run, lanes, bool(neighbours) and lanes == neighbours)


def _across(kernel: Reduce, lines: Lines) -> bool:
    """Whether the lanes of a register are lines."""
    short = lines.k[-1].x != 1 or lines.length < 2 * kernel.order.chains * kernel.order.shards
    return bool(_neighbours(kernel, lines)) or (lines.count >= one_register(kernel) and short)


def run_scan(kernel: Scan, x: Tensor, draw: Draw, dim: int = 1) -> Tensor:
    """Every prefix along ``dim``; returns the shape of x."""
    x = x.detach()
    lines = Lines.of(x, [dim], scan=True)
    if not lines.fits:
        x = x.contiguous()
        lines = Lines.of(x, [dim], scan=True)
    result = buffers.empty(x.shape, dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    one, neighbours, machine = one_register(kernel), _neighbours(kernel, lines), current_machine()
    if lines.count >= one and lines.k[-1].x == lines.k[-1].out == 1:
        run, neighbours = native(f"{kernel.digest}:rows", build_rows, (kernel, machine), "reduce", _REDUCE), 0
    else:
        name, variant = (
            "neighbours" if neighbours else "scattered",
            (kernel, neighbours or one, bool(neighbours), machine),
        )
        run = native(f"{kernel.digest}:scan:{variant[1]}:{name}", build_scan, variant, "reduce", _REDUCE)
    items, enough = _items(lines, neighbours or one, bool(neighbours))
    Reduction(run, tuple(x.shape), lines.array(), items, enough).run(x, result, draw.key())
    return result


def described(x: Tensor, dims: Sequence[int], ordered: bool = True) -> tuple[Tensor, Lines]:
    """An operand and its lines; one of more dimensions than a description holds is copied, with ``dims`` last."""
    x = x.detach()
    lines = Lines.of(x, dims, ordered=ordered)
    if lines.fits:
        return x, lines
    kept = [d for d in range(x.dim()) if d not in dims]
    x = x.permute(*kept, *dims).contiguous()
    return x, Lines.of(x, range(len(kept), x.dim()), ordered=ordered)


def _neighbours(kernel: Reduce | Scan, lines: Lines) -> int:
    """How many adjacent lines to take together; 0 if the lines are not adjacent."""
    inner = lines.results[-1]
    return across_lanes(kernel, inner.size) if inner.x == 1 and inner.size >= one_register(kernel) else 0


def _items(lines: Lines, lanes: int, neighbours: bool) -> tuple[int, int]:
    """The number of items of ``lanes`` lines each, and how many of them make another thread worth its start."""
    inner = lines.results[-1].size if neighbours else lines.count
    return lines.count // inner * -(-inner // lanes), _ENOUGH // max(1, lines.length * lanes)
