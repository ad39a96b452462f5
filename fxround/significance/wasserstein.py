"""The distance of two distributions at every point of a grid, from samples of each.

Source: Paxton, Chantry, Kloewer, Saffin and Palmer, Climate modeling in low precision: effects of both deterministic
and stochastic rounding, Journal of Climate 35, 2022, who compare the invariant distributions of models in few bits with
those of binary64 in this way.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import type_of

# The most numbers that are sorted at once.
_AT_ONCE: Final = 1 << 22


def wasserstein(samples: Tensor, others: Tensor) -> Tensor:
    """Return the Wasserstein-1 distance of two distributions at every point of a grid.

    It is the integral of |F - G| for the distribution functions F and G of the samples of a point: the least mean way
    by which one distribution is moved to the other, in the unit of the samples. Its mean over the grid is the figure of
    the climate literature.

    The distance of finite samples of one distribution is not zero. Compare it with the distance of two independent
    reference ensembles of the same sizes.

    Args:
        samples: real numbers of shape [n, ...], n at least 1: n samples of the values of a grid, of any shape. One
            sample is a distribution with all of its mass at one number.
        others: real numbers of shape [m, ...] with the same grid; m may differ from n.

    Returns:
        float64 of the grid's shape. NaN where a sample is NaN, else infinite where a sample is infinite or the distance
        is beyond float64.

    Raises:
        TypeError: for what is no tensor of real numbers.
        ValueError: for no samples, and for two grids.

    Example::

        distance = fxround.wasserstein(rounded, exact)      # [members, 64, 64] and [members, 64, 64] to [64, 64]
        print(distance.mean())
    """
    for name, x in (("samples", samples), ("others", others)):
        _require_samples(name, x)
    if samples.shape[1:] != others.shape[1:]:
        raise ValueError(
            f"samples have a grid of shape {tuple(samples.shape[1:])} and others one of {tuple(others.shape[1:])}; "
            "expected the same grid after the first dimension, which counts samples"
        )
    grid = samples.shape[1:]
    # One row for each point.
    a, b = (x.detach().to("cpu", torch.float64).reshape(len(x), -1).t() for x in (samples, others))
    rows = max(1, _AT_ONCE // (len(samples) + len(others)))
    parts = [_distances(p, q) for p, q in zip(a.split(rows), b.split(rows), strict=True)]
    return torch.cat(parts).reshape(grid)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance of the numbers of each row: [points, n] and [points, m] to [points]."""
    a, b = a.sort(1).values.contiguous(), b.sort(1).values.contiguous()
    n, m = a.shape[1], b.shape[1]
    # A power of two changes no digit of numbers this large; neither differences nor sums of n of them overflow then.
    largest = torch.maximum(a.abs().amax(1), b.abs().amax(1))
    scale = torch.where(largest > 2.0**900, 2.0**-100, 1.0)
    p, q = a * scale.unsqueeze(1), b * scale.unsqueeze(1)
    if n == m:
        distance = (p - q).abs().mean(1)
    else:
        both = torch.cat([p, q], 1).sort(1).values
        counts = [torch.searchsorted(x, both[:, :-1].contiguous(), right=True).double() for x in (p, q)]
        distance = ((counts[0] / n - counts[1] / m).abs() * both.diff(dim=1)).sum(1)
    distance = distance / scale
    # NaNs are sorted to the end.
    infinite = a.isinf().any(1) | b.isinf().any(1)
    distance = torch.where(infinite, torch.inf, distance)
    return torch.where(a[:, -1].isnan() | b[:, -1].isnan(), torch.nan, distance)


def _require_samples(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type_of(x)}; expected a tensor of samples")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {x.dtype}; expected real numbers")
    if x.dim() == 0 or x.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected at least one sample in the first dimension")
