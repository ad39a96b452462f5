"""Kernels from roundings: the scalar functions that compute a program, a reduction or an accumulation.

Each function takes roundings and storages and returns a kernel that is specialised for them, so nothing is interpreted
at run time: ``contract_kernel(Accumulation.parse("bfloat16"), rounding, ("f32", "f32"), "f32")``. What is not possible
(a format that the carrier lacks, a result that the dtype cannot store) raises ValueError here, before any code is
compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from fxround.errors import shown
from fxround.kernels.program import Program, Statement
from fxround.kernels.shapes import Contract, Exact, Map, Reduce, Scan, Scatter, Word
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.carriers import one_nan
from fxround.numerics.exact import round_float
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.numerics.operators import apply
from fxround.numerics.orders import SEQUENTIAL, Order
from fxround.numerics.scalar import Expr, Function, Type, bits, const, fma, from_bits, narrow, param, select, substitute
from fxround.numerics.storage import CARRIER_OF, ELEMENT_OF, FORMAT_OF, Storage, load, store
from fxround.numerics.truncation import HARDWARE_ROUNDED, directed_step, up_or_down


def _fits(rounding: Rounding, result: Storage) -> None:
    if not rounding.format.within(FORMAT_OF[result]):
        raise ValueError(f"{rounding} has values that a {FORMAT_OF[result]} tensor cannot store; use a wider dtype")


@lru_cache(maxsize=4096)
def map_kernel(program: Program, loads: tuple[Storage, ...], result: Storage) -> Map:
    """Return the kernel of a program with one result. Statement s draws number s of the call's only node.

    Raises ValueError for a wrong number of operands, an operator that does not exist, or a rounding that the result's
    dtype cannot store or the operands' carrier cannot be rounded to.
    """
    return _map_kernel(program, loads, (result,), tuple(Word(0, n) for n in range(len(program.statements))))


@lru_cache(maxsize=4096)
def fused_kernel(program: Program, loads: tuple[Storage, ...], results: tuple[Storage, ...]) -> Map:
    """Return the kernel of a fused program. Each statement that draws has a node number of its own, in order.

    Raises what ``map_kernel`` raises.
    """
    words = iter(range(len(program.statements)))
    drawn = tuple(Word(next(words), 0) if draws(s) else Word(0, 0) for s in program.statements)
    return _map_kernel(program, loads, results, drawn)


def draws(statement: Statement) -> bool:
    """Whether a statement's rounding draws random bits."""
    return statement.rounding is not None and statement.rounding.mode.random_bits > 0


def program_carrier(program: Program, loads: tuple[Storage, ...], results: tuple[Storage, ...]) -> Type:
    """Return the carrier of a program's kernel.

    Raises ValueError if operands and results do not fit ``loads`` and ``results``.
    """
    said = shown(str(program))
    if program.arity > len(loads):
        raise ValueError(f"{said} uses {program.arity} operands, got {len(loads)}")
    if len(program.results) != len(results):
        raise ValueError(f"{said} has {len(program.results)} results, got {len(results)} dtypes for them")
    carriers = {CARRIER_OF[s] for s in results}
    if len(carriers) > 1:
        raise ValueError(f"{said}: results stored as {', '.join(results)} need two carriers; expected one")
    (carrier,) = carriers
    grids = _grids(program, loads, carrier)
    for name, result in zip(program.results, results, strict=True):
        if not grids[name].within(FORMAT_OF[result]):
            raise ValueError(
                f"{said}: {name} has values of {grids[name]} that a {FORMAT_OF[result]} tensor cannot store; "
                "use a wider dtype"
            )
    return carrier


