"""Runs of assignments: each is lowered, run over all data, measured, kept in memory and written to a file.

An assignment runs once. A run that Ctrl-C ended, or that raised an exception, is not in the file, and runs again when
the file is used again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fxround.atomic_files import write_file
from fxround.module.rounded_module import RoundedModule
from fxround.short_reprs import Short
from fxround.significance.figures import plain
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import METRICS, Metric
from fxround.significance.observed import sample_number
from fxround.significance.recorder import Recorder
from fxround.tuning.costs import costs_of
from fxround.tuning.parts import Assignment, Formats, Part
from fxround.tuning.studies import number_of, read_file, reading


class Stopped(Exception):
    """The search ends: Ctrl-C was pressed, or all runs that were allowed are done."""


@dataclass(frozen=True, repr=False)
class Trial(Short):
    """What was measured of an assignment.

    formats          the name of the format of each part, in the order of the parts
    values           the metric in each run over the data
    noise            the mean square of the difference from the unrounded result, as a part of that of the result
    weight_bits, activation_bits   as ``fxround.compare`` counts them
    seconds          how long the runs took
    error            the type and the message of the exception that ended the runs; else ""
    """

    formats: tuple[str, ...]
    values: tuple[float, ...]
    noise: float
    weight_bits: float | None
    activation_bits: float | None
    seconds: float
    error: str = ""

    def _line(self) -> str:
        costs = (("weight", self.weight_bits), ("activation", self.activation_bits))
        bits = [f"{value:.4g} bits of {name}s" for name, value in costs if value is not None]
        result = f"failed: {self.error}" if self.error else f"metric {self.value:.6g}, noise {self.noise:.3g}"
        return ", ".join([f"{len(self.formats)} parts", *bits, result])

    @property
    def value(self) -> float:
        """The mean of the metric; NaN if no run is complete."""
        return fmean(self.values) if self.values else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trial:
        """Return the trial that ``to_dict`` wrote."""
        measured = tuple(map(number_of, data["values"])), number_of(data["noise"])
        return Trial(tuple(data["formats"]), *measured, *(data[key] for key in _REST))


_REST = ("weight_bits", "activation_bits", "seconds", "error")


@dataclass
class Trials:
    """The assignments that have run, and how to run others.

    whole       the captured model under the identity policy
    described   what the file's figures belong to
    limit       the most assignments that may run; None for any number
    executed    how many ran now, and not in an earlier search with the same file
    passes      how often all data went through the model now
    """

    whole: RoundedModule
    batches: Sequence[ModelCall]
    metric: Metric
    formats: Formats
    parts: Sequence[Part]
    samples: int
    seed: int
    path: str | Path | None
    described: Mapping[str, Any]
    limit: int | None = None
    tick: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    executed: int = 0
    passes: int = 0
    unrounded: float = math.nan
    known: dict[Assignment, Trial] = field(default_factory=dict)
    _held: dict[tuple[str, ...], Trial] = field(default_factory=dict)
    _references: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Read the file, and run the unrounded model. Raises what the model and the metric raise."""
        held = read_file(self.path, self.described, "search")
        if held is not None:
            with reading(self.path, "search"):
                self._held = {trial.formats: trial for trial in map(Trial.from_dict, held["trials"])}
        recorder, power = Recorder(self.metric), Recorder(METRICS["sqnr"])
        for call in self.batches:
            result = self.whole.evaluate(*call.args, **call.kwargs)
            self._references.append(result)
            for each in (recorder, power):
                each.take(0, result, result, call)
            self.tick()
        self.passes += 1
        measured = recorder.measured()
        assert measured is not None
        self.unrounded = measured.mean

    @property
    def passes_of_a_run(self) -> int:
        """How often the data go through the model for an assignment, at most."""
        return self.samples if any(policy.draws for policy in self.formats.policies) else 1

    def compiled(self, assignment: Assignment) -> RoundedModule:
        """Return the model under the policy of an assignment."""
        return self.whole.with_policy(self.formats.policy(self.parts, assignment))

    def run(self, assignment: Assignment) -> Trial:
        """Return what an assignment does: from memory, from the file, or by a run. Raises ``Stopped``."""
        if assignment in self.known:
            return self.known[assignment]
        if self.limit is not None and len(self.known) >= self.limit:
            raise Stopped
        names = tuple(self.formats.names[given] for given in assignment)
        if names in self._held:
            self.known[assignment] = self._held[names]
            return self.known[assignment]
        trial = self.known[assignment] = self._run(names, assignment)
        self.executed += 1
        if not trial.error:
            self._held[names] = trial
            self._write()
        return trial

    def _run(self, names: tuple[str, ...], assignment: Assignment) -> Trial:
        compiled = self.compiled(assignment)
        with torch.no_grad():
            first = self.batches[0]
            costs = costs_of(compiled._entry(first.args, first.kwargs).lowered)
        runs = self.samples if compiled.policy.draws else 1
        recorder, power, error = Recorder(self.metric), Recorder(METRICS["sqnr"]), ""
        began = time.perf_counter()
        try:
            for number in range(runs):
                self._sample(compiled, number, (recorder, power))
        except Exception as raised:
            if isinstance(raised, Stopped):
                raise
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - began
        values = () if error else tuple(self.metric.finish(sums) for sums in recorder.sums.values())
        noise = math.inf if error else _noise(power)
        return Trial(names, values, noise, costs.weight_bits, costs.activation_bits, seconds, error)

    def _sample(self, compiled: RoundedModule, number: int, recorders: Sequence[Recorder]) -> None:
        for i, (call, reference) in enumerate(zip(self.batches, self._references, strict=True)):
            compiled.reseed(self.seed, sample=sample_number(i, number))
            result = compiled.evaluate(*call.args, **call.kwargs)
            for recorder in recorders:
                recorder.take(number, result, reference, call)
            self._step()
        self.passes += 1

    def _step(self) -> None:
        self.tick()
        if self.stopping():
            raise Stopped

    def _write(self) -> None:
        if self.path is not None:
            data = {"described": plain(dict(self.described)), "trials": [t.to_dict() for t in self._held.values()]}
            write_file(self.path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def _noise(power: Recorder) -> float:
    """Return the part of the noise in the signal, over all runs; infinity for what is no number."""
    signal, noise = (math.fsum(sums[i] for sums in power.sums.values()) for i in (0, 1))
    if noise == 0:
        return 0.0
    return noise / signal if signal > 0 and math.isfinite(noise) else math.inf


__all__ = ["Stopped", "Trial", "Trials"]
