"""The numbers that a weight can become: its neighbours on the grid of a format, with the scales of its blocks held.

A rounding to a scaled format finds the scales of a tensor and then rounds each element. Here the scales are found once,
from the weights as they were trained, and the elements are rounded again and again: down, up, or to nearest. The
programs are those of ``fxround.round``, in other modes, so that every number is a result of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fxround.eager.blocks import operands_of_elements
from fxround.eager.round import rounding_program
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program
from fxround.kernels.scaled import element_program
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding, any_rounding
from fxround.numerics.modes import MODES, Rounding
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

_TOWARDS: Final = ("toward_negative", "toward_positive")


@dataclass(frozen=True)
class Grid:
    """The grid of a tensor: a rounding, and what its elements' program reads besides a number.

    rounding   to nearest; what lies beyond the largest value becomes that value
    scales     tensors that broadcast to the shape of the numbers: none for a format without scales of blocks, the
               scales, for ``inverse`` the multipliers, for ``affine`` the scales and the zero points

    A number x between two values of the grid has them as ``down(x)`` and ``up(x)``; a value of the grid is its own
    neighbour, and so is the end of the grid for a number beyond it. A posit has no neighbour at zero, because no number
    is rounded to it. Scales that were made as multipliers are multiplied back by a rounded reciprocal, so that x can
    differ by an ulp of its dtype from a value that stands for it. Example::

        grid = Grid.of(w, "nvfp4")
        grid.down(w) <= w
    """

    rounding: Rounding | ScaledRounding
    scales: tuple[Tensor, ...] = ()

    @staticmethod
    def of(x: Tensor, rounding: object, dims: Sequence[int] = (-1,)) -> Grid:
        """Return the grid of a tensor by its own scales; rounding and dims as for ``fxround.round``.

        Raises ValueError for a rounding that is unknown, or that belongs to operands of a compiled model alone.
        """
        parsed = nearest_of(any_rounding(rounding))
        if isinstance(parsed, Rounding):
            return Grid(parsed)
        if parsed.hadamard is not None:
            raise ValueError(f"{parsed}: a transform belongs to both operands of a product; expected {parsed.format}")
        return Grid(parsed, operands_of_elements(x, parsed, tuple(dims))[1][1:])

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest value of each number."""
        return self._rounded(x, self.rounding)

    def down(self, x: Tensor) -> Tensor:
        """Return the largest value that is not above each number, or the least one of the grid."""
        return self.neighbours(x)[0]

    def up(self, x: Tensor) -> Tensor:
        """Return the least value that is not below each number, or the largest one of the grid."""
        return self.neighbours(x)[1]

    def neighbours(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``down(x)`` and ``up(x)``."""
        below, above = (self._rounded(x, replace(self.rounding, mode=MODES[mode])) for mode in _TOWARDS)
        # A product of an element and a scale is rounded: its quotient by the scale may lie beside the element.
        return torch.where(above == x, above, below), torch.where(below == x, below, above)

    def at(self, index: Tensor) -> Grid:
        """Return the grid of the numbers at these row-major positions, in their shape."""
        return replace(self, scales=tuple(scale.reshape(-1)[index] for scale in self.scales))

    def _rounded(self, x: Tensor, rounding: Rounding | ScaledRounding) -> Tensor:
        return run_map(program_of(rounding, Format.parse(FORMAT_OF[x.dtype])), (x, *self.scales), x.dtype, Draw())


def nearest_of(rounding: Rounding | ScaledRounding) -> Rounding | ScaledRounding:
    """Return the rounding in its own mode if that is one to nearest, else in nearest_even; it saturates."""
    mode = rounding.mode
    if not mode.name.startswith("nearest_"):
        mode = MODES["nearest_even"]
    return replace(rounding, mode=mode, overflow="saturate")


def program_of(rounding: Rounding | ScaledRounding, stored: Format) -> Program:
    """Return the program of the elements of a tensor that is stored in this format; x0 is an element."""
    return rounding_program(rounding) if isinstance(rounding, Rounding) else element_program(rounding, stored)