def _map_kernel(
    program: Program, loads: tuple[Storage, ...], results: tuple[Storage, ...], words: tuple[Word, ...]
) -> Map:
    carrier = program_carrier(program, loads, results)
    elements = tuple(param(f"x{i}", ELEMENT_OF[s]) for i, s in enumerate(loads))
    values: dict[str, Expr] = {f"x{i}": load(e, s) for i, (e, s) in enumerate(zip(elements, loads, strict=True))}
    randoms: list[Expr] = []
    drawn: list[Word] = []
    for number, (s, word) in enumerate(zip(program.statements, words, strict=True)):
        random = param(f"r{number}", "u32") if draws(s) else None
        if random is not None:
            randoms.append(random)
            drawn.append(word)
        operands = tuple(values[o] if isinstance(o, str) else const(carrier, o) for o in s.operands)
        values[s.target] = apply(s.operator, operands, s.rounding, carrier, random)
    stored = tuple(store(values[name], result) for name, result in zip(program.results, results, strict=True))
    return Map(Function("map", (*elements, *randoms), stored), loads, results, tuple(drawn))


def _grids(program: Program, loads: tuple[Storage, ...], carrier: Type) -> dict[str, Format]:
    """Return for each name a format that holds all of its values.

    This is the format that it is rounded to, or one that the operands of an exact statement have.
    """
    widest = FORMAT_OF["f32" if carrier == "f32" else "f64"]
    grids = {f"x{i}": FORMAT_OF[s] for i, s in enumerate(loads)}
    for s in program.statements:
        found = [grids[o] for o in s.operands if isinstance(o, str)]
        numbers = [o for o in s.operands if not isinstance(o, str)]
        candidates = (*found, FORMAT_OF["bf16"], FORMAT_OF["f16"])
        holds = next((f for f in candidates if _holds(f, found, numbers)), widest)
        grids[s.target] = s.rounding.format if s.rounding is not None else holds
    return grids


def _holds(candidate: Format, formats: Sequence[Format], numbers: Sequence[float]) -> bool:
    """Whether a format has every value of the given formats, and the given numbers."""
    nearest = Rounding.parse(candidate.name)
    return all(other.within(candidate) for other in formats) and all(round_float(n, nearest) == n for n in numbers)


def _accumulator(accumulate: Rounding, carriers: tuple[Type, ...]) -> Type:
    """Return the accumulator's type.

    binary32 with the hardware's rounding accumulates in f32; every other rounding in f64, which holds its values
    exactly.
    """
    return "f32" if _is_hardware(accumulate) and set(carriers) == {"f32"} else "f64"


def _is_hardware(rounding: Rounding) -> bool:
    return str(rounding) == "binary32/nearest_even/inf"


def chain_rounding(accumulate: Rounding, accumulator: Type, carriers: tuple[Type, ...]) -> Rounding:
    """Return the rounding of a step inside a chain.

    Over binary32 operands, a format with binary32's exponents gets binary64's inside a chain: no partial sum overflows
    or becomes subnormal there, and the store brings the result into range. binary32/nearest_even, the hardware's own,
    keeps its range, whatever else the chain rounds, and so do formats with fewer exponents (binary16, e5m2, ...).
    """
    fmt = accumulate.format
    binary32, binary64 = FORMAT_OF["f32"], FORMAT_OF["f64"]
    like_binary32 = (fmt.emin, fmt.emax, fmt.subnormals) == (binary32.emin, binary32.emax, True) and fmt.has_minus_zero
    own = accumulator != "f64" or "f64" in carriers or _is_hardware(accumulate)
    if own or not like_binary32 or accumulate.overflow != "inf":
        return accumulate
    return Rounding(fmt.with_range_of(binary64), accumulate.mode, "inf")


def _store_is_identity(accumulate: Rounding, rounding: Rounding) -> bool:
    """Whether the store's rounding keeps every value that the accumulator can hold."""
    range_kept = rounding.overflow in ("inf", accumulate.overflow)
    return accumulate.format.within(rounding.format) and range_kept and not rounding.mode.jitter


def _finish(accumulate: Rounding, rounding: Rounding, accumulator: Type, result: Storage) -> Function:
    """Return the store's rounding of an accumulator; no rounding where it is proved to be the identity."""
    _fits(rounding, result)
    acc, random = param("acc", accumulator), param("random", "u32")
    carrier = CARRIER_OF[result]
    value = one_nan(acc)
    if not _store_is_identity(accumulate, rounding):
        value = apply("identity", (acc,), rounding, carrier, random)
    if value.type != carrier:
        value = narrow(value) if carrier == "f32" else apply("identity", (value,), None, "f64")
    return Function("finish", (acc, random), (store(value, result),))


