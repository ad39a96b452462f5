"""Kernels of what roundings lose: the mean and the variance of an error over the random bits that a rounding draws.

A rounding of an exact value x has at most two outcomes: the results for the random bits 0 and for all ones. Its error
is ``outcome - x``. The second outcome has the probability with which the mode takes the step, so that for stochastic
rounding, which keeps the value on average, the variance is (x - below) (above - x).

A chain rounds many times, and only the chain itself meets the values that are rounded. Its kernel of losses is
therefore the same chain, with the same random bits, whose accumulator holds two numbers. The accumulator is a binary64
number of at most 24 bits, so that its 29 low bits are zero: they hold the sum of the mean squares of the errors of all
steps so far, as the 29 highest bits of a binary64 number. That sum is rounded to 18 bits at each step: over 10,000
steps its error is below 4 percent.

A run spends most of its time in these steps, whose expressions are therefore those of the fewest instructions
(``_neighbours``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fxround.kernels.accumulators import chain_rounding
from fxround.kernels.kinds import Contract, Map, Reduce, Scan, Scatter
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.rounding import round_expr, widen_exactly
from fxround.numerics.arithmetic.scalar import (
    Expr,
    Function,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    param,
    select,
    substitute,
)
from fxround.numerics.formats.storage import CARRIER_OF, FORMAT_OF, load
from fxround.numerics.modes import Mode, Rounding

_SUM: Final = (1 << 29) - 1
_PLACES: Final = 35
_HALF: Final = 1 << (_PLACES - 1)
_ALL: Final = (1 << 64) - 1
_FINER: Final = 4
_ONES: Final = (1 << 32) - 1
# Adding this to a number from 0 to 2^51 leaves the nearest integer above it.
_INTEGERS: Final = 2.0**52
_EXPONENT: Final = 0x7FF00000_00000000
# No sum of binary32 products is smaller, but zero.
_TINY: Final = 2.0**-298


def has_losses(accumulate: Accumulation) -> bool:
    """Whether the kernels of losses know a chain's roundings: no faults, formats within binary32, and no posit.

    A rounding without random bits, in a chain that draws elsewhere, has an error that other samples change in part. It
    must be so fine that this does not count, and no step: the combination of partial sums, in four bits more.
    """
    roundings = [r for r in (accumulate.step, accumulate.product, accumulate.of_partial_sums) if r is not None]
    narrow_ones = all(r.format.within(FORMAT_OF["f32"]) and not r.format.posit for r in roundings)
    drawn = [r.format.precision for r in roundings if not r.mode.deterministic]
    fixed = [r.format.precision for r in roundings if r.mode.deterministic]
    fine = not drawn or not fixed or min(fixed) >= max(drawn) + _FINER
    steps = not drawn or not accumulate.step.mode.deterministic
    return accumulate.flips is None and narrow_ones and fine and steps


@lru_cache(maxsize=1024)
def loss_kernel(rounding: Rounding) -> Map:
    """Return the kernel from exact values, float64, to the mean and the variance of their rounding's errors, float64.

    Raises ValueError for a format that is wider than binary64, or has its precision.
    """
    if rounding.format.precision >= FORMAT_OF["f64"].precision or rounding.format.posit:
        raise ValueError(f"{rounding}: what it loses is not a binary64 number; expected a narrower format, no posit")
    x = param("x0", "f64")
    return Map(Function("map", (x,), _moments(x, rounding)), ("f64",), ("f64", "f64"), ())


def _moments(x: Expr, rounding: Rounding) -> tuple[Expr, Expr]:
    """Return the mean and the variance of a rounding's error for an exact value."""
    fixed = rounding.mode.deterministic
    low, high, likely = _outcomes(lambda word: round_expr(x, rounding, None if fixed else word), x, rounding.mode)
    gap = high - low
    return (low - x) + likely * gap, likely * (const("f64", 1.0) - likely) * (gap * gap)


def variance_of(x: Expr, rounding: Rounding, drawn: Expr) -> Expr:
    """Return the variance of the error of a rounding of an exact value, f64; ``drawn``: the outcome of the run, f64."""
    between = _between(x, rounding, drawn)
    return _moments(x, rounding)[1] if between is None else between


