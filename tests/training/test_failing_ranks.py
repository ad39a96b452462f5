"""Processes that differ, or of which one dies: all end with an error, and a checkpoint continues with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.compiler import agreement
from fxround.errors import FxroundError
from fxround.runtime.processes import gathered
from fxround.training import compile_optimizer

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)

from fxround.training.distributed import average_in_order  # noqa: E402

STEPS, SHARED = 3, 4
# Of the process group, in seconds.
TIMEOUT = 60


def averaged(policy: str = "stochastic", seed: int = 5, micro_batches: int | None = SHARED) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.Linear(10, 3))
    ddp = nn.parallel.DistributedDataParallel(fxround.compile(model, policy, seed=seed))
    average_in_order(ddp, micro_batches=micro_batches)
    return ddp


def optimizer_of(ddp: nn.Module) -> torch.optim.Optimizer:
    return compile_optimizer(torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9), "stochastic", seed=3)


def step(ddp: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(SHARED, 4, 6, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    own = range(dist.get_rank(), SHARED, dist.get_world_size())
    for j in own:
        with nullcontext() if j == own[-1] else ddp.no_sync():
            ddp(x[j]).square().mean().backward()
    optimizer.step()


# What a process says of settings that the other one does not have.
DIFFERENT = {
    "seed": lambda rank: averaged(seed=5 + rank),
    "policy": lambda rank: averaged(["stochastic", "reproducible"][rank]),
    "number of micro batches": lambda rank: averaged(micro_batches=SHARED * (1 + rank)),
}


def as_a_rank(store: str, out: str, rank: int) -> None:
    """The work of each process; the second one dies in the last step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
    )
    said = []
    for differing in DIFFERENT.values():
        try:
            differing(rank)
        except FxroundError as error:
            said.append(str(error))
    torch.save(said, f"{out}.{rank}")
    ddp = averaged()
    optimizer = optimizer_of(ddp)
    for number in range(STEPS):
        if number == STEPS - 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(ddp, optimizer, number)
        if rank == 0:
            torch.save((ddp.module.state_dict(), optimizer.state_dict()), f"{out}.checkpoint")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.Popen[str]], list[str], float]:
    """What two processes wrote, they themselves, what they printed, and the seconds after the death of the second."""
    place = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", __file__, str(place / "store"), str(place / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parent.parent)}
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        second = started[1].communicate(timeout=600)[1]
        died = time.monotonic()
        first = started[0].communicate(timeout=600)[1]
    finally:
        for process in started:
            process.kill()
    return place, started, [first, second], time.monotonic() - died


def test_the_process_that_is_left_ends_with_a_message(ended: Any) -> None:
    _, (first, second), (printed, _), seconds = ended
    assert second.returncode == -signal.SIGKILL and first.returncode == 1, printed
    assert "RuntimeError" in printed and "peer" in printed
    assert seconds < TIMEOUT + 30


def test_processes_that_differ_all_raise_the_same_error(ended: Any) -> None:
    place, *_ = ended
    first, second = (torch.load(f"{place / 'out'}.{rank}") for rank in (0, 1))
    assert first == second and len(first) == len(DIFFERENT)
    for message, what in zip(first, DIFFERENT, strict=True):
        assert f"processes average their gradients, and process 1 has another {what} than process 0: " in message


def test_a_checkpoint_continues_in_another_number_of_processes(ended: Any, tmp_path: Path) -> None:
    """One process takes the last step of the two, and has the weights of one process that took all of them."""
    place, *_ = ended
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        whole, resumed = averaged(), averaged()
        optimizers = optimizer_of(whole), optimizer_of(resumed)
        for number in range(STEPS):
            step(whole, optimizers[0], number)
        saved = torch.load(f"{place / 'out'}.checkpoint")
        for part, state in zip((resumed.module, optimizers[1]), saved, strict=True):
            part.load_state_dict(state)
        assert fxround.hash(resumed.module) != fxround.hash(whole.module)
        step(resumed, optimizers[1], STEPS - 1)
        assert fxround.hash(resumed.module) == fxround.hash(whole.module)
    finally:
        dist.destroy_process_group()


def test_a_group_that_was_destroyed_is_named(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    if torch.__version__ < agreement.SINCE:
        pytest.skip("models that processes share need a later PyTorch")
    from parallel_models import batch_of, model_of

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    x: Tensor = batch_of("MLP")
    try:
        compiled = fxround.compile(model_of("MLP", init_device_mesh("cpu", (1,))), "reproducible_sharded")
        compiled(x)
    finally:
        dist.destroy_process_group()
    with torch.no_grad(), pytest.raises(FxroundError, match=r"their process group does not exist\. Call torch\.dist"):
        compiled(x)  # a graph of its own
    with pytest.raises(FxroundError, match=r"their process group was destroyed\. Call torch\.distributed"):
        gathered(x, "0", 2)


if __name__ == "__main__":
    as_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
