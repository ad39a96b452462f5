"""Mutants: change the code in one place at a time, and see whether the tests notice.

    ./run setup mutants
    python -m benchmarks.mutants fxround/runtime/schedule/verify.py     # the tests of the file, by the table JUDGES
    python -m benchmarks.mutants FILE --tests tests/a.py tests/b.py     # other tests
    python -m benchmarks.mutants FILE --limit 40 --seed 2               # other mutants, drawn from all

cosmic-ray makes the mutants: another operator, comparison or number, a condition that is turned over, a decorator or
a loop that is gone. It works in a copy of the tracked files, so that the tree stays as it is. A file of LIMIT mutants
or fewer is tried whole, of a larger one as many are drawn. Annotations are left out, with which nothing computes, and
``is`` in place of ``==``, which is the same for most of what is compared.

A mutant that no test notices is printed as a change of the file. Either a test is missing, or the mutant computes the
same, or the code is not needed. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT: Final = 40
# Operators of cosmic-ray whose mutants mostly compute the same.
ALIKE: Final = tuple(f"core/ReplaceComparisonOperator_{a}" for a in ("Is_Eq", "Eq_Is", "IsNot_NotEq", "NotEq_IsNot"))
# Which tests judge the files below a path; the longest path that fits counts.
JUDGES: Final = {
    "fxround/runtime/schedule": (
        "tests/runtime/test_schedule.py",
        "tests/runtime/test_straight.py",
        "tests/runtime/test_machine_loops.py",
        "tests/runtime/test_row_chains.py",
        "tests/runtime/test_epilogues.py",
    ),
    "fxround/runtime/schedule/verify.py": ("tests/runtime/test_schedule.py",),
    "fxround/runtime/schedule/aliasing.py": ("tests/runtime/test_schedule.py", "tests/module/test_aliases.py"),
    "fxround/runtime/cpu/plans/machine_loops.py": ("tests/runtime/test_machine_loops.py", "tests/test_loops.py"),
    "fxround/runtime/cpu/launches.py": ("tests/runtime/test_launches.py", "tests/runtime/test_straight.py"),
    "fxround/runtime/schedule/row_chains.py": ("tests/runtime/test_row_chains.py",),
    "fxround/runtime/schedule/epilogues.py": ("tests/runtime/test_epilogues.py",),
    "fxround/runtime/schedule/straight.py": ("tests/runtime/test_straight.py",),
    "fxround/runtime/cpu/plans": ("tests/runtime/test_straight.py", "tests/runtime/test_machine_loops.py"),
    "fxround/runtime/call_programs.py": ("tests/runtime/test_straight.py",),
    "fxround/capture": ("tests/capture",),
    "fxround/capture/repeated_blocks.py": ("tests/capture/test_repeated_blocks.py",),
    "fxround/compiler": ("tests/compiler", "tests/module"),
    "fxround/compiler/state_key.py": ("tests/compiler",),
    "fxround/passes": ("tests/passes",),
    "fxround/passes/verify.py": ("tests/passes/test_passes.py",),
}


def main() -> int:
    """Try the mutants of a file; returns 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description="Try the mutants of a file")
    parser.add_argument("file", type=Path, help="a file of the package")
    parser.add_argument("--tests", nargs="+", help="the tests that judge it (default: by the table of this module)")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"mutants to try at most (default {LIMIT})")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default 0)")
    chosen = parser.parse_args()
    file = chosen.file.resolve()
    if not file.is_file() or not file.is_relative_to(ROOT / "fxround"):
        parser.error(f"{chosen.file} is no file of {ROOT / 'fxround'}")
    name = str(file.relative_to(ROOT))
    tests = chosen.tests or judges(name)
    if not tests:
        parser.error(f"no tests are named for {name}: give --tests, or add a row to JUDGES")
    try:
        import cosmic_ray  # type: ignore[import-not-found,import-untyped]  # noqa: F401
    except ImportError:
        parser.error("cosmic-ray is missing: ./run setup mutants")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copied(copy)
        return 1 if tried(copy, name, tests, chosen.limit, chosen.seed) else 0


