"""What binary64 loses decides in every mode that asks whether a value is exact, or on which side of a midpoint it lies.

The specification is ``exact`` over rational numbers: the exact value of an operation is rounded once.
"""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from benchmarks.reference import FUNCTIONS as REFERENCES
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact

UNGRADED = [name for name, mode in MODES.items() if not mode.graded]
COINS = (0, 2**32 - 1)
TARGETS = ("binary32", "bfloat16", "ieee(8,20)", "posit16")
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
# Next to values of the formats and to midpoints of theirs, nearer than binary64 shows.
PLACES = [1.0, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-8, 1 + 2.0**-20, 2 - 2.0**-24, 3.0, 2.0**-126, 2.0**100]


def results(body: str, operands: list[list[float]], carrier: str) -> np.ndarray:
    kernel = map_kernel(Program.parse(body), (carrier,) * len(operands), "f32").body
    values = [np.array(v, dtype=np.float64 if carrier == "f64" else np.float32) for v in operands]
    if len(kernel.params) == len(operands):
        return np.stack([kernel.evaluate(*values)[0]] * 2)
    words = [np.full(len(values[0]), coin, dtype=np.uint32) for coin in COINS]
    return np.stack([kernel.evaluate(*values, word)[0] for word in words])


def cases(name: str, carrier: str) -> list[tuple[float, ...]]:
    """Operands whose result is a place, or next to it on either side by less than binary64 shows."""
    places = [p for p in PLACES if carrier == "f64" or float(np.float32(p)) == p]
    near = [(p, s * p * 2.0**-70) for p in places for s in (0, 1, -1)]
    rows: dict[str, list[tuple[float, ...]]] = {
        "add": near,
        "sub": near,
        "mul": [(1 + 2.0**-30, 1 - 2.0**-30), (1 - 2.0**-40, 1 + 2.0**-40), (3.0, 5.0)],
        "div": [(1 + 2.0**-52, 1 - 2.0**-53), (2.0, 3.0), (15.0, 5.0), (1 - 2.0**-53, 1 + 2.0**-52)],
        "fma": [(1 + 2.0**-12, 1 + 2.0**-12, c) for c in (2.0**-80, 0.0, -(2.0**-80))]
        + [(d, 2.0**-35, p) for p, d in near],
    }
    return rows[name] if carrier == "f64" else [r for r in rows[name] if all(float(np.float32(v)) == v for v in r)]


@pytest.mark.parametrize("mode", UNGRADED)
@pytest.mark.parametrize("name", EXACT)
def test_what_binary64_loses_decides(name: str, mode: str) -> None:
    arguments = ", ".join(f"x{i}" for i in range(OPERATORS[name].arity))
    for carrier in ("f64", "f32"):
        rows = cases(name, carrier)
        for target in TARGETS:
            if not rows:
                continue
            rounding = Rounding.parse(f"{target}/{mode}")
            got = results(f"t0 = {name}({arguments}) @ {rounding}", [list(c) for c in zip(*rows, strict=True)], carrier)
            for i, row in enumerate(rows):
                exact = EXACT[name](*map(Fraction, row))
                for coin, value in zip(COINS, got[:, i], strict=True):
                    assert float(value) == round_exact(exact, exact < 0, rounding, coin), (carrier, rounding, row, coin)


@pytest.mark.parametrize("mode", UNGRADED)
def test_an_inexact_function_value_next_to_a_value_of_the_format_is_inexact(mode: str) -> None:
    """1 + 2^-60 as sqrt, exp and others compute it: binary64 itself shows 1."""
    arguments = {
        "sqrt": [1 + 2.0**-52, 4.0, 1 - 2.0**-53],
        "exp": [2.0**-60, -(2.0**-60), 0.0],
        "cos": [2.0**-30, 0.0],
        "erf": [6.0, -6.0],
        "tanh": [20.0, -20.0],
        "sigmoid": [40.0, 2.0**-70],
        "sin": [2.0**-40, 0.5],
        "log1p": [2.0**-60],
        "cbrt": [1 + 2.0**-52, 27.0],
        "rsqrt": [0.25, 1 + 2.0**-52],
    }
    for name, values in arguments.items():
        for target in ("binary32", "bfloat16"):
            rounding = Rounding.parse(f"{target}/{mode}")
            got = results(f"t0 = {name}(x0) @ {rounding}", [values], "f64")
            for i, x in enumerate(values):
                with mpmath.workprec(400):
                    wide = mpmath.sqrt(x) if name == "sqrt" else mpmath.mpf(REFERENCES[name].wide(x, 400))
                    sign, mantissa, exponent, _ = wide._mpf_
                    exact = (-1) ** sign * int(mantissa) * Fraction(2) ** exponent
                for coin, value in zip(COINS, got[:, i], strict=True):
                    wanted = round_exact(exact, exact < 0, rounding, coin)
                    assert float(value) == wanted, (name, rounding, x, coin)
