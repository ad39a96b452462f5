"""AdaRound: for each weight, up or down, so that a layer's results change least; learned by a relaxation.

Source: Nagel, Amjad, van Baalen, Louizos and Blankevoort, Up or down? Adaptive rounding for post-training quantization,
ICML 2020, sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxround.errors import shown
from fxround.significance.inputs import positive
from fxround.tuning.choices import generator, place_of, require_positive, whole
from fxround.tuning.products import Product, require_matrices
from fxround.tuning.task import Task

# The stretch of the rectified sigmoid (equation 23).
_ZETA: Final = 1.1
_GAMMA: Final = -0.1


@dataclass(frozen=True)
class AdaRound:
    """Learn h in [0, 1] for each weight, which is down + h (up - down) meanwhile, one layer after the other.

    steps    for each layer; the paper takes 10,000 at Adam's own rate of 0.001
    rows     of the inputs of a layer, drawn anew for each step
    rate     of Adam
    regular  the factor of the regularizer, lambda
    warmup   the part of the steps without it, 0 to 1
    beta     its exponent at the end of the warm-up and at the end, between which it falls linearly

    With h = clip(1.2 sigmoid(v) - 0.1, 0, 1) a step lowers, in the rows of the step,

        mean over rows of |W x - W(h) x'|^2  +  lambda sum (1 - |2 h - 1|^beta)

    where x is an input of the layer in the original model, and x' the same in the model whose earlier weights are
    rounded (equations 21 to 25, without the activation function that follows). v begins at the weight itself. At the
    end each weight goes up if h is at least 1/2; ``left`` counts those whose h is not within 0.01 of 0 or 1.
    """

    steps: int = 2000
    rows: int = 256
    rate: float = 1e-2
    regular: float = 0.01
    warmup: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)

    def __post_init__(self) -> None:
        positive("steps", self.steps)
        positive("rows", self.rows)
        if not isinstance(self.beta, tuple | list) or len(self.beta) != 2:
            raise ValueError(f"beta is {shown(self.beta)}; expected two exponents, such as (20.0, 2.0)")
        require_positive(rate=self.rate, regular=self.regular, first_beta=self.beta[0], last_beta=self.beta[1])
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int | float) or not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {shown(self.warmup)}; expected a part of the steps, from 0 to below 1")

    def count(self, task: Task) -> int:
        """Return the number of weights."""
        return len(task.weights)

    def run(self, task: Task) -> Iterator[None]:
        """Round the weights in the order in which the model reads them."""
        both = zip(task.stream(task.original), task.stream(task.model), strict=True)
        for number, (exact, products) in enumerate(both):
            name = require_matrices(products, task.done)
            weight, index = task.weights[name], products[0].weight_matrices()
            down, up = weight.grid.neighbours(weight.value)
            flat = weight.value.reshape(-1)[index].float()
            with torch.no_grad():
                wanted = torch.cat([product.finite_inputs().float() @ flat.transpose(1, 2) for product in exact], 1)
                inputs = _inputs(products)
            x = place_of(weight.value, down, up).reshape(-1)[index].float()
            draws = generator(task.seed, number, index.device)
            h = self._learned(x, down.reshape(-1)[index], up.reshape(-1)[index], inputs, wanted, draws)
            chosen = torch.empty(weight.value.numel(), device=index.device)
            chosen[index] = h
            chosen = chosen.reshape(weight.value.shape)
            task.write(name, torch.where(chosen >= 0.5, up, down), whole(chosen, down, up))
            yield

    @torch.enable_grad()
    def _learned(
        self, x: Tensor, down: Tensor, up: Tensor, inputs: Tensor, wanted: Tensor, draws: torch.Generator
    ) -> Tensor:
        """Return h for weights of shape [groups, rows, n], of inputs [groups, m, n] and wanted results."""
        v = (-torch.log((_ZETA - _GAMMA) / (x - _GAMMA) - 1)).requires_grad_()
        optimizer = torch.optim.Adam([v], lr=self.rate)
        low, gap = down.float(), up.float() - down.float()
        free, begins = gap != 0, int(self.warmup * self.steps)
        for step in range(self.steps):
            rows = torch.randint(inputs.shape[1], (self.rows,), generator=draws, device=inputs.device)
            h = _stretched(v)
            lost = inputs[:, rows] @ (low + h * gap).transpose(1, 2) - wanted[:, rows]
            loss = lost.square().sum() / self.rows
            if step >= begins:
                first, last = self.beta
                beta = first + (last - first) * (step - begins) / (self.steps - begins)
                loss = loss + self.regular * (1 - (2 * h - 1).abs().pow(beta))[free].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return _stretched(v.detach())


def _stretched(v: Tensor) -> Tensor:
    """Return the rectified sigmoid."""
    return (torch.sigmoid(v) * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def _inputs(products: list[Product]) -> Tensor:
    return torch.cat([product.finite_inputs().float() for product in products], 1)
