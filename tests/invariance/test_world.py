"""check_invariance along world_size: processes that share a model are compared with one, and none is left waiting."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxround
from fxround import FxroundError, check_invariance, cli, new_process
from fxround.compiler import agreement
from fxround.invariance import world

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)
if torch.__version__ < agreement.SINCE:
    pytest.skip("models that processes share need a later PyTorch", allow_module_level=True)

from parallel_models import batch_of, model_of  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def share(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, PLAN)


def share_and_change(model: nn.Module, mesh: Any) -> None:
    share(model, mesh)
    with torch.no_grad():
        model.down.bias += 1  # type: ignore[operator]


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return model_of("MLP"), batch_of("MLP")


def test_two_processes_that_share_a_model_have_the_bits_of_one() -> None:
    model, x = mlp()
    compiled = fxround.compile(model, "reproducible_sharded")
    report = check_invariance(compiled, x, ("world_size",), gradients=True, parallelize=PLAN, world_sizes=[2]).check()
    (axis,) = report.axes
    assert (axis.distinct, axis.runs, axis.compared) == (1, 3, "one process, and each of 2")
    assert {name for name, _ in axis.by_result} >= {"output", "gradient of up.weight", "gradient of arguments[0]"}
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 4


# ---- a group of one, in this process ----


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is this one."""

    def here(code: str, arguments: Any, *, grace: float) -> list[Any]:
        ((folder, rank, size, trace),) = arguments
        threads = torch.get_num_threads()
        try:
            world._serve(Path(folder), int(rank), int(size), trace == "1")
        finally:
            torch.set_num_threads(threads)
            dist.destroy_process_group()
        return []

    monkeypatch.setattr(new_process, "run_together", here)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", ["reproducible_sharded", None])
def test_the_first_operation_that_differs_is_named(policy: str | None) -> None:
    model, x = mlp()
    for gradients in (False, True):
        report = check_invariance(
            model, x, "world_size", policy, gradients=gradients, parallelize=share_and_change, world_sizes=(1,)
        )
        axis = report["world_size"]
        assert (axis.distinct, axis.differing) == (2, ("process 0 of 1",)) and axis.share > 0
        assert axis.first is not None and axis.first.path == "down" and "return self.down" in axis.first.code


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plan", [lambda model, mesh: None, lambda model, mesh: model], ids=["none", "model"])
def test_a_model_of_which_nothing_is_shared_is_refused(plan: Any) -> None:
    with pytest.raises(FxroundError, match="no parameter is a DTensor"):
        check_invariance(*mlp(), "world_size", parallelize=plan, world_sizes=(1,))


@pytest.mark.usefixtures("alone")
def test_a_plan_that_names_no_module_is_refused() -> None:
    with pytest.raises(UserWarning, match="Parallelize plan key 'left' could not be resolved"):
        check_invariance(*mlp(), "world_size", parallelize={**PLAN, "left": RowwiseParallel()}, world_sizes=(1,))


# ---- mistakes ----


def test_mistakes_say_what_was_expected() -> None:
    def check(axes: Any = "world_size", model: Any = None, **options: Any) -> None:
        own, x = mlp()
        check_invariance(model or own, x, axes, **options)

    with pytest.raises(ValueError, match=r"nothing says how processes share the model: pass parallelize="):
        check()
    with pytest.raises(ValueError, match="parallelize is for the axis 'world_size', which is not among axes"):
        check("threads", parallelize=PLAN)
    with pytest.raises(TypeError, match=r"parallelize is an int; expected a plan of parallelize_module, a function"):
        check(parallelize=2)
    with pytest.raises(TypeError, match=r"world_sizes is 2; expected some numbers of processes, like \(2, 4, 8\)"):
        check(parallelize=PLAN, world_sizes=2)
    for sizes in ((0,), (True,), (2.0,)):
        with pytest.raises(ValueError, match="expected numbers of processes, of 1 or more"):
            check(parallelize=PLAN, world_sizes=sizes)
    with pytest.raises(ValueError, match=r"the model is on meta, .*: pass model\.cpu\(\)"):
        check(model=nn.Linear(2, 2, device="meta"), parallelize=PLAN, policy=None)
    with pytest.raises(FxroundError, match=r"cannot be pickled.*the name 'module:function'"):
        check(parallelize=(lambda held: lambda model, mesh: held)(n for n in range(3)))


def test_the_command_names_a_function_that_shares_the_model(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked = []
    monkeypatch.setattr(world, "_answers", lambda *arguments, trace: asked.append(arguments) or [{}] * arguments[3])
    command = ["invariance", f"{__file__}:mlp", "--axes", "world_size", "--parallelize", f"{__file__}:share"]
    assert cli.main([*command, "--world-sizes", "2"]) == 1
    ((_, _, how, size, _),) = asked[:1]
    assert how.__name__ == "share" and size == 2 and "process 0 of 2" in capsys.readouterr().out
    assert cli.main([*command, "--world-sizes", "two"]) == 2
    assert "--world-sizes 'two': expected numbers of processes, like 2,4,8" in capsys.readouterr().err


# ---- processes that fail ----


@pytest.mark.long
def test_a_process_that_dies_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, signal
import torch.distributed as dist

def share(model, mesh):
    if mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
    (tmp_path / "ending.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FxroundError, match=r"all of them have ended\. Process 1: .*\(exit status -9\)"):
        check_invariance(*mlp(), "world_size", None, parallelize="ending:share", world_sizes=(2,))


_WAITS = """
import pathlib, sys, time
print(sys.argv[1], flush=True)
begun = pathlib.Path(sys.argv[2])
if sys.argv[1] == "0":
    begun.touch()
    time.sleep(100)
while not begun.exists():
    time.sleep(0.01)
sys.exit("failed")
"""


def test_processes_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    began, begun = time.monotonic(), str(tmp_path / "begun")
    first, second = new_process.run_together(_WAITS, [["0", begun], ["1", begun]], grace=0.2)
    assert (first.returncode, first.stdout, first.stderr) == (1, "1\n", "failed\n")
    assert (second.returncode, second.stdout) == (-signal.SIGKILL, "0\n")
    assert time.monotonic() - began < 50


def test_an_interrupt_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = new_process.subprocess.Popen
    monkeypatch.setattr(new_process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    # A process that is started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            new_process.run_together("import time; time.sleep(100)", [[], []], grace=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
