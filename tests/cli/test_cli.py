"""The commands: the demo's numbers are a function of its arguments, and mistakes end with a message and status 2."""

from __future__ import annotations

import csv
import io
import json
import sys
from email.message import Message
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import fxround
from fxround import cli, demo
from fxround.cli import diagnosis, loading
from fxround.compiler.torch_version import Standing
from fxround.views.graph_views import to_networkx


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def found() -> demo.Demo:
    return demo.run(samples=3)


def without_times(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in ("seconds", "slowdown")}


@pytest.mark.long
def test_the_demo_repeats_itself_with_one_thread_as_with_two(found: demo.Demo) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = demo.run(samples=3)
    finally:
        torch.set_num_threads(threads)
    assert [b.mean for b in again.layers.values()] == [b.mean for b in found.layers.values()]
    assert (again.accuracy, again.changed, again.bits) == (found.accuracy, found.changed, found.bits)


def test_the_demo_finds_what_stochastic_rounding_must_show(found: demo.Demo) -> None:
    assert found.stock_accuracy > 90
    assert list(found.layers) == ["conv1", "norm1", "conv2", "norm2", "hidden", "logits"]
    assert found.bits == found.layers["logits"]
    assert found.bits.mean is not None
    # Perturbed in the 24th bit, each step: some bits are lost, most are not, and almost all logits move.
    assert 8 < found.bits.mean < 24
    assert found.bits.evidence > 0.9 * found.bits.elements
    assert found.images == 500 and len(found.rows) == 5000


def test_observed_layers_are_the_values_of_the_very_call(found: demo.Demo) -> None:
    images = demo.load_digits().test[0][:7]
    compiled = fxround.compile(demo.DigitsCNN().eval(), "stochastic", example_inputs=(images,), seed=5)
    ends = demo.layer_ends(compiled.graph)
    assert set(ends.values()) <= set(to_networkx(compiled.graph))
    logits, layers = demo.observe(compiled, images, ends)
    assert torch.equal(logits, compiled(images))
    assert torch.equal(layers["logits"], logits)


def test_the_demo_writes_and_prints_its_findings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: demo.Demo
) -> None:
    monkeypatch.setattr(demo, "run", lambda *settings, drawing, device: _drawn(found, drawing))
    output = ["--output", str(tmp_path / "out")]
    status, text, _ = run(capsys, "demo", *output)
    assert status == 0
    for expected in ("Accuracy", "Significant bits", "Labels that changed", "Slowdown", "norm2", "3 samples lower"):
        assert expected in text
    status, text, _ = run(capsys, "demo", "--json", *output)
    data = json.loads(text)
    assert data == json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["bits"]["mean"] == found.bits.mean
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5000
    # A tolerance: the table writes rounded decimals.
    assert np.mean([float(row["bits"]) for row in rows if row["bits"]]) == pytest.approx(found.bits.mean, abs=0.01)


def _drawn(found: demo.Demo, drawing: Path) -> demo.Demo:
    drawing.write_text("<svg/>")
    return found


def test_a_deterministic_policy_is_no_evidence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text, _ = run(capsys, "demo", "--policy", "bfloat16", "--samples", "2", "--json", "--output", str(tmp_path))
    data = json.loads(text)
    assert status == 0
    assert (data["bits"]["mean"], data["bits"]["evidence"]) == (None, 0)
    assert 0 < data["agreement"] < 12
    assert ElementTree.parse(tmp_path / "graph.svg").getroot().tag.endswith("svg")


MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), torch.ones(2, 4)

def bare():
    return build()[0]

number = 3

def wrong():
    return "a model"

def broken():
    return {}["layer"]

def leaves():
    raise SystemExit(1)

def imports():
    import nosuch

def talks():
    raise RuntimeError("first\\nsecond")
