"""Reports: one page without a network, plots of the report's numbers, checks, and the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import cli
from fxround.significance.recorder import Measured
from fxround.significance.report import CheckFailed, drawing, plots


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


X = torch.rand(9, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().eval()


@pytest.fixture(scope="module")
def report(net: nn.Module) -> fxround.VariabilityReport:
    return fxround.variability(net, X, samples=6, capture="nodes", isolate="layers")


class Page(HTMLParser):
    """Open tags, and every address that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(report: fxround.VariabilityReport, tmp_path: Path) -> None:
    text = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    page = Page()
    page.feed(text)
    assert page.open == []
    assert {"table", "svg", "pre"} <= page.tags and not {"link", "img", "iframe"} & page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import", text)
    archive = re.search(r'id="report">(.*?)</script>', text)
    assert archive is not None and json.loads(archive[1]) == report.to_dict()
    for figures in report.places:
        assert f"{figures.bits:.1f} bits" in text or figures.bits is None
    for fact in ("sha256:", torch.__version__, "&quot;seed&quot;: 0", "rounding = &quot;dtype/stochastic/inf&quot;"):
        assert fact in text


def test_the_graph_is_coloured_by_bits_lost() -> None:
    borders = [drawing.shade(lost)[1] for lost in (-1, 0, 4.9, 5, 19, 24, 53)]
    assert borders == ["#2b8a3e", "#2b8a3e", "#2b8a3e", "#74a312", "#e8590c", "#c92a2a", "#c92a2a"]


def test_a_drawing_says_the_bits_of_every_operation(report: fxround.VariabilityReport, tmp_path: Path) -> None:
    path = report.draw(tmp_path / "graph.svg", step=2)
    texts = [e.text for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert {f"{f.bits:.1f} bits" for f in report.places if f.bits is not None} < set(texts)
    assert {"0 to 2 bits lost", "more than 8 lost"} < set(texts)


def test_a_report_without_a_graph_and_other_files_are_refused(report: fxround.VariabilityReport) -> None:
    with pytest.raises(ValueError, match="no graph"):
        replace(report, graph=None).draw("graph.svg")
    with pytest.raises(ValueError, match=r"ends in \.svg"):
        report.draw("graph.png")
    with pytest.raises(ValueError, match="step is 0"):
        report.draw("graph.svg", step=0)


def test_plots_show_the_reports_numbers(report: fxround.VariabilityReport, tmp_path: Path) -> None:
    figure = report.plot(tmp_path / "bits.png")
    assert (tmp_path / "bits.png").read_bytes()[:4] == b"\x89PNG"
    bits, over_elements, samples = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in bits.get_lines()}
    np.testing.assert_array_equal(lines["worst"], [np.nan if f.worst is None else f.worst for f in report.places])
    np.testing.assert_array_equal(lines["= binary64"], [f.agreement["binary64"].bits for f in report.places])
    assert [bar.get_height() for bar in over_elements.patches] == list(report["output"].histogram)
    assert [t.get_text() for t in samples.get_yticklabels()] == [
        "label_flips\n(worst: greatest)",
        "max_ulp\n(worst: greatest)",
        "sqnr\n(worst: least)",
    ]


def test_the_same_report_is_the_same_picture(report: fxround.VariabilityReport) -> None:
    text = plots.svg(report)
    assert text == plots.svg(report)
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_one_site_alone_loses_less_than_all_together(report: fxround.VariabilityReport) -> None:
    assert [f.place.name for f in report.isolated] == ["first", "(root)", "second"]
    for alone in report.isolated:
        assert alone.norm is not None and alone.norm > report["output"].norm - 0.5
    assert "perturbed alone" in str(report)


def test_operators_alone(net: nn.Module) -> None:
    found = fxround.variability(net, X, samples=5, isolate="operators", reference=None)
    assert [f.place.name for f in found.isolated] == ["aten.mm.default", "aten.add.Tensor", "aten.tanh.default"]


def test_checks_say_everything_that_fails(report: fxround.VariabilityReport) -> None:
    assert report.check() is report.check(min_bits=1, max_flips=0) is report
    with pytest.raises(CheckFailed) as failed:
        report.check(min_bits=23.9, min_worst=23.9)
    assert re.fullmatch(
        r"output: [\d.]+ bits, expected at least 23.9; "
        r"output: [\d.]+ bits in the worst element, expected at least 23.9",
        str(failed.value),
    )
    with pytest.raises(KeyError, match="no figures of 'third'; there are output, mm"):
        report["third"]


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach() * 1.0).log()


