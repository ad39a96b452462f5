"""What the tests and private names of PyTorch give under each version of PyTorch: the files VERSIONS and NAMES.

    python -m benchmarks.torch_versions                            # which rows are of other code than this
    python -m benchmarks.torch_versions REPORT.xml [REPORT.xml]    # record a run of the tests, from pytest's --junitxml
    python -m benchmarks.torch_versions --names                    # record which private names this version has

The interpreter must be the one that ran the tests: its PyTorch is the version of the row. ``./run torch VERSION`` does
both, in an environment of its own. Then ``python -m benchmarks.tables`` writes docs/platforms.md.

A row of VERSIONS counts the tests that passed, and those that failed, among which are those for which a package is not
installed. Its digest is that of the code that depends on PyTorch most (CODE). NAMES has every private name of PyTorch
that fxround's code names, with the versions that have it.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib
import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import torch

from benchmarks.harness import machine
from fxround.atomic_files import write_file

ROOT: Final = Path(__file__).resolve().parents[1]
VERSIONS: Final = ROOT / "benchmarks" / "results" / "torch_versions.json"
NAMES: Final = ROOT / "benchmarks" / "results" / "torch_names.json"
TABLE: Final = "tests by version of PyTorch"
COLUMNS: Final = ("version", "Python", "date", "digest", "passed", "failed", "no package", "tests", "processor")
# The folders of fxround whose files a row's digest covers.
CODE: Final = ("capture", "compiler")
_MISSING: Final = re.compile(r"No module named '(\w+)|could not import '(\w+)'")


def digest() -> str:
    """Return twelve hexadecimal digits of the SHA-256 of the code that depends on PyTorch most."""
    total = hashlib.sha256()
    for file in sorted(file for folder in CODE for file in (ROOT / "fxround" / folder).rglob("*.py")):
        total.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return total.hexdigest()[:12]


def minor(version: str) -> str:
    """Return the minor version: "2.15" for "2.15.0+cu132"."""
    return ".".join(version.split(".")[:2])


def row_of(reports: Sequence[Path], today: str) -> list[str]:
    """Return the row of a run, in the order of COLUMNS. Raises ValueError if the reports are of no test."""
    cases = [case for path in reports for case in ElementTree.parse(path).iter("testcase")]
    if not cases:
        raise ValueError(f"{', '.join(map(str, reports))}: no test was run")
    bad = [told for case in cases if (told := [*case.findall("failure"), *case.findall("error")])]
    skipped = sum(case.find("skipped") is not None for case in cases)
    packages = [match for told in bad if (match := _MISSING.search(f"{told[0].get('message')} {told[0].text}"))]
    folders = {".".join(str(case.get("classname")).split(".")[1:2]) for case in cases}
    lacking = f"{len(packages)} ({', '.join(sorted({m[1] or m[2] for m in packages}))})" if packages else "0"
    counts = str(len(cases) - len(bad) - skipped), str(len(bad)), lacking
    tests = ", ".join(sorted(folder.removeprefix("test_") for folder in folders))
    return [torch.__version__, platform.python_version(), today, digest(), *counts, tests, machine()]


def recorded() -> dict[str, Any]:
    """Return the table of VERSIONS."""
    table: dict[str, Any] = json.loads(VERSIONS.read_text(encoding="utf-8"))[TABLE]
    return table


def with_row(table: dict[str, Any], row: list[str]) -> dict[str, Any]:
    """Return the table with the row in the place of that of the same minor version, in the order of versions."""
    others = [other for other in table["rows"] if minor(other[0]) != minor(row[0])]
    rows = sorted([*others, row], key=lambda other: [int(part) for part in minor(other[0]).split(".")])
    return {**table, "columns": list(COLUMNS), "rows": rows}


def stale(table: dict[str, Any]) -> list[str]:
    """Return the versions whose run was one of other code."""
    return [row[0] for row in table["rows"] if row[COLUMNS.index("digest")] != digest()]


def private_names() -> set[str]:
    """Return every private name of PyTorch in fxround's code: ``module:name``, or a chain of attributes of torch."""
    return {name for file in (ROOT / "fxround").rglob("*.py") for name in _names_in(ast.parse(file.read_bytes()))}


def _names_in(tree: ast.AST) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            yield from (f"{node.module}:{a.name}" for a in node.names if _is_private(f"{node.module}.{a.name}"))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            name = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", name) and _is_private(name):
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            name = str(getattr(node.args[0], "value", ""))
            if name.startswith("torch.") and _is_private(name):
                yield f"{name}:"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def exists(name: str) -> bool:
    """Whether the installed PyTorch has a name of NAMES."""
    module, colon, member = name.partition(":")
    if not colon:
        return _has(torch, name.split(".")[1:])
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return not member or hasattr(found, member) or exists(f"{module}.{member}:")


def _has(value: Any, names: Sequence[str]) -> bool:
    for name in names:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def with_names(known: dict[str, list[str]], version: str) -> dict[str, list[str]]:
    """Return the versions of every private name, those of the installed version as it is."""
    names = {name: {*known.get(name, ())} - {version} for name in sorted(private_names())}
    return {name: sorted(had | {version} if exists(name) else had) for name, had in names.items()}


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=Path, help="files of pytest --junitxml, of one run")
    parser.add_argument("--names", action="store_true", help="record which private names this version has")
    parser.add_argument("--into", type=Path, default=VERSIONS.parent, help="the folder of VERSIONS and NAMES")
    given = parser.parse_args()
    if given.names:
        names = given.into / NAMES.name
        _write(names, with_names(json.loads(names.read_text(encoding="utf-8")), minor(torch.__version__)))
    if given.reports:
        versions = given.into / VERSIONS.name
        table = json.loads(versions.read_text(encoding="utf-8"))[TABLE]
        row = row_of(given.reports, datetime.datetime.now(datetime.UTC).date().isoformat())
        _write(versions, {TABLE: with_row(table, row)})
        print(*row, sep=" | ")
    if not given.names and not given.reports:
        old = stale(recorded())
        print(f"of this code ({digest()}): all but {', '.join(old)}" if old else f"of this code ({digest()}): all")
        sys.exit(bool(old))


def _write(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
