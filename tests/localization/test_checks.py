"""Checks: which outputs pass, the text about an output, and keys that change with everything a check depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fxround.localization.checks import agreement, parse_check
from fxround.significance.metrics import metric

LIMIT = 3.0
R = torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    "output, bits",
    [
        (R, 24.0),
        (R * (1 + 2.0**-10), 10.0),
        (torch.tensor([1.0, 2.0, 8.0]), 0.0),
        (torch.tensor([1.0, 2.0, torch.nan]), 0.0),
        (torch.tensor([1.0, 2.0, torch.inf]), 0.0),
        (torch.tensor([1.0, 2.0]), 0.0),
    ],
)
def test_agreement_is_that_of_the_worst_element(output: Tensor, bits: float) -> None:
    assert agreement(output, R) == bits
    assert agreement({"y": (output, R)}, {"y": (R, R)}) == bits


def test_agreement_at_zeros_infinities_and_nans() -> None:
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    assert agreement(special, special) == 24
    for i in range(4):
        other = special.clone()
        other[i] = 1e-30
        assert agreement(other, special) == 0 and agreement(special, other) == 0
    assert agreement(torch.tensor([2.0]).double(), torch.tensor([2.0]).double()) == 53


def test_thresholds_pass_on_their_right_side_and_nan_on_none() -> None:
    def worst(y: Tensor, r: Tensor) -> Tensor:
        return (y - r).abs().max()

    check = parse_check((worst, "<= 0.5"), reference=R)
    assert check.passes(R + 0.5) and not check.passes(R + 0.75) and not check.passes(R * torch.nan)
    assert check.seen(R + 0.75) == "0.75, at most 0.5 asked"
    lower = parse_check((metric(worst, better="lower"), 0.5), reference=R)
    assert lower.key == check.key and lower.seen(R + 0.75) == check.seen(R + 0.75)
    higher = parse_check((worst, ">= 0.5"), reference=R)
    assert higher.passes(R + 0.75) and not higher.passes(R + 0.25) and higher.key != check.key
    with pytest.raises(
        ValueError, match=r"not known whether higher or lower values of worst .* '<= 0\.5' or '>= 0\.5'"
    ):
        parse_check((worst, 0.5), reference=R)
    with pytest.raises(ValueError, match="higher values of sqnr are better"):
        parse_check(("sqnr", "<= 20"), reference=R)
    with pytest.raises(ValueError, match=r"the threshold is 'small'; expected '>= 0\.95' or '<= 0\.1'"):
        parse_check((worst, "small"), reference=R)
    sqnr = parse_check(("sqnr", 20), reference=R)
    assert sqnr.passes(R * 1.0625) and not sqnr.passes(R * 1.125)
    assert sqnr.seen(R * 1.125) == "18.06 dB, at least 20 asked"
    assert parse_check(min_bits=9, reference=R).passes(R * (1 + 2.0**-9))


def key(check: Callable[[Any], Any]) -> str:
    return parse_check(check).key


def above(limit: Any) -> Callable[[Tensor], bool]:
    return lambda y: bool((y > limit).all())


def globally(y: Tensor) -> bool:
    return bool((y > LIMIT).all())


def recursive() -> Callable[[Any], bool]:
    def check(y: Any) -> bool:
        return y < 1 or check(y - 1)

    return check


def test_keys_change_with_code_closure_defaults_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        above(1.0),
        above(2.0),
        above(R),
        above(R + 1),
        lambda y, limit=1: y > limit,
        lambda y, limit=2: y > limit,
    ]
    checks += [partial(torch.equal, R), partial(torch.equal, R + 1), globally, recursive()]
    keys = [key(check) for check in checks]
    assert len(set(keys)) == len(keys)
    assert keys[:4] == [key(above(limit)) for limit in (1.0, 2.0, R.clone(), R + 1)]
    assert key(recursive()) == keys[-1]
    monkeypatch.setitem(globals(), "LIMIT", 4.0)
    assert key(globally) != keys[8]
