"""A map over several lists of tensors in one call: the loop over a table of their addresses."""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I64, PTR, call_address, count, define
from fxround.runtime.cpu.llvm.repeat import word

# A row of the table: the address of the addresses of an entry's operands, which those of its results follow and then
# its random key; a range of blocks; and how many elements the entry has.
ROW: Final = ("entry", "begin", "end", "total")


def build_several(_: None) -> str:
    """The LLVM text of ``several(begin, end, table, function, results, key)`` over the rows of a table.

    function    a map whose operands are read at the element's own index, or always at element 0
    results     the bytes from an entry's first address to the addresses of its results
    key         the bytes from there to its random key
    """
    module = ir.Module("several")
    b, a = define(module, "several", [(n, I64) for n in ("begin", "end", "table", "function", "results", "key")])
    table = b.inttoptr(a["table"], PTR)
    with count(b, a["begin"], a["end"]) as i:
        start = b.mul(i, I64(len(ROW)))
        entry, begin, end, total = (word(b, table, b.add(start, I64(j))) for j in range(len(ROW)))
        results, key = b.add(entry, a["results"]), b.add(entry, a["key"])
        # Such a map reads neither sizes nor strides.
        call_address(b, a["function"], [begin, end, total, I64(1), entry, entry, entry, results, key])
    b.ret_void()
    return str(module)
