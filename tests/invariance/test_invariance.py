"""check_invariance: invariant models pass, and planted variations are found at their operation."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule, check_invariance, cli
from fxround.invariance.cases import AXES, Inapplicable, Row
from fxround.invariance.difference import BatchRows
from fxround.invariance.process import _Rebuilt
from fxround.invariance.report import NotInvariant
from fxround.invariance.subjects import Compiled, Eager
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.significance.inputs import ModelCall

HERE = ("batch", "slice", "stride", "threads")
HASTE = ("batch", "slice")


def network() -> nn.Module:
    """A network whose rows are independent, which any process can import."""
    return nn.Sequential(nn.Linear(40, 3), nn.Softmax(1))


class Neighbours(nn.Module):
    """Rows that depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.weigh(x)

    def weigh(self, x: Tensor) -> Tensor:
        return x * x.mean(0)


class Twin(nn.Module):
    """Two arguments, one of them integers; results in a dict and a tuple, one without rows."""

    def forward(self, x: Tensor, index: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"a": (x.exp() * scale, index + 1), "b": torch.ones(2)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_reproducible_model_is_invariant_along_every_axis() -> None:
    report = check_invariance(network(), torch.randn(3, 40))
    assert [axis.axis for axis in report.axes] == list(AXES)
    left = {"world_size"} if torch.cuda.is_available() else {"device", "world_size"}
    assert "nothing says how processes share the model" in report["world_size"].reason
    applied = [axis for axis in report.axes if axis.axis not in left]
    assert {axis.distinct for axis in applied} == {1}
    assert report.invariant and report.check() is report
    assert all(axis.runs > 1 and axis.first is None and not axis.differing for axis in applied)
    assert report["isa"].runs == len(instruction_sets()) - 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_one_device_is_no_axis() -> None:
    report = check_invariance(network(), torch.randn(3, 40), ("threads", "device"))
    assert not report["device"].distinct and "no CUDA device" in report["device"].reason
    with pytest.raises(ValueError, match="no CUDA device"):
        check_invariance(network(), torch.randn(3, 40), ("device",))


def test_gradients_are_compared_as_well() -> None:
    report = check_invariance(network(), torch.randn(3, 40), HERE, gradients=True)
    assert [axis.distinct for axis in report.axes] == [1, 1, 1, 1] and "results and gradients" in str(report)


def test_nothing_of_the_model_and_of_torch_changes() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), torch.randn(6, 4)
    compiled = fxround.compile(model.train(), "stochastic", seed=3).reseed(3, sample=5)
    before, state, threads = fxround.hash(model), torch.random.get_rng_state(), torch.get_num_threads()
    check_invariance(compiled, x, ("stride", "threads"), gradients=True).check()
    assert compiled.rng.tolist() == [3, 5] and fxround.hash(model) == before
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads
    assert all(p.grad is None for p in model.parameters()) and model.training


@pytest.mark.parametrize("policy", ["reproducible", None])
def test_the_first_operation_that_differs_is_named(policy: str | None) -> None:
    report = check_invariance(Neighbours(), torch.randn(4, 3), HASTE, policy)
    found = report["batch"].first
    assert report["batch"].distinct > 1 and not report.invariant
    assert found is not None and found.source.startswith("test_invariance.py:") and "x.mean(0)" in found.code
    assert "sum" in found.operator or "mean" in found.operator or "mul" in found.operator
    with pytest.raises(fxround.NotInvariant, match=r"batch: \d results in 7 runs .*x\.mean\(0\)"):
        report.check()


