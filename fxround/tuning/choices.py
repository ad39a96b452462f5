"""What methods share that choose between two neighbours: where a weight lies between them, and what is left open."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from fxround.errors import shown

# A choice is made where its number is so near to 0 or 1.
LEFT: Final = 0.01


def place_of(value: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return the place of a value between its neighbours: 0 at the lower one, 1 at the upper, 1/2 if they are one."""
    wide = value.double(), down.double(), up.double()
    gap = wide[2] - wide[1]
    place = torch.where(gap > 0, (wide[0] - wide[1]) / gap, 0.5)
    return place.clamp(0, 1).to(torch.float64 if value.dtype == torch.float64 else torch.float32)


def whole(x: Tensor, down: Tensor, up: Tensor) -> float:
    """Return the share of choices that are not made, among all elements."""
    return int(((x > LEFT) & (x < 1 - LEFT) & (up != down)).sum()) / x.numel()


def generator(seed: int, number: int, device: torch.device) -> torch.Generator:
    """Return a generator for one of several parts of a method."""
    return torch.Generator(device).manual_seed((seed + (number << 32)) % (1 << 63))


def require_positive(**numbers: float) -> None:
    """Raise ValueError for an option that is no positive number."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"{name} is {shown(number)}; expected a positive number")
