"""Golden hashes: a changed bit of a result or a gradient is named, and is the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxround
from fxround import cli
from fxround.invariance import golden

NET = """
import torch

def build(scale=1.0, last=0.25):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.125, last]]))
        model.bias.zero_()
    return model, torch.tensor([[1.0, -1.0, 0.5]]) * scale

def moved():
    return build(last=0.2500001)

def scaled():
    return build(scale=2.0)

def thirds():
    return build(scale=1 / 3)

def moved_thirds():
    return build(scale=1 / 3, last=0.26)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"net_{tmp_path.name}"  # a name that no other test has imported
    Path(f"{name}.py").write_text(NET)
    return f"{name}.py"


def test_golden_hashes_hold_until_a_bit_changes(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hash", f"{net}:build", "--gradients", "--save", "golden.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["output", "gradient of weight", "gradient of bias", "gradient of arguments[0]"]
    assert [line.partition("  ")[2] for line in lines] == names
    # [1 - 2 + 1.5, 0.5 - 0.125 + 0.125] = [0.5, 0.5], exactly
    assert lines[0].startswith(fxround.hash(torch.tensor([[0.5, 0.5]])))
    assert cli.main(["hash", f"{net}:build", "--gradients", "--check", "golden.json"]) == 0
    capsys.readouterr()

    assert cli.main(["hash", f"{net}:moved", "--gradients", "--check", "golden.json", "--save", "moved.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fxround: 2 of 4 values differ, first output: sha256:")
    assert error.endswith(" in this run; weights differ, too\n")

    assert cli.main(["diff", "golden.json", "moved.json"]) == 1
    out, error = capsys.readouterr()
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "differs" in rows["output"] and "differs" in rows["weights"] and "equal" in rows["gradient of weight"]
    assert "first output" in error
    assert cli.main(["diff", "golden.json", "golden.json"]) == 0


def test_other_inputs_and_missing_values_are_named(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["hash", f"{net}:build", "--save", "golden.json"])
    assert cli.main(["hash", f"{net}:scaled", "--check", "golden.json"]) == 1
    assert "; inputs differ, too" in capsys.readouterr().err
    assert cli.main(["hash", f"{net}:build", "--gradients", "--check", "golden.json"]) == 1
    assert "first gradient of weight: absent in golden.json" in capsys.readouterr().err


def test_a_policy_that_draws_is_a_function_of_the_seed(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["hash", f"{net}:build", "--policy", "sbits(2)/stochastic"]
    assert cli.main([*common, "--save", "golden.json"]) == 0 == cli.main([*common, "--check", "golden.json"])
    assert golden.read("golden.json").policy == "sbits(2)/stochastic, seed 0"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", *(json.dumps({"layout": f"fxround.hashes {version}"}) for version in (0, 1))]
)
def test_other_files_have_no_hashes(text: str, net: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text(text)
    assert cli.main(["hash", f"{net}:build", "--check", "other.json"]) == 2
    assert "other.json has no hashes of a model" in capsys.readouterr().err


def study(net: str, built: str, path: str, *more: str) -> None:
    assert cli.main(["variability", f"{net}:{built}", "--samples", "5", "--save", path, *more]) == 0


def test_reports_of_two_commits_say_which_bits_changed(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    for built, path in (("thirds", "golden.report"), ("thirds", "same.report"), ("moved_thirds", "moved.report")):
        study(net, built, path, "--first-sample", "0", "--capture", "layers")
    capsys.readouterr()
    assert cli.main(["diff", "golden.report", "same.report"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["diff", "golden.report", "moved.report"]) == 1
    out, error = capsys.readouterr()
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    # One of the two results reads the weight that moved.
    assert "differs" in rows["output"] and rows["output"].endswith(" 1")
    assert "places and metrics differ, first (root): the bits of (root) are" in error
    assert "1 elements have other bits; weights, unperturbed runs differ, too" in error
    assert cli.main(["diff", "golden.report", "moved.report", "--lost", "20"]) == 0
    capsys.readouterr()
    assert cli.main(["diff", "golden.report", "moved.report", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {row["place"]: row["elements changed"] for row in found["places"]} == {"output": 1, "(root)": 1}


def test_places_that_lose_bits_are_the_status(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    study(net, "thirds", "golden.report", "--policy", "binary32/stochastic")
    study(net, "thirds", "narrow.report", "--policy", "bfloat16/stochastic")
    capsys.readouterr()
    assert cli.main(["diff", "golden.report", "narrow.report", "--lost", "3"]) == 1
    out, error = capsys.readouterr()
    assert error == "fxround: more than 3 bits are lost in output, (root)\n" and "policies differ." in out
    assert cli.main(["diff", "narrow.report", "golden.report", "--lost", "3"]) == 0


def test_files_of_two_kinds_are_not_compared(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    study(net, "build", "golden.report")
    cli.main(["hash", f"{net}:build", "--save", "golden.json"])
    capsys.readouterr()
    for files, said in (
        (["golden.report", "golden.json"], "golden.report is a report of variability --save, and golden.json is none"),
        (["golden.json", "golden.json", "--lost", "1"], "--lost and --json compare reports of variability --save"),
        (["golden.report", "golden.report", "--lost", "-1"], "--lost is -1.0; expected a number of bits, 0 or more"),
    ):
        assert cli.main(["diff", *files]) == 2
        assert f"fxround: {said}" in capsys.readouterr().err


def test_a_difference_of_something_else_is_refused() -> None:
    report = fxround.variability(torch.nn.Linear(3, 2), torch.rand(4, 3), samples=5, reference=None)
    assert report.difference(report).differing == () and report.difference(report).first == ""
    with pytest.raises(TypeError, match=r"other is a str; expected what fxround\.variability"):
        report.difference("golden.report")  # type: ignore[arg-type]
