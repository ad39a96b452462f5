"""``fxround.tune``: the cheapest formats of a model's layers that keep a metric, or the best metric within some bits.

The model is captured once. Attribution predicts what each part adds to the noise of the result in each format, an
integer linear program proposes assignments, and each of them is judged by a run over the data (``search``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from fxround.attribution.report import DOUBT
from fxround.choices import PASSES, Cost, Per, Proof
from fxround.compiler.signature import require_module
from fxround.runtime.draw import Draw
from fxround.significance.inputs import positive
from fxround.significance.progress import progress as shown_progress
from fxround.significance.stopping import interruptible
from fxround.tuning.costs import stores_of
from fxround.tuning.goals import Goal, goal_of, require_budget
from fxround.tuning.parts import Assignment, Formats, Part, PartCosts, known_word, part_costs, parts_of
from fxround.tuning.programs import Program
from fxround.tuning.search import Search, with_format
from fxround.tuning.sensitivities import Sensitivities, attributed, measured
from fxround.tuning.studies import captured, described_by, metrics_of, several
from fxround.tuning.trials import Stopped, Trials
from fxround.tuning.tuning_report import Cheaper, EvaluatedAssignment, PartChoice, TuningReport
from fxround.tuning.weights import parameters_read

# Of the passes over the data, those for parts that attribution doubts.
_MEASURED: Final = PASSES // 5


def tune(
    model: nn.Module,
    data: Any,
    metric: Any = "sqnr",
    budget: float | str | None = None,
    formats: Sequence[Any] = (),
    *,
    bits: float | None = None,
    per: Per = "layer",
    cost: Cost = "weights",
    proof: Proof = "monotone",
    runs: int | None = None,
    samples: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    progress: bool | None = None,
) -> TuningReport:
    """Give each layer of a model one of several formats: the cheapest that keep a metric, or the best within some bits.

    A layer in a format is rounded as the policy of this format rounds a model; a product in it reads its operands in
    the format. What is in no layer (inputs of the model) has the finest format. Layers that read the same weight get
    one format.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes, in eval mode if it draws random numbers or writes
            buffers in training mode. It is not changed.
        data: as for ``fxround.compare``; an iterable is read once and kept.
        metric: a name of ``fxround.significance.metrics.METRICS``, a ``Metric``, or a function of (result, target) that
            returns a number for a batch, of which the mean over rows is taken. Which values of a function are better
            is said by a bound as ``budget``, or by ``fxround.metric(function, better=...)``.
        budget: the largest loss of the metric against the unrounded model, or a bound, ``">= 0.95"`` or ``"<= 0.1"``.
        formats: at least two formats, roundings or policies without paths.
        bits: in place of ``budget``, the largest mean bits.
        per: ``"layer"`` for a format for each module with operations of its own, ``"operator"`` for each operator in
            each module.
        cost: what the mean bits are of: ``"weights"``, ``"activations"`` (operands of products that are no parameters)
            or ``"both"``, the mean of the two. Operands count in the format of their product.
        proof: ``"monotone"`` takes for granted that no assignment keeps the budget that is at least as coarse in every
            part as one that does not, once there are 40 passes over the data; ``"all"`` runs all that would be better.
        runs: the most assignments to run; None for as many as are needed until no part can take its next cheaper
            format, and others while there are at most 40 passes over the data.
        samples: runs of an assignment that draws random bits, whose metric is their mean; others run once.
        batch_size, seed, progress: as for ``fxround.compare``.
        path: a JSON file that is written after each run. If it exists, what it has does not run again, whatever the
            budget, the cost and the proof.

    Returns:
        A ``TuningReport``. If no assignment meets the budget, it has the best one that ran, and ``reason``. Ctrl-C ends
        the search and returns the best so far. An assignment under which the model or the metric raises an exception,
        or has a NaN, does not keep the budget, and is named below the table.

    Raises:
        TypeError, ValueError: for wrong arguments, empty data, and a file of another search. PolicyError for formats
            that a part cannot have. ImportError without SciPy. Also what ``compile`` raises at capture, and what the
            model and the metric raise without roundings; all of this comes before an assignment runs.

    The generators of PyTorch are left as they were.

    Example::

        report = fxround.tune(model, loader, "accuracy", 0.01, ["bfloat16", "int8:channel", "int4:channel"])
        print(report)
        report.save_policy("tuned.toml")
    """
    require_module(model)
    Draw(seed)
    positive("samples", samples)
    if runs is not None:
        positive("runs", runs)
    require_budget(budget, bits)
    for name, word, words in (("per", per, Per), ("cost", cost, Cost), ("proof", proof, Proof)):
        known_word(name, word, words)
    asked = several(metric)
    if len(asked) > 1:
        raise ValueError(f"metric has {len(asked)} metrics; expected one, whose budget is kept")
    (chosen,) = metrics_of(asked)
    given = Formats.of(formats, per)
    with torch.random.fork_rng(), torch.no_grad():
        batches, whole = captured(model, data, batch_size, seed)
        first = batches[0]
        lowered = whole._entry(first.args, first.kwargs).lowered
        every = parts_of(model, lowered, per)
        uniform = [whole.with_policy(given.uniform(every, i)) for i in range(len(given.policies))]
        graphs = [one._entry(first.args, first.kwargs).lowered for one in uniform]
        costs = part_costs(every, graphs, given, cost)
        described = {} if path is None else described_by(whole, batches, asked, samples, seed) | _described(given)
        steps = None if runs is None else (runs + 1) * len(batches)
        with shown_progress("tune", steps, progress) as tick, interruptible() as stopping:
            trials = Trials(whole, batches, chosen, given, every, samples, seed, path, described, runs, tick, stopping)
            tuning = _Tuning(trials, every, costs, per, cost)
            tuning.prepare(budget, bits)
            tuning.search(proof)
            return tuning.report()


def _described(formats: Formats) -> dict[str, Any]:
    return {"formats": [policy.to_dict() for policy in formats.policies], "per": formats.per}


@dataclass
class _Tuning:
    """A search with what it is about."""

    trials: Trials
    every: tuple[Part, ...]
    costs: PartCosts
    per: Per
    cost: Cost
    goal: Goal | None = None
    most: int | None = None
    # Of the parts among which there is a choice.
    open_costs: tuple[tuple[int, ...], ...] = ()
    fixed: int = 0
    sensitivities: Sensitivities | None = None
    result: Search | None = None

    def prepare(self, budget: float | str | None, bits: float | None) -> None:
        """Run the unrounded model, attribute each format, and say among which parts there is a choice.

        Raises ValueError if there is none, and what the model and the metric raise without roundings.
        """
        trials, every = self.trials, self.every
        choices = [i for i in range(len(every)) if len(set(self.costs.table[i])) > 1]
        if not choices:
            raise ValueError(
                f"formats: every layer has the same mean bits of {self.cost} in {', '.join(trials.formats.names)}, so "
                "that there is nothing to choose; expected formats of other sizes, or another cost"
            )
        trials.begin()
        self.goal = goal_of(budget, bits, trials.metric, trials.unrounded)
        whole = attributed(trials.whole, trials.batches[0], every, trials.formats, trials.seed, trials.stopping)
        base = _finest(whole, trials.formats, self.costs)
        kept = tuple(part for i, part in enumerate(every) if i not in choices)
        trials.formats = replace(trials.formats, base=base, kept=kept)
        trials.parts = tuple(every[i] for i in choices)
        self.open_costs = tuple(self.costs.table[i] for i in choices)
        self.fixed = self.costs.fixed + sum(row[base] for i, row in enumerate(self.costs.table) if i not in choices)
        if bits is not None:
            self.most = math.floor(Fraction(repr(bits)) / self.costs.unit) - self.fixed
        self.sensitivities = whole.of(choices)

    def search(self, proof: Proof) -> None:
        """Measure what attribution doubts, and search."""
        trials = self.trials
        assert self.sensitivities is not None and self.goal is not None
        most = _MEASURED if trials.limit is None else min(_MEASURED, trials.limit // 4)
        interrupted = False
        try:
            self.sensitivities = measured(self.sensitivities, trials, most)
        except Stopped:
            interrupted = trials.stopping()
        program = Program(self.open_costs, self.sensitivities.noise)
        self.result = Search(trials, program, self.goal, self.most, proof, spent=self.sensitivities.attributed)
        self.result.run()
        self.result.interrupted |= interrupted

    def report(self) -> TuningReport:
        """Return the report of what is known."""
        trials, search, goal, sensitivities = self.trials, self.result, self.goal, self.sensitivities
        assert search is not None and goal is not None and sensitivities is not None
        best, formats = search.best, trials.formats
        evaluated = {one: self._evaluated(one, goal) for one in trials.known}
        finest = (formats.base,) * len(trials.parts)
        call = trials.batches[0]
        lowered = trials.whole._entry(call.args, call.kwargs).lowered
        read = {port.name for _, port in parameters_read(lowered)}
        return TuningReport(
            model=type(trials.whole.source).__name__,
            metric=trials.metric.name,
            better=goal.better,
            per=self.per,
            cost=self.cost,
            goal=str(goal),
            bound=goal.bound,
            most_bits=goal.most_bits,
            formats=formats.names,
            unrounded=trials.unrounded,
            chosen=None if best is None else evaluated[best],
            parts=() if best is None else tuple(self._rows(best, search, sensitivities, lowered)),
            kept=tuple(part.name for part in formats.kept),
            base=formats.names[formats.base],
            unreached=tuple(name for name, _ in trials.whole.source.named_parameters() if name not in read),
            policy=formats.policy(trials.parts, finest if best is None else best),
            evaluated=tuple(evaluated.values()),
            runs=trials.executed,
            recalled=len(trials.known) - trials.executed,
            passes=trials.passes,
            attributions=sensitivities.attributed,
            minimal=search.minimal,
            proved=search.proved,
            reason=search.reason,
            interrupted=search.interrupted,
            notes=tuple(f"Not attributed: {name}: {why}" for name, why in sensitivities.refused.items()),
            described=trials.described,
        )

    def _evaluated(self, assignment: Assignment, goal: Goal) -> EvaluatedAssignment:
        trial, bits = self.trials.known[assignment], self._bits(assignment)
        within = goal.most_bits is None or bits <= goal.most_bits
        return EvaluatedAssignment(bits, trial, not trial.error and goal.keeps(trial.value) and within)

    def _bits(self, assignment: Assignment) -> float:
        units = sum(row[given] for row, given in zip(self.open_costs, assignment, strict=True))
        return float((self.fixed + units) * self.costs.unit)

    def _rows(
        self, best: Assignment, search: Search, sensitivities: Sensitivities, lowered: fx.GraphModule
    ) -> Iterator[PartChoice]:
        trials, names = self.trials, self.trials.formats.names
        sizes = {name: count for name, (count, _) in stores_of(lowered).parameters.items()}
        for i, part in enumerate(trials.parts):
            steps = [(given, with_format(best, i, given)) for given in search.program.cheaper(i, best[i])]
            doubted = sensitivities.doubt[i][best[i]] > DOUBT
            ran_alone = (i, best[i]) in sensitivities.measured
            yield PartChoice(
                part=part.name,
                format=names[best[i]],
                elements=sum(sizes[name] for name in part.weights),
                bits=float(self.open_costs[i][best[i]] * self.costs.unit),
                noise=sensitivities.noise[i][best[i]],
                evidence="measured" if ran_alone else "doubtful" if doubted else "attributed",
                cheaper=tuple(Cheaper(names[g], trials.known[o].value) for g, o in steps if o in trials.known),
            )


def _finest(sensitivities: Sensitivities, formats: Formats, costs: PartCosts) -> int:
    """Return the position of the format with the least noise; of those that were not attributed, the costliest one."""

    def order(i: int) -> tuple[bool, float, int]:
        return formats.names[i] in sensitivities.refused, sensitivities.total[i], -sum(row[i] for row in costs.table)

    return min(range(len(formats.names)), key=order)


__all__ = ["tune"]
