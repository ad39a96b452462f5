"""``fxround tune``: the report of the library, the policy file, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxround
from fxround import Policy, cli

NET = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())

def data():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return [(x[:5], torch.arange(5) % 4), (x[5:], torch.arange(3))]

def largest(result, target):
    return float(result.abs().max())
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "tuned_net.py"
    file.write_text(NET)
    return str(file)


def test_the_command_is_the_function(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module: dict[str, object] = {}
    exec(NET, module)
    model, data = module["build"]().eval(), module["data"]()  # type: ignore[operator]
    given = [f"{net}:build", "--inputs", f"{net}:data", "--formats", "bfloat16", "e4m3fn"]
    files = ["--path", str(tmp_path / "runs"), "--policy", str(tmp_path / "t.toml"), "--plot", str(tmp_path / "p.png")]
    assert cli.main(["tune", *given, "--budget", ">= 30", "--json", "-", *files]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = fxround.tune(model, data, "sqnr", ">= 30", ["bfloat16", "e4m3fn"])
    assert printed["chosen"]["trial"]["values"] == [report.value] and printed["policy"] == report.policy.to_dict()
    assert Policy.parse(tmp_path / "t.toml") == report.policy and (tmp_path / "p.png").exists()
    assert len(json.loads((tmp_path / "runs").read_text())["trials"]) == len(report.evaluated)
    # What ran serves other budgets; without one that is met, the status is 1.
    assert cli.main(["tune", *given, "--budget", ">= 200", *files[:2]]) == 1
    assert "NO ASSIGNMENT MEETS THE BUDGET" in capsys.readouterr().out
    assert cli.main(["tune", *given, "--metric", f"{net}:largest", "--budget", "<= 40", "--cost", "both"]) == 0
    assert cli.main(["tune", *given, "--bits", "8.5", *files[:2]]) == 0
    assert "at most 8.5 bits" in capsys.readouterr().out
    assert cli.main(["tune", *given, "--budget", "x"]) == 2
    assert "expected '>= 0.95'" in capsys.readouterr().err


def test_a_command_without_a_budget_is_refused(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", f"{net}:build", "--formats", "bfloat16", "e4m3fn"])
    assert "--budget --bits is required" in capsys.readouterr().err
    assert torch.is_grad_enabled()
