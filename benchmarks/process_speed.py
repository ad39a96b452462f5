"""What processes cost that share a step of training: seconds and bytes, in fxround and in stock PyTorch.

Each row is a training step (forward, backward, SGD) of a perceptron, in every one of N processes of this machine over
gloo, one thread each. What communication adds is the step minus the same step without it, which all processes take at
the same time, too. Bytes are those that the sockets of a process received in a step, as the kernel of Linux counts
them. Rows of a table take turns, and the median of the first process is printed.

    python -m benchmarks.process_speed                  # the tables of docs/distributed.md
    python -m benchmarks.process_speed --processes 4 --steps 20
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxround
from benchmarks.harness import header
from fxround.training.distributed import average_in_order

POLICY = "reproducible_sharded"
WIDTH, HIDDEN, ROWS = 512, 2048, 64
# A row: its name, the row without communication, and what makes a model of a mesh.
Step = Callable[[], None]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.process_speed")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=30, help="of each row (default 30)")
    chosen = parser.parse_args()
    print(header(["torch"]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = chosen.processes, chosen.steps, folder
        multiprocessing.start_processes(_as_a_rank, arguments, chosen.processes, start_method="spawn")  # type: ignore[no-untyped-call]
        print(Path(folder, "table").read_text())


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def _shared(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _averaged(micro_batches: int | None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(fxround.compile(_model(), POLICY))
    average_in_order(ddp, micro_batches=micro_batches)
    return ddp


def _rows(size: int, mesh: DeviceMesh) -> dict[str, tuple[str, nn.Module]]:
    """Return the models of all rows, each with the name of the row that has no communication."""
    compiled = fxround.compile(_model(), POLICY)
    return {
        "stock, alone": ("", _model()),
        "stock, DDP": ("stock, alone", DistributedDataParallel(_model())),
        "fxround, alone": ("", compiled),
        "fxround, DDP's all-reduce": ("fxround, alone", DistributedDataParallel(fxround.compile(_model(), POLICY))),
        "fxround, average_in_order": ("fxround, alone", _averaged(None)),
        f"fxround, micro_batches={size}": ("fxround, alone", _averaged(size)),
        "stock, tensor parallel": ("", _shared(mesh)),
        "fxround, tensor parallel": ("", fxround.compile(_shared(mesh), POLICY)),
    }


def _as_a_rank(rank: int, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    rows = _rows(size, init_device_mesh("cpu", (size,)))
    taken = {name: _step(model, x) for name, (_, model) in rows.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    received = dict.fromkeys(rows, 0)
    for number in range(steps + 2):
        for name, step in taken.items():
            dist.barrier()
            before = _received()
            began, worked = time.perf_counter(), time.process_time()
            step()
            took = time.perf_counter() - began, time.process_time() - worked
            if number > 1:  # the first steps capture, and DDP orders its buckets anew after one
                seconds[name].append(took)
                received[name] = _received() - before
    if rank == 0:
        Path(folder, "table").write_text(_table(rows, seconds, received))
    time.sleep(0.5)  # gloo may abort a process that ends at once
    dist.destroy_process_group()


def _step(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _table(rows: dict[str, Any], seconds: dict[str, list[tuple[float, float]]], received: dict[str, int]) -> str:
    median = {
        name: [1e3 * statistics.median(kind) for kind in zip(*taken, strict=True)] for name, taken in seconds.items()
    }
    lines = ["| step | ms | added | ms of the processor | added | MB received |", "|---|--:|--:|--:|--:|--:|"]
    for name, (alone, _) in rows.items():
        pairs = [
            (own, own - other if alone else None)
            for own, other in zip(median[name], median[alone or name], strict=True)
        ]
        cells = " | ".join(f"{own:.1f} | {'' if added is None else f'{added:.1f}'}" for own, added in pairs)
        lines.append(f"| {name} | {cells} | {received[name] / 1e6:.2f} |")
    return "\n".join([*lines, f"\nload {os.getloadavg()[0]:.1f} at the end"])


def _received() -> int:
    """Return the bytes that the TCP connections of this process have received, as Linux counts them."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", information, 128)[0]  # tcpi_bytes_received
    return total


if __name__ == "__main__":
    main()
