"""Progress: lines in a file, a bar where somebody looks, and records of the logger, which has no handler of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fxround
from fxround.significance import progress as module
from fxround.significance.progress import progress, tracked


def test_a_file_gets_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    assert list(tracked(range(3), 3, "work", True)) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("[")[0].split()[-1] for line in lines[:4]] == ["0/3", "1/3", "2/3", "3/3"]
    assert all(line.startswith("work: ") for line in lines)


@pytest.mark.parametrize("shown", [None, False])
def test_nothing_is_written_where_nobody_looks(shown: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    list(tracked(range(3), None, "work", shown))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("work", 2, None) as tick:
        tick("a note")
    assert "\rwork:" in capsys.readouterr().err


def test_the_logger_has_records(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    with caplog.at_level(logging.INFO, "fxround"):
        fxround.variability(nn.Linear(2, 1), torch.rand(3, 2), samples=5, reference=None, progress=False)
    said = [record.getMessage() for record in caplog.records if record.name == "fxround"]
    assert [text.partition(" in ")[0] for text in said[:5]] == [f"stochastic: {i} of 5 steps" for i in range(1, 6)]
    assert said[5].startswith("stochastic: ended after 5 steps")


def test_the_logger_has_no_handler_that_writes() -> None:
    code = "import logging, fxround; print([type(h).__name__ for h in logging.getLogger('fxround').handlers])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['NullHandler']"


@pytest.mark.parametrize("shown", [3, "yes", print])
def test_progress_is_yes_no_or_none(shown: Any) -> None:
    with pytest.raises(TypeError, match="expected True, False or None"):
        fxround.variability(nn.Linear(2, 1), torch.rand(3, 2), samples=5, reference=None, progress=shown)


def test_a_notebook_shows_a_figure_of_a_report() -> None:
    """IPython asks a result for its picture."""
    report = fxround.variability(nn.Linear(2, 1), torch.rand(3, 2), samples=5, reference=None)
    for figure in (report.plot(), fxround.compare(nn.Linear(2, 1), torch.rand(3, 2), ["bfloat16"]).plot()):
        assert figure._repr_png_().startswith(b"\x89PNG\r\n\x1a\n")
