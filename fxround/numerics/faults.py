"""Soft errors: bits of values that flip by chance, in the encoding of the value's own format.

A fault has a field of the encoding (``formats.encodings``) and a probability p. With this probability one bit of the
field flips, and every bit of the field is as likely as any other. A field that begins with ``scale.`` is one of the
encoding of the scale that a block of elements shares, and one that begins with ``tensor.`` is one of the scale of the
tensor.

The random word r of an element (``arithmetic.randomness``) decides both: bit i of the n bits of the field flips if
r div q = i, with q = round(2^32 p / n). The probability is therefore n q / 2^32, and nothing else of the run matters:
not the threads, the instruction set, or the order. ``specification.exact_faults`` is the specification, and
``arithmetic.flipping`` the kernel.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from fxround.errors import shown
from fxround.numerics.formats.encodings import FIELDS, Encoding

# Before the field of a scale.
_SCALE: Final = "scale."
_TENSOR: Final = "tensor."
_OPERATOR: Final = re.compile(r"flip_([0-9]{1,2})_([0-9]{1,2})_([0-9]{1,10})")
_WORDS: Final = 1 << 32


@dataclass(frozen=True)
class Fault:
    """With this probability, from 0 to 1, one bit of the field flips. Raises ValueError for anything else."""

    field: str
    probability: float

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or self.part not in FIELDS:
            raise ValueError(
                f"no field is named {shown(self.field)}; expected {', '.join(FIELDS)}, or scale.any and so on for the "
                "scales of blocks, or tensor.any and so on for the scale of the tensor in a format as nvfp4"
            )
        if not 0 <= self.probability <= 1:
            raise ValueError(f"{self.field}: the probability is {self.probability}; expected 0 to 1")

    def __str__(self) -> str:
        return f"{self.field}:{self.probability!r}"

    @property
    def of_scale(self) -> bool:
        """Whether the field is one of the scales of blocks, and not one of the elements."""
        return self.field.startswith(_SCALE)

    @property
    def of_tensor(self) -> bool:
        """Whether the field is one of the scale of the tensor, to which the scales of blocks are relative."""
        return self.field.startswith(_TENSOR)

    @property
    def part(self) -> str:
        """The field's name in its own encoding."""
        return _part(self.field)


@dataclass(frozen=True)
class Faults:
    """The faults of a value, which happen one after the other. ``Faults.parse(str(f)) == f``.

    Raises ValueError if two of them have the same field.

    Example::

        Faults.parse("significand:1e-6 sign:1e-9")
    """

    faults: tuple[Fault, ...]

    def __post_init__(self) -> None:
        if len({fault.field for fault in self.faults}) < len(self.faults):
            raise ValueError(f"{shown(str(self))}: expected faults like 'significand:1e-6 sign:1e-9', each field once")

    def __str__(self) -> str:
        return " ".join(map(str, self.faults))

    @property
    def possible(self) -> Faults | None:
        """The faults of a probability above zero; None if there are none."""
        faults = tuple(fault for fault in self.faults if fault.probability)
        return Faults(faults) if faults else None

    @property
    def of_scales(self) -> tuple[Fault, ...]:
        """The faults of the scales of blocks."""
        return tuple(fault for fault in self.faults if fault.of_scale)

    @property
    def of_tensors(self) -> tuple[Fault, ...]:
        """The faults of the scale of the tensor."""
        return tuple(fault for fault in self.faults if fault.of_tensor)

    @property
    def of_elements(self) -> tuple[Fault, ...]:
        """The faults of elements, or of the value itself."""
        return tuple(fault for fault in self.faults if not (fault.of_scale or fault.of_tensor))

    @staticmethod
    def parse(text: Any) -> Faults:
        """Parse ``field:probability``, several separated by spaces, each field once. Raises ValueError."""
        if isinstance(text, Faults):
            return text
        words = text.split() if isinstance(text, str) else []
        faults = []
        for word in words:
            field, _, number = word.partition(":")
            if _part(field) in FIELDS and not _is_number(number):
                raise ValueError(f"{shown(number)} is no probability; expected {field}:1e-6")
            faults.append(Fault(field, float(number) if _is_number(number) else math.nan))
        if not faults:
            raise ValueError(f"{shown(text)}: expected faults like 'significand:1e-6 sign:1e-9', each field once")
        return Faults(tuple(faults))


def _part(field: str) -> str:
    """Return the name of a field without what says whose it is."""
    return field.removeprefix(_SCALE if field.startswith(_SCALE) else _TENSOR)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def words_per_bit(fault: Fault, count: int) -> int:
    """Return q, the number of random words for which one bit of a field of ``count`` bits flips.

    Raises ValueError for a probability that is not zero and smaller than half of count / 2^32.
    """
    q = round(Fraction(fault.probability) * _WORDS / count)
    if q == 0 and fault.probability > 0:
        raise ValueError(
            f"{fault}: a field of {count} bits can flip with probability {count * 2.0**-32:.3g}, the smallest, or 0"
        )
    return q


def flip_operator(fault: Fault, encoding: Encoding) -> str:
    """Return the operator ``flip_first_count_q`` of a program; raises what ``words_per_bit`` and ``Encoding`` raise."""
    first, count = encoding.field(fault.part)
    return f"flip_{first}_{count}_{words_per_bit(fault, count)}"


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Return the lowest bit, the number of bits and q of an operator; None for an operator that is no fault."""
    match = _OPERATOR.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))
