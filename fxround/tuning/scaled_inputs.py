"""Layers that multiply their inputs by a factor for each channel, where no layer before them can."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn


class ScaledInputs(nn.Module):
    """A layer whose inputs are multiplied by ``input_factor``: a buffer that broadcasts to the inputs."""

    input_factor: Tensor

    def forward(self, input: Tensor, *rest: Any) -> Tensor:
        """Return what the layer makes of the scaled inputs."""
        result: Tensor = super().forward(input * self.input_factor, *rest)
        return result


class ScaledLinear(ScaledInputs, nn.Linear):
    """``nn.Linear`` of scaled inputs."""


class ScaledConv1d(ScaledInputs, nn.Conv1d):
    """``nn.Conv1d`` of scaled inputs."""


class ScaledConv2d(ScaledInputs, nn.Conv2d):
    """``nn.Conv2d`` of scaled inputs."""


class ScaledConv3d(ScaledInputs, nn.Conv3d):
    """``nn.Conv3d`` of scaled inputs."""


_SCALED: Final[Mapping[type[nn.Module], type[ScaledInputs]]] = MappingProxyType(
    {nn.Linear: ScaledLinear, nn.Conv1d: ScaledConv1d, nn.Conv2d: ScaledConv2d, nn.Conv3d: ScaledConv3d}
)


def can_scale_inputs(layer: nn.Module | None) -> bool:
    """Return whether a layer is of a type that can have scaled inputs."""
    return type(layer) in _SCALED


def scale_inputs(layer: nn.Module, factor: Tensor) -> None:
    """Let a layer multiply its inputs by a factor for each channel, [channels]; names of its state stay."""
    layer.__class__ = _SCALED[type(layer)]
    weight: Any = layer.weight
    layer.register_buffer("input_factor", factor.view(-1, *[1] * (weight.dim() - 2)))


__all__ = ["ScaledInputs", "can_scale_inputs", "scale_inputs"]
