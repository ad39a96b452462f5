"""A policy with the scales of operands, which ``fxround.calibrate`` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fxround.policy.policy import Policy


@dataclass(frozen=True, repr=False)
class CalibratedPolicy(Policy):
    """A policy, and the scales that a module compiled with it begins with.

    scales: a tensor for each operand whose format has held scales, by names such as ``first.weight0``, with a number
    for each block. ``compile`` copies them; the ``state_dict`` of the compiled module has them, and files of
    ``export`` too. The text of the policy (``to_toml``) does not.
    """

    scales: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def _line(self) -> str:
        return f"{super()._line()}; scales of {len(self.scales)} operands"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.rules, self.strict, self.definitions, dict(self.scales))


__all__ = ["CalibratedPolicy"]
