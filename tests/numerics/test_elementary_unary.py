"""Every unary function against MPFR: all 16-bit inputs, a million binary32 ones, the hardest ones; and what was run.

The reference is ``benchmarks.reference``, which shares nothing with fxround. The exhaustive comparison over all 2^32
binary32 inputs takes minutes a function and is run by hand; its results are data here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exhaustive import MODES, RNG, UNITS, Check, Results, State, cells, digest, exhaust
from benchmarks.functions import BOUNDS, contracts
from benchmarks.reference import FUNCTIONS, Settled, distance, round_to, same, settle
from fxround.graph.dtypes import STORAGES
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "docs" / "exhaustive.json").read_text())
UNARY = pytest.mark.parametrize("name", FUNCTIONS)
NARROW = {"bfloat16": torch.bfloat16, "binary16": torch.float16}


def test_every_unary_function_has_a_reference() -> None:
    assert {name for name, row in ELEMENTARY.items() if row.arity == 1} | {"sqrt", "reciprocal"} == set(FUNCTIONS)


# ---- 16 bits: every input ----


def encodings(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


@cache
def references(name: str, dtype: torch.dtype) -> Settled:
    with np.errstate(all="ignore"):
        return settle(name, encodings(dtype).float().numpy().astype(np.float64))


@pytest.mark.part(3)
@UNARY
@pytest.mark.parametrize("fmt", NARROW)
def test_every_16_bit_input_is_rounded_once(name: str, fmt: str) -> None:
    dtype = NARROW[fmt]
    x, want = encodings(dtype), references(name, dtype).value
    # One directed kernel a format; those of the other modes round the same value by the same algorithm.
    for mode in ("nearest_even", "toward_positive" if fmt == "bfloat16" else "toward_negative"):
        y = torch.ops.fxround.pointwise([x], f"t0 = {name}(x0) @ {fmt}/{mode}/inf", dtype, RNG, 0)
        right = same(y.double().numpy(), round_to(want, FORMATS[fmt], mode))
        assert right.all(), (mode, x[~torch.from_numpy(right)][:5], y[~torch.from_numpy(right)][:5])


@pytest.mark.part(3)
@UNARY
@pytest.mark.parametrize("fmt", NARROW)
def test_every_16_bit_input_has_the_cell_of_the_exact_value(name: str, fmt: str) -> None:
    x, want = encodings(NARROW[fmt]).float(), references(name, NARROW[fmt]).value
    sticky = np.asarray(Check(name, each=False)._sticky(x))
    known = ~np.isnan(want)
    assert same(np.isnan(want), np.isnan(sticky)).all() if known.all() else (np.isnan(sticky) == ~known).all()
    for ours, theirs in zip(cells(*[sticky[known]] * 2), cells(*[want[known]] * 2), strict=True):
        assert (ours == theirs).all(), x[known][ours != theirs][:5]


# ---- 32 bits: random and hard ----


@pytest.mark.part(3)
@UNARY
def test_a_million_random_inputs_and_the_hardest_are_correctly_rounded(name: str) -> None:
    random = torch.randint(-(1 << 31), 1 << 31, (10**6,), generator=torch.Generator().manual_seed(len(name)))
    hard = [float.fromhex(x) for _, x in RESULTS.get(name, {"results": {"hardest": []}})["results"]["hardest"]]
    edges = [0.0, 1.0, 2.0**-149, 2.0**-126, 2.0**-30, 3.4028234663852886e38, float("inf"), float("nan")]
    chosen = torch.tensor([*hard, *edges])
    x = torch.cat([random.to(torch.int32).view(torch.float32), chosen, -chosen])
    found = Check(name, each=False).inputs(x)
    assert found.mismatches == dict.fromkeys(MODES, 0), found.examples


# ---- the exhaustive runs ----


@pytest.mark.parametrize("name", RESULTS)
def test_a_stored_result_is_of_this_code_and_without_a_mismatch(name: str) -> None:
    found = RESULTS[name]
    assert set(found["results"]["mismatches"].values()) == {0}
    assert found["results"]["inputs"] == found["units"] << 25
    assert found["digest"] == digest(name), f"{name} has changed since: python -m benchmarks.exhaustive {name}"


def results_row(name: str) -> str:
    found = RESULTS.get(name)
    if found is None or found["units"] < UNITS:
        return f"| `{name}` | not yet run to the end | | | | | |"
    r = found["results"]
    wrong, minutes = sum(r["mismatches"].values()), r["seconds"] / 60
    return f"| `{name}` | 2^32 | RNE, RZ, RU, RD | {wrong} | {r['near_ties']} | {minutes:.1f} | {found['date']} |"


@UNARY
def test_documented_results_are_the_stored_ones(name: str) -> None:
    assert results_row(name) in (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")


def test_the_documented_contracts_are_the_registry_s() -> None:
    assert "\n".join(contracts()) in (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ELEMENTARY)
def test_the_stored_search_is_within_the_stated_bound(name: str) -> None:
    for found in json.loads(BOUNDS.read_text())["functions"][name].values():
        assert found["ulps"] <= ELEMENTARY[name].error_bound and found["samples"] >= 5000
        assert found["beyond_half"] <= ELEMENTARY[name].near_zeros


# ---- the comparison itself ----


def test_rounding_of_representatives_follows_the_specification() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(300) * 2.0 ** rng.integers(-160, 140, 300)
    values = np.concatenate([values, np.round(values * 2.0**9) / 2.0**9, [0.0, -0.0, 65520.0, 2.0**-25]])
    for fmt in ("binary32", *NARROW):
        for mode in MODES:
            rounding = Rounding.parse(f"{fmt}/{mode}")
            want = np.array([_rounded(v, rounding) for v in values.tolist()])
            assert same(round_to(values, FORMATS[fmt], mode), want).all(), (fmt, mode)


def _rounded(value: float, rounding: Rounding) -> float:
    from fractions import Fraction

    return round_exact(Fraction(value), bool(np.signbit(value)), rounding)


@pytest.mark.parametrize("name, x, shift", [("exp", 1.5, 1), ("tanh", 2.0**-20, 1), ("exp", 88.5, -1), ("log", 3.0, 1)])
def test_a_wrong_result_is_found(name: str, x: float, shift: int) -> None:
    check, at = Check(name, each=False), torch.full((3,), x)
    right = check._nearest(at), check._sticky(at)
    check._compare(at.numpy(), *right)
    assert sum(check.results.mismatches.values()) == 0
    wrong = (right[0].view(np.int32) + shift).view(np.float32)
    check._compare(at.numpy(), wrong, right[1])
    assert check.results.mismatches["nearest_even"] == 3
    beyond = (right[1].view(np.int64) + (shift << 30)).view(np.float64)
    check._compare(at.numpy(), right[0], beyond)
    assert check.results.mismatches["toward_zero"] == 3


def test_a_wrong_constant_block_is_found() -> None:
    check, x = Check("exp", each=False), torch.linspace(-3e38, -2e38, 64)
    nearest, sticky = check._nearest(x), check._sticky(x).copy()
    assert check._constant(x.numpy(), nearest, sticky)
    sticky[5] = 0.0
    assert not check._constant(x.numpy(), nearest, sticky)


def test_the_state_resumes_and_starts_again_for_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State.open(tmp_path, "exp", resume=True)
    state.done = list(range(UNITS - 1))
    state.add(UNITS - 1, Results(inputs=5, near_ties=2, hardest=[(0.1, "0x1p+0")]))
    again = State.open(tmp_path, "exp", resume=True)
    assert (again.missing, again.results) == ([], state.results)
    exhaust("exp", again, each=False, jobs=1)
    assert State.open(tmp_path, "exp", resume=False).missing == list(range(UNITS))
    monkeypatch.setattr("benchmarks.exhaustive.digest", lambda name: "other code")
    assert State.open(tmp_path, "exp", resume=True).missing == list(range(UNITS))
    assert "the code has changed" in capsys.readouterr().err


def test_distance_is_measured_in_half_quanta() -> None:
    assert distance("exp", 0.0) is None
    near = distance("exp", 2.0**-24)  # 1 + 2^-24 + 2^-49: just beyond a midpoint
    assert near == pytest.approx(2.0**-25, rel=1e-3)  # the next term of the series is 2^-25 of it


def test_formats_are_within_binary32() -> None:
    assert all(isinstance(FORMATS[f], Format) and NARROW[f] in STORAGES for f in NARROW)
