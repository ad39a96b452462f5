"""``fxround compare``: the report of the library, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxround
from fxround import Policy, Rule, cli
from fxround.cli.compare import policies_of

NET = """
import math, torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())

def data():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return [(x[:5], torch.arange(5) % 4), (x[5:], torch.arange(3))]

def largest(result, target):
    return float(result.abs().max())

def fails(result, target):
    if result.abs().max() == result.bfloat16().abs().max():
        raise ArithmeticError("narrow")
    return 1.0
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "compared_net.py"
    file.write_text(NET)
    return str(file)


def test_the_command_is_the_function(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(Policy("mine", (Rule(rounding="e4m3fn"),)).to_toml())
    given = [f"{net}:build", "--inputs", f"{net}:data", "--policies", "bfloat16", f"own={tmp_path / 'mine.toml'}"]
    files = [
        "--html",
        str(tmp_path / "page.html"),
        "--plot",
        str(tmp_path / "plot.png"),
        "--path",
        str(tmp_path / "rows"),
    ]
    asked = ["--metric", "accuracy", "--metric", f"{net}:largest", "--json", "-"]
    assert cli.main(["compare", *given, *asked, *files]) == 0
    printed = json.loads(capsys.readouterr().out)
    module: dict[str, object] = {}
    exec(NET, module)
    model, data, largest = module["build"]().eval(), module["data"](), module["largest"]  # type: ignore[operator]
    policies = {"bfloat16": "bfloat16", "own": tmp_path / "mine.toml"}
    report = fxround.compare(model, data, policies, ["accuracy", largest])
    for row, wanted in zip(printed["policies"], report.to_dict()["policies"], strict=True):
        assert (
            row["metrics"] == wanted["metrics"] and row["policy"] == wanted["policy"] and row["name"] == wanted["name"]
        )
    assert (tmp_path / "plot.png").stat().st_size and "</html>" in (tmp_path / "page.html").read_text()
    assert json.loads((tmp_path / "rows").read_text()) == printed
    assert torch.is_grad_enabled()


def test_a_policy_that_fails_is_status_1(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["compare", f"{net}:build", "--inputs", f"{net}:data", "--policies", "tf32", "bfloat16"]
    assert cli.main([*given, "--metric", f"{net}:fails"]) == 1
    assert "bfloat16 failed after 0 complete runs: ArithmeticError: narrow" in capsys.readouterr().out


def test_mistakes_are_status_2(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["compare", f"{net}:build", "--inputs", f"{net}:data", "--policies"]
    for policies, says in (
        (["bfloat17"], "did you mean"),
        (["a=int8", "a=int4"], "two have the name 'a'; write NAME=POLICY"),
        (["int8", "int8"], "two policies have the name 'int8'"),
    ):
        assert cli.main([*given, *policies]) == 2
        assert says in capsys.readouterr().err
    assert policies_of(["a=int8", "bfloat16"]) == {"a": "int8", "bfloat16": "bfloat16"}
