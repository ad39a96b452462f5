"""Files are written completely or not at all, wherever fxround writes one."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import fxround
from fxround import demo
from fxround.atomic_files import write_file
from fxround.cli.arguments import put


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """The system refuses to write more than ``size`` bytes to a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def compiled() -> fxround.RoundedModule:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()
    return fxround.compile(model, "stochastic", example_inputs=torch.rand(2, 4))


@pytest.fixture(scope="module")
def report() -> fxround.VariabilityReport:
    return fxround.variability(nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval(), torch.rand(2, 4), samples=3)


# The name of a file, and what writes it.
WRITERS: Final[dict[str, Callable[[Any, Any, Path], Any]]] = {
    "program.pt2": lambda compiled, _, path: compiled.export(path, torch.rand(2, 4)),
    "graph.svg": lambda compiled, _, path: compiled.draw(path),
    "colours.svg": lambda _, report, path: report.draw(path),
    "page.html": lambda _, report, path: report.to_html(path),
    "figure.png": lambda _, report, path: report.plot(path),
    "figure.svg": lambda _, report, path: report.plot(path),
    "report.json": lambda _, report, path: put(report, str(path)),
    "table.csv": lambda _compiled, _report, path: demo.Demo.write_rows(ROWS, path),
}
ROWS: Final[Any] = type("Rows", (), {"rows": ((0, 1, 2, 0.5, 0.5, 0.1, 9.0, 1),) * 99})


@pytest.mark.part(2)
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full_in_the_middle_of_a_file_keeps_the_old_one(
    name: str,
    compiled: fxround.RoundedModule,
    report: fxround.VariabilityReport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text("old")
    with full_after(1000), pytest.raises(OSError, match="File too large") as error:
        WRITERS[name](compiled, report, path)
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == [name]
    WRITERS[name](compiled, report, path)
    assert path.stat().st_size > 1000 and [p.name for p in tmp_path.iterdir()] == [name]


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = write_file(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_new_file_has_the_permissions_of_the_old_one_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / ("n" * 255), tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert write_file(link, "new") == link and link.is_symlink()
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert write_file(tmp_path / "own", b"x", private=True).stat().st_mode & 0o777 == 0o600
    with open(tmp_path / "plain", "w") as plain:
        assert write_file(tmp_path / "b", "x").stat().st_mode == os.fstat(plain.fileno()).st_mode


def test_pipes_are_written_to_and_folders_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_file(tmp_path / "pipe", "text")
    reader.join()
    assert read == ["text"] and (tmp_path / "pipe").is_fifo()
    full = (Path("/dev/full"), OSError)
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "a", FileNotFoundError), full):
        with pytest.raises(kind) as error:
            write_file(path, "text")
        assert error.value.filename == str(path)
