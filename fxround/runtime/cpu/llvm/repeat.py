"""Several kernels in one call, again and again: the loop over iterations, and over the kernels of an iteration.

A table says which kernels make up an iteration and where their operands are. Between two iterations, numbers of the
table and of the kernels' own arrays grow, so that a kernel finds the next row of a tensor; and each kernel that draws
gets the seed of the iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I64, PTR, at, call_address, count, define

# The table: HEADER; KERNEL for each kernel; the address and the growth of each number; the address of each seed.
HEADER: Final = ("kernels", "growing", "seeds")
# The numbers of arguments that kernels have after their items: of reductions, of maps and direct products, of image
# planes, and of packed products.
COUNTS: Final = (4, 7, 9, 10)
MOST: Final = max(COUNTS)
KERNEL: Final = ("function", "count", "begin", "end", *(f"argument{i}" for i in range(MOST)))


def build_repeat(_: None) -> str:
    """The LLVM text of ``repeat(begin, end, table, states)`` over iterations.

    states    (seed, sample) of each iteration, int64; 0 if nothing draws
    """
    module = ir.Module("repeat")
    # Addresses as numbers: the loop changes the table through other addresses, which a pointer argument must not be.
    b, a = define(module, "repeat", [(name, I64) for name in ("begin", "end", "table", "states")])
    table = b.inttoptr(a["table"], PTR)
    states = b.inttoptr(a["states"], PTR)
    kernels, growing, seeds = (word(b, table, I64(i)) for i in range(len(HEADER)))
    numbers = b.add(I64(len(HEADER)), b.mul(kernels, I64(len(KERNEL))))
    keys = b.add(numbers, b.mul(growing, I64(2)))
    with count(b, a["begin"], a["end"]) as i:
        with count(b, I64(0), seeds) as k:
            seed = word(b, states, b.mul(i, I64(2)))
            b.store(seed, b.inttoptr(word(b, table, b.add(keys, k)), PTR), align=4)
        with count(b, I64(0), kernels) as k:
            first = b.add(I64(len(HEADER)), b.mul(k, I64(len(KERNEL))))
            function, many, *arguments = (word(b, table, b.add(first, I64(j))) for j in range(len(KERNEL)))
            call_kernel(b, function, many, arguments)
        with count(b, I64(0), growing) as k:
            place = b.add(numbers, b.mul(k, I64(2)))
            number = b.inttoptr(word(b, table, place), PTR)
            grown = b.add(b.load(number, typ=I64), word(b, table, b.add(place, I64(1))))
            b.store(grown, number)
    b.ret_void()
    return str(module)


def call_kernel(b: ir.IRBuilder, function: Any, many: Any, arguments: Sequence[Any]) -> None:
    """Call a kernel with its range of items and as many of the further arguments as it has, one of ``COUNTS``."""
    for number in COUNTS:
        with b.if_then(b.icmp_signed("==", many, I64(number))):
            call_address(b, function, arguments[: 2 + number])


def word(b: ir.IRBuilder, base: Any, index: Any) -> Any:
    """The number at an index of an array of int64."""
    return b.load(at(b, base, index, I64), typ=I64)
