"""Which module of fxround imports which, read from the source files."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "fxround"


@cache
def modules() -> dict[str, Path]:
    """Dotted names below ``fxround``; a package's __init__ goes by the package's name."""
    names = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in sorted(ROOT.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def imports(path: Path, running: bool = False) -> frozenset[str]:
    """The modules of fxround that a file imports at any level, ``from package import module`` included.

    running: whether to leave out what is imported for annotations alone.
    """
    return _resolved(imported(path, running))


@cache
def imports_at_once(path: Path) -> frozenset[str]:
    """The modules of fxround that a file imports at its top level: they are loaded when it is."""
    nodes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return _resolved(name for node in nodes for name in _names_of(node))


def _resolved(names: Iterable[str]) -> frozenset[str]:
    return frozenset(module for name in names if (module := resolve(name)) is not None)


@cache
def imported(path: Path, running: bool = False) -> frozenset[str]:
    """Every imported name, dotted: modules, what is taken from them, and what ``import_module`` is given."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    if running:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func).endswith("import_module"):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= _names_of(node)
    return frozenset(names)


def _names_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    assert node.level == 0, f"a relative import: {ast.unparse(node)}"
    return {f"{node.module}.{alias.name}" for alias in node.names}


def _last_name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def resolve(name: str) -> str | None:
    """The module of fxround that an imported name lies in: ``fxround.graph.site.Site`` -> ``graph``."""
    parts = name.split(".")
    if parts[0] != "fxround":
        return None
    prefixes = (".".join(parts[1:n]) for n in range(len(parts), 1, -1))
    return next((p for p in prefixes if p in modules()), "__init__")
