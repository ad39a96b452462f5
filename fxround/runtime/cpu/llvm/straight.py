"""Several kernels in one call, one after the other, at addresses that are given for each call.

A plan has the numbers of a frame, which holds the arguments of all kernels, their arrays of addresses and their random
keys. A call copies them, adds addresses, seed and sample where they belong, and calls the kernels. It never writes to
the plan, so that threads can share it.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I32, I64, PTR, at, count, define
from fxround.runtime.cpu.llvm.repeat import MOST, call_kernel, word

# The plan: HEADER; the numbers of the frame; PLACE for each number to which a base is added; KERNEL for each kernel.
HEADER: Final = ("words", "places", "kernels")
# index: of the number in the frame, which becomes the base of this number plus ``offset``.
PLACE: Final = ("index", "base", "offset")
# first: the index of the kernel's first argument in the frame. flag: that of a number that is not zero if the results
# do not count; negative if they always do.
KERNEL: Final = ("function", "count", "begin", "end", "first", "flag")


def build_straight(_: None) -> str:
    """The LLVM text of ``straight(begin, end, plan, bases, frame)`` over kernels.

    Number 0 of the frame is 0 in the end, or one more than the number of a kernel whose results do not count; the
    kernels after it were not called. A call with ``begin`` 0 makes the frame; another one goes on in it.
    """
    module = ir.Module("straight")
    # Addresses as numbers: kernels read the frame through other addresses, which a pointer argument must not be.
    b, a = define(module, "straight", [(name, I64) for name in ("begin", "end", "plan", "bases", "frame")])
    plan, bases, frame = (b.inttoptr(a[name], PTR) for name in ("plan", "bases", "frame"))
    words, places, _kernels = (word(b, plan, I64(i)) for i in range(len(HEADER)))
    first_place = b.add(I64(len(HEADER)), words)
    first_kernel = b.add(first_place, b.mul(places, I64(len(PLACE))))
    with b.if_then(b.icmp_signed("==", a["begin"], I64(0))):
        with count(b, I64(0), words) as i:
            b.store(word(b, plan, b.add(I64(len(HEADER)), i)), at(b, frame, i, I64))
        with count(b, I64(0), places) as i:
            start = b.add(first_place, b.mul(i, I64(len(PLACE))))
            index, base, offset = (word(b, plan, b.add(start, I64(j))) for j in range(len(PLACE)))
            b.store(b.add(word(b, bases, base), offset), at(b, frame, index, I64))
    b.store(I64(0), frame)
    with count(b, a["begin"], a["end"]) as k, b.if_then(b.icmp_signed("==", word(b, frame, I64(0)), I64(0))):
        start = b.add(first_kernel, b.mul(k, I64(len(KERNEL))))
        function, many, begin, end, first, flag = (word(b, plan, b.add(start, I64(j))) for j in range(len(KERNEL)))
        # A kernel with fewer arguments than MOST is called with its own; the frame ends with room for the others.
        arguments = [word(b, frame, b.add(first, I64(j))) for j in range(MOST)]
        call_kernel(b, function, many, [begin, end, *arguments])
        with b.if_then(b.icmp_signed(">=", flag, I64(0))):
            raised = b.icmp_signed("!=", b.load(at(b, frame, flag, I64), typ=I32), I32(0))
            with b.if_then(raised):
                b.store(b.add(k, I64(1)), frame)
    b.ret_void()
    return str(module)
