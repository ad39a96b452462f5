"""Operands of every exponent, and comparisons of results, for the tests of the whole range."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch

from fxround.numerics.modes import MODES

RNG = torch.tensor([0, 0])
NO_KEY = (0, 0, 0, 0)
SEED = int(os.environ.get("FXROUND_RANGE_SEED", 0))
ROUNDS = int(os.environ.get("FXROUND_RANGE_ROUNDS", 1))
DETERMINISTIC = [name for name, mode in MODES.items() if mode.deterministic]
LARGEST = 1.7976931348623157e308
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324, LARGEST, -LARGEST]


class Operands:
    """Random binary64 numbers near the ends of the range, near each other, and near the boundaries of formats."""

    def __init__(self, *what: object) -> None:
        self.rng = np.random.default_rng([SEED, *(sum(map(ord, str(w))) for w in what)])

    def significands(self, count: int) -> Any:
        """Significands of 1 to 53 bits, some of them changed by a unit or two."""
        drop = self.rng.integers(0, 53, count)
        short = self.rng.integers(2**52, 2**53, count) >> drop << drop
        return (short + self.rng.integers(-2, 3, count) * (self.rng.random(count) < 0.3)).astype(float)

    def values(self, count: int, special: float = 0.05) -> Any:
        """Exponents of the whole range; a fifth at its ends."""
        where = self.rng.random(count)
        exponents = self.rng.integers(-1074, 1024, count)
        exponents = np.where(where < 0.1, self.rng.integers(1018, 1024, count), exponents)
        exponents = np.where(where > 0.9, self.rng.integers(-1074, -1010, count), exponents)
        with np.errstate(all="ignore"):
            found = np.ldexp(self.significands(count), exponents - 52) * self.rng.choice([-1, 1], count)
        found = np.where(np.isfinite(found), found, LARGEST)
        return np.where(self.rng.random(count) < special, self.rng.choice(SPECIAL, count), found)

    def some(self, share: float, those: Any, others: Any) -> Any:
        return np.where(self.rng.random(len(others)) < share, those, others)

    def near(self, x: Any, apart: int) -> Any:
        """x with other last bits, and up to ``apart`` binades away."""
        scale = self.rng.integers(-apart, apart + 1, len(x)) * (self.rng.random(len(x)) < 0.7)
        return x * np.ldexp(1 + self.rng.integers(-3, 4, len(x)) * 2.0**-52, scale) * self.rng.choice([-1, 1], len(x))

    def of(self, name: str, count: int) -> list[Any]:
        """Operands of an operator: sums that cancel, products at the ends, quotients and roots beside short numbers."""
        a, b, c = (self.values(count) for _ in range(3))
        with np.errstate(all="ignore"):
            if name in ("add", "sub"):
                return [a, self.some(0.5, self.near(a, 60), b)]
            if name == "div":
                return [self.some(0.7, self.values(count) * b, a), b]
            if name == "sqrt":
                root = np.ldexp(self.significands(count), self.rng.integers(-537, 512, count) - 52)
                return [self.some(0.7, np.nextafter(root * root, self.some(0.5, 0.0, root * root)), a)]
            if name == "reciprocal":
                return [self.some(0.3, 1 / a, a)]
            b = self.some(0.6, self.values(count) / a, b)
            c = self.some(0.6, self.near(a * b, 120), c)
            return [a, b] if name == "mul" else [a, b, np.where(np.isinf(c), np.copysign(LARGEST, c), c)]

    def chain(self, length: int) -> tuple[list[float], list[float]]:
        """Factors of products that overflow and underflow, and that cancel earlier products."""
        a, b = [], []
        for x, y in zip(self.values(length, 0.01), self.values(length, 0.01), strict=True):
            with np.errstate(all="ignore"):
                again = a and self.rng.random() < 0.5
                target = -a[-1] * b[-1] if again else self.values(1, 0.0)[0]
                partner = target / x if self.rng.random() < 0.7 else y
            a.append(float(x))
            b.append(float(partner) if math.isfinite(partner) else 1.0)
        return a, b

    def choice(self, those: list[str]) -> str:
        return str(self.rng.choice(those))


def same(got: float, want: float) -> bool:
    """Equal encodings, of which NaN has one."""
    return np.float64(got).tobytes() == np.float64(math.nan if math.isnan(want) else want).tobytes()


def check(got: Any, want: Any, *what: object) -> None:
    got, want = np.asarray(got, dtype=np.float64).ravel(), np.asarray(want, dtype=np.float64).ravel()
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        details = [[float(v).hex() for v in d[i]] if isinstance(d, list) else d for d in what]
        assert same(g, w), (f"FXROUND_RANGE_SEED={SEED}", *details, "got", float(g).hex(), "expected", float(w).hex())
