"""Models, numbers of processes, ways to share them and policies: which tensors depend on the number of processes.

Each model is trained for some steps by one process that shares nothing, and by N processes of this machine over gloo,
in fxround and in stock PyTorch. A cell counts the tensors (the last result, the last gradients, the weights) whose bits
are not those of one process. Tensor parallelism: every process has the whole batch. Data parallelism: a step has
8 micro-batches, which the processes share.

    python -m benchmarks.process_grid                                   # the table of docs/distributed.md
    python -m benchmarks.process_grid --processes 2 --models MLP --ways tensor --policies bfloat16 --steps 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fxround
from benchmarks.harness import header
from fxround import Policy, Rule
from fxround.errors import FxroundError
from fxround.training.distributed import average_in_order

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from parallel_models import MLP, Attention, Gated, whole

MICRO_BATCHES: Final = 8
_SHARDS: Final = "shards:8/lanes:16"
STOCK: Final = "stock"


def _sharded(name: str, rounding: str) -> Policy:
    return Policy(name, (Rule(rounding=rounding, accumulate="binary32", order=_SHARDS),))


POLICIES: Final[dict[str, Any]] = {
    "reproducible": "reproducible_sharded",
    "bfloat16": _sharded("bfloat16", "bfloat16"),
    "stochastic": _sharded("stochastic", "binary32/stochastic"),
    "up_down": _sharded("up_down", "binary32/up_down"),
    "mxfp8": "mxfp8",
}


# ---- models ----


class _Block(nn.Module):
    """Attention and a layer of its own kind, each after a norm."""

    def __init__(self, norm: Callable[[int], nn.Module], layer: nn.Module, processes: int) -> None:
        super().__init__()
        self.first, self.second = norm(24), norm(24)
        self.attention, self.layer = Attention(24, 8, processes), layer

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.layer(self.second(x))


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT2(nn.Module):
    """Two layers with layer norms."""

    def __init__(self, processes: int = 1) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(20, 24), nn.Embedding(8, 24)
        self.blocks = nn.Sequential(*(_Block(nn.LayerNorm, _Wide(), processes) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(torch.arange(tokens.shape[-1]))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]

    @staticmethod
    def plan() -> dict[str, Any]:
        """Attention and the wide layers in parts."""
        styles: dict[str, Any] = {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
        styles |= {"blocks.*.attention.o": RowwiseParallel()}
        return styles | {"blocks.*.layer.up": ColwiseParallel(), "blocks.*.layer.down": RowwiseParallel()}


class Llama(nn.Module):
    """Two layers with RMS norms and gates; tensor parallelism has some positions in each process between them."""

    def __init__(self, processes: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 24)
        self.blocks = nn.Sequential(*(_Block(nn.RMSNorm, Gated(), processes) for _ in range(2)))
        self.norm, self.head = nn.RMSNorm(24), nn.Linear(24, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))  # type: ignore[no-any-return]

    @staticmethod
    def plan() -> dict[str, Any]:
        """Sequence parallelism."""
        styles: dict[str, Any] = {
            "embedding": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for part in ("first", "second"):
            styles[f"blocks.*.{part}"] = SequenceParallel()
        for part in ("attention", "layer"):
            styles[f"blocks.*.{part}"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for part in (*(f"attention.{name}" for name in "qkv"), "layer.first", "layer.gate"):
            styles[f"blocks.*.{part}"] = ColwiseParallel()
        for part in ("attention.o", "layer.down"):
            styles[f"blocks.*.{part}"] = RowwiseParallel(output_layouts=Shard(1))
        return styles


class CNN(nn.Module):
    """Convolutions with batch norm of the batch's own statistics: kept ones are those of each process."""

    def __init__(self, processes: int = 1) -> None:
        del processes
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.Flatten(),
            nn.Linear(72, 20),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _mlp_plan() -> dict[str, Any]:
    return {path: style() for path, style in MLP.plan.items()}


@dataclass(frozen=True)
class _Kind:
    """A model, its plan of tensor parallelism (None: it has none), and the shape of a row of its arguments."""

    make: Callable[[int], nn.Module]
    plan: Callable[[], dict[str, Any]] | None
    shape: tuple[int, ...]
    tokens: bool = False

    def batch(self, number: int) -> Tensor:
        """Return the arguments of a micro-batch: four rows."""
        g = torch.Generator().manual_seed(number)
        return torch.randint(20, (4, 8), generator=g) if self.tokens else torch.randn(4, *self.shape, generator=g)


MODELS: Final = {
    "MLP": _Kind(MLP, _mlp_plan, (24,)),
    "GPT-2": _Kind(GPT2, GPT2.plan, (), True),
    "Llama": _Kind(Llama, Llama.plan, (), True),
    "CNN": _Kind(CNN, None, (2, 8, 8)),
}


