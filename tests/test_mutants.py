"""The command that tries mutants knows its tests, and leaves out what does not compute."""

from __future__ import annotations

import ast

from benchmarks.mutants import JUDGES, ROOT, annotations, judges


def test_judges_are_files() -> None:
    for path, tests in JUDGES.items():
        assert (ROOT / path).exists(), path
        assert tests, path
        assert all((ROOT / test).exists() for test in tests), path


def test_the_longest_path_counts() -> None:
    assert judges("fxround/runtime/schedule/verify.py") == ("tests/runtime/test_schedule.py",)
    assert judges("fxround/runtime/schedule/groups.py") == JUDGES["fxround/runtime/schedule"]
    assert judges("fxround/runtime/scheduled.py") == ()


def test_annotations_are_where_nothing_computes() -> None:
    code = "def f(x: int | None, *, y: int = 1 | 2) -> int | str:\n    z: int | None = x or y\n    return z\n"
    lines = code.splitlines()
    notes = [lines[begin[0] - 1][begin[1] : end[1]] for begin, end in annotations(ast.parse(code))]
    assert sorted(notes) == ["int", "int | None", "int | None", "int | str"]
