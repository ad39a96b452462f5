"""The kernels of pointwise programs, of one operation or a fused chain: a function of each element.

A program that its operands or results do not fit (a format that the carrier lacks, a result that the dtype cannot
store) raises ValueError here, before any code is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from fxround.errors import shown
from fxround.kernels.kinds import Map, Word
from fxround.kernels.program import Program, Statement
from fxround.numerics.arithmetic.forms import short as short_rounding
from fxround.numerics.arithmetic.forms.addition import round_by_addition
from fxround.numerics.arithmetic.forms.single import has_single_value, single_value
from fxround.numerics.arithmetic.forms.ties import NEAREST, is_doubtful, rounds_twice
from fxround.numerics.arithmetic.operators import HARDWARE, apply
from fxround.numerics.arithmetic.randomness import width_of
from fxround.numerics.arithmetic.scalar import Expr, Function, Type, const, negate, param, rarely
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats import Format
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.formats.storage import CARRIER_OF, ELEMENT_OF, FORMAT_OF, Storage, load, store
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float

_OR_ITS_NUMBERS: Final = ", or list numbers of this dtype, as fxround.table(torch.tensor([...])) does"


@lru_cache(maxsize=4096)
def map_kernel(program: Program, loads: tuple[Storage, ...], result: Storage, powers: tuple[str, ...] = ()) -> Map:
    """Return the kernel of a program with one result. Statement s draws number s of the call's only node.

    powers: the operands that are powers of two from 2^-127 to 2^127.

    Raises ValueError for a wrong number of operands, an operator that does not exist, or a rounding that the result's
    dtype cannot store or the operands' carrier cannot be rounded to.
    """
    words = tuple(Word(0, n) for n in range(len(program.statements)))
    return _map_kernel(program, loads, (result,), words, powers)


@lru_cache(maxsize=4096)
def fused_kernel(program: Program, loads: tuple[Storage, ...], results: tuple[Storage, ...]) -> Map:
    """Return the kernel of a fused program. Each statement that draws has a node number of its own, in order.

    Raises what ``map_kernel`` raises.
    """
    words = iter(range(len(program.statements)))
    drawn = tuple(Word(next(words), 0) if draws(s) else Word(0, 0) for s in program.statements)
    return _map_kernel(program, loads, results, drawn)


@lru_cache(maxsize=4096)
def steps_kernel(program: Program, loads: tuple[Storage, ...], result: Storage) -> Map:
    """Return the kernel of a program that stores the value of every statement, with the draws of ``map_kernel``'s.

    The values are stored in binary32, or in binary64 where the program's result is.
    """
    words = tuple(Word(0, n) for n in range(len(program.statements)))
    every = replace(program, returned=tuple(s.target for s in program.statements))
    stored: Storage = "f64" if CARRIER_OF[result] == "f64" else "f32"
    return _map_kernel(every, loads, (stored,) * len(words), words)


def draws(statement: Statement) -> bool:
    """Whether a statement's rounding draws random bits."""
    return statement.rounding is not None and statement.rounding.mode.random_bits > 0


def _width(statement: Statement) -> int:
    """The random bits that a statement takes. A fault decides by all bits of a word."""
    if statement.rounding is None or numbers_of(statement.operator) is not None:
        return 32
    return width_of(statement.rounding.mode.random_bits)


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
                f"{said}: {name} has values of {grids[name].said} that a {FORMAT_OF[result]} tensor cannot store; "
                f"use a wider dtype{_OR_ITS_NUMBERS if grids[name].values else ''}"
            )
    return carrier


def _map_kernel(
    program: Program,
    loads: tuple[Storage, ...],
    results: tuple[Storage, ...],
    words: tuple[Word, ...],
    powers: tuple[str, ...] = (),
) -> Map:
    kernel = _map_of(program, loads, results, words, powers)
    stepped = [s for s in program.statements if s.rounding is not None and has_single_value(s.operator, s.rounding)]
    if not stepped or {CARRIER_OF[s] for s in (*loads, *results)} != {"f32"}:
        return kernel
    return replace(kernel, single=_map_of(program, loads, results, words, powers, single=True))


