"""The micro-batches of a step have the same gradients for every number of processes that shares them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.errors import FxroundError
from fxround.module.rounded_module import RoundedModule
from fxround.training import compile_optimizer

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)

from fxround.training.distributed import average_in_order  # noqa: E402

STEPS, SHARED = 3, 8
LOW = Policy.preset("reproducible").with_rules(
    Rule("2", role="gradient", direction="backward", rounding="bfloat16/stochastic"), name="low gradients of layer 2"
)
POLICIES: dict[str, Any] = {"reproducible": "reproducible", "stochastic": "stochastic", "low": LOW}


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 3))


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Those of all steps; the last one is shorter."""
    g = torch.Generator().manual_seed(1)
    sizes = [4] * (STEPS * SHARED - 1) + [3]
    return [(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]


def optimizer_of(compiled: nn.Module) -> torch.optim.Optimizer:
    return compile_optimizer(torch.optim.SGD(compiled.parameters(), lr=0.5, momentum=0.9), "reproducible")


def as_a_rank(store: str, out: str, rank: int, world_size: int) -> None:
    """The work of each process: the weights after some steps, for every policy, with one bucket and with many."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    trained = {}
    for name, policy in POLICIES.items():
        settings = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True} if name == "low" else {}
        ddp = nn.parallel.DistributedDataParallel(fxround.compile(build(), policy, seed=7), **settings)
        average_in_order(ddp, micro_batches=SHARED)
        optimizer = optimizer_of(ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            for x, target in own_part(ddp, step, rank, world_size):
                F.cross_entropy(ddp(x), target).backward()
            optimizer.step()
        trained[name] = [p.detach().clone() for p in ddp.parameters()], ddp.module.rng
    if world_size == 2:
        trained["refused"] = [last_without(name, rank) for name in "ab"]
    torch.save(trained, f"{out}.{rank}")
    time.sleep(0.3)  # gloo may abort a process that ends at once (training.md)
    dist.destroy_process_group()


def last_without(name: str, rank: int) -> str:
    """Return what the second of two processes says whose last micro-batch has no gradient of one layer."""
    ddp = nn.parallel.DistributedDataParallel(
        fxround.compile(Either(), "reproducible", seed=7), find_unused_parameters=True
    )
    average_in_order(ddp, micro_batches=4)
    with ddp.no_sync():
        ddp(torch.ones(2, 6), "ab").square().mean().backward()
    try:
        ddp(torch.ones(2, 6), "ab".replace(name, "") if rank == 1 else "ab").square().mean().backward()
    except FxroundError as error:
        return str(error)
    return ""


class Either(nn.Module):
    """A model that leaves out one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, names: str) -> Tensor:
        return torch.stack([self.get_submodule(name)(x) for name in names]).sum(0)


