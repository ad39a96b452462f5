"""Versions of PyTorch: those that are tested, and the probe of any other."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import fxround
from benchmarks import torch_versions
from fxround import CaptureError, new_process, torch_probe
from fxround.cli import main
from fxround.compiler import torch_version
from fxround.compiler.torch_version import TESTED, Standing, is_tested, require_working_torch, standing_of
from fxround.runtime import disk_cache

ROOT = Path(__file__).parents[2]
UNTESTED = "2.99.0"
Answer = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Every test begins as a new process does."""
    yield
    standing_of.cache_clear()
    torch_version._warn.cache_clear()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[int]]:
    """Pretend that this PyTorch is of an untested version, and let the probe end as told; return its runs."""
    monkeypatch.setattr(torch, "__version__", UNTESTED)
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))

    def ending(out: str = "", error: str = "", status: int = 0) -> list[int]:
        runs: list[int] = []

        def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
            runs.append(status)
            return subprocess.CompletedProcess([], status, out, error)

        monkeypatch.setattr(new_process, "run", run)
        standing_of.cache_clear()
        torch_version._warn.cache_clear()
        return runs

    return ending


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.11.0", "2.15.0+cu132", "2.12.1", "2.14.1.post1"])
def test_tested_versions_are_not_probed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_version, "_probed", lambda version: pytest.fail("a probe"))
    assert standing_of(version) == Standing(version, "tested")


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.130.0", "2.13.0a0+git1234567", "2.16.0.dev20261122"])
def test_other_versions_and_builds_before_a_release_are_not_tested(version: str) -> None:
    assert not is_tested(version)


def test_this_torch_and_the_least_one_that_is_declared_are_tested() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={TESTED[0]}" in declared
    assert is_tested(torch.__version__)
    require_working_torch()


