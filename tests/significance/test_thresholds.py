"""Scales by a percentile and by the least squared error, against brute force over rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.significance.observed_operands import Batch, Range
from fxround.significance.thresholds import SHARES, LeastSquares, Percentile, scales_of

BINARY32 = Rounding.parse("binary32/nearest_even/saturate")


def rounded(number: Fraction) -> Fraction:
    return Fraction(round_exact(number, number < 0, BINARY32))


def candidates(most: float, maximum: float) -> list[Fraction]:
    return [
        rounded(Fraction(most) / rounded(Fraction(maximum) * 100 / share)) or Fraction(2) ** -149 for share in SHARES
    ]


def error(values: list[float], scale: Fraction, element: Rounding) -> Fraction:
    """The exact sum of squared errors."""
    kept = (Fraction(round_exact(Fraction(v) / scale, v < 0, element)) * scale for v in values)
    return sum(((Fraction(v) - k) ** 2 for v, k in zip(values, kept, strict=True)), Fraction(0))


def batches_of(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Two batches of three blocks: normal, heavy-tailed, and of one magnitude; with values that are not finite."""
    rng = np.random.default_rng(seed)
    made = []
    for size in (24, 17):
        rows = np.stack([rng.standard_normal(size), rng.standard_t(2, size) * 3, rng.choice([-0.7, 0.7], size)])
        rows[0, 3], rows[1, 5], rows[1, 6] = math.nan, math.inf, -math.inf
        made.append(torch.from_numpy(rows).to(dtype))
    return made


def finite(batches: list[Tensor], row: int) -> list[float]:
    return [v for batch in batches for v in batch[row].tolist() if math.isfinite(v)]


def test_the_least_squared_error_is_that_of_brute_force() -> None:
    chosen = set()
    for element, dtype in (("int3", torch.float32), ("e2m1fn", torch.float32), ("int4", torch.float64)):
        batches, known = batches_of(len(element), dtype), Range()
        for batch in batches:
            known.add(Range.of(Batch(batch, int((~batch.isfinite()).sum()), ())))
        rounding = ScaledRounding.parse(f"scaled({element};fixed)/nearest_even/saturate")
        chooser = LeastSquares(known.most, rounding)
        for batch in batches:
            chooser.add(chooser.of(batch))
        for row, scale in enumerate(chooser.scales().tolist()):
            values = finite(batches, row)
            scales = candidates(max(map(abs, values)), rounding.format.element.maximum)
            errors = [error(values, s, rounding.element) for s in scales]
            # The largest scale of equal errors is the first one.
            assert Fraction(scale) == scales[errors.index(min(errors))], (element, row)
            chosen.add(errors.index(min(errors)))
    assert len(chosen) > 3


def test_a_percentile_is_the_least_magnitude_that_so_many_do_not_exceed() -> None:
    batches, known = batches_of(0, torch.float32), Range()
    for batch in batches:
        known.add(Range.of(Batch(batch, int((~batch.isfinite()).sum()), ())))
    assert known.counts.tolist() == [39, 37, 41] and known.others == 6
    for percentage in (0.1, 50.0, 97.7, 100.0):
        chooser = Percentile(percentage, known.counts, 127.0)
        for batch in batches:
            chooser.add(chooser.of(batch))
        for row, scale in enumerate(chooser.scales().tolist()):
            magnitudes = sorted(map(abs, finite(batches, row)))
            reached = [
                t for t in magnitudes if sum(m <= t for m in magnitudes) * 100 >= Fraction(percentage) * len(magnitudes)
            ]
            assert Fraction(scale) == rounded(Fraction(min(reached)) / 127), (percentage, row)


def test_blocks_of_zeros_and_of_nothing_have_the_smallest_scale() -> None:
    rows = torch.tensor([[0.0, 0.0], [math.nan, math.nan], [2.0, 0.0]])
    known = Range()
    known.add(Range.of(Batch(rows, 2, ())))
    least = LeastSquares(known.most, ScaledRounding.parse("scaled(int8;fixed)/nearest_even/saturate"))
    for chooser in (least, Percentile(100.0, known.counts, 127.0)):
        chooser.add(chooser.of(rows))
        assert chooser.scales().tolist() == [2.0**-149, 2.0**-149, float(np.float32(2) / np.float32(127))]
    assert scales_of(torch.tensor([254.0]), 127.0).tolist() == [2.0]
