"""The probe of an untested PyTorch: two small models whose results and gradients are known.

The first is rounded toward zero to bfloat16; its values can be computed by hand, and a test computes them over
rationals. The second, rounded stochastically, uses more of capture: a mutated buffer, norms, two batch sizes, and
``torch.compile``. Its random bits depend on the numbers of the graph's operations, so that a different graph gives
different bits. Its values are stored as a hash, which is the same under every tested version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.compiler.torch_backend import rounding_backend
from fxround.compiler.torch_version import FAILED, PASSED, PROBING
from fxround.fingerprint import hash
from fxround.module import compile
from fxround.policy import Policy, Rule

TRUNCATING: Final = Policy("probe", (Rule(rounding="bfloat16/toward_zero", accumulate="bfloat16/toward_zero"),))
ARGUMENT: Final = ((1.0, 3.0), (-2.0, 1.0))
WEIGHT: Final = ((1.0, 1 / 256), (85.0, 0.3125))
RESULT: Final = ((1.015625, 7296.0), (0.0, 0.0))
GRADIENT: Final = ((2.015625, 6.03125), (171.0, 512.0))
STORED: Final = "sha256:9d233ff521a644e77699cba3b3ce9d7bf988f06b1ded74dde6fffc71720b6f3c"


class Squares(nn.Module):
    """The squares of the positive parts of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(WEIGHT))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x @ weight.T``."""
        y = torch.relu(x @ self.weight.T)
        return y * y


def answer() -> None:
    """Print PASSED, or FAILED and the first difference, as the last line of this process."""
    PROBING.append(True)
    try:
        wrong = [f"{what} is {got}, and must be {want}" for what, got, want in comparisons() if got != want]
    except Exception as error:  # whatever an interface that changed raises
        wrong = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
    sys.stdout.write(f"\n{FAILED}{wrong[0]}\n" if wrong else f"\n{PASSED}\n")


def comparisons() -> Iterator[tuple[str, Any, Any]]:
    """Yield what was computed, the result with this PyTorch, and the right result."""
    source = Squares()
    weight: Any = source.weight
    result = compile(source, TRUNCATING)(torch.tensor(ARGUMENT))
    yield "a truncated product", result.detach().tolist(), [list(row) for row in RESULT]
    result.sum().backward()
    yield "its gradient", weight.grad.tolist(), [list(row) for row in GRADIENT]
    yield "a stochastic model", _trained(compile(_layers(), "stochastic")), STORED
    compiled = torch.compile(_layers(), backend=rounding_backend, options={"policy": "stochastic"})
    yield "a stochastic model of torch.compile", _trained(compiled), STORED


def _layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Softmax(1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = (torch.arange(parameter.numel()) * 37 + number) % 17 - 8
            parameter.copy_(values.reshape(parameter.shape) / 16)
    return model


def _trained(model: Any) -> str:
    """Return a hash of the results for two batch sizes, of all gradients and of the model's state."""
    results = []
    for rows in (4, 3):
        result = model(torch.arange(6 * rows, dtype=torch.float32).reshape(rows, 6) / 8)
        result.square().sum().backward()
        results.append(result.detach().reshape(-1))
    results += [parameter.grad.reshape(-1) for parameter in model.parameters()]
    results += [buffer.float().reshape(-1) for name, buffer in model.named_buffers() if "running" in name]
    return hash(torch.cat(results))