# ---- ways ----


@dataclass(frozen=True)
class _Cell:
    """A model that is trained in one way under one policy."""

    model: str
    way: str
    policy: str

    def trained(self, steps: int, mesh: DeviceMesh | None) -> dict[str, str]:
        """Return the hashes of the last result, the last gradients and the weights. mesh: None shares nothing."""
        kind = MODELS[self.model]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            size = 1 if mesh is None or self.way != "tensor" else mesh.size()
            model: Any = kind.make(size)
        return dict(self._tensors(model, kind, steps, mesh))

    def _tensors(self, model: Any, kind: _Kind, steps: int, mesh: DeviceMesh | None) -> Iterator[tuple[str, str]]:
        rounded = self.policy != STOCK
        if mesh is not None and self.way == "tensor":
            assert kind.plan is not None
            parallelize_module(model, mesh, kind.plan())
        if mesh is not None and self.way == "FSDP":
            fully_shard(model, mesh=mesh)
        if rounded:
            model = fxround.compile(model, POLICIES[self.policy])
        if self.way == "DDP" or (mesh is None and self.way == "FSDP"):
            model = DistributedDataParallel(model)
        if rounded and self.way != "tensor":
            average_in_order(model, micro_batches=MICRO_BATCHES)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if rounded:
            optimizer = fxround.compile_optimizer(optimizer, "reproducible")
        for step in range(steps):
            optimizer.zero_grad()
            result = self._together(model, kind, step) if self.way == "tensor" else self._apart(model, kind, step)
            optimizer.step()
        if self.way == "tensor":
            yield "result", fxround.hash(whole(result.detach()))
        for name, p in model.named_parameters():
            path = name.removeprefix("module.")
            yield f"gradient of {path}", fxround.hash(whole(p.grad))
            yield path, fxround.hash(whole(p.detach()))

    def _together(self, model: Any, kind: _Kind, step: int) -> Tensor:
        result: Tensor = model(kind.batch(step))
        result.square().mean().backward()
        return result

    def _apart(self, model: Any, kind: _Kind, step: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        own = range(rank, MICRO_BATCHES, size)
        # Stock PyTorch adds what a process has, and averages over processes; average_in_order divides by all.
        share = 1 if self.policy != STOCK else len(own)
        for j in own:
            last = j == own[-1]
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                (model(kind.batch(step * MICRO_BATCHES + j)).square().mean() / share).backward()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.process_grid")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=["tensor", "DDP", "FSDP"], choices=["tensor", "DDP", "FSDP"])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    cells = [
        _Cell(model, way, policy)
        for model in chosen.models
        for way in chosen.ways
        if way != "tensor" or MODELS[model].plan is not None
        for policy in (*chosen.policies, STOCK)
    ]
    print(header(["torch"]))
    alone = _by_processes(1, cells, chosen.steps, shared=False)
    columns = [*chosen.policies, STOCK]
    print(f"| model | way | processes | tensors | {' | '.join(columns)} |\n|---|---|--:|--:|{'--:|' * len(columns)}")
    for size in chosen.processes:
        found = _by_processes(size, cells, chosen.steps)
        for model, way in dict.fromkeys((cell.model, cell.way) for cell in cells):
            row = [_Cell(model, way, policy) for policy in columns]
            counts = [_differing(alone[cell], found[cell]) for cell in row]
            print(f"| {model} | {way} | {size} | {len(alone[row[-1]])} | {' | '.join(counts)} |", flush=True)


def _differing(first: Any, second: Any) -> str:
    """Return how many of two runs' hashes differ; "refused" where a run has an error in their place."""
    if isinstance(first, str) or isinstance(second, str):
        return "refused"
    assert first.keys() == second.keys()
    return str(sum(first[name] != second[name] for name in first))


def _by_processes(size: int, cells: list[_Cell], steps: int, shared: bool = True) -> dict[_Cell, Any]:
    """Return what the process of the highest rank has of each cell: hashes, or the message of an error."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, cells, steps, shared, folder
        multiprocessing.start_processes(_as_a_rank, arguments, size, start_method="spawn")  # type: ignore[no-untyped-call]
        found: dict[_Cell, Any] = torch.load(Path(folder, "found"), weights_only=False)
        return found


def _as_a_rank(rank: int, size: int, cells: list[_Cell], steps: int, shared: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,)) if shared else None
    found: dict[_Cell, Any] = {}
    for cell in cells:
        try:
            found[cell] = cell.trained(steps, mesh)
        except FxroundError as error:
            found[cell] = str(error)
            if rank == size - 1:
                print(f"{cell}, {size} processes: {error}", file=sys.stderr, flush=True)
    if rank == size - 1:
        torch.save(found, Path(folder, "found"))
    time.sleep(0.5)  # gloo may abort a process that ends at once
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
