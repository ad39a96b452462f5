"""What kernels that accumulate have in common: the accumulator's type, an addition, and the store at the end.

``kernels.reductions`` and ``kernels.contractions`` make their kernels of these functions. A rounding that the dtype of
the result cannot store raises ValueError here, before any code is compiled.
"""

from __future__ import annotations

from fxround.numerics.arithmetic.flipping import hit
from fxround.numerics.arithmetic.forms.fixed import fixed_sum, is_short, require_wrapping, wraps
from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.scalar import Expr, Function, Type, narrow, param
from fxround.numerics.faults import Faults
from fxround.numerics.formats.carriers import one_nan
from fxround.numerics.formats.storage import CARRIER_OF, ELEMENT_OF, FORMAT_OF, Storage, load, store
from fxround.numerics.modes import Rounding


def accumulator_of(accumulate: Rounding, carriers: tuple[Type, ...]) -> Type:
    """Return the accumulator's type.

    binary32 with the hardware's rounding accumulates in f32; every other rounding in f64, which holds its values
    exactly.
    """
    return "f32" if _is_hardware(accumulate) and set(carriers) == {"f32"} else "f64"


def _is_hardware(rounding: Rounding) -> bool:
    return str(rounding) == "binary32/nearest_even/inf"


def passes_any_nan(accumulate: Rounding) -> bool:
    """Whether steps are the hardware's in binary64, which keep a NaN of any bits; the store gives the one NaN."""
    return str(accumulate) == "binary64/nearest_even/inf"


def chain_rounding(
    accumulate: Rounding, accumulator: Type, carriers: tuple[Type, ...], faults: Faults | None = None
) -> Rounding:
    """Return the rounding of a step inside a chain.

    Over binary32 operands, a format with binary32's exponents gets binary64's inside a chain: no partial sum overflows
    or becomes subnormal there, and the store brings the result into range. binary32/nearest_even, the hardware's own,
    keeps its range, whatever else the chain rounds, and so do formats with fewer exponents (binary16, e5m2, ...). An
    accumulator whose bits flip has the format's own bits.
    """
    fmt = accumulate.format
    binary32, binary64 = FORMAT_OF["f32"], FORMAT_OF["f64"]
    like_binary32 = (fmt.emin, fmt.emax, fmt.subnormals) == (binary32.emin, binary32.emax, True) and fmt.has_minus_zero
    own = faults is not None or accumulator != "f64" or "f64" in carriers or _is_hardware(accumulate)
    if own or not like_binary32 or accumulate.overflow != "inf":
        return accumulate
    return Rounding(fmt.with_range_of(binary64), accumulate.mode, "inf")


def lift_function(stored: Storage, accumulator: Type, *steps: Rounding | None) -> Function:
    """Return a stored element to its exact value as an accumulator, for a chain with these roundings of steps."""
    element = param("element", ELEMENT_OF[stored])
    value = _loaded(element, stored, *steps)
    return Function("lift", (element,), (apply("identity", (value,), None, accumulator),))


def _loaded(element: Expr, stored: Storage, *steps: Rounding | None) -> Expr:
    """Return the value of an element, a NaN as the one NaN where a step's integer addition could carry out of it.

    An operand's NaN has zeros below its own precision, and the hardware keeps its payload. A step to fewer bits than
    binary32's adds to bits above these zeros, where a payload of ones would carry into the sign.
    """
    value = load(element, stored)
    binary32 = FORMAT_OF["f32"].precision
    carries = any(step is not None and step.format.precision < binary32 for step in steps)
    return one_nan(value) if carries and stored != "f64" else value


def stays_inside(narrow: bool, accumulate: Rounding, faults: Faults | None) -> bool:
    """Whether no sum overflows in binary64: of narrow elements, unless a fault makes a binary64 number of any size."""
    return narrow and (faults is None or accumulate.format.within(FORMAT_OF["f32"]))


