"""The code is as docs/design.md says: who imports whom, which files and folders there are, and where the tests are."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import networkx as nx
import pytest
import stock_oracles
from import_graph import ROOT, imported, imports, modules

from fxround.passes import LOWERING

# The longest prefix decides. passes and runtime share a rank and never import each other.
RANKS = {
    "errors": 0,
    "atomic_files": 0,
    "interrupts": 0,
    "locks": 0,
    "choices": 0,
    "float_state": 0,
    "short_reprs": 0,
    "spelling": 0,
    "new_process": 0,
    "version": 0,
    "numerics.formats": 0,
    "numerics.formats.carriers": 1,
    "numerics.formats.encodings": 1,
    "numerics.formats.scaled": 1,
    "numerics.formats.storage": 1,
    "numerics.modes": 0,
    "numerics.arithmetic.scalar": 0,
    "numerics.orders": 0,
    "numerics.lazy": 0,
    "numerics": 1,
    "policy": 2,
    "kernels": 2,
    "faults.counting": 2,
    "graph": 2,
    "operators": 2,
    "capture": 2,
    "fingerprint": 2,
    "views.table": 2,
    "views.svg": 2,
    "views": 3,
    "faults": 3,
    "passes": 3,
    "runtime": 3,
    "python_model": 4,
    "compiler": 5,
    "eager": 5,
    "exported": 6,
    "module": 7,
    "torch_probe": 8,
    "significance": 8,
    "attribution": 8,
    "localization": 8,
    "invariance": 8,
    "selftests": 8,
    "training": 8,
    "tuning": 8,
    "demo": 8,
    "demo_page": 8,
    "deferred_operators": 8,
    "cli": 8,
    "__init__": 8,
    "__main__": 8,
}
APART = {("passes", "runtime"), ("runtime", "passes")}


def rank(name: str) -> int:
    """The rank of the longest prefix; KeyError for a module that has none."""
    parts = name.split(".")
    return RANKS[next(p for p in (".".join(parts[:n]) for n in range(len(parts), 0, -1)) if p in RANKS)]


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_from_lower_or_equal_ranks(name: str) -> None:
    for used in imports(modules()[name]):
        assert rank(used) <= rank(name), f"{name} (rank {rank(name)}) imports {used} (rank {rank(used)})"
        assert (name.split(".")[0], used.split(".")[0]) not in APART, f"{name} imports {used}"


def test_nothing_imports_in_a_circle() -> None:
    """What is imported for annotations imports nothing when the program runs."""
    graph = nx.DiGraph((name, used) for name, path in modules().items() for used in imports(path, running=True))
    assert list(nx.simple_cycles(graph)) == []


def test_only_the_target_knows_the_devices() -> None:
    """Operators and entry points ask it. A folder of the runtime is a device's own; the schedule is none's."""
    asked = [name for name, path in modules().items() if "runs_texts" in path.read_text()]
    assert [name for name in asked if not name.startswith("runtime.cuda")] == ["runtime.target"]
    devices = {f"runtime.{p.name}" for p in (ROOT / "runtime").iterdir() if p.is_dir()} - {"runtime.schedule"}
    assert {"runtime.cpu", "runtime.cuda"} <= devices
    for name, path in modules().items():
        parts = name.split(".")
        if parts[0] == "runtime" and name != "runtime.target" and ".".join(parts[:2]) not in devices:
            found = [used for used in imports(path) if ".".join(used.split(".")[:2]) in devices]
            assert found == [], (name, found)


def test_numerics_imports_neither_torch_nor_the_rest() -> None:
    for name, path in modules().items():
        if name.startswith("numerics"):
            assert not [n for n in imported(path) if n.partition(".")[0] == "torch"], name
            assert all(used.startswith("numerics") or used in ("errors", "short_reprs") for used in imports(path)), name


# What both sides share: the rows of formats, the rules of modes, the definitions of faults.
SPECIFICATION = ("numerics.specification",)
ALGORITHM = ("numerics.arithmetic", "numerics.elementary")


@pytest.mark.parametrize("side, other", [(SPECIFICATION, ALGORITHM), (ALGORITHM, SPECIFICATION)])
def test_specification_and_algorithm_share_no_code(side: tuple[str, ...], other: tuple[str, ...]) -> None:
    """An error in code of both would be in the result and in what it is compared with: neither reaches the other."""
    graph = nx.DiGraph((name, used) for name, path in modules().items() for used in imports(path))
    mine = {name for name in modules() if name.startswith(side)}
    reached = set().union(*(nx.descendants(graph, name) for name in mine if name in graph))
    assert len(mine) > 3
    assert {name for name in reached if name.startswith(other)} == set()


def test_private_interfaces_of_torch_stay_with_capture_and_graph() -> None:
    private = ("torch._dynamo", "torch._functorch", "torch._guards", "torch._subclasses", "torch._decomp", "_pytree.Py")
    for name, path in modules().items():
        if name not in (
            "capture",
            "capture.attribute_reads",
            "capture.counting_numbers",
            "capture.ctc_shapes",
            "capture.least_squares",
            "capture.torch_private",
            "capture.derivatives",
            "capture.dict_keys",
            "capture.traced_aliases",
            "capture.traced_packing",
            "capture.transforms",
            "capture.dynamo",
            "capture.fake_results",
            "capture.guards",
            "capture.numbers",
            "capture.numpy_numbers",
            "capture.python_gaps",
            "capture.python_values",
            "capture.readings",
            "capture.replayed_guards",
            "capture.unset_names",
            "graph.values",
            "graph.site",
        ):
            assert not [p for p in private if p in path.read_text()], f"{name} uses a private interface of torch"


def test_most_files_are_short() -> None:
    """A file is as long as its idea; that most ideas are short is a property of the whole."""
    lengths = sorted(len(path.read_text().splitlines()) for path in modules().values())
    assert lengths[len(lengths) // 2] <= 180
    assert lengths[len(lengths) * 9 // 10] < 350


@pytest.mark.parametrize(
    "file",
    ["numerics/formats/rows.py", "numerics/modes/rows.py", "numerics/formats/scaled/rows.py", "policy/presets.py"],
)
def test_rows_live_in_files_that_hold_nothing_else(file: str) -> None:
    """Rows, and at most a private function that spells some of them shortly."""
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr, ast.FunctionDef)
    assert [ast.unparse(node) for node in tree.body if not isinstance(node, kinds)] == []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) <= 1 and all(node.name.startswith("_") for node in functions)


def test_a_folder_of_tests_is_a_folder_of_the_package() -> None:
    """Tests of one folder are in its mirror, those of the whole in tests/ itself, what they share in tests/support/."""
    tests = ROOT.parent / "tests"
    folders = {p.parent.relative_to(tests).as_posix() for p in tests.rglob("*.py")}
    assert folders - {".", "support"} <= {p.name for p in ROOT.iterdir() if p.is_dir()}
    assert [p for p in tests.rglob("*.py") if (p.parent.name == "support") == p.name.startswith("test_")] == [
        tests / "conftest.py"
    ]


def test_importing_imports_no_optional_package() -> None:
    """Reports, workers and progress import theirs when they are asked for: importing fxround stays quick."""
    optional = {"scipy", "matplotlib", "pandas", "rich", "joblib", "cloudpickle", "significantdigits", "sklearn"}
    optional |= {"torchmetrics", "tqdm", "xarray"}
    for name, path in modules().items():
        top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        used = {a.name for n in top for a in n.names if isinstance(n, ast.Import)}
        used |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
        assert not {u.partition(".")[0] for u in used} & optional, name


def test_the_design_names_files_and_folders_that_exist() -> None:
    """The rooms of docs/design.md, and the files that its table and its text point to."""
    text = (ROOT.parent / "docs" / "design.md").read_text()
    rooms = re.findall(r"^    ([a-z_]+)/ ", text, re.M)
    assert len(rooms) >= 14 and {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(rooms)
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text)
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT.parent))]
    assert len(named) > 20 and missing == []
    bare = re.findall(r"`([a-z_]+\.py)`", text)
    files = {path.name for room in ("fxround", "tests", "benchmarks") for path in (ROOT.parent / room).rglob("*.py")}
    assert len(bare) > 10 and set(bare) <= files


# What design.md names with a dot that is no module of fxround, or in none: other packages, and objects of a user.
OTHERS = {"benchmarks", "torch", "fractions", "fxround", "mkdocs", "compiled", "report"}


def test_the_design_names_modules_and_functions_that_exist() -> None:
    """A dotted name begins with a module, by its path below fxround or the end of that, and goes on with its names."""
    text = (ROOT.parent / "docs" / "design.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?:\(.*?\))?`", text))
    own = {name for name in named if name.partition(".")[0] not in OTHERS and not name.endswith(".py")}
    assert len(own) > 20 and {name for name in own if not exists(name)} == set()
    assert not exists("passes.entries") and not exists("compiler.captures.Captures.entrance")


def exists(name: str) -> bool:
    """Whether a module of fxround whose name ends as ``name`` begins has the rest of ``name``."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        prefix = ".".join(parts[:n])
        for module in (m for m in modules() if m == prefix or m.endswith(f".{prefix}")):
            value: object = import_module(f"fxround.{module}")
            for part in parts[n:]:
                value = getattr(value, part, None)
            if value is not None:
                return True
    return False


