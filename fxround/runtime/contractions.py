"""Contractions over CPU tensors: where the operands lie, and how the work is cut into items.

What is true here. The second operand is two tables of offsets over one tensor, so that a matrix of any strides and the
windows of an image are one case. Chunks of rows, blocks of k and threads cut the work; no result shows where.

Why it is safe. Sizes are compared before a pointer is taken; a kernel reads by the sizes and offsets made here.

    before   torch.bmm(a, b)
    after    run_contract(kernel, a, Right.matrices(b), 0, draw)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

import torch
from torch import Tensor

from fxround.kernel import Contract
from fxround.numerics.storage import Storage
from fxround.runtime import texts
from fxround.runtime.compiled import current_instruction_set, native, signature
from fxround.runtime.execute import Draw, dtype_of
from fxround.runtime.llvm.contract import build_contract
from fxround.runtime.llvm.engine import machine_of
from fxround.runtime.llvm.render import bytes_of
from fxround.runtime.llvm.tile import ContractVariant, quick_for, tile_for
from fxround.runtime.threads import split
from fxround.specialize import contract_kernel

_CONTRACT: Final = signature(16, 9)
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
class Placing:
    """Where results lie: element (batch, row, n) at batch * step + row * row_step + offsets[n]; offsets ascend."""

    step: int
    row_step: int
    offsets: Tensor


@dataclass(frozen=True)
class Right:
    """The second operand of a contraction: element (batch, k, n) at batch * step + k_offsets[k] + n_offsets[n].

    out: where its products lie in the result, if not in a row.
    """

    data: Tensor
    batch: int
    step: int
    k_offsets: Tensor
    n_offsets: Tensor
    out: Placing | None = None

    @staticmethod
    def matrices(b: Tensor) -> Right:
        """(batch, length, columns) of any strides."""
        step, k, n = b.stride()
        return Right(b, b.shape[0], step, offsets(b.shape[1], k), offsets(b.shape[2], n))


@lru_cache(maxsize=1024)
def contract_of(accumulate: str, rounding: str, loads: tuple[Storage, Storage], result: Storage) -> Contract:
    """The kernel of a graph argument's texts."""
    return contract_kernel(texts.accumulation(accumulate), texts.rounding(rounding), loads, result)


@dataclass(frozen=True)
class Code:
    """A variant, compiled, for operands of one shape: its sizes, and the scratch that a call needs."""

    run: Callable[..., None]
    sizes: tuple[int, ...]
    scratch: int


@dataclass(frozen=True)
class Plan:
    """How operands of one shape are contracted: the work's items, and code that does them.

    quick: code whose results may not count; ``general`` then does the item again.
    """

    general: Callable[[], Code]
    quick: Code | None
    items: int
    enough: int

    @staticmethod
    def of(kernel: Contract, batch: int, rows: int, columns: int, length: int, groups: int) -> Plan:
        """The plan on this machine, for the present number of threads."""
        return _plan(kernel, current_instruction_set(), torch.get_num_threads(), batch, rows, columns, length, groups)


@lru_cache(maxsize=1024)
def _plan(
    kernel: Contract, isa: str, threads: int, batch: int, rows: int, columns: int, length: int, groups: int
) -> Plan:
    block = kernel.chunk or min(max(length, 1), _BLOCK)
    machine = machine_of(isa)
    general = tile_for(kernel, machine, max(block, _BLOCK))
    quick = quick_for(kernel, machine)
    first = general if quick is None else tile_for(quick, machine, max(block, _BLOCK))
    chunk, wide = _cut(general, first, batch, rows, columns, threads)

    def code(variant: ContractVariant) -> Code:
        run = native(variant.digest, build_contract, variant, "contract", _CONTRACT)
        panels, panels_wide = _ceiling(columns, variant.width), wide // variant.width
        sizes = (rows, columns, length, panels, chunk, panels_wide, block, groups)
        return Code(run, sizes, variant.scratch_bytes(chunk, panels_wide, block))

    items = batch * _ceiling(rows, chunk) * _ceiling(columns, wide)
    enough = max(1, _ENOUGH // max(1, chunk * wide * length))
    return Plan(cache(lambda: code(general)), None if quick is None else code(first), items, enough)


def run_contract(kernel: Contract, a: Tensor, right: Right, groups: int, draw: Draw) -> Tensor:
    """a: (g, rows, length) of any strides. Returns (batch, rows, columns).

    groups 0: a has one matrix a batch (g == batch); else a's matrix for batch i is i mod groups.
    """
    g, rows, length = a.shape
    batch, columns = right.batch, right.n_offsets.numel()
    if right.k_offsets.numel() != length or g != (groups or batch):
        expected = (batch, right.k_offsets.numel(), columns)
        raise ValueError(f"contraction of {tuple(a.shape)} with {expected}: inner sizes or batches differ")
    if length > _LONGEST:
        raise ValueError(f"contraction of {length} products: a chain has at most {_LONGEST}")
    result = torch.empty(batch, rows, columns, dtype=dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    plan = Plan.of(kernel, batch, rows, columns, length, groups)
    out = right.out or Placing(rows * columns, columns, offsets(columns, 1))
    tensors = (a, right.data, right.k_offsets, right.n_offsets, out.offsets, result)
    rest = (*a.stride(), right.step, out.step, out.row_step, *(t.data_ptr() for t in tensors))
    key = draw.key()

    def count(code: Code, begin: int, end: int) -> bool:
        """Do items begin ... end; whether the results count."""
        flags = ctypes.c_int32(0)
        code.run(begin, end, *code.sizes, *rest, scratch(code.scratch), key, ctypes.byref(flags))
        return flags.value == 0

    split(attempt(plan.general, plan.quick, count), plan.items, plan.enough)
    return result


def attempt(
    general: Callable[[], Code], quick: Code | None, count: Callable[[Code, int, int], bool]
) -> Callable[[int, int], None]:
    """What does items begin ... end: by quick code; where its results do not count, one by one by general code."""

    def work(begin: int, end: int) -> None:
        if quick is None:
            count(general(), begin, end)
        elif not count(quick, begin, end):
            for item in range(begin, end):
                if begin + 1 == end or not count(quick, item, item + 1):
                    count(general(), item, item + 1)

    return work


_KEPT: Final = threading.local()


def scratch(size: int) -> int:
    """The address of this thread's scratch, at least ``size`` bytes that belong to it until it asks again."""
    kept: Tensor | None = getattr(_KEPT, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _KEPT.scratch = torch.empty(size, dtype=torch.uint8)
    return kept.data_ptr()


def _cut(
    general: ContractVariant, first: ContractVariant, batch: int, rows: int, columns: int, threads: int
) -> tuple[int, int]:
    """Rows and columns of an item: as many as the scratch allows, and some items for every thread.

    Both variants work on the same items: an item's columns are whole panels of either.
    """
    tallest = max(first.rows[0], _CHUNK_BYTES // (general.pitch * bytes_of(general.kernel.accumulator)))
    chunk = _even(rows, tallest, first.rows[0])
    unit = max(general.width, first.width)
    panels = _ceiling(columns, unit)
    widest = max(1, _PARKED_BYTES // (chunk * unit * general.parked_bytes))
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


def scratch_of(kernel: Contract, rows: int, columns: int, length: int) -> int:
    """Bytes that one thread packs and parks in for a product of matrices."""
    plan = Plan.of(kernel, 1, rows, columns, length, 1)
    return (plan.quick or plan.general()).scratch