def judges(name: str) -> Sequence[str]:
    """Return the tests of a file: those of the longest path of JUDGES that holds it, none if no path does."""
    paths = [path for path in JUDGES if name == path or name.startswith(f"{path}/")]
    return JUDGES[max(paths, key=len)] if paths else ()


def copied(to: Path) -> None:
    """Copy the tracked files of the repository as they lie in the tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def tried(copy: Path, name: str, tests: Sequence[str], limit: int, seed: int) -> int:
    """Return the number of mutants of a file that the tests let pass, each of which is printed."""
    command = f"{sys.executable} -m pytest -x -q -n 0 -p no:cacheprovider {' '.join(tests)}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FXROUND_CACHE_DIR": str(copy.parent / "cache"),
    }
    for _ in range(2):  # the first run fills the cache of kernels
        begin = time.monotonic()
        plain = subprocess.run(command.split(), cwd=copy, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - begin
        if plain.returncode:
            raise SystemExit(f"the tests fail without a mutant:\n{plain.stdout[-4000:]}")
    print(f"{' '.join(tests)}: {seconds:.0f} s without a mutant", flush=True)

    def cosmic_ray(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *words], cwd=copy, env=environment, check=True)

    (copy / "mutants.toml").write_text(
        f'[cosmic-ray]\nmodule-path = "{name}"\ntimeout = {3 * seconds + 30:.0f}\nexcluded-modules = []\n'
        f'test-command = "{command}"\n\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    cosmic_ray("init", "mutants.toml", "session.sqlite")
    print("{} mutants, {} of them are tried".format(*drawn(copy, name, limit, seed)), flush=True)
    cosmic_ray("exec", "mutants.toml", "session.sqlite")
    return survivors(copy)


def drawn(copy: Path, name: str, limit: int, seed: int) -> tuple[int, int]:
    """Leave out annotations, ALIKE and what is not drawn; returns how many mutants there are, and how many remain."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    notes = list(annotations(ast.parse((copy / name).read_text())))
    with use_db(str(copy / "session.sqlite")) as database:
        items = sorted(database.pending_work_items, key=lambda item: _order(item.mutations[0]))
        specs = [item.mutations[0] for item in items]
        computed = [i for i, m in enumerate(specs) if m.operator_name not in ALIKE and not _is_inside(m, notes)]
        kept = set(random.Random(seed).sample(computed, min(limit, len(computed))))
        for i, item in enumerate(items):
            if i not in kept:
                database.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="left out"))
    return len(computed), len(kept)


def _order(mutation: Any) -> tuple[Any, ...]:
    return mutation.start_pos, mutation.end_pos, mutation.operator_name, mutation.occurrence


def annotations(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield begin and end, as (line, column), of every annotation."""
    for node in ast.walk(tree):
        note = getattr(node, "returns" if isinstance(node, ast.FunctionDef) else "annotation", None)
        if note is not None:
            yield (note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)


def _is_inside(mutation: Any, notes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    return any(begin <= tuple(mutation.start_pos) and tuple(mutation.end_pos) <= end for begin, end in notes)


def survivors(copy: Path) -> int:
    """Print the mutants that no test noticed, and those that could not be run; returns their number."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    survived = killed = 0
    with use_db(str(copy / "session.sqlite")) as database:
        for item, result in database.completed_work_items:
            if result.worker_outcome == WorkerOutcome.SKIPPED:
                continue
            if result.worker_outcome == WorkerOutcome.NORMAL and result.test_outcome == TestOutcome.KILLED:
                killed += 1
                continue
            survived += 1
            print(f"\n{item.mutations[0].operator_name}: {result.test_outcome or result.worker_outcome}")
            print(result.diff or result.output)
    print(f"\n{killed} were noticed, {survived} were not")
    return survived


if __name__ == "__main__":
    sys.exit(main())
