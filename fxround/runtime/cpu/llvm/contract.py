"""The Contract shape as LLVM: packed rows and panels, register tiles, k ascending.

An item of work is a chunk of rows by some panels of columns. For each block of k it packs its rows of the first
operand, then each panel of the second one, and runs the tiles over the block; between blocks the accumulators are
parked in scratch. Two tables of offsets say where element (k, n) of the second operand is stored, so a matrix of any
strides and the windows of an image are one case.

Parking does not change an accumulator, so every result takes the steps k = 0, 1, 2, ... whatever the blocks, tiles and
threads are. With shards, each shard of k is such a chain, one after the other; what waits in their tree is parked too.
Lanes beyond the last column compute on zeros, and their results are dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from llvmlite import ir

from fxround.numerics.orders import Shard
from fxround.runtime.cpu.llvm.loops import I64, PTR, at, count, define, with_sizes
from fxround.runtime.cpu.llvm.packing import pack_left, pack_right
from fxround.runtime.cpu.llvm.shards import each_shard, levels_of
from fxround.runtime.cpu.llvm.tile import Block, ContractVariant, Item

SIZES: Final = ("rows", "columns", "length", "panels", "chunk", "wide", "block", "groups")
STRIDES: Final = ("a_batch", "a_row", "a_k", "b_batch", "out_batch", "out_row")
POINTERS: Final = ("layout", "a", "b", "b_k", "b_n", "out_n", "out", "scratch", "key", "flags")

# The panels whose results are finished row by row together: a power of two.
_TOGETHER: Final = 8


def build_contract(variant: ContractVariant) -> str:
    """The LLVM text of ``contract(begin, end, POINTERS...)``; the array ``layout`` holds SIZES and STRIDES as int64.

    After these numbers it has the table of the shards of ``length`` (``shards``). Items count (batch, chunk of rows,
    ``wide`` panels), the panels fastest.

        a      element (g, m, k) at g * a_batch + m * a_row + k * a_k, g = batch mod groups (groups 0: g = batch)
        b      element (k, n) at batch * b_batch + b_k[k] + b_n[n]
        out    element (batch, m, n), and its stream, at batch * out_batch + m * out_row + out_n[n]; out_n ascends
        flags  an i32, set to nonzero where the results of a kernel with a rounding direction do not count
    """
    module = ir.Module("contract")
    args = [("begin", I64), ("end", I64), *((n, PTR) for n in POINTERS)]
    b, a = define(module, "contract", args, variant.kernel.direction, variant.kernel.watched)
    a = with_sizes(b, a, SIZES + STRIDES)
    work = Item(b, a, variant)
    table = at(b, a["layout"], I64(len(SIZES + STRIDES)), I64)
    with count(b, a["begin"], a["end"]) as item:
        work.enter(item)
        with each_shard(b, table) as shard:
            work.enter_shard(shard)
            if variant.kernel.streams:
                with count(b, work.first_panel, work.last_panel) as panel:
                    work.enter_panel(panel)
                    work.each_row(partial(work.start_stream, shard=shard.number))
            # A sum of no products still has one block of no steps, which stores the rounded +0.
            some = b.icmp_signed("<", shard.begin, shard.end)
            end = b.select(some, shard.end, b.add(shard.begin, I64(1)))
            with count(b, shard.begin, end, a["block"]) as k:
                # Ascending blocks of ascending steps: each accumulator sees its steps in their order, once.
                _block(work, _block_at(b, a, shard, k, levels_of(variant.kernel.shards)))
    b.ret_void()
    return str(module)


def _block_at(b: ir.IRBuilder, a: dict[str, Any], shard: Shard, k: Any, levels: int) -> Block:
    """The block of a shard that begins at step k; the last one may be short."""
    left = b.sub(shard.end, k)
    ends = b.icmp_signed("<=", left, a["block"])
    last = b.and_(ends, b.icmp_signed("==", shard.last, I64(levels)))
    return Block(k, b.select(ends, left, a["block"]), shard, b.icmp_signed("==", k, shard.begin), ends, last)


def _block(work: Item, block: Block) -> None:
    """Take the block's steps for all results of the item."""
    b, variant = work.b, work.variant
    pack_left(work, block)
    with count(b, work.first_panel, work.last_panel) as panel:
        work.enter_panel(panel)
        pack_right(work, block)
        row = work.first_row
        # The tallest tiles first, then lower ones for the rows that are left; the last height is 1, so none is left
        # over. Tile heights differ in speed alone: a lane does not know its neighbours.
        for rows in variant.rows:
            end = b.add(row, b.mul(b.sdiv(b.sub(work.last_row, row), I64(rows)), I64(rows)))
            with count(b, row, end, rows) as r:
                work.multiply(r, rows, block)
            row = end
        if variant.stores_from_registers:
            with b.if_then(b.and_(block.last, b.not_(work.whole))):
                work.each_row(work.finish_parked)
        else:
            _finish_together(work, panel, block)


def _finish_together(work: Item, panel: Any, block: Block) -> None:
    """After the last of some panels, round and store all of their results row by row: longer runs of memory each."""
    b = work.b
    others, end = b.and_(b.sub(panel, work.first_panel), I64(_TOGETHER - 1)), b.add(panel, I64(1))
    ends = b.or_(b.icmp_signed("==", others, I64(_TOGETHER - 1)), b.icmp_signed("==", end, work.last_panel))
    with (
        b.if_then(b.and_(block.last, ends)),
        count(b, work.first_row, work.last_row) as row,
        count(b, b.sub(panel, others), end) as one,
    ):
        work.enter_panel(one)
        for vector in range(work.variant.vectors):
            work.finish_parked(row, vector)
