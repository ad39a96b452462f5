"""Masks: all on is the perturbed module, all off the quiet one, bit for bit; anything between is what its sites say."""

from __future__ import annotations

import pytest
import torch.utils._pytree as pytree
from models import build
from torch import Tensor

import fxround
from fxround.analysis.masks import Masked

POLICIES = ("stochastic", "up_down", "bfloat16", "e4m3fn/stochastic/saturate")


def same_bits(a: object, b: object) -> bool:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(fxround.hash(x) == fxround.hash(y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["digits_cnn", "encoder", "recurrent"])
def test_all_on_is_the_policy_and_all_off_the_quiet_one(name: str, policy: str) -> None:
    example = build(name)
    inputs = (example.args, example.kwargs)
    masked = Masked(example.model, policy, inputs)
    loud = fxround.compile(example.model, policy).reseed(5, sample=2)(*example.args, **example.kwargs)
    quiet = fxround.compile(example.model, "reproducible", strict=False)(*example.args, **example.kwargs)
    assert same_bits(masked.run(masked.sites, seed=5, sample=2), loud)
    assert same_bits(masked.run(seed=5, sample=2), quiet)
    assert same_bits(masked.run(masked.sites, seed=5, sample=2), loud)  # once more, beside the kept quiet values
    assert not same_bits(loud, quiet)
