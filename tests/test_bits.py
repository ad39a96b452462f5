"""An eleventh of the ledger of bits; ``python -m benchmarks.bits`` compares the whole, in every way to compute."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.bits import NAMES, entry_of, stored
from fxround.policy import PRESETS

PAIRS = list(product(NAMES, PRESETS))


def test_the_ledger_has_every_model_and_preset() -> None:
    assert [tuple(key.split(", ")) for key in stored()] == PAIRS


@pytest.mark.part(
    without=(
        "gru-stochastic",
        "gru-nvfp4_training",
        "lstm-cestac",
        "tokens-fp8",
        "residual-repdl",
        "warped-up_down",
    )
)
@pytest.mark.parametrize("name, preset", PAIRS[::11])
def test_bits_and_kernels_are_those_of_the_ledger(name: str, preset: str) -> None:
    """After a change of bits that is meant: python -m benchmarks.bits --write."""
    assert entry_of(name, preset) == stored()[f"{name}, {preset}"]
