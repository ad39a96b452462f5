"""selftest passes here, its stored hashes are MPFR's, and it reports a wrong bit anywhere."""

from __future__ import annotations

from typing import Any

import gmpy2
import numpy as np
import pytest
import torch
from torch import Tensor

import fxround
from fxround import selftests
from fxround.numerics.formats import FORMATS
from fxround.runtime.cpu.llvm.engine import instruction_sets

CPU = torch.device("cpu")


def test_it_passes_and_says_what_was_compared() -> None:
    report = fxround.selftest()
    compared = [comparison.what for comparison in report.comparisons]
    assert all(any(what.startswith(name) for what in compared) for name in FORMATS if name != "binary64")
    assert all(name in compared for name in selftests.STORED)
    assert report.instruction_set == "host" and "values, all equal." in str(report)
    assert [c["what"] for c in report.to_dict()["comparisons"][:2]] == ["Philox4x32-10", "SplitMix64"]


def test_it_passes_as_the_code_of_the_least_instruction_set() -> None:
    with fxround.instruction_set(instruction_sets()[-1]):
        assert len(list(selftests._contractions(CPU))) == 4
        assert len(list(selftests._elementary(CPU))) == len(selftests.STORED)


@pytest.mark.parametrize("name", selftests.STORED)
def test_stored_hashes_are_those_of_correctly_rounded_values(name: str) -> None:
    """To binary32's precision and exponents, subnormals included, straight from MPFR."""
    with gmpy2.context(gmpy2.ieee(32)):
        want = [float(getattr(gmpy2, name)(gmpy2.mpfr(v))) for v in selftests.arguments(name).tolist()]
    assert fxround.hash(torch.from_numpy(np.float32(want))) == selftests.STORED[name]


def test_boundaries_hold_ties_and_both_sides_of_the_maximum() -> None:
    fmt = FORMATS["e4m3fn"]
    points = selftests.boundaries(fmt).tolist()
    assert {0.0, fmt.maximum, 2.0**fmt.emin, 2.0**fmt.quantum_exponent / 2, fmt.maximum + 16.0} <= set(points)


WRONG = {"run_kernel": "_roundings", "run_product": "_contractions", "run_reduce": "_sums", "run_map": "_elementary"}


@pytest.mark.parametrize("kernel", WRONG)
def test_one_wrong_bit_is_reported(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(selftests, kernel)

    def wrong(*args: Any) -> Any:
        found = right(*args)
        flipped: Tensor = found[3] if isinstance(found, list) else found
        flipped.view(torch.int32).view(-1)[2] ^= 1
        return found

    monkeypatch.setattr(selftests, kernel, wrong)
    with pytest.raises(fxround.SelftestFailed, match=r"(specification says|stored is).*FXROUND_CACHE_DIR=off"):
        list(getattr(selftests, WRONG[kernel])(CPU))


def test_wrong_random_bits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftests, "_PHILOX", (((0, 0, 0, 0), (0, 0), (1, 2, 3, 4)),))
    with pytest.raises(fxround.SelftestFailed, match=r"Philox4x32-10 of \(0, 0, 0, 0\): got"):
        fxround.selftest()