def test_a_version_that_passes_its_probe_warns_once_and_works(untested: Callable[..., list[int]]) -> None:
    runs = untested(out=f"something\n{torch_version.PASSED}\n")
    with pytest.warns(UserWarning, match=rf"tested with torch {TESTED[0]} to {TESTED[-1]}; this is torch {UNTESTED}"):
        fxround.compile(torch.nn.Linear(2, 2), "bfloat16")(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxround.compile(torch.nn.Linear(2, 2), "bfloat16")(torch.ones(1, 2))
    assert runs == [0]


def test_a_version_that_fails_its_probe_is_refused_by_every_entrance(untested: Callable[..., list[int]]) -> None:
    untested(out=f"{torch_version.FAILED}AttributeError: no attribute '_guards'\n")
    message = rf"this is torch {UNTESTED}, with which a small model fails: AttributeError: no attribute '_guards'. Inst"
    with pytest.raises(CaptureError, match=message):
        fxround.compile(torch.nn.Linear(2, 2), "bfloat16")(torch.ones(1, 2))
    with pytest.raises(CaptureError, match=message):
        torch.compile(torch.nn.Linear(2, 2), backend="fxround", options={"policy": "bfloat16"})(torch.ones(1, 2))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(CaptureError, match=message):
        fxround.compile_optimizer(torch.optim.SGD([weight], lr=0.5), "bfloat16").step()


@pytest.mark.parametrize("out", [torch_version.PASSED, f"{torch_version.FAILED}a reason"])
def test_an_answer_is_kept_on_disk(out: str, untested: Callable[..., list[int]]) -> None:
    assert untested(out=out) == [] and standing_of(UNTESTED).verdict != "tested"
    runs = untested(out="another process would not ask again")
    assert standing_of(UNTESTED).verdict == ("warned" if out == torch_version.PASSED else "refused")
    assert runs == []


def test_a_probe_that_ends_without_an_answer_refuses_and_is_asked_again(untested: Callable[..., list[int]]) -> None:
    untested(error="Traceback\nKilled", status=-9)
    assert "its probe ended with status -9: Killed" in standing_of(UNTESTED).reason
    untested(out=torch_version.PASSED)
    assert standing_of(UNTESTED).verdict == "warned"


def test_another_version_is_probed_again(untested: Callable[..., list[int]]) -> None:
    untested(out=torch_version.PASSED)
    assert standing_of(UNTESTED).verdict == "warned"
    runs = untested(out=f"{torch_version.FAILED}a reason")
    assert standing_of("2.98.0").verdict == "refused" and runs == [0]


def test_the_doctor_says_what_a_version_is(
    untested: Callable[..., list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    untested(out=torch_version.PASSED)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"{UNTESTED}, not tested: it works, with a warning" in text and "other models may be refused" in text


def test_the_doctor_finds_a_version_that_fails(
    untested: Callable[..., list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    untested(out=f"{torch_version.FAILED}a reason")
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["torch"]["verdict"] == "refused" and data["torch"]["reason"] in data["problems"]


# ---- the probe ----


@pytest.mark.long
def test_the_probe_passes_in_a_new_process() -> None:
    assert torch_version._run() == b""


def test_the_probe_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch_probe, "PROBING", [])
    monkeypatch.setattr(torch_probe, "comparisons", lambda: iter([("a sum", 1, 1), ("a product", [2.0], [3.0])]))
    torch_probe.answer()
    assert capsys.readouterr().out.splitlines()[-1] == f"{torch_version.FAILED}a product is [2.0], and must be [3.0]"


def test_the_values_of_the_first_model_are_those_of_exact_arithmetic() -> None:
    x = [[Fraction(v) for v in row] for row in torch_probe.ARGUMENT]
    weight = [[Fraction(v) for v in row] for row in torch_probe.WEIGHT]
    y = [[max(chained(zip(a, b, strict=True)), Fraction(0)) for b in weight] for a in x]
    assert [[truncated(v * v) for v in row] for row in y] == [[Fraction(v) for v in row] for row in torch_probe.RESULT]
    slopes = [[truncated(2 * v) for v in row] for row in y]
    gradient = [
        [chained((slopes[n][i], x[n][j]) for n in range(len(x))) for j in range(len(x[0]))] for i in range(len(weight))
    ]
    assert gradient == [[Fraction(v) for v in row] for row in torch_probe.GRADIENT]


def chained(pairs: Any) -> Fraction:
    """A contraction: from 0, one rounding a step, in the order of the pairs."""
    total = Fraction(0)
    for a, b in pairs:
        total = truncated(total + a * b)
    return total


def truncated(value: Fraction) -> Fraction:
    """The value toward zero with the 8 bits of bfloat16, by integers alone."""
    size = abs(value)
    if not size:
        return value
    quantum = Fraction(1)
    while size / quantum >= 256:
        quantum *= 2
    while size / quantum < 128:
        quantum /= 2
    return (size // quantum) * quantum * (1 if value > 0 else -1)


def test_every_tested_version_has_a_run_whose_failures_are_missing_packages() -> None:
    rows = [dict(zip(torch_versions.COLUMNS, row, strict=True)) for row in torch_versions.recorded()["rows"]]
    assert [torch_versions.minor(row["version"]) for row in rows] == list(TESTED)
    for row in rows:
        assert int(row["passed"]) > 100 and row["failed"] == row["no package"].partition(" ")[0], row["version"]


# A name that a tested version lacks, and why that is right.
ASKED_FOR: Final = {"torch._dynamo.variables:object_protocol": "attribute_reads asks for a function of later versions"}


def test_the_recorded_private_names_are_those_of_the_code_and_of_this_torch() -> None:
    names: dict[str, list[str]] = json.loads(torch_versions.NAMES.read_text(encoding="utf-8"))
    version, repair = torch_versions.minor(torch.__version__), "python -m benchmarks.torch_versions --names"
    assert names.keys() == torch_versions.private_names(), repair
    assert {name for name in names if not torch_versions.exists(name)} == {n for n in names if version not in names[n]}
    assert {name for name, versions in names.items() if not set(TESTED) <= set(versions)} == ASKED_FOR.keys()


def test_a_private_name_is_seen_in_imports_attributes_and_names_of_modules() -> None:
    code = """
from torch._dynamo import config, utils
from torch.fx import Node
import torch
torch._C._functorch.peek_interpreter_stack().level()
torch.nn.functional.relu
importlib.import_module("torch._decomp.decompositions")
"""
    names = set(torch_versions._names_in(ast.parse(code)))
    chain, module = "torch._C._functorch.peek_interpreter_stack", "torch._decomp.decompositions:"
    assert names == {"torch._dynamo:config", "torch._dynamo:utils", chain, module}
    assert all(map(torch_versions.exists, names))
    assert not any(map(torch_versions.exists, ("torch._no", "torch._dynamo:no", "torch._no:a", "torch._C._no.a")))


def test_a_run_is_recorded_in_the_row_of_its_version(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = """
<testsuites><testsuite>
<testcase classname="tests.capture.test_a" name="x"/>
<testcase classname="tests.capture.test_a" name="y"><failure message="assert False">E</failure></testcase>
<testcase classname="tests.test_models" name="z"><error message="No module named 'vision'"/></testcase>
<testcase classname="tests.test_models" name="s"><skipped message="as is"/></testcase>
</testsuite></testsuites>"""
    report.write_text(cases)
    row = torch_versions.row_of([report], "2026-01-02")
    named = dict(zip(torch_versions.COLUMNS, row, strict=True))
    assert named["version"] == torch.__version__ and named["digest"] == torch_versions.digest()
    assert (named["passed"], named["failed"], named["no package"]) == ("1", "2", "1 (vision)")
    assert named["tests"] == "capture, models"
    earlier, later = (["2.9.0", *row[1:]], ["2.100.0", *row[1:]])
    table: dict[str, Any] = {"rows": [later, earlier, [torch.__version__, *["old"] * (len(row) - 1)]]}
    added = torch_versions.with_row(table, row)
    assert added["rows"] == [earlier, row, later] and torch_versions.stale(added) == []
    assert torch_versions.stale({"rows": [[*row[:3], "0", *row[4:]]]}) == [torch.__version__]
    report.write_text("<testsuites/>")
    with pytest.raises(ValueError, match="no test was run"):
        torch_versions.row_of([report], "2026-01-02")
