"""Streaming statistics of samples: a few numbers per element, for any number of samples.

``Moments`` holds for each element the mean and the sum of squared deviations in binary64 (Welford's update), the least
and greatest value (in the carrier of the samples' dtype, without rounding), and the first sample that was not finite.
Two Moments are merged by Chan's formula. Equal samples have a deviation of exactly zero. The arithmetic is elementwise
and in the order of the samples, so that the result does not depend on threads, chunks or the number of workers.
Sources: Welford, Technometrics 4 (1962); Chan, Golub and LeVeque, The American Statistician 37 (1983).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxround.capture.processes import is_shared

Floats = NDArray[np.float64]
# Elements per step: the temporaries of an update fit in the cache, and are small compared with the values.
CHUNK: Final = 1 << 15
NEVER: Final = -1


def as_array(value: Tensor) -> NDArray[Any]:
    """Return the flat values, without rounding: float64 for float64 tensors, float32 for narrower ones.

    Raises TypeError for a DTensor.
    """
    if is_shared(value):
        raise TypeError(
            "a result of the model is a DTensor; expected tensors of this process: use_local_output=True in the plan "
            "(the default), or return its full_tensor()"
        )
    carrier = torch.float64 if value.dtype == torch.float64 else torch.float32
    array: NDArray[Any] = value.detach().to("cpu", carrier).reshape(-1).numpy()
    return array


def chunks(size: int) -> Iterator[slice]:
    """Return 0..size in pieces of at most CHUNK."""
    return (slice(low, min(low + CHUNK, size)) for low in range(0, size, CHUNK))


class Moments:
    """Count, mean, squared deviations, least, greatest and first non-finite sample of every element of a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        carrier = np.float64 if dtype == torch.float64 else np.float32
        self.shape, self.dtype, self.count = shape, dtype, 0
        self.size = int(np.prod(shape))
        self.mean: Floats = np.zeros(self.size)
        self.squares: Floats = np.zeros(self.size)
        self.low: NDArray[Any] = np.full(self.size, np.inf, carrier)
        self.high: NDArray[Any] = np.full(self.size, -np.inf, carrier)
        # Allocated at the first NaN or infinity: an element's number of NaNs, and its first sample that was not finite.
        self.nans: NDArray[np.int32] | None = None
        self.broken: NDArray[np.int32] | None = None

    def add(self, value: Tensor) -> None:
        """Add one more sample. Raises ValueError for another shape or dtype than the first one's."""
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            came, expected = f"{value.dtype} {tuple(value.shape)}", f"{self.dtype} {self.shape}"
            raise ValueError(f"sample {self.count} is {came}, those before were {expected}")
        flat = as_array(value)
        self.count += 1
        for part in chunks(self.size):
            self._add(flat[part], part)

    def _add(self, x: NDArray[Any], part: slice) -> None:
        mean, low, high = self.mean[part], self.low[part], self.high[part]
        finite = np.isfinite(x)
        if not finite.all():
            self._note(x, finite, part)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = x - mean
            mean += delta / self.count
            self.squares[part] += delta * (x - mean)
        np.fmin(low, x, out=low)
        np.fmax(high, x, out=high)

    def _note(self, x: NDArray[Any], finite: NDArray[np.bool_], part: slice) -> None:
        if self.nans is None or self.broken is None:
            self.nans, self.broken = np.zeros(self.size, np.int32), np.full(self.size, NEVER, np.int32)
        self.nans[part] += np.isnan(x)
        first = self.broken[part]
        first[~finite & (first == NEVER)] = self.count - 1

    def merge(self, later: Moments) -> None:
        """Add the samples of ``later`` as if they came after these, up to roundings of Chan's formula."""
        if (later.shape, later.dtype) != (self.shape, self.dtype):
            raise ValueError(f"cannot merge {later.dtype} {later.shape} into {self.dtype} {self.shape}")
        if later.count == 0:
            return
        before, self.count = self.count, self.count + later.count
        with np.errstate(invalid="ignore", over="ignore"):
            delta = later.mean - self.mean
            self.mean += delta * (later.count / self.count)
            self.squares += later.squares + delta * delta * (before * later.count / self.count)
        np.fmin(self.low, later.low, out=self.low)
        np.fmax(self.high, later.high, out=self.high)
        if later.nans is not None and later.broken is not None:
            if self.nans is None or self.broken is None:
                self.nans, self.broken = np.zeros(self.size, np.int32), np.full(self.size, NEVER, np.int32)
            self.nans += later.nans
            fresh = (self.broken == NEVER) & (later.broken != NEVER)
            self.broken[fresh] = later.broken[fresh] + before

    def sigma(self, part: slice = slice(None)) -> Floats:
        """The population's standard deviation; NaN if a sample was not finite."""
        with np.errstate(invalid="ignore"):
            deviation: Floats = np.sqrt(self.squares[part] / self.count)
        return deviation

    def same(self, part: slice = slice(None)) -> NDArray[np.bool_]:
        """Where all samples are equal, which is no evidence; NaNs are equal, and so are the two zeros."""
        equal: NDArray[np.bool_] = self.low[part] == self.high[part]
        if self.nans is not None:
            equal = np.where(self.nans[part] > 0, self.nans[part] == self.count, equal)
        return equal

    def finite(self, part: slice = slice(None)) -> NDArray[np.bool_]:
        """Where every sample was finite."""
        if self.broken is None:
            return np.ones(len(range(*part.indices(self.size))), np.bool_)
        whole: NDArray[np.bool_] = self.broken[part] == NEVER
        return whole

    @property
    def nbytes(self) -> int:
        """Bytes of the state: per element 24 (32 for float64), and 8 more after the first non-finite value."""
        arrays = (self.mean, self.squares, self.low, self.high, self.nans, self.broken)
        return sum(a.nbytes for a in arrays if a is not None)
