"""The models of the suite through the texts of a GPU, run as host code: training steps with the bits of the CPU.

``PYTHONPATH=. python tests/support/host_models.py [WORD...]`` trains every model of ``models.ZOO`` under every policy
for two steps: forward, backward, optimizer. It runs them on the CPU and through the texts, with blocks and threads in
orders drawn from two seeds, and compares results, gradients, weights and states. Half of the runs have the texts of a
device whose binary64 is slow, and those of one that copies asynchronously. Races, barriers that some threads do not
meet and words that are read before they are written are errors (``cuda_host``). It prints a line for each run, and
fails if one differs. WORD: only runs whose model or policy has one of these words as its name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import models
import torch
from cuda_host import HostLauncher, prepare
from host_gpu import COMPILER
from torch import Tensor

import fxround
from benchmarks.cuda import with_own_products
from fxround import Policy, Rule
from fxround.runtime.cuda.launcher import launching

CHUNKS = Policy("chunks", (Rule(rounding="bfloat16", accumulate="bfloat16 chunk=32 combine=binary32"),))
POLICIES: dict[str, Any] = {
    **{name: name for name in ("identity", "reproducible", "stochastic", "up_down")},
    "chunks": CHUNKS,
    "fp8": with_own_products("fp8"),
}
# The policy of the optimizer, for one whose rules say nothing of it.
OPTIMIZERS = {"chunks": "bfloat16/stochastic", "fp8": "stochastic"}
STEPS = 2


def steps_of(compiled: fxround.RoundedModule, example: models.Example, policy: str) -> Callable[[], list[Tensor]]:
    """A function that trains a model from its first weights, and returns all that it computed."""
    first = {name: value.clone() for name, value in example.model.state_dict().items()}
    weights = [p for p in example.model.parameters() if p.requires_grad]

    def run() -> list[Tensor]:
        example.model.load_state_dict(first)
        adam = torch.optim.AdamW(weights, lr=0.01)
        optimizer = fxround.compile_optimizer(adam, OPTIMIZERS.get(policy, policy), seed=3)
        compiled.reseed(5)
        found = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            result = example.result(compiled(*example.args, **example.kwargs))
            result.square().sum().backward()
            found += [result.detach().clone(), *(p.grad.clone() for p in weights if p.grad is not None)]
            optimizer.step()
        states = [value for state in adam.state.values() for value in state.values()]
        return found + [torch.as_tensor(each).clone() for each in (*example.model.state_dict().values(), *states)]

    return run


def differing(host: HostLauncher, run: Callable[[], list[Tensor]]) -> list[str]:
    """The results that differ from the CPU's, by the seed of the schedule and their numbers."""
    want, wrong = run(), []
    prepare(host, run)
    for host.seed in (1, 2):
        with launching(host):
            got = run()
        bits = [[x.reshape(-1).view(torch.uint8) for x in each] for each in (got, want)]
        same = [torch.equal(a, b) for a, b in zip(*bits, strict=True)]
        wrong += [f"seed {host.seed}: result {i} of {len(same)}" for i, equal in enumerate(same) if not equal]
    return wrong


def main(words: Sequence[str]) -> int:
    """Run everything, or what has one of the words as its model or policy; returns the number of runs that differ."""
    known = {*models.ZOO, *POLICIES}
    if unknown := {*words} - known:
        raise SystemExit(f"no model or policy is named {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    failed = 0
    with TemporaryDirectory() as folder:
        host = HostLauncher(Path(folder), COMPILER)
        captured: dict[str, tuple[fxround.RoundedModule, models.Example]] = {}
        for n, (name, policy) in enumerate(product(models.ZOO, POLICIES)):
            if words and not {name, policy} & {*words}:
                continue
            began = time.process_time()
            if name not in captured:
                example = models.build(name)
                captured = {name: (fxround.compile(example.model.train(), "reproducible"), example)}
            whole, example = captured[name]
            kind = n + n // len(POLICIES)
            host.slow_binary64, host.async_copies = kind % 2 > 0, kind % 4 > 1
            host.launched.clear()
            compiled = whole.with_policy(POLICIES[policy])
            wrong = differing(host, steps_of(compiled, example, policy))
            failed += bool(wrong)
            took = f"{len(host.launched)} launches, {time.process_time() - began:.0f} s without the compiler's"
            print(f"{name}, {policy}: {'; '.join(wrong[:3]) or 'equal'} ({took})", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
