"""The forward passes of a calibration, in this process or in workers.

A task is one batch. What is found in it depends on the batch alone and is added in the order of the batches: the
largest magnitudes, a histogram, or the sum of its errors for each candidate. The caller captures the batches before
workers run them, and knows which one reads a parameter first: it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from fxround.graph.site import site
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.formats.scaled.format import Block
from fxround.policy import Policy, Rule
from fxround.significance.inputs import ModelCall
from fxround.significance.observed_operands import Batch, Observer, Operand, Range, Seen
from fxround.significance.thresholds import Chooser
from fxround.significance.worker_state import Examples, Kernels, capture_same, examples_of
from fxround.significance.workers import Packed, Pool, kept

# Nothing is rounded. A policy that treats gradients unrolls recurrent layers, whose loops would hide their operands,
# and refuses other loops.
UNROLLED: Final = Policy("observed", (Rule(rounding="identity", gradient="binary64", optional=True),))

# What is asked of each operand; None for its range.
Choosers = Mapping[Operand, Chooser[Any]] | None
RANGES: Final[Choosers] = None
# Yields each operand with what is found of it in a batch, in order, and calls a function after each batch.
Known = Callable[[Callable[[], None], Choosers], Iterator[tuple[Operand, Any]]]


def found(
    compiled: RoundedModule,
    batches: Sequence[ModelCall],
    block: Block | None,
    tick: Callable[[], None],
    asked: Choosers,
) -> Iterator[tuple[Operand, Any]]:
    """Yield what is found in this process."""
    observer = Observer(compiled, block)
    for call in batches:
        yield from ((operand, _part(asked, operand, batch)) for operand, batch in observer.operands(call))
        tick()


def _part(asked: Choosers, operand: Operand, batch: Batch) -> Any:
    return Range.of(batch) if asked is None else asked[operand].of(batch.rows)


class Shared(Pool):
    """Workers that run batches of one model without roundings. n_jobs: as joblib's.

    Raises ValueError for a model that draws random numbers: those of a batch depend on the batches before.
    """

    def __init__(self, n_jobs: int, compiled: RoundedModule, batches: Sequence[ModelCall], block: Block | None) -> None:
        super().__init__(n_jobs)
        with torch.no_grad():
            examples = examples_of(compiled, batches)
        _require_no_draws(compiled)
        observer = Observer(compiled, block)
        self._before = [observer.leave(call) for call in batches]
        self._model = self.packed((compiled.source, block, examples))
        self._batches = [self.packed(call) for call in batches]

    def found(self, tick: Callable[[], None], asked: Choosers) -> Iterator[tuple[Operand, Any]]:
        """Yield what workers find."""
        given = self._model, self.packed(asked), Kernels.current()
        for parts in self.every(_work, ((*given, *batch) for batch in zip(self._batches, self._before, strict=True))):
            yield from parts
            tick()


def _require_no_draws(compiled: RoundedModule) -> None:
    places = (site(node) for entry in compiled._captures for node in entry.lowered.graph.nodes)
    draws = next((place for place in places if place is not None and place.kind == "random"), None)
    if draws is not None:
        raise ValueError(
            f"{draws} draws random numbers, which depend on the order of the batches, and workers have none: call "
            "model.eval() first, or pass n_jobs=1"
        )


def _work(
    model: Packed, choosers: Packed, kernels: Kernels, batch: Packed, before: frozenset[Seen]
) -> list[tuple[Operand, Any]]:
    with kernels.active(), torch.no_grad():
        observer: Observer = kept("observer", model, _observer)
        call: ModelCall = kept("batch", batch, lambda parts: parts)
        asked: Choosers = kept("choosers", choosers, lambda parts: parts)
        observer.done = set(before)
        return [(operand, _part(asked, operand, batch)) for operand, batch in observer.operands(call)]


def _observer(parts: tuple[Any, Block | None, Examples]) -> Observer:
    model, block, examples = parts
    compiled = compile(model, UNROLLED)
    capture_same(compiled, examples)
    return Observer(compiled, block)
