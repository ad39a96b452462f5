"""The kernels of sums of products: products of matrices and convolutions.

``contract_kernel(Accumulation.parse("bfloat16"), rounding, ("f32", "f32"), "f32")``, for example, rounds each step to
bfloat16. Where the processor can round a step itself, a second kernel in binary32 is tried first (``quick``), and so is
one that draws without a look at the range of each step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fxround.kernels.accumulators import (
    accumulator_of,
    add_function,
    after_faults,
    chain_rounding,
    finish_draws,
    finish_function,
    held_as,
    lift_function,
    passes_any_nan,
    stays_inside,
    unfinished_function,
)
from fxround.kernels.kinds import Contract
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.flipping import hit
from fxround.numerics.arithmetic.forms.dithered import dithered_inside, is_dithered
from fxround.numerics.arithmetic.forms.fixed import fixed_sum, is_short, require_wrapping, wraps
from fxround.numerics.arithmetic.forms.single import single_step
from fxround.numerics.arithmetic.forms.truncation import HARDWARE_ROUNDED, directed_step, up_or_down
from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.residuals import fused_inside, to_odd
from fxround.numerics.arithmetic.scalar import (
    Expr,
    Function,
    Type,
    bits,
    const,
    fma,
    from_bits,
    narrow,
    param,
    rarely,
    select,
    substitute,
    widen,
)
from fxround.numerics.faults import Faults
from fxround.numerics.formats.storage import CARRIER_OF, FORMAT_OF, Storage
from fxround.numerics.modes import Rounding


@lru_cache(maxsize=1024)
def contract_kernel(
    accumulate: Accumulation | Rounding, rounding: Rounding | None, loads: tuple[Storage, Storage], result: Storage
) -> Contract:
    """Return the kernel of sums of products, accumulated as ``accumulate`` says and stored through ``rounding``.

    rounding: None for the accumulators themselves; the result is then stored as they are.
    """
    how = Accumulation.parse(accumulate)
    carriers = tuple(CARRIER_OF[s] for s in loads)
    partial = how.of_partial_sums
    native = all(accumulator_of(r, carriers) == "f32" for r in (how.step, partial) if r is not None)
    fits = how.product is None or how.product.format.within(FORMAT_OF["f32"])
    accumulator: Type = "f32" if native and fits else "f64"
    step = chain_rounding(how.step, accumulator, carriers, how.flips)
    general = _contract_step(how, step, accumulator, carriers)
    combine = None if partial is None else chain_rounding(partial, accumulator, carriers, how.flips)
    last, short = after_faults(combine or step, how.flips), "f64" not in carriers
    if rounding is None:
        result, finish = held_as(accumulator), unfinished_function(accumulator)
    else:
        finish = finish_function(last, rounding, accumulator, result)
    kernel = Contract(
        lifts=(
            lift_function(loads[0], accumulator, step, how.product),
            lift_function(loads[1], accumulator, step, how.product),
        ),
        step=general,
        finish=finish,
        chunk=how.chunk or 0,
        shards=how.shards or 1,
        combine=None if combine is None else _combination(combine, step, accumulator, short, how.flips),
        loads=loads,
        result=result,
        accumulator=accumulator,
        draws=how.random,
        finish_draws=rounding is not None and finish_draws(last, rounding),
        coins=_tosses_coins(how),
        quick=_quick_contract(how, rounding, loads, result) if accumulator == "f64" and rounding else None,
    )
    quick = kernel.quick or _bounded_contract(how, step, combine, kernel)
    return replace(kernel, quick=quick, single=_single_contract(how, step, kernel))


def _contract_step(how: Accumulation, step: Rounding, accumulator: Type, carriers: tuple[Type, ...]) -> Function:
    a, b, acc = (param(name, accumulator) for name in ("a", "b", "acc"))
    random = param("random", "u32")
    narrow_factors = stays_inside("f64" not in carriers, step, how.flips)
    # A NaN that a fault made, or a binary64 operand, may have any bits.
    any_nan = how.flips is None and (narrow_factors or passes_any_nan(step))
    in_fixed = accumulator == "f64" and (wraps(step) or (narrow_factors and is_short(step)))
    if how.product is not None:
        # The two roundings of a step share its 32 bits: the product draws the low half, the sum the high half.
        operator = "mul_inside" if accumulator == "f64" and narrow_factors else "mul"
        product = apply(operator, (a, b), how.product, accumulator, random << 16)
        adds = "add_inside" if narrow_factors else "add_step"
        if in_fixed:
            require_wrapping(step, how.product.format.precision)
            value = fixed_sum(acc, product, step, random)
        else:
            value = apply(adds, (product, acc), step, accumulator, random, any_nan=any_nan)
    else:
        # Binary32 factors held in binary64 have an exact product.
        operator = _multiply_add(accumulator, narrow_factors)
        if in_fixed:
            # Products of binary32 factors have 48 bits.
            require_wrapping(step, 48 if "f64" not in carriers else 106)
            value = fixed_sum(acc, a * b, step, random)
        elif step.mode.jitter and step != how.step and step.format.precision == 24:
            value = up_or_down(_nearest_of_24_bits(a, b, acc), step.format.precision, random)
        else:
            value = apply(operator, (a, b, acc), step, accumulator, random, any_nan=any_nan)
    return Function("step", (a, b, acc, random), (hit(value, step.format, how.flips, random),))


def _combination(combine: Rounding, step: Rounding, accumulator: Type, short: bool, faults: Faults | None) -> Function:
    """Return the addition of a partial sum to the total."""
    require_wrapping(combine, step.format.precision)
    return add_function("combine", combine, accumulator, None, short, faults)


def _nearest_of_24_bits(a: Expr, b: Expr, acc: Expr) -> Expr:
    """Return a binary64 value whose nearest value of 24 bits is that of a * b + acc.

    The nearest binary64 value is one, unless it is a midpoint of two values of 24 bits and not exact: rounded to odd
    it is no midpoint. The product of binary32 factors is exact, and the sum is inside of binary64's range.
    """
    nearest = fma(a, b, acc)
    midpoint = (bits(nearest) & (1 << 29) - 1).equals(1 << 28)
    return rarely(midpoint, to_odd(fused_inside(a, b, acc)), nearest)


def _tosses_coins(how: Accumulation) -> bool:
    """Whether a step has one rounding that needs one random bit, and nothing else draws between two steps."""
    simple = how.product is None and how.chunk is None and how.flips is None
    return simple and how.step.mode.random_bits == 1


def _single_contract(how: Accumulation, step: Rounding, general: Contract) -> Contract | None:
    """Return the contraction by binary32 steps without a hardware rounding direction; None if there is none."""
    simple = how.product is None and how.of_partial_sums is None and how.flips is None
    if not simple or step == how.step or {CARRIER_OF[s] for s in general.loads} != {"f32"}:
        return None
    a, b, acc, random = param("a", "f32"), param("b", "f32"), param("acc", "f32"), param("random", "u32")
    wide = dict(zip(general.step.params, (widen(a), widen(b), widen(acc), random), strict=True))
    (value,) = substitute(general.step.results, wide)
    result = single_step(step, a, b, acc, random, narrow(value))
    if result is None:
        return None
    last, drawn = general.finish.params
    return replace(
        general,
        lifts=(lift_function(general.loads[0], "f32", step), lift_function(general.loads[1], "f32", step)),
        step=Function("step", (a, b, acc, random), (result.value, result.inside)),
        finish=Function("finish", (acc, drawn), substitute(general.finish.results, {last: widen(acc)})),
        accumulator="f32",
        quick=None,
    )


def _multiply_add(accumulator: Type, narrow_factors: bool) -> str:
    """Return the name of a step's operator."""
    return "fma_inside" if accumulator == "f64" and narrow_factors else "fma_step"


