"""A format in words, for ``Format.describe``: its parameters, ties, subnormals, minus zero and overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxround.numerics.formats import Format


def description(fmt: Format) -> str:
    """Return the text of ``Format.describe``."""
    if fmt.span is not None:
        return (
            f"{fmt.name}: the multiples of 2^{fmt.quantum_exponent} from {fmt.span[0]:g} to {fmt.span[1]:g}\n"
            f"  ties        to the even multiple (nearest_even)\n"
            f"  subnormals  none: one quantum\n"
            f"  minus zero  becomes plus zero\n"
            f"  overflow    saturate by default; possible: {', '.join(fmt.overflows)}"
        )
    if fmt.values:
        return (
            f"{fmt.name}: {len(fmt.values)} values from {fmt.values[0]:g} to {fmt.values[-1]:g}\n"
            f"  ties        to the value with the even number, from 0 (nearest_even)\n"
            f"  subnormals  none: all values are listed\n"
            f"  minus zero  {'becomes plus zero' if fmt.zero else 'no zero at all'}\n"
            f"  overflow    saturate: a value beyond an end becomes that end"
        )
    if fmt.posit:
        return (
            f"{fmt.name}: {fmt.posit[0]} bits, {fmt.posit[1]} of them for the exponent, largest precision "
            f"{fmt.precision}, minimum 2^{fmt.emin}, maximum 2^{fmt.emax}\n"
            f"  ties        to the even code; the middle is the code of one bit more (nearest_even)\n"
            f"  subnormals  none: a nonzero number below 2^{fmt.emin} becomes 2^{fmt.emin} in every mode\n"
            f"  minus zero  becomes plus zero\n"
            f"  overflow    saturate: no finite number leaves the range; an infinity becomes NaN (NaR)"
        )
    one_bit = "to the even code" if fmt.even_codes else "to the larger magnitude (one-bit significand)"
    ties = "to the even significand" if fmt.precision > 1 else one_bit
    low = f"down to 2^{fmt.quantum_exponent}" if fmt.subnormals else f"none: 0 or 2^{fmt.emin}"
    if not fmt.zero:
        low = f"none: nothing below 2^{fmt.emin}, zero is {'NaN' if fmt.nan else 'the minimum'}"
    minus = "kept" if fmt.has_minus_zero else "becomes plus zero" if fmt.zero else "no zero at all"
    sign = "" if fmt.signed else "; no sign: negative values are out of range"
    return (
        f"{fmt.name}: p={fmt.precision}, emin={fmt.emin}, emax={fmt.emax}, maximum={fmt.maximum:g}\n"
        f"  ties        {ties} (nearest_even)\n"
        f"  subnormals  {low}\n"
        f"  minus zero  {minus}{sign}\n"
        f"  overflow    {fmt.default_overflow} by default; possible: {', '.join(fmt.overflows)}"
    )
