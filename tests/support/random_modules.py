"""Random modules of PyTorch's own functions, and every entry point of fxround that runs them.

``Drawn`` keeps the shape of images [batch, 8, 6, 8] from step to step, so that any function may follow any other;
changes in place, views, shared operands and values that nobody reads are among them. ``judge_module`` compiles it in
all ways.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from models import unfused
from random_builder import Model
from random_judge import in_binary64
from random_reference import by_reference, encodings
from torch import Tensor, nn

import fxround

Steps = tuple[tuple[int, int, int], ...]


def _changed_in_place(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, :4] = y[:, 4:]
    z += 0.5
    z[..., 0].mul_(2)
    return z


def _gated(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    left, right = torch.cat([x, y], 1).chunk(2, 1)
    return left * torch.sigmoid(right)


def _attended(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, y, y, scale=0.4)


def _skipped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.both(torch.cat([F.relu(m.first(x)), F.relu(m.second(y))], 1))


class Skip(nn.Module):
    """Two parallel convolutions, whose results a third one combines."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.both = nn.Conv2d(16, 8, 1)


# A function of (its layer, a value, an older value), and what makes the layer.
FUNCTIONS: tuple[tuple[Callable[[Any, Tensor, Tensor], Tensor], Callable[[], nn.Module]], ...] = (
    (lambda m, x, y: x + y, nn.Identity),
    (lambda m, x, y: F.relu(m(x)), lambda: nn.Conv2d(8, 8, 3, padding=1)),
    (_skipped, Skip),
    (lambda m, x, y: y + F.relu(m(x)), lambda: nn.Linear(8, 8)),
    (
        lambda m, x, y: m(x),
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU6()),
    ),
    (lambda m, x, y: m(x) * y, lambda: nn.LayerNorm(8)),
    (lambda m, x, y: torch.softmax(x, -1), nn.Identity),
    (lambda m, x, y: m(x), lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())),
    (_attended, nn.Identity),
    (_gated, nn.Identity),
    (_changed_in_place, nn.Identity),
    (lambda m, x, y: torch.where(x > y, x, 0.5 * y), nn.Identity),
    (lambda m, x, y: x - x.mean((-1, -2), keepdim=True), nn.Identity),
    (lambda m, x, y: torch.stack([x, y, x]).sum(0), nn.Identity),
    (lambda m, x, y: x.transpose(-1, 1).flatten(1).reshape(-1, 8, 6, 8).clamp(-2, 2), nn.Identity),
    (lambda m, x, y: F.interpolate(F.max_pool2d(x, 2), scale_factor=2) * y, nn.Identity),
    (lambda m, x, y: x[:, [3, 1, 0, 2, 7, 6, 5, 4]] / (y.abs() + 1), nn.Identity),
    (lambda m, x, y: F.pad(x[..., 1:], (0, 1)) + y[:, :1].expand(-1, 8, -1, -1), nn.Identity),
    (lambda m, x, y: m(x), lambda: nn.ConvTranspose2d(8, 8, 3, padding=1)),
    (lambda m, x, y: x.cumsum(-1) * 0.1, nn.Identity),
    (lambda m, x, y: x.masked_fill(y > 0, 0.25), nn.Identity),
    (lambda m, x, y: m(x), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25))),
)


MODULES = st.tuples(*[st.tuples(st.integers(0, len(FUNCTIONS) - 1), st.integers(0, 3), st.integers(0, 5))] * 7)


class Drawn(nn.Module):
    """Functions by number; each takes a value and an older one, counted back from the latest."""

    def __init__(self, steps: Steps, results: int = 1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.steps, self.results = steps, results
        self.layers = nn.ModuleList(FUNCTIONS[f % len(FUNCTIONS)][1]() for f, _, _ in steps)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [y, x]
        for layer, (f, a, b) in zip(self.layers, self.steps, strict=True):
            call = FUNCTIONS[f % len(FUNCTIONS)][0]
            values.append(call(layer, values[-1 - a % len(values)], values[-1 - b % len(values)]))
        return tuple(values[-self.results :])


def images(seed: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, 8, 6, 8, generator=generator) for _ in range(2))
    return x, y


def same(got: Any, want: Any, what: str) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one is None) == (other is None), f"{what}: only one of them has result {i}"
        assert one is None or torch.equal(encodings(one.detach()), encodings(other.detach())), (
            f"{what}: result {i} differs"
        )


def judge_module(model: nn.Module, policy: str, folder: Path) -> None:
    """AssertionError where one of the ways of calling a module has other bits: by ``fxround.compile`` fused or not,
    node by node by NumPy, exported and loaded, by ``torch.compile``; results and gradients, first and third call."""
    compiled = fxround.compile(model.eval(), policy, seed=3, strict=False)
    with torch.no_grad():
        first = compiled(*images(1))
        compiled(*images(2))
        plain = unfused(compiled)(*images(1))
        same(plain, first, "unfused and fused")
        same(compiled(*images(1)), first, "third call and first")
        entry = compiled._called()
        lowered = entry.lowered
        want, values = by_reference(lowered, [*entry._inputs(images(1)), compiled.rng])
        same(
            first,
            [w for w, port in zip(want, entry.captured.outputs, strict=True) if not port.mutation],
            "fused and NumPy",
        )
        in_binary64(Model(entry.captured.graph, (), ()), lowered, values)
        compiled.export(folder / "model.pt2", images(1))
        same(fxround.load(folder / "model.pt2")(*images(1)), first, "exported and compiled")
        options = {"policy": policy, "seed": 3, "strict": False}
        torch._dynamo.reset()
        same(torch.compile(model, backend="fxround", options=options)(*images(1)), first, "torch.compile and compile")
    _judge_step(model, policy)


def _judge_step(model: nn.Module, policy: str) -> None:
    """The same of a training step."""
    steps = {}
    compiled = fxround.compile(copy.deepcopy(model).train(), policy, seed=3, strict=False)
    state = copy.deepcopy(compiled.state_dict())
    for name in ("fused", "unfused", "again"):
        module = unfused(compiled) if name == "unfused" else compiled
        module.load_state_dict(state)
        module.zero_grad()
        inputs = [x.requires_grad_() for x in images(1)]
        results = module(*inputs)
        sum((r * r).sum() for r in results).backward()
        steps[name] = [*results, *(x.grad for x in (*inputs, *module.parameters()))]
        steps[name] = [None if x is None else x.detach().clone() for x in steps[name]]
    same(steps["unfused"], steps["fused"], "a training step, unfused and fused")
    same(steps["again"], steps["fused"], "a training step, later and first")
