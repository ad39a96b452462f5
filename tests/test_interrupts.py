"""Ctrl-C ends a command with one line and status 130, at whatever moment of its imports it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import fxround
from fxround import interrupts

# Sends Ctrl-C to the process when it first imports the module of $INTERRUPT_AT.
_SITE: Final = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# What installers write for the command.
_SCRIPT: Final = "import sys\nfrom fxround.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.mark.part(without=("fxround.cli.doctor-module", "fxround.__main__-module"))
@pytest.mark.parametrize(
    "at, way",
    [
        ("fxround.module", "script"),
        ("torch", "script"),
        ("torch", "module"),
        ("fxround.cli", "script"),
        ("fxround.__main__", "module"),
        ("fxround.cli.doctor", "module"),
    ],
)
def test_ctrl_c_while_the_command_is_imported_is_one_line(at: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    (tmp_path / "fxround").write_text(_SCRIPT)
    started = ["-m", "fxround"] if way == "module" else [str(tmp_path / "fxround")]
    path = os.pathsep.join((str(tmp_path), str(Path(fxround.__file__).parents[1])))
    ended = subprocess.run(
        [sys.executable, *started, "doctor"],
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": at},
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "fxround: interrupted\n", "")


@pytest.mark.parametrize(
    "arguments, whole, command",
    [
        (["/usr/bin/fxround", "demo"], ["python", "/usr/bin/fxround", "demo"], True),
        (["-m", "demo"], ["python", "-I", "-m", "fxround", "demo"], True),
        (["-m"], ["python", "-m", "models", "fxround"], False),
        (["train.py", "fxround"], ["python", "train.py", "fxround"], False),
        (["-c"], ["python", "-c", "import fxround"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_ends_without_an_exception(
    arguments: list[str], whole: list[str], command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "orig_argv", whole)
    assert interrupts.is_command() is command


def test_a_program_that_imports_fxround_keeps_its_handler() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with interrupts.interruptible():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler is not interrupts._end
