"""The determinism matrix: which operators keep their bits along which axis, in stock PyTorch and in fxround.

Every operator runs on its own arguments, and all of them are in one module, so that one check covers all. Results and
gradients are compared. A cell is the number of distinct results: 1 is invariant.

    python -m benchmarks.reproducibility --matrix
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import table
from fxround.invariance.cases import AXES
from fxround.invariance.report import AxisResult, InvarianceReport
from fxround.numerics.elementary import ELEMENTARY

ROWS = 5
Function = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Operator:
    """A family of operators: a module, or a function of one tensor, that computes it of [ROWS, *shape]."""

    family: str
    name: str
    make: Callable[[], nn.Module | Function]
    shape: tuple[int, ...]
    positive: bool = False


def _of(function: Function) -> Callable[[], Function]:
    return lambda: function


def _activations(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (8, -1)).unbind(-2)
    functions = (F.gelu, F.silu, F.softplus, F.elu, F.mish, F.hardswish, F.logsigmoid, F.leaky_relu)
    return torch.cat([f(part) for f, part in zip(functions, parts, strict=True)], -1)


def _arithmetic(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.stack([a + b, a - b, a * b, a / (b.abs() + 1), (a * a + 1).sqrt(), a.lerp(b, 0.3)], -1)


# The functions of one argument with the same name in PyTorch. acosh needs arguments from 1; digamma's derivative,
# polygamma, has no kernel.
_UNARY = tuple(name for name, e in ELEMENTARY.items() if e.arity == 1 and hasattr(torch, name))
_ARGUMENT: dict[str, Function] = {"acosh": lambda x: x + 1, "digamma": Tensor.detach}


def _elementary(x: Tensor) -> Tensor:
    return torch.stack([getattr(torch, name)(_ARGUMENT.get(name, _itself)(x)) for name in _UNARY], -1)


def _itself(x: Tensor) -> Tensor:
    return x


def _scattered(x: Tensor) -> Tensor:
    index = (torch.arange(x.shape[-1]) * 7 % 11).expand(x.shape)
    return x.new_zeros((*x.shape[:-1], 11)).scatter_add(-1, index, x)


class Attention(nn.Module):
    """Causal self-attention with one head."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, time, width] to the same shape."""
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Tokens(nn.Module):
    """An embedding of indices computed from the argument's values, so that its gradient adds many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, time] to [n, time, 24]."""
        return self.table((x * 64).long().remainder(7)) * x.unsqueeze(-1)


