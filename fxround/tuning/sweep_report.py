"""The report of trainings under the policies of a sweep: metrics with intervals, and what each choice changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from fxround.errors import shown
from fxround.policy import Policy
from fxround.short_reprs import Short
from fxround.significance.bits import CONFIDENCE, student_half_width
from fxround.significance.figures import plain
from fxround.tuning.studies import number_of
from fxround.tuning.sweep_policies import Sweep
from fxround.views.table import Table, Tabled, Value, data_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

# The name of the trainings without roundings.
UNROUNDED: Final = "(unrounded)"


@dataclass(frozen=True, repr=False)
class TrainingRun(Short):
    """One training.

    name      of the policy in the sweep, or "(unrounded)"
    policy    the policy
    seed      as the training was given it
    values    what the training returned, by the names of its metrics; "result" for a single number
    seconds   how long it took, with the captures
    error     what ended it before its end: the type and the message of an exception; else ""
    """

    name: str
    policy: Policy
    seed: int
    values: Mapping[str, float]
    seconds: float
    error: str = ""

    def _line(self) -> str:
        values = [f"{name} {value:.6g}" for name, value in self.values.items()]
        return ", ".join([self.name, f"seed {self.seed}", *values, *([f"failed: {self.error}"] if self.error else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        values: dict[str, Any] = plain(
            {"name": self.name, "policy": self.policy.to_dict(), "seed": self.seed, "values": dict(self.values)}
            | {"seconds": self.seconds, "error": self.error}
        )
        return values

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TrainingRun:
        """Return the training that ``to_dict`` wrote."""
        values = {str(key): number_of(value) for key, value in data["values"].items()}
        rest = data["seed"], values, data["seconds"], data["error"]
        return TrainingRun(data["name"], Policy.from_dict(data["policy"]), *rest)


@dataclass(frozen=True, repr=False)
class SweepReport(Tabled):
    """The trainings of ``fxround.sweep``.

    model         the name of the model's class, or of the function that makes it
    sweep         the policies, with their values on the axes
    seeds         the seeds of all policies
    trainings     a ``TrainingRun`` for each policy and seed that has run, those without roundings first
    interrupted   whether Ctrl-C ended the sweep before its end
    described     what the figures belong to: the texts of model and training, versions
    confidence    of the intervals

    ``print(report)`` shows a row for each policy, ``effects(metric)`` what each choice changes.
    """

    model: str
    sweep: Sweep
    seeds: tuple[int, ...]
    trainings: tuple[TrainingRun, ...]
    interrupted: bool
    described: Mapping[str, Any]
    confidence: float = CONFIDENCE

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics, in the order in which trainings returned them."""
        return tuple(dict.fromkeys(name for training in self.trainings for name in training.values))

    def values(self, name: str, metric: str) -> dict[int, float]:
        """Return a metric of a policy by seeds; trainings that failed have none."""
        own = (t for t in self.trainings if t.name == name and metric in t.values)
        return {training.seed: training.values[metric] for training in own}

    def table(self) -> Table:
        """Return a row for each policy: its values on the axes, and mean and half of the interval of each metric."""
        metrics, axes = self.metrics, tuple(self.sweep.axes)
        ends = [part for metric in metrics for part in (metric, "±")]
        rows: list[tuple[Value, ...]] = []
        for name in (UNROUNDED, *self.sweep):
            own = self.sweep.choices.get(name, dict.fromkeys(axes, ""))
            figures = [figure for metric in metrics for figure in self._figures(name, metric)]
            runs = sum(t.name == name and not t.error for t in self.trainings)
            rows.append((name if name == UNROUNDED else "", *own.values(), *figures, runs))
        state = ", INTERRUPTED" if self.interrupted else ""
        title = f"{self.model}: {len(self.sweep)} policies, seeds {', '.join(map(str, self.seeds))}{state}"
        note = f"± : half of Student's interval of the mean over seeds ({self.confidence:.0%}); runs: complete ones."
        return Table(("policy", *axes, *ends, "runs"), tuple(rows), title, "\n".join([*self.findings, note]))

    def _figures(self, name: str, metric: str) -> tuple[float | None, float | None]:
        values = list(self.values(name, metric).values())
        return (float(np.mean(values)), student_half_width(values, self.confidence)) if values else (None, None)

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader has to know before the figures: combinations without a policy, failures and NaNs."""
        said = [f"dropped {name}: {reason}" for name, reason in self.sweep.dropped.items()]
        for training in self.trainings:
            where = f"{training.name}, seed {training.seed}"
            broken = [metric for metric, value in training.values.items() if math.isnan(value)]
            said += [f"{where} failed: {training.error}"] if training.error else []
            said += [f"{where}: NaN in {', '.join(broken)}"] if broken else []
        return tuple(said)

    def effects(self, metric: str | None = None) -> Table:
        """Return what each value of an axis changes against the first one, everything else being equal.

        A difference is taken between two policies that differ in this value alone, with the same seed, and averaged
        over such pairs; the interval is Student's over the seeds. A pair with a NaN or without a figure is left out,
        of all seeds.

        metric: a name; None for the first. Raises KeyError for an unknown one.
        """
        chosen = self._metric(metric)
        rows: list[tuple[Value, ...]] = []
        for axis, (first, *others) in self.sweep.axes.items():
            for label in others:
                differences = self._differences(chosen, axis, first, label)
                means = [float(np.mean(row)) for row in differences if row]
                half = student_half_width(means, self.confidence)
                pairs = len(differences[0]) if differences else 0
                rows.append((axis, f"{first} to {label}", float(np.mean(means)) if means else None, half, pairs))
        note = (
            f"± : half of Student's interval over {len(self.seeds)} seeds ({self.confidence:.0%}); pairs of policies."
        )
        return Table(("axis", "change", chosen, "±", "pairs"), tuple(rows), f"Effects on {chosen}", note)

    def _metric(self, metric: str | None) -> str:
        if metric is None and not self.metrics:
            raise KeyError("no training has returned a metric")
        chosen = self.metrics[0] if metric is None else metric
        if chosen not in self.metrics:
            raise KeyError(f"no metric is named {chosen!r}; the trainings returned {', '.join(self.metrics)}")
        return chosen

    def _differences(self, metric: str, axis: str, first: str, label: str) -> list[list[float]]:
        """Return, for each seed, the differences over the pairs of policies that have all figures."""
        kept: list[list[float]] = []
        for pair in self._pairs(axis, first, label):
            before, after = (self.values(name, metric) for name in pair)
            row = [after.get(seed, math.nan) - before.get(seed, math.nan) for seed in self.seeds]
            if np.isfinite(row).all():
                kept.append(row)
        return [list(each) for each in zip(*kept, strict=True)]

    def _pairs(self, axis: str, first: str, label: str) -> list[tuple[str, str]]:
        others = [self.sweep.axes[other] for other in self.sweep.axes if other != axis]
        names = {tuple(own.values()): name for name, own in self.sweep.choices.items()}
        at = list(self.sweep.axes).index(axis)
        keys = (((*rest[:at], first, *rest[at:]), (*rest[:at], label, *rest[at:])) for rest in product(*others))
        return [(names[a], names[b]) for a, b in keys if a in names and b in names]

    def frontier(
        self, against: Mapping[str, float], metric: str | None = None, *, better: Literal["lower", "higher"] = "lower"
    ) -> tuple[str, ...]:
        """Return the policies whose mean is better than that of every policy with less, or with the same number.

        against: the number of each policy by its name, such as a cost. metric: a name; None for the first. better:
        "lower" or "higher". Raises KeyError for an unknown metric, ValueError for another word.
        """
        if better not in ("lower", "higher"):
            raise ValueError(f"better is {shown(better)}; expected 'lower' or 'higher'")
        sign = 1 if better == "lower" else -1
        means = {name: mean for name, (mean, _) in self._placed(against, self._metric(metric)).items()}
        best, chosen = math.inf, list[str]()
        for name in sorted(means, key=lambda name: (against[name], sign * means[name])):
            if sign * means[name] < best:
                best = sign * means[name]
                chosen.append(name)
        return tuple(chosen)

    def _placed(self, against: Mapping[str, float], metric: str) -> dict[str, tuple[float, float | None]]:
        """Return mean and half of the interval of the policies that have a finite mean and a number."""
        figures = {name: self._figures(name, metric) for name in self.sweep if name in against}
        return {
            name: (mean, half) for name, (mean, half) in figures.items() if mean is not None and math.isfinite(mean)
        }

    def plot(
        self,
        against: Mapping[str, float],
        path: str | Path | None = None,
        *,
        metric: str | None = None,
        label: str = "overhead",
        better: Literal["lower", "higher"] = "lower",
    ) -> Any:
        """Return a matplotlib figure: a metric of each policy against a number of its own, with its interval as a bar.

        Colours are the values of the first axis, and names those of ``frontier``. A dashed line is the mean of the
        trainings without roundings. Below are the policies that have no place.

        against: the number of each policy by its name. path: also write the figure there. metric: a name; None for the
        first. label: of the horizontal axis. better: as for ``frontier``. Raises KeyError for an unknown metric,
        ImportError without matplotlib.
        """
        from fxround.significance.report import plots

        chosen = self._metric(metric)
        drawn, best = self._placed(against, chosen), self.frontier(against, chosen, better=better)
        first, labels = next(iter(self.sweep.axes.items()))

        def panel(axes: Any) -> None:
            for i, value in enumerate(labels):
                own = [name for name in drawn if self.sweep.choices[name][first] == value]
                x, y = [against[name] for name in own], [drawn[name][0] for name in own]
                look = {"color": f"C{i}", "linestyle": "", "marker": "o", "markersize": 4, "capsize": 2, "alpha": 0.7}
                axes.errorbar(x, y, [drawn[name][1] or 0.0 for name in own], label=f"{first} {value}", **look)
            for name in best:
                text = " ".join(self.sweep.choices[name].values())
                axes.annotate(text, (against[name], drawn[name][0]), (4, -9), textcoords="offset points", fontsize=7)
            unrounded = self._figures(UNROUNDED, chosen)[0]
            if unrounded is not None and math.isfinite(unrounded):
                axes.axhline(unrounded, linestyle="--", linewidth=1, color=plots.WORST, label="unrounded")
            axes.legend(loc="best")
            missing = [name for name in self.sweep if name not in drawn]
            axes.set(title=chosen, xlabel=label + (f"\nNot shown: {'; '.join(missing)}" if missing else ""))
            axes.margins(x=0.15, y=0.1)

        return plots.figure_of([panel], path, 5.5)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        data: dict[str, Any] = plain(
            {
                "model": self.model,
                "seeds": self.seeds,
                "interrupted": self.interrupted,
                "described": dict(self.described),
            }
        )
        trainings = [training.to_dict() for training in self.trainings]
        return data | {"sweep": self.sweep.to_dict(), "confidence": self.confidence, "trainings": trainings}

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON; ``indent`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each training. Raises ImportError without pandas."""
        axes: Sequence[str] = tuple(self.sweep.axes)
        rows = []
        for training in self.trainings:
            own = self.sweep.choices.get(training.name, {})
            start = {"policy": training.name, **{axis: own.get(axis) for axis in axes}, "seed": training.seed}
            rows.append(start | dict(training.values) | {"seconds": training.seconds, "error": training.error})
        return data_frame(rows, ["policy", *axes, "seed", *self.metrics, "seconds", "error"])


__all__ = ["UNROUNDED", "SweepReport", "TrainingRun"]