def _finish_draws(accumulate: Rounding, rounding: Rounding) -> bool:
    return rounding.mode.random_bits > 0 and not _store_is_identity(accumulate, rounding)


def _add_step(name: str, accumulate: Rounding, accumulator: Type, loaded: Storage | None, inside: bool) -> Function:
    """Return (acc, x, random) to R_acc(acc + x). x is a stored element, or another accumulator.

    inside: the operands of the chain have at most 32 bits, whose sums do not overflow in binary64.
    """
    acc, random = param("acc", accumulator), param("random", "u32")
    x = param("x", ELEMENT_OF[loaded] if loaded else accumulator)
    value = load(x, loaded) if loaded else x
    # A NaN of a binary32 operand has zeros below binary32's bits; one of a binary64 operand may have any bits there.
    operator = "add_inside" if inside else "add_step"
    total = apply(operator, (acc, value), accumulate, accumulator, random, any_nan=loaded not in (None, "f64"))
    return Function(name, (acc, x, random), (total,))


def sum_kernel(
    order: Order, accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage
) -> Reduce | Exact:
    """Return the sum of a length under an order, stored through ``rounding``.

    ``accumulate`` rounds each addition; under the order ``exact``, the exact sum once.
    """
    if order.kind == "exact":
        return exact_kernel(accumulate, rounding, load_as, result)
    return chain_kernel(order, accumulate, rounding, load_as, result)


@lru_cache(maxsize=1024)
def exact_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Exact:
    """Return the correctly rounded sum: one rounding of the exact sum by ``accumulate``, then the store's."""
    element, total = param("element", ELEMENT_OF[load_as]), param("total", "f64")
    first, second = param("random", "u32"), param("store_random", "u32")
    # To odd, binary64 needs two bits more than the format; without them the format must be binary64 itself.
    to_odd = accumulate.format.precision <= 51
    is_nearest = accumulate.mode.name == "nearest_even" or accumulate.mode.jitter
    if not to_odd and not (is_nearest and accumulate.format == FORMAT_OF["f64"]):
        raise ValueError(
            f"an exact sum cannot be rounded to {accumulate}: it needs two bits more than binary64 has; "
            f"use binary64/nearest_even, binary64/up_down, or a precision up to 51"
        )
    store = _finish(accumulate, rounding, "f64", result)
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
        draws=(accumulate.mode.random_bits > 0, _finish_draws(accumulate, rounding)),
    )


