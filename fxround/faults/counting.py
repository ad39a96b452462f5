"""Kernels that count the faults of another kernel's accumulators: the same loops and random words, other functions.

Each step adds the number of its faults to the accumulator in place of its product, so that the result of an element is
the number of faults of its chain. The operands' values do not matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from fxround.kernels.kinds import Contract, Reduce, Scan, Scatter
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.flipping import word_of
from fxround.numerics.arithmetic.scalar import Expr, Function, const, narrow, select
from fxround.numerics.faults import words_per_bit
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.storage import store

K = TypeVar("K", Contract, Reduce, Scan, Scatter)


@lru_cache(maxsize=256)
def counting(kernel: K, accumulate: str, number: int | None) -> K:
    """Return the kernel that counts how often fault ``number`` hits an accumulator; None: the number of steps.

    kernel: that of ``accumulate``, of float32 or float64 operands. An accumulator that is a NaN is hit too.
    """
    how = Accumulation.parse(accumulate)

    def counts(function: Function, fmt: Format) -> Function:
        named = {p.attr: p for p in function.params}
        acc, random = named["acc"], named["random"]
        total = acc + _hits(acc, random, how, fmt, number)
        # The other operand of a combination is a number of faults too.
        added = total + named["x"] if function.name == "combine" else total
        return Function(function.name, function.params, (added,))

    acc, *others = kernel.finish.params
    narrowed = narrow(acc) if acc.type == "f64" and kernel.result == "f32" else acc
    finish = Function("finish", (acc, *others), (store(narrowed, kernel.result),))
    changed: dict[str, Any] = {"step": counts(kernel.step, how.step.format), "finish": finish}
    partial = how.of_partial_sums
    if isinstance(kernel, Contract) and kernel.combine is not None and partial is not None:
        changed["combine"] = counts(kernel.combine, partial.format)
    if isinstance(kernel, Reduce):
        changed["combine"] = counts(kernel.combine, how.step.format)
    if isinstance(kernel, Reduce | Scan):
        changed["first"] = 0
    return replace(kernel, **changed)


def _hits(acc: Expr, random: Expr, how: Accumulation, fmt: Format, number: int | None) -> Expr:
    """Return 1 if the fault hits a step with this random word, else 0."""
    if number is None or how.flips is None:
        return const(acc.type, 1.0)
    fault = how.flips.faults[number]
    _, count = Encoding(fmt).field(fault.part)
    limit = words_per_bit(fault, count) * count
    hit = word_of(random, number) < limit if limit < 1 << 32 else const("bool", 1)
    return select(hit, const(acc.type, 1.0), 0.0)
