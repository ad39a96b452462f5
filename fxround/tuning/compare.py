"""``fxround.compare``: policies by what they do to a model on data, and by what they cost.

The model is captured once, and every policy lowers the same graphs. Policies run one after the other over all batches,
so that what is complete when one fails, or when Ctrl-C comes, is a whole row. The same arguments and seed give the same
figures with any number of threads and workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxround.atomic_files import write_file
from fxround.capture.leftovers import computed_once
from fxround.compiler.signature import require_module
from fxround.errors import FxroundError, shown
from fxround.module.rounded_module import PolicyLike, RoundedModule
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.significance.inputs import ModelCall, positive
from fxround.significance.metrics import Metric
from fxround.significance.progress import progress as shown_progress
from fxround.significance.recorder import Measured, Recorder
from fxround.significance.stopping import interruptible
from fxround.significance.workers import require_jobs
from fxround.tuning.comparison import ComparisonReport, PolicyResult
from fxround.tuning.comparison_runs import Outcome, Run, Shared, outcome_of, said_of
from fxround.tuning.costs import Costs, costs_of
from fxround.tuning.studies import captured, described_by, metrics_of, read_file, reading, several
from fxround.tuning.sweep_policies import Sweep


def compare(
    model: nn.Module,
    data: Any,
    policies: Mapping[str, PolicyLike] | Iterable[PolicyLike],
    metric: Any = "sqnr",
    *,
    samples: int = 5,
    batch_size: int | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> ComparisonReport:
    """Compare policies: metrics of a model on data under each of them, bits of its values, and multiply-adds by format.

    The model is captured once for all policies, and the data are read once and kept. The unrounded model is measured
    first; metrics that compare results, such as ``"sqnr"``, compare with it.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes, in eval mode if it draws random numbers or writes
            buffers in training mode. It is not changed.
        data: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or an iterable
            of batches such as a DataLoader. A batch is one of these, or arguments and then a target: ``(x, target)`` if
            the model takes one argument less, ``((x, y), target)`` or ``({"x": x}, target)`` if it does not take both
            parts, and ``((x,), {"y": y}, target)`` for any model.
        policies: several policies, each as for ``fxround.compile``, a dict from names to policies, or a ``Sweep``. What
            a policy of a sweep cannot be lowered by is in its row.
        metric: one or several of: a name of ``fxround.significance.metrics.METRICS`` (``"accuracy"``, ``"perplexity"``,
            ``"kl"``, ...), what ``fxround.metric`` returns, a ``Metric``, or a function of (result, target) that gives
            a number for a batch, of which the mean over rows is reported. The target is None for data without targets.
        samples: runs of a policy that draws random bits; other policies run once.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        seed: 0 to 2^63 - 1, the seed of all random bits. Sample i of batch j is ``reseed(seed, j * 2**16 + i)``.
        path: a JSON file that is written after each policy. If it exists, the policies that it has are not run again.
        n_jobs: number of joblib workers, -1 for all cores. An active joblib backend is used. Each worker has as many
            threads as this process; metrics are computed in this process.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A ``ComparisonReport``. Ctrl-C ends the comparison and returns the report of what is complete. A policy under
        which the model or a metric raises an exception has it in its row, and the others go on.

    Raises:
        TypeError, ValueError: for wrong arguments, empty data, two policies of one name, and a file of another
            comparison. PolicyError for an unknown policy. Also what ``compile`` raises at capture, and what the model
            and the metrics raise without roundings; all of this comes before a policy runs. FxroundError for a model of
            which a worker captures another graph. ImportError for workers without joblib.

    The generators of PyTorch are left as they were.

    Example::

        report = fxround.compare(model, loader, ["bfloat16", "int8", "nvfp4"], "accuracy")
        print(report)
        report["int8"].metric("accuracy").mean
    """
    require_module(model)
    Draw(seed)
    positive("samples", samples)
    require_jobs(n_jobs)
    chosen, asked = _policies(policies), several(metric)
    metrics = metrics_of(asked)
    with torch.random.fork_rng(), torch.no_grad():
        batches, unrounded = captured(model, data, batch_size, seed)
        file = _File(path, {} if path is None else described_by(unrounded, batches, asked, samples, seed))
        file.read()
        run = _Comparison(
            unrounded, batches, metrics, samples, seed, chosen, file, of_sweep=isinstance(policies, Sweep)
        )
        run.lower()
        with ExitStack() as stack:
            if n_jobs != 1 and run.waiting:
                run.outcomes = stack.enter_context(Shared(n_jobs, unrounded, batches, chosen, seed)).outcomes
            run.tick = stack.enter_context(shown_progress("compare", run.steps, progress))
            run.stopping = stack.enter_context(interruptible())
            return run.report()


@dataclass
class _File:
    """The file of a comparison: the rows that it had, and where those that are complete are written."""

    path: str | Path | None
    described: Mapping[str, Any]
    rows: dict[str, PolicyResult] = field(default_factory=dict)

    def read(self) -> None:
        """Read the rows that the file has. Raises ValueError for a file of another comparison, or of anything else."""
        held = read_file(self.path, self.described, "comparison")
        if held is None:
            return
        with reading(self.path, "comparison"):
            rows = [PolicyResult.from_dict(row) for row in held["policies"]]
        self.rows = {row.name: row for row in rows if row.complete}

    def write(self, report: ComparisonReport) -> None:
        """Write a report; rows of other policies that the file had stay in it."""
        if self.path is not None:
            own = {row.name: row for row in report.policies}
            write_file(self.path, replace(report, policies=tuple((self.rows | own).values())).to_json() + "\n")


@dataclass
class _Comparison:
    """A comparison as far as it has run."""

    whole: RoundedModule
    batches: Sequence[ModelCall]
    metrics: Sequence[Metric]
    samples: int
    seed: int
    chosen: Mapping[str, Policy]
    file: _File
    tick: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    unrounded: tuple[Measured, ...] = ()
    # The results of the unrounded model, by batches; None where no metric compares.
    references: list[Any] = field(default_factory=list)
    waiting: dict[str, tuple[RoundedModule, Costs]] = field(default_factory=dict)
    # Whether the policies are made of axes, of which some may not go together; and what these raised.
    of_sweep: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    # Who computes the runs; None for this process.
    outcomes: Callable[[Iterable[Run]], Iterator[tuple[Run, Outcome]]] | None = None

    def lower(self) -> None:
        """Lower the model by each policy that the file does not have, so that a wrong one is an error at once."""
        first = self.batches[0]
        with computed_once():
            for name, policy in self.chosen.items():
                if self._known(name) is not None:
                    continue
                try:
                    compiled = self.whole.with_policy(policy)
                    entry = compiled._entry(first.args, first.kwargs)
                except FxroundError as error:
                    if not self.of_sweep:
                        raise
                    self.refused[name] = said_of(error)
                else:
                    self.waiting[name] = compiled, costs_of(entry.lowered)

    @property
    def steps(self) -> int:
        """The number of batches in all runs, those without roundings among them."""
        return len(self.batches) * (1 + sum(self._runs(self.chosen[name]) for name in self.waiting))

    def _known(self, name: str) -> PolicyResult | None:
        """Return the row that the file has for this policy."""
        row = self.file.rows.get(name)
        return row if row is not None and row.policy == self.chosen[name] else None

    def _runs(self, policy: Policy) -> int:
        """Return how often a policy runs."""
        return self.samples if policy.draws else 1

    def report(self) -> ComparisonReport:
        """Run what is not known, and return the report."""
        self._measure_unrounded()
        rows: dict[str, PolicyResult] = {}
        if not self.stopping():
            self.file.write(self._report(rows))
        outcomes = (self.outcomes or self._alone)(self._planned())
        for name in self.chosen:
            row = self._known(name)
            if name in self.refused:
                row = PolicyResult(name, self.chosen[name], (), Costs(None, None, {}), 0.0, False, self.refused[name])
            elif row is None and not self.stopping():
                row = self._row(name, outcomes)
            if row is not None:
                rows[name] = row
                self.file.write(self._report({n: r for n, r in rows.items() if r.complete}))
        return self._report(rows)

    def _planned(self) -> Iterator[Run]:
        """Yield the runs in order; of a policy that has failed, no more."""
        for name in list(self.waiting):
            for number, batch in product(range(self._runs(self.chosen[name])), range(len(self.batches))):
                if name in self.waiting:
                    yield Run(name, number, batch)

    def _alone(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Outcome]]:
        """Yield the outcomes of runs in this process, each computed when it is asked for."""
        for run in runs:
            yield run, outcome_of(self.waiting[run.policy][0], run, self.batches[run.batch], self.seed)

    def _report(self, rows: Mapping[str, PolicyResult]) -> ComparisonReport:
        return ComparisonReport(
            model=type(self.whole.source).__name__,
            batches=len(self.batches),
            rows=sum(call.rows for call in self.batches),
            samples=self.samples,
            seed=self.seed,
            unrounded=self.unrounded,
            policies=tuple(rows.values()),
            remaining=tuple(name for name in self.chosen if name not in rows),
            interrupted=self.stopping(),
            described=self.file.described,
        )

    def _measure_unrounded(self) -> None:
        recorders = self._recorders()
        compares = any(metric.compares for metric in self.metrics)
        for call in self.batches:
            result = self.whole.evaluate(*call.args, **call.kwargs)
            self.references.append(result if compares else None)
            for recorder in recorders:
                recorder.take(0, result, result, call)
            self.tick()
            if self.stopping():
                return
        self.unrounded = _measured(recorders)

    def _recorders(self) -> list[Recorder]:
        return [Recorder(metric) for metric in self.metrics]

    def _row(self, name: str, outcomes: Iterator[tuple[Run, Outcome]]) -> PolicyResult | None:
        """Run a policy; None if Ctrl-C came before its first run was complete."""
        policy, recorders, error = self.chosen[name], self._recorders(), ""
        seconds, complete = 0.0, 0
        while complete < self._runs(policy) and not self.stopping():
            run, outcome = next(outcomes, (None, None))
            if run is None or outcome is None:  # Ctrl-C has ended the workers
                break
            if run.policy != name:  # of a policy that has failed, of which workers had begun more
                continue
            began = time.perf_counter()
            error = outcome.error or self._take(recorders, run, outcome.result)
            seconds += outcome.seconds + time.perf_counter() - began
            if error:
                break
            self.tick()
            complete += run.batch == len(self.batches) - 1
        _, costs = self.waiting.pop(name)
        for recorder in recorders:
            recorder.sums.pop(complete, None)
        if not complete and not error:
            return None
        return PolicyResult(name, policy, _measured(recorders), costs, seconds, complete == self._runs(policy), error)

    def _take(self, recorders: Sequence[Recorder], run: Run, result: Any) -> str:
        """Measure a result; returns what a metric raised, or "" for nothing."""
        try:
            for recorder in recorders:
                recorder.take(run.number, result, self.references[run.batch], self.batches[run.batch])
        except Exception as raised:  # a metric may raise anything: the row says what
            return said_of(raised)
        return ""


def _measured(recorders: Sequence[Recorder]) -> tuple[Measured, ...]:
    return tuple(m for recorder in recorders if (m := recorder.measured()) is not None)


def _policies(given: Any) -> dict[str, Policy]:
    """Return the policies by name. Raises TypeError or ValueError for a single one, for none, and for equal names."""
    if isinstance(given, str | Policy | Path) or not isinstance(given, Iterable):
        raise TypeError(
            f"policies is {shown(given)}; expected several, such as ['bfloat16', 'int8'], or a dict from names"
        )
    if isinstance(given, Mapping):
        wrong = [name for name in given if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"policies has the name {shown(wrong[0])}; expected texts as names")
        chosen = {name: Policy.parse(policy) for name, policy in given.items()}
    else:
        parsed = [Policy.parse(policy) for policy in given]
        chosen = {policy.name: policy for policy in parsed}
        if len(chosen) < len(parsed):
            names = [policy.name for policy in parsed]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"two policies have the name {shown(twice)}; pass a dict from names of your own to policies, or "
                "name=policy to fxround compare"
            )
    if not chosen:
        raise ValueError("policies has nothing; expected several, such as ['bfloat16', 'int8']")
    return chosen


__all__ = ["compare"]