def _bounded_contract(
    how: Accumulation, step: Rounding, combine: Rounding | None, general: Contract
) -> Contract | None:
    """Return the contraction whose steps stay in the range of ``forms.dithered``; None if it is not of that form."""
    operator = _multiply_add(general.accumulator, "f64" not in (CARRIER_OF[s] for s in general.loads))
    roundings = [(operator, step), *([] if combine is None else [("add_step", combine)])]
    if how.product is not None or how.flips is not None or not all(is_dithered(*one) for one in roundings):
        return None
    a, b, acc, x = (param(name, "f64") for name in ("a", "b", "acc", "x"))
    random = param("random", "u32")
    value = dithered_inside(operator, (a, b, acc), step, random)
    combined = None
    if combine is not None:
        combined = Function("combine", (acc, x, random), (dithered_inside("add_step", (acc, x), combine, random),))
    return replace(
        general, step=Function("step", (a, b, acc, random), (value,)), combine=combined, bounded=True, quick=None
    )


def _quick_contract(
    how: Accumulation, rounding: Rounding, loads: tuple[Storage, Storage], result: Storage
) -> Contract | None:
    """Return the contraction by binary32 steps under a hardware rounding direction; None if there is none.

    Its store consists of operators that the rounding direction does not change.
    """
    simple = how.product is None and how.chunk is None and how.flips is None
    simple = simple and {CARRIER_OF[s] for s in (*loads, result)} == {"f32"}
    if not simple or chain_rounding(how.step, "f64", ("f32",)) == how.step:
        return None
    a, b, acc, random = param("a", "f32"), param("b", "f32"), param("acc", "f32"), param("random", "u32")
    directed = directed_step(how.step, a, b, acc, random)
    if directed is None:
        return None
    direction, value = directed
    combine = None
    if how.shards is not None:
        x = param("x", "f32")
        added = directed_step(how.step, x, const("f32", 1.0), acc, random)
        assert added is not None
        combine = Function("combine", (acc, x, random), (added[1],))
    finish = finish_function(how.step, rounding, "f32", result)
    if any(node.op in HARDWARE_ROUNDED for node in finish.schedule):
        return None
    # Towards -infinity an exact zero is -0, whereas the chain's is +0.
    zero = from_bits(select(bits(acc).equals(1 << 31), 0, bits(acc)))
    stored = substitute(finish.results, {finish.params[0]: zero}) if direction == "down" else finish.results
    return Contract(
        lifts=(lift_function(loads[0], "f32", how.step), lift_function(loads[1], "f32", how.step)),
        step=Function("step", (a, b, acc, random), (value,)),
        finish=Function("finish", finish.params, tuple(stored)),
        chunk=0,
        shards=how.shards or 1,
        combine=combine,
        loads=loads,
        result=result,
        accumulator="f32",
        draws=how.random,
        finish_draws=finish_draws(how.step, rounding),
        coins=_tosses_coins(how),
        direction=direction,
        watched=True,
    )
