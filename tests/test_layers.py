"""The layers of docs/design.md: no import goes up, or in a circle, and passes and runtime do not know each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fxround"
TABLE = re.search(r"```ranks\n(.*?)```", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.DOTALL)


def ranks() -> dict[str, int]:
    assert TABLE is not None
    return {name: int(row.split()[0]) for row in TABLE[1].splitlines() for name in row.split()[1:]}


def name_of(path: Path) -> str:
    """``passes.assign``, ``passes``, and ``fxround`` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "fxround"


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> Iterator[str]:
    """The modules of the package that a module imports, at any depth but under TYPE_CHECKING."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fxround":
            base = (node.module or "").removeprefix("fxround").removeprefix(".")
            yield from (found for alias in node.names if (found := within(f"{base}.{alias.name}".strip("."), base)))
        if isinstance(node, ast.Import):
            yield from (within(a.name.removeprefix("fxround."), "") for a in node.names if a.name.startswith("fxround"))


def within(full: str, base: str) -> str:
    """The module that ``from base import x`` loads: base.x where that is a module, else base."""
    return full if full in MODULES else base or "fxround"


def rank(name: str) -> int:
    """The rank of the longest prefix in the table."""
    table = ranks()
    parts = name.split(".")
    found = next((p for i in range(len(parts), 0, -1) if (p := ".".join(parts[:i])) in table), None)
    assert found is not None, f"{name} has no rank in docs/design.md"
    return table[found]


def graph() -> nx.DiGraph:
    edges = [(name, used) for name in MODULES for used in imports(name) if used != name]
    return nx.DiGraph(edges)


def test_every_row_of_the_table_is_a_module() -> None:
    assert [name for name in ranks() if name not in MODULES] == []
    assert len(MODULES) > 30


def test_no_import_goes_up() -> None:
    assert [(a, b) for a, b in graph().edges if rank(b) > rank(a)] == []


def test_no_import_runs_in_a_circle() -> None:
    assert [circle for circle in nx.simple_cycles(graph()) if len(circle) > 1] == []


def test_passes_and_runtime_do_not_import_each_other() -> None:
    tops = {(a.split(".")[0], b.split(".")[0]) for a, b in graph().edges}
    assert not tops & {("passes", "runtime"), ("runtime", "passes")}


def test_numerics_imports_neither_torch_nor_the_rest() -> None:
    for name, path in MODULES.items():
        if name.split(".")[0] == "numerics":
            assert not re.search(r"^\s*(import|from) torch\b", path.read_text(encoding="utf-8"), re.MULTILINE), name
            assert all(used.split(".")[0] in ("numerics", "errors") for used in imports(name)), name