def after_faults(accumulate: Rounding, faults: Faults | None) -> Rounding:
    """Return a rounding to all values that an accumulator can have, with the infinities that faults make."""
    fmt = accumulate.format
    return accumulate if faults is None else Rounding(fmt, accumulate.mode, fmt.default_overflow)


def add_function(
    name: str,
    accumulate: Rounding,
    accumulator: Type,
    loaded: Storage | None,
    inside: bool,
    faults: Faults | None = None,
    on_grid: bool = True,
) -> Function:
    """Return (acc, x, random) to R_acc(acc + x), whose bits flip afterwards.

    x is a stored element, or another accumulator.

    inside: the operands of the chain have at most 32 bits, whose sums do not overflow in binary64. on_grid: acc is a
    value of the accumulator's format; False: it may be what a tensor holds.
    """
    acc, random = param("acc", accumulator), param("random", "u32")
    x = param("x", ELEMENT_OF[loaded] if loaded else accumulator)
    value = _loaded(x, loaded, accumulate) if loaded else x
    # A binary64 operand's NaN may have any bits, and so may one that a fault made.
    any_nan = faults is None and (loaded not in (None, "f64") or passes_any_nan(accumulate))
    if accumulator == "f64" and inside and (wraps(accumulate) or is_short(accumulate)):
        element = apply("identity", (value,), None, accumulator)
        total = fixed_sum(acc, element, accumulate, random, on_grid)
        return Function(name, (acc, x, random), (hit(total, accumulate.format, faults, random),))
    require_wrapping(accumulate, FORMAT_OF["f64"].precision)
    operator = "add_inside" if stays_inside(inside, accumulate, faults) else "add_step"
    total = apply(operator, (acc, value), accumulate, accumulator, random, any_nan=any_nan)
    return Function(name, (acc, x, random), (hit(total, accumulate.format, faults, random),))


def finish_function(accumulate: Rounding, rounding: Rounding, accumulator: Type, result: Storage) -> Function:
    """Return the store's rounding of an accumulator; no rounding where it is proved to be the identity."""
    _require_storable(rounding, result)
    acc, random = param("acc", accumulator), param("random", "u32")
    carrier = CARRIER_OF[result]
    value = one_nan(acc)
    if not _store_is_identity(accumulate, rounding):
        value = apply("identity", (acc,), rounding, carrier, random)
    if value.type != carrier:
        value = narrow(value) if carrier == "f32" else apply("identity", (value,), None, "f64")
    return Function("finish", (acc, random), (store(value, result),))


def unfinished_function(accumulator: Type) -> Function:
    """Return the store of an accumulator as it is, for a sum that goes on elsewhere."""
    acc, random = param("acc", accumulator), param("random", "u32")
    return Function("finish", (acc, random), (store(acc, held_as(accumulator)),))


def held_as(accumulator: Type) -> Storage:
    """Return how an accumulator is stored as it is."""
    return "f32" if accumulator == "f32" else "f64"


def finish_draws(accumulate: Rounding, rounding: Rounding) -> bool:
    """Whether the store's rounding draws random bits."""
    return rounding.mode.random_bits > 0 and not _store_is_identity(accumulate, rounding)


def _store_is_identity(accumulate: Rounding, rounding: Rounding) -> bool:
    """Whether the store's rounding keeps every value that the accumulator can hold."""
    range_kept = rounding.overflow in ("inf", accumulate.overflow)
    if rounding.mode.noise is not None and accumulate.mode.noise is None:
        # The steps had no noise, and the result gets it.
        return False
    return accumulate.format.within(rounding.format) and range_kept and not rounding.mode.jitter


def _require_storable(rounding: Rounding, result: Storage) -> None:
    """Raise ValueError for a rounding with values that a tensor cannot store."""
    if not rounding.format.within(FORMAT_OF[result]):
        raise ValueError(f"{rounding} has values that a {FORMAT_OF[result]} tensor cannot store; use a wider dtype")
