"""Several kernels in one call, again and again: the loop over iterations, and over the kernels of an iteration.

A table says which kernels make up an iteration and where their operands are. Between two iterations, numbers of the
table and of the kernels' own arrays grow, so that a kernel finds the next row of a tensor; and each kernel that draws
gets the seed of the iteration.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I64, PTR, at, call_address, count, define

# The table: HEADER; KERNEL for each kernel; the address and the growth of each number; the address of each seed.
HEADER: Final = ("kernels", "growing", "seeds")
# long: whether the kernel has ten arguments after its items; otherwise it has seven.
MOST: Final = 10
FEW: Final = 7
KERNEL: Final = ("function", "long", "begin", "end", *(f"argument{i}" for i in range(MOST)))


def build_repeat(_: None) -> str:
    """The LLVM text of ``repeat(begin, end, table, states)`` over iterations.

    states    (seed, sample) of each iteration, int64; 0 if nothing draws
    """
    module = ir.Module("repeat")
    # Addresses as numbers: the loop changes the table through other addresses, which a pointer argument must not be.
    b, a = define(module, "repeat", [(name, I64) for name in ("begin", "end", "table", "states")])
    table = b.inttoptr(a["table"], PTR)
    states = b.inttoptr(a["states"], PTR)
    kernels, growing, seeds = (_word(b, table, I64(i)) for i in range(len(HEADER)))
    numbers = b.add(I64(len(HEADER)), b.mul(kernels, I64(len(KERNEL))))
    keys = b.add(numbers, b.mul(growing, I64(2)))
    with count(b, a["begin"], a["end"]) as i:
        with count(b, I64(0), seeds) as k:
            seed = _word(b, states, b.mul(i, I64(2)))
            b.store(seed, b.inttoptr(_word(b, table, b.add(keys, k)), PTR), align=4)
        with count(b, I64(0), kernels) as k:
            first = b.add(I64(len(HEADER)), b.mul(k, I64(len(KERNEL))))
            kernel = [_word(b, table, b.add(first, I64(j))) for j in range(len(KERNEL))]
            function, long, *arguments = kernel
            with b.if_else(b.icmp_signed("!=", long, I64(0))) as (ten, seven):
                with ten:
                    call_address(b, function, arguments)
                with seven:
                    call_address(b, function, arguments[: 2 + FEW])
        with count(b, I64(0), growing) as k:
            place = b.add(numbers, b.mul(k, I64(2)))
            number = b.inttoptr(_word(b, table, place), PTR)
            grown = b.add(b.load(number, typ=I64), _word(b, table, b.add(place, I64(1))))
            b.store(grown, number)
    b.ret_void()
    return str(module)


def _word(b: ir.IRBuilder, base: Any, index: Any) -> Any:
    return b.load(at(b, base, index, I64), typ=I64)
