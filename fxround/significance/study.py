"""A study: take samples of every batch and compare them, place by place, with two other runs.

All samples of a batch are taken before the next batch is read, in the order of their numbers, whoever computes them. So
the memory of a study is that of one batch: 24 bytes per measured element, twice that for the results. The first Ctrl-C
sets a flag that is read between samples, so that the samples taken are complete and are reported as partial; a second
one interrupts at once.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from torch import Tensor

from fxround.graph.site import site
from fxround.module.rounded_module import RoundedModule
from fxround.significance.adaptive import GROUP, Sequential, SequentialShare, group_bits
from fxround.significance.figures import Options, Place, Tally
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import chosen, named
from fxround.significance.moments import Moments
from fxround.significance.observed import WHOLE, Key, Runs, Sample, Watch, sample_number, sample_stream
from fxround.significance.places import (
    OUTPUT,
    ROOT,
    Capture,
    Isolate,
    Restricted,
    isolated,
    places,
    said_of_undrawn,
    undrawn,
)
from fxround.significance.recorder import Recorder
from fxround.significance.references import reference_rows

UNPERTURBED: Final = "unperturbed"
BINARY64: Final = "binary64"
GIVEN: Final = "reference"
BITS: Final = "bits"

Fan = Callable[[ModelCall, Iterable[int], Watch], Iterator[Sample]]


@dataclass(frozen=True)
class Sampling:
    """How samples are taken; ``samples`` None: until ``watch`` is known to within ``tolerance``, at most ``most``."""

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


@dataclass
class Batch:
    """The samples taken of one batch."""

    call: ModelCall
    watch: Watch
    result: Any
    moments: dict[Key, Moments] = field(default_factory=dict)
    group: dict[Key, Moments] = field(default_factory=dict)
    spoiled: dict[Key, str] = field(default_factory=dict)
    taken: int = 0

    def add(self, key: Key, value: Tensor) -> None:
        """Add one sample's value at one place; those of results are collected a group at a time."""
        held = self.group if key[0] == OUTPUT else self.moments
        if key in self.spoiled:
            return
        if key not in held:
            held[key] = Moments(tuple(value.shape), value.dtype)
        try:
            held[key].add(value)
        except ValueError as error:  # a size that depends on the data, and so on the sample
            self.spoil(key, error)

    def spoil(self, key: Key, error: ValueError) -> None:
        """Leave a place out, and keep the reason."""
        self.spoiled[key] = str(error)
        for held in (self.moments, self.group):
            held.pop(key, None)

    def end_group(self) -> None:
        """Merge the results' group into the earlier samples."""
        for key, group in list(self.group.items()):
            try:
                self.moments.setdefault(key, Moments(group.shape, group.dtype)).merge(group)
            except ValueError as error:
                self.spoil(key, error)
        self.group.clear()


class Study:
    """The statistics of all batches so far. batches: how many there will be; None if that is not known."""

    def __init__(
        self, runs: Runs, plan: Sampling, fan: Fan | None, tick: Callable[[], None], batches: int | None
    ) -> None:
        self.runs, self.plan, self.tick, self.batches = runs, plan, tick, batches
        self._fan = fan or self._serially
        self.tallies: dict[Key, Tally] = {}
        self.alone: dict[str, Tally] = {}
        self.recorders: tuple[Recorder, ...] | None = None
        self.rules: list[Sequential | SequentialShare] = []
        self.counts: list[int] = []
        self.rows = 0
        self.undrawn: tuple[str, ...] = ()
        self.samples: list[dict[Key, list[Tensor]]] = []
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
        watched = places(self.runs.perturbed.graph, self.plan.capture)
        watch = {node: (place.kind, place.name) for node, place in watched.items()}
        batch = Batch(call, watch, self._unperturbed(call))
        if self.recorders is None:
            self.recorders = tuple(Recorder(metric) for metric in chosen(self.plan.metrics, batch.result))
        self._sample(batch, number)
        self.counts.append(batch.taken)
        self.rows += call.rows
        for recorder in self.recorders:
            recorder.end(call)
        if batch.taken >= 2:
            self._tally(batch, {(place.kind, place.name): place for place in watched.values()})
            self._compare(batch)
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
        rule = None if self.plan.samples else self._rule()
        most = self.plan.samples or self.plan.most
        figures: list[float] = []
        numbers = (sample_number(number, i) for i in range(most))
        started = time.perf_counter()
        for stream in self._fan(batch.call, numbers, batch.watch):
            figures.append(self._take(batch, stream))
            batch.taken += 1
            self.tick()
            if rule is not None and batch.taken % GROUP == 0:
                rule.add(self._figures(batch, figures[-GROUP:]))
            if batch.taken % GROUP == 0:
                batch.end_group()
            if self.stopping() or (rule is not None and batch.taken % GROUP == 0 and rule.done):
                break
        batch.end_group()
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
            batch.add(key, value)
            if self.plan.keep:
                kept[key] = value.detach().clone()
        if self.plan.keep:
            self._keep(batch, kept)
        seen = {r.metric.name: r.take(batch.taken, result, batch.result, batch.call) for r in self.recorders or ()}
        return seen.get(self.plan.watch, float("nan"))

    def _keep(self, batch: Batch, kept: dict[Key, Tensor]) -> None:
        if batch.taken == 0:
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
        bits = group_bits(batch.group.values())
        return [] if bits is None else [bits]

    def _tally(self, batch: Batch, known: Mapping[Key, Place]) -> None:
        for key in [*known, *(k for k in (*batch.moments, *batch.spoiled) if k not in known)]:
            place = known.get(key) or Place(key[1], OUTPUT)
            tally = self.tallies.setdefault(key, Tally(place, self.plan.options))
            if key in batch.moments:
                tally.add(batch.moments[key], batch.call.offset)
            tally.note = batch.spoiled.get(key, tally.note)

    def _compare(self, batch: Batch) -> None:
        self._against(UNPERTURBED, batch, self.runs.unperturbed(batch.call, batch.watch))
        if self.plan.reference == BINARY64:
            self._against(BINARY64, batch, self.runs.binary64(batch.call, batch.watch))
        elif self.plan.reference is not None:
            last = len(self.counts) == self.batches
            rows = reference_rows(self.plan.reference, batch.result, batch.call.offset, last=last)
            self._against(GIVEN, batch, (((OUTPUT, name), theirs) for name, theirs in rows))

    def _against(self, name: str, batch: Batch, stream: Sample) -> None:
        for at, value in stream:
            if at in batch.moments:
                self.tallies[at].compare(name, batch.moments[at], value, batch.call.offset)

    def _isolate(self, batch: Batch, number: int) -> None:
        """Take the same samples again with one site perturbed at a time, and measure the first result."""
        assert self.plan.isolate is not None
        numbers = [sample_number(number, i) for i in range(batch.taken)]
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

    def _serially(self, call: ModelCall, numbers: Iterable[int], watch: Watch) -> Iterator[Sample]:
        return (sample_stream(self.runs.perturbed, call, number, watch) for number in numbers)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second press interrupts.

    Outside the main thread signals are not changed.
    """
    pressed = count()
    stopped = threading.Event()

    def note(number: int, frame: Any) -> None:
        stopped.set()
        if next(pressed):
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)
