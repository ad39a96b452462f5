"""Streamed statistics equal those of all samples at once, whatever the chunks, and never grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxround.significance import moments as statistics
from fxround.significance.moments import Moments


def moments(samples: torch.Tensor) -> Moments:
    taken = Moments(tuple(samples.shape[1:]), samples.dtype)
    for sample in samples:
        taken.add(sample)
    return taken


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_streamed_moments_are_those_of_all_samples(dtype: torch.dtype) -> None:
    samples = (1 + normal(7, 5, 11) * 2.0**-5).to(dtype)
    found, values = moments(samples), samples.double().reshape(7, -1).numpy()
    # Two orders of summation in binary64.
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-15)
    np.testing.assert_allclose(found.sigma(), values.std(0), rtol=1e-12)
    assert (found.low == values.min(0)).all() and (found.high == values.max(0)).all()
    assert found.finite().all() and not found.same().all()


def test_the_chunks_of_an_update_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = normal(4, 1000)
    whole = moments(samples)
    monkeypatch.setattr(statistics, "CHUNK", 7)
    parts = moments(samples)
    assert (whole.mean == parts.mean).all() and (whole.squares == parts.squares).all()


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12), st.data())
def test_merged_moments_are_those_of_the_joined_samples(values: list[float], data: st.DataObject) -> None:
    samples = torch.tensor(values)[:, None]
    cut = data.draw(st.integers(0, len(values)))
    first, second = Moments((1,), torch.float32), Moments((1,), torch.float32)
    for i, sample in enumerate(samples):
        (first if i < cut else second).add(sample)
    first.merge(second)
    joined = moments(samples)
    assert first.count == joined.count
    assert (first.low, first.high) == (joined.low, joined.high)
    scale = max(1e-300, max(abs(v) for v in values))
    assert abs(first.mean[0] - joined.mean[0]) <= 1e-14 * scale
    assert abs(first.sigma()[0] - joined.sigma()[0]) <= 1e-7 * scale


def test_equal_samples_deviate_by_exactly_nothing() -> None:
    found = moments(torch.tensor([[0.1, -0.0, 3e38, 1e-45]] * 9))
    assert found.same().all() and (found.sigma() == 0).all()


def test_non_finite_samples_are_counted_and_dated() -> None:
    inf, nan = torch.inf, torch.nan
    found = moments(torch.tensor([[1, nan, inf, 1, nan], [1, nan, inf, nan, 1], [1, nan, inf, inf, 1]]))
    assert found.broken is not None
    assert found.broken.tolist() == [-1, 0, 0, 1, 0]
    assert found.same().tolist() == [True, True, True, False, False]
    assert found.finite().tolist() == [True, False, False, False, False]
    later = moments(torch.tensor([[nan, nan, inf, 1, 1.0]]))
    found.merge(later)
    assert found.broken.tolist() == [3, 0, 0, 1, 0]
    assert found.same().tolist() == [False, True, True, False, False]


def test_another_shape_or_dtype_is_refused() -> None:
    found = moments(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"sample 2 is torch.float32 \(4,\), those before were torch.float32 \(3,\)"):
        found.add(torch.ones(4))
    with pytest.raises(ValueError, match="cannot merge"):
        found.merge(moments(torch.ones(2, 3).double()))


def test_the_state_does_not_grow_with_samples() -> None:
    samples = normal(3, 1000)
    few, many = moments(samples), moments(samples.repeat(20, 1))
    assert few.nbytes == many.nbytes == 24 * 1000
