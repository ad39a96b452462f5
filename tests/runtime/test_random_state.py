"""The tensor (seed, sample): what follows a call, computed by tensor operations where a device has it."""

from __future__ import annotations

import pytest
import torch

import fxround
from fxround.runtime.random_state import advance, advanced, changed, following, of_rank, random_state


@pytest.mark.parametrize("sample", [0, 2**32 - 7, 2**32 - 6, 2**32 - 5, 2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_what_follows_a_call_is_the_same_in_place(sample: int, processes: int) -> None:
    rng = random_state(2**62, sample)
    want = list(following(2**62, sample, processes))
    assert advanced(rng, processes).tolist() == want
    assert rng.tolist() == [2**62, sample]
    advance(rng, processes)
    assert rng.tolist() == want


def test_a_state_on_the_cpu_is_replaced() -> None:
    """So that a graph that was called with the old one draws the old bits in its backward pass."""
    rng = random_state(1, 2)
    assert changed(rng, 3, 4).tolist() == [3, 4] and of_rank(rng, 5).tolist() == [1, 7]
    assert rng.tolist() == [1, 2] and of_rank(rng, 0) is rng


def test_a_state_on_a_device_keeps_its_memory() -> None:
    compiled = fxround.compile(torch.nn.Linear(2, 2), "stochastic").reseed(1, device="meta")
    first = compiled.rng
    assert first.device.type == "meta" and compiled.reseed(2).rng.device.type == "meta"
    assert compiled.rng is not first and compiled.rng._is_view() is first._is_view()
    assert compiled.rng.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert compiled.reseed(3, 4, device="cpu").rng.tolist() == [3, 4]
    with pytest.raises(ValueError, match="sample is -1"):
        compiled.reseed(3, -1)
