"""Factorizations and triangular systems in the order of docs/linear-algebra.md, one rounding after each operation.

A matrix is a list of rows of floats. The arithmetic is that of ``rationals``, over rational numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rationals
from rationals import Rounding

Matrix = list[list[float]]


@dataclass(frozen=True)
class Steps:
    """The rounding of an operation, that of a step of a contraction, and the columns of a block."""

    rounding: Rounding
    step: Rounding
    block: int

    def less(self, x: float, a: float, b: float) -> float:
        """x - a * b, both operations rounded."""
        return rationals.sub(x, rationals.mul(a, b, self.rounding), self.rounding)

    def less_sum(self, x: float, a: Sequence[float], b: Sequence[float]) -> float:
        """x - sum(a * b); x if there is nothing to add up."""
        return rationals.sub(x, self.dot(a, b), self.rounding) if a else x

    def dot(self, a: Sequence[float], b: Sequence[float]) -> float:
        return rationals.contraction(a, b, self.step, self.rounding)

    def div(self, a: float, b: float) -> float:
        return rationals.div(a, b, self.rounding)

    def sqrt(self, x: float) -> float:
        return rationals.sqrt(x, self.rounding)

    def mul(self, a: float, b: float) -> float:
        return rationals.mul(a, b, self.rounding)

    def sum(self, x: Sequence[float]) -> float:
        return rationals.round_float(rationals.lanes(x, 16, self.step), self.rounding)

    def product(self, a: Matrix, b: Matrix) -> Matrix:
        return [[self.dot(row, column) for column in transposed(b)] for row in a]


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def unit(n: int) -> Matrix:
    return [[float(i == j) for j in range(n)] for i in range(n)]


def solve_lower(a: Matrix, b: Matrix, one: bool, steps: Steps) -> Matrix:
    """x of a x = b, the lower triangle of a read. one: whether the diagonal is taken as 1."""
    n, x = len(a), [list(row) for row in b]
    for begin in range(0, n, steps.block):
        end = min(begin + steps.block, n)
        for i in range(begin, end):
            x[i] = [steps.less_sum(v, a[i][:begin], [x[k][c] for k in range(begin)]) for c, v in enumerate(x[i])]
        for j in range(begin, end):
            x[j] = x[j] if one else [steps.div(v, a[j][j]) for v in x[j]]
            for i in range(j + 1, end):
                x[i] = [steps.less(v, a[i][j], x[j][c]) for c, v in enumerate(x[i])]
    return x


def solve_upper(a: Matrix, b: Matrix, one: bool, steps: Steps) -> Matrix:
    """x of a x = b, the upper triangle of a read, from the last row and the last column on."""
    return solve_lower([row[::-1] for row in a[::-1]], b[::-1], one, steps)[::-1]


def lu(a: Matrix, steps: Steps) -> tuple[Matrix, list[int], list[int]]:
    """L and U in one, the pivots counted from 1, and which row of a each row is."""
    a, order, pivots = [list(row) for row in a], list(range(len(a))), []
    m, n = len(a), len(a[0])
    least = min(m, n)
    for begin in range(0, least, steps.block):
        end = min(begin + steps.block, least)
        for i in range(begin, m):
            for j in range(begin, end):
                a[i][j] = steps.less_sum(a[i][j], a[i][:begin], [a[k][j] for k in range(begin)])
        for j in range(begin, end):
            p = max(range(j, m), key=lambda i: abs(a[i][j]))
            pivots.append(p + 1)
            for rows in (a, order):
                rows[j], rows[p] = rows[p], rows[j]  # type: ignore[index]
            for i in range(j + 1, m):
                if a[j][j] != 0:
                    a[i][j] = steps.div(a[i][j], a[j][j])
                for k in range(j + 1, end):
                    a[i][k] = steps.less(a[i][k], a[i][j], a[j][k])
        for i in range(begin, end):
            for j in range(end, n):
                a[i][j] = steps.less_sum(a[i][j], a[i][:begin], [a[k][j] for k in range(begin)])
        for j in range(begin, end):
            for i in range(j + 1, end):
                for k in range(end, n):
                    a[i][k] = steps.less(a[i][k], a[i][j], a[j][k])
    return a, pivots, order


def solve(a: Matrix, b: Matrix, steps: Steps) -> Matrix:
    packed, _, order = lu(a, steps)
    return solve_upper(packed, solve_lower(packed, [b[i] for i in order], True, steps), False, steps)


def solve_transposed(a: Matrix, b: Matrix, steps: Steps) -> Matrix:
    """x of a^T x = b, by the factors of a."""
    packed, _, order = lu(a, steps)
    turned = transposed(packed)
    x = solve_upper(turned, solve_lower(turned, b, False, steps), True, steps)
    return [x[order.index(i)] for i in range(len(a))]


def cholesky(a: Matrix, steps: Steps) -> Matrix:
    n = len(a)
    c = [[a[i][j] if j <= i else 0.0 for j in range(n)] for i in range(n)]
    for begin in range(0, n, steps.block):
        end = min(begin + steps.block, n)
        for i in range(begin, n):
            for j in range(begin, min(end, i + 1)):
                c[i][j] = steps.less_sum(c[i][j], c[i][:begin], c[j][:begin])
        for j in range(begin, end):
            c[j][j] = steps.sqrt(c[j][j])
            for i in range(j + 1, n):
                c[i][j] = steps.div(c[i][j], c[j][j])
            for k in range(j + 1, end):
                for i in range(k, n):
                    c[i][k] = steps.less(c[i][k], c[i][j], c[k][j])
    return c


def reflections(a: Matrix, steps: Steps) -> tuple[Matrix, list[float]]:
    """R and the vectors of the reflections in one, and tau."""
    a, taus = [list(row) for row in a], []
    m, n = len(a), len(a[0])
    least = min(m, n)
    for begin in range(0, least, steps.block):
        end = min(begin + steps.block, least)
        for j in range(begin, end):
            alpha, tail = a[j][j], [0.0] * (j + 1 - begin) + [a[i][j] for i in range(j + 1, m)]
            squares = steps.sum([steps.mul(x, x) for x in tail])
            if not any(tail):
                tau, v = 0.0, [0.0] * (m - begin)
            else:
                length = steps.sqrt(rationals.add(steps.mul(alpha, alpha), squares, steps.rounding))
                beta = length if alpha < 0 else -length
                tau = steps.div(rationals.sub(beta, alpha, steps.rounding), beta)
                v = [steps.div(x, rationals.sub(alpha, beta, steps.rounding)) for x in tail]
                a[j][j] = beta
            v[j - begin] = 1.0
            for k in range(j + 1, end):
                share = steps.mul(steps.dot(v, [a[i][k] for i in range(begin, m)]), tau)
                for i in range(j, m):
                    a[i][k] = steps.less(a[i][k], v[i - begin], share)
            for i in range(j + 1, m):
                a[i][j] = v[i - begin]
            taus.append(tau)
        if end < n:
            v = vectors(a, begin, end)
            right = [row[end:] for row in a[begin:]]
            right = reflected(v, transposed(triangle(v, taus[begin:end], steps)), right, steps)
            for i, row in enumerate(right):
                a[begin + i][end:] = row
    return a, taus


def vectors(a: Matrix, begin: int, end: int) -> Matrix:
    """The vectors of a block as columns, from the row ``begin`` on."""
    return [[a[i][j] if i > j else float(i == j) for j in range(begin, end)] for i in range(begin, len(a))]


def triangle(v: Matrix, taus: list[float], steps: Steps) -> Matrix:
    """T of 1 - V T V^T; its columns have zeros in the places that are not there yet."""
    count, columns = len(taus), transposed(v)
    t = [[0.0] * count for _ in range(count)]
    for j, tau in enumerate(taus):
        products = [steps.dot(columns[k], columns[j]) if k < j else 0.0 for k in range(count)]
        column = [-steps.mul(steps.dot(row, products), tau) for row in t]
        for i in range(count):
            t[i][j] = tau if i == j else column[i] if i < j else 0.0
    return t


def reflected(v: Matrix, t: Matrix, x: Matrix, steps: Steps) -> Matrix:
    """(1 - V T V^T) x."""
    product = steps.product(v, steps.product(t, steps.product(transposed(v), x)))
    return [
        [rationals.sub(a, b, steps.rounding) for a, b in zip(*rows, strict=True)]
        for rows in zip(x, product, strict=True)
    ]


def orthogonal(a: Matrix, taus: list[float], columns: int, steps: Steps) -> Matrix:
    """The first columns of the product of the reflections, the last block applied first."""
    q = [[float(i == j) for j in range(columns)] for i in range(len(a))]
    for begin in reversed(range(0, len(taus), steps.block)):
        end = min(begin + steps.block, len(taus))
        v = vectors(a, begin, end)
        inner = reflected(v, triangle(v, taus[begin:end], steps), [row[begin:] for row in q[begin:]], steps)
        for i, row in enumerate(inner):
            q[begin + i][begin:] = row
    return q
