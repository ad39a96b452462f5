"""Orders of shards (``numerics.orders``): a loop over the shards of a length, and the sums that wait in their tree.

A table of integers has a row for each shard that has elements, ``Shard``'s fields in their order. Kernels of all shapes
read it, so that the code of a kernel serves every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from fxround.numerics.orders import Shard, shards_of
from fxround.runtime.cpu.llvm.loops import I64, at, count


def table_of(length: int, shards: int) -> tuple[int, ...]:
    """The number of rows, and the rows, of a length in this many shards."""
    rows = shards_of(length, shards)
    return (len(rows), *(value for row in rows for value in row))


def levels_of(shards: int) -> int:
    """The level on which the sum of the whole waits: log2 of the number of shards."""
    return shards.bit_length() - 1


@contextmanager
def each_shard(b: ir.IRBuilder, table: Any) -> Iterator[Shard]:
    """Loop over the rows of a table at an address; yields a row's integers, as I64."""
    with count(b, I64(0), b.load(table, typ=I64)) as row:
        yield row_of(b, table, row)


def row_of(b: ir.IRBuilder, table: Any, row: Any) -> Shard:
    """The integers of a row."""
    first = b.add(b.mul(row, I64(len(Shard._fields))), I64(1))
    return Shard(*(b.load(at(b, table, b.add(first, I64(i)), I64), typ=I64) for i in range(len(Shard._fields))))
