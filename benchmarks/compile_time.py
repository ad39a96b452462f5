"""Time of a first call, by stage, with an empty and with a filled cache of machine code.

    python -m benchmarks.compile_time                       # every model and policy, minutes each
    python -m benchmarks.compile_time resnet50 stochastic   # one

Each number is the processor time of a separate process. Compilation runs on one thread, so that wall time is the same
on an idle machine. graph: capture, passes, fusion. kernels: the time of the first call beyond that of a later one (LLVM
text, LLVM, linking, and the first use of memory).
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import header, table, vision_operators

POLICIES = ("stochastic", "reproducible")


def _vision(name: str) -> tuple[nn.Module, dict[str, Any]]:
    vision_operators()
    import torchvision

    return getattr(torchvision.models, name)(), {"x": torch.randn(1, 3, 224, 224)}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    vision_operators()
    import transformers

    return transformers.BertModel(transformers.BertConfig()), {"input_ids": torch.randint(0, 1000, (2, 16))}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    vision_operators()
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return model, {"input_ids": torch.randint(0, 1000, (2, 16)), "use_cache": False}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, steps, 32] to the same shape."""
        y: torch.Tensor = self.lstm(x)[0]
        return y


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "resnet50": lambda: _vision("resnet50"),
    "vit_b_16": lambda: _vision("vit_b_16"),
    "bert-base": _bert,
    "gpt2": _gpt2,
    "lstm, 2 layers, 32 steps": lambda: (_Recurrent(), {"x": torch.randn(2, 32, 32)}),
}


def measure(name: str, policy: str) -> dict[str, float]:
    """Return the seconds of graph and kernels in this process, and the numbers of compiled and of cached kernels."""
    import fxround
    from fxround.runtime.cpu.code import origins

    model, kwargs = MODELS[name]()
    with torch.no_grad():
        times = [time.process_time()]
        compiled = fxround.compile(model.eval(), policy, example_inputs=kwargs)
        times.append(time.process_time())
        for _ in range(3):
            compiled(**kwargs)
            times.append(time.process_time())
    graph, first, *later = (after - before for before, after in pairwise(times))
    return {"graph": graph, "kernels": first - min(later), **origins()}


def _in_a_process(name: str, policy: str, place: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_time", "--measure", name, policy]
    environment = {**os.environ, "FXROUND_CACHE_DIR": place}
    # pip writes the bytecode of what it installs; here the first process would compile 400 files.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(str(Path(__file__).parents[1] / "fxround"), quiet=1)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _row(name: str, policy: str) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as place:
        cold, warm = (_in_a_process(name, policy, place) for _ in range(2))
    sums = [f"{run['graph'] + run['kernels']:.1f}" for run in (cold, warm)]
    parts = [f"{run[part]:.1f}" for run in (cold, warm) for part in ("graph", "kernels")]
    return f"{name}, {policy}", *sums, *parts, f"{cold['compiled']:.0f}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table of all models and policies, or of one model, or of one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("policy", nargs="?", help="a policy (stochastic and reproducible)")
    parser.add_argument("--measure", action="store_true", help="measure this process, and print JSON")
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.model, options.policy)))
        return
    models = [options.model] if options.model else list(MODELS)
    policies = [options.policy] if options.policy else POLICIES
    chosen = [(name, policy) for name in models for policy in policies]
    head = ("seconds", "cold", "warm", "cold graph", "kernels", "warm graph", "kernels", "number of kernels")
    print(header(("torch", "llvmlite")))
    print(table(head, (_row(*row) for row in chosen)), flush=True)


if __name__ == "__main__":
    main()
