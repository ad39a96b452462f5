"""Significant bits of samples: how many leading bits a perturbed computation agrees on.

What is true here. ``significant_bits`` is the CNH lower bound of the ``significantdigits`` package: with this
probability and confidence, a further sample agrees with the mean to that many bits, if the samples are normal
around it. Equal samples are no evidence (NaN), never all the bits of the format: a value that no operation
touched, or a deterministic policy, is stable without being right.

Source: Sohier, de Oliveira Castro, Févotte, Lathuilière, Petit, Jamond, Confidence intervals for stochastic
arithmetic, ACM TOMS 47(2), 2021.

    before   -log2(std / |mean|)             # of three samples; and 24 bits, proudly, where std = 0
    after    significant_bits(samples)       # a bound that holds for 95 %, NaN where nothing was seen
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

PROBABILITY: Final = 0.95


def significant_bits(samples: ArrayLike, precision: int = 24) -> NDArray[np.float64]:
    """Bits in 0..precision for each element, ``samples[i]`` being sample i; NaN where there is no evidence.

    samples: at least two, float32 or float64, shape (n, ...); result: float64, shape (...). An element whose samples
    differ while their mean is zero, or of which some are not finite, has 0 bits. Raises ValueError for fewer than two
    samples, ImportError naming the extra where ``significantdigits`` is missing.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim == 0 or len(values) < 2:
        raise ValueError(f"significant bits need at least two samples, got an array of shape {values.shape}")
    package = require("significantdigits", "report")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # zero means and infinities have an answer of their own below
        mean = values.mean(axis=0)
        bits = package.significant_digits(
            values, reference=mean, axis=0, basis=2, error="relative", method="cnh", probability=PROBABILITY
        )
        bits = np.where(np.isfinite(mean) & (mean != 0.0), bits, 0.0)
    return np.where(same(values), np.nan, np.clip(bits, 0.0, float(precision)))


def same(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where all samples are equal (NaNs among themselves too): no evidence of anything."""
    equal: NDArray[np.bool_] = ((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))).all(axis=0)
    return equal


def penalty(samples: int) -> float:
    """The bits that so small a number of samples costs every figure (TOMS 2021, the bracket of CNH's formula)."""
    stats = require("scipy.stats", "report")
    chi2 = stats.chi2.ppf((1 - PROBABILITY) / 2, samples - 1)
    return float(0.5 * np.log2((samples - 1) / chi2) + np.log2(stats.norm.ppf((PROBABILITY + 1) / 2)))


def require(module: str, extra: str) -> Any:
    """The module, or an ImportError that names the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is needed here and not installed: pip install 'fxround[{extra}]'") from error
