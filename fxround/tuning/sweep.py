"""``fxround.sweep``: policies of a base and axes, and trainings under each of them.

A training is a function of (model, policy, seed): each one has a model of its own, and PyTorch's generators are seeded
and then left as they were. Trainings run one after the other, or in workers, and each that is complete is written.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from fxround.atomic_files import write_file
from fxround.errors import shown, type_of
from fxround.fingerprint import hash
from fxround.graph.text import digest
from fxround.module import compile
from fxround.policy import IDENTITY, Policy
from fxround.runtime.draw import Draw
from fxround.significance.inputs import positive
from fxround.significance.progress import progress as shown_progress
from fxround.significance.provenance import version_of
from fxround.significance.stopping import interruptible
from fxround.significance.worker_state import Kernels
from fxround.significance.workers import Packed, Pool, kept, require_jobs
from fxround.tuning.comparison_runs import said_of
from fxround.tuning.studies import read_file, reading, source_of
from fxround.tuning.sweep_policies import Sweep, combined
from fxround.tuning.sweep_report import UNROUNDED, SweepReport, TrainingRun

Train = Callable[[Any, int], Any]


@overload
def sweep(base: Any, axes: Mapping[str, Any]) -> Sweep: ...


@overload
def sweep(
    base: Any,
    axes: Mapping[str, Any],
    *,
    train: Train,
    model: nn.Module | Callable[[int], nn.Module],
    seeds: int | Sequence[int] = 3,
    path: str | Path | None = None,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> SweepReport: ...


def sweep(
    base: Any,
    axes: Mapping[str, Any],
    *,
    train: Train | None = None,
    model: nn.Module | Callable[[int], nn.Module] | None = None,
    seeds: int | Sequence[int] = 3,
    path: str | Path | None = None,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> Sweep | SweepReport:
    """Make a policy for each combination of values on axes; with ``train``, train a model under each of them.

    An axis is a list of values, or a dict from labels of your own to values. Its name says what the values are:

    - an argument of ``base``, if that is a function that returns a policy, such as ``fxround.policy.nvfp4``;
    - a word in braces in ``base``, if that is a text or a dict: ``"scaled({element};{block},e8m0fnu,up)"``;
    - ``element``, ``block`` (of all but weights), ``weights`` (the block of weights), ``scale`` (its format), ``how``
      (a scale is made), ``tensor`` (whether scales are relative to one of the tensor): of the base's scaled formats;
    - ``mode``, and ``errors``, the mode of operands that are errors;
    - ``hadamard``, the size of a transform of the operands of products that yield gradients of weights, or None;
    - ``gradient`` (of roundings of results), ``accumulate`` (of products);
    - any other name, if its values are Rules, lists of Rules, or None: they are added to the base's.

    Combinations that no policy can say are dropped with the reason, and so are policies that come twice.

    Args:
        base: a policy as for ``fxround.compile``, a function that returns one, or a text or dict with words in braces.
        axes: the values of each axis by its name.
        train: a function of a compiled model and a seed that trains the model and returns a number, or a dict of
            numbers by names. It is called for each policy and seed, and for each seed without roundings.
        model: a module, of which each training has a copy, or a function of a seed that returns one. Both are called
            with PyTorch's generators at ``torch.manual_seed(seed)``. The compiled model has this seed as well.
        seeds: how many, from 0, or a list of them.
        path: a JSON file that is written after each training. If it exists, its trainings do not run again.
        n_jobs: number of joblib workers, -1 for all cores; each has as many threads as this process.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A ``Sweep``, a mapping from names to policies; with ``train``, a ``SweepReport``. Ctrl-C ends the sweep after
        the training that runs, with workers at once, and returns the report of what is complete; a second one
        interrupts at once, and the file has what is complete. A training that raises an exception has it in its row,
        and the others go on.

    Raises:
        TypeError, ValueError: for wrong arguments, an axis without values or with an unknown name, a value that no
            combination can have, and a file of another sweep. PolicyError for an unknown base.

    Example::

        policies = fxround.sweep("nvfp4", {"scale": ["e4m3fn", "ue5m3"], "tensor": [True, False]})
        fxround.compare(model, loader, policies, "accuracy")
        print(fxround.sweep("nvfp4", {"errors": ["nearest_even", "stochastic"]}, train=train, model=make))
    """
    policies = combined(base, axes)
    if train is None:
        if model is not None:
            raise TypeError("model is given without train; pass train=, a function of a compiled model and a seed")
        return policies
    if not callable(train):
        raise TypeError(f"train is {shown(train)}; expected a function of a compiled model and a seed")
    if not (isinstance(model, nn.Module) or callable(model)):
        raise TypeError(
            f"model is {shown(model)}; expected a torch.nn.Module, or a function of a seed that returns one"
        )
    require_jobs(n_jobs)
    numbers = _seeds(seeds)
    described = {} if path is None else _described(model, train)
    run = _Trainings(policies, model, train, numbers, path, described)
    run.read()
    with ExitStack() as stack:
        if n_jobs != 1 and run.waiting:
            run.outcomes = stack.enter_context(_Shared(n_jobs, model, train)).outcomes
        run.tick = stack.enter_context(shown_progress("sweep", len(run.waiting), progress))
        run.stopping = stack.enter_context(interruptible())
        return run.report()


def _seeds(given: Any) -> tuple[int, ...]:
    if isinstance(given, int):
        return tuple(range(positive("seeds", given)))
    numbers = tuple(given)
    for seed in numbers:
        Draw(seed)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds is {shown(given)}; expected a number of them, or different ones")
    return numbers


def _described(model: Any, train: Train) -> dict[str, Any]:
    """Return what figures belong to, beside policies and seeds, as plain data."""
    own = hash(model) if isinstance(model, nn.Module) else digest([source_of(model)])
    return {
        "model": _name(model),
        "weights": own,
        "train": f"{_name(train)} {digest([source_of(train)])}",
        "fxround": version_of("fxround"),
        "torch": version_of("torch"),
    }


def _name(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


@dataclass
class _Trainings:
    """The trainings of a sweep as far as they have run."""

    policies: Sweep
    model: Any
    train: Train
    seeds: Sequence[int]
    path: str | Path | None
    described: Mapping[str, Any]
    tick: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    done: dict[tuple[str, int], TrainingRun] = field(default_factory=dict)
    # Trainings of the file that this sweep does not have.
    others: list[TrainingRun] = field(default_factory=list)
    outcomes: Callable[[Iterable[tuple[str, Policy, int]]], Iterator[TrainingRun]] | None = None

    @property
    def wanted(self) -> list[tuple[str, Policy, int]]:
        """Name, policy and seed of all trainings, seed by seed, so that an interrupted sweep has whole rows early."""
        named = {UNROUNDED: Policy.parse(IDENTITY), **self.policies}
        return [(name, policy, seed) for seed in self.seeds for name, policy in named.items()]

    @property
    def waiting(self) -> list[tuple[str, Policy, int]]:
        """Those that have not run."""
        return [each for each in self.wanted if (each[0], each[2]) not in self.done]

    def read(self) -> None:
        """Take the trainings that the file has under the same names and policies."""
        held = read_file(self.path, self.described, "sweep")
        if held is None:
            return
        with reading(self.path, "sweep"):
            trainings = [TrainingRun.from_dict(row) for row in held["trainings"]]
        wanted = {(name, seed): policy for name, policy, seed in self.wanted}
        for training in trainings:
            if wanted.get((training.name, training.seed)) == training.policy and not training.error:
                self.done[training.name, training.seed] = training
            elif (training.name, training.seed) not in wanted:
                self.others.append(training)

    def report(self) -> SweepReport:
        """Train what has not run, and return the report."""
        outcomes = (self.outcomes or self._alone)(self.waiting)
        for _ in self.waiting:
            training = None if self.stopping() else next(outcomes, None)
            if training is None:  # Ctrl-C, which has ended the workers, too
                break
            self.done[training.name, training.seed] = training
            self._write()
            self.tick()
        return self._report()

    def _alone(self, wanted: Iterable[tuple[str, Policy, int]]) -> Iterator[TrainingRun]:
        return (trained(self.model, self.train, *each) for each in wanted)

    def _report(self) -> SweepReport:
        rows = [self.done[name, seed] for name, _, seed in self.wanted if (name, seed) in self.done]
        order = {name: i for i, name in enumerate((UNROUNDED, *self.policies))}
        rows.sort(key=lambda training: order[training.name])
        model, interrupted = _name(self.model), self.stopping()
        return SweepReport(model, self.policies, tuple(self.seeds), tuple(rows), interrupted, self.described)

    def _write(self) -> None:
        if self.path is not None:
            report = self._report()
            kept_rows = (*report.trainings, *self.others)
            held = SweepReport(
                report.model, report.sweep, report.seeds, kept_rows, report.interrupted, report.described
            )
            write_file(self.path, held.to_json() + "\n")


def trained(model: Any, train: Train, name: str, policy: Policy, seed: int) -> TrainingRun:
    """Train a new model under a policy. Whatever this raises is in the result."""
    began, values, error = time.perf_counter(), dict[str, float](), ""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            own = copy.deepcopy(model) if isinstance(model, nn.Module) else model(seed)
            values = _values(train(compile(own, policy, seed=seed), seed))
        except Exception as raised:  # a training may raise anything: the row says what
            error = said_of(raised)
    return TrainingRun(name, policy, seed, values, time.perf_counter() - began, error)


def _values(returned: Any) -> dict[str, float]:
    """Return what a training returned, by names. Raises TypeError for anything but numbers."""
    named = returned if isinstance(returned, Mapping) else {"result": returned}
    values: dict[str, float] = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, Real):
            raise TypeError(
                f"train returned {type_of(value)} as {shown(name)}; expected a number, or a dict of numbers"
            )
        values[name] = float(value)
    return values


class _Shared(Pool):
    """Workers that train; n_jobs as joblib's."""

    def __init__(self, n_jobs: int, model: Any, train: Train) -> None:
        super().__init__(n_jobs)
        self._given = self.packed((model, train))

    def outcomes(self, wanted: Iterable[tuple[str, Policy, int]]) -> Iterator[TrainingRun]:
        """Yield the trainings in order."""
        kernels = Kernels.current()
        return self.ordered(_work, ((self._given, kernels, *each) for each in wanted))


def _work(given: Packed, kernels: Kernels, name: str, policy: Policy, seed: int) -> TrainingRun:
    with kernels.active():
        model, train = kept("training", given, lambda parts: parts)
        return trained(model, train, name, policy, seed)


__all__ = ["sweep"]