OPERATORS = (
    Operator("contraction", "linear", lambda: nn.Linear(700, 150), (700,)),
    Operator("contraction", "matmul", _of(lambda x: x @ x.transpose(-1, -2)), (33, 130)),
    Operator("contraction", "matvec", _of(lambda x: x[:, :-1] @ x[:, -1:].transpose(-1, -2)), (40, 300)),
    Operator("contraction", "conv1d", lambda: nn.Conv1d(16, 24, 5), (16, 60)),
    Operator("contraction", "conv2d", lambda: nn.Conv2d(16, 24, 3, padding=1), (16, 14, 14)),
    Operator("contraction", "conv2d, strided", lambda: nn.Conv2d(16, 24, 3, stride=2), (16, 15, 15)),
    Operator("contraction", "conv2d, depthwise", lambda: nn.Conv2d(16, 16, 3, groups=16), (16, 14, 14)),
    Operator("contraction", "conv_transpose2d", lambda: nn.ConvTranspose2d(16, 8, 3, stride=2), (16, 7, 7)),
    Operator("contraction", "conv3d", lambda: nn.Conv3d(4, 8, 3), (4, 6, 7, 7)),
    Operator("contraction", "attention", Attention, (48, 32)),
    Operator("reduction", "sum", _of(lambda x: x.sum(-1)), (3, 5000)),
    Operator("reduction", "mean", _of(lambda x: x.mean((-2, -1))), (60, 70)),
    Operator("reduction", "var", _of(lambda x: x.var(-1)), (3000,)),
    Operator("reduction", "norm", _of(lambda x: x.norm(dim=-1)), (3000,)),
    Operator("reduction", "logsumexp", _of(lambda x: x.logsumexp(-1)), (3000,)),
    Operator("reduction", "prod", _of(lambda x: (x * 0.1 + 1).prod(-1)), (300,)),
    Operator("reduction", "cumsum", _of(lambda x: x.cumsum(-1)), (1000,)),
    Operator("reduction", "softmax", _of(lambda x: x.softmax(-1)), (1000,)),
    Operator("reduction", "log_softmax", _of(lambda x: x.log_softmax(-1)), (1000,)),
    Operator("reduction", "layer_norm", lambda: nn.LayerNorm(700), (700,)),
    Operator("reduction", "group_norm", lambda: nn.GroupNorm(4, 16), (16, 12, 12)),
    Operator("reduction", "batch_norm, eval", lambda: nn.BatchNorm2d(16).eval(), (16, 12, 12)),
    Operator("reduction", "avg_pool2d", lambda: nn.AvgPool2d(3), (8, 12, 12)),
    Operator("reduction", "adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d(5), (8, 12, 12)),
    Operator("reduction", "scatter_add", _of(_scattered), (1000,)),
    Operator("reduction", "embedding", Tokens, (300,), True),
    Operator("pointwise", "arithmetic", _of(_arithmetic), (600,)),
    Operator("pointwise", "elementary functions", _of(_elementary), (600,), True),
    Operator("pointwise", "activations", _of(_activations), (800,)),
    Operator("exact", "max_pool2d", lambda: nn.MaxPool2d(2), (8, 12, 12)),
    Operator("exact", "amax", _of(lambda x: x.amax(-1)), (1000,)),
)


class Suite(nn.Module):
    """All operators, each on its own argument: a dict in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        made = {o.name: o.make() for o in OPERATORS}
        self.functions = {name: m for name, m in made.items() if not isinstance(m, nn.Module)}
        self.names = {_key(name): name for name, m in made.items() if isinstance(m, nn.Module)}
        self.operators = nn.ModuleDict({_key(name): m for name, m in made.items() if isinstance(m, nn.Module)})

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map [n, ...] tensors by operator name to results by operator name."""
        results = {name: function(given[name]) for name, function in self.functions.items()}
        return results | {self.names[key]: module(given[self.names[key]]) for key, module in self.operators.items()}


def _key(name: str) -> str:
    return name.replace(", ", "_")


def suite() -> Suite:
    """Return the suite with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Suite()


def arguments(rows: int = ROWS) -> dict[str, Tensor]:
    """Return an argument for every operator: normal deviates, or numbers in the open interval (0, 1)."""
    generator = torch.Generator().manual_seed(1)
    return {
        o.name: torch.rand(rows, *o.shape, generator=generator).clamp(0.01, 0.99)
        if o.positive
        else torch.randn(rows, *o.shape, generator=generator)
        for o in OPERATORS
    }


def check(policy: str | None) -> InvarianceReport:
    """Check all axes of all operators."""
    given = ((arguments(),), {})
    report = fxround.check_invariance(
        suite(), given, policy=policy, gradients=True, first=False, build="benchmarks.determinism:suite"
    )
    assert all(axis.distinct for axis in report.axes), report
    return report


def counts(axis: AxisResult, operator: Operator) -> int:
    """Return the greatest number of distinct values of an operator's result or gradients."""
    mine = (f"output['{operator.name}']", f"gradient of arguments[0]['{operator.name}']")
    weights = f"gradient of operators.{_key(operator.name)}."
    return max(n for name, n in axis.by_result if name in mine or name.startswith(weights))


def rows(stock: InvarianceReport, ours: InvarianceReport) -> Iterator[tuple[str, ...]]:
    """Yield one row per operator: stock PyTorch's counts, and fxround's."""
    for operator in OPERATORS:
        cells = (f"{counts(stock[name], operator)} / {counts(ours[name], operator)}" for name in AXES)
        yield (f"{operator.name} ({operator.family})", *cells)


COLUMNS = ("operator (kind)", *AXES)


def matrix() -> str:
    """Return the table, with stock PyTorch's counts before fxround's."""
    return table(COLUMNS, rows(check(None), check("reproducible")))
