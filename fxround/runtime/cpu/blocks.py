"""Blocks over CPU tensors: which tensors a kernel of blocks (``kernels.kinds.Blocks``) takes, and its call.

A tensor is read once from memory for its maxima, and again for its elements while it is in the cache.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Blocks
from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_machine, current_set, native, signature
from fxround.runtime.cpu.llvm.blocks import LAYOUT, MOST, BlocksVariant, build_blocks
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.operands import writable

_BLOCKS: Final = signature(2, 2)
# The elements of an item of several blocks, which stay in the first-level cache, and those that make another thread
# worth its start.
_ITEM: Final = 1 << 12
_ENOUGH: Final = 1 << 15
# The most elements of a block along columns, 64 columns of which stay in the second-level cache, and of one along rows,
# of which several make the work of a second thread.
_TALLEST: Final = 1 << 11
_LONGEST: Final = 1 << 16
# The largest block whose size is a part of the code.
_KNOWN: Final = 128
_VECTOR: Final = 16


@dataclass(frozen=True)
class BlockGeometry:
    """A row-major tensor as (outer, length, inner), with blocks of ``size`` along length."""

    outer: int
    length: int
    size: int
    inner: int

    @property
    def row_blocks(self) -> int:
        """The number of blocks along length."""
        return -(-self.length // self.size)

    @property
    def blocks(self) -> int:
        """The number of blocks, those of one column counted once."""
        return self.outer * self.row_blocks

    @property
    def per(self) -> int:
        """The blocks of an item."""
        return 1 if self.inner > 1 else max(1, min(MOST, _ITEM // self.size))


@lru_cache(maxsize=4096)
def geometry(shape: Sequence[int], sizes: Sequence[int]) -> BlockGeometry | None:
    """Blocks of these sizes as blocks along one dimension; None if they extend in several, or are too long."""
    if 0 in shape:
        return None
    pairs = [(n, 1 if size == 1 else min(size or n, n)) for n, size in zip(shape, sizes, strict=True) if n > 1]
    # Neighbouring dimensions that are whole blocks are one dimension.
    runs = [(kind, list(run)) for kind, run in groupby(pairs, key=lambda pair: (pair[1] == 1, pair[1] == pair[0]))]
    blocked = [i for i, ((single, _), _) in enumerate(runs) if not single]
    if len(blocked) > 1 or any(not single and not whole and len(run) > 1 for (single, whole), run in runs):
        return None
    place = blocked[0] if blocked else len(runs)
    outer, inner = (math.prod(n for _, run in part for n, _ in run) for part in (runs[:place], runs[place + 1 :]))
    (_, whole), run = runs[place] if blocked else ((False, True), [(1, 1)])
    length = math.prod(n for n, _ in run)
    cut = BlockGeometry(outer, length, length if whole else run[0][1], inner)
    return cut if cut.size <= (_TALLEST if inner > 1 else _LONGEST) else None


def run_blocks(
    kernel: Blocks, x: Tensor, sizes: Sequence[int], shared: Sequence[Tensor], out: Tensor | None = None
) -> Tensor | None:
    """Run a kernel over a tensor in blocks of these sizes; None if there is no such code for it.

    x: without gaps between its elements, else None is returned. shared: the numbers that all blocks share, of one
    element each, of any dtype. out: a row-major tensor to write the elements into, which may be x.
    """
    if any(s.numel() != 1 for s in shared):
        return None
    # The kernel reads them in the carrier; that of a 16-bit tensor is wider.
    shared = [s.to(dtype_of(load)) for s, load in zip(shared, kernel.figure.loads[1:], strict=True)]
    if not x.is_contiguous():
        return _in_memory_order(kernel, x, sizes, shared, out)
    call = _call(kernel, x.shape, tuple(sizes), current_set())
    if call is None:
        return None
    shape = x.shape if kernel.elements is not None else call.shape
    storage = (kernel.elements or kernel.figure).results[0]
    result = buffers.empty(shape, dtype_of(storage)) if out is None else writable(out, tuple(shape), storage)
    pointers = array(addresses((x, result, *shared)))
    at = ctypes.addressof
    spread(call.function, range(call.items), pieces_of(call.items, call.enough), (at(call.layout), at(pointers)))
    return result


def _in_memory_order(
    kernel: Blocks, x: Tensor, sizes: Sequence[int], shared: Sequence[Tensor], out: Tensor | None
) -> Tensor | None:
    """``run_blocks`` for a tensor that is row-major after a permutation; the result is row-major as x has it."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    y = x.permute(order)
    if not y.is_contiguous():
        return None
    permuted = run_blocks(kernel, y, [sizes[d] for d in order], shared)
    if permuted is None:
        return None
    there = permuted.permute([order.index(d) for d in range(x.dim())])
    result = (buffers.empty(there.shape, there.dtype) if out is None else out).copy_(there)
    buffers.release(permuted)
    return result


@dataclass(frozen=True)
class _Call:
    """The code for a shape: its items, the least of a piece, the numbers of ``LAYOUT``, and the shape of figures."""

    function: Any
    items: int
    enough: int
    layout: Any
    shape: torch.Size


@lru_cache(maxsize=4096)
def _call(kernel: Blocks, shape: Sequence[int], sizes: Sequence[int], isa: str) -> _Call | None:
    g = geometry(shape, sizes)
    if g is None:
        return None
    even = g.inner == 1 and g.length % g.size == 0 and g.size % _VECTOR == 0 and g.size <= _KNOWN
    variant = BlocksVariant(kernel, g.inner > 1, g.size if even else 0, current_machine())
    function = native(variant.digest, build_blocks, variant, "blocks", _BLOCKS)
    numbers = {"blocks": g.blocks, "row_blocks": g.row_blocks, "per": g.per}
    layout = array([numbers[name] if name in numbers else getattr(g, name) for name in LAYOUT])
    items = -(-g.blocks // g.per)
    figures = torch.Size(-(-n // (size or n)) for n, size in zip(shape, sizes, strict=True))
    return _Call(function, items, max(1, _ENOUGH // (g.per * g.size * g.inner)), layout, figures)
