"""The kernels of sums, products, prefixes and scatters: chains of rounded steps, and sums that are rounded once.

``cumsum_kernel(accumulate, rounding, "f32", "f32")``, for example, is the kernel of the prefix sums of float32.
"""

from __future__ import annotations

import math
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
    unfinished_function,
)
from fxround.kernels.kinds import Exact, Reduce, Scan, Scatter
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.flipping import hit
from fxround.numerics.arithmetic.forms.fixed import fixed_sum, require_wrapping, wraps
from fxround.numerics.arithmetic.forms.single import has_single_steps, held, is_single, single_of, single_sum, value_of
from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.scalar import Expr, Function, Type, bits, const, param, rarely, select, substitute
from fxround.numerics.faults import Faults
from fxround.numerics.formats import Format
from fxround.numerics.formats.carriers import one_nan
from fxround.numerics.formats.storage import CARRIER_OF, ELEMENT_OF, FORMAT_OF, Storage, load, store
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import SEQUENTIAL, Order


def sum_kernel(
    order: Order, accumulate: Accumulation | Rounding, rounding: Rounding | None, load_as: Storage, result: Storage
) -> Reduce | Exact:
    """Return the sum of a length under an order, stored through ``rounding``.

    ``accumulate`` rounds each addition; under the order ``exact``, the exact sum once. rounding: None for the
    accumulators themselves, which an exact sum does not have. Raises ValueError for faults of
    an exact sum.
    """
    if order.kind != "exact":
        return chain_kernel(order, accumulate, rounding, load_as, result)
    how = Accumulation.parse(accumulate)
    if how.flips is not None:
        raise ValueError(f"faults={how.flips}: an exact sum has no partial sums whose bits could flip; use lanes:16")
    if rounding is None:
        raise ValueError("an exact sum has no accumulator that could be stored; use lanes:16")
    return exact_kernel(how.step, rounding, load_as, result)


@lru_cache(maxsize=1024)
def exact_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Exact:
    """Return the correctly rounded sum: one rounding of the exact sum by ``accumulate``, then the store's."""
    element, total = param("element", ELEMENT_OF[load_as]), param("total", "f64")
    first, second = param("random", "u32"), param("store_random", "u32")
    # To odd, binary64 needs two bits more than the format; without them the format must be binary64 itself.
    to_odd = accumulate.format.boundary_precision <= 52
    is_nearest = accumulate.mode.name == "nearest_even" or accumulate.mode.jitter
    if not to_odd and not (is_nearest and accumulate.format == FORMAT_OF["f64"]):
        raise ValueError(
            f"an exact sum cannot be rounded to {accumulate}: it needs two bits more than binary64 has; "
            f"use binary64/nearest_even, binary64/up_down, or a precision up to 51"
        )
    if accumulate.mode.noise is not None:
        raise ValueError(
            f"{accumulate}: the noise of an exact sum belongs to its store; use lanes:16, or a step without noise"
        )
    if wraps(accumulate):
        raise ValueError(f"{accumulate}: an exact sum has no steps that could wrap; use lanes:16 or saturate")
    store = finish_function(accumulate, rounding, "f64", result)
    rounded = apply("identity", (total,), accumulate, "f64", first)
    return Exact(
        read=Function("read", (element,), (bits(load(element, load_as)),)),
        finish=Function(
            "finish",
            (total, first, second),
            substitute(store.results, dict(zip(store.params, (rounded, second), strict=True))),
        ),
        to_odd=to_odd,
        loads=(load_as,),
        result=result,
        draws=(accumulate.mode.random_bits > 0, finish_draws(accumulate, rounding)),
    )


