"""The documents run: every Python block of a document, in order, in one namespace, and every fxround command."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from models import hugging_face, vision

import fxround
from benchmarks import tables, walk
from benchmarks.pictures import FOLDER, PICTURES, UNREPEATABLE
from fxround import cli
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import MODES
from fxround.operators.formulas import FORMULAS, TABLES
from fxround.operators.formulas.table import COMPLEX_FORMULAS
from fxround.operators.rules import Kind
from fxround.policy import PRESETS, ROLES
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.significance.metrics import METRICS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# Its sections are about tools that need not be there together: each runs by itself.
OTHER_TOOLS = ROOT / "docs" / "with-other-tools.md"
SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", OTHER_TOOLS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
)
# The sections whose tools `./run tools` installs, and which are not among the tests' requirements.
OF_RUN_TOOLS = {
    "Lightning": "lightning",
    "PEFT": "peft",
    "Summaries and counts": "torchinfo",
    "TensorBoard": "tensorboard",
    "Weights & Biases": "wandb",
    "skorch": "skorch",
    "torchao: no": "torchao",
}

# Words of blocks that only a run with --long takes: they repeat, in seconds each, what tests of their subjects do.
LONG = {
    "distributed.md": ("torchrun", "world_sizes=[2]"),
    "language-models.md": ("Generating(", "T5Config(", "perplexity(", "Trainer(", "DynamicCache()"),
    "loops.md": ("pack_padded_sequence",),
    "reproducibility.md": ("fxround.selftest()",),
    "training.md": ("resumed.py", "torchrun", "step.pt2", "Forces("),
    "variability.md": ("isolate=",),
}


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path != OTHER_TOOLS], ids=lambda path: path.name)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = LONG.get(document.name, ())
    code = blocks(document.read_text(encoding="utf-8"), "python")
    assert all(any(word in block for block in code) for word in words)
    monkeypatch.chdir(tmp_path)
    run(document, [block for block in code if not any(word in block for word in words)], monkeypatch)


@pytest.mark.parametrize("tool", SECTIONS)
def test_snippets_of_other_tools_run(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = blocks(SECTIONS[tool], "python")
    assert code and OF_RUN_TOOLS.keys() <= SECTIONS.keys()
    if tool in OF_RUN_TOOLS and not find_spec(OF_RUN_TOOLS[tool]):
        pytest.skip(f"{OF_RUN_TOOLS[tool]} is not installed: ./run tools installs it and runs this")
    if find_spec("torchvision"):  # which some of the tools import
        vision()
    monkeypatch.chdir(tmp_path)
    run(OTHER_TOOLS, code, monkeypatch, re.sub(r"\W", "_", tool))


@pytest.mark.long
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name in LONG], ids=lambda path: path.name)
def test_all_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(document, blocks(document.read_text(encoding="utf-8"), "python"), monkeypatch, "whole_")


def run(document: Path, code: list[str], monkeypatch: pytest.MonkeyPatch, kind: str = "") -> None:
    """Run blocks of a document in one namespace, that of a module whose name no other one has had."""
    # A module that can be imported, as that of a user's file can: Dynamo does, for functions that a graph inlines.
    module = ModuleType(kind + document.stem)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    if any("transformers" in block for block in code):
        pytest.importorskip("transformers")
        hugging_face()
    for block in code:
        if "transformers.Trainer" in block and not find_spec("accelerate"):
            continue
        exec(compile(block, document.name, "exec"), namespace)


COMMANDS = [
    (document.name, line.removeprefix("$ ").partition("  #")[0].strip())
    for document in DOCUMENTS
    for block in blocks(document.read_text(encoding="utf-8"), "console")
    for line in block.splitlines()
    if line.startswith("$ fxround ")
]


@pytest.mark.parametrize("document, command", COMMANDS)
def test_commands_run(document: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0


@pytest.mark.part(2)
@pytest.mark.parametrize("name", sorted({*PICTURES} - {*UNREPEATABLE}))
def test_pictures_are_what_the_command_draws(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name](), "python -m benchmarks.pictures"


def test_the_readme_says_what_its_picture_shows() -> None:
    picture = (FOLDER / "roundings.svg").read_text(encoding="utf-8")
    bits = dict(re.findall(r">([\w.]+)</text><text [^>]*>([\d.]+) bits<", picture))
    said = f"keeps {bits['exp']} of its 24\nbits in the mean, and the probabilities keep {bits['result']}"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(walk.ISA not in instruction_sets(), reason=f"the walks show code for {walk.ISA}")
def test_the_walks_are_what_the_code_makes() -> None:
    document = walk.DOCUMENT.read_text(encoding="utf-8")
    assert walk.written(document) == document, "python -m benchmarks.walk"


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_results(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    assert tables.written(document) == document, "python -m benchmarks.tables"
    # Every table of the page is one of the results, and any other figure in one would be replaced.
    assert len(re.findall(r"^\|[-:|]+\|$", document, re.MULTILINE)) == document.count("<!-- table: ") > 0
    rule = re.search(r"^\|[-:|]+\|$", document, re.MULTILINE)
    assert rule is not None
    row = document[rule.end() + 1 :].partition("\n")[0]
    changed = document.replace(row, f"| 17 {row}")
    assert changed != document and tables.written(changed) == document


@pytest.mark.parametrize("path", tables.OF_OTHER_TABLES, ids=lambda path: path.name)
def test_some_tables_are_those_of_the_results(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    assert "<!-- table: " in document and tables.written(document) == document, "python -m benchmarks.tables"


def test_a_mark_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="marks for unknown"):
        tables.written("<!-- table: unknown -->\n<!-- end -->")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / link).exists(), link


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: fxround\.(\w+)$", text, re.MULTILINE)
    mappings = {"formats", "modes", "policies"}
    assert sorted(listed) == sorted({*fxround.__all__, "compile", "hash", "round"} - mappings)
    assert all(f"`fxround.{name}`" in text for name in mappings)


def test_the_site_has_every_page() -> None:
    navigation = re.findall(r"^ +- .*: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(navigation) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def test_docstrings_become_lists_and_code() -> None:
    pytest.importorskip("griffe", reason="the extra docs reads docstrings")
    markdown = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["markdown"]
    lists = markdown(inspect.getdoc(fxround.Rule))
    assert "S parts of it in a tree, and those of the k of a contraction\n- `optional`: whether" in lists
    assert '\n\n```python\nRule("layer1", operator="contraction"' in lists
    shown = [markdown(inspect.getdoc(getattr(fxround, name)) or "") for name in fxround.__all__]
    assert not [text for text in shown if "::\n" in text]
    assert not [line for text in shown for line in text.splitlines() if re.match(r"[a-z_]+ {2,}\S", line)]


def format_row(f: Format) -> str:
    kinds = (("inf", f.inf), ("nan", f.nan), ("zero", f.zero), ("sign", f.signed))
    has = ", ".join(word for word, held in kinds if held)
    sizes = f"{f.precision} | {f.emin} | {f.emax} | {f.maximum:g} | 2^{f.quantum_exponent}"
    return f"| `{f.name}` | {sizes} | {has} | {f.default_overflow} |"


ROWS = {
    ("numerics.md", "formats"): [format_row(f) for f in FORMATS.values()],
    ("numerics.md", "modes"): [f"| `{name}` |" for name in MODES],
    ("numerics.md", "formulas"): sorted({(f.__doc__ or "").strip() for f in FORMULAS.values()}),
    ("complex.md", "formulas"): sorted({f.__doc__.strip() for f in COMPLEX_FORMULAS.values() if f.__doc__}),
    ("reproducibility.md", "formulas"): sorted({(f.__doc__ or "").strip() for f in TABLES["repdl"].values()}),
    ("variability.md", "metrics"): [f"| `{m.name}` | {m.meaning} |" for m in METRICS.values()],
    ("policies.md", "presets"): [f"`{name}`" for name in PRESETS],
    ("policies.md", "roles"): [f"`{name}`" for name in ROLES],
    ("policies.md", "kinds"): [f"`{name}`" for name in get_args(Kind)],
}


@pytest.mark.parametrize("document, registry", ROWS)
def test_every_row_of_a_registry_is_documented(document: str, registry: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    rows = ROWS[document, registry]
    assert len(rows) > 5
    assert [row for row in rows if row not in text] == []
