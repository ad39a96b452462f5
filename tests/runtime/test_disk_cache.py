"""Machine code on disk: it is found again, verified before use, shared by processes, and bounded."""

from __future__ import annotations

import ast
import math
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import networkx as nx
import pytest
import torch
from import_graph import imports, modules

import fxround
import fxround.numerics
from fxround.fingerprint import hash as bits
from fxround.runtime import disk_cache
from fxround.runtime.cpu import code, pointwise
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import identity, instruction_sets
from fxround.runtime.cuda import driver

ROOT = Path(__file__).parents[2]
X = torch.linspace(-3, 3, 97)
# One kernel each, with and without random bits.
RNE, SR = "e4m3fn/nearest_even/saturate", "e5m2/stochastic"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, used by this process."""
    chosen = tmp_path / "cache"
    monkeypatch.setenv(disk_cache.VARIABLE, str(chosen))
    return chosen


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kernels in memory, as a new process would."""
    pointwise.map_call.cache_clear()
    monkeypatch.setattr(code, "_CODE", {})
    monkeypatch.setattr(code, "_ORIGINS", {"compiled": 0, "stored": 0})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int, str]]:
    """Round as a new process would: how many kernels were compiled, how many stored, and the bits."""

    def rounded(rounding: str = RNE, isa: str = "host") -> tuple[int, int, str]:
        fresh(monkeypatch)
        with instruction_set(isa):
            result = fxround.round(X, rounding)
        return code.origins()["compiled"], code.origins()["stored"], bits(result)

    return rounded


Run = Callable[..., tuple[int, int, str]]


def entries(place: Path) -> list[Path]:
    return sorted(place.glob("*"))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rounding", [RNE, SR])
def test_what_was_compiled_once_is_found_again_with_the_same_bits(
    place: Path, run: Run, rounding: str, isa: str
) -> None:
    first, second = run(rounding, isa), run(rounding, isa)
    assert first[:2] == (1, 0) and second[:2] == (0, 1)
    assert first[2] == second[2]
    assert len(entries(place)) == 1


def test_code_is_found_by_its_instruction_set(place: Path, run: Run) -> None:
    """Two sets may name the same processor, but have separate entries."""
    for isa in instruction_sets():
        assert run(RNE, isa)[:2] == (1, 0)
    assert len(entries(place)) == len(instruction_sets())
    assert len({identity(isa) for isa in instruction_sets()}) == len(instruction_sets())


def test_code_that_calls_the_c_library_runs_in_another_process(place: Path) -> None:
    """Without an fma instruction the code calls fma: its address differs from process to process."""
    script = (
        "a, b = torch.arange(12.0).reshape(3, 4) / 7, torch.arange(20.0).reshape(4, 5) / 3\n"
        "with instruction_set('sse2'):\n"
        "    rng, native = torch.tensor([0, 0]), 'binary32/nearest_even/inf'\n"
        "    print(fxround.hash(torch.ops.fxround.matmul(a, b, native, native, rng, 0)), origins())\n"
    )
    first, second = outputs(place, [script], [script])
    assert first[0] == second[0]
    assert "'compiled': 1" in first[1] and "'stored': 1" in second[1]
    assert any(b"fma" in entry.read_bytes() for entry in entries(place))


FORKS = """
import os, sys, torch, fxround
from fxround.runtime.cpu.code import instruction_set, origins
for scripts in {groups!r}:
    children = []
    for script in scripts:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(write, 1)
            exec(script)
            sys.stdout.flush()
            os._exit(0)
        os.close(write)
        children.append((child, read))
    for child, read in children:
        print(open(read).read(), end="", flush=True)
        assert os.waitpid(child, 0)[1] == 0
"""