class Branches(nn.Module):
    """The graph for one row has an operation more, so that names of operations are those of others."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            x = x * 2
            x = x * 3
        else:
            x = x * 6
        return x - x.mean(0)


@pytest.mark.parametrize("policy", ["reproducible", None])
def test_values_of_two_graphs_are_matched_by_their_places(policy: str | None) -> None:
    axis = check_invariance(Branches(), torch.randn(4, 3), ("batch",), policy)["batch"]
    assert axis.first is not None and "x.mean(0)" in axis.first.code and axis.captured_differently
    assert str(axis).endswith("; captured differently")
    same = check_invariance(Neighbours(), torch.randn(4, 3), ("batch",), policy)["batch"]
    assert same.first is not None and not same.captured_differently


def test_the_module_of_the_first_difference_is_named() -> None:
    report = check_invariance(nn.Sequential(nn.Linear(3, 3), Neighbours()), torch.randn(4, 3), ("batch",))
    assert report["batch"].first is not None and report["batch"].first.path == "1"


def test_gradients_that_differ_are_found_backwards() -> None:
    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * torch.get_num_threads()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Back.apply(x)

    x = torch.randn(3, 4)
    assert check_invariance(Model(), x, ("threads",), None).invariant
    found = check_invariance(Model(), x, ("threads",), None, gradients=True)["threads"]
    assert found.distinct == 3 and found.differing == ("2 threads", "3 threads")
    assert found.first is not None and "mul" in found.first.operator and found.first.code == "backward"


def test_stochastic_rounding_gives_a_row_other_bits_at_another_place() -> None:
    report = check_invariance(nn.Linear(4, 4), torch.randn(3, 4), HERE, "stochastic")
    assert [axis.distinct for axis in report.axes] == [1, 4, 1, 1]
    assert report["slice"].share > 0 and report["slice"].largest > 0


def test_a_batch_that_is_summed_has_no_rows() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sum()

    report = check_invariance(Loss(), torch.randn(4, 3), HERE)
    assert [axis.distinct for axis in report.axes] == [0, 0, 1, 1] and report.invariant
    assert "no result has rows" in report["batch"].reason and "not asked: no result has rows" in str(report)
    with pytest.raises(ValueError, match="no axis applies to Loss"):
        check_invariance(Loss(), torch.randn(4, 3), HASTE)


class _Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(0)


@pytest.mark.parametrize("policy", ["reproducible", None])
def test_a_nan_is_one_result_in_every_memory(policy: str | None) -> None:
    x = torch.randn(40, 40)
    x[20, 0] = torch.nan
    report = check_invariance(_Largest(), x, ("batch", "stride"), dim=1, policy=policy)
    assert policy is None or all(axis.distinct == 1 for axis in report.axes)


def test_a_result_of_no_dimensions_has_a_gradient_of_one_element() -> None:
    assert check_invariance(_Largest(), torch.randn(33), ("stride",), gradients=True).axes[0].distinct == 1


def test_several_arguments_integers_and_structures() -> None:
    args = (torch.randn(3, 2), torch.arange(3))
    report = check_invariance(Twin(), (args, {"scale": 2.0}), HERE)
    assert [axis.distinct for axis in report.axes] == [1, 1, 1, 1]


def test_a_batch_of_one_is_repeated() -> None:
    report = check_invariance(nn.Linear(5, 2), torch.randn(1, 5), HERE)
    assert [axis.distinct for axis in report.axes] == [1, 1, 1, 1] and report["batch"].runs == 7


def test_the_batch_may_be_another_dimension() -> None:
    lstm = nn.LSTM(3, 4)
    report = check_invariance(lstm, torch.randn(2, 3, 3), HASTE, dim=1)
    assert [axis.distinct for axis in report.axes] == [1, 1]


def test_runs_that_the_model_refuses_are_listed() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1) * 2

    report = check_invariance(Flat(), torch.randn(3, 2, 4), ("stride",), None)
    assert report["stride"].refused and report["stride"].refused[0].startswith("channels-last: RuntimeError: view")
    assert "runs raised, the first channels-last" in str(report)


def test_unknown_axes_and_other_mistakes_say_what_was_expected() -> None:
    model, x = nn.Linear(2, 2), torch.randn(2, 2)
    with pytest.raises(ValueError, match=r"unknown axis 'thread'; did you mean 'threads'\? The axes are batch, slice"):
        check_invariance(model, x, ("batch", "thread"))
    for dim in (5, -3):
        with pytest.raises(
            ValueError, match=rf"dim is {dim}; expected a dimension of the arguments, which are \(2, 2\)"
        ):
            check_invariance(model, x, ("batch", "threads"), dim=dim)
    with pytest.raises(TypeError, match="dim is a str; expected an int"):
        check_invariance(model, x, dim="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown axis 'colour'\. The axes are batch, slice"):
        check_invariance(model, x, ("colour",))
    with pytest.raises(ValueError, match="axes is empty"):
        check_invariance(model, x, ())
    with pytest.raises(ValueError, match="keeps its own policy"):
        check_invariance(fxround.compile(model, "bfloat16"), x, HERE, "reproducible/")
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        check_invariance(torch.relu, x, HERE, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returned no tensor"):
        check_invariance(_Nothing(), x, HERE, None)
    with pytest.raises(ValueError, match="leave out gradients"):
        check_invariance(_Whole(), torch.arange(4), HERE, None, gradients=True)


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class _Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_scalar_argument_has_no_rows() -> None:
    report = check_invariance(_Whole(), torch.tensor(1.5), HERE)
    assert [axis.distinct for axis in report.axes] == [0, 0, 0, 1]
    assert "no argument has rows along dimension 0" in report["batch"].reason


def test_a_model_that_cannot_be_pickled_is_built_over_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text("import torch\ndef build(): return torch.nn.Linear(3, 2)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Linear(3, 2)
    model.held = (n for n in range(3))  # type: ignore[assignment]
    with pytest.raises(fxround.FxroundError, match=r"cannot be pickled.* pass build="):
        check_invariance(model, torch.randn(2, 3), ("process",))
    assert check_invariance(model, torch.randn(2, 3), ("process",), build="made:build").invariant
    assert "made" not in sys.modules


def test_a_model_built_over_there_has_the_training_flag_of_each_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3).train())
    rebuilt = _Rebuilt(Eager(model), lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))()
    assert [part.training for part in rebuilt.module.modules()] == [True, False, True]


def test_what_fails_in_the_other_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fxround.FxroundError, match="could not be run in another process: ModuleNotFoundError"):
        check_invariance(nn.Linear(3, 2), torch.randn(2, 3), ("process",), build="no_such_module:build")


def test_reports_are_data() -> None:
    report = check_invariance(Neighbours(), torch.randn(4, 3), HASTE)
    data = json.loads(report.to_json())
    assert data["model"] == "Neighbours" and data["invariant"] is False and data["axes"][0]["axis"] == "batch"
    assert data["axes"][0]["first"]["code"] == report["batch"].first.code  # type: ignore[union-attr]
    assert "Not invariant: batch." in str(report) and "<table" in report._repr_html_()
    with pytest.raises(KeyError, match="no axis 'isa' in this report; it has batch, slice"):
        report["isa"]


def test_the_command_fails_where_bits_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    spec = f"{__file__}:{neighbours.__name__}"
    assert cli.main(["invariance", "fxround.demo:DigitsCNN", "--shape", "3,1,8,8", "--axes", "batch, slice"]) == 0
    assert "Every result has the same bits." in capsys.readouterr().out
    assert cli.main(["invariance", spec, "--shape", "3,3", "--axes", "batch", "--policy", "none", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["invariant"] is False
    assert cli.main(["invariance", spec, "--shape", "3,3", "--axes", "batches"]) == 2
    assert "did you mean 'batch'?" in capsys.readouterr().err


def neighbours() -> nn.Module:
    return Neighbours()


def test_rows_are_cut_in_both_orders_of_a_merged_dimension() -> None:
    rows = BatchRows(5, {"v": (10, 3), "w": (4,)}, {"v": (12, 3), "w": (4,)})
    value = torch.arange(12.0).reshape(4, 3)
    outer, inner = rows.cut("v", value, Row(1, 2))
    assert torch.equal(outer, value[2:4]) and torch.equal(inner, value[[1, 3]])
    whole = torch.ones(4)
    assert rows.cut("w", whole, Row(1, 2)) == (whole,) and rows.cut("v", torch.ones(3, 3), Row(0, 2)) == ()


@pytest.mark.parametrize("name", ["batch", "slice", "stride"])
def test_cases_hold_the_numbers_of_the_caller(name: str) -> None:
    x = torch.randn(3, 4, 5)
    for group in AXES[name].groups(ModelCall((x,)), 0, False):
        for case in group.cases:
            (given,) = case.call.args
            expected = x[0] if case.row else x
            seen = given[case.row.position] if case.row else given
            if case.label in ("copied", "expanded"):
                expected = x[:1].expand(3, 4, 5)
            assert torch.equal(seen, expected), case.label
    with pytest.raises(Inapplicable):
        list(AXES["batch"].groups(ModelCall((1.5,)), 0, False))


def test_stock_kernels_run_as_every_instruction_set_in_processes_of_their_own() -> None:
    native = fxround.compile(nn.Linear(3, 4), Policy("native", (Rule(rounding="dtype", accumulate="native"),)))
    call = ModelCall((torch.randn(2, 3),))
    assert Compiled(native).stock(call) and not Compiled(fxround.compile(nn.Linear(3, 4), "reproducible")).stock(call)
    (group,) = AXES["isa"].groups(call, 0, True)
    assert [dict(case.setting.environment)["ATEN_CPU_CAPABILITY"] for case in group.cases][-1] == "default"
    assert all(case.setting.process for case in group.cases)


def test_ctrl_c_leaves_the_axes_that_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, module = AXES["slice"].groups, importlib.import_module("fxround.invariance.check")

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return groups(*arguments)

    monkeypatch.setattr(module, "AXES", {**AXES, "slice": replace(AXES["slice"], groups=interrupted)})
    report = check_invariance(network(), torch.rand(3, 40), HERE)
    assert [axis.axis for axis in report.axes] == ["batch", "slice"] and report.remaining == ("stride", "threads")
    assert all(axis.distinct == 1 for axis in report.axes) and not report.invariant
    assert "INTERRUPTED before stride, threads" in str(report) and "Every result so far" in str(report)
    with pytest.raises(NotInvariant, match="Ctrl-C came before stride, threads could be compared"):
        report.check()


_INTERRUPTED: Final = """
import os, signal, threading
import torch
import fxround
from fxround import new_process

run, pressed = new_process.run, []
def interrupted(*arguments, **options):
    if not pressed:
        pressed.append(1)
        threading.Timer(1, lambda: os.killpg(0, signal.SIGINT)).start()
    return run(*arguments, **options)

new_process.run = interrupted
report = fxround.check_invariance(torch.nn.Linear(3, 2), torch.rand(4, 3), ("process", "batch"))
print([(axis.axis, axis.distinct) for axis in report.axes], report.remaining)
"""


def test_ctrl_c_of_a_terminal_leaves_the_other_process_to_end() -> None:
    """Ctrl-C comes while the other process imports PyTorch."""
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED],
        env={**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parents[1])},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "[('process', 1)] ('batch',)\n"), ended.stderr


def test_each_axis_is_a_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxround"):
        report = check_invariance(network(), torch.rand(3, 40), HASTE, progress=False)
    assert report.invariant and report.remaining == ()
    assert any(
        record.getMessage().startswith("Sequential invariance: ended after 2 steps") for record in caplog.records
    )
