"""Which assignment is the next to try: integer linear programs over parts and formats, by SciPy's HiGHS.

A variable is 1 if a part has a format. Costs are whole numbers. The noise of an assignment is the sum of that of its
parts, as attribution predicts it: errors of parts are taken for independent. What has been tried is excluded, alone or
with all assignments that are at least as coarse in every part: that have the same format there, or at least twice the
noise. A prediction may be wrong, so that a smaller difference of two formats says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fxround.numerics.lazy import cached_property
from fxround.significance.bits import require
from fxround.tuning.parts import Assignment

Vector = NDArray[np.float64]
# How many times the noise of another format makes a format coarser.
MARGIN: Final = 2.0


@dataclass(frozen=True)
class Program:
    """Costs and noise of each part (rows) in each format (columns).

    whole   whether formats are considered that cost as much in a part as another one, or more, and are coarser
    """

    costs: tuple[tuple[int, ...], ...]
    noise: tuple[tuple[float, ...], ...]
    whole: bool = False

    @cached_property
    def usable(self) -> tuple[tuple[int, ...], ...]:
        """The formats of each part that are considered; of those of equal cost and noise the first one."""
        return tuple(
            tuple(i for i in range(len(row)) if self._is_usable(part, i)) for part, row in enumerate(self.costs)
        )

    def _is_usable(self, part: int, i: int) -> bool:
        own = self.costs[part][i], self.noise[part][i]
        for j, other in enumerate(zip(self.costs[part], self.noise[part], strict=True)):
            if other == own and j < i:
                return False
            if not self.whole and other != own and other[0] <= own[0] and MARGIN * other[1] <= own[1]:
                return False
        return True

    def cost(self, assignment: Assignment) -> int:
        """Return the sum of the costs."""
        return sum(row[given] for row, given in zip(self.costs, assignment, strict=True))

    def predicted(self, assignment: Assignment) -> float:
        """Return the sum of the noise."""
        return math.fsum(row[given] for row, given in zip(self.noise, assignment, strict=True))

    def is_coarser(self, a: Assignment, b: Assignment) -> bool:
        """Whether ``a`` is at least as coarse as ``b`` in each part."""
        return all(_is_coarser(row, i, j) for row, i, j in zip(self.noise, a, b, strict=True))

    def finest(self) -> Assignment:
        """Return the assignment with the least noise, and of those the cheapest."""
        return self._each(lambda part, i: (self.noise[part][i], self.costs[part][i], i))

    def lowest(self) -> Assignment:
        """Return the cheapest assignment, and of those the one with the least noise."""
        return self._each(lambda part, i: (self.costs[part][i], self.noise[part][i], i))

    def _each(self, key: Any) -> Assignment:
        return tuple(min(usable, key=lambda i: key(part, i)) for part, usable in enumerate(self.usable))

    def cheaper(self, part: int, given: int) -> tuple[int, ...]:
        """Return the next cheaper formats of a part: of those that cost less, all with the largest cost."""
        row = self.costs[part]
        less = [cost for cost in row if cost < row[given]]
        first: dict[float, int] = {}
        for i, cost in enumerate(row):
            if less and cost == max(less):
                first.setdefault(self.noise[part][i], i)
        return tuple(first.values())

    def cheapest_within(self, noise: float) -> Assignment | None:
        """Return the cheapest assignment whose predicted noise is at most ``noise``, of those one with little noise."""
        scaled = self._vector([[min(value / noise, 2.0) for value in row] for row in self.noise])
        # Costs differ by whole numbers, and the sum of the scaled noise is at most 1.
        return self._solved(self._vector(self.costs) + 0.5 * scaled, [(scaled, -np.inf, 1.0)])

    def quietest(
        self, most: int, coarse: Collection[Assignment] = (), tried: Collection[Assignment] = ()
    ) -> Assignment | None:
        """Return the assignment with the least noise that costs at most ``most``; None if there is none.

        coarse: assignments that are excluded with all that are at least as coarse. tried: those excluded alone.
        """
        finite = [value for row in self.noise for value in row if math.isfinite(value)]
        beyond = 2 * len(self.noise) * max([*finite, 0.0]) or 1.0
        noise = self._vector([[min(value, beyond) for value in row] for row in self.noise]) / beyond
        rows: list[tuple[Vector, float, float]] = [(self._vector(self.costs), -np.inf, float(most))]
        for one in coarse:
            pairs = zip(self.noise, one, strict=True)
            finer = [[float(not _is_coarser(row, j, i)) for j in range(len(row))] for row, i in pairs]
            rows.append((self._vector(finer), 1.0, np.inf))
        for one in tried:
            same = [[float(j == i) for j in range(len(row))] for row, i in zip(self.noise, one, strict=True)]
            rows.append((self._vector(same), -np.inf, len(one) - 1.0))
        answer = self._solved(noise, rows)
        return None if answer is None or self.cost(answer) > most else answer

    @staticmethod
    def _vector(rows: Sequence[Sequence[float]]) -> Vector:
        return np.array([value for row in rows for value in row], dtype=np.float64)

    def _solved(self, objective: Vector, rows: Sequence[tuple[Vector, float, float]]) -> Assignment | None:
        """Return the assignment that minimizes the objective within the bounds of the rows; None if there is none."""
        optimize = require("scipy.optimize", "tune")
        widths = [len(row) for row in self.costs]
        ends = np.cumsum([0, *widths])
        once = [np.bincount(range(a, b), minlength=ends[-1]).astype(float) for a, b in pairwise(ends)]
        matrix = np.array([*once, *(row for row, _, _ in rows)])
        usable = [[float(i in row) for i in range(width)] for row, width in zip(self.usable, widths, strict=True)]
        lower, upper = [1.0] * len(widths), [1.0] * len(widths)
        bounds = [*lower, *(low for _, low, _ in rows)], [*upper, *(high for _, _, high in rows)]
        answer = optimize.milp(
            objective,
            integrality=np.ones(len(objective)),
            bounds=optimize.Bounds(0, self._vector(usable)),
            constraints=optimize.LinearConstraint(matrix, *bounds),
            options={"mip_rel_gap": 0.0},
        )
        if answer.x is None:
            return None
        return tuple(int(np.argmax(answer.x[a:b])) for a, b in pairwise(ends))


def _is_coarser(noise: Sequence[float], i: int, j: int) -> bool:
    """Whether a format of a part is at least as coarse as another one."""
    return i == j or noise[i] >= MARGIN * noise[j]


__all__ = ["Program"]
