"""What a search is for: a metric within a budget at the least cost, or the best metric within a budget of bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from fxround.errors import shown
from fxround.significance.metrics import Metric, bound_of

# A loss that is larger by no more than the roundings of the metric's own arithmetic is no larger.
_SLACK: Final = 1e-12


@dataclass(frozen=True)
class Goal:
    """A goal. ``bound``: the worst value of the metric that keeps the budget; None for a budget of bits.

    most_bits: the largest cost, in mean bits; None for a budget of the metric.
    """

    better: Literal["higher", "lower"]
    bound: float | None
    most_bits: float | None

    def keeps(self, value: float) -> bool:
        """Whether a value of the metric is within the budget; a NaN is not."""
        if self.bound is None:
            return not math.isnan(value)
        return value >= self.bound if self.better == "higher" else value <= self.bound

    def rank(self, value: float) -> float:
        """Return a number that is larger for better values; minus infinity for a NaN."""
        if math.isnan(value):
            return -math.inf
        return value if self.better == "higher" else -value

    def __str__(self) -> str:
        if self.bound is None:
            return f"at most {self.most_bits:g} bits"
        return f"{'>=' if self.better == 'higher' else '<='} {self.bound:.6g}"


def require_budget(budget: Any, bits: Any) -> None:
    """Raise TypeError or ValueError unless exactly one budget is given, of the right form."""
    if (budget is None) == (bits is None):
        given = "both" if budget is not None else "neither"
        raise ValueError(
            f"{given} of budget= and bits= given; expected one: budget= (a loss of the metric, or a bound such as "
            "'>= 0.95') or bits= (mean bits)"
        )
    if bits is not None and not _is_number(bits):
        raise TypeError(f"bits is {shown(bits)}; expected a number of bits, such as 6")
    if bits is not None and not 0 < bits < math.inf:
        raise ValueError(f"bits is {shown(bits)}; expected a positive number")
    if budget is None:
        return
    if isinstance(budget, str):
        bound_of("budget", budget)
    elif not _is_number(budget):
        raise TypeError(f"budget is {shown(budget)}; expected the largest loss of the metric, or a text as '>= 0.95'")
    elif not 0 <= budget < math.inf:
        raise ValueError(f"budget is {shown(budget)}; expected a loss of 0 or more, or a text as '>= 0.95'")


def goal_of(budget: Any, bits: Any, metric: Metric, unrounded: float) -> Goal:
    """Return the goal.

    Raises ValueError for a bound in the wrong direction, for a loss of a function of which nobody has said which values
    are better, and for a loss of a metric that has no finite value without roundings.
    """
    if isinstance(budget, str):
        better, bound = bound_of("budget", budget)
        if metric.better and better != metric.better:
            raise ValueError(
                f"budget is {budget!r}, and {metric.better} values of {metric.name} are better; expected "
                f"'{'>=' if metric.better == 'higher' else '<='} {bound:g}'"
            )
        return Goal(better, bound, None)
    if not metric.better:
        raise ValueError(
            f"it is not known whether higher or lower values of {metric.name} are better; expected a bound, such as "
            f"budget='>= 0.95' or '<= 0.1', or fxround.metric({metric.name}, better='higher') or 'lower'"
        )
    if bits is not None:
        return Goal(metric.better, None, float(bits))
    if not math.isfinite(unrounded):
        raise ValueError(
            f"budget is a loss, and {metric.name} is {unrounded} without roundings; expected a bound, such as "
            f"budget='{'>=' if metric.better == 'higher' else '<='} 40'"
        )
    loss = budget + _SLACK * max(abs(unrounded), budget)
    return Goal(metric.better, unrounded - loss if metric.better == "higher" else unrounded + loss, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
