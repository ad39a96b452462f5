"""Contractions over CPU tensors: where the operands lie, and how the work is cut into items.

What is true here. The second operand is two tables of offsets over one tensor, so that a matrix of any strides and the
windows of an image are one case. Chunks of rows, blocks of k and threads cut the work; no result shows where.

Why it is safe. Sizes are compared before a pointer is taken; a kernel reads by the sizes and offsets made here.

    before   torch.bmm(a, b)
    after    run_contract(kernel, a, Right.matrices(b), 0, draw)
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fxround.kernel import Contract
from fxround.runtime.compiled import current_machine, native, signature
from fxround.runtime.execute import Draw, dtype_of
from fxround.runtime.llvm.contract import build_contract, tile_for
from fxround.runtime.threads import split

_CONTRACT: Final = signature(13, 7)
# A thread is worth waking for this many steps.
_ENOUGH: Final = 1 << 15
# Rows of a chunk and steps of a block: the parked accumulators and the packed panel stay in the second-level cache.
_CHUNK: Final = 448
_BLOCK: Final = 512


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
    result = torch.empty(batch, rows, columns, dtype=dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    variant = tile_for(kernel, current_machine())
    run = native(variant.digest, build_contract, variant, "contract", _CONTRACT)
    panels = -(-columns // variant.width)
    chunks = -(-rows // (_CHUNK if batch * panels >= 2 * torch.get_num_threads() else _CHUNK // 4))
    chunk = -(-rows // chunks)
    items = batch * panels * -(-rows // chunk)
    block = kernel.chunk or min(max(length, 1), _BLOCK)
    sizes = (rows, columns, length, panels, chunk, block, groups, *a.stride(), right.step)
    tensors = (a, right.data, right.k_offsets, right.n_offsets, result)
    pointers = tuple(ctypes.c_void_p(t.data_ptr()) for t in tensors)
    key = draw.key()

    def work(begin: int, end: int) -> None:
        scratch = torch.empty(variant.scratch_bytes(chunk, block), dtype=torch.uint8)
        run(begin, end, *sizes, *pointers, ctypes.c_void_p(scratch.data_ptr()), key)

    split(work, items, max(1, _ENOUGH // max(1, chunk * variant.width * length)))
    return result
