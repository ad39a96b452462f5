"""Modes: the truth table of each rule, written out; texts without loss; values beyond the maximum."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neighbours import ALL_FORMATS, ALL_MODES

from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import MODES, Lost, Mode, Rounding
from fxround.numerics.specification.exact import round_exact

# What is lost, for each kept parity: nothing, less than half, half, more than half. 1: step away from zero.
#   signs: + even, + odd, - even, - odd; four columns each. The random modes: drawn / coin off, then on.
TRUTH = {
    "nearest_even": "0001 0011 0001 0011",
    "nearest_away": "0011 0011 0011 0011",
    "nearest_zero": "0001 0001 0001 0001",
    "nearest_odd": "0011 0001 0011 0001",
    "toward_zero": "0000 0000 0000 0000",
    "toward_positive": "0111 0111 0000 0000",
    "toward_negative": "0000 0000 0111 0111",
    "away_from_zero": "0111 0111 0111 0111",
    "to_odd": "0111 0000 0111 0000",
    "stochastic": "0000 0000 0000 0000",
    "stochastic_b": "0000 0000 0000 0000",
    "stochastic_c": "0000 0000 0000 0000",
    "stochastic_equal": "0000 0000 0000 0000",
    "up_down": "0001 0011 0001 0011",
}
TRUTH_DRAWN = TRUTH | {
    "stochastic": "0111 0111 0111 0111",
    "stochastic_b": "0111 0111 0111 0111",
    "stochastic_c": "0111 0111 0111 0111",
    "stochastic_equal": "0111 0111 0111 0111",
}
# Past the maximum, for + and -: 1 leaves the range.
LEAVES = {
    "toward_zero": "00",
    "toward_positive": "10",
    "toward_negative": "01",
    "to_odd": "00",
}


def seen(negative: bool, odd: bool, lost: int, chance: bool) -> Lost[bool]:
    inexact = lost > 0
    return Lost(negative, not negative, odd, not odd, inexact, lost == 2, lost == 3, chance and inexact, chance, False)


def table(mode: Mode, chance: bool) -> str:
    rows = [[mode.away(seen(n, o, lost, chance)) for lost in range(4)] for n in (False, True) for o in (False, True)]
    return " ".join("".join(str(int(bool(v))) for v in row) for row in rows)


def test_every_mode_has_a_table() -> None:
    assert set(TRUTH) == set(MODES)
    assert len(MODES) == 14


@pytest.mark.parametrize("name", TRUTH)
def test_truth_table(name: str) -> None:
    assert table(MODES[name], chance=False) == TRUTH[name]
    assert table(MODES[name], chance=True) == TRUTH_DRAWN[name]


@pytest.mark.parametrize("name", MODES)
def test_no_rule_moves_an_exact_value(name: str) -> None:
    for negative in (False, True):
        for odd in (False, True):
            for chance in (False, True):
                assert not MODES[name].away(seen(negative, odd, 0, chance))


@pytest.mark.parametrize("name", MODES)
def test_past_the_maximum(name: str) -> None:
    leaves = LEAVES.get(name, "11")
    assert [MODES[name].overflows(negative) for negative in (False, True)] == [c == "1" for c in leaves]


@pytest.mark.parametrize("mode", ALL_MODES, ids=str)
def test_a_mode_says_whether_tiny_values_vanish(mode: Mode) -> None:
    rounding = Rounding(FORMATS["binary32"], mode, "inf")
    words = (0, 1, 2**31 - 1, 2**31, 2**32 - 1) if mode.random_bits else (0,)
    assert mode.vanishes == ({round_exact(Fraction(1, 2**182), False, rounding, word) for word in words} == {0.0})


def test_random_bits() -> None:
    assert {n: m.random_bits for n, m in MODES.items() if m.random_bits} == {
        "stochastic": 32,
        "stochastic_b": 31,
        "stochastic_c": 31,
        "stochastic_equal": 1,
        "up_down": 1,
    }
    assert [n for n, m in MODES.items() if m.jitter] == ["up_down"]
    assert all(m.deterministic == (m.random_bits == 0) for m in ALL_MODES)


@given(st.sampled_from(ALL_FORMATS), st.sampled_from(ALL_MODES), st.data())
def test_text_loses_nothing(fmt, mode, data) -> None:  # type: ignore[no-untyped-def]
    rounding = Rounding(fmt, mode, data.draw(st.sampled_from(fmt.overflows)))
    assert Rounding.parse(str(rounding)) == rounding
    assert str(rounding).count("/") == 2
    assert pickle.loads(pickle.dumps(rounding)) == rounding
    assert Mode.parse(str(mode)) == mode


def test_defaults_of_a_short_text() -> None:
    assert str(Rounding.parse("bfloat16")) == "bfloat16/nearest_even/inf"
    assert str(Rounding.parse(" e4m3fn / stochastic ")) == "e4m3fn/stochastic/nan"
    assert str(Rounding.parse("e2m1fn/stochastic:5")) == "e2m1fn/stochastic:5/saturate"
    assert str(Mode.parse("stochastic:32")) == "stochastic"
    assert (
        str(Mode.parse("stochastic_b:31")) == "stochastic_b" and str(Mode.parse("stochastic_c:4")) == "stochastic_c:4"
    )
    rounding = Rounding.parse("bfloat16")
    assert Rounding.parse(rounding) is rounding


@pytest.mark.parametrize(
    "text, message",
    [
        ("bfloat16/nearest", r"no rounding mode is named 'nearest'; did you mean nearest_"),
        ("bfloat16/stochastic:0", r"stochastic:1 to stochastic:32"),
        ("bfloat16/stochastic:33", r"stochastic:1 to stochastic:32"),
        ("bfloat16/stochastic:x", r"stochastic:1 to stochastic:32"),
        ("bfloat16/nearest_even:3", r"only stochastic modes take a number of random bits"),
        ("bfloat16/stochastic_c:32", r"stochastic_c:1 to stochastic_c:31"),
        ("e4m3fn/nearest_even/inf", r"e4m3fn cannot overflow to 'inf'; it can: saturate, nan"),
        ("e2m1fn/nearest_even/nan", r"it can: saturate"),
        ("bfloat16/nearest_even/wrap", r"cannot overflow to 'wrap'; it can: inf, saturate, nan"),
        ("a/b/c/d", r"'a/b/c/d' has 4 parts; expected format\[/mode\[/overflow\]\]"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounding.parse(text)


def test_a_wrong_type_says_what_is_expected() -> None:
    with pytest.raises(TypeError, match=r"a rounding is a text like .*, got int"):
        Rounding.parse(3)  # type: ignore[arg-type]


def test_registries_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        MODES["mine"] = MODES["to_odd"]  # type: ignore[index]
    with pytest.raises(TypeError):
        FORMATS["mine"] = FORMATS["e5m2"]  # type: ignore[index]
