"""Lists of launches: calls of kernels that one call of machine code makes, in one or in many steps.

A ``Launch`` has everything that a call of a kernel needs, with homes in place of addresses. A ``LaunchTable`` is a list
of them, which is passed the addresses of homes; other values are in memory of the call's own. Whatever runs several
kernels at once is such a table: consecutive kernels of a small graph (one step), a chain over rows (a step for a range
of rows), the body of a loop, and a map over the parameters of an optimizer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple

import torch

from fxround.errors import VerificationError
from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.contraction import Work
from fxround.runtime.cpu.llvm.launches import COUNTS, FRAME, MOST, STATUS, build_launches
from fxround.runtime.cpu.pointwise import MapCall, array
from fxround.runtime.cpu.reduction import Reduction
from fxround.runtime.cpu.threads import scratch, spread
from fxround.runtime.draw import Draw

_LAUNCHES: Final = signature(3, 3)
_LINE: Final = 64
_WORD: Final = 8
# Steps between which a signal is handled.
_AT_ONCE: Final = 4096
# The bytes of (seed, sample), and those of a random key before the number of a node.
_STATE: Final = 16
_BEFORE_NODE: Final = 12
# The bases: the frame, nothing, seed, sample, then what is outside. Memory of the call's own is behind the frame.
_NOTHING, _SEED, _SAMPLE, _OUTSIDE = range(FRAME + 1, FRAME + 5)
_MEMORY: Final = -1
# More items than a kernel has.
ALL: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Address:
    """An argument: an address.

    home      the number of the memory that it is in, from which ``shift`` bytes lead to it
    growth    the bytes by which it grows from one step to the next
    """

    home: int
    shift: int = 0
    growth: int = 0


@dataclass(frozen=True)
class Read:
    """An argument: the number that is at an address when a step begins."""

    at: Address


@dataclass(frozen=True)
class Space:
    """An argument: the address of ``size`` bytes, to which a kernel may write while it runs."""

    size: int


@dataclass(frozen=True)
class KeyAddress:
    """An argument: the address of a random key, of which seed and sample are those of a call."""

    words: Any
    draws: bool


@dataclass(frozen=True)
class Flag:
    """An argument: the address of a number that is not zero after the call if the results do not count."""


@dataclass(frozen=True)
class Launch:
    """A call of machine code for items 0 ... ``items``.

    arguments   what follows the range of items: numbers, and what stands for addresses; a tuple stands for an array of
                addresses
    held        what the numbers are addresses of
    work        the contraction that does the items again if the results do not count
    share       the items of a step, if each step does some of them
    span        the range of items of a step, if they are read
    """

    function: Any
    items: int
    arguments: tuple[int | Address | Read | tuple[int | Address | KeyAddress, ...] | Space | KeyAddress | Flag, ...]
    held: tuple[Any, ...]
    work: Work | None = None
    share: int | None = None
    span: tuple[Read, Read] | None = None


def map_launch(
    call: MapCall,
    operands: Sequence[int | Address],
    results: Sequence[int | Address],
    key: KeyAddress,
    share: int | None = None,
) -> Launch:
    """Return the launch of a map."""
    at = ctypes.addressof
    arguments = call.total, call.dims, at(call.sizes), tuple(operands), at(call.steps), tuple(results), key
    return Launch(call.function, call.blocks, arguments, (call,), share=share)


def reduction_launch(
    reduction: Reduction, x: int | Address, result: int | Address, key: KeyAddress, share: int | None = None
) -> Launch:
    """Return the launch of a reduction."""
    arguments = ctypes.addressof(reduction.lines), x, result, key
    return Launch(reduction.function, reduction.items, arguments, (reduction,), share=share)


class LaunchTable:
    """Launches in one call of machine code. All calls and threads share its plan, which holds no value of a call."""

    def __init__(
        self, launches: Sequence[Launch], outside: Sequence[int], memory: Mapping[int, int], states: int | None = None
    ) -> None:
        """Write the plan.

        outside: the homes whose addresses a call gives. memory: the bytes of the other homes, which are in memory of
        the call's own. states: the home of (seed, sample) of each step, int64; None if the seed is that of the call.
        """
        frame = _Frame(outside, memory, states)
        firsts = [frame.add(launch) for launch in launches]
        kernels = [
            (address_of(launch.function), len(launch.arguments), launch.items, first, frame.flags.get(first, -1))
            for launch, first in zip(launches, firsts, strict=True)
        ]
        self._plan = array(frame.plan(kernels))
        self._at = ctypes.addressof(self._plan)
        arguments = [arg for launch in launches for arg in launch.arguments]
        several = [part for arg in arguments if isinstance(arg, tuple) for part in arg]
        keys = [arg.words for arg in (*arguments, *several) if isinstance(arg, KeyAddress)]
        self._held = *((launch.function, launch.held) for launch in launches), keys
        # By the number of a launch: the contraction that may be done again, and where its arguments are in the frame.
        self._works = {
            i: (launch.work, first + 2, len(launch.arguments))
            for i, (launch, first) in enumerate(zip(launches, firsts, strict=True))
            if launch.work
        }
        spaces = [arg.size for launch in launches for arg in launch.arguments if isinstance(arg, Space)]
        self._size = frame.size() + frame.memory + _aligned(max(spaces, default=0)) + _LINE
        self._bases = Struct(f"{_OUTSIDE + len(outside)}q").pack
        self._run = native("launches", build_launches, None, "launches", _LAUNCHES)

    def run(self, outside: Sequence[int], draw: Draw, steps: int = 1) -> None:
        """Run all launches for each step. outside: the addresses of the homes outside."""
        # A tensor of the call, not of the thread: a signal handler may call the model, too.
        space = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        at = space.data_ptr()
        plan, bases = self._at, self._bases(0, 0, draw.seed, draw.sample, *outside)
        for begin in range(0, steps, _AT_ONCE):
            end = min(steps, begin + _AT_ONCE)
            self._run(begin, end, 0, plan, bases, at)
            if not self._works:
                continue
            status, step = (ctypes.c_int64.from_address(at + _WORD * i) for i in range(len(STATUS)))
            while done := status.value:
                self._again(done - 1, at)
                self._run(step.value, end, done, plan, bases, at)

    def spread(self, outside: Sequence[int], draw: Draw, steps: int, pieces: int) -> None:
        """Run all launches for each step; threads share ``pieces`` pieces of the steps.

        Raises VerificationError if a product may have to be done again, for which the steps of a thread would stop.
        """
        if self._works:
            raise VerificationError("threads share the steps of a product whose results may not count; expected none")
        bases = array((0, 0, draw.seed, draw.sample, *outside))
        # Memory of the thread: one call of machine code writes all of it before it reads it.
        space, grows = scratch(self._size, pieces > 1)
        arguments = 0, self._at, ctypes.addressof(bases), space.data_ptr()
        spread(self._run, range(steps), pieces, arguments, {len(arguments) - 1: grows})

    def _again(self, number: int, at: int) -> None:
        """Do a contraction again whose quick results do not count."""
        work, first, arguments = self._works[number]
        words = (ctypes.c_int64 * arguments).from_address(at + _WORD * first)
        *pointers, _space, key, _flag = words[1:]
        work.run(tuple(pointers), (ctypes.c_uint32 * 4).from_address(key) if key else None)


class _Place(NamedTuple):
    """A number that a call fills in: an address, or what is read from it."""

    base: int
    offset: int = 0
    growth: int = 0
    reads: bool = False


class _Frame:
    """The numbers of a frame while launches are put into it.

    memory    the bytes of the homes in memory of the call's own
    flags     by the index of a launch's range of items, the index of the number that says that its results do not count
    """

    def __init__(self, outside: Sequence[int], memory: Mapping[int, int], states: int | None) -> None:
        self._words = [0] * len(STATUS)
        self._places = list[tuple[int, _Place]]()
        self._homes = {home: _Place(_OUTSIDE + i) for i, home in enumerate(outside)}
        self._states = states
        self.memory = 0
        self.flags: dict[int, int] = {}
        if both := self._homes.keys() & memory.keys():
            raise VerificationError(f"homes {sorted(both)} are given by the call, and in memory of its own")
        for home, size in memory.items():
            self._homes[home] = _Place(_MEMORY, self.memory)
            self.memory += _aligned(size)

    def add(self, launch: Launch) -> int:
        """Put what a launch needs into the frame; returns the index of its range of items."""
        if len(launch.arguments) not in COUNTS:
            raise VerificationError(f"a launch has {len(launch.arguments)} arguments; expected one of {COUNTS}")
        numbers = [self._number(argument) for argument in launch.arguments]
        first = len(self._words)
        for number in (*self._span(launch), *numbers):
            self._put(number)
        if launch.work is not None:
            places = [n for n, arg in zip(numbers, launch.arguments, strict=True) if isinstance(arg, Flag)]
            (flag,) = (place for place in places if isinstance(place, _Place))
            self.flags[first] = flag.offset // _WORD
        return first

    def size(self) -> int:
        """Return the bytes of the frame. A kernel of few arguments is called with numbers after them."""
        return _aligned(_WORD * (len(self._words) + MOST))

    def plan(self, kernels: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers that ``llvm.launches`` reads. kernels: ``LAUNCH`` of each launch."""
        rows = [
            (i, FRAME, self.size() + p.offset, p.growth) if p.base == _MEMORY else (i, p.base, p.offset, p.growth)
            for i, p in sorted(self._places, key=lambda entry: (entry[1].reads, not entry[1].growth))
        ]
        places = sum(not place.reads for _, place in self._places)
        growing = sum(bool(place.growth) and not place.reads for _, place in self._places)
        words = [*self._words, *[0] * MOST]
        numbers = [number for row in (*rows, *kernels) for number in row]
        return [len(words), growing, places, len(rows) - places, len(kernels), *words, *map(_signed, numbers)]

    def _span(self, launch: Launch) -> Sequence[int | _Place]:
        if launch.span is not None:
            return [self._number(read) for read in launch.span]
        if launch.share is not None:
            return _Place(_NOTHING, 0, launch.share), _Place(_NOTHING, launch.share, launch.share)
        return 0, launch.items

    def _number(self, argument: Any) -> int | _Place:
        """What the frame has for an argument. Its arrays are put into the frame."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, Address):
            home = self._homes[argument.home]
            return _Place(home.base, home.offset + argument.shift, argument.growth)
        if isinstance(argument, Read):
            home = self._homes[argument.at.home]
            return _Place(home.base, home.offset + argument.at.shift, argument.at.growth, reads=True)
        if isinstance(argument, Space):
            return _Place(_MEMORY, self.memory)
        if isinstance(argument, KeyAddress) and not argument.draws:
            return ctypes.addressof(argument.words)
        numbers = [self._number(part) for part in argument] if isinstance(argument, tuple) else []
        index = len(self._words)
        if isinstance(argument, tuple):
            for number in numbers:
                self._put(number)
        elif isinstance(argument, KeyAddress):
            self._put_key(bytes(argument.words)[_BEFORE_NODE:] + bytes(8))
        else:
            assert isinstance(argument, Flag)
            self._put(0)
        return _Place(FRAME, _WORD * index)

    def _put_key(self, nodes: bytes) -> None:
        """Append a random key: seed, 64 bits; sample, 32 bits, and the number of a node; those of further nodes."""
        seed = _Place(_SEED) if self._states is None else self._number(Read(Address(self._states, growth=_STATE)))
        self._put(seed)
        self._put(_Place(_SAMPLE, int.from_bytes(nodes[:4], "little") << 32))
        for i in range(4, len(nodes) - 7, 8):
            self._put(int.from_bytes(nodes[i : i + 8], "little"))

    def _put(self, number: int | _Place) -> None:
        """Append a number to the frame."""
        if isinstance(number, _Place):
            self._places.append((len(self._words), number))
            number = 0
        self._words.append(_signed(number))


def _signed(number: int) -> int:
    """64 bits as a signed number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _aligned(size: int) -> int:
    """A size rounded up to whole cache lines."""
    return -(-size // _LINE) * _LINE
