"""The goals of speed, as times of stock PyTorch: what each of them names, measured in one run.

Each row compares calls of fxround and of stock PyTorch, interleaved, by the median of the thread's processor time; a
row of two threads by the clock. A goal that is missed is bold.

    python -m benchmarks.goals                     # all rows: some minutes on a quiet machine
    python -m benchmarks.goals --only softmax gru  # the rows whose names contain one of these words
    python -m benchmarks.goals --write zen3        # store the table of this processor for docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.compile_time import _in_a_process as compile_times
from benchmarks.cost import models
from benchmarks.harness import conditions, header, medians
from benchmarks.small_models import MODELS as SMALL
from benchmarks.tables import RESULTS
from benchmarks.training import STOCK, WORKS, Training
from fxround import Policy, Rule
from fxround.runtime.cpu.code import current_set

Calls = Mapping[str, Callable[[], object]]
# What a Linear of float64 accumulates in binary64 and rounds to bfloat16.
_NARROW: Final = Policy("bfloat16", (Rule(rounding="bfloat16", accumulate="binary64"),))


@dataclass(frozen=True)
class Goal:
    """A row: its name, the largest ratio for each policy, and what makes the calls, of which "stock" is the first.

    goals: by policy; of rows that give seconds, the largest ones.
    """

    name: str
    goals: Mapping[str, float]
    make: Callable[[], Calls]
    threads: int = 1


def _calls(model: Any, x: Any, policies: Mapping[str, Any], stock: Callable[[], object] | None = None) -> Calls:
    """Return the model's call and those of the compiled models, without gradients."""
    args = x if isinstance(x, tuple) else (x,)

    def call(function: Any) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return function(*args)

        return run

    made = {name: call(fxround.compile(model, policy)) for name, policy in policies.items()}
    return {"stock": stock or call(model), **made}


def _linear(dtype: torch.dtype, policies: Mapping[str, Any]) -> Calls:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024).to(dtype).eval()
    return _calls(layer, torch.randn(256, 1024).to(dtype), policies)


def _convolution() -> Calls:
    layer = nn.Conv2d(64, 64, 3, padding=1).double().eval()
    return _calls(layer, torch.randn(1, 64, 28, 28, dtype=torch.float64), {"stochastic": "stochastic"})


def _sum() -> Calls:
    x, y = (torch.randn(1000, 1000, dtype=torch.float64) for _ in range(2))
    return _calls(lambda a, b: a + b, (x, y), {name: name for name in ("binary16", "bfloat16")})


def _bfloat16() -> Calls:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)).bfloat16().eval()
    policies = {name: name for name in ("reproducible", "stochastic", "fp8", "mxfp8")}
    return _calls(model, torch.randn(128, 768).bfloat16(), policies)


def _rows(module: nn.Module) -> Calls:
    return _calls(module, torch.randn(4096, 1024), {"reproducible": "reproducible", "stochastic": "stochastic"})


def _sigmoid() -> Calls:
    policies = {name: name for name in ("reproducible", "binary32/toward_zero", "stochastic")}
    return _calls(torch.sigmoid, torch.randn(1000, 1000), policies)


def _layers() -> Calls:
    model, inputs = _model("transformer")
    return _calls(model, inputs, {"identity": "identity", "stochastic": "stochastic"})


def _blocks() -> Calls:
    model, inputs = _model("residual")
    return _calls(model, inputs, {"stochastic": "stochastic"})


def _model(part: str) -> tuple[nn.Module, Any]:
    return next((model.eval(), x) for name, model, x in models() if part in name)


def _small(name: str) -> Calls:
    torch.manual_seed(0)
    build, shape = SMALL[name]
    return _calls(build().eval(), torch.randn(shape), {"identity": "identity"})


def _gru() -> Calls:
    torch.manual_seed(0)
    gru = nn.GRU(8, 16, batch_first=True, bidirectional=True).eval()
    return _calls(gru, torch.randn(2, 12, 8), {"reproducible": "reproducible"})


def _grid_sample() -> Calls:
    x, grid = torch.randn(1, 16, 64, 64), torch.rand(1, 64, 64, 2) * 2 - 1
    return _calls(
        lambda a, b: F.grid_sample(a, b, "bicubic", align_corners=False), (x, grid), {"reproducible": "reproducible"}
    )


def _training() -> Calls:
    return {
        "stock": Training(WORKS["mnist"], STOCK).step,
        "reproducible": Training(WORKS["mnist"], "reproducible").step,
    }


def _lorenz(s: Tensor) -> Tensor:
    x, y, z = s.unbind(0)
    return s + 0.01 * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


_STEPS: Final = 2000


def _loop() -> Calls:
    state = torch.ones(3, dtype=torch.float64)

    def run(policy: str) -> Callable[[], object]:
        return lambda: fxround.iterate(_lorenz, state, _STEPS, policy)

    return {name: run(name) for name in ("stochastic", "reproducible", "identity")}