def own_part(ddp: nn.Module, step: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of a process in a step; gradients of all but the last stay in the process."""
    own = range(rank, SHARED, world_size)
    for j in own:
        with nullcontext() if j == own[-1] else ddp.no_sync():
            yield micro_batches()[step * SHARED + j]


def results_of(place: Path, world_size: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", __file__, str(place / "store"), str(place / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parent.parent)}
    ranks = range(world_size)
    started = [subprocess.Popen([*command, str(rank), str(world_size)], env=environment) for rank in ranks]
    try:
        assert [process.wait(600) for process in started] == [0] * world_size
    finally:
        for process in started:
            process.kill()
    return [torch.load(f"{place / 'out'}.{rank}") for rank in ranks]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this process finds alone."""
    place, threads = tmp_path_factory.mktemp("one"), torch.get_num_threads()
    try:
        as_a_rank(str(place / "store"), str(place / "out"), 0, 1)
    finally:
        torch.set_num_threads(threads)
    found: dict[str, Any] = torch.load(place / "out.0")
    return found


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[nn.parallel.DistributedDataParallel]:
    """A module that this process trains alone, in steps of two micro-batches."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield shared_by_one(build())
    finally:
        dist.destroy_process_group()


def shared_by_one(model: nn.Module, policy: Any = "reproducible") -> nn.parallel.DistributedDataParallel:
    ddp = nn.parallel.DistributedDataParallel(fxround.compile(model, policy, seed=7))
    average_in_order(ddp, micro_batches=2)
    return ddp


def run(ddp: nn.Module, x: Tensor | None = None, *, alone: bool = True) -> None:
    with ddp.no_sync() if alone else nullcontext():
        ddp(torch.ones(2, 6) if x is None else x).square().mean().backward()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 8))])
def test_any_number_of_processes_has_the_bits_of_one(world_size: int, of_one: dict[str, Any], tmp_path: Path) -> None:
    found = results_of(tmp_path, world_size)
    for rank in found:
        for name in POLICIES:
            weights, rng = rank[name]
            assert same(weights, of_one[name][0]) and rng.tolist() == of_one[name][1].tolist() == [7, STEPS * SHARED]
    assert not same(of_one["reproducible"][0], of_one["low"][0])
    if world_size == 2:
        for name, said in zip("ab", found[1]["refused"], strict=True):
            assert f"average the gradient of {name}." in said and "after 1 of 2 micro-batches of this process" in said
        assert all("process 1 of the 2 that average gradients has an error" in said for said in found[0]["refused"])


def test_the_sum_is_that_of_lanes(of_one: dict[str, Any]) -> None:
    """Each micro-batch has the sample of its number; NumPy adds the gradients, and its additions are IEEE 754's."""
    compiled = fxround.compile(build(), "reproducible", seed=7)
    optimizer = optimizer_of(compiled)
    for step in range(STEPS):
        parts = []
        for j in range(SHARED):
            number = step * SHARED + j
            x, target = micro_batches()[number]
            compiled.reseed(7, sample=number)
            gradients = torch.autograd.grad(F.cross_entropy(compiled(x), target), list(compiled.parameters()))
            parts.append([g.numpy() for g in gradients])
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [[np.add(a, b) for a, b in zip(parts[i], parts[i + half], strict=True)] for i in range(half)]
        for p, total in zip(compiled.parameters(), parts[0], strict=True):
            p.grad = torch.from_numpy(np.divide(total, np.float32(SHARED)))
        optimizer.step()
    assert same([p.detach() for p in compiled.parameters()], of_one["reproducible"][0])


def test_a_step_that_was_given_up_leaves_nothing(lone: nn.parallel.DistributedDataParallel) -> None:
    other = shared_by_one(build())
    run(lone)
    lone.module.reseed(7, sample=2)
    other.module.reseed(7, sample=2)
    for ddp in (lone, other):
        run(ddp)
        run(ddp, alone=False)
    assert same([p.grad for p in lone.parameters()], [p.grad for p in other.parameters()])


@pytest.mark.usefixtures("lone")
def test_other_steps_are_refused() -> None:
    ddp = shared_by_one(build())
    with pytest.raises(FxroundError, match=r"micro-batch 1 of 2 .* outside of ddp.no_sync\(\)"):
        run(ddp, alone=False)
    ddp = shared_by_one(build())
    run(ddp)
    with pytest.raises(FxroundError, match=r"micro-batch 2 of 2 .* under ddp.no_sync\(\)"):
        run(ddp)
    ddp = shared_by_one(build())
    for p in ddp.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(FxroundError, match=r"(?s)has a gradient before .*zero_grad\(set_to_none=True\)"):
        run(ddp)
    ddp = shared_by_one(build())
    with pytest.raises(FxroundError, match="DistributedDataParallel did not see"):
        ddp.module(torch.ones(2, 6)).sum().backward()
    ddp = shared_by_one(build())
    ddp.module.reseed(7, sample=9)
    with pytest.raises(FxroundError, match="from call 2 of this process in the step, after 0 others"):
        run(ddp)


class Branch(nn.Module):
    """A model that reads one of its layers for some data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if len(x) > 2 else self.a(x) + self.b(x)


@pytest.mark.usefixtures("lone")
def test_a_gradient_is_missing() -> None:
    ddp = shared_by_one(Branch())
    run(ddp, torch.ones(3, 6))
    with pytest.raises(FxroundError, match=r"b\.\w+ came from call 2 of this process in the step, after 0 others"):
        run(ddp, alone=False)


class Counting(nn.Module):
    """A model that counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.mark.usefixtures("lone")
@pytest.mark.parametrize(
    "model, policy, said",
    [
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "reproducible", r"writes 1\.\w+ of one process"),
        (lambda: nn.Linear(6, 4), "fp8_delayed", "delayed scales follow the calls of one process"),
        (Counting, "reproducible", "changes Python state"),
    ],
)
def test_models_that_count_calls_are_refused(model: Any, policy: str, said: str) -> None:
    ddp = shared_by_one(model(), policy)
    with pytest.raises(FxroundError, match=said):
        run(ddp)


@pytest.mark.usefixtures("lone")
@pytest.mark.parametrize(
    "count, error, said",
    [
        (6, ValueError, "micro_batches is 6; expected a power of two"),
        (0, ValueError, "micro_batches is 0; expected a power of two"),
        ("8", TypeError, "micro_batches is a str; expected an int"),
        (True, TypeError, "micro_batches is a bool; expected an int"),
    ],
)
def test_wrong_numbers_are_reported(count: Any, error: type[Exception], said: str) -> None:
    compiled: RoundedModule = fxround.compile(nn.Linear(6, 2), "reproducible")
    with pytest.raises(error, match=said):
        average_in_order(nn.parallel.DistributedDataParallel(compiled), micro_batches=count)


if __name__ == "__main__":
    as_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
