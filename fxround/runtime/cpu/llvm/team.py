"""The loop of one thread of a team: it takes pieces of work, one after the other, until none is left.

A task is an array of 64-bit integers: counters that all threads share, the kernel's address, and its arguments. Which
thread takes which piece depends on timing; what a piece writes does not. A counter is read and advanced by one atomic
operation, so every piece is taken exactly once. The kernel is called by the platform's convention for integers and
pointers, which are one class of arguments on 64-bit targets.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I64, PTR, at, call_address

# next: the number of the next piece. joined: how many threads have begun. first, items: the first item and how many.
HEADER: Final = ("next", "joined", "pieces", "first", "items", "function")


def build_team(arguments: int) -> str:
    """The LLVM text of ``team(task)`` for kernels ``f(begin, end, ...)`` with ``arguments`` further arguments.

    The task holds HEADER, then three times ``arguments`` numbers: the arguments, what each grows by from thread to
    thread, and what each grows by from piece to piece.
    """
    module = ir.Module("team")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), "team")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    (task,) = function.args

    def word(index: int) -> Any:
        return at(b, task, I64(index), I64)

    def header(name: str) -> Any:
        return b.load(word(HEADER.index(name)), typ=I64)

    def advanced(name: str) -> Any:
        return b.atomic_rmw("add", word(HEADER.index(name)), I64(1), "acq_rel")

    pieces, first, items, address = (header(name) for name in ("pieces", "first", "items", "function"))
    given, by_member, by_piece = (
        [b.load(word(len(HEADER) + kind * arguments + i), typ=I64) for i in range(arguments)] for kind in range(3)
    )
    member = advanced("joined")
    own = [b.add(value, b.mul(member, step)) for value, step in zip(given, by_member, strict=True)]
    take, work, done = (function.append_basic_block(name) for name in ("take", "work", "done"))
    b.branch(take)
    b.position_at_end(take)
    piece = advanced("next")
    b.cbranch(b.icmp_signed("<", piece, pieces), work, done)
    b.position_at_end(work)
    begin, end = (b.add(first, b.sdiv(b.mul(items, n), pieces)) for n in (piece, b.add(piece, I64(1))))
    call_address(b, address, [begin, end, *(b.add(o, b.mul(piece, s)) for o, s in zip(own, by_piece, strict=True))])
    b.branch(take)
    b.position_at_end(done)
    b.ret_void()
    return str(module)