@lru_cache(maxsize=1024)
def contract_losses(accumulate: Accumulation, kernel: Contract) -> Contract:
    """Return the contraction with packed results: the accumulator before ``finish``, and the variance of all steps.

    kernel: of ``accumulate``, whose accumulator is in binary64.
    """
    step = chain_rounding(accumulate.step, "f64", tuple(CARRIER_OF[s] for s in kernel.loads))
    a, b, acc, random = kernel.step.params
    packed = param("acc", "f64")
    value, so_far = unpacked_expr(packed)
    (after,) = substitute(kernel.step.results, {acc: value})
    if accumulate.product is None:
        total = _with_square(so_far, _drawn(kernel.step, {acc: value}), fma(a, b, value), step, after)
    else:
        # The product draws the low half of the word, and the sum the high half, as in the step itself.
        rounded = accumulate.product
        product = apply("mul", (a, b), rounded, "f64", random << 16)
        total = _with_square(so_far, lambda word: apply("mul", (a, b), rounded, "f64", word), a * b, rounded, product)
        exact = product + value
        total = _with_square(
            total, lambda word: apply("add_step", (product, value), step, "f64", word), exact, step, after
        )
    combine = None
    partial = accumulate.of_partial_sums
    if kernel.combine is not None and partial is not None:
        combine = _combination(kernel.combine, chain_rounding(partial, "f64", ("f32",)))
    return replace(
        kernel,
        step=Function("step", (a, b, packed, random), (_packed(after, total),)),
        finish=_unrounded(),
        combine=combine,
        result="f64",
        finish_draws=False,
        quick=None,
        single=None,
    )


@lru_cache(maxsize=1024)
def reduce_losses(accumulate: Accumulation, kernel: Reduce) -> Reduce:
    """Return the sum or product with packed results, as ``contract_losses`` does.

    A product multiplies what was lost before by each factor that follows.
    """
    return replace(
        kernel,
        step=_step(kernel, accumulate, True),
        combine=_combination(kernel.combine, chain_rounding(accumulate.step, "f64", ("f32",))),
        finish=_unrounded(),
        result="f64",
        finish_draws=False,
        single=None,
    )


@lru_cache(maxsize=1024)
def scan_losses(accumulate: Accumulation, kernel: Scan) -> Scan:
    """Return the scan with packed results: every accumulator before ``finish``, and the variance of its own step."""
    step = _step(kernel, accumulate, False)
    return replace(kernel, step=step, finish=_unrounded(), result="f64", single=None)


@lru_cache(maxsize=1024)
def scatter_losses(accumulate: Accumulation, kernel: Scatter) -> Scatter:
    """Return the scatter with packed results, as ``contract_losses`` does."""
    (element,) = kernel.lift.params
    lift = Function("lift", (element,), (_packed(kernel.lift.results[0], const("f64", 0.0)),))
    return replace(
        kernel, lift=lift, step=_step(kernel, accumulate, True), finish=_unrounded(), result="f64", single=None
    )


