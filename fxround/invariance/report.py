"""The report of ``check_invariance``: how many results each axis gave, and where they parted first.

What is true here. An axis that could not be asked says why and counts as nothing; runs that the model refused (a batch
of one, say) are listed with what it raised. ``check`` fails on any axis with more than one result.

    before   a table of maxima of differences, and a tolerance
    after    report.check(); report["batch"].distinct; report["batch"].first.source
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxround.invariance.subjects import Place
from fxround.table import Table, Tabled


class NotInvariant(AssertionError):
    """Bits changed along an axis; the message lists every one, with the first operation that differs."""


@dataclass(frozen=True)
class AxisResult:
    """What one axis showed.

    distinct    how many different results there were: 1 is invariant, 0 means that the axis says nothing (``reason``)
    runs        how many were made
    compared    what was, in words
    differing   the runs that differ from the first of their group
    refused     the runs that raised, and what
    first       the first operation that differs, of the first run that does
    share       of its results' elements, how many differ; ``largest`` is the greatest difference
    by_result   every result and gradient that was compared, and how many different ones of it there were
    """

    axis: str
    distinct: int
    runs: int
    compared: str
    differing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    first: Place | None = None
    share: float = 0.0
    largest: float = 0.0
    reason: str = ""
    by_result: tuple[tuple[str, int], ...] = ()

    @property
    def invariant(self) -> bool:
        """Whether no two results differ."""
        return self.distinct <= 1

    def __str__(self) -> str:
        where = f"; first in {self.first}" if self.first else ""
        return f"{self.axis}: {self.distinct} results in {self.runs} runs ({', '.join(self.differing)}){where}"


@dataclass(frozen=True)
class InvarianceReport(Tabled):
    """One ``AxisResult`` an axis, of a model under a policy. gradients: whether they were compared too."""

    model: str
    policy: str
    gradients: bool
    axes: tuple[AxisResult, ...]

    @property
    def invariant(self) -> bool:
        """Whether no axis that could be asked shows two results."""
        return all(axis.invariant for axis in self.axes)

    def __getitem__(self, name: str) -> AxisResult:
        """The axis of that name. Raises KeyError naming those there are."""
        found = next((axis for axis in self.axes if axis.axis == name), None)
        if found is None:
            raise KeyError(f"no axis {name!r} in this report; it has {', '.join(axis.axis for axis in self.axes)}")
        return found

    def check(self) -> InvarianceReport:
        """The report itself. Raises NotInvariant where bits changed."""
        wrong = [str(axis) for axis in self.axes if not axis.invariant]
        if wrong:
            raise NotInvariant(f"{self.model}, policy {self.policy}, is not invariant:\n  " + "\n  ".join(wrong))
        return self

    def to_dict(self) -> dict[str, Any]:
        """All fields, plain, and ``invariant``."""
        return asdict(self) | {"invariant": self.invariant}

    def table(self) -> Table:
        """A row an axis."""
        rows = tuple(
            (a.axis, a.distinct or None, a.runs, a.compared if a.distinct else f"not asked: {a.reason}", _where(a))
            for a in self.axes
        )
        title = f"{self.model}, policy {self.policy}: {'results and gradients' if self.gradients else 'results'}"
        columns = ("axis", "distinct", "runs", "compared", "differs first")
        return Table(columns, rows, title=title, note=self._note())

    def _note(self) -> str:
        lines = [f"{a.axis}: {len(a.refused)} runs raised, the first {a.refused[0]}" for a in self.axes if a.refused]
        wrong = [a.axis for a in self.axes if not a.invariant]
        lines.append(f"Not invariant: {', '.join(wrong)}." if wrong else "Every result has the same bits.")
        return "\n".join(lines)


def _where(axis: AxisResult) -> str:
    if axis.invariant:
        return ""
    found = f"{axis.differing[0]}: {axis.share:.1%} of elements, by {axis.largest:.2g}"
    return f"{found}; {axis.first}" if axis.first else found
