"""Verdicts: whether a set of sites fails, from several runs, stored in memory and on disk.

A set fails if the check rejects the output of one of its ``runs`` samples. A run is a function of (graph, inputs,
sites, seed, sample), so that it is never repeated, neither within a search nor by a later one with the same cache
directory. A failing verdict has a sample that reproduces it. A passing one may be wrong: a set that fails in a share p
of samples is taken for passing with probability (1 - p)^runs. A record is one line that is written whole; a line cut
off by an interruption is ignored. The two sets with which a search begins always run again: if the answers differ from
the cached ones, the check depends on something outside its code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import tee
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxround.localization.checks import Check
from fxround.localization.delta_debugging import Units
from fxround.localization.masked_model import Masked

Ranges = tuple[tuple[int, int], ...]
Elements = Mapping[str, Ranges]
# The sites that are on, the sample, and the elements.
Run = tuple[Units, int, Elements | None]


class Verdicts:
    """The verdicts on sets of sites of one masked model under one check.

    runs: samples per set. cache: a directory, which is created if it is missing, or None.
    """

    def __init__(self, masked: Masked, check: Check, *, runs: int, seed: int, cache: Path | None) -> None:
        self.masked, self.check, self.runs, self.seed = masked, check, runs, seed
        self.executed = self.recalled = 0
        self.failing: set[str] = set()
        self.passing: set[str] = set()
        self.after_run: Callable[[], None] = lambda: None
        self.outputs: Callable[[Iterable[Run]], Iterator[Any]] = self._serially
        self._known: dict[tuple[str, int], bool] = {}
        self._order = list(range(runs))
        self._places = {name: i for i, name in enumerate(masked.sites)}
        self.file = cache / f"{self._digest()}.jsonl" if cache is not None else None
        self._recorded: dict[tuple[str, int], bool] = _read(self.file) if self.file else {}

    def fails(self, on: Units, elements: Elements | None = None) -> bool:
        """Whether any sample fails with ``on``; the sample that failed last runs first."""
        return self.first_failing([(on, elements)]) is not None

    def first_failing(self, sets: Sequence[tuple[Units, Elements | None]]) -> int | None:
        """Return the place of the first of several sets that fails, or None. Those after it are not judged."""
        order = self._order
        verdicts = self._verdicts((on, sample, elements) for on, elements in sets for sample in order)
        for place, (on, elements) in enumerate(sets):
            failed = next((sample for sample in order if not next(verdicts)), None)
            (self.passing if failed is None else self.failing).add(self.key(on, elements))
            if failed is not None:
                self._order = [failed, *(s for s in order if s != failed)]
                return place
        return None

    def failures(self, on: Units, elements: Elements | None = None) -> tuple[int, ...]:
        """Return the numbers of all samples that fail."""
        verdicts = self._verdicts((on, sample, elements) for sample in range(self.runs))
        return tuple(sample for sample, passed in enumerate(verdicts) if not passed)

    def passes(self, on: Units, sample: int, elements: Elements | None = None, *, again: bool = False) -> bool:
        """Return one run's verdict.

        again: run even if the file has the verdict, and raise ValueError if the two differ.
        """
        return next(self._verdicts([(on, sample, elements)], again=again))

    def _verdicts(self, runs: Iterable[Run], *, again: bool = False) -> Iterator[bool]:
        """Yield the verdicts of some runs, in order; ``again`` as for ``passes``.

        Outputs may be computed ahead. They are judged, counted and stored one by one, when their verdict is asked for.
        """
        asked, ahead = tee(((self.key(on, elements), sample), (on, sample, elements)) for on, sample, elements in runs)
        outputs = self.outputs(self._unknown(ahead, again))
        for key, _ in asked:
            if key in self._known:
                yield self._known[key]
            elif again or key not in self._recorded:
                yield self._judged(key, next(outputs))
            else:
                self.recalled += 1
                self._known[key] = self._recorded[key]
                yield self._known[key]

    def _unknown(self, keyed: Iterable[tuple[tuple[str, int], Run]], again: bool) -> Iterator[Run]:
        """Yield the runs whose verdicts are not known, each once; ``again``: nor does the file count."""
        yielded: set[tuple[str, int]] = set()
        for key, run in keyed:
            if key not in self._known and key not in yielded and (again or key not in self._recorded):
                yielded.add(key)
                yield run

    def _judged(self, key: tuple[str, int], output: Any) -> bool:
        """Return the verdict on the output of a run, which is stored."""
        passed = self.check.passes(output)
        self.executed += 1
        if self._recorded.get(key, passed) != passed:
            raise ValueError(
                f"{self.file} says that this check {'failed' if passed else 'passed'} before, and now it does not: it "
                "depends on something that its code does not show. Give another cache directory, or remove the file."
            )
        self._known[key] = passed
        self._record(key, passed)
        self.after_run()
        return passed

    def _serially(self, runs: Iterable[Run]) -> Iterator[Any]:
        return (self.output(*run) for run in runs)

    def output(self, on: Units, sample: int, elements: Elements | None = None) -> Any:
        """Return the model's result with these sites on."""
        return output_of(self.masked, self.seed, on, sample, elements)

    def count(self, name: str) -> int:
        """Return the number of elements of a site's result."""
        return self.masked.shapes[name].numel()

    def key(self, on: Units, elements: Elements | None = None) -> str:
        """Return the set as a number in base 16, one bit per site, followed by the elements."""
        bits = sum(1 << self._places[name] for name in on)
        return f"{bits:x}" + "".join(f" {name}{ranges}" for name, ranges in sorted((elements or {}).items()))

    def _digest(self) -> str:
        said = (self.masked.digest(), self.check.key, str(self.seed))
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]

    def _record(self, key: tuple[str, int], passed: bool) -> None:
        if self.file is None or key in self._recorded:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"on": key[0], "sample": key[1], "passes": passed}) + "\n")


def output_of(masked: Masked, seed: int, on: Units, sample: int, elements: Elements | None) -> Any:
    """Return a model's result with these sites on."""
    blocks = {name: _mask(ranges, masked.shapes[name].numel()) for name, ranges in (elements or {}).items()}
    return masked.run(on, seed=seed, sample=sample, blocks=blocks)


def _read(file: Path) -> dict[tuple[str, int], bool]:
    if not file.exists():
        return {}
    recorded: dict[tuple[str, int], bool] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the search was interrupted
        recorded[row["on"], row["sample"]] = row["passes"]
    return recorded


def _mask(ranges: Ranges, count: int) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    for begin, end in ranges:
        mask[begin:end] = True
    return mask