@lru_cache(maxsize=1024)
def chain_kernel(
    order: Order, accumulate: Accumulation | Rounding, rounding: Rounding | None, load_as: Storage, result: Storage
) -> Reduce:
    """Return the sum of a length by the chains of an order, each addition rounded by the step of ``accumulate``.

    rounding: None for the accumulators themselves; the result is then stored as they are.
    """
    how = Accumulation.parse(accumulate)
    accumulator = accumulator_of(how.step, (CARRIER_OF[load_as],))
    step = chain_rounding(how.step, accumulator, (CARRIER_OF[load_as],), how.flips)
    last = after_faults(step, how.flips)
    if rounding is None:
        result, finish = held_as(accumulator), unfinished_function(accumulator)
    else:
        finish = finish_function(last, rounding, accumulator, result)
    kernel = Reduce(
        step=add_function("step", step, accumulator, load_as, load_as != "f64", how.flips),
        combine=add_function("combine", step, accumulator, None, load_as != "f64", how.flips),
        finish=finish,
        order=order,
        loads=(load_as,),
        result=result,
        accumulator=accumulator,
        draws=how.of_sums.random,
        finish_draws=rounding is not None and finish_draws(last, rounding),
    )
    if rounding is None or not _has_single_sums(how, step):
        return kernel
    single = replace(
        kernel,
        step=_single_sum("step", step, kernel.step, load_as),
        combine=_single_sum("combine", step, kernel.combine, None),
        finish=_single_finish(how.step, rounding, kernel.finish, result),
    )
    return replace(kernel, single=single)


def _has_single_sums(how: Accumulation, step: Rounding) -> bool:
    """Whether sums under a chain's rounding have steps in binary32; it is the chain's own over binary32 elements."""
    return how.flips is None and step != how.step and has_single_steps(step)


def _single_sum(name: str, step: Rounding, general: Function, loaded: Storage | None) -> Function:
    """Return the addition of a stored element, or of another accumulator, to an accumulator that is held."""
    acc, x, random = general.params
    value, operands = load(x, loaded) if loaded else x, {acc: value_of(acc)}
    (wide,) = substitute(general.results, operands if loaded else operands | {x: value_of(x)})
    return Function(name, general.params, (single_sum(step, acc, value, random, wide),))


def _single_finish(accumulate: Rounding, rounding: Rounding, general: Function, result: Storage) -> Function:
    """Return the store of an accumulator that is held."""
    acc, random = general.params
    (wide,) = substitute(general.results, {acc: value_of(acc)})
    short = finish_function(accumulate, rounding, "f32", result)
    (single,) = substitute(short.results, {short.params[0]: single_of(acc)})
    return Function("finish", (acc, random), (rarely(~is_single(acc), wide, single),))


