"""Two gloo processes have the bits of a second run, and of one process that accumulates their batches in order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.compiler.agreement import SINCE
from fxround.errors import FxroundError
from fxround.module.rounded_module import RoundedModule
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.training import compile_optimizer

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)

from fxround.training.distributed import average_in_order, average_program  # noqa: E402

STEPS, PROCESSES, MICRO_BATCHES = 3, 2, 3
ACCELERATE = find_spec("accelerate") is not None
# Earlier versions describe a stage's arguments in another way.
PIPELINES = torch.__version__ >= SINCE
LOW = Policy.preset("reproducible").with_rules(
    Rule("2", role="gradient", direction="backward", rounding="bfloat16/stochastic"), name="low gradients of layer 2"
)
POLICIES: dict[str, Any] = {"reproducible": "reproducible", "low": LOW}


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.3), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    """One for every rank of every step."""
    g = torch.Generator().manual_seed(1)
    sizes = [4] * (STEPS * PROCESSES - 1) + [3]
    return [(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]


def train(policy: str, gradients: Callable[[RoundedModule, int], None], compiled: RoundedModule) -> list[Tensor]:
    """The weights after some steps; gradients(compiled, step) sets the gradients of a step."""
    optimizer = compile_optimizer(torch.optim.SGD(compiled.parameters(), lr=0.5, momentum=0.9), "reproducible")
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients(compiled, step)
        optimizer.step()
    return [p.detach().clone() for p in compiled.parameters()]


def accelerated(compiled: RoundedModule, rank: int) -> Any:
    """What Accelerate makes of a compiled module in a process that torchrun started."""
    from accelerate import Accelerator

    size = str(PROCESSES)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    prepared = Accelerator(cpu=True).prepare(compiled)
    assert isinstance(prepared, nn.parallel.DistributedDataParallel) and prepared.module is compiled
    return prepared


def as_a_rank(store: str, out: str, rank: int) -> None:
    """The work of each process: every policy, one of them with a large bucket and with small ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        # A bucket of 1 kB holds a parameter or two, one of 25 MB all of them.
        for how in ("25.0", "0.001") if name == "low" else ("25.0", "accelerate")[: 1 + ACCELERATE]:
            compiled = fxround.compile(build(), policy, seed=7)
            ddp = (
                accelerated(compiled, rank)
                if how == "accelerate"
                else nn.parallel.DistributedDataParallel(compiled, bucket_cap_mb=float(how))
            )
            average_in_order(ddp)

            def step_of(compiled: RoundedModule, step: int, ddp: nn.Module = ddp) -> None:
                x, target = batches()[step * PROCESSES + rank]
                F.cross_entropy(ddp(x), target).backward()

            weights = train(name, step_of, compiled)
            state = {k.removeprefix("module."): v for k, v in ddp.state_dict().items()}
            found[f"{name} {how}"] = (weights, state["fxround_rng"], len(compiled.captures().rows))
    found["scales"] = [scales_of(rank, shared) for shared in (False, True)]
    if PIPELINES:
        found["pipeline"] = stage_of(rank)
    torch.save(found, f"{out}.{rank}")
    dist.destroy_process_group()


def scales_of(rank: int, shared: bool) -> list[dict[str, Tensor]]:
    """The delayed scales after each of two steps on the batches of a rank."""
    compiled = fxround.compile(build(), "fp8_delayed", seed=7)
    if shared:
        compiled.share_scales()
    found = []
    for step in range(2):
        x, target = batches()[step * PROCESSES + rank]
        F.cross_entropy(compiled(x), target).backward()
        found.append(compiled.delayed_scales)
    return found


def stages() -> list[RoundedModule]:
    """Two stages of a model, each compiled with a seed of its own."""
    whole = build()
    return [fxround.compile(part, "stochastic", seed=i) for i, part in enumerate((whole[:2], whole[2:]))]  # type: ignore[index]


def micro_batches() -> tuple[Tensor, Tensor]:
    """A step's micro-batches, of 4 rows each, one after the other."""
    full = [(x, target) for x, target in batches() if len(x) == 4][:MICRO_BATCHES]
    return torch.cat([x for x, _ in full]), torch.cat([target for _, target in full])


