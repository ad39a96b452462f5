"""Parts of a study that several jobs take: merged, they are the study, bit for bit."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import cli
from fxround.significance.figures import plain


class Segments(nn.Module):
    """Logits of three classes for each of 6 x 6 pixels; the samples' labels differ where two logits are near."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Segments().eval()


X = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(2))
# Three bits of precision change labels. Batches of three rows and of two.
OPTIONS: dict[str, Any] = {
    "policy": "sbits(6)/stochastic",
    "capture": "layers",
    "batch_size": 3,
    "metrics": (
        "sqnr",
        "max_ulp",
        "label_flips",
        "dice",
        "dice_pairs",
        lambda sample, quiet: float(sample[0, 0, 0, 0]),
    ),
}


def figures_of(report: fxround.VariabilityReport) -> dict[str, Any]:
    """All figures with all their digits, and what is said of them, without the cost of the run."""
    data = report.to_dict()
    del data["provenance"]
    exact = [[f.bits, f.norm, f.contributing, f.worst_mean, f.worst_sigma] for f in report.figures]
    return data | {"exact": plain([[None if v is None else v.hex() for v in values] for values in exact])}


def bits_of(report: fxround.VariabilityReport, batch: int) -> Tensor:
    """The bits of each element of a batch's result, as integers that are equal for NaN too."""
    return torch.from_numpy(report.bits(batch=batch)).view(torch.int32)


@pytest.fixture(scope="module")
def whole(net: nn.Module) -> fxround.VariabilityReport:
    return fxround.variability(net, X, samples=8, **OPTIONS)


@pytest.fixture(scope="module")
def parts(net: nn.Module) -> list[fxround.VariabilityReport]:
    """Samples 0 to 2, 3, and 4 to 7: no boundary is one of the groups of five in which results are added."""
    ranges = ((0, 3), (3, 1), (4, 4))
    return [fxround.variability(net, X, samples=n, first_sample=first, **OPTIONS) for first, n in ranges]


def test_the_merged_report_is_that_of_one_study_whatever_the_order(
    whole: fxround.VariabilityReport, parts: list[fxround.VariabilityReport]
) -> None:
    assert whole.metric("label_flips").changed > 0 and len(whole.metric("dice_pairs").values) == 28
    for order in permutations(parts):
        merged = fxround.merge(order, samples=8)
        assert figures_of(merged) == figures_of(whole)
        assert [m.values for m in merged.metrics] == [m.values for m in whole.metrics]
        assert str(merged) == str(whole)
        for batch in range(2):
            assert torch.equal(bits_of(merged, batch), bits_of(whole, batch))
            assert torch.equal(*(torch.from_numpy(r.elements.inputs[batch]) for r in (merged, whole)))


def test_saved_and_loaded_parts_are_the_same_reports(
    whole: fxround.VariabilityReport, parts: list[fxround.VariabilityReport], tmp_path: Path
) -> None:
    paths = [part.save(tmp_path / f"{i}.report") for i, part in enumerate(parts)]
    loaded = [fxround.load_report(path) for path in paths]
    assert [figures_of(part) for part in loaded] == [figures_of(part) for part in parts]
    assert set(loaded[0].graph) == set(parts[0].graph)
    merged = fxround.merge(loaded)
    assert figures_of(merged) == figures_of(whole)
    again = fxround.load_report(merged.save(tmp_path / "merged.report"))
    assert figures_of(again) == figures_of(whole) and again.to_html() == merged.to_html()
    assert torch.equal(bits_of(again, 1), bits_of(whole, 1))
    assert torch.equal(torch.from_numpy(again.elements.inputs[1]), X[3:])


def test_a_part_is_the_report_of_its_own_samples(whole: fxround.VariabilityReport, net: nn.Module) -> None:
    part = fxround.variability(net, X, samples=8, first_sample=0, **OPTIONS)
    assert figures_of(part) == figures_of(whole)


def test_a_reference_of_ones_own_and_interrupted_reports(net: nn.Module) -> None:
    options = {"policy": "sbits(6)/stochastic", "reference": net(X).detach() + 1, "batch_size": 3}
    whole = fxround.variability(net, X, samples=5, **options)
    parts = [fxround.variability(net, X, samples=n, first_sample=first, **options) for first, n in ((0, 2), (2, 3))]
    assert figures_of(fxround.merge(parts)) == figures_of(whole)
    with pytest.raises(ValueError, match="the report from sample 2 on was interrupted"):
        fxround.merge([parts[0], replace(parts[1], complete=False)])


@pytest.mark.parametrize(
    "which, samples, message",
    [
        ((1, 2), None, "samples 0 to 2 are missing"),
        ((0, 2), None, "samples 3 to 3 are missing, after the report of samples 0 to 2"),
        ((0, 1, 1, 2), None, "sample 3 is there twice: reports have sample 3 and sample 3"),
        ((0, 1), 8, "the reports have 4 samples together; expected 8"),
        ((), None, "no reports"),
    ],
)
def test_missing_and_repeated_samples_are_errors(
    which: tuple[int, ...], samples: int | None, message: str, parts: list[fxround.VariabilityReport]
) -> None:
    with pytest.raises(ValueError, match=message):
        fxround.merge([parts[i] for i in which], samples=samples)


