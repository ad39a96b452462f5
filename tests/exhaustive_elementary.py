"""Is every binary32 input of the unary elementary functions correctly rounded? Minutes each, not collected by pytest.

    python tests/exhaustive_elementary.py            # all functions
    python tests/exhaustive_elementary.py exp tanh

The value, rounded to odd to 50 bits, is computed for every input by the compiled kernel. Where it comes within 16
binary64 ulps of a binary32 number or of a midpoint of two, far more than any error bound, mpmath decides whether
rounding it to nearest, up and down gives what rounding the exact value gives; elsewhere it cannot be wrong. Binary32's
numbers and midpoints include those of every narrower format, so that those are right as well.
"""

from __future__ import annotations

import sys

import torch
from test_elementary import ELEMENTARY, exact, misrounded

import fxround  # noqa: F401  (registers the operator)

CHUNK = 1 << 22
WINDOW = 16
# Sizes between which a value is looked at. Below the first the function is its argument, or a constant, plus a term
# that only decides the direction; above the second it has saturated, or has left the range of binary32.
# Both are sampled by test_elementary.
TINY, EVERY, MOST = 2.0**-22, 2.0**-149, 3.4028234663852886e38
BOUNDS: dict[str, tuple[float, float, float]] = {
    # name: smallest size, largest negative size, largest positive
    "exp": (TINY, 104, 89), "exp2": (TINY, 150, 128), "expm1": (TINY, 30, 89), "log1p": (TINY, 1, MOST),
    "tanh": (TINY, 15, 15), "sigmoid": (TINY, 104, 30), "softplus": (TINY, 104, 25), "erf": (EVERY, 5.5, 5.5),
    "erfc": (TINY, 5.5, 10.2), "sin": (TINY, MOST, MOST), "cos": (TINY, MOST, MOST), "tan": (TINY, MOST, MOST),
    "asin": (TINY, 1, 1), "acos": (TINY, 1, 1), "atan": (TINY, MOST, MOST), "sinh": (TINY, 89.5, 89.5),
    "cosh": (TINY, 89.5, 89.5), "asinh": (TINY, MOST, MOST), "atanh": (TINY, 1, 1),
}  # fmt: skip


def suspects(name: str) -> list[tuple[float, float]]:
    """(x, value) wherever the value comes close to a boundary."""
    smallest, negative, positive = BOUNDS.get(name, (EVERY, MOST, MOST))
    program, rng = f"t0 = {name}(x0) @ ieee(11,50)/to_odd/inf", torch.zeros(2, dtype=torch.int64)
    found: list[tuple[float, float]] = []
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        x = torch.arange(start, start + CHUNK, dtype=torch.int64).to(torch.int32).view(torch.float32)
        x = x[(x.abs() >= smallest) & (x >= -negative) & (x <= positive)]
        y = torch.ops.fxround.pointwise([x], program, torch.float64, rng, 0)
        close = (((y.view(torch.int64) + WINDOW) & ((1 << 28) - 1)) <= 2 * WINDOW) & y.isfinite() & (y != 0)
        found += zip(x[close].tolist(), y[close].tolist(), strict=True)
    return found


def main(names: list[str]) -> int:
    wrong = 0
    for name in names:
        close = [(x, y) for x, y in suspects(name) if exact(ELEMENTARY[name], (x,)) is not None]
        bad = [(x, found) for x, y in close if (found := misrounded(name, (x,), y))]
        wrong += len(bad)
        print(f"{name}: {len(close)} close to a boundary, {len(bad)} misrounded", *bad[:5], flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [name for name, row in ELEMENTARY.items() if row.arity == 1]))
