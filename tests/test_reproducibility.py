"""Training runs of benchmarks/experiments.py: the same bits here, elsewhere, with threads, as other code."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from benchmarks import determinism
from benchmarks.experiments import DIGITS_HASH, EARLY, TEXT_HASH
from benchmarks.reproducibility import elsewhere, run
from fxround.invariance import AxisResult
from fxround.runtime.llvm.engine import instruction_sets
from fxround.training.updates import power

DOCUMENT = (Path(__file__).parents[1] / "docs" / "reproducibility.md").read_text(encoding="utf-8")


def test_the_data_are_those_that_the_document_states() -> None:
    assert DIGITS_HASH in DOCUMENT and TEXT_HASH in DOCUMENT


def test_stochastic_training_resumes_in_another_process_from_other_machine_code(tmp_path: Path) -> None:
    """Two steps with two threads as the least instruction set; the others in a new process, as the host's own."""
    checkpoint = tmp_path / "checkpoint.pt"
    whole = run("cnn", "stochastic", EARLY)
    run("cnn", "stochastic", 2, threads=2, isa=instruction_sets()[-1], checkpoint=checkpoint)
    assert elsewhere("cnn", "stochastic", EARLY, begin=2, checkpoint=checkpoint) == whole


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
    """``base**n`` asks the C library, whose last bit differs between machines."""
    assert all(power(base, n) == float(Fraction(base) ** n) for n in range(1, 60))
    assert power(base, 100_000) < 1e-40 and power(0.0, 3) == 0.0