def test_reports_of_other_studies_are_errors(net: nn.Module, parts: list[fxround.VariabilityReport]) -> None:
    def other(what: str, model: nn.Module = net, inputs: Tensor = X, **changed: Any) -> None:
        report = fxround.variability(model, inputs, samples=1, first_sample=3, **{**OPTIONS, **changed})
        with pytest.raises(ValueError, match=f"of samples 0 to 2 and of sample 3 have different {what}"):
            fxround.merge([parts[0], report])

    other("models", model=Segments().eval())
    other("policies", policy="sbits(7)/stochastic")
    other("seeds", seed=1)
    other("inputs", inputs=X.flip(0))
    other("inputs", batch_size=5)
    other("values of capture", capture="outputs")
    other("methods", confidence=0.9)
    other("metrics", metrics=("sqnr",))
    other("references", reference=None)


def test_an_unperturbed_run_of_other_bits_is_an_error(parts: list[fxround.VariabilityReport]) -> None:
    part = parts[1].part
    assert part is not None
    values = part.batches[0].references["unperturbed"]
    moved = {key: value + value.abs().max() for key, value in values.items()}
    batches = (
        replace(part.batches[0], references={**part.batches[0].references, "unperturbed": moved}),
        *part.batches[1:],
    )
    changed = replace(parts[1], part=replace(part, batches=batches))
    with pytest.raises(ValueError, match=r"have unperturbed runs of different bits, first at .*one kind of machine"):
        fxround.merge([parts[0], changed, parts[2]])


def test_a_report_of_a_whole_study_and_other_things_are_refused(whole: fxround.VariabilityReport) -> None:
    with pytest.raises(ValueError, match="a report of samples 0 to 7 keeps no samples: measure it with first_sample=0"):
        fxround.merge([whole])
    with pytest.raises(TypeError, match=r"a report is a str; expected what fxround.variability returned"):
        fxround.merge(["a.report"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"first_sample": -1}, ValueError, "first_sample is -1"),
        ({"first_sample": 0, "samples": 0}, ValueError, "samples is 0; expected numbers from 0 to 65535"),
        ({"first_sample": 65_535}, ValueError, "first_sample is 65535"),
        ({"first_sample": 0.0}, TypeError, "first_sample is 0.0"),
        ({"first_sample": 0, "samples": "auto"}, ValueError, "samples='auto' needs all samples"),
        ({"first_sample": 0, "isolate": "layers"}, ValueError, "isolate='layers' measures whole studies"),
    ],
)
def test_parts_that_cannot_be_are_errors(
    arguments: dict[str, Any], error: type[Exception], message: str, net: nn.Module
) -> None:
    with pytest.raises(error, match=message):
        fxround.variability(net, X, **arguments)


def test_other_files_are_no_reports(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    torch.save({"layout": "fxround.VariabilityReport 0"}, tmp_path / "old")
    for name in ("text", "old"):
        with pytest.raises(ValueError, match=f"{name} is no report that fxround saved"):
            fxround.load_report(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        fxround.load_report(tmp_path / "none")


NET = """
import torch

def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)), torch.rand(9, 6)
"""


def test_the_array_of_jobs_in_the_document_gives_the_report_of_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(fxround.__file__).parents[1]
    document = (root / "docs" / "variability.md").read_text(encoding="utf-8")
    section = document.partition("### Parts of a study")[2]
    job, merger, *_ = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "fxround").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > arguments\n")
    (tmp_path / "fxround").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)

    def arguments_of(script: str) -> list[str]:
        subprocess.run(["bash", "-e"], input=script, text=True, check=True, capture_output=True)
        return Path("arguments").read_text().splitlines()

    assert "--array=0-1" in job
    # One of the jobs is another process; the other one, and the merger, are this process.
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    started = [sys.executable, "-m", "fxround", *arguments_of(job)]
    subprocess.run(started, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert cli.main(arguments_of(job)) == 0
    assert cli.main(arguments_of(merger)) == 0
    model, inputs = runpy.run_path(str(tmp_path / "net.py"))["build"]()
    whole = fxround.variability(model.eval(), inputs, samples=20, capture="layers")
    assert figures_of(fxround.load_report(tmp_path / "whole.report")) == figures_of(whole)
    assert "Variability of Sequential" in (tmp_path / "whole.html").read_text(encoding="utf-8")


def test_a_part_names_its_worst_sample_by_the_number_in_the_study() -> None:
    net = torch.nn.Linear(4, 3).eval()
    part = fxround.variability(net, torch.rand(5, 4), samples=3, first_sample=40, metrics=("sqnr",), reference=None)
    (row,) = part.metrics_table()
    assert row["which is"] == f"the least, sample {40 + part.metrics[0].values.index(part.metrics[0].worst)}"