def unpacked_expr(packed: Expr) -> tuple[Expr, Expr]:
    """Return the accumulator and the sum of mean squares, f64, of a packed accumulator, f64."""
    word = bits(packed)
    return from_bits(word & (_ALL - _SUM)), from_bits(word << _PLACES)


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accumulators and the sums of mean squares, float64, of a kernel's packed results, float64.

    The sum is not finite where an accumulator was not.
    """
    words = packed.view(torch.int64)
    return (words & ~_SUM).view(torch.float64), (words << _PLACES).view(torch.float64)


def _step(kernel: Reduce | Scan | Scatter, accumulate: Accumulation, sums: bool) -> Function:
    """Return the step of a chain over single elements. sums: whether it adds to the variance of the steps before."""
    acc, x, random = kernel.step.params
    (loaded,) = kernel.loads
    element = widen_exactly(load(x, loaded))
    packed = param("acc", "f64")
    value, so_far = unpacked_expr(packed)
    (after,) = substitute(kernel.step.results, {acc: value})
    multiplies = not isinstance(kernel, Scatter) and kernel.first != 0
    rounding = accumulate.step if multiplies else chain_rounding(accumulate.step, "f64", (CARRIER_OF[loaded],))
    exact = value * element if multiplies else value + element
    before = so_far * (element * element) if multiplies else so_far
    before = before if sums else const("f64", 0.0)
    total = _with_square(before, _drawn(kernel.step, {acc: value}), exact, rounding, after)
    return Function("step", (packed, x, random), (_packed(after, total),))


def _combination(combine: Function, rounding: Rounding) -> Function:
    """Return the addition of two packed accumulators."""
    acc, x, random = combine.params
    packed, other = param("acc", "f64"), param("x", "f64")
    (value, so_far), (added, of_added) = unpacked_expr(packed), unpacked_expr(other)
    operands = {acc: value, x: added}
    (after,) = substitute(combine.results, operands)
    total = _with_square(so_far + of_added, _drawn(combine, operands), value + added, rounding, after)
    return Function("combine", (packed, other, random), (_packed(after, total),))


def _unrounded() -> Function:
    """Return the store of a packed accumulator."""
    acc, random = param("acc", "f64"), param("random", "u32")
    return Function("finish", (acc, random), (acc,))


def _packed(value: Expr, squares: Expr) -> Expr:
    return from_bits(bits(value) | ((bits(squares) + _HALF) >> _PLACES))


def _drawn(function: Function, values: dict[Expr, Expr]) -> Callable[[Expr], Expr]:
    """Return the function of the random word alone."""
    random = function.params[-1]

    def outcome(word: Expr) -> Expr:
        (result,) = substitute(function.results, values | {random: word})
        return result

    return outcome


def _outcomes(outcome: Callable[[Expr], Expr], exact: Expr, mode: Mode) -> tuple[Expr, Expr, Expr]:
    """Return the results for the random bits 0 and for all ones, and the probability of the second."""
    low = outcome(const("u32", 0))
    if mode.deterministic:
        return low, low, const("f64", 0.0)
    high = outcome(const("u32", _ONES))
    gap = high - low
    fraction = select(gap.equals(0.0), const("f64", 0.0), (exact - low) / gap)
    return low, high, _probability(fraction, mode)


def _probability(fraction: Expr, mode: Mode) -> Expr:
    """Return the probability of a step for a lost fraction of a quantum (``numerics.modes.rows``)."""
    if not mode.graded:
        return const("f64", 0.5)
    if mode.random_bits == 32:
        return fraction
    scaled = fraction * 2.0**mode.random_bits
    nearest = (scaled + _INTEGERS) - _INTEGERS
    if mode.cut == "half_even":
        return nearest * 2.0**-mode.random_bits
    if mode.cut == "half_up":
        scaled = scaled + 0.5
        nearest = (scaled + _INTEGERS) - _INTEGERS
    return select(scaled < nearest, nearest - 1.0, nearest) * 2.0**-mode.random_bits


def _with_square(before: Expr, outcome: Callable[[Expr], Expr], exact: Expr, rounding: Rounding, drawn: Expr) -> Expr:
    """Return a sum with the mean square of a rounding's error (``_square``)."""
    neighbours = _neighbours(exact, rounding)
    return before + _square(outcome, exact, rounding, drawn) if neighbours is None else fma(*neighbours, before)


def _square(outcome: Callable[[Expr], Expr], exact: Expr, rounding: Rounding, drawn: Expr) -> Expr:
    """Return the mean square of a rounding's error over its random bits.

    drawn: the outcome that the chain goes on with. The mean square is the variance where the mean error is zero. Where
    it is not, other samples round other values, so that the mean error varies from sample to sample as well.
    """
    lost = absolute(drawn - exact)
    if rounding.mode.deterministic:
        return lost * lost
    between = _between(exact, rounding, drawn)
    if between is not None:
        return between
    low, high, likely = _outcomes(outcome, exact, rounding.mode)
    below, above = low - exact, high - exact
    return (const("f64", 1.0) - likely) * (below * below) + likely * (above * above)


def _neighbours(exact: Expr, rounding: Rounding) -> tuple[Expr, Expr] | None:
    """Return what a drawn rounding lost if it rounded down or up in magnitude; None if it is not one of the two.

    Both have the sign of the value, and their product is the variance. The neighbour below has the leading bits of the
    value, the one above is the next number of as many bits; a value that has no other bits lost nothing.
    """
    fmt, mode = rounding.format, rounding.mode
    drawn = mode.graded and mode.random_bits == 32
    if not (drawn and fmt.is_grid and fmt.span is None and fmt.subnormals and 2.0**fmt.quantum_exponent < _TINY):
        return None
    last = 1 << (FORMAT_OF["f64"].precision - fmt.precision)
    below = bits(exact) & (_ALL - (last - 1))
    return exact - from_bits(below), from_bits(below + last) - exact


def _between(exact: Expr, rounding: Rounding, drawn: Expr) -> Expr | None:
    """Return the variance of a drawn rounding between two neighbours of a value; None if it is not one between them."""
    fmt, mode = rounding.format, rounding.mode
    if not (fmt.is_grid and fmt.span is None and fmt.subnormals and mode.graded and mode.random_bits == 32):
        return None
    # One of the two neighbours is ``drawn``, and the other one is a quantum away, on the other side of the value.
    lost = absolute(drawn - exact)
    quantum = from_bits(bits(exact) & _EXPONENT) * 2.0 ** (1 - fmt.precision)
    least = 2.0**fmt.quantum_exponent
    quantum = quantum if least < _TINY else select(quantum < least, const("f64", least), quantum)
    return lost * (quantum - lost)
