"""What a method of rounding works on: two copies of a model, its weights with their grids, and the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxround.module import RoundedModule
from fxround.significance.inputs import ModelCall
from fxround.tuning.products import Stream
from fxround.tuning.weights import Weight


@dataclass
class Task:
    """A model whose weights are to be rounded.

    model      the copy that becomes the result, in eval mode; its weights are on their grids, at first to nearest
    original   a copy that keeps the weights as they were trained, in eval mode
    weights    those that the policy rounds, by name
    calls      the data
    seed       of what a method draws
    compiled   the original under the policy that leaves everything alone, with unrolled loops; both run its graph
    done       the weights that the method has chosen, each with the share that it left to nearest, or None
    """

    model: nn.Module
    original: nn.Module
    weights: dict[str, Weight]
    calls: Sequence[ModelCall]
    seed: int
    compiled: RoundedModule
    done: dict[str, float | None] = field(default_factory=dict)

    def write(self, name: str, value: Tensor, left: float | None = None) -> None:
        """Set a weight of the result to values of its grid."""
        self.set(name, value)
        self.done[name] = left

    def set(self, name: str, value: Tensor) -> None:
        """Set a weight of the result."""
        with torch.no_grad():
            self.model.get_parameter(name).copy_(value)

    def result(self, model: nn.Module, call: ModelCall, parameters: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
        """Return the result of one of the copies, with these parameters in place of its own. No buffer changes."""
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return torch.func.functional_call(model, {**buffers, **parameters}, call.args, call.kwargs)

    def stream(self, model: nn.Module, names: Collection[str] | None = None) -> Stream:
        """Return the runs of all data through one of the copies."""
        return Stream(model, self.calls, self.weights if names is None else names, self.compiled)


class Method(Protocol):
    """A way to choose values of the grid."""

    def count(self, task: Task) -> int:
        """Return the number of steps, for progress."""

    def run(self, task: Task) -> Iterator[None]:
        """Choose, and yield after each step. An iteration that is given up leaves every weight on its grid."""


@dataclass(frozen=True)
class Nearest:
    """Each weight becomes the nearest value of its grid."""

    def count(self, task: Task) -> int:
        """Return the number of weights."""
        return len(task.weights)

    def run(self, task: Task) -> Iterator[None]:
        """Round one weight after the other."""
        for name, weight in task.weights.items():
            task.write(name, weight.grid.nearest(weight.value))
            yield
