"""Results here have the hashes and the table of docs/reproducibility.md, with other threads, processes and code."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from cuda_host import HostLauncher
from host_hashes import PAGE, differing, stated

from benchmarks import determinism
from benchmarks.experiments import DIGITS_HASH, EARLY, EXPERIMENTS, TEXT_HASH
from benchmarks.reproducibility import HASHES, POLICIES, SHOWN, elsewhere, run
from fxround.invariance.report import AxisResult
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cuda.launcher import launching
from fxround.training.updates import power

DOCUMENT = PAGE.read_text(encoding="utf-8")
STATED = stated()


def test_every_experiment_is_stated() -> None:
    assert set(STATED) == {(name, policy, what) for name in EXPERIMENTS for policy in POLICIES for what in HASHES}
    assert all(re.fullmatch(f"[0-9a-f]{{{SHOWN}}}", text) for text in STATED.values())
    assert DIGITS_HASH in DOCUMENT and TEXT_HASH in DOCUMENT


def require_stated(found: dict[str, str], name: str, policy: str, what: str) -> None:
    assert differing(name, policy, found, (what,)) == []


def test_a_transformer_trains_to_the_stated_bits() -> None:
    found = run("transformer", "reproducible", EARLY, threads=2)
    require_stated(found, "transformer", "reproducible", "initial")
    require_stated(found, "transformer", "reproducible", "early")


def test_stochastic_training_resumes_in_another_process_from_other_machine_code(tmp_path: Path) -> None:
    """Two steps with two threads as the least instruction set; the others in a new process, as the host's own."""
    checkpoint = tmp_path / "checkpoint.pt"
    begun = run("cnn", "stochastic", 2, threads=2, isa=instruction_sets()[-1], checkpoint=checkpoint)
    require_stated(begun, "cnn", "stochastic", "initial")
    found = elsewhere("cnn", "stochastic", EARLY, begin=2, checkpoint=checkpoint)
    require_stated(found, "cnn", "stochastic", "early")


@pytest.mark.long
def test_texts_of_a_gpu_train_to_the_stated_bits(compiler: str, tmp_path: Path) -> None:
    """The other runs are those of ``python tests/support/host_hashes.py``."""
    with launching(HostLauncher(tmp_path, compiler)):
        found = run("cnn", "stochastic", EARLY)
    assert differing("cnn", "stochastic", found, ("initial", "early")) == []


def test_the_matrix_has_operators_of_every_kind_and_as_many_as_the_document_says() -> None:
    assert {o.family for o in determinism.OPERATORS} == {"contraction", "reduction", "pointwise", "exact"}
    assert f"each of {len(determinism.OPERATORS)} operators" in DOCUMENT


def test_the_matrix_counts_the_worst_of_an_operator() -> None:
    """Its result, the gradient of its argument, the gradients of its weights; and no other operator's."""
    operator = determinism.OPERATORS[0]
    named = (
        ("output['linear']", 1),
        ("gradient of arguments[0]['linear']", 2),
        ("gradient of operators.linear.weight", 3),
        ("gradient of operators.conv2d.weight", 7),
    )
    assert determinism.counts(AxisResult("threads", 7, 3, "", by_result=named), operator) == 3
    assert determinism.counts(AxisResult("threads", 7, 3, "", by_result=named[:2]), operator) == 2


def test_the_operators_of_the_matrix_run_on_their_arguments() -> None:
    given = determinism.arguments(2)
    results = determinism.suite()(given)
    assert list(given) == [o.name for o in determinism.OPERATORS] and set(results) == set(given)
    assert all(bool(torch.isfinite(result).all()) and len(result) == 2 for result in results.values())


@pytest.mark.parametrize("base", [0.9, 0.999, 0.95, 0.5])
def test_powers_are_rounded_from_the_exact_ones(base: float) -> None:
    """``base**n`` uses the C library, whose last bit differs between machines."""
    assert all(power(base, n) == float(Fraction(base) ** n) for n in range(1, 60))
    assert power(base, 100_000) < 1e-40 and power(0.0, 3) == 0.0
