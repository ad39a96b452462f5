"""The repr of what a user meets at a prompt is one short line, and nothing else reads it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

import fxround
from fxround import Policy, Rule, ScaledFormat
from fxround.localization.checks import _key
from fxround.numerics.formats.scaled import SCALED, ScaledRounding
from fxround.policy import monte_carlo

_WIDTHS = [Rule(f"layers.{i}.attention", rounding=f"sbits({i % 20 + 2})") for i in range(40)]
_FP8, _MXFP8 = fxround.policies["fp8"], Policy.preset("mxfp8")
OBJECTS: dict[str, Any] = {
    **{f"policy {name}": policy for name, policy in fxround.policies.items()},
    **{f"format {name}": row for name, row in fxround.formats.items()},
    **{f"mode {name}": row for name, row in fxround.modes.items()},
    **{f"scaled format {name}": row for name, row in SCALED.items()},
    **{f"rounding {text}": ScaledRounding.parse(text) for text in ("nvfp4", "hadamard(16)+mxfp4", "int4:channel")},
    "rounding": fxround.Rounding.parse("e4m3fn/stochastic/saturate"),
    "rule": _FP8.rules[-1],
    "many rules": Policy("many", tuple(_WIDTHS)),
    "no rules": Policy("none"),
    "monte carlo": monte_carlo(24),
    "more rules": _FP8.with_rules(*_WIDTHS),
    "table": fxround.Format.table([i * i / 7 for i in range(200)]),
    "metric": fxround.metric("label_flips", class_dim=-1),
    "batches": fxround.batches([{"image": 1}] * 100, lambda batch: batch["image"]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_one_short_line(name: str) -> None:
    text = repr(OBJECTS[name])
    assert len(text) <= 200 and "\n" not in text and " at 0x" not in text
    assert type(OBJECTS[name]).__name__ in text


def test_the_repr_of_a_policy_says_what_differs_from_the_preset() -> None:
    more = _FP8.with_rules(Rule("head", rounding="bfloat16"))
    assert repr(_FP8) == "<Policy: fp8, the preset>"
    assert repr(_MXFP8) == "<Policy: mxfp8, the preset>"
    assert repr(more) == "<Policy: fp8+, the preset fp8 and head -> rounding=bfloat16/nearest_even/inf>"
    assert repr(replace(_FP8, name="mine", strict=True)) == "<Policy: mine, the preset fp8 and strict=True>"
    assert repr(Policy("mine", more.rules[-1:])) == "<Policy: mine, 1 rule: head -> rounding=bfloat16/nearest_even/inf>"
    assert repr(Policy("none")) == "<Policy: none, 0 rules>"


def test_the_repr_of_a_rule_makes_the_rule() -> None:
    for rule in (rule for policy in fxround.policies.values() for rule in policy.rules):
        assert eval(repr(rule), {"Rule": Rule}) == rule


def test_the_repr_of_a_scaled_format_has_its_name() -> None:
    assert repr(SCALED["nvfp4"]) == "<ScaledFormat: nvfp4, scaled(e2m1fn;16,e4m3fn,nearest,binary32)>"
    assert repr(ScaledFormat.parse("int4:channel")).startswith("<ScaledFormat: scaled(")


def test_objects_of_equal_reprs_stay_apart() -> None:
    """Equality, hashes, pickles and the keys of verdicts read the fields."""
    one, other = (Policy("many", (*_WIDTHS[:20], Rule(f"layers.{i}", order="exact"), *_WIDTHS[20:])) for i in (3, 4))
    assert repr(one) == repr(other)
    assert one != other and hash(one) != hash(other)
    assert pickle.loads(pickle.dumps(one)) == one

    def check_with(policy: Policy, held: dict[str, Policy]) -> Any:
        return lambda output: output.shape == (len(policy.rules), len(held))

    keys = [_key(check_with(one, {"a": one})), _key(check_with(other, {"a": one})), _key(check_with(one, {"a": other}))]
    assert len(set(keys)) == 3
    assert _key(check_with(pickle.loads(pickle.dumps(one)), {"a": one})) == keys[0]
