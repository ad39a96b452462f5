"""How many results and gradients depend on the number of processes that share a model, in fxround and in stock PyTorch.

Each model is run by one process without parallel parts, and by 1, 2, 4 and 8 processes that share it by
parallelize_module, over gloo on this machine. Tensors are compared by their encodings.

    python -m benchmarks.processes                  # the table of docs/distributed.md
    python -m benchmarks.processes --processes 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxround
from benchmarks.harness import header

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from parallel_models import MODELS, model_of, results

POLICY = "reproducible_sharded"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # as in every process
    print(header(["torch"]))
    whole = _all(None)
    print("| model | processes | tensors | other bits, fxround | other bits, stock |\n|---|--:|--:|--:|--:|")
    for size in chosen.processes:
        shared = _by_processes(size)
        for name in MODELS:
            rows = [_differing(whole[how, name], shared[how, name]) for how in (POLICY, "stock")]
            print(f"| {name} | {size} | {len(whole[POLICY, name])} | {rows[0]} | {rows[1]} |", flush=True)


def _all(mesh: DeviceMesh | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what every model computes, compiled and in stock PyTorch."""
    made = {(POLICY, name): fxround.compile(model_of(name, mesh), POLICY) for name in MODELS}
    made |= {("stock", name): model_of(name, mesh) for name in MODELS}
    return {key: results(key[1], model) for key, model in made.items()}


def _by_processes(size: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the process of the highest rank computes, of ``size`` processes that share each model."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_as_a_rank, (size, folder), size, start_method="spawn")  # type: ignore[no-untyped-call]
        computed: dict[tuple[str, str], dict[str, Any]] = torch.load(Path(folder) / "results")
        return computed


def _as_a_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    computed = _all(init_device_mesh("cpu", (size,)))
    if rank == size - 1:
        torch.save(computed, Path(folder) / "results")
    time.sleep(0.5)  # gloo may abort a process that ends at once
    dist.destroy_process_group()


def _differing(first: dict[str, Any], second: dict[str, Any]) -> int:
    assert first.keys() == second.keys()
    return sum(fxround.hash(first[key]) != fxround.hash(second[key]) for key in first)


if __name__ == "__main__":
    main()