def outputs(place: Path, *groups: list[str]) -> list[tuple[str, str]]:
    """The hash and the origins that each script prints in a process of its own: those of a group run at once.

    The processes are forks of one that has only imported PyTorch and fxround.
    """
    environment = {**os.environ, disk_cache.VARIABLE: str(place), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FORKS.format(groups=groups)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return [(digest, origins) for digest, _, origins in lines]


def truncated(content: bytes) -> bytes:
    return content[:-1]


def emptied(content: bytes) -> bytes:
    return b""


def lengthened(content: bytes) -> bytes:
    return content + b"\0"


def altered_in_the_code(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def altered_in_the_header(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    "damage", [truncated, emptied, lengthened, altered_in_the_code, altered_in_the_header], ids=lambda f: f.__name__
)
def test_a_damaged_entry_is_compiled_again(
    place: Path, run: Run, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    expected = run()[2]
    (entry,) = entries(place)
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    with caplog.at_level("DEBUG", logger="fxround.cache"):
        assert run() == (1, 0, expected)
    assert "damaged" in caplog.text
    assert entries(place) == [entry] and entry.read_bytes() == sound
    assert run() == (0, 1, expected)


def test_an_entry_of_another_key_is_compiled_again(place: Path, run: Run) -> None:
    expected = run(RNE)[2]
    (mine,) = entries(place)
    run(SR)
    (other,) = set(entries(place)) - {mine}
    mine.write_bytes(other.read_bytes())
    assert run(RNE) == (1, 0, expected)


def test_every_byte_of_an_entry_is_checked() -> None:
    key, code = bytes(range(32)), b"some code"
    sealed = disk_cache._sealed(code, key)
    assert disk_cache._opened(sealed, key) == code
    assert disk_cache._opened(sealed, bytes(32)) is None
    for i in range(len(sealed)):
        assert disk_cache._opened(sealed[:i], key) is None
        for bit in range(8):
            assert disk_cache._opened(sealed[:i] + bytes([sealed[i] ^ 1 << bit]) + sealed[i + 1 :], key) is None


def test_processes_may_fill_one_directory_at_once(place: Path) -> None:
    script = f"print(fxround.hash(fxround.round(torch.linspace(-3, 3, 97), {SR!r})), origins())"
    *several, last = outputs(place, [script] * 3, [script])
    assert len(several) == 3 and {digest for digest, _ in several} == {last[0]}
    # Nothing is left aside, and what is there is whole.
    (entry,) = entries(place)
    assert entry.suffix == ".code"
    assert last[1] == "{'compiled': 0, 'stored': 1}"


def keep(place: Path, number: int, size: int, age: float) -> Path:
    """An entry of ``size`` bytes of code that was used ``age`` seconds ago."""
    key = number.to_bytes(32, "big")
    disk_cache.fetch(key, lambda: bytes(size))
    path = place / f"{key.hex()}.code"
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_the_entries_that_were_used_longest_ago_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "LIMIT_BYTES", 10_000)
    monkeypatch.setattr(disk_cache, "_UNSEEN_BYTES", 1)
    kept = [keep(place, number, 2_000, age=100 - number) for number in range(4)]
    assert entries(place) == sorted(kept)
    # Read: now the first is the youngest.
    assert disk_cache.fetch((0).to_bytes(32, "big"), bytes)[1]
    newest = keep(place, 9, 3_000, age=0)
    assert entries(place) == sorted([kept[0], kept[3], newest])
    assert sum(path.stat().st_size for path in entries(place)) <= 10_000


def test_the_directory_is_visited_at_first_and_once_in_a_while(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[Path] = []
    monkeypatch.setattr(disk_cache, "_evict", visits.append)
    monkeypatch.setattr(disk_cache._Unseen, "total", disk_cache._UNSEEN_BYTES)
    size = disk_cache._UNSEEN_BYTES // 4
    for number in range(9):
        disk_cache.fetch(number.to_bytes(32, "big"), lambda: bytes(size))
        assert len(visits) == 1 + number // 4


def test_what_a_process_that_died_left_aside_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_UNSEEN_BYTES", 1)
    keep(place, 1, 10, age=0)
    old, young, foreign = place / "a.part", place / "b.part", place / "notes.txt"
    for path in (old, young, foreign):
        path.write_text("x")
        os.utime(path, (time.time() - (60 if path is young else 1e6),) * 2)
    keep(place, 2, 10, age=0)
    assert not old.exists() and young.exists() and foreign.exists()


@pytest.mark.parametrize("value", ["", "off"])
def test_the_cache_can_be_switched_off(value: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, value)
    assert disk_cache.directory() is None
    first, second = run(), run()
    assert first[:2] == second[:2] == (1, 0) and first[2] == second[2]


def test_the_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/to/be/ignored")
    assert disk_cache.directory() == tmp_path / ".cache" / "fxround"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert disk_cache.directory() == tmp_path / "shared" / "fxround"
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "own"))
    assert disk_cache.directory() == tmp_path / "own"


def test_a_path_that_is_no_directory_costs_time_not_an_error(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file" / "cache"))
    with caplog.at_level("DEBUG", logger="fxround.cache"):
        first, second = run(), run()
    assert first[:2] == second[:2] == (1, 0)
    assert "not kept" in caplog.text


@contextmanager
def ordinary_user(place: Path) -> Iterator[None]:
    """The superuser may write everywhere, so the block runs as the directory's new owner, the user nobody."""
    if os.geteuid():
        yield
        return
    os.chown(place, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_without_the_right_to_write_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own directories are closed to other users.
    with tempfile.TemporaryDirectory() as outer:
        monkeypatch.setenv(disk_cache.VARIABLE, outer)
        with ordinary_user(Path(outer)):
            stored = run(RNE)
            os.chmod(outer, 0o500)
            assert run(RNE) == (0, 1, stored[2])
            assert run(SR)[:2] == (1, 0)
            assert len(entries(Path(outer))) == 1
            os.chmod(outer, 0o700)


def test_a_write_that_fails_costs_time_not_an_error(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full file system, or one that is mounted read-only."""
    expected = run(RNE)[2]

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(disk_cache.os, "replace", refuse)
    monkeypatch.setattr(disk_cache.os, "utime", refuse)
    assert run(RNE) == (0, 1, expected)
    assert run(SR)[:2] == (1, 0)
    assert len(entries(place)) == 1


def test_the_directory_and_its_entries_are_the_users_alone(place: Path, run: Run) -> None:
    run()
    assert place.stat().st_mode & 0o777 == 0o700
    assert [entry.stat().st_mode & 0o777 for entry in entries(place)] == [0o600]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_to_is_not_filled(place: Path, run: Run, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    assert run()[:2] == (1, 0)
    assert entries(place) == []


def test_an_entry_that_others_can_write_to_is_not_run(place: Path, run: Run) -> None:
    expected = run()
    (entry,) = entries(place)
    entry.chmod(0o666)
    assert run() == expected


def test_an_entry_that_is_a_link_is_not_run(place: Path, run: Run, tmp_path: Path) -> None:
    expected = run()
    (entry,) = entries(place)
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert run() == expected


def test_source_that_changed_after_the_import_is_not_cached(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code that such a process runs differs from its source files."""
    monkeypatch.setattr(disk_cache, "_STARTED", 0.0)
    disk_cache.fingerprint.cache_clear()
    try:
        assert disk_cache.fingerprint(code.SOURCES) is None
        assert run()[:2] == (1, 0)
        assert not place.exists()
    finally:
        disk_cache.fingerprint.cache_clear()


def test_the_fingerprint_depends_on_every_source_file_that_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "numerics"
    package.mkdir()
    sources = [package / "__init__.py", tmp_path / "__init__.py", tmp_path / "policy.py"]
    for source in sources:
        source.write_text("x = 1\n")
    monkeypatch.setattr(fxround.numerics, "__file__", str(sources[0]))
    monkeypatch.setattr(disk_cache, "_STARTED", math.inf)

    def seen() -> tuple[str | None, str | None]:
        fingerprint = disk_cache.fingerprint.__wrapped__
        return fingerprint(disk_cache.EVERYTHING), fingerprint(("numerics/*.py", "policy.py"))

    fingerprints = [seen()]
    for source in sources:
        source.write_text("x = 2\n")
        fingerprints.append(seen())
    whole, part = zip(*fingerprints, strict=True)
    assert None not in whole and len(set(whole)) == 4
    assert None not in part and len(set(part)) == 3 and part[1] == part[2]  # the third file does not match
    sources[2].rename(tmp_path / "errors.py")
    renamed, unmatched = seen()
    assert renamed not in (*whole, None) and unmatched is None


@pytest.mark.parametrize(
    "patterns, folder", [(code.SOURCES, "runtime.cpu.llvm"), (driver.SOURCES, "runtime.cuda.cpp")], ids=["cpu", "cuda"]
)
def test_what_builds_code_imports_nothing_that_the_key_leaves_out(patterns: tuple[str, ...], folder: str) -> None:
    """Code on disk would be found after a change of the module that built it."""
    root = Path(fxround.__file__).parent
    graph = nx.DiGraph((name, used) for name, path in modules().items() for used in imports(path))
    graph.add_nodes_from(modules())
    builders = {name for name in modules() if name.startswith((folder, "kernels.kinds"))}
    needed = builders.union(*(nx.descendants(graph, name) for name in builders))
    matched = {file for pattern in patterns for file in root.glob(pattern)}
    assert len(needed) > 30
    assert {name for name in needed if modules()[name] not in matched} == set()
    assert root / "cli" / "doctor.py" not in matched and root / "passes" / "verify.py" not in matched


def test_a_builder_outside_of_these_folders_is_told_nothing() -> None:
    """Code that is the same for all subjects depends on the module that builds it, and not on the one that asks."""
    root = Path(fxround.__file__).parent
    matched = {file for pattern in code.SOURCES for file in root.glob(pattern)}
    calls = [
        (name, node)
        for name, path in modules().items()
        if path not in matched
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "native"
    ]
    assert calls
    assert [name for name, call in calls if ast.unparse(call.args[2]) != "None"] == []


def test_the_key_tells_its_parts_apart() -> None:
    parts = ("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", "")
    keys = [disk_cache.key(disk_cache.SOURCES_OF_KERNELS, *words) for words in parts]
    assert None not in keys and len(set(keys)) == len(keys)


def test_a_tilde_and_an_empty_home_name_the_users_own_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, expected in (("~/x", tmp_path / "x"), ("~", tmp_path), ("here", Path.cwd() / "here"), ("off", None)):
        monkeypatch.setenv(disk_cache.VARIABLE, text)
        assert disk_cache.directory() == expected
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv(disk_cache.VARIABLE, "~/x")
        assert disk_cache.directory() == own / "x"
        monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert disk_cache.directory() == own / ".cache" / "fxround"
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    assert disk_cache.directory() is None


def test_usage_counts_entries_and_says_why_a_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "new" / "cache"
    monkeypatch.setenv(disk_cache.VARIABLE, str(place))
    assert disk_cache.usage() == disk_cache.Usage(place)
    assert not place.exists()
    place.mkdir(mode=0o700, parents=True)
    for name, size in (("a.code", 3), ("b.code", 4), ("c.part", 100)):
        (place / name).write_bytes(b"x" * size)
    assert disk_cache.usage() == disk_cache.Usage(place, 2, 7)
    place.chmod(0o777)
    assert disk_cache.usage() == disk_cache.Usage(place, 2, 7, "not used: another user can write to it")
    monkeypatch.setenv(disk_cache.VARIABLE, str(place / "a.code"))
    assert disk_cache.usage().problem == "cannot be read: Not a directory"
    monkeypatch.setenv(disk_cache.VARIABLE, str(place / "a.code" / "below"))
    assert disk_cache.usage().problem == "cannot be read: Not a directory"
    monkeypatch.setenv(disk_cache.VARIABLE, "off")
    assert disk_cache.usage() == disk_cache.Usage(None)