@lru_cache(maxsize=1024)
def cumsum_kernel(accumulate: Accumulation | Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Scan:
    """Return the kernel of all prefix sums, k ascending."""
    return _scan_of(chain_kernel(SEQUENTIAL, accumulate, rounding, load_as, result))


def _scan_of(whole: Reduce) -> Scan:
    """Return the kernel whose last result is the reduction's."""
    return Scan(
        step=whole.step,
        finish=whole.finish,
        loads=whole.loads,
        result=whole.result,
        accumulator=whole.accumulator,
        draws=whole.draws,
        finish_draws=whole.finish_draws,
        first=whole.first,
        single=None if whole.single is None else _scan_of(whole.single),
    )


@lru_cache(maxsize=1024)
def prod_kernel(accumulate: Accumulation | Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Reduce:
    """Return the product of a length: acc = 1; acc = R_acc(acc * x[k]), k ascending, in the format's own range."""
    how = Accumulation.parse(accumulate)
    accumulator = accumulator_of(how.step, (CARRIER_OF[load_as],))
    last = after_faults(how.step, how.flips)
    return Reduce(
        step=_multiply_step(how.step, accumulator, load_as, how.flips),
        combine=add_function("combine", how.step, accumulator, None, load_as != "f64", how.flips),
        finish=finish_function(last, rounding, accumulator, result),
        order=SEQUENTIAL,
        loads=(load_as,),
        result=result,
        accumulator=accumulator,
        draws=how.of_sums.random,
        finish_draws=finish_draws(last, rounding),
        first=1,
    )


def _multiply_step(accumulate: Rounding, accumulator: Type, loaded: Storage, faults: Faults | None) -> Function:
    """Return (acc, x, random) to R_acc(acc * x), whose bits flip afterwards.

    The product of a short significand and a binary32 value is exact.
    """
    acc, x, random = param("acc", accumulator), param("x", ELEMENT_OF[loaded]), param("random", "u32")
    fmt = accumulate.format
    # The product may not leave binary64's range either: binary32 spans 2^-149 to 2^128.
    short = fmt.precision <= 29 and fmt.quantum_exponent >= -1074 + 149 and fmt.emax < 1023 - 128
    short = short and CARRIER_OF[loaded] == "f32"
    if wraps(accumulate):
        # An accumulator of 24 bits times a binary32 number has 48.
        require_wrapping(accumulate, fmt.precision + FORMAT_OF[loaded].precision)
        exact = acc * apply("identity", (load(x, loaded),), None, accumulator)
        product = fixed_sum(const("f64", 0.0), exact, accumulate, random)
    else:
        product = apply("mul_inside" if short else "mul", (acc, load(x, loaded)), accumulate, accumulator, random)
    return Function("step", (acc, x, random), (hit(product, fmt, faults, random),))


@lru_cache(maxsize=1024)
def cumprod_kernel(accumulate: Accumulation | Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Scan:
    """Return the kernel of all prefix products, k ascending."""
    return _scan_of(prod_kernel(accumulate, rounding, load_as, result))


@lru_cache(maxsize=64)
def largest_kernel(storage: Storage) -> Reduce:
    """Return the kernel of the largest element: the one NaN if there is any, either of two zeros.

    The order of evaluation changes nothing but the sign of a zero.
    """
    carrier = CARRIER_OF[storage]
    acc, random = param("acc", carrier), param("random", "u32")
    x, other = param("x", ELEMENT_OF[storage]), param("x", carrier)

    def larger(value: Expr) -> tuple[Expr]:
        return (select((acc < value) | ~value.equals(value), value, acc),)

    return Reduce(
        step=Function("step", (acc, x, random), larger(load(x, storage))),
        combine=Function("combine", (acc, other, random), larger(other)),
        finish=Function("finish", (acc, random), (store(one_nan(acc), storage),)),
        order=Order("lanes", 32),
        loads=(storage,),
        result=storage,
        accumulator=carrier,
        draws=False,
        finish_draws=False,
        first=-math.inf,
    )


@lru_cache(maxsize=1024)
def scatter_kernel(accumulate: Accumulation | Rounding, storage: Storage) -> Scatter:
    """Return the kernel that adds contributions to a destination in order, each addition rounded by ``accumulate``.

    The result is stored in the destination's own dtype, rounded to nearest even if the dtype does not hold it.
    """
    how = Accumulation.parse(accumulate)
    accumulator = accumulator_of(how.step, (CARRIER_OF[storage],))
    step = chain_rounding(how.step, accumulator, (CARRIER_OF[storage],), how.flips)
    last = after_faults(step, how.flips)
    store_rounding = Rounding.parse(str(FORMAT_OF[storage]))
    kernel = Scatter(
        lift=lift_function(storage, accumulator, step),
        step=add_function("step", step, accumulator, storage, storage != "f64", how.flips, on_grid=False),
        finish=finish_function(last, store_rounding, accumulator, storage),
        loads=(storage,),
        result=storage,
        accumulator=accumulator,
        draws=how.of_sums.random,
    )
    if not _has_single_sums(how, step):
        return kernel
    (element,) = kernel.lift.params
    single = replace(
        kernel,
        lift=Function("lift", (element,), (held(load(element, storage)),)),
        step=_single_sum("step", step, kernel.step, storage),
        finish=_single_finish(how.step, store_rounding, kernel.finish, storage),
    )
    return replace(kernel, single=single)


@lru_cache(maxsize=1024)
def scatter_format(accumulate: Accumulation | Rounding, storage: Storage) -> Format:
    """Return a format that holds every sum of a scatter into zeros, as it is stored."""
    carriers = (CARRIER_OF[storage],)
    how = Accumulation.parse(accumulate)
    inside = chain_rounding(how.step, accumulator_of(how.step, carriers), carriers, how.flips).format
    return inside if inside.within(FORMAT_OF[storage]) else FORMAT_OF[storage]
