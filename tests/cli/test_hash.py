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
