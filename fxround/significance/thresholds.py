"""The scales of blocks, chosen from the values of several batches: by a percentile, or by the least squared error.

A batch of an operand is a matrix with a row for each block that shares a scale. Elements that are not finite take no
part: a row is padded with NaNs. The largest finite magnitude of each row over all batches is known before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program, Statement
from fxround.kernels.scaled import carrier_of, error_program
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# Thresholds of 100 to 21 percent of the largest magnitude, as the search of GPTQ's authors has them.
SHARES: Final = tuple(range(100, 20, -1))
_BINARY32: Final = Rounding(FORMATS["binary32"], MODES["nearest_even"], "saturate")
# Elements whose errors are computed at once.
_PIECE: Final = 1 << 20


def scales_of(magnitudes: Tensor, target: float) -> Tensor:
    """Return magnitudes / target, each rounded once to nearest in binary32; the smallest positive number for zero.

    magnitudes: float32 or float64, which is the dtype of the result. target: the element that a magnitude becomes.
    """
    divisor = torch.tensor(target, dtype=torch.float64)
    return run_map(_quotient(), (magnitudes.contiguous(), divisor), magnitudes.dtype, Draw())


def targets_of(element: Format) -> list[float]:
    """Return the element values, in binary32, that the largest magnitude becomes before elements are clamped."""
    maximum = Fraction(element.maximum)
    return [round_exact(maximum * 100 / share, False, _BINARY32) for share in SHARES]


@cache
def _quotient() -> Program:
    least = math.ldexp(1.0, _BINARY32.format.quantum_exponent)
    quotient = Statement("t0", "div", ("x0", "x1"), _BINARY32)
    return Program((quotient, Statement("t1", "clamp", ("t0", least, math.inf), None)))


Part = TypeVar("Part")


class Chooser(ABC, Generic[Part]):
    """A choice of the scales of one operand's blocks.

    What is known of a batch depends on the batch alone, so that another process can find it.
    """

    @abstractmethod
    def of(self, rows: Tensor) -> Part:
        """Return what is known of a batch: [blocks, elements], float32 or float64."""

    @abstractmethod
    def add(self, part: Part) -> None:
        """Take what is known of the next batch."""

    @abstractmethod
    def scales(self) -> Tensor:
        """Return the scales, [blocks]."""


class Percentile(Chooser[Tensor]):
    """The scale t / M, with t the least magnitude that a percentage of a block's magnitudes do not exceed.

    That is the magnitude of the rank ceil(percentage n / 100) among the n of all batches. The largest ones alone are
    kept, down to this rank.

    counts: the finite elements of each block in all batches, [blocks]. maximum: M, the largest element.
    """

    def __init__(self, percentage: float, counts: Tensor, maximum: float) -> None:
        ranks = [max(1, math.ceil(Fraction(percentage) * n / 100)) for n in counts.tolist()]
        # Counted from the largest one, which is 0.
        self._places = torch.tensor([max(n, 1) - rank for n, rank in zip(counts.tolist(), ranks, strict=True)])
        self._maximum, self._kept = maximum, torch.empty(0)

    def of(self, rows: Tensor) -> Tensor:
        """Return the largest magnitudes of each block in a batch."""
        return self._largest(torch.where(rows.isfinite(), rows.abs(), -1.0))

    def add(self, part: Tensor) -> None:
        """Take those of the next batch."""
        self._kept = self._largest(torch.cat([self._kept, part], 1)) if self._kept.numel() else part

    def _largest(self, magnitudes: Tensor) -> Tensor:
        return magnitudes.topk(min(magnitudes.shape[1], int(self._places.max()) + 1), 1).values

    def scales(self) -> Tensor:
        """Return the scales."""
        chosen = self._kept.gather(1, self._places[:, None])[:, 0]
        return scales_of(chosen.clamp(min=0.0), self._maximum)


class LeastSquares(Chooser[Tensor]):
    """The scale with the least squared error among those of the thresholds m, 0.99 m, ..., 0.21 m of a block.

    With m the largest magnitude and M the largest element, the scale of the share p is m / (100 M / p), where the
    divisor is rounded to binary32 and the quotient once more. An error is that of the rounding to nearest, relative to
    m: each step is rounded to binary32 (binary64 for float64), the sum of a batch once from its exact value, and sums
    of batches are added in binary64 in the order of the data. The largest of equally good scales is taken.

    most: the largest magnitude of each block in all batches, [blocks].
    """

    def __init__(self, most: Tensor, rounding: ScaledRounding) -> None:
        self._most = most.contiguous()
        self._program = error_program(rounding, carrier_of(Format.parse(FORMAT_OF[most.dtype])))
        self._candidates = [scales_of(self._most, target) for target in targets_of(rounding.format.element)]
        self._errors = torch.zeros(len(self._candidates), len(most), dtype=torch.float64)

    def of(self, rows: Tensor) -> Tensor:
        """Return the sums of the errors of a batch, [candidates, blocks]."""
        sums = torch.zeros_like(self._errors)
        for part, some in _pieces(rows):
            most = self._most[part, None]
            for errors, scales in zip(sums, self._candidates, strict=True):
                lost = run_map(self._program, (some, scales[part, None], most), rows.dtype, Draw())
                errors[part] = torch.ops.fxround.block_sum(lost, [1, 0])[:, 0].double()
        return sums

    def add(self, part: Tensor) -> None:
        """Take those of the next batch."""
        self._errors += part

    def scales(self) -> Tensor:
        """Return the scales."""
        best = self._errors.argmin(0)
        first = (self._errors == self._errors.gather(0, best[None])).int().argmax(0)
        return torch.stack(self._candidates).gather(0, first[None])[0]


def _pieces(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time, and where they are."""
    count = max(1, _PIECE // max(1, rows.shape[1]))
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        yield part, rows[part].contiguous()


__all__ = ["SHARES", "Chooser", "LeastSquares", "Percentile", "scales_of", "targets_of"]
