"""Significant bits of samples: how many leading bits a perturbed computation agrees on.

What is true here. ``significant_bits`` takes samples and asks the ``significantdigits`` package; ``bits_from``
computes the same bounds from streamed statistics (mean, deviation, least, greatest), which is all that they need.
With the given probability and confidence, a further sample agrees with the mean to that many bits. Method ``"cnh"``
supposes the samples normal around their mean; ``"general"`` supposes nothing and has the probability that so many
samples can give (``general_probability``). *Contributing* bits are those that still round a result towards the right
value with probability 0.51. Equal samples are no evidence (NaN), never all the bits of the format: a value that no
operation touched, or a deterministic policy, is stable without being right.

Source: Sohier, de Oliveira Castro, Févotte, Lathuilière, Petit, Jamond, Confidence intervals for stochastic
arithmetic, ACM TOMS 47(2), 2021.

    before   -log2(std / |mean|)             # of three samples; and 24 bits, proudly, where std = 0
    after    significant_bits(samples)       # a bound that holds for 95 %, NaN where nothing was seen
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Method = Literal["cnh", "general"]
Kind = Literal["significant", "contributing"]
Floats = NDArray[np.float64]

PROBABILITY: Final = 0.95
CONFIDENCE: Final = 0.95
CONTRIBUTING: Final = 0.51


def significant_bits(
    samples: ArrayLike,
    precision: int = 24,
    *,
    method: Method = "cnh",
    probability: float = PROBABILITY,
    confidence: float = CONFIDENCE,
) -> Floats:
    """Bits in 0..precision for each element, ``samples[i]`` being sample i; NaN where there is no evidence.

    samples: at least two, float32 or float64, shape (n, ...); result: float64, shape (...). An element whose samples
    differ while their mean is zero, or of which some are not finite, has 0 bits. Raises ValueError for fewer than two
    samples, ImportError naming the extra where ``significantdigits`` is missing.
    """
    return _by_package("significant_digits", samples, precision, method, probability, confidence)


def contributing_bits(
    samples: ArrayLike,
    precision: int = 24,
    *,
    method: Method = "cnh",
    probability: float = CONTRIBUTING,
    confidence: float = CONFIDENCE,
) -> Floats:
    """As ``significant_bits``: bits that round a result towards the right value with ``probability``."""
    return _by_package("contributing_digits", samples, precision, method, probability, confidence)


def _by_package(
    function: str, samples: ArrayLike, precision: int, method: Method, probability: float, confidence: float
) -> Floats:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim == 0 or len(values) < 2:
        raise ValueError(f"significant bits need at least two samples, got an array of shape {values.shape}")
    package = require("significantdigits", "report")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # zero means and infinities have an answer of their own below
        mean = np.atleast_1d(values.mean(axis=0))
        bits = getattr(package, function)(
            values.reshape(len(values), *mean.shape),
            reference=mean,
            axis=0,
            basis=2,
            error="relative",
            method=checked_method(method),
            probability=probability,
            confidence=confidence,
        )
        bits = np.where(np.isfinite(mean) & (mean != 0.0), bits, 0.0)
    return np.where(same(values), np.nan, np.clip(bits, 0.0, float(precision)).reshape(values.shape[1:]))


def bits_from(
    mean: Floats,
    sigma: Floats,
    low: NDArray[Any],
    high: NDArray[Any],
    same: NDArray[np.bool_],
    *,
    samples: int,
    method: Method = "cnh",
    kind: Kind = "significant",
    probability: float | None = None,
    confidence: float = CONFIDENCE,
) -> Floats:
    """The same bits from statistics of n samples, neither cut at 0 nor at a precision; NaN where there is no evidence.

    sigma is the population's. ``-inf`` where some sample is not finite, or the mean is zero and samples differ.
    ``contributing`` bits of the general method need the samples themselves: ValueError.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if checked_method(method) == "general":
            if kind != "significant":
                raise ValueError("the general method's contributing bits need the samples: use contributing_bits")
            apart = np.fmax(np.abs(high / mean - 1), np.abs(low / mean - 1))
            bits = _within(apart)
        else:
            bits = -np.log2(sigma / np.abs(mean)) - penalty(samples, probability, confidence, kind)
    usable = np.isfinite(mean) & np.isfinite(sigma) & (mean != 0.0)
    return np.where(same | (sigma == 0.0), np.nan, np.where(usable, bits, -np.inf))


def _within(apart: Floats) -> Floats:
    """The greatest whole k with apart <= 2^-k."""
    fraction, exponent = np.frexp(apart)
    return np.where(fraction == 0.5, 1.0, 0.0) - exponent


def checked_method(method: str) -> Method:
    """The method, or a ValueError that lists them."""
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, get_args(Method)))}")
    return method  # type: ignore[return-value]


def same(values: Floats) -> NDArray[np.bool_]:
    """Where all samples are equal (NaNs among themselves too): no evidence of anything."""
    equal: NDArray[np.bool_] = ((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))).all(axis=0)
    return equal


@lru_cache(maxsize=1024)
def penalty(
    samples: int, probability: float | None = None, confidence: float = CONFIDENCE, kind: Kind = "significant"
) -> float:
    """The bits that so small a number of samples costs every figure (TOMS 2021, the bracket of CNH's formula)."""
    stats = require("scipy.stats", "report")
    chance = (PROBABILITY if kind == "significant" else CONTRIBUTING) if probability is None else probability
    chi2 = stats.chi2.ppf((1 - confidence) / 2, samples - 1)
    if kind == "significant":
        width = math.log2(stats.norm.ppf((chance + 1) / 2))
    else:
        width = math.log2(chance - 0.5) + math.log2(2 * math.sqrt(2 * math.pi))
    return float(0.5 * math.log2((samples - 1) / chi2) + width)


@lru_cache(maxsize=1024)
def half_width(samples: int, confidence: float = CONFIDENCE) -> float:
    """Half the width, in bits, of the confidence interval of one element's deviation, from n normal samples."""
    chi2 = require("scipy.stats", "report").chi2
    tail = (1 - confidence) / 2
    return float(0.25 * math.log2(chi2.ppf(1 - tail, samples - 1) / chi2.ppf(tail, samples - 1)))


def general_probability(samples: int, confidence: float = CONFIDENCE) -> float:
    """The probability that the general method's bits of n samples stand for (0.95 takes 59 samples)."""
    return max(0.0, 1 + math.log(1 - confidence) / samples)


def decimal(bits: float) -> float:
    """Decimal digits of so many bits."""
    return bits * math.log10(2)


def require(module: str, extra: str) -> Any:
    """The module, or an ImportError that names the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is needed here and not installed: pip install 'fxround[{extra}]'") from error
