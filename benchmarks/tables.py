"""Write the tables of the pages in DOCUMENTS and OF_OTHER_TABLES from the figures under benchmarks/results/.

    python -m benchmarks.tables

A file of results holds tables by name: ``columns``, ``numbers`` (the columns that hold numbers), ``rows``, and the
conditions of the measurement (CONDITIONS), as far as they are known. ``shown`` names the rows that the page has, by
their first cell; without it the page has all. A mark ``<!-- table: NAME -->`` in the page is followed by the table and
its conditions, up to ``<!-- end -->``. New figures go into the file of results, and this command writes the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = tuple(ROOT / "docs" / page for page in ("performance.md", "measurements.md", "attribution.md"))
# Pages that have other tables, too.
_OTHER_PAGES: Final = (
    "complex.md",
    "distributed.md",
    "few-bits.md",
    "graphs.md",
    "gallery/crystals.md",
    "gallery/faces.md",
    "gallery/images.md",
    "gallery/pitch.md",
    "gallery/sentences.md",
    "linear-algebra.md",
    "platforms.md",
    "published.md",
    "science.md",
)
OF_OTHER_TABLES: Final = tuple(ROOT / "docs" / page for page in _OTHER_PAGES)
RESULTS: Final = ROOT / "benchmarks" / "results"
# What a table says of its measurement, in this order, and the words before it.
CONDITIONS: Final = {"command": "", "machine": "", "date": "", "torch": "torch ", "packages": "", "load": "load "}
# Results of another form.
OTHERS: Final = ("bits", "torch_names")
_MARKED: Final = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> dict[str, dict[str, Any]]:
    """Return every table by its name. Raises ValueError for a name in two files, and for a row of another length."""
    named: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem in OTHERS:
            continue
        for name, table in json.loads(path.read_text(encoding="utf-8")).items():
            if name in named:
                raise ValueError(f"{path}: the table {name} is in another file, too")
            if any(len(row) != len(table["columns"]) for row in table["rows"]):
                raise ValueError(f"{path}: a row of {name} does not have {len(table['columns'])} cells")
            named[name] = table
    return named


def text_of(table: dict[str, Any]) -> str:
    """Return a table and its conditions as Markdown. Raises ValueError for a row in ``shown`` that is not there."""
    labels = [row[0] for row in table["rows"]]
    shown = table.get("shown", labels)
    if missing := set(shown) - set(labels):
        raise ValueError(f"no row is named {', '.join(sorted(missing))}")
    rules = ["--:" if i in table["numbers"] else "---" for i in range(len(table["columns"]))]
    lines = [table["columns"], *(row for row in table["rows"] if row[0] in shown)]
    written = [f"| {' | '.join(line)} |" for line in lines]
    written.insert(1, f"|{'|'.join(rules)}|")
    conditions = [f"{word}{table[key]}" for key, word in CONDITIONS.items() if key in table]
    if "command" in table:
        conditions[0] = f"`{conditions[0]}`"
    return "\n" + "\n".join(written) + "\n\n" + (f"*{', '.join(conditions)}.*\n\n" if conditions else "")


def written(document: str) -> str:
    """Return the page with the text after each mark replaced. Raises ValueError for a mark without a table."""
    named = tables()
    marks = [name for _, name, _ in _MARKED.findall(document)]
    if unknown := set(marks) - set(named):
        raise ValueError(f"the page has marks for {', '.join(sorted(unknown))}; no file of results has such a table")
    return _MARKED.sub(lambda mark: mark[1] + text_of(named[mark[2]]) + mark[3], document)


def main() -> None:
    """Write the tables into the documents."""
    for document in (*DOCUMENTS, *OF_OTHER_TABLES):
        document.write_text(written(document.read_text(encoding="utf-8")), encoding="utf-8")
        print(document)


if __name__ == "__main__":
    main()