GOALS: Final = (
    Goal(
        "Linear 1024 of float64, 256 rows",
        {"reproducible": 1.15, "stochastic": 14, "bfloat16": 4},
        lambda: _linear(
            torch.float64, {"reproducible": "reproducible", "stochastic": "stochastic", "bfloat16": _NARROW}
        ),
    ),
    Goal("convolution of float64, 64 channels, 28x28", {"stochastic": 8}, _convolution),
    Goal("sum of float64, 1e6", {"binary16": 1.5, "bfloat16": 1.5}, _sum),
    Goal("Linear 1024 of float16", {"mxfp8": 1.3}, lambda: _linear(torch.float16, {"mxfp8": "mxfp8"})),
    Goal("MLP of bfloat16, 128 x 768", {"fp8": 1.2, "mxfp8": 1.2}, _bfloat16),
    Goal("softmax 4096x1024", {"reproducible": 1.2, "stochastic": 3.5}, lambda: _rows(nn.Softmax(-1))),
    Goal("layer_norm 4096x1024", {"reproducible": 1.2, "stochastic": 4}, lambda: _rows(nn.LayerNorm(1024))),
    Goal("sigmoid 1e6", {"reproducible": 1.3, "binary32/toward_zero": 3, "stochastic": 3}, _sigmoid),
    Goal("transformer layers", {"identity": 1.1, "stochastic": 7}, _layers),
    Goal("residual blocks", {"stochastic": 8}, _blocks),
    *(Goal(f"small: {name}", {"identity": 1.2}, lambda name=name: _small(name)) for name in SMALL),
    Goal("bidirectional gru, 12 steps, 16 features", {"reproducible": 3}, _gru),
    Goal("bicubic grid_sample, 16 channels, 64x64", {"reproducible": 4}, _grid_sample),
    Goal("MNIST training step, two threads", {"reproducible": 1.3}, _training, threads=2),
)


def rows(wanted: Callable[[str], bool]) -> Iterator[list[str]]:
    """Yield a row for each goal of a name that is wanted: name, stock, and each policy with its ratio and goal."""
    for goal in (goal for goal in GOALS if wanted(goal.name)):
        torch.set_num_threads(goal.threads)
        seconds = medians(goal.make(), time.thread_time if goal.threads == 1 else time.perf_counter)
        stock = seconds.pop("stock")
        cells = [_cell(name, s / stock, goal.goals.get(name)) for name, s in seconds.items()]
        yield [goal.name, f"{1e3 * stock:.3g} ms", ", ".join(cells)]
    torch.set_num_threads(1)
    if wanted("lorenz by iterate"):
        seconds = {name: s / _STEPS * 1e6 for name, s in medians(_loop(), time.thread_time).items()}
        least = seconds["stochastic"]
        cells = [
            _cell("identity", seconds["identity"], 2, " us"),
            _cell("reproducible", seconds["reproducible"], least, " us"),
            f"stochastic {least:.2f} us",
        ]
        yield ["lorenz by iterate, float64, a step", "", ", ".join(cells)]
    if wanted("import fxround"):
        yield ["import fxround over torch", "", _cell("", _import_seconds(), 0.3, " s")]
    if wanted("bert-base, first call"):
        yield ["bert-base, first call", "", ", ".join(_first_calls())]


def _cell(name: str, value: float, goal: float | None, unit: str = "") -> str:
    """Return a policy with its figure and its goal; bold where the goal is missed."""
    told = f"{value:.2f}{unit}"
    if goal is not None and value > goal:
        told = f"**{told}**"
    return " ".join(filter(None, (name, told, "" if goal is None else f"(goal {goal:.3g})")))


def _import_seconds() -> float:
    """Return the processor time of ``import fxround`` after ``import torch``: the median of five processes."""
    code = "import time, torch; t = time.process_time(); import fxround; print(time.process_time() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return sorted(float(run.stdout) for run in runs)[2]


def _first_calls() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        for name, goal in (("cold", 5.0), ("warm", 2.0)):
            run = compile_times("bert-base", "stochastic", place)
            yield _cell(name, run["graph"] + run["kernels"], goal, " s")


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="rows whose names contain a word")
    parser.add_argument("--write", metavar="NAME", help="store the table speed-NAME under benchmarks/results")
    options = parser.parse_args()
    print(header(["torch"]))
    load = os.getloadavg()[0]
    measured = []
    for row in rows(lambda name: any(word.lower() in name.lower() for word in options.only)):
        measured.append(row)
        print(" | ".join(row), flush=True)
    if options.write:
        _store(f"speed-{options.write}", measured, load)


def _store(name: str, measured: list[list[str]], load: float) -> None:
    columns = ["work", "stock", "times of stock PyTorch"]
    where = ", one thread" if current_set() == "host" else f", as {current_set()} code, one thread"
    made = {"columns": columns, "numbers": [1], "rows": measured}
    path = RESULTS / "speed.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    command = "python -m benchmarks.goals"
    stored[name] = made | conditions(command, [load, os.getloadavg()[0]], where)
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
