"""The short evaluations of elementary functions against the long ones, for all 2^32 binary32 inputs.

    python -m benchmarks.short_evaluations                # all functions of one argument; minutes each

The roundings other than to nearest even take the short value where it is ``near`` and both ends of the interval around
it round alike. This is right if the interval holds the long value. The table has the number of inputs where the short
value is near, and the greatest distance of the two values, in binary64 ulps; the interval's half width is ``WINDOW``.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

from benchmarks.harness import header, table
from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.scalar import (
    Function,
    bits,
    const,
    maximum,
    minimum,
    narrow,
    param,
    select,
    signed_to_f64,
    widen,
)
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.elementary.quick import WINDOW
from fxround.runtime.cpu.pointwise import run_kernel
from fxround.runtime.draw import NO_KEY

_CHUNK: Final = 1 << 22


def distance_kernel(name: str) -> Map:
    """Return the kernel of the distance in binary64 ulps, to 24 bits; -1 where the short value is not near."""
    row = ELEMENTARY[name]
    x = param("x0", "f32")
    if row.quick is None:
        raise ValueError(f"{name} has no short evaluation")
    short, long = row.quick(widen(x)), bits(row.build(widen(x)))
    code = bits(short.value)
    # Distances beyond 2^52 count as that: the conversion reads a number of 52 bits.
    apart = minimum(maximum(code, long) - minimum(code, long), const("u64", 1 << 52))
    distance = select(short.near, narrow(signed_to_f64(apart)), const("f32", -1.0))
    return Map(Function("map", (x,), (distance,)), ("f32",), ("f32",), ())


def main() -> None:
    """Print the table; exit with 1 if a distance exceeds the interval."""
    rows, worst = [], 0.0
    for name, row in ELEMENTARY.items():
        if row.quick is None or row.arity > 1:
            continue
        kernel, near, most, where = distance_kernel(name), 0, 0.0, 0
        for start in range(-(1 << 31), 1 << 31, _CHUNK):
            codes = torch.arange(start, start + _CHUNK, dtype=torch.int64).to(torch.int32)
            (errors,) = run_kernel(kernel, [codes.view(torch.float32)], NO_KEY)
            near += int((errors >= 0).sum())
            highest = errors.max(0)
            if float(highest.values) > most:
                most, where = float(highest.values), int(codes[highest.indices]) & 0xFFFFFFFF
        rows.append((name, f"{near:,}", f"{most:,.0f}", f"{where:#010x}"))
        worst = max(worst, most)
        print(name, *rows[-1][1:], file=sys.stderr, flush=True)
    print(header(("torch",)))
    print(table(("function", "inputs where near", "greatest distance", "at"), rows))
    print(f"The half width of the interval is {WINDOW:,}.")
    sys.exit(worst > WINDOW)


if __name__ == "__main__":
    main()