def test_the_first_nan_is_named() -> None:
    found = fxround.variability(Breaking(), X, samples=5, capture="nodes", reference=None)
    assert found["output"].nonfinite == 54
    assert any(line.startswith("First NaN or infinity: log (aten.log.default, test_report") for line in found.findings)
    with pytest.raises(CheckFailed, match="54 elements are not finite, first in sample 0"):
        found.check()
    assert found.check(allow_nonfinite=True) is found


# ---- the command line ----

MODEL = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), torch.rand(6, 4)

def bare():
    return build()[0]

def loader():
    return DataLoader(TensorDataset(torch.rand(6, 4), torch.zeros(6)), batch_size=4)

def largest(sample, other):
    return (sample - other).abs().max()
"""


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = tmp_path / f"study_{abs(hash(request.node.name))}.py"
    path.write_text(MODEL)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(("variability", *arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_and_writes(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    arguments = (
        "--samples",
        "5",
        "--reference",
        "none",
        "--html",
        str(page),
        "--json",
        str(data),
        "--metric",
        "sqnr",
        "--min-bits",
        "10",
    )
    status, text, error = run(capsys, f"{file}:build", *arguments)
    assert (status, error) == (0, "")
    assert "5 samples of 6 inputs" in text and "sqnr" in text
    assert [f["place"]["name"] for f in json.loads(data.read_text())["figures"]] == ["output", "0", "1"]
    assert page.read_text().startswith("<!doctype html>")


def test_the_exit_status_is_a_verdict(
    capsys: pytest.CaptureFixture[str], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text, error = run(
        capsys, f"{file}:build", "--samples", "5", "--reference", "none", "--json", "-", "--min-worst", "23.5"
    )
    assert status == 1 and "expected at least 23.5" in error
    assert json.loads(text)["samples"] == [5]
    stop = iter([False, False, *[True] * 99])
    monkeypatch.setattr("fxround.significance.variability.interruptible", lambda: _always(lambda: next(stop)))
    status, text, error = run(capsys, f"{file}:build", "--samples", "50", "--reference", "none")
    assert status == 130 and "INTERRUPTED" in text and "interrupted" in error


class _always:  # noqa: N801 (a context manager, as the function that it stands for)
    def __init__(self, value: Any) -> None:
        self.value = value

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *error: Any) -> None:
        return None


@pytest.mark.parametrize("kind", [".npy", ".npz", ".pt", "loader", "shape"])
def test_inputs_come_from_files_and_functions(
    capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path, kind: str
) -> None:
    path, x = tmp_path / f"inputs{kind}", torch.rand(6, 4)
    if kind == ".npy":
        np.save(path, x.numpy())
    elif kind == ".npz":
        np.savez(path, input=x.numpy())
    elif kind == ".pt":
        torch.save(x, path)
    given = {"loader": ("--inputs", f"{file}:loader"), "shape": ("--shape", "6,4")}.get(kind, ("--inputs", str(path)))
    status, text, _ = run(
        capsys, f"{file}:bare", *given, "--samples", "5", "--capture", "outputs", "--reference", "none"
    )
    assert status == 0 and "of 6 inputs" in text


def test_the_choices_of_metrics_are_arguments(capsys: pytest.CaptureFixture[str], file: str) -> None:
    chosen = ("--metric", "label_flips", "--metric", f"{file}:largest", "--class-dim", "-1", "--better", "lower")
    given = ("--samples", "5", "--reference", "none", "--json", "-")
    status, text, _ = run(capsys, f"{file}:build", *chosen, *given)
    flips, largest = json.loads(text)["metrics"]
    assert status == 0 and flips["of"] == 6 and largest["worst"] == max(largest["values"])
    status, text, _ = run(
        capsys, f"{file}:bare", "--inputs", f"{file}:loader", "--metric", "dice", "--against", "target", *given
    )
    assert status == 0 and len(json.loads(text)["metrics"][0]["classes"]) == 3
    status, text, _ = run(capsys, f"{file}:build", "--metric", "label_flips", "--threshold", "0.0", *given)
    assert status == 0 and json.loads(text)["metrics"][0]["labels"] == 18


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("{file}:bare",), "give --inputs or --shape"),
        (("{file}:build", "--inputs", "nosuch.npy"), "nosuch.npy"),
        (("{file}:build", "--metric", "bleu"), "no metric is named 'bleu'"),
        (("{file}:build", "--samples", "1"), "needs at least 2"),
        (("{file}:build", "--class-dim", "1"), "--class-dim: without --metric, no metric has such a choice"),
        (("{file}:build", "--metric", "sqnr", "--threshold", "0"), "--threshold: sqnr has no such choice"),
        (("{file}:build", "--metric", "dice", "--better", "higher"), "--better: dice has no such choice"),
        (
            ("{file}:build", "--metric", "dice", "--against", "target"),
            "dice is compared with targets, and the data have",
        ),
        (("{file}:build", "--max-flips", "0", "--metric", "sqnr", "--samples", "5"), "Ask for it with metrics="),
    ],
)
def test_mistakes_end_with_status_2(
    capsys: pytest.CaptureFixture[str], file: str, arguments: tuple[str, ...], message: str
) -> None:
    status, _, error = run(capsys, *(a.format(file=file) for a in arguments))
    assert status == 2 and message in error and error.startswith("fxround: ")


class Volumes(nn.Module):
    """Voxels [n, 1, depth, height, width] just above 0, of which roundings in bfloat16 move some below."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0) - 1.0