def _map_of(
    program: Program,
    loads: tuple[Storage, ...],
    results: tuple[Storage, ...],
    words: tuple[Word, ...],
    powers: tuple[str, ...],
    single: bool = False,
) -> Map:
    """Return the kernel. single: its sums and products are in binary32 where that is possible."""
    carrier = program_carrier(program, loads, results)
    elements = tuple(param(f"x{i}", ELEMENT_OF[s]) for i, s in enumerate(loads))
    values: dict[str, Expr] = {f"x{i}": load(e, s) for i, (e, s) in enumerate(zip(elements, loads, strict=True))}
    randoms: list[Expr] = []
    drawn: list[Word] = []
    grids = _grids(program, loads, carrier)
    plain, wide = ({carrier, *(CARRIER_OF[s] for s in loads)} == {one} for one in ("f32", "f64"))
    for number, (s, word) in enumerate(zip(program.statements, words, strict=True)):
        random = param(f"r{number}", "u32") if draws(s) else None
        if random is not None:
            randoms.append(random)
            drawn.append(replace(word, width=_width(s)))
        operands = tuple(values[o] if isinstance(o, str) else const(carrier, o) for o in s.operands)
        free = plain and _only_computed(s.target, program)
        any_nan = free and s.operator in _NATIVE and str(s.rounding) == HARDWARE
        value = apply(s.operator, operands, s.rounding, carrier, random, any_nan)
        alike = (plain or wide) and s.rounding is not None and _is_sum_of_its_format(s, s.rounding, grids, carrier)
        scaled = plain and s.rounding is not None and _is_exactly_scaled(s, s.rounding, grids, powers)
        if (alike or scaled) and s.rounding is not None:
            value = _rounded_again(s, s.rounding, operands, free)
        elif plain and s.rounding is not None:
            value = _in_binary32(s, s.rounding, operands, free, powers, random, value)
        elif wide and s.rounding is not None and short_rounding.is_short(s.rounding, CARRIERS["f64"]):
            value = _short(s, operands, False, (), value)
        values[s.target] = value
        if single and s.rounding is not None and random is not None and has_single_value(s.operator, s.rounding):
            values[s.target] = single_value(s.operator, operands, s.rounding, random, value)
    stored = tuple(store(values[name], result) for name, result in zip(program.results, results, strict=True))
    computed = tuple(values[s.target] for s in program.statements)
    return Map(Function("map", (*elements, *randoms), stored), loads, results, tuple(drawn), computed)


def _is_sum_of_its_format(s: Statement, rounding: Rounding, grids: dict[str, Format], carrier: Type) -> bool:
    """Whether a statement adds values of the format that it rounds to nearest, of half of the carrier's precision.

    Then the carrier's sum, rounded again, is the sum rounded once: for a precision p, 2 p + 1 bits are enough
    (Figueroa, SIGNUM Newsletter 30(3), 1995). A sum that is subnormal in the format is a multiple of its quantum, and
    exact.
    """
    fmt = rounding.format
    nearest = s.operator in ("add", "sub") and rounding.mode.name == "nearest_even" and fmt.is_grid
    known = [grids[o] for o in s.operands if isinstance(o, str)]
    numbers = [o for o in s.operands if not isinstance(o, str)]
    enough = 2 * fmt.precision + 1 <= CARRIERS[carrier].format.precision
    return (
        nearest
        and enough
        and fmt.precision > 1
        and fmt.subnormals
        and fmt.has_minus_zero
        and _holds(fmt, known, numbers)
    )


def _is_exactly_scaled(s: Statement, rounding: Rounding, grids: dict[str, Format], powers: tuple[str, ...]) -> bool:
    """Whether a statement multiplies values of a format by a power of two, and binary32 has the exact product.

    The power is at least 2^-127, so that the product is a multiple of binary32's least number. A product beyond
    binary32 is an infinity, and one of the rounding, too.
    """
    if s.operator != "mul" or s.operands[1] not in powers or not isinstance(s.operands[0], str):
        return False
    fmt, carrier = grids[s.operands[0]], CARRIERS["f32"].format
    least = fmt.emin - fmt.precision + 1 - 127
    exact = fmt.is_grid and fmt.precision <= carrier.precision and least >= carrier.quantum_exponent
    infinite = rounding.mode.name == "nearest_even" and rounding.overflow == "inf"
    return exact and infinite and rounding.format.precision < carrier.precision and rounding.format.within(carrier)


