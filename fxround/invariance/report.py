"""The report of ``check_invariance``: how many distinct results each axis gave, and the first operation that differs.

An axis that does not apply has a reason and counts as invariant. Runs that the model refused (for example a batch of
one) are listed with the error. ``check`` fails if any axis has more than one distinct result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxround.errors import shown
from fxround.invariance.subjects import OperationPlace
from fxround.short_reprs import Short
from fxround.views.table import Table, Tabled


class NotInvariant(AssertionError):
    """Raised by ``InvarianceReport.check``; the message lists every axis that changed bits and the first operation that
    differs.
    """


@dataclass(frozen=True, repr=False)
class AxisResult(Short):
    """The result of one axis.

    axis        its name
    distinct    the number of distinct results: 1 is invariant, 0 means that the axis does not apply (``reason``)
    runs        the number of runs
    compared    what the runs compare, in words
    differing   labels of the runs that differ from the first run of their group
    refused     labels of the runs that raised, with the error
    first       the first operation that differs, of the first run that differs
    share       the share of elements that differ in that run, 0 to 1
    largest     the greatest difference of an element in that run
    reason      why the axis, or part of it, does not apply
    by_result   pairs of each compared result or gradient and its number of distinct values
    captured_differently  whether that run was captured as another graph than the first; ``first`` is then looked for
                among the operations of which both have as many at the same place
    """

    axis: str
    distinct: int
    runs: int
    compared: str
    differing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    first: OperationPlace | None = None
    share: float = 0.0
    largest: float = 0.0
    reason: str = ""
    by_result: tuple[tuple[str, int], ...] = ()
    captured_differently: bool = False

    @property
    def invariant(self) -> bool:
        """Whether all results of the axis are equal."""
        return self.distinct <= 1

    def __str__(self) -> str:
        where = f"; first in {self.first}" if self.first else ""
        where += "; captured differently" if self.captured_differently else ""
        return f"{self.axis}: {self.distinct} results in {self.runs} runs ({', '.join(self.differing)}){where}"

    def _line(self) -> str:
        if not self.distinct:
            return f"{self.axis}, does not apply: {self.reason}"
        return f"{self.axis}, the same bits in {self.runs} runs" if self.invariant else str(self)


@dataclass(frozen=True, repr=False)
class InvarianceReport(Tabled):
    """The results of ``fxround.check_invariance``: one ``AxisResult`` per axis.

    model       the name of the model
    policy      the name of the policy
    gradients   whether gradients were compared too
    axes        the results, in the order of the axes passed
    remaining   the axes that were not compared, because Ctrl-C came before

    ``report["batch"]`` is one axis; ``print(report)``, ``table()``, ``to_dict()`` and ``to_json()`` show all of them.
    Example::

        report = fxround.check_invariance(model, x)
        report.check()
        report["batch"].distinct
    """

    model: str
    policy: str
    gradients: bool
    axes: tuple[AxisResult, ...]
    remaining: tuple[str, ...] = ()

    @property
    def invariant(self) -> bool:
        """Whether every axis was compared, and has one distinct result if it applies."""
        return not self.remaining and all(axis.invariant for axis in self.axes)

    def __getitem__(self, name: str) -> AxisResult:
        """The axis of that name. Raises KeyError listing the axes of the report."""
        named = next((axis for axis in self.axes if axis.axis == name), None)
        if named is None:
            raise KeyError(f"no axis {shown(name)} in this report; it has {', '.join(axis.axis for axis in self.axes)}")
        return named

    def check(self) -> InvarianceReport:
        """Return the report. Raises NotInvariant if an axis changed bits, or was not compared."""
        wrong = [str(axis) for axis in self.axes if not axis.invariant]
        if wrong:
            raise NotInvariant(f"{self.model}, policy {self.policy}, is not invariant:\n  " + "\n  ".join(wrong))
        if self.remaining:
            raise NotInvariant(
                f"{self.model}, policy {self.policy}: Ctrl-C came before {', '.join(self.remaining)} could be compared"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and ``invariant`` as plain data."""
        return asdict(self) | {"invariant": self.invariant}

    def table(self) -> Table:
        """Return a table with one row per axis."""
        rows = tuple(
            (a.axis, a.distinct or None, a.runs, a.compared if a.distinct else f"not asked: {a.reason}", _where(a))
            for a in self.axes
        )
        title = f"{self.model}, policy {self.policy}: {'results and gradients' if self.gradients else 'results'}"
        title += f", INTERRUPTED before {', '.join(self.remaining)}" if self.remaining else ""
        columns = ("axis", "distinct", "runs", "compared", "differs first")
        return Table(columns, rows, title=title, note=self._note())

    def _note(self) -> str:
        lines = [f"{a.axis}: {len(a.refused)} runs raised, the first {a.refused[0]}" for a in self.axes if a.refused]
        wrong = [a.axis for a in self.axes if not a.invariant]
        same = "Every result so far has the same bits." if self.remaining else "Every result has the same bits."
        lines.append(f"Not invariant: {', '.join(wrong)}." if wrong else same)
        return "\n".join(lines)


def _where(axis: AxisResult) -> str:
    if axis.invariant:
        return ""
    difference = f"{axis.differing[0]}: {axis.share:.1%} of elements, by {axis.largest:.2g}"
    parts = [difference, *([str(axis.first)] if axis.first else [])]
    return "; ".join([*parts, *(["captured differently"] if axis.captured_differently else [])])