def test_the_design_lists_the_passes_in_their_order() -> None:
    text = (ROOT.parent / "docs" / "design.md").read_text()
    listed = re.search(r"passes\.LOWERING +([a-z_,\s]+);", text)
    assert listed is not None
    assert listed[1].replace(",", " ").split() == [step.__name__ for step in LOWERING]


def test_no_stock_kernel_is_an_oracle_of_bits() -> None:
    """tests/support/stock_oracles.py has the rule and the mark; ./run foreign finds what it cannot read."""
    assert stock_oracles.files(ROOT.parent / "tests") == []


@pytest.mark.parametrize(
    "line",
    [
        "assert torch.equal(compiled(x), a @ b)",
        "assert (got == F.conv2d(x, w)).all()",
        "want = x.mean(); assert 0 < got == want",
        "same(got, torch.softmax(x, -1).detach().numpy())",
        "want = fxround.round(x, 'bf16') @ w.T; assert want.any() and torch.equal(net(x), want)",
        "want, other = 2 * x.sum(1), 1; assert got.equal(want.reshape(-1))",
        "assert [torch.equal(a, b) for a, b in pairs] and got.tolist() == torch.stack([x.exp(), y]).tolist()",
        "assert torch.equal(got, x.double().sqrt_().float())  # rounded once",
    ],
)
def test_an_oracle_of_bits_is_seen(line: str) -> None:
    assert len(stock_oracles.found(f"def test():\n    {line}\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "assert torch.equal(OPS.sum(x, 1), want) and torch.equal(fxround.exp(x), want)",
        "assert torch.equal(compiled(a @ b), reference(a @ b))",
        "assert torch.allclose(got, a @ b)",
        "assert (got != x).sum() == 3 and rationals.sqrt(x) == want",
        "assert torch.equal(got, a + b * 2)",
        "assert torch.equal(got, x.sum(1))  # stock: small integers",
        "want = x.sum(1)  # stock: small integers\n    assert torch.equal(got, want)",
    ],
)
def test_other_comparisons_are_none(line: str) -> None:
    text = f"import fxround, rationals\ndef test():\n    {line}\n"
    assert stock_oracles.found(text) == []
