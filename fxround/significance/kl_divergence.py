"""The magnitude that integers of few bits are to span, by KL divergence among the edges of a histogram.

Source: NVIDIA's TensorRT (Migacz, 8-bit inference with TensorRT, 2017) and pytorch-quantization,
``_compute_amax_entropy``.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fxround.kernels.program import Program
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.significance.thresholds import Chooser, scales_of

BINS: Final = 2048
# The first edge of a histogram that may become the threshold.
FIRST: Final = 128


class Divergence(Chooser[npt.NDArray[np.int64]]):
    """The scale t / M, with t the edge of the histogram of magnitudes that ``kl_threshold`` chooses.

    most: the largest magnitude in all batches, float64 of shape [1]. maximum: M, the largest integer.
    """

    def __init__(self, most: Tensor, maximum: float) -> None:
        self._most, self._maximum = most, maximum
        self._counts = np.zeros(BINS, np.int64)

    def of(self, rows: Tensor) -> npt.NDArray[np.int64]:
        """Return the histogram of a batch, [1, elements]."""
        finite = rows[rows.isfinite()].double().abs()
        return histogram(finite.numpy(), float(self._most))

    def add(self, part: npt.NDArray[np.int64]) -> None:
        """Take that of the next batch."""
        self._counts += part

    def scales(self) -> Tensor:
        """Return the scale, [1]."""
        threshold = self._most * kl_threshold(self._counts, int(self._maximum) + 1) / BINS
        return scales_of(threshold, self._maximum)


def histogram(magnitudes: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.int64]:
    """Return how many magnitudes are in each of BINS bins of the width most / BINS; the last bin includes ``most``.

    A magnitude a is in bin floor(a BINS / most), where the quotient is rounded to binary64: that of binary32 numbers is
    never rounded to an integer.
    """
    if not most:
        return np.bincount([0] * len(magnitudes), minlength=BINS)
    return np.bincount(np.minimum((magnitudes * BINS / most).astype(np.int64), BINS - 1), minlength=BINS)


def kl_threshold(counts: npt.NDArray[np.int64], levels: int) -> int:
    """Return the number i of the bins that integers with ``levels`` magnitudes are to span, 128 to len(counts).

    It is the last i with the least divergence of P from Q. P is c_0 to c_(i-1), with all later counts added to its last
    one, and c_1 in place of c_0, as zeros are exact. Q spreads the sum of each of ``levels`` groups evenly over its
    bins that are not empty; bin j is in group floor(j levels / i). Both are divided by their sums:

        D = (sum of P_j log(P_j / Q_j)) / sum(P) + log(sum(Q) / sum(P)), infinite where Q_j = 0 < P_j

    Each quotient, product and sum is rounded once to binary64, and logarithms are fxround's own, so that the choice has
    no machine in it. Source: pytorch-quantization, ``_compute_amax_entropy``.
    """
    c = counts.astype(np.int64).copy()
    c[0] = c[1]
    total = int(c.sum())
    if not total:
        return len(c)
    best, chosen = math.inf, len(c)
    below = np.concatenate([[0], np.cumsum(c)])
    for i in range(min(FIRST, len(c)), len(c) + 1):
        divergence = _divergence(c[:i], total - int(below[i]), levels)
        if divergence <= best:
            best, chosen = divergence, i
    return chosen


def _divergence(c: npt.NDArray[np.int64], outside: int, levels: int) -> float:
    group = np.arange(len(c)) * levels // len(c)
    sums, filled = (np.bincount(group, w, levels).astype(np.int64) for w in (c, c > 0))
    p = c.copy()
    p[-1] += outside
    if p[-1] and not c[-1]:
        return math.inf
    used = c > 0
    if not used.any():
        return math.inf
    ratios = (p * filled[group])[used] / sums[group[used]]
    logs = _logs(np.append(ratios, c.sum() / p.sum()))
    return math.fsum((logs[:-1] * p[used]).tolist()) / float(p.sum()) + float(logs[-1])


def _logs(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return logarithms with the same bits on every machine."""
    program = Program.parse("t0 = log(x0) @ binary64/nearest_even/inf")
    return np.asarray(run_map(program, (torch.from_numpy(numbers),), torch.float64, Draw()).numpy())


__all__ = ["BINS", "FIRST", "Divergence", "histogram", "kl_threshold"]