@lru_cache(maxsize=1024)
def chain_kernel(order: Order, accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Reduce:
    """Return the sum of a length by the chains of an order, each addition rounded by ``accumulate``."""
    accumulator = _accumulator(accumulate, (CARRIER_OF[load_as],))
    accumulate = chain_rounding(accumulate, accumulator, (CARRIER_OF[load_as],))
    return Reduce(
        step=_add_step("step", accumulate, accumulator, load_as, load_as != "f64"),
        combine=_add_step("combine", accumulate, accumulator, None, load_as != "f64"),
        finish=_finish(accumulate, rounding, accumulator, result),
        order=order,
        loads=(load_as,),
        result=result,
        accumulator=accumulator,
        draws=accumulate.mode.random_bits > 0,
        finish_draws=_finish_draws(accumulate, rounding),
    )


@lru_cache(maxsize=1024)
def cumsum_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Scan:
    """Return the kernel of all prefix sums, k ascending."""
    accumulator = _accumulator(accumulate, (CARRIER_OF[load_as],))
    accumulate = chain_rounding(accumulate, accumulator, (CARRIER_OF[load_as],))
    return Scan(
        step=_add_step("step", accumulate, accumulator, load_as, load_as != "f64"),
        finish=_finish(accumulate, rounding, accumulator, result),
        loads=(load_as,),
        result=result,
        accumulator=accumulator,
        draws=accumulate.mode.random_bits > 0,
        finish_draws=_finish_draws(accumulate, rounding),
    )


def _multiply_step(accumulate: Rounding, accumulator: Type, loaded: Storage) -> Function:
    """Return (acc, x, random) to R_acc(acc * x). The product of a short significand and a binary32 value is exact."""
    acc, x, random = param("acc", accumulator), param("x", ELEMENT_OF[loaded]), param("random", "u32")
    fmt = accumulate.format
    # The product may not leave binary64's range either: binary32 spans 2^-149 to 2^128.
    short = fmt.precision <= 29 and fmt.quantum_exponent >= -1074 + 149 and fmt.emax < 1023 - 128
    short = short and CARRIER_OF[loaded] == "f32"
    product = apply("mul_inside" if short else "mul", (acc, load(x, loaded)), accumulate, accumulator, random)
    return Function("step", (acc, x, random), (product,))


@lru_cache(maxsize=1024)
def prod_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Reduce:
    """Return the product of a length: acc = 1; acc = R_acc(acc * x[k]), k ascending, in the format's own range."""
    accumulator = _accumulator(accumulate, (CARRIER_OF[load_as],))
    return Reduce(
        step=_multiply_step(accumulate, accumulator, load_as),
        combine=_add_step("combine", accumulate, accumulator, None, load_as != "f64"),
        finish=_finish(accumulate, rounding, accumulator, result),
        order=SEQUENTIAL,
        loads=(load_as,),
        result=result,
        accumulator=accumulator,
        draws=accumulate.mode.random_bits > 0,
        finish_draws=_finish_draws(accumulate, rounding),
        first=1,
    )


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
def cumprod_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Scan:
    """Return the kernel of all prefix products, k ascending."""
    whole = prod_kernel(accumulate, rounding, load_as, result)
    return Scan(
        step=whole.step,
        finish=whole.finish,
        loads=(load_as,),
        result=result,
        accumulator=whole.accumulator,
        draws=whole.draws,
        finish_draws=whole.finish_draws,
        first=1,
    )


@lru_cache(maxsize=1024)
def scatter_format(accumulate: Rounding, storage: Storage) -> Format:
    """Return a format that holds every sum of a scatter into zeros, as it is stored."""
    carriers = (CARRIER_OF[storage],)
    inside = chain_rounding(accumulate, _accumulator(accumulate, carriers), carriers).format
    return inside if inside.within(FORMAT_OF[storage]) else FORMAT_OF[storage]


@lru_cache(maxsize=1024)
def scatter_kernel(accumulate: Rounding, storage: Storage) -> Scatter:
    """Return the kernel that adds contributions to a destination in order, each addition rounded by ``accumulate``.

    The result is stored in the destination's own dtype, rounded to nearest even if the dtype does not hold it.
    """
    accumulator = _accumulator(accumulate, (CARRIER_OF[storage],))
    accumulate = chain_rounding(accumulate, accumulator, (CARRIER_OF[storage],))
    return Scatter(
        lift=_lift(storage, accumulator),
        step=_add_step("step", accumulate, accumulator, storage, storage != "f64"),
        finish=_finish(accumulate, Rounding.parse(str(FORMAT_OF[storage])), accumulator, storage),
        loads=(storage,),
        result=storage,
        accumulator=accumulator,
        draws=accumulate.mode.random_bits > 0,
    )


def _lift(stored: Storage, accumulator: Type) -> Function:
    element = param("element", ELEMENT_OF[stored])
    return Function("lift", (element,), (apply("identity", (load(element, stored),), None, accumulator),))


@lru_cache(maxsize=1024)
def contract_kernel(
    accumulate: Accumulation | Rounding, rounding: Rounding, loads: tuple[Storage, Storage], result: Storage
) -> Contract:
    """Return the kernel of sums of products, accumulated as ``accumulate`` says and stored through ``rounding``."""
    how = Accumulation.parse(accumulate)
    carriers = tuple(CARRIER_OF[s] for s in loads)
    native = all(_accumulator(r, carriers) == "f32" for r in (how.step, how.combine) if r is not None)
    fits = how.product is None or how.product.format.within(FORMAT_OF["f32"])
    accumulator: Type = "f32" if native and fits else "f64"
    step = chain_rounding(how.step, accumulator, carriers)
    combine = None if how.combine is None else chain_rounding(how.combine, accumulator, carriers)
    last = combine or step
    return Contract(
        lifts=(_lift(loads[0], accumulator), _lift(loads[1], accumulator)),
        step=_contract_step(how, step, accumulator, carriers),
        finish=_finish(last, rounding, accumulator, result),
        chunk=how.chunk or 0,
        combine=None if combine is None else _add_step("combine", combine, accumulator, None, "f64" not in carriers),
        loads=loads,
        result=result,
        accumulator=accumulator,
        draws=how.random,
        finish_draws=_finish_draws(last, rounding),
        coins=_tosses_coins(how),
        quick=_quick_contract(how, rounding, loads, result) if accumulator == "f64" else None,
    )


def _tosses_coins(how: Accumulation) -> bool:
    """Whether a step has one rounding that needs one random bit, and nothing else draws between two steps."""
    return how.product is None and how.chunk is None and how.step.mode.random_bits == 1


def _quick_contract(
    how: Accumulation, rounding: Rounding, loads: tuple[Storage, Storage], result: Storage
) -> Contract | None:
    """Return the contraction by binary32 steps under a hardware rounding direction; None if there is none.

    Its store consists of operators that the rounding direction does not change.
    """
    simple = how.product is None and how.chunk is None and {CARRIER_OF[s] for s in (*loads, result)} == {"f32"}
    if not simple or chain_rounding(how.step, "f64", ("f32",)) == how.step:
        return None
    a, b, acc, random = param("a", "f32"), param("b", "f32"), param("acc", "f32"), param("random", "u32")
    found = directed_step(how.step, a, b, acc, random)
    if found is None:
        return None
    direction, value = found
    finish = _finish(how.step, rounding, "f32", result)
    if any(node.op in HARDWARE_ROUNDED for node in finish.schedule):
        return None
    # Towards -infinity an exact zero is -0, whereas the chain's is +0.
    zero = from_bits(select(bits(acc).equals(1 << 31), 0, bits(acc)))
    stored = substitute(finish.results, {finish.params[0]: zero}) if direction == "down" else finish.results
    return Contract(
        lifts=(_lift(loads[0], "f32"), _lift(loads[1], "f32")),
        step=Function("step", (a, b, acc, random), (value,)),
        finish=Function("finish", finish.params, tuple(stored)),
        chunk=0,
        combine=None,
        loads=loads,
        result=result,
        accumulator="f32",
        draws=how.random,
        finish_draws=_finish_draws(how.step, rounding),
        coins=_tosses_coins(how),
        direction=direction,
        watched=True,
    )


def _contract_step(how: Accumulation, step: Rounding, accumulator: Type, carriers: tuple[Type, ...]) -> Function:
    a, b, acc = (param(name, accumulator) for name in ("a", "b", "acc"))
    random = param("random", "u32")
    narrow_factors = "f64" not in carriers
    if how.product is not None:
        # The two roundings of a step share its 32 bits: the product draws the low half, the sum the high half.
        operator = "mul_inside" if accumulator == "f64" and narrow_factors else "mul"
        product = apply(operator, (a, b), how.product, accumulator, random << 16)
        adds = "add_inside" if narrow_factors else "add_step"
        value = apply(adds, (product, acc), step, accumulator, random, any_nan=narrow_factors)
    else:
        # Binary32 factors held in binary64 have an exact product.
        operator = "fma_inside" if accumulator == "f64" and narrow_factors else "fma_step"
        if step.mode.jitter and step != how.step and step.format.precision == 24:
            value = up_or_down(fma(a, b, acc), step.format.precision, random)
        else:
            value = apply(operator, (a, b, acc), step, accumulator, random, any_nan=narrow_factors)
    return Function("step", (a, b, acc, random), (value,))