def stage_of(rank: int) -> list[Tensor]:
    """The gradients of one stage of a pipeline after two steps."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage, (x, target) = stages()[rank], micro_batches()
    shapes = [torch.empty(4, n, requires_grad=n != 6) for n in (6, 40, 3)]
    part = PipelineStage(
        stage, rank, PROCESSES, torch.device("cpu"), input_args=shapes[rank], output_args=shapes[rank + 1]
    )
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=F.cross_entropy)
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=target)
    return [p.grad for p in stage.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", __file__, str(place / "store"), str(place / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parent.parent)}
    started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(PROCESSES)]
    try:
        assert [process.wait(600) for process in started] == [0] * PROCESSES
    finally:
        for process in started:
            process.kill()
    return [torch.load(f"{place / 'out'}.{rank}") for rank in range(PROCESSES)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_processes_agree_whatever_the_buckets(policy: str, ranks: list[dict[str, Any]]) -> None:
    results = [found for rank in ranks for key, found in rank.items() if key.startswith(policy)]
    assert len(results) == (4 if policy == "low" or ACCELERATE else 2)
    assert not same(results[0][0], [p.detach() for p in build().parameters()])
    for weights, rng, graphs in results:
        assert same(weights, results[0][0])
        # The short last batch of the second rank needs no graph of its own.
        assert rng.tolist() == [7, STEPS * PROCESSES] and graphs == 1


def test_two_processes_are_one_that_accumulates_in_order(ranks: list[dict[str, Any]]) -> None:
    """Dropout included: process r of step t draws with the sample 2 t + r."""

    def accumulate(compiled: RoundedModule, step: int) -> None:
        for rank in range(PROCESSES):
            x, target = batches()[step * PROCESSES + rank]
            F.cross_entropy(compiled(x), target).backward()
        for p in compiled.parameters():
            assert p.grad is not None
            p.grad /= PROCESSES

    assert same(
        train("reproducible", accumulate, fxround.compile(build(), "reproducible", seed=7)),
        ranks[0]["reproducible 25.0"][0],
    )


@pytest.mark.skipif(not PIPELINES, reason="pipelines are tested with later versions of PyTorch")
def test_stages_of_a_pipeline_are_one_process_that_makes_the_same_micro_batches(ranks: list[dict[str, Any]]) -> None:
    """Dropout and stochastic roundings included. PyTorch divides the gradients when it has added them."""
    parts, (x, target) = stages(), micro_batches()
    for _ in range(2):
        for part, right in zip(x.split(4), target.split(4), strict=True):
            F.cross_entropy(parts[1](parts[0](part)), right).backward()
        for p in (p for stage in parts for p in stage.parameters()):
            assert p.grad is not None
            p.grad.div_(MICRO_BATCHES)
    for stage, found in zip(parts, ranks, strict=True):
        assert same([p.grad for p in stage.parameters() if p.grad is not None], found["pipeline"])
        assert all(g.any() for g in found["pipeline"])


def test_sums_are_rounded_as_the_policy_says(ranks: list[dict[str, Any]]) -> None:
    def rounded(compiled: RoundedModule, step: int) -> None:
        parts = []
        for rank in range(PROCESSES):
            x, target = batches()[step * PROCESSES + rank]
            parts.append(torch.autograd.grad(F.cross_entropy(compiled(x), target), list(compiled.parameters())))
        for k, (name, p) in enumerate(compiled.named_parameters()):
            text = "bfloat16/stochastic" if name.startswith("2.") else "binary32"
            program = f"t0 = add(x0, x1) @ {text}; t1 = div(t0, 2) @ {text}"
            draw = Draw(7, (step + 1) * PROCESSES, (1 << 32) - 1 - k)
            p.grad = run_map(fxround.kernels.program.Program.parse(program), [g[k] for g in parts], torch.float32, draw)

    compiled = fxround.compile(build(), LOW, seed=7)
    assert same(train("low", rounded, compiled), ranks[0]["low 25.0"][0])


def test_delayed_scales_are_shared(ranks: list[dict[str, Any]]) -> None:
    """The first step's magnitudes are those of unshared scales, of which all are 1; the multiplier is R(M / m)."""
    alone, shared = ([found["scales"][i] for found in ranks] for i in (0, 1))
    for step in range(2):
        assert list(shared[0][step]) == list(shared[1][step]) == list(alone[0][step])
        assert all(torch.equal(a, shared[1][step][name]) for name, a in shared[0][step].items())
    assert any(not torch.equal(a, alone[1][1][name]) for name, a in alone[0][1].items())
    for name, state in shared[0][0].items():
        own = [found[0][name] for found in alone]
        assert state[1] == max(own[0][1], own[1][1]) > 0
        # Errors are in e5m2. NumPy's division is that of IEEE 754.
        largest = np.float32(57344.0 if "error" in name else 448.0)
        assert state[0].numpy() == largest / state[1].numpy()


def test_sharing_scales_needs_processes() -> None:
    with pytest.raises(FxroundError, match=r"torch\.distributed, which is not initialized"):
        fxround.compile(build(), "fp8_delayed").share_scales()


def test_the_average_of_many() -> None:
    program = average_program(Policy.preset("bfloat16"), "", torch.float32, 4)
    assert str(program).count("bfloat16/nearest_even") == 4 and program.arity == 4
    assert "binary64/nearest_even" in str(average_program(Policy.preset("identity"), "", torch.float64, 1))
    with pytest.raises(TypeError, match="real floating"):
        average_program(Policy.preset("identity"), "", torch.complex64, 2)


def test_wrong_modules_and_ranks_are_reported() -> None:
    compiled = fxround.compile(nn.Linear(2, 2), "reproducible")
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        average_in_order(compiled)  # type: ignore[arg-type]
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of a world_size of {world_size}"):
            compiled.distribute(rank, world_size=world_size)
    for args, said in ((("foo", 2), "rank is a str"), ((0, "2"), "world_size is a str"), ((0.5, 2), "rank is a float")):
        with pytest.raises(TypeError, match=f"{said}; expected an int"):
            compiled.distribute(*args)  # type: ignore[arg-type]


def test_a_rank_draws_bits_of_its_own() -> None:
    x = torch.ones(50, 6)
    alone = fxround.compile(build(), "stochastic", seed=3)
    second = fxround.compile(build(), "stochastic", seed=3).distribute(rank=1, world_size=2)
    first_call, second_call = alone(x), alone(x)
    assert torch.equal(second(x), second_call) and not torch.equal(first_call, second_call)
    assert second.rng.tolist() == alone.rng.tolist() == [3, 2]
    with torch.no_grad():
        assert torch.equal(second(x), alone(x))


if __name__ == "__main__":
    as_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
