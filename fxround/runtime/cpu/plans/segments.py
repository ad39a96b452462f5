"""Segments: consecutive kernels in one call of machine code.

A ``Segment`` is passed the addresses of what it reads and of new results; values between its kernels are in memory of
the call's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.llvm.repeat import MOST
from fxround.runtime.cpu.llvm.straight import build_straight
from fxround.runtime.cpu.plans.launches import Flag, KeyAddress, Launch, Space, Value
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.draw import Draw

_STRAIGHT: Final = signature(2, 3)
_LINE: Final = 64
# The bytes of a random key before the number of a node.
_STATE: Final = 12
# The bases of a frame: seed, sample, the frame itself, the memory after it, then what is outside.
_SEED, _SAMPLE, _FRAME, _MEMORY, _OUTSIDE = range(5)
_NO_DRAW: Final = Draw()


class Segment:
    """Launches in one call of machine code, with values between them in memory of the call's own."""

    def __init__(self, launches: Sequence[Launch], outside: Sequence[int], inside: Sequence[Value]) -> None:
        """outside: the homes whose addresses a call gives; inside: the other homes, as row-major values."""
        self._words, self._places = [0], list[tuple[int, int, int]]()
        self._bases = {home: (_OUTSIDE + i, 0) for i, home in enumerate(outside)}
        end = 0
        for value in inside:
            self._bases[value.home] = (_MEMORY, end)
            end += _aligned(value.tensor.nbytes)
        spaces = [arg.size for launch in launches for arg in launch.arguments if isinstance(arg, Space)]
        self._space = end
        firsts = [self._arguments(launch) for launch in launches]
        kernels = [self._kernel(*pair) for pair in zip(launches, firsts, strict=True)]
        self._count = len(kernels)
        # A plan outlives the call that it was made in: it holds what its addresses are of, and no value of the call.
        keys = [arg.words for launch in launches for arg in launch.arguments if isinstance(arg, KeyAddress)]
        self._held = *((launch.function, launch.held) for launch in launches), keys
        # By the number of a launch: the contraction that may be done again, and where its arguments are in the frame.
        pairs = zip(launches, firsts, strict=True)
        self._works = {
            i: (launch.work, first, len(launch.arguments)) for i, (launch, first) in enumerate(pairs) if launch.work
        }
        # A kernel with few arguments is called with numbers after them that it does not take.
        self._words += [0] * MOST
        self._frame = _aligned(8 * len(self._words))
        self._size = self._frame + end + _aligned(max(spaces, default=0)) + _LINE
        flat = [number for row in (*self._places, *kernels) for number in row]
        self._plan = array([len(self._words), len(self._places), len(kernels), *self._words, *flat])
        # What a call gives: seed, sample, the frame, the memory after it, and the addresses of what is outside.
        self._given = Struct(f"{_OUTSIDE + len(outside)}q").pack
        self._at = ctypes.addressof(self._plan)
        self._straight = native("straight", build_straight, None, "straight", _STRAIGHT)

    def run(self, outside: Sequence[Tensor], rng: Tensor | None) -> None:
        """Run all launches; outside: the tensors of the homes outside. rng: None if nothing draws."""
        # A tensor of the call, not of the thread: a signal handler may call the model, too.
        space = torch.empty(self._size, dtype=torch.uint8)
        at = space.data_ptr()
        draw = _NO_DRAW if rng is None else Draw.of(rng, 0)
        bases = self._given(draw.seed, draw.sample, at, at + self._frame, *addresses(outside))
        plan, count = self._at, self._count
        self._straight(0, count, plan, bases, at)
        if not self._works:
            return
        status = ctypes.c_int64.from_address(at)
        while done := status.value:
            self._again(done - 1, at)
            self._straight(done, count, plan, bases, at)

    def _again(self, number: int, at: int) -> None:
        """Do a contraction again whose quick results do not count."""
        work, first, arguments = self._works[number]
        words = (ctypes.c_int64 * arguments).from_address(at + 8 * first)
        *pointers, _space, key, _flag = words[1:]
        work.run(tuple(pointers), (ctypes.c_uint32 * 4).from_address(key) if key else None)

    def _kernel(self, launch: Launch, first: int) -> tuple[int, ...]:
        """A launch as the plan has it: ``llvm.straight.KERNEL``."""
        flag = -1
        if launch.work is not None:
            place = next(i for i, arg in enumerate(launch.arguments) if isinstance(arg, Flag))
            index = first + place
            flag = next(offset // 8 for at, base, offset in self._places if at == index and base == _FRAME)
        return address_of(launch.function), len(launch.arguments), 0, launch.items, first, flag

    def _arguments(self, launch: Launch) -> int:
        """Put what a launch needs into the frame; returns the index of its first argument."""
        arguments = [self._argument(argument) for argument in launch.arguments]
        first = len(self._words)
        for argument in arguments:
            self._put(argument)
        return first

    def _argument(self, argument: Any) -> int | tuple[int, int]:
        """An argument: a number, or a base and what is added to it. Its arrays are put into the frame."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, Value):
            base, start = self._bases[argument.home]
            return base, start + argument.shift
        if isinstance(argument, Space):
            return _MEMORY, self._space
        if isinstance(argument, KeyAddress) and not argument.draws:
            return ctypes.addressof(argument.words)
        index = len(self._words)
        if isinstance(argument, tuple):
            for value in [self._argument(value) for value in argument]:
                self._put(value)
        elif isinstance(argument, KeyAddress):
            # Seed, 64 bits; sample, 32 bits, and the number of a node; the numbers of further nodes.
            nodes = bytes(argument.words)[_STATE:] + bytes(8)
            self._put((_SEED, 0))
            self._put((_SAMPLE, int.from_bytes(nodes[:4], "little") << 32))
            for i in range(4, len(nodes) - 7, 8):
                self._put(int.from_bytes(nodes[i : i + 8], "little"))
        else:
            assert isinstance(argument, Flag)
            self._put(0)
        return _FRAME, 8 * index

    def _put(self, number: int | tuple[int, int]) -> None:
        """Append a number to the frame."""
        if isinstance(number, int):
            self._words.append(_signed(number))
        else:
            base, offset = number
            self._places.append((len(self._words), base, _signed(offset)))
            self._words.append(0)


def _signed(number: int) -> int:
    """64 bits as a signed number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _aligned(size: int) -> int:
    """A size rounded up to whole cache lines."""
    return -(-size // _LINE) * _LINE
