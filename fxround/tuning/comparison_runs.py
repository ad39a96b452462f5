"""The runs of a comparison: each batch under each policy, in this process or in workers.

A task is one run of one batch under one policy. A worker captures the batches that the caller's process captured, in
the same order, and refuses to go on if its graphs are others. It has the caller's number of threads and switches of
PyTorch's kernels, so that stock kernels, which some policies keep, give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import IDENTITY, Policy
from fxround.significance.inputs import ModelCall
from fxround.significance.observed import sample_number
from fxround.significance.worker_state import Examples, Kernels, capture_same, examples_of
from fxround.significance.workers import Packed, Pool, kept, owned


@dataclass(frozen=True)
class Run:
    """One batch in one run of a policy: name of the policy, numbers of run and batch from 0."""

    policy: str
    number: int
    batch: int


@dataclass(frozen=True)
class Outcome:
    """What a run gave: a result, or the type and the message of an exception; and how long it took."""

    result: Any
    seconds: float
    error: str = ""


def outcome_of(compiled: RoundedModule, run: Run, call: ModelCall, seed: int) -> Outcome:
    """Return what a model gives for a batch. Whatever the model raises under its policy is in the outcome."""
    began, result, error = time.perf_counter(), None, ""
    try:
        compiled.reseed(seed, sample=sample_number(run.batch, run.number))
        result = compiled.evaluate(*call.args, **call.kwargs)
    except Exception as raised:  # the model may raise anything
        error = said_of(raised)
    return Outcome(result, time.perf_counter() - began, error)


def said_of(raised: Exception) -> str:
    """Return the type and the message of an exception."""
    return f"{type(raised).__name__}: {raised}"


@dataclass
class _Subject:
    """A model in a worker, and the model under the policy that ran there last."""

    whole: RoundedModule
    latest: RoundedModule | None = None

    def under(self, policy: Policy) -> RoundedModule:
        if self.latest is None or self.latest.policy != policy:
            self.latest = self.whole.with_policy(policy)
        return self.latest


class Shared(Pool):
    """Workers that run batches of one model under several policies.

    n_jobs as joblib's. whole: the unrounded model, which has captured the batches; policies: those that run.
    """

    def __init__(
        self,
        n_jobs: int,
        whole: RoundedModule,
        batches: Sequence[ModelCall],
        policies: Mapping[str, Policy],
        seed: int,
    ) -> None:
        super().__init__(n_jobs)
        self._model = self.packed((whole.source, seed, examples_of(whole, batches)))
        self._batches = [self.packed(call) for call in batches]
        self._policies, self._seed = policies, seed

    def outcomes(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Outcome]]:
        """Yield each run with its outcome, in order."""
        given = self._seed, Kernels.current()
        return self.ordered(
            _work, ((self._model, self._batches[run.batch], self._policies[run.policy], run, *given) for run in runs)
        )


def _subject(parts: tuple[Any, int, Examples]) -> _Subject:
    """Return a model in a worker. Raises FxroundError if its graphs are not those of the caller."""
    model, seed, examples = parts
    whole = compile(model, IDENTITY, seed=seed)
    capture_same(whole, examples)
    return _Subject(whole)


def _work(model: Packed, batch: Packed, policy: Policy, run: Run, seed: int, kernels: Kernels) -> tuple[Run, Outcome]:
    with kernels.active(), torch.random.fork_rng(), torch.no_grad():
        subject, call = kept("comparison", model, _subject), kept("batch", batch, lambda part: part)
        outcome = outcome_of(subject.under(policy), run, call, seed)
        return run, replace(outcome, result=owned(outcome.result))
