"""What a worker has of the process that asks it: the settings of PyTorch's kernels, and the same captured graphs.

Results of stock kernels, which some policies keep, depend on the number of threads and on switches of the process. A
worker captures the batches that its caller captured, in the same order, and refuses to go on if its graphs are others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxround.errors import FxroundError
from fxround.graph.text import digest, lines_of_graph
from fxround.module.rounded_module import RoundedModule
from fxround.significance.inputs import ModelCall

# The first batch of each graph, in the order of their captures, with the digest of the graph.
Examples = Sequence[tuple[ModelCall, str]]


@dataclass(frozen=True)
class Kernels:
    """The settings of a process, by its number, on which the bits of stock kernels depend."""

    process: int
    threads: int
    precision: str
    mkldnn: bool
    deterministic: tuple[bool, bool]
    dtype: torch.dtype

    @staticmethod
    def current() -> Kernels:
        """Return the settings of this process; threads are those of the calling thread."""
        return Kernels(
            os.getpid(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            bool(torch.backends.mkldnn.enabled),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            torch.get_default_dtype(),
        )

    def _switch(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.mkldnn.set_flags(_enabled=self.mkldnn)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        torch.set_default_dtype(self.dtype)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have these settings in a block; in the process whose settings these are, nothing is switched.

        One thread of a process works at a time (``workers``).
        """
        if self.process == os.getpid():
            yield
            return
        own = Kernels.current()
        self._switch()
        try:
            yield
        finally:
            own._switch()


def examples_of(compiled: RoundedModule, batches: Sequence[ModelCall]) -> Examples:
    """Return what a worker captures: the first of the batches for each of their graphs."""
    seen: dict[int, tuple[ModelCall, str]] = {}
    for call in batches:
        graph = _graph(compiled, call)
        if id(graph) not in seen:
            seen[id(graph)] = call, digest(lines_of_graph(graph))
    return list(seen.values())


def capture_same(compiled: RoundedModule, examples: Examples) -> None:
    """Capture in a worker what the caller has captured. Raises FxroundError for another graph."""
    for call, wanted in examples:
        compiled.prepare(*call.args, **call.kwargs)
        if digest(lines_of_graph(_graph(compiled, call))) != wanted:
            raise other_graph(type(compiled.source).__name__)


def other_graph(model: str) -> FxroundError:
    """Return the error of a worker whose graph of a model is another one."""
    return FxroundError(
        f"a worker captured another graph of {model} than this process: the model depends on state of this process "
        "that is not in the model, such as a global variable or an active autocast. Pass n_jobs=1, or put the state "
        "into the model"
    )


def _graph(compiled: RoundedModule, call: ModelCall) -> Any:
    return compiled._entry(call.args, call.kwargs).captured.graph
