"""DiscQuant: all weights of a model between their neighbours, at a corner where its results change little.

Source: Chee, Backurs, Heck, Zhang, Kulkarni, Rothvoss and Gopi, DiscQuant: A quantization method for neural networks
inspired by discrepancy theory, 2025 (arXiv 2501.06417), section 4; the constants are those of the authors' program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from fxround.errors import type_of
from fxround.significance.inputs import ModelCall, positive
from fxround.tuning.choices import generator, place_of, require_positive, whole
from fxround.tuning.task import Task
from fxround.tuning.weights import Weight


@dataclass(frozen=True)
class DiscQuant:
    """Learn x in [0, 1] for each weight, which is down + x (up - down) meanwhile, for the whole model at once.

    steps       of AdamW
    accumulate  batches of the data in each step
    warmup      steps in which the rate rises; after them it falls as a cosine, to zero
    rho         the factor of the gradient of the divergence
    clamp       its largest magnitude
    rate        of AdamW

    With y the place of the weight between its neighbours and d = 12 times the mean squared error of rounding to nearest
    (of each weight, then the mean over weights), the gradient of a step is

        -(2 y - 1) + clamp(rho grad(KL) / d, -clamp, clamp)

    where KL is the divergence of the model's distribution from the original one, by the softmax over the last dimension
    of the logits (``result.logits``, or the first tensor of the result), in the mean over distributions and batches. x
    starts at random in the cube and is cut to [0, 1] after each step. At the end, x is rounded to nearest; ``left``
    counts those that were not within 0.01 of 0 or 1.
    """

    steps: int = 1024
    accumulate: int = 8
    warmup: int = 128
    rho: float = 200.0
    clamp: float = 1.0
    rate: float = 0.1

    def __post_init__(self) -> None:
        positive("steps", self.steps)
        positive("accumulate", self.accumulate)
        require_positive(rho=self.rho, clamp=self.clamp, rate=self.rate)
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup is {self.warmup!r}; expected a number of steps, from 0 to below {self.steps}")

    def count(self, task: Task) -> int:
        """Return the number of steps."""
        return self.steps

    def run(self, task: Task) -> Iterator[None]:
        """Learn, and write the weights at the end, or where the iteration is given up."""
        numbered = enumerate(task.weights.values())
        places = [_Places(weight, generator(task.seed, i, weight.value.device)) for i, weight in numbered]
        optimizer = torch.optim.AdamW([place.x for place in places], lr=self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        scale = sum(place.error for place in places) / len(places)
        order = _order(task)
        try:
            for _ in range(self.steps):
                self._differentiate(task, places, [next(order) for _ in range(self.accumulate)], scale)
                optimizer.step()
                schedule.step()
                for place in places:
                    place.x.data.clamp_(0, 1)
                yield
        finally:
            for place in places:
                place.write(task)

    def _factor(self, step: int) -> float:
        """Return the factor of the rate."""
        if step < self.warmup:
            return step / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))

    @torch.enable_grad()
    def _differentiate(self, task: Task, places: list[_Places], batches: list[ModelCall], scale: float) -> None:
        """Set the gradients of a step."""
        sums = [torch.zeros_like(place.x) for place in places]
        for call in batches:
            values = {place.weight.name: place.value() for place in places}
            logits = _logits(task.result(task.model, call, values))
            with torch.no_grad():
                wanted = _logits(task.result(task.original, call))
            loss = divergence(wanted, logits)
            if not loss.isfinite():
                raise ValueError("the logits have NaNs or infinities, of which nothing can be learned; check the data")
            gradients = torch.autograd.grad(loss, [place.x for place in places], allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient
        factor = self.rho / (scale * len(batches)) if scale else 0.0
        for place, total in zip(places, sums, strict=True):
            bounded = (factor * total).clamp(-self.clamp, self.clamp)
            place.x.grad = bounded - place.pull


class _Places:
    """The numbers x of one weight, its neighbours, and what pulls x towards the nearer corner."""

    def __init__(self, weight: Weight, draws: torch.Generator) -> None:
        self.weight = weight
        self.down, self.up = weight.grid.neighbours(weight.value)
        y = place_of(weight.value, self.down, self.up)
        self.pull = 2 * y - 1
        self.x = nn.Parameter(torch.rand(y.shape, generator=draws, dtype=y.dtype, device=y.device))
        nearest = weight.grid.nearest(weight.value)
        self.error = 12 * float((nearest.double() - weight.value.double()).square().mean())

    def value(self) -> Tensor:
        """Return the weight at x."""
        low, high = self.down.to(self.x.dtype), self.up.to(self.x.dtype)
        return (low + self.x * (high - low)).to(self.weight.value.dtype)

    def write(self, task: Task) -> None:
        """Let the weight be its neighbours at the nearest corner."""
        x = self.x.detach()
        task.write(self.weight.name, torch.where(x > 0.5, self.up, self.down), whole(x, self.down, self.up))


def divergence(wanted: Tensor, logits: Tensor) -> Tensor:
    """Return the divergence of Kullback and Leibler of the logits' distributions from the wanted ones, in the mean."""
    p, q = (F.log_softmax(t.reshape(-1, t.shape[-1]).float(), 1) for t in (wanted, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _logits(result: Any) -> Tensor:
    """Return the logits of a result. Raises ValueError if it has none."""
    own = getattr(result, "logits", None)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    logits = own if isinstance(own, Tensor) else next(iter(tensors), None)
    if logits is None or not logits.dim() or logits.shape[-1] < 2:
        got = type_of(result) if logits is None else f"a tensor of shape {tuple(logits.shape)}"
        raise ValueError(f"the result is {got}; expected logits, whose last dimension is that of at least two classes")
    return logits


def _order(task: Task) -> Iterator[ModelCall]:
    """Yield the batches without end, each time in another order."""
    draws = generator(task.seed, -1, torch.device("cpu"))
    while True:
        for i in torch.randperm(len(task.calls), generator=draws).tolist():
            yield task.calls[i]