"""


@pytest.fixture
def net(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    # A module is imported once a process: every test has its own.
    path = tmp_path / f"net_{abs(hash(request.node.name))}.py"
    path.write_text(MODEL)
    return str(path)


def test_inspect_prints_summary_and_coverage(capsys: pytest.CaptureFixture[str], net: str, tmp_path: Path) -> None:
    status, text, _ = run(capsys, "inspect", f"{net}:build", "--policy", "bfloat16", "--graph")
    assert status == 0
    assert "aten.mm.default" in text and "bfloat16/nearest_even/inf" in text and "Every float operation" in text
    drawing = tmp_path / "net.svg"
    status, text, _ = run(
        capsys, "inspect", f"{net}:bare", "--shape", "2,4", "--json", "--leaks", "--draw", str(drawing)
    )
    data = json.loads(text)
    assert status == 0
    assert next(row["status"] for row in data["coverage"]["rows"]) == "rounded"
    assert data["leaks"]["proved"] > 3 and data["leaks"]["rows"] == []
    assert drawing.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inspect", "{net}"), "expected MODULE:CALLABLE"),
        (("inspect", "{net}:biuld"), "has no callable 'biuld'; did you mean 'build'? It has "),
        (("inspect", "{net}:number"), "has no callable 'number'"),
        (("inspect", "{net}:wrong"), "expected a torch.nn.Module"),
        (("inspect", "{net}:bare"), "give --inputs or --shape"),
        (("inspect", "{net}:bare", "--shape", "2x4"), "expected sizes like"),
        (("inspect", "{net}:bare", "--shape", "2,5"), "the model refuses these inputs: RuntimeError: "),
        (
            ("inspect", "{net}:bare", "--inputs", "whole.npy"),
            "the model refuses these inputs: RuntimeError: mat1 and mat2",
        ),
        (
            ("hash", "{net}:bare", "--inputs", "whole.npy"),
            "the model refuses these inputs: RuntimeError: mat1 and mat2",
        ),
        (("inspect", "{net}:bare", "--shape=-2,4"), "--shape '-2,4': "),
        (("inspect", "{net}:bare", "--shape", "9" * 20), "--shape '9999"),
        (("inspect", "{net}:broken"), ":broken raised KeyError at "),
        (("inspect", "{net}:leaves"), ":leaves raised SystemExit at "),
        (("inspect", "{net}:imports"), ":imports: No module named 'nosuch'"),
        (("inspect", "{net}:talks"), ": first\n"),
        (("inspect", "wrong.py:build"), "the import of wrong.py raised SyntaxError: "),
        (("inspect", "nosuch.py:build"), "no such file"),
        (("variability", "{net}:bare", "--inputs", "text.npy"), "--inputs text.npy: no .npy file of tensors or arrays"),
        (("variability", "{net}:bare", "--inputs", "text.pt"), "--inputs text.pt: no .pt file of tensors or arrays"),
        (("variability", "{net}:build", "--samples", "2", "--min-bits", "nan"), "min_bits is nan; expected a number"),
        (("variability", "{net}:build", "--samples", "2", "--max-flips", "2"), "expected a share from 0 to 1"),
        (("variability", "{net}:bare", "--inputs", "none.npy"), "--inputs none.npy: no such file"),
        (("localize", "{net}:build", "--metric", "sqnr", "x"), "--metric sqnr x: expected a number"),
        (("inspect", "{net}:build", "--policy", "stocastic"), "did you mean 'stochastic'"),
        (("demo", "--samples", "1"), "needs at least 2"),
        (("demo", "--policy", "no.toml"), "cannot be read"),
    ],
)
def test_mistakes_end_with_a_message(
    capsys: pytest.CaptureFixture[str],
    net: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("wrong.py", "text.npy", "text.pt"):
        Path(name).write_text("def build(:")
    np.save("whole.npy", np.arange(8).reshape(2, 4))
    status, _, error = run(capsys, *(a.format(net=net) for a in arguments))
    assert status == 2
    assert error.strip().startswith("fxround: ")
    assert message in error


def test_doctor_prints_what_the_installation_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "doctor")
    assert status == 0 and "The core works." in text
    for fact in (torch.__version__, np.__version__, "processor", "threads", "instruction sets", "cache", "GPU"):
        assert fact in text
    status, text, _ = run(capsys, "doctor", "--json")
    data = json.loads(text)
    assert status == 0 and data["problems"] == [] and data["machine"]["threads"] == torch.get_num_threads()
    assert data["versions"]["torch"] == torch.__version__


def test_doctor_says_which_extra_lacks_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = diagnosis.version_of
    monkeypatch.setattr(diagnosis, "version_of", lambda name: "" if name in ("pandas", "joblib") else known(name))
    declared = Message()
    for extra in ("report", "demo", "distributed", "dev"):
        declared["Provides-Extra"] = extra
    for line in ('pandas>=2; extra == "report"', 'fxround[report]; extra == "demo"', "torch>=2"):
        declared["Requires-Dist"] = line
    declared["Requires-Dist"] = 'joblib>=1.4; extra == "distributed"'
    monkeypatch.setattr(diagnosis, "metadata", lambda name: declared)
    status, text, _ = run(capsys, "doctor")
    assert status == 0
    assert diagnosis.diagnose().missing == {"report": ("pandas",), "demo": ("pandas",), "distributed": ("joblib",)}
    assert "joblib missing: pip install 'fxround[distributed]'" in text


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"round": lambda x, form: x}, "rounded to bfloat16 is 1.00390625 and should be 1.0"),
        ({"round": lambda x, form: 1 // 0}, "no kernel can be compiled and run: ZeroDivisionError"),
        ({"version_of": lambda name: ""}, "torch, numpy, networkx, llvmlite not installed"),
        ({"standing_of": lambda version: Standing("1.0", "refused", "this is torch 1.0")}, "BROKEN: this is torch 1.0"),
    ],
)
def test_doctor_ends_with_status_1_where_the_core_is_broken(
    broken: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broken.items():
        monkeypatch.setattr(diagnosis, name, value)
    status, text, _ = run(capsys, "doctor")
    assert status == 1 and "BROKEN: " in text and message in text


@pytest.mark.parametrize("command", ["demo", "inspect", "variability", "attribute", "localize", "invariance"])
def test_ctrl_c_ends_a_command_with_130_and_no_traceback(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    monkeypatch.setattr(loading, "_built", interrupted)
    rest = {
        "demo": ("--output", str(tmp_path)),
        "localize": ("net:build", "--metric", "label_flips", "0"),
        "inspect": ("net:build", "--shape", "1,2"),
    }
    status, out, err = run(capsys, command, *rest.get(command, ("net:build",)))
    assert (status, out, err) == (130, "", "fxround: interrupted\n")


def test_a_terminal_without_the_characters_of_tables_shows_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    assert cli.main(["doctor"]) == 0
    sys.stdout.flush()
    assert b"The core works." in written.getvalue() and b"????" in written.getvalue()


def test_attribute_prints_shares_and_ends_with_1_below_the_bits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ("attribute", "fxround.demo:DigitsCNN", "--shape", "2,1,8,8", "--probes", "2")
    files = ("--html", str(tmp_path / "shares.html"), "--draw", str(tmp_path / "shares.svg"))
    status, text, _ = run(capsys, *command, "--formats", "bfloat16", "--min-bits", "5", *files)
    assert status == 0 and "what each rounding costs" in text and "bfloat16/nearest_even/inf" in text
    assert all((tmp_path / name).exists() for name in ("shares.html", "shares.svg"))
    status, text, _ = run(capsys, *command, "--min-bits", "24", "--json", "-")
    assert status == 1 and json.loads(text)["trusted"]