def test_flips_of_volumes_are_counted_by_voxels() -> None:
    x = torch.full((2, 1, 4, 4, 4), 2.0**-10)
    flips = fxround.metric("label_flips", threshold=2.0**-11)
    options: dict[str, Any] = {"samples": 20, "metrics": [flips], "reference": None, "seed": 3, "progress": False}
    report = fxround.variability(Volumes(), x, "bfloat16/stochastic", **options)
    measured = report.metric("label_flips")
    # Each voxel rounds to 0 in seven of eight samples: 2^-10 is an eighth of the distance of bfloat16 numbers above 1.
    assert measured.labels == 128 and measured.changed == 128 and measured.rows == (0, 1)
    assert "Labels that change in any sample: 128 of 128, in 2 of 2 inputs (rows 0, 1)." in report.findings
    assert "<b>128 of 128</b><span>labels change" in report.to_html()
    with pytest.raises(CheckFailed, match=r"128 of 128 labels changed, allowed: 0\.5 of all"):
        report.check(max_flips=0.5)
    few = fxround.variability(Volumes(), x, "bfloat16/stochastic", **(options | {"samples": 2}))
    share = few.metric("label_flips").changed / 128
    assert 0.9 < share <= 1 and few.check(max_flips=share) is few


def test_a_notebook_shows_what_a_reader_must_see() -> None:
    report = fxround.variability(Net().eval(), torch.randn(4, 6), samples=3, reference=None, progress=False)
    shown = replace(report, complete=False, undrawn=("first",))._repr_html_()
    for text in (
        "Net, 53 parameters: policy stochastic, 3 samples of 4 inputs",
        "INTERRUPTED",
        "WARNING",
        "Labels that change",
    ):
        assert text in shown
    assert "bits: CNH" in shown and shown.count("<table") == len(report.tables)


def test_the_worst_value_says_which_it_is(report: fxround.VariabilityReport) -> None:
    high = Measured("mine", "", "", "higher", (3.0, 1.0, 2.0))
    low = replace(high, name="other", better="lower")
    equal, unknown = replace(high, values=(1.0, 1.0)), replace(high, better="")
    pairs = replace(high, name="dice_pairs")
    rows = list(replace(report, metrics=(high, low, equal, unknown, pairs)).metrics_table())
    assert [row["worst"] for row in rows] == ["1", "3", "1", "", "1"]
    assert [row["which is"] for row in rows] == [
        "the least, sample 1",
        "the greatest, sample 0",
        "the least, in all",
        "",
        "the least, pair 1",
    ]


def test_the_worst_element_is_named(report: fxround.VariabilityReport) -> None:
    worst = report.outputs[0]
    (sentence, *_) = report.worst_elements
    assert f"the worst element is {list(worst.worst_at)}, {worst.worst:.2f} bits" in sentence
    assert sentence in str(report) and sentence in report.to_html() and sentence in report._repr_html_()


def test_a_repr_is_one_line(report: fxround.VariabilityReport) -> None:
    for value in (report, report.table(), fxround.describe("mxfp8")):
        assert len(repr(value)) < 200 and repr(value).startswith(f"<{type(value).__name__}: ")
