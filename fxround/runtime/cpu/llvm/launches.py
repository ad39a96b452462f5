"""The loop over a list of launches: kernels are called one after the other, for every step.

A plan has the numbers of a frame, which holds the arguments of all launches, their arrays of addresses and their random
keys. A call copies them into memory of its own. Before each step it fills in what depends on the call or on the step:
addresses, which may grow from step to step, and numbers that are read from memory. Then it calls the kernels. It never
writes to the plan, so that several threads can share one, each with some of the steps and a frame of its own.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I32, I64, PTR, at, call_address, count, define

# The plan: HEADER; the numbers of the frame; PLACE for each number that is an address, those that grow first; PLACE for
# each number that is read from an address; LAUNCH for each launch.
HEADER: Final = ("words", "growing", "places", "reads", "launches")
# index: of the number in the frame. The address is the base of this number, plus ``offset``, plus ``growth`` times the
# step.
PLACE: Final = ("index", "base", "offset", "growth")
# items: no item from this one on is computed. first: the index of the range of items in the frame, which the arguments
# follow. flag: the index of a number that is not zero if the results do not count; negative if they always do.
LAUNCH: Final = ("function", "count", "items", "first", "flag")
# The base whose value is the address of the frame.
FRAME: Final = 0
# The first numbers of the frame. status: one more than the number of a launch whose results do not count, in this step;
# nothing was called after it. 0 in the end.
STATUS: Final = ("status", "step")
# The numbers of arguments that kernels have after their items: of reductions, of chains over rows, of maps and direct
# products, of image planes, and of packed products.
COUNTS: Final = (4, 5, 7, 9, 10)
MOST: Final = max(COUNTS)


def build_launches(_: None) -> str:
    """The LLVM text of ``launches(begin, end, first, plan, bases, frame)`` over steps.

    first: 0 to make a frame; otherwise the call goes on in the frame, in step ``begin``, from this launch on.
    """
    module = ir.Module("launches")
    # Addresses as numbers: kernels read the frame through other addresses, which a pointer argument must not be.
    names = ("begin", "end", "first", "plan", "bases", "frame")
    b, a = define(module, "launches", [(name, I64) for name in names])
    plan, bases, frame = (b.inttoptr(a[name], PTR) for name in names[3:])
    words, growing, places, reads, launches = (_word(b, plan, I64(i)) for i in range(len(HEADER)))
    first_place = b.add(I64(len(HEADER)), words)
    first_read = b.add(first_place, b.mul(places, I64(len(PLACE))))
    first_launch = b.add(first_read, b.mul(reads, I64(len(PLACE))))
    fresh = b.icmp_signed("==", a["first"], I64(0))
    with b.if_then(fresh), count(b, I64(0), words) as i:
        b.store(_word(b, plan, b.add(I64(len(HEADER)), i)), at(b, frame, i, I64))
    b.store(I64(0), frame)

    def address(start: Any, step: Any) -> tuple[Any, Any]:
        """Where the address that a PLACE describes belongs, and the address."""
        index, base, offset, growth = (_word(b, plan, b.add(start, I64(j))) for j in range(len(PLACE)))
        is_frame = b.icmp_signed("==", base, I64(FRAME))
        begin = b.select(is_frame, a["frame"], _word(b, bases, base))
        return at(b, frame, index, I64), b.add(b.add(begin, offset), b.mul(growth, step))

    with count(b, a["begin"], a["end"]) as step, b.if_then(b.icmp_signed("==", _word(b, frame, I64(0)), I64(0))):
        is_first = b.icmp_signed("==", step, a["begin"])
        with b.if_then(b.or_(fresh, b.not_(is_first))):
            with count(b, I64(0), b.select(is_first, places, growing)) as i:
                where, value = address(b.add(first_place, b.mul(i, I64(len(PLACE)))), step)
                b.store(value, where)
            with count(b, I64(0), reads) as i:
                where, value = address(b.add(first_read, b.mul(i, I64(len(PLACE)))), step)
                b.store(b.load(b.inttoptr(value, PTR), typ=I64), where)
        begin = b.select(is_first, a["first"], I64(0))
        with count(b, begin, launches) as k, b.if_then(b.icmp_signed("==", _word(b, frame, I64(0)), I64(0))):
            start = b.add(first_launch, b.mul(k, I64(len(LAUNCH))))
            function, many, items, first, flag = (_word(b, plan, b.add(start, I64(j))) for j in range(len(LAUNCH)))
            # A kernel with fewer arguments than MOST is called with its own; the frame ends with room for the others.
            lower, upper, *arguments = (_word(b, frame, b.add(first, I64(j))) for j in range(2 + MOST))
            upper = b.select(b.icmp_signed("<", items, upper), items, upper)
            flagged = b.icmp_signed(">=", flag, I64(0))
            with b.if_then(flagged):
                b.store(I64(0), at(b, frame, flag, I64))
            for number in COUNTS:
                with b.if_then(b.icmp_signed("==", many, I64(number))):
                    call_address(b, function, [lower, upper, *arguments[:number]])
            with b.if_then(flagged):
                raised = b.icmp_signed("!=", b.load(at(b, frame, flag, I64), typ=I32), I32(0))
                with b.if_then(raised):
                    b.store(b.add(k, I64(1)), frame)
                    b.store(step, at(b, frame, I64(1), I64))
    b.ret_void()
    return str(module)


def _word(b: ir.IRBuilder, base: Any, index: Any) -> Any:
    """The number at an index of an array of int64."""
    return b.load(at(b, base, index, I64), typ=I64)