def _rounded_again(s: Statement, rounding: Rounding, operands: tuple[Expr, ...], any_nan: bool) -> Expr:
    """Return the carrier's value of a statement, rounded to nearest again."""
    value = NEAREST[s.operator](*operands)
    if short_rounding.is_short(rounding, CARRIERS[value.type]):
        return short_rounding.identity(value, rounding, any_nan)
    return apply("identity", (value,), rounding, value.type)


def _in_binary32(
    s: Statement,
    rounding: Rounding,
    operands: tuple[Expr, ...],
    any_nan: bool,
    powers: tuple[str, ...],
    random: Expr | None,
    general: Expr,
) -> Expr:
    """Return the value of a statement of binary32 operands by fewer operators, if there is such a way."""
    carrier = CARRIERS["f32"]
    if rounds_twice(s.operator, rounding, carrier):
        nearest = NEAREST[s.operator](*operands)
        rounded = round_by_addition(nearest, rounding, carrier, random, any_nan)
        return rarely(is_doubtful(s.operator, operands, nearest, rounding), general, rounded)
    return _short(s, operands, any_nan, powers, general) if short_rounding.is_short(rounding, carrier) else general


def _short(s: Statement, operands: tuple[Expr, ...], any_nan: bool, powers: tuple[str, ...], general: Expr) -> Expr:
    """Return the value of a statement that is rounded to fewer exponents, if there is a short way, else ``general``."""
    assert s.rounding is not None
    x, *others = operands
    if s.operator == "identity":
        return short_rounding.identity(x, s.rounding, any_nan)
    if s.operator == "div" and s.operands[1] in powers:
        return short_rounding.scaled_down(x, others[0], s.rounding, any_nan)
    if s.operator == "div":
        return short_rounding.quotient(x, others[0], s.rounding, any_nan, general)
    if s.operator == "mul":
        return short_rounding.product(x, others[0], s.rounding, any_nan, general)
    if s.operator in ("add", "sub") and x.type == "f64":
        y = negate(others[0]) if s.operator == "sub" else others[0]
        return short_rounding.total(x, y, s.rounding, any_nan, general)
    return general


# Operators that are one instruction of the processor in binary32 to nearest.
_NATIVE: Final = frozenset(("add", "sub", "mul", "div", "fma", "reciprocal", "sqrt"))
# Operators whose rounded result is the one NaN for a NaN of any sign and payload.
_COMPUTING: Final = _NATIVE | {"rsqrt", "exp", "log", "tanh", "sigmoid", "erf"}


def _only_computed(name: str, program: Program) -> bool:
    """Whether nothing shows the sign or the payload of a NaN that is the value: rounded arithmetic alone reads it."""
    readers = [s for s in program.statements if name in s.operands]
    return name not in program.results and all(s.rounding is not None and s.operator in _COMPUTING for s in readers)


def _grids(program: Program, loads: tuple[Storage, ...], carrier: Type) -> dict[str, Format]:
    """Return for each name a format that holds all of its values.

    This is the format that it is rounded to, or one that the operands of an exact statement have.
    """
    widest = FORMAT_OF["f32" if carrier == "f32" else "f64"]
    grids = {f"x{i}": FORMAT_OF[s] for i, s in enumerate(loads)}
    for s in program.statements:
        known = [grids[o] for o in s.operands if isinstance(o, str)]
        numbers = [o for o in s.operands if not isinstance(o, str)]
        candidates = (*known, FORMAT_OF["bf16"], FORMAT_OF["f16"])
        holds = next((f for f in candidates if _holds(f, known, numbers)), widest)
        grids[s.target] = s.rounding.format if s.rounding is not None else holds
    return grids


def _holds(candidate: Format, formats: Sequence[Format], numbers: Sequence[float]) -> bool:
    """Whether a format has every value of the given formats, and the given numbers."""
    nearest = Rounding.parse(candidate.name)
    return all(other.within(candidate) for other in formats) and all(round_float(n, nearest) == n for n in numbers)
