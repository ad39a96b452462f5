"""Update: the step of an optimizer as a formula over rounded operations, for one parameter.

An ``Update`` names its states as PyTorch does, and computes the new parameter and states from the old ones, the
gradient and a few numbers. The numbers (a learning rate, a bias correction) are computed in binary64 on the host and
passed as tensors of no dimensions, so that a scheduler changes no graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

Group = Mapping[str, Any]
Numbers = dict[str, float]
States = dict[str, Tensor]
_DIGITS: Final = Context(prec=50)


@dataclass(frozen=True)
class Progress:
    """What the numbers of a step depend on beside the options.

    step        counts from 1
    first       whether this is the first step with a momentum
    scalars     the states of no dimensions, as they were before the step
    shape       of the parameter
    """

    step: int
    first: bool = False
    scalars: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Update(ABC):
    """The formula of one parameter's step, for one setting of the options that change it.

    maximize    whether the gradient is negated
    decay       whether ``weight_decay * p`` is added to the gradient
    first       whether this is the first step of a parameter, where the first step has another formula
    """

    maximize: bool
    decay: bool
    first: bool

    # Whether the state has the number of steps, and whether the formula is one of matrices, not of single elements.
    counts: ClassVar[bool] = True
    of_matrices: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def of(group: Group, at: Progress) -> Update:
        """Return the formula of a parameter group for a step."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The names of the tensors kept from step to step, each of the parameter's shape."""

    @abstractmethod
    def numbers(self, group: Group, at: Progress) -> Numbers:
        """Return the numbers of the formula for a step."""

    @abstractmethod
    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        """Return the new parameter and the new states."""

    def gradient(self, p: Tensor, g: Tensor, n: dict[str, Tensor]) -> Tensor:
        """Return g, negated and with p * weight_decay added where the options say so."""
        g = -g if self.maximize else g
        return g + p * n["weight_decay"] if self.decay else g

    def initial(self, name: str, p: Tensor, group: Group) -> Tensor:
        """Return a state before the first step."""
        return torch.zeros_like(p, memory_format=torch.preserve_format)

    @staticmethod
    def scalars(group: Group) -> Numbers:
        """Return the states of no dimensions before the first step."""
        return {}

    def advanced(self, group: Group, at: Progress) -> Numbers:
        """Return the states of no dimensions after a step."""
        return {}


def power(base: float, exponent: float) -> float:
    """Return base^exponent in binary64, the same on every machine: ``**`` calls the C library's pow, whose bits vary.

    Fifty decimal digits are computed in integer arithmetic, and so is the conversion to binary64.
    """
    return float(_DIGITS.power(Decimal(base), Decimal(exponent)))


def lerp(start: Tensor, end: Tensor, weight: Tensor, rest: Tensor, near: bool) -> Tensor:
    """Return ``start.lerp(end, weight)`` by PyTorch's formula; rest: 1 - weight; near: whether weight < 0.5."""
    difference = end - start
    return start + difference * weight if near else end - difference * rest
