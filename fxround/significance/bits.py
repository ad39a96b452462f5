"""Significant bits of samples: how many leading bits a perturbed computation agrees on.

``significant_bits`` calls the ``significantdigits`` package with samples; ``bits_from`` computes the same bounds from
streamed statistics (mean, deviation, least, greatest), which suffice for them. With the given probability and
confidence, a further sample agrees with the mean to that many bits. Method ``"cnh"`` assumes that samples are normal
around their mean; ``"general"`` assumes nothing, and holds with the probability that ``general_probability`` returns
for the number of samples. *Contributing* bits round a result towards the right value with probability 0.51. Equal
samples are no evidence (NaN), not all the bits of the format: a value that no operation changed, or a deterministic
policy, is stable without being right.

Source: Sohier, de Oliveira Castro, Févotte, Lathuilière, Petit, Jamond, Confidence intervals for stochastic
arithmetic, ACM TOMS 47(2), 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxround.errors import shown

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
    """Return the significant bits of each element, in 0..precision; NaN for no evidence.

    samples: at least two, float32 or float64, shape (n, ...), where ``samples[i]`` is sample i; result: float64, shape
    (...). An element has 0 bits if its samples differ and their mean is zero, or some are not finite. Raises ValueError
    for fewer than two samples or an unknown method, ImportError without ``significantdigits``; the message names the
    extra.
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
    """As ``significant_bits``, for the bits that round a result towards the right value with ``probability``."""
    return _by_package("contributing_digits", samples, precision, method, probability, confidence)


def _by_package(
    function: str, samples: ArrayLike, precision: int, method: Method, probability: float, confidence: float
) -> Floats:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim == 0 or len(values) < 2:
        raise ValueError(f"significant bits need at least two samples, got an array of shape {values.shape}")
    package = require("significantdigits", "report")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # zero means and infinities are handled below
        mean = np.atleast_1d(values.mean(axis=0))
        bits = getattr(package, function)(
            values.reshape(len(values), *mean.shape),
            reference=mean,
            axis=0,
            basis=2,
            error="relative",
            method=known_method(method),
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
    """Return the same bits from statistics of n samples, clipped neither at 0 nor at a precision; NaN for no evidence.

    sigma is the population's. The result is ``-inf`` if some sample is not finite, or the mean is zero and samples
    differ. Raises ValueError for ``contributing`` bits of the general method, which need the samples themselves.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if known_method(method) == "general":
            if kind != "significant":
                raise ValueError("the general method's contributing bits need the samples: use contributing_bits")
            apart = np.fmax(np.abs(high / mean - 1), np.abs(low / mean - 1))
            bits = _within(apart)
        else:
            bits = -np.log2(sigma / np.abs(mean)) - penalty(samples, probability, confidence, kind)
    usable = np.isfinite(mean) & np.isfinite(sigma) & (mean != 0.0)
    return np.where(same | (sigma == 0.0), np.nan, np.where(usable, bits, -np.inf))


def _within(apart: Floats) -> Floats:
    """Return the greatest whole k with apart <= 2^-k."""
    fraction, exponent = np.frexp(apart)
    return np.where(fraction == 0.5, 1.0, 0.0) - exponent


def known_method(method: str) -> Method:
    """Return the method. Raises ValueError listing the methods."""
    if method not in get_args(Method):
        raise ValueError(f"method is {shown(method)}; expected one of {', '.join(map(repr, get_args(Method)))}")
    return method  # type: ignore[return-value]


def same(values: Floats) -> NDArray[np.bool_]:
    """Where all samples are equal (NaNs equal each other), which is no evidence."""
    equal: NDArray[np.bool_] = ((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))).all(axis=0)
    return equal


@lru_cache(maxsize=1024)
def penalty(
    samples: int, probability: float | None = None, confidence: float = CONFIDENCE, kind: Kind = "significant"
) -> float:
    """Return the bits that the small number of samples costs every figure (TOMS 2021, the bracket of CNH's formula)."""
    special = require("scipy.special", "report")
    chance = (PROBABILITY if kind == "significant" else CONTRIBUTING) if probability is None else probability
    chi2 = _chi_square_quantile((1 - confidence) / 2, samples - 1)
    if kind == "significant":
        width = math.log2(special.ndtri((chance + 1) / 2))
    else:
        width = math.log2(chance - 0.5) + math.log2(2 * math.sqrt(2 * math.pi))
    return float(0.5 * math.log2((samples - 1) / chi2) + width)


@lru_cache(maxsize=1024)
def above(samples: int, confidence: float = CONFIDENCE) -> float:
    """Return a: the true number of bits of one element is between CNH's figure and a more with ``confidence``.

    It is exact for normal samples around a mean that is large in comparison with their deviation: the squared
    deviations over the variance are a chi-square variable with n - 1 degrees of freedom. The probability below the
    interval is that with which CNH's bound fails, and the rest is above it.
    """
    shrunk = (samples - 1) / samples  # the figure's deviation is the population's
    low = _chi_square_quantile((1 - confidence) / 2, samples - 1)
    below = require("scipy.special", "report").chdtr(samples - 1, low / shrunk)
    high = _chi_square_quantile(confidence + below, samples - 1)
    return float(0.5 * math.log2(high * shrunk / low))


def _chi_square_quantile(probability: float, freedom: int) -> float:
    """Return what ``scipy.stats.chi2.ppf`` returns, without the two seconds in which ``scipy.stats`` is imported."""
    return float(2 * require("scipy.special", "report").gammaincinv(freedom / 2, probability))


def student_quantile(probability: float, freedom: int) -> float:
    """Return what ``scipy.stats.t.ppf`` returns, without the two seconds in which ``scipy.stats`` is imported."""
    return float(require("scipy.special", "report").stdtrit(freedom, probability))


def general_probability(samples: int, confidence: float = CONFIDENCE) -> float:
    """Return the probability with which the general method's bits of n samples hold (0.95 takes 60 samples)."""
    return max(0.0, 1 + math.log(1 - confidence) / samples)


def decimal(bits: float) -> float:
    """Return the number of decimal digits of a number of bits."""
    return bits * math.log10(2)


def student_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Return half of Student's interval of a mean: t(n - 1) times the standard error. None below two finite values.

    Raises ImportError without scipy, which the extra ``report`` installs.
    """
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return None
    student = student_quantile((1 + confidence) / 2, n - 1)
    return float(student * np.std(values, ddof=1) / math.sqrt(n))


def require(module: str, extra: str) -> Any:
    """Return the module. Raises ImportError naming the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is needed here and not installed: pip install 'fxround[{extra}]'") from error
