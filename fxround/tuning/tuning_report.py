"""The report of ``fxround.tune``: the format of each part, what it costs, and every assignment that ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxround.atomic_files import write_file
from fxround.errors import shown
from fxround.policy import Policy
from fxround.short_reprs import Short
from fxround.significance.figures import plain
from fxround.tuning.trials import Trial
from fxround.views.table import Table, Tabled, data_frame


@dataclass(frozen=True)
class Cheaper:
    """What a run with one part in a next cheaper format gave: the format, and the metric; NaN if it raised."""

    format: str
    value: float


@dataclass(frozen=True, repr=False)
class PartChoice(Short):
    """The format that a part of the model got.

    part      its name: paths of modules, and the operator if parts are operators
    format    the name of the format
    elements  how many weights it reads
    bits      what it adds to the mean bits, which are the sum over parts
    noise     what it adds to the noise of the result, as predicted or measured
    evidence  where ``noise`` comes from: "attributed", "measured", or "doubtful" for one that attribution doubts and
              that was not measured
    cheaper   the runs with this part alone in a next cheaper format; none if there is no cheaper one
    """

    part: str
    format: str
    elements: int
    bits: float
    noise: float
    evidence: str
    cheaper: tuple[Cheaper, ...] = ()

    def _line(self) -> str:
        return f"{self.part}, {self.format} for {self.elements:,} weights; noise {self.noise:.3g}, {self.evidence}"


@dataclass(frozen=True, repr=False)
class EvaluatedAssignment(Short):
    """An assignment that ran: the cost that the search counts, in mean bits, what was measured, and the verdict."""

    bits: float
    trial: Trial
    keeps: bool

    def _line(self) -> str:
        return f"{self.bits:.4g} bits, {'keeps' if self.keeps else 'does not keep'} the budget; {self.trial._line()}"


@dataclass(frozen=True, repr=False)
class TuningReport(Tabled):
    """The result of ``fxround.tune``.

    model, metric   names
    better          whether higher or lower values of the metric are better
    per, cost       as passed
    goal            the budget, as text
    bound           the worst value of the metric that keeps the budget; None for a budget of bits
    most_bits       the largest mean bits; None for a budget of the metric
    formats         the names of the formats
    unrounded       the metric without roundings
    chosen          the assignment that was found; None if Ctrl-C came before the first one ran
    parts           a ``PartChoice`` for each part
    kept            parts whose cost is the same in every format; they have the format ``base``, as everything else
    base            the finest format
    unreached       weights that the data never reach
    policy          the policy of the assignment, for ``fxround.compile``
    evaluated       every assignment that ran, in the order of the runs
    runs, recalled  how many ran now, and how many the file had
    passes          forward passes over all data, those without roundings among them
    attributions    runs of attribution, each over the first batch
    minimal         for a budget of the metric, whether each part ran with its next cheaper formats, and no such run
                    kept the budget
    proved          what is known of better assignments: "all" if each of them ran, "monotone" if each that did not run
                    is at least as coarse in every part as one that failed, or "" for nothing
    reason          why no assignment meets the budget; "" if ``chosen`` does
    interrupted     whether Ctrl-C ended the search
    notes           formats that attribution refused, with the reason
    described       what the figures belong to; {} without ``path``
    """

    model: str
    metric: str
    better: str
    per: str
    cost: str
    goal: str
    bound: float | None
    most_bits: float | None
    formats: tuple[str, ...]
    unrounded: float
    chosen: EvaluatedAssignment | None
    parts: tuple[PartChoice, ...]
    kept: tuple[str, ...]
    base: str
    unreached: tuple[str, ...]
    policy: Policy
    evaluated: tuple[EvaluatedAssignment, ...]
    runs: int
    recalled: int
    passes: int
    attributions: int
    minimal: bool
    proved: str
    reason: str
    interrupted: bool
    notes: tuple[str, ...]
    described: Mapping[str, Any]

    def __getitem__(self, part: str) -> PartChoice:
        """Return the row of a part. Raises KeyError for a name that no part has."""
        return {row.part: row for row in self.parts}[part]

    @property
    def value(self) -> float:
        """The metric of the assignment. Raises ValueError if none ran."""
        return self._ran().trial.value

    @property
    def bits(self) -> float:
        """The mean bits of the assignment. Raises ValueError if none ran."""
        return self._ran().bits

    def _ran(self) -> EvaluatedAssignment:
        if self.chosen is None:
            raise ValueError("no assignment ran before Ctrl-C: call tune again")
        return self.chosen

    def save_policy(self, path: str | Path) -> Path:
        """Write the policy as a TOML file, which ``fxround.compile`` takes; returns the path.

        Raises ValueError unless the path ends in .toml.
        """
        if Path(path).suffix != ".toml":
            raise ValueError(f"path is {shown(str(path))}; expected one that ends in .toml, as policy files do")
        return write_file(path, self.policy.to_toml())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        values: dict[str, Any] = plain(asdict(self) | {"policy": self.policy.to_dict()})
        return values

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON; ``indent`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each assignment that ran. Raises ImportError without pandas.

        Each part has a column with its format.
        """
        names = [row.part for row in self.parts]
        rows = [
            {"bits": one.bits, self.metric: one.trial.value, "keeps": one.keeps, "noise": one.trial.noise}
            | {"weight bits": one.trial.weight_bits, "activation bits": one.trial.activation_bits}
            | {"seconds": one.trial.seconds, "error": one.trial.error}
            | dict(zip(names, one.trial.formats, strict=True))
            for one in self.evaluated
        ]
        columns = ["bits", self.metric, "keeps", "noise", "weight bits", "activation bits", "seconds", "error", *names]
        return data_frame(rows, columns)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a matplotlib figure: the metric against bits of all assignments that ran; ``path``: also write it.

        The line is that of assignments of which no cheaper one has a better metric. Raises ImportError without
        matplotlib.
        """
        from fxround.significance.report.plots import figure_of

        return figure_of([self._draw], path, 4.2)

    def _draw(self, axes: Any) -> None:
        for keeps, colour, label in ((False, "#adb5bd", "over the budget"), (True, "#1c7ed6", "within the budget")):
            some = [one for one in self.evaluated if one.keeps == keeps]
            axes.plot([o.bits for o in some], [o.trial.value for o in some], "o", color=colour, label=label)
        front = self.pareto
        axes.step([one.bits for one in front], [one.trial.value for one in front], where="post", color="#495057", lw=1)
        if self.chosen is not None:
            axes.plot([self.bits], [self.value], "D", color="#e8590c", markersize=9, label="chosen")
        if self.bound is not None:
            axes.axhline(self.bound, color="#c92a2a", linestyle="--", linewidth=1, label="budget")
        if self.most_bits is not None:
            axes.axvline(self.most_bits, color="#c92a2a", linestyle="--", linewidth=1, label="budget")
        axes.set(title=f"{self.model}: {self.metric} against bits", ylabel=self.metric)
        axes.set_xlabel({"both": "mean bits of weights and activations"}.get(self.cost, f"mean bits of {self.cost}"))
        axes.legend()

    @property
    def pareto(self) -> tuple[EvaluatedAssignment, ...]:
        """The assignments that ran of which no cheaper one has a better metric, the cheapest first."""
        front: list[EvaluatedAssignment] = []
        sign = 1 if self.better == "higher" else -1
        numbers = [one for one in self.evaluated if one.trial.value == one.trial.value]
        for one in sorted(numbers, key=lambda one: (one.bits, -sign * one.trial.value)):
            if not front or sign * one.trial.value > sign * front[-1].trial.value:
                front.append(one)
        return tuple(front)

    def table(self) -> Table:
        """Return a row for each part."""
        columns = ("part", "format", "weights", "bits", "noise", "evidence", "next cheaper", f"{self.metric} with it")
        rows = tuple(
            (row.part, row.format, row.elements, row.bits, f"{row.noise:.3g}", row.evidence, *self._cheaper(row))
            for row in self.parts
        )
        return Table(columns, rows, self._title, "\n".join([*self.findings, self._legend]))

    def _cheaper(self, row: PartChoice) -> tuple[str, str]:
        return ", ".join(one.format for one in row.cheaper), ", ".join(f"{one.value:.6g}" for one in row.cheaper)

    @property
    def _title(self) -> str:
        got = (
            "no assignment ran" if self.chosen is None else f"{self.metric} {self.value:.6g} with {self.bits:.4g} bits"
        )
        return (
            f"{self.model}: formats per {self.per}, {self.metric} {self.unrounded:.6g} without roundings, budget "
            f"{self.goal}: {got}"
        )

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader has to know before the figures."""
        said = [f"NO ASSIGNMENT MEETS THE BUDGET: {self.reason}. The best that ran is shown."] if self.reason else []
        if self.interrupted:
            said.append("INTERRUPTED: the search has not ended, and the best so far is shown.")
        said += [f"failed: {one.trial.error}" for one in self.evaluated if one.trial.error]
        broken = sum(not one.trial.error and one.trial.value != one.trial.value for one in self.evaluated)
        said += [f"{self.metric} is NaN for {broken} assignments"] * bool(broken)
        if self.kept:
            said.append(f"Kept in {self.base}, because no format makes them cheaper: {', '.join(self.kept)}.")
        if self.unreached:
            said.append(f"The data never reach {', '.join(self.unreached)}.")
        return (*said, *self.notes)

    @property
    def _legend(self) -> str:
        what = (
            "cheaper assignment keeps the budget" if self.most_bits is None else "assignment within the bits is better"
        )
        than = "failed" if self.most_bits is None else "is no better"
        proofs = {
            "all": f"No {what}: all of them ran.",
            "monotone": f"No {what}, as far as is known: each ran, or is as coarse in every part as one that {than}.",
            "": f"It is not known whether a {what}: not all of them were tried.",
        }
        minimal = "No part can take its next cheaper format: each was run. " if self.minimal else ""
        return (
            f"{minimal}{'' if self.reason else proofs[self.proved]}\n{len(self.evaluated)} assignments, {self.runs} of "
            f"them run now, in {self.passes} passes over the data, and {self.attributions} runs of attribution. Bits: "
            f"what the part adds to the mean bits of {self.cost}. Noise: what it adds to the mean square of the result."
        )


__all__ = ["Cheaper", "EvaluatedAssignment", "PartChoice", "TuningReport"]
