"""The runs of a search in workers: a task is one run, and its output comes back to be judged.

A worker captures and lowers the model as its caller did, and refuses to go on if the digest of both versions, the state
and the inputs is another one: names of sites would mean other operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fxround.localization.masked_model import Masked
from fxround.localization.verdicts import Run, output_of
from fxround.significance.worker_state import Kernels, other_graph
from fxround.significance.workers import Packed, Pool, kept, owned


class Shared(Pool):
    """Workers that run one masked model. n_jobs: as joblib's; seed: of all runs."""

    def __init__(self, n_jobs: int, masked: Masked, seed: int) -> None:
        super().__init__(n_jobs)
        self._masked, self._seed = self.packed((*masked.given, masked.digest())), seed

    def outputs(self, runs: Iterable[Run]) -> Iterator[Any]:
        """Yield the output of each run, in order."""
        kernels = Kernels.current()
        return self.every(_work, ((self._masked, kernels, self._seed, *run) for run in runs))


def _work(given: Packed, kernels: Kernels, seed: int, *run: Any) -> Any:
    with kernels.active():
        return owned(output_of(kept("masked", given, _masked), seed, *run))


def _masked(parts: tuple[Any, ...]) -> Masked:
    """Return the masked model in a worker."""
    model, policy, quiet, args, kwargs, wanted = parts
    masked = Masked(model, policy, (args, kwargs), quiet=quiet)
    if masked.digest() != wanted:
        raise other_graph(type(model).__name__)
    masked.run()  # the values of the quiet run are kept
    return masked
