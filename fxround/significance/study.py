"""A study: take samples of every batch and compare them, place by place, with two other runs.

All samples of a batch are taken before the next batch is read, in the order of their numbers, whoever computes them. So
the memory of a study is that of one batch: 24 bytes per measured element, twice that for the results, and 4 bytes for
each element of all results (``elements``). Ctrl-C ends
the study after the running sample (``stopping``): the samples taken are compared with the unperturbed result alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from torch import Tensor

from fxround.errors import callers
from fxround.graph.site import site
from fxround.module.rounded_module import RoundedModule
from fxround.significance.adaptive import GROUP, Sequential, SequentialShare, group_bits
from fxround.significance.elements import Elements
from fxround.significance.figures import Options, Place, Tally
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import chosen, named
from fxround.significance.moments import Moments
from fxround.significance.observed import WHOLE, Key, Runs, Sample, Watch, sample_number, sample_stream
from fxround.significance.parts import BatchRecord, Part, Statistics, digest_of
from fxround.significance.places import (
    OUTPUT,
    ROOT,
    Capture,
    Isolate,
    Restricted,
    isolated,
    places,
    results,
    said_of_undrawn,
    undrawn,
)
from fxround.significance.recorder import Recorder
from fxround.significance.references import reference_rows

UNPERTURBED: Final = "unperturbed"
BINARY64: Final = "binary64"
GIVEN: Final = "reference"
BITS: Final = "bits"
# What workers cost: a process takes 10 s to import PyTorch and 10 s to 20 s to capture a model of three layers
# (2026-11-28, AMD EPYC, 2 busy cores, two workers). Half of it is left for quiet machines.
STARTING: Final = 15.0

Fan = Callable[[ModelCall, Iterable[int], Watch], Iterator[Sample]]


@dataclass(frozen=True)
class Sampling:
    """How samples are taken; ``samples`` None: until ``watch`` is known to within ``tolerance``, at most ``most``.

    first: the number of the first sample of a part of a study, which keeps what a merger needs; None of a whole one.
    """

    samples: int | None
    tolerance: float
    watch: str
    most: int
    capture: Capture
    isolate: Isolate | None
    metrics: Any
    reference: Any
    options: Options
    keep: bool
    first: int | None = None


@dataclass
class Batch:
    """One batch, its unperturbed result, and the statistics of its samples."""

    call: ModelCall
    watch: Watch
    result: Any
    statistics: Statistics


class Study:
    """The statistics of all batches so far. batches: how many there will be; None if that is not known."""

    def __init__(
        self, runs: Runs, plan: Sampling, fan: Fan | None, tick: Callable[[], None], batches: int | None
    ) -> None:
        self.runs, self.plan, self.tick, self.batches = runs, plan, tick, batches
        self._fan = self._serially if fan is None else self._worthwhile(fan)
        self.tallies: dict[Key, Tally] = {}
        self.alone: dict[str, Tally] = {}
        self.recorders: tuple[Recorder, ...] | None = None
        self.rules: list[Sequential | SequentialShare] = []
        self.counts: list[int] = []
        self.rows = 0
        self.elements = Elements()
        self.undrawn: tuple[str, ...] = ()
        self.samples: list[dict[Key, list[Tensor]]] = []
        self.records: list[BatchRecord] = []
        self.seconds = {"perturbed": 0.0, "unperturbed": 0.0}
        self.stopping: Callable[[], bool] = lambda: False
        self._isolated: dict[str, RoundedModule] = {}

    def batch(self, call: ModelCall) -> None:
        """Take all samples of one batch, and compare them."""
        number = len(self.counts)
        self.runs.perturbed.prepare(*call.args, **call.kwargs)
        if number == 0:
            self._warn_of_other_randomness()
            self._warn_of_what_draws_nothing()
        if self.stopping():
            return
        watched = places(self.runs.perturbed.graph, self.plan.capture)
        watch = {node: (place.kind, place.name) for node, place in watched.items()}
        batch = Batch(call, watch, self._unperturbed(call), Statistics(call.offset))
        if self.recorders is None:
            self.recorders = tuple(Recorder(metric) for metric in chosen(self.plan.metrics, batch.result))
        self._sample(batch, number)
        self.counts.append(batch.statistics.taken)
        self.rows += call.rows
        if self.plan.first is not None:
            self.records.append(self._record(batch, tuple(watched.values())))
        for recorder in self.recorders:
            recorder.end(call)
        self.elements.add_input(batch.call)
        if batch.statistics.taken >= 2:
            batch.statistics.tally(self.tallies, watched.values(), self.plan.options)
            self.elements.add_results(batch.statistics.moments, self.tallies, self.plan.options)
            for name, stream in self._references(batch):
                for key, value in stream:
                    batch.statistics.compare(self.tallies, name, key, value)
        if self.plan.isolate and not self.stopping():
            self._isolate(batch, number)

    def _warn_of_other_randomness(self) -> None:
        nodes = self.runs.perturbed.graph.graph.nodes
        drawing = [n.name for n in nodes if (entry := site(n)) is not None and entry.kind == "random"]
        if drawing:
            note = (
                f"{len(drawing)} operations are random by themselves ({drawing[0]}, ...): not all of the spread is "
                "rounding; call model.eval()"
            )
            self.runs.notes.append(note)
            warnings.warn(note, stacklevel=4)

    def _warn_of_what_draws_nothing(self) -> None:
        self.undrawn = undrawn(self.runs.perturbed.graph)
        if self.undrawn:
            warnings.warn(said_of_undrawn(self.undrawn), stacklevel=4)

    def _unperturbed(self, call: ModelCall) -> Any:
        started = time.perf_counter()
        *_, (_, result) = self.runs.unperturbed(call, {})
        self.seconds["unperturbed"] += time.perf_counter() - started
        return result

    def _sample(self, batch: Batch, number: int) -> None:
        rule, statistics = None if self.plan.samples else self._rule(), batch.statistics
        most = self.plan.samples or self.plan.most
        figures: list[float] = []
        numbers = (sample_number(number, (self.plan.first or 0) + i) for i in range(most))
        started = time.perf_counter()
        for stream in self._fan(batch.call, numbers, batch.watch):
            figures.append(self._take(batch, stream))
            statistics.taken += 1
            self.tick()
            if rule is not None and statistics.taken % GROUP == 0:
                rule.add(self._figures(batch, figures[-GROUP:]))
            if statistics.taken % GROUP == 0:
                statistics.end_group()
            if self.stopping() or (rule is not None and statistics.taken % GROUP == 0 and rule.done):
                break
        statistics.end_group()
        self.seconds["perturbed"] += time.perf_counter() - started
        if rule is not None:
            self.rules.append(rule)

    def _take(self, batch: Batch, stream: Sample) -> float:
        """Take one sample; returns the watched metric's value."""
        kept: dict[Key, Tensor] = {}
        result: Any = None
        for key, value in stream:
            if key == WHOLE:
                result = value
                continue
            batch.statistics.add(key, value)
            if self.plan.keep:
                kept[key] = value.detach().clone()
        if self.plan.keep:
            self._keep(batch, kept)
        seen = {
            r.metric.name: r.take(batch.statistics.taken, result, batch.result, batch.call)
            for r in self.recorders or ()
        }
        return seen.get(self.plan.watch, float("nan"))

    def _keep(self, batch: Batch, kept: dict[Key, Tensor]) -> None:
        if batch.statistics.taken == 0:
            self.samples.append({})
        for key, value in kept.items():
            self.samples[-1].setdefault(key, []).append(value)

    def _rule(self) -> Sequential | SequentialShare:
        shares = any(metric.share for metric in named(self.plan.metrics) if metric.name == self.plan.watch)
        return (SequentialShare if shares else Sequential)(self.plan.tolerance, self.plan.options.confidence)

    def _figures(self, batch: Batch, figures: list[float]) -> list[float]:
        """Return what a group adds to the rule: its bits, or the watched metric's values."""
        if self.plan.watch != BITS:
            return figures
        bits = group_bits(batch.statistics.group.values())
        return [] if bits is None else [bits]

    def _record(self, batch: Batch, places: tuple[Place, ...]) -> BatchRecord:
        """Return what a merger needs of a batch besides its samples."""
        references = {
            name: {key: value.detach().clone() for key, value in stream if key != WHOLE}
            for name, stream in self._references(batch)
        }
        recorders = self.recorders or ()
        changed = {r.metric.name: r.moved for r in recorders if r.moved is not None}
        labels = {r.metric.name: (r.classes, list(r.maps)) for r in recorders if r.metric.pairs}
        return BatchRecord(digest_of(batch.call), batch.call.offset, places, references, changed, labels)

    def part(self) -> Part | None:
        """Return what a merger needs of a part of a study; None of a whole one."""
        if self.plan.first is None:
            return None
        names = tuple(recorder.metric.name for recorder in self.recorders or ())
        return Part(self.plan.first, self.plan.capture, self.plan.options, names, tuple(self.records))

    def _references(self, batch: Batch) -> Iterator[tuple[str, Sample]]:
        """Yield the runs that a batch is compared with."""
        if self.stopping():
            yield UNPERTURBED, (((OUTPUT, name), value) for name, value in results(batch.result))
            return
        yield UNPERTURBED, self.runs.unperturbed(batch.call, batch.watch)
        if self.plan.reference == BINARY64:
            yield BINARY64, self.runs.binary64(batch.call, batch.watch)
        elif self.plan.reference is not None:
            last = len(self.counts) == self.batches
            rows = reference_rows(self.plan.reference, batch.result, batch.call.offset, last=last)
            yield GIVEN, (((OUTPUT, name), theirs) for name, theirs in rows)

    def _isolate(self, batch: Batch, number: int) -> None:
        """Take the same samples again with one site perturbed at a time, and measure the first result."""
        assert self.plan.isolate is not None
        numbers = [sample_number(number, i) for i in range(batch.statistics.taken)]
        for name in isolated(self.runs.perturbed.graph, self.plan.isolate):
            if name not in self._isolated:
                base = self.runs.perturbed.policy
                self._isolated[name] = self.runs.perturbed.with_policy(Restricted.of(base, self.plan.isolate, name))
            held: dict[Key, Moments] = {}
            for at in numbers:
                first = next(iter(sample_stream(self._isolated[name], batch.call, at, {})))
                held.setdefault(first[0], Moments(tuple(first[1].shape), first[1].dtype)).add(first[1])
                self.tick()
                if self.stopping():
                    return
            for moments in held.values():
                tally = self.alone.setdefault(name, Tally(Place(name or ROOT, self.plan.isolate), self.plan.options))
                tally.add(moments, batch.call.offset)

    def _worthwhile(self, fan: Fan) -> Fan:
        """Return a fan that leaves samples to workers from the third on, if these save more time than they cost."""
        shared: Fan | None = None

        def samples(call: ModelCall, numbers: Iterable[int], watch: Watch) -> Iterator[Sample]:
            nonlocal shared
            rest = iter(numbers)
            if shared is None:
                # The first sample may have to compile machine code, which workers then find in the cache.
                yield from self._serially(call, islice(rest, 1), watch)
                began = time.perf_counter()
                yield from self._serially(call, islice(rest, 1), watch)
                shared = fan if self._pays(time.perf_counter() - began) else self._serially
            yield from shared(call, rest, watch)

        return samples

    def _pays(self, seconds: float) -> bool:
        """Whether workers save time, if a sample takes these seconds here; warn if not."""
        if self.batches is None:
            return True
        left = self.batches * (self.plan.samples or self.plan.most) - 2
        if left * seconds >= STARTING:
            return True
        if left:
            warnings.warn(
                f"n_jobs starts no workers: the {left:,} samples that remain take about {left * seconds:.2g} s in this "
                f"process, and workers about {STARTING:.0f} s to start. Leave n_jobs out for so short samples",
                stacklevel=callers(),
            )
        return False

    def _serially(self, call: ModelCall, numbers: Iterable[int], watch: Watch) -> Iterator[Sample]:
        return (sample_stream(self.runs.perturbed, call, number, watch) for number in numbers)
