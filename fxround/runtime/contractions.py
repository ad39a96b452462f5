"""Contractions over CPU tensors: where the operands lie, and how the work is cut into items.

What is true here. The second operand is two tables of offsets over one tensor, so that a matrix of any strides and the
windows of an image are one case. Chunks of rows, blocks of k and threads cut the work; no result shows where.

Why it is safe. Sizes are compared before a pointer is taken; a kernel reads by the sizes and offsets made here.

    before   torch.bmm(a, b)
    after    run_contract(kernel, a, Right.matrices(b), 0, draw)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fxround.kernel import Contract
from fxround.runtime import buffers
from fxround.runtime.compiled import current_machine, native, signature
from fxround.runtime.execute import Draw, dtype_of
from fxround.runtime.llvm.contract import build_contract
from fxround.runtime.llvm.render import bytes_of
from fxround.runtime.llvm.tile import ContractVariant, quick_for, tile_for
from fxround.runtime.threads import split

_CONTRACT: Final = signature(14, 8)
# A thread is worth waking for this many steps.
_ENOUGH: Final = 1 << 15
# See numerics.truncation.up_or_down.
_LONGEST: Final = 1 << 30
# Steps of a block: a panel of them stays in the first-level cache; the packed rows of an item in the second.
_BLOCK: Final = 192
_CHUNK_BYTES: Final = 1 << 20
_PARKED_BYTES: Final = 1 << 21


@lru_cache(maxsize=256)
def offsets(count: int, stride: int) -> Tensor:
    """0, stride, 2 * stride, ...: int64."""
    return torch.arange(count) * stride


@dataclass(frozen=True)
class Right:
    """The second operand of a contraction: element (batch, k, n) at batch * step + k_offsets[k] + n_offsets[n]."""

    data: Tensor
    batch: int
    step: int
    k_offsets: Tensor
    n_offsets: Tensor

    @staticmethod
    def matrices(b: Tensor) -> Right:
        """(batch, length, columns) of any strides."""
        step, k, n = b.stride()
        return Right(b, b.shape[0], step, offsets(b.shape[1], k), offsets(b.shape[2], n))


def run_contract(kernel: Contract, a: Tensor, right: Right, groups: int, draw: Draw) -> Tensor:
    """a: (g, rows, length) of any strides. Returns (batch, rows, columns).

    groups 0: a has one matrix a batch (g == batch); else a's matrix for batch i is i mod groups.
    """
    g, rows, length = a.shape
    batch, columns = right.batch, right.n_offsets.numel()
    if right.k_offsets.numel() != length or g != (groups or batch):
        expected = (batch, right.k_offsets.numel(), columns)
        raise ValueError(f"contraction of {tuple(a.shape)} with {expected}: inner sizes or batches differ")
    result = buffers.empty((batch, rows, columns), dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    block = kernel.chunk or min(max(length, 1), _BLOCK)
    machine = current_machine()
    general = tile_for(kernel, machine, max(block, _BLOCK))
    quick = quick_for(kernel, machine)
    first = general if quick is None else tile_for(quick, machine, max(block, _BLOCK))
    chunk, wide = _cut(general, first, batch, rows, columns)
    tensors = (a, right.data, right.k_offsets, right.n_offsets, result)
    pointers = tuple(ctypes.c_void_p(t.data_ptr()) for t in tensors)
    key = draw.key()

    def calls(variant: ContractVariant) -> Callable[[int, int], bool]:
        """Run items begin ... end by this variant; whether the results count."""
        run = native(variant.digest, build_contract, variant, "contract", _CONTRACT)
        panels, panels_wide = _ceiling(columns, variant.width), wide // variant.width
        sizes = (rows, columns, length, panels, chunk, panels_wide, block, groups, *a.stride(), right.step)

        def call(begin: int, end: int) -> bool:
            scratch = torch.empty(variant.scratch_bytes(chunk, panels_wide, block), dtype=torch.uint8)
            flags = ctypes.c_int32(0)
            run(begin, end, *sizes, *pointers, ctypes.c_void_p(scratch.data_ptr()), key, ctypes.byref(flags))
            return flags.value == 0

        return call

    def work(begin: int, end: int) -> None:
        if quick is None:
            calls(general)(begin, end)
            return
        for item in range(begin, end):
            if not calls(first)(item, item + 1):
                calls(general)(item, item + 1)

    items = batch * _ceiling(rows, chunk) * _ceiling(columns, wide)
    split(work, items, max(1, _ENOUGH // max(1, chunk * wide * length)))
    return result


def _cut(general: ContractVariant, first: ContractVariant, batch: int, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of an item: as many as the scratch allows, and some items for every thread.

    Both variants work on the same items: an item's columns are whole panels of either.
    """
    tallest = max(first.rows[0], _CHUNK_BYTES // (general.pitch * bytes_of(general.kernel.accumulator)))
    chunk = _even(rows, tallest, first.rows[0])
    unit = max(general.width, first.width)
    panels = _ceiling(columns, unit)
    widest = max(1, _PARKED_BYTES // (chunk * unit * general.parked_bytes))
    threads = torch.get_num_threads()
    if threads > 1:
        share = batch * _ceiling(rows, chunk)
        widest = min(widest, max(1, panels * share // (2 * threads)))
    return chunk, _even(panels, widest, 1) * unit


def _even(total: int, most: int, unit: int) -> int:
    """The size of equal parts of ``total``, at most about ``most``, a multiple of ``unit`` if there are several."""
    parts = _ceiling(total, most)
    return total if parts == 1 else _ceiling(_ceiling(total, parts), unit) * unit


def _ceiling(n: int, parts: int) -> int:
    return -(-n // parts)


def scratch_of(kernel: Contract, batch: int, rows: int, columns: int, length: int) -> int:
    """Bytes that one thread packs and parks in."""
    block = kernel.chunk or min(max(length, 1), _BLOCK)
    variant = tile_for(kernel, current_machine(), max(block, _BLOCK))
    chunk, wide = _cut(variant, variant, batch, rows, columns)
    return variant.scratch_bytes(chunk, wide // variant.width, block)
