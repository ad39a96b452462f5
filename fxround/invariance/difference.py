"""Differences: the parts of two runs that must be equal, and the first operation in which they differ.

The dimension of a value that holds the batch is the one whose size changes with the batch's between two runs of
different sizes; a value without one belongs to all rows and is compared whole. Equal means equal bits: minus zero and
NaN payloads count. If a dimension combines the batch with another one, both orders of the two are tried, and a
difference is reported only if neither agrees. A value that cannot be divided into rows is not reported.

Two runs can be captured as different graphs, in which one name belongs to different operations. Values are therefore
matched by their place: the path of the module, the source line, the operator, and how often it ran there before. A
place where the runs have different numbers of operations is left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxround.fingerprint import hash
from fxround.invariance.cases import Row
from fxround.invariance.subjects import Observation, OperationPlace, Outcome

# A value of a run: module, source line, operator, number of the run of this operator there, number of the result.
# Inputs of a graph have no line, and their names.
Key = tuple[str, str, str, int, int]
# The shapes of values, by key, in one run.
Shapes = Mapping[Any, tuple[int, ...]]


@dataclass(frozen=True)
class BatchRows:
    """The dimensions that hold the batch, from the shapes in two runs with batches of ``count`` and ``count + 1``."""

    count: int
    these: Shapes
    those: Shapes

    def cut(self, key: str | Key, value: Tensor, row: Row) -> tuple[Tensor, ...]:
        """Return the row's part in each possible reading; () if unknown, the whole value if it has no rows."""
        before, after = self.these.get(key, ()), self.those.get(key, ())
        if len(before) != len(after) or value.dim() != len(before):
            return ()
        moving = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if not moving:
            return (value,)
        d = moving[0]
        each, rest = divmod(before[d], self.count)
        if len(moving) > 1 or rest or after[d] != each * (self.count + 1) or value.shape[d] != each * row.count:
            return ()
        outer = value.unflatten(d, (row.count, each)).select(d, row.position)
        inner = value.unflatten(d, (each, row.count)).select(d + 1, row.position)
        return (outer, inner)

    def holds(self, key: str | Key) -> bool:
        """Whether a value has rows."""
        return self.these.get(key) != self.those.get(key)


def comparable(outcome: Outcome, rows: BatchRows | None, row: Row | None) -> Outcome:
    """Return the part of an outcome that a case compares: all of it, or the values that have rows, cut to one row."""
    if rows is None or row is None:
        return outcome
    cuts = {name: rows.cut(name, value, row) for name, value in outcome.items() if rows.holds(name)}
    return {name: cut[0] for name, cut in cuts.items() if cut}


def digest(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """Return names and hashes: equal for equal names and bits."""
    return tuple((name, hash(value)) for name, value in outcome.items())


def distinct(digests: Iterable[tuple[tuple[str, str], ...]]) -> dict[str, int]:
    """Return the number of distinct values of each name."""
    seen: dict[str, set[str]] = {}
    for name, value in itertools.chain.from_iterable(digests):
        seen.setdefault(name, set()).add(value)
    return {name: len(values) for name, values in seen.items()}


def shapes(steps: Iterable[Observation]) -> dict[Key, tuple[int, ...]]:
    """Return the shapes of all values, by key."""
    return {key: tuple(value.shape) for _, key, value in _keyed(steps)}


def first_difference(
    reference: Sequence[Observation],
    other: Iterable[Observation],
    rows: BatchRows | None,
    pair: tuple[Row | None, Row | None],
    parts: bool = False,
) -> tuple[OperationPlace | None, bool]:
    """Return the first operation whose value differs between two runs, None if none does, and whether the runs were
    captured as different graphs.

    parts: whether values of another shape are parts of a value, and are not compared.
    """
    known = {key: value for _, key, value in _keyed(reference)}
    # The values of the other run are not kept: what differs is decided when all of its places are known.
    keys: dict[Key, OperationPlace] = {}
    differing = []
    for step, key, value in _keyed(other):
        keys[key] = step.place
        if key not in known or (parts and value.shape != known[key].shape):
            continue
        if not _agree(key, known[key], value, rows, pair):
            differing.append(key)
    counts = [Counter(key[:3] for key in of_run) for of_run in (known, keys)]
    first = next((keys[key] for key in differing if counts[0][key[:3]] == counts[1][key[:3]]), None)
    return first, counts[0] != counts[1]


def _place(step: Observation) -> tuple[str, str, str]:
    place = step.place
    return place.path, place.source or place.code, place.operator or place.node


def _keyed(steps: Iterable[Observation]) -> Iterator[tuple[Observation, Key, Tensor]]:
    """Yield the values of a run with their keys."""
    ran: Counter[tuple[str, str, str]] = Counter()
    for step in steps:
        place = _place(step)
        for i, value in enumerate(step.value):
            yield step, (*place, ran[place], i), value
        ran[place] += 1


def _agree(key: Key, a: Tensor, b: Tensor, rows: BatchRows | None, pair: tuple[Row | None, Row | None]) -> bool:
    mine, theirs = pair
    if rows is None or mine is None or theirs is None:
        return hash(a) == hash(b)
    cuts = list(zip(rows.cut(key, a, mine), rows.cut(key, b, theirs), strict=False))
    return not cuts or any(hash(p) == hash(q) for p, q in cuts)


def largest(a: Outcome, b: Outcome) -> tuple[float, float]:
    """Return the share of elements whose bits differ, and the greatest absolute difference among the finite ones."""
    pairs = [(a[name].contiguous(), b[name].contiguous()) for name in a if name in b and a[name].shape == b[name].shape]
    total = sum(x.numel() for x, _ in pairs) or 1
    unequal = sum(int((_words(x) != _words(y)).any(-1).sum()) for x, y in pairs)
    gaps = [(x.double() - y.double()).abs() for x, y in pairs]
    finite = [float(g[torch.isfinite(g)].max()) for g in gaps if torch.isfinite(g).any()]
    return unequal / total, max(finite, default=0.0)


def _words(x: Tensor) -> Tensor:
    """Return the bytes of every element of a contiguous tensor, along a new last dimension."""
    return x.resolve_neg().as_strided((x.numel(), 1), (1, 1)).view(torch.uint8)
