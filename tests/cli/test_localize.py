"""``fxround localize``: the culprits that it prints, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxround import cli

NET = """
import torch
from torch import nn

class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = Exponential()

    def forward(self, x):
        return (self.power(x) + 1).log()

def build():
    return Net(), torch.full((3,), 12.0)

def finite(y):
    return bool(y.isfinite().all())
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "net_to_localize.py"
    file.write_text(NET)
    return str(file)


def test_culprits_are_printed_with_status_1(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["localize", f"{net}:build", "--check", f"{net}:finite", "--policy", "binary16"]
    written = tmp_path / "report.json"
    assert cli.main([*command, "--json", str(written)]) == 1
    text = capsys.readouterr().out
    assert "power  aten.exp.default -> [3]  net_to_localize.py:7  (node exp)" in text
    assert ">    7 |         return x.exp()" in text
    assert cli.main([*command, "--json", "-", "--level", "modules", "--cache", str(tmp_path / "cache")]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["sets"][0]["modules"] == ["power"]
    assert json.loads(written.read_text())["sets"][0]["sites"][0]["operator"] == "aten.exp.default"
    assert list((tmp_path / "cache").glob("*.jsonl"))


def test_nothing_to_localize_is_status_0(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["localize", f"{net}:build", "--metric", "relative_error", "1e-3", "--runs", "2"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("Nothing to localize: the check passes in 2 runs")
    assert cli.main([*command, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"] == []


def test_mistakes_are_status_2(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["localize", f"{net}:build", "--check", f"{net}:nowhere"]) == 2
    assert "has no callable 'nowhere'" in capsys.readouterr().err
    assert cli.main(["localize", f"{net}:build", "--metric", "sqrn", "3"]) == 2
    assert "no metric is named 'sqrn'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["localize", f"{net}:build"])
    assert "one of the arguments --check --min-bits --metric is required" in capsys.readouterr().err


def test_the_choices_of_a_metric_are_arguments(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["localize", f"{net}:build", "--policy", "binary16", "--runs", "2", "--json", "-"]
    assert cli.main([*command, "--metric", "label_flips", "0", "--threshold", "100"]) == 1
    assert json.loads(capsys.readouterr().out)["sets"][0]["modules"] == ["power"]
    assert cli.main([*command, "--metric", "label_flips", "0", "--threshold", "-100"]) == 0
    assert cli.main([*command, "--min-bits", "3", "--threshold", "0"]) == 2
    assert "--threshold: without --metric, no metric has such a choice" in capsys.readouterr().err
