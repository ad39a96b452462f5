"""Cases of the literature: small programs with known answers that rounding changes.

Each is a module of its own, so that a report can name its operations. ``exact_*`` compute the right answers over
rational numbers, from the very numbers that the modules are given. Sources: Muller's recurrence: J.-M. Muller,
Arithmétique des ordinateurs, Masson 1989; Rump's polynomial: S. M. Rump, Algorithms for verified inclusions, 1988, in
the form of Loh and Walster, Rump's example revisited, 2002; Cramer's rule: the example of W. Kahan and of
significantdigits; roots and squares: W. Kahan, How futile are mindless assessments of roundoff, 2006.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, nn


class PartialSums(nn.Module):
    """Sums of the first n terms for several n, in one chain of additions: [terms] to [len(ends)]."""

    last: Tensor

    def __init__(self, *ends: int) -> None:
        super().__init__()
        self.register_buffer("last", torch.tensor(ends) - 1)

    def forward(self, terms: Tensor) -> Tensor:
        return terms.cumsum(0)[self.last]


def harmonic_terms(n: int) -> Tensor:
    """1, 1/2, ..., 1/n in binary32, to nearest."""
    return (1 / torch.arange(1, n + 1, dtype=torch.float64)).float()


class Muller(nn.Module):
    """x[n+1] = 108 - (815 - 1500 / x[n-1]) / x[n] tends to 5 from 4 and 4.25. Any error grows 20-fold a step: 5 repels,
    100 attracts."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.steps):
            x, y = y, 108 - (815 - 1500 / x) / y
        return y


def muller_start(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """4 and 4.25."""
    return torch.tensor(4.0, dtype=dtype), torch.tensor(4.25, dtype=dtype)


def exact_muller(steps: int) -> Fraction:
    """(3^(n+1) + 5^(n+1)) / (3^n + 5^n), n one more than the steps."""
    n = steps + 1
    return Fraction(3 ** (n + 1) + 5 ** (n + 1), 3**n + 5**n)


class Rump(nn.Module):
    """Rump's polynomial; at (77617, 33096) it is -0.827396..., and its terms are near 8e36."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a2, b2 = a * a, b * b
        b4 = b2 * b2
        b6, b8 = b4 * b2, b4 * b4
        return 333.75 * b6 + a2 * (11 * a2 * b2 - b6 - 121 * b4 - 2) + 5.5 * b8 + a / (2 * b)


def rump_point(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(77617, 33096)."""
    return torch.tensor(77617.0, dtype=dtype), torch.tensor(33096.0, dtype=dtype)


def exact_rump() -> Fraction:
    """-54767 / 66192."""
    a, b = Fraction(77617), Fraction(33096)
    inner = 11 * a**2 * b**2 - b**6 - 121 * b**4 - 2
    return Fraction("333.75") * b**6 + a**2 * inner + Fraction("5.5") * b**8 + a / (2 * b)


class Cramer(nn.Module):
    """A 2x2 system by Cramer's rule: [2, 2], [2] to [2]."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        determinant = a[0, 0] * a[1, 1] - a[1, 0] * a[0, 1]
        first = b[0] * a[1, 1] - b[1] * a[0, 1]
        second = a[0, 0] * b[1] - a[1, 0] * b[0]
        return torch.stack([first, second]) / determinant


def cramer_system() -> tuple[Tensor, Tensor]:
    """significantdigits' example in binary64; in decimals its solution is (2, -2), its condition number 2.5e8."""
    a = torch.tensor([[0.2161, 0.1441], [1.2969, 0.8648]], dtype=torch.float64)
    return a, torch.tensor([0.1440, 0.8642], dtype=torch.float64)


def exact_cramer(a: Tensor, b: Tensor) -> tuple[Fraction, Fraction]:
    """The solution of the system whose entries are these binary64 numbers."""
    (p, q), (r, s) = ([Fraction(v) for v in row] for row in a.tolist())
    u, v = (Fraction(w) for w in b.tolist())
    determinant = p * s - r * q
    return (u * s - v * q) / determinant, (p * v - r * u) / determinant


class RootsAndSquares(nn.Module):
    """The square root n times, then the square n times: x, but the roots end near 1."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sqrt()
        for _ in range(self.times):
            x = x.square()
        return x


class Textbook(nn.Module):
    """Variances of rows, [m, n] to [m], by the textbook: the mean square less the squared mean."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        mean = x.sum(-1) / n
        return (x * x).sum(-1) / n - mean * mean


class Welford(nn.Module):
    """The same by Welford's update."""

    def forward(self, x: Tensor) -> Tensor:
        mean, squares = x[..., 0], x[..., 0] * 0
        for k in range(1, x.shape[-1]):
            step = x[..., k] - mean
            mean = mean + step / (k + 1)
            squares = squares + step * (x[..., k] - mean)
        return squares / x.shape[-1]


class NaiveLogSumExp(nn.Module):
    """log(sum(exp(x))) as it is written: [m, n] to [m]."""

    def forward(self, x: Tensor) -> Tensor:
        powers = x.exp()
        return powers.sum(-1).log()


class LogSumExp(nn.Module):
    """The same with the largest element taken out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x, -1)
