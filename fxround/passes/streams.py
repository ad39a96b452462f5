"""The numbers of random streams: which roundings and faults of a graph share random bits, and which do not.

A random bit is a function of (seed, sample, number, element, draw) (``numerics.arithmetic.randomness``), so two nodes
with different numbers have independent bits. The numbers are 32 bits wide, and this file alone divides them::

    from            a value of number n draws as
    0               n: its rounding. n + 1: the rounding after an operator that draws itself; the test of a while_loop
    2^28            2^28 + 8 n + i: its rounding number i as an operand, for i below 16; 2^25 more for the next 16
    2^30            2^30 + 4 n + f: its fault number f
    5 * 2^29        the same for faults of the scale of its tensor, if its format is scaled
    3 * 2^29        3 * 2^29 + 4 (s - 2^28) + f: fault number f of an operand that draws from the stream s
    2^31            as from 2^30, for faults of the scales of its blocks
    6 * 2^29        as from 3 * 2^29, for faults of the scale of the operand's tensor
    7 * 2^29        as from 3 * 2^29, for faults of the scales of the operand's blocks

The numbers of values are even and below 2^22, so that a value has room for 64 roundings as an operand, and none of
these ranges meets the next. Values that an operator moves, such as those of a concatenation, have the numbers from 2^21
on: how many of them a graph has does not change the numbers of what it computes, and the reverse. Files of graphs and
published results depend on all of this.

What shares bits:

- Readers of a value that round it in the same way as an operand, forward and backward: they see the same bits. To a
  scaled format the operand itself is rounded and not the value that it is a view of, so that the word of an element is
  that of its position in the operand: two slices of one value, rounded in the same way, draw the same words for their
  first elements.
- A value that is computed again for a second derivative (``graph.site.REPEATED``): it has the number of the first time.
- The elements of an expanded tensor: movement draws nothing, and an operand is rounded before it is expanded.

What does not:

- Two roundings of one value as an operand that differ, and two faults.
- The steps of a contraction. If each needs one bit, 32 steps share a word (``kernels.kinds.Contract.coins``), but each
  has its own bit of it. Neighbouring elements of a map share outputs of the generator in the same way.
- The iterations of a loop: each has a seed of its own, and a body's values are numbered from 0 under it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from fxround.errors import UnsupportedRounding
from fxround.graph.site import Site

# What flips: the value or its elements, the scales of its blocks, or the scale of its tensor.
Part = Literal["elements", "scales", "tensor"]

_OPERANDS: Final = 1 << 28
_FAULTS: Final[dict[Part, int]] = {"elements": 1 << 30, "scales": 1 << 31, "tensor": 5 << 29}
_OPERAND_FAULTS: Final[dict[Part, int]] = {"elements": 3 << 29, "scales": 7 << 29, "tensor": 6 << 29}
_NUMBERS: Final = 1 << 22
_MOVED: Final = _NUMBERS // 2
# Eight times the difference of two numbers, which is even.
_ROW: Final = 16
_ROUNDINGS: Final = 64


def of_values(taken: Iterable[int], count: int, moved: bool = False) -> range:
    """Return the numbers of ``count`` values, which are even and follow those that are ``taken``.

    moved: whether operators move the values, or compute them.

    Raises UnsupportedRounding if there are too many values.
    """
    begin, end = (_MOVED, _NUMBERS) if moved else (0, _MOVED)
    first = 2 + max((number for number in taken if begin <= number < end), default=begin - 2)
    if first + 2 * count > end:
        raise UnsupportedRounding(
            f"the graph has {(first - begin) // 2 + count} values{' that are moved' * moved}, and there are random "
            f"streams for {(end - begin) // 2}; compile parts of the model on their own"
        )
    return range(first, first + 2 * count, 2)


def second(number: int) -> int:
    """Return the stream of a value's second rounding, after an operator that draws from the first one."""
    return number + 1


def of_operand(source: Site, index: int) -> int:
    """Return the stream of a value's rounding number ``index`` as an operand, from 0; source: the value's Site.

    Raises UnsupportedRounding if the value is rounded in too many different ways.
    """
    if index >= _ROUNDINGS:
        raise UnsupportedRounding(
            f"{source}: its value is rounded in more than {_ROUNDINGS} different ways as an operand, and each "
            "has random bits of its own; let several rules share a rounding"
        )
    row, column = divmod(index, _ROW)
    return _OPERANDS + 8 * _NUMBERS * row + 8 * source.number + column


def of_fault(stream: int, index: int, part: Part = "elements") -> int:
    """Return the stream of fault number ``index``, from 0 to 3, of what a value or an operand of this stream holds."""
    first = _OPERAND_FAULTS[part] - 4 * _OPERANDS if stream >= _OPERANDS else _FAULTS[part]
    return first + 4 * stream + index


def is_moved(stream: int) -> bool:
    """Whether a stream belongs to a value that an operator moves, alone or as an operand."""
    return (stream - _OPERANDS) // 8 % _NUMBERS >= _MOVED if stream >= _OPERANDS else stream >= _MOVED
