"""``fxround.train_widths``: all widths of stored integers trained at once, so that one model serves each of them.

The training is that of Huang et al., "Nearly Lossless Adaptive Bit Switching", arXiv 2502.01199: Double Rounding with
learned scales (section 3.1, appendix A.4), learning rates of scales that depend on the width (ALRS, section 3.2), and
widths drawn for each layer by its sensitivity (HASB, section 3.3). What differs is in the docstrings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxround.errors import shown, type_of
from fxround.locks import applied
from fxround.numerics.modes import Mode
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.significance.inputs import ModelCall, calls, positive
from fxround.significance.progress import progress as shown_progress
from fxround.tuning.choices import generator, require_positive
from fxround.tuning.integers import EVEN, Scales, decode, encode, narrow
from fxround.tuning.sensitivity import traces
from fxround.tuning.switch import IntegerWeight, add_integers, integer_weights, require_storable, with_switch

_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Loss = Callable[[Any, Any], Tensor]
# A learned scale stays at least this part of the first one.
_LEAST_PART: Final = 2.0**-10


def train_widths(
    model: nn.Module,
    policy: Any,
    data: Any,
    loss: Loss = F.cross_entropy,
    *,
    widths: Iterable[int] | None = None,
    epochs: int = 20,
    rate: float = 5e-4,
    decay: float = 0.0,
    adaptive: bool = True,
    threshold: float = 0.0,
    sensitive: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> nn.Module:
    """Return a copy of a trained model with stored integers, whose weights and scales are trained for all widths.

    For each batch and each width, from the largest on, the model computes with its weights in this width (equations 1
    to 3 of ``fxround.tuning.integers``); a step of Adam follows for the parameters, and one for the scales (algorithm
    A.2). Gradients pass the roundings straight through where the integer is inside of its range, else they are zero.
    A scale s_h gets the exact derivative of equation 3 under this rule, times the factor of LSQ (Esser et al., ICLR
    2020, section 2.2), 1 / sqrt(n (2^(l-1) - 1)) for n elements that share it:

        2^(h-l) (q_l - w / (s_h 2^(h-l)))    inside, else 2^(h-l) times the end of the range

    **ALRS** (``adaptive``, equations 6 and 7). With the rate r of the cosine schedule and d = h - l, the rate of the
    scales is

        r_l = e_d r (1 - mean over weights of min(largest |g|, 1))        e_d = 10^(-d/2), for odd d 5 10^(-(d+1)/2)

    where g is the gradient of a weight's scales, its norm clipped to 1. The paper subtracts the mean from r itself,
    which is negative for any gradient above r. Scales are learned as multiples of their first values, because steps of
    Adam have the size of the rate, whatever a scale is.

    **HASB** (``threshold`` above 0, algorithms 1 and A.3). In epoch e of E, each weight leaves the width of the step
    with the probability threshold (e + 1) / E and draws another: a sensitive one with probabilities proportional to
    the widths, any other one with equal ones. Sensitive is a weight whose trace of the Hessian is at least the mean
    over weights, estimated before the training on the first batches of up to 1,000 rows.

    What else differs from the paper: activations stay in floating point; batch norms keep their statistics, in eval
    mode, instead of having others for each width; there is no distillation and no search for mixed widths.

    Args:
        model: a trained ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed. PyTorch's kernels train.
        policy: which weights, in which blocks and how many bits h, as for ``store_integers``; the first scales are its.
        data: batches of arguments and a target, which can be iterated once an epoch: a DataLoader, or a list.
        loss: a function of the model's result and the target that returns a scalar.
        widths: as for ``store_integers``; None for 2 to h bits.
        epochs: over the data.
        rate: of Adam, at the beginning of a cosine schedule without warm-up.
        decay: the weight decay of parameters; scales have none.
        adaptive: whether the rates of scales are those of ALRS; otherwise they are r.
        threshold: 0 to 1, of HASB; 0 trains uniform widths alone.
        sensitive: whether traces decide what HASB draws; otherwise every weight draws with equal probabilities.
        seed: 0 to 2^63 - 1, of what PyTorch draws (a DataLoader's order, dropout) and of the widths.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        As ``store_integers``: a copy in the model's training mode, at the stored width, with the attribute ``switch``.

    Raises:
        TypeError, ValueError: for wrong arguments, batches without a target, a loss that is not finite, and what
            ``store_integers`` raises.

    Example::

        stored = fxround.train_widths(model, "int8:channel", loader, widths=(8, 6, 4, 2), epochs=20)
        stored.switch(2)
    """
    chosen = require_storable(model, widths)
    parsed = Policy.parse(policy)
    positive("epochs", epochs)
    require_positive(rate=rate)
    _require_share("threshold", threshold)
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < math.inf:
        raise ValueError(f"decay is {shown(decay)}; expected a number of at least 0")
    Draw(seed)
    if isinstance(data, Iterator):
        raise ValueError(f"data is {type_of(data)}, which is read once; expected a DataLoader or a list of batches")
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        result = copy.deepcopy(model).eval()
        with torch.no_grad():
            weights = integer_weights(copy.deepcopy(result), parsed, next(calls(model, data)), chosen)
        draws = None
        if threshold:
            named = traces(result, list(weights), calls(model, data), loss, seed) if sensitive else None
            draws = Roulette(named, seed)
        _train_mode(result)
        training = _Training(result, weights, loss, decay, adaptive)
        with shown_progress(f"{type(model).__name__} widths", epochs, progress) as tick:
            for epoch in range(epochs):
                own = 0.5 * rate * (1 + math.cos(math.pi * epoch / epochs))
                for call in calls(model, data):
                    for width in reversed(training.widths):
                        served = training.uniform(width)
                        if draws is not None:
                            served = draws.drawn(served, weights, threshold * (epoch + 1) / epochs)
                        training.step(call, served, width, own)
                tick()
        with torch.no_grad():
            for name, weight in weights.items():
                value, scales = training.values[name].detach(), training.scales(name)
                learned = Scales(scales.detach(), weight.scales.blocks)
                add_integers(result, name, value, learned, weight.widths, weight.mode)
        for parameter in result.parameters():
            parameter.grad = None
    return with_switch(result, like=model)


class DoubleRounding(torch.autograd.Function):
    """The numbers of a weight in a width, with the gradients of ``train_widths`` for the weight and its scales.

    Arguments: the weight, the scales of its elements (they broadcast), how many elements share one, the stored and the
    served width, and the mode of equation 1.
    """

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, scale: Tensor, count: float, stored: int, served: int, mode: Mode = EVEN
    ) -> Tensor:
        """Return the numbers."""
        q = encode(w, scale, stored, mode)
        ctx.save_for_backward(w, scale, q)
        ctx.fixed = count, stored, served
        return decode(q, scale, stored, served, w.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the weight and of the scales."""
        w, scale, q = ctx.saved_tensors
        count, stored, served = ctx.fixed
        least, most, factor = -(1 << served - 1), (1 << served - 1) - 1, 2 ** (stored - served)
        exact = w / (scale * factor)
        inside = (least < exact) & (exact < most)
        slope = torch.where(inside, narrow(q, stored, served) - exact, exact.clamp(least, most))
        of_scale = (gradient * slope).sum_to_size(scale.shape) * (factor / math.sqrt(count * most))
        return gradient * inside, of_scale, None, None, None, None


class Roulette:
    """The draws of HASB: another width for some of the weights of a step (algorithm 1).

    traces: of the Hessian, by the names of weights; None: all weights draw with equal probabilities.
    """

    def __init__(self, traces: Mapping[str, float] | None, seed: int) -> None:
        self._traces, self._generator = traces, generator(seed, 1, torch.device("cpu"))

    def probabilities(self, name: str, widths: Sequence[int]) -> list[float]:
        """Return the probability of each width."""
        if self._traces is None or self._traces[name] < sum(self._traces.values()) / len(self._traces):
            return [1 / len(widths)] * len(widths)
        return [width / sum(widths) for width in widths]

    def drawn(self, served: Mapping[str, int], weights: Mapping[str, IntegerWeight], share: float) -> dict[str, int]:
        """Return the widths of a step, of which each is drawn anew with the probability ``share``."""
        chosen = dict(served)
        for name, weight in weights.items():
            if float(torch.rand((), generator=self._generator)) < share:
                odds = torch.tensor(self.probabilities(name, weight.widths))
                chosen[name] = weight.widths[int(torch.multinomial(odds, 1, generator=self._generator))]
        return chosen


def adapted_rate(rate: float, stored: int, served: int, gradients: Iterable[Tensor]) -> float:
    """Return the rate of the scales (ALRS): gradients are those of the scales of each weight."""
    apart = stored - served
    share = 5 * 10 ** (-(apart + 1) / 2) if apart % 2 else 10 ** (-apart / 2)
    most = [min(float(g.abs().max()) / max(1.0, float(g.norm())), 1.0) for g in gradients]
    return share * rate * (1 - sum(most) / len(most))


class _Training:
    """The parameters of a model and its scales, with an optimizer for each."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, IntegerWeight],
        loss: Loss,
        decay: float,
        adaptive: bool,
    ) -> None:
        self._model, self._weights, self._loss, self._adaptive = model, weights, loss, adaptive
        self.widths = sorted({bits for weight in weights.values() for bits in weight.widths})
        self.values = {name: model.get_parameter(name) for name in weights}
        self._parts = {name: torch.ones_like(w.scales.values).requires_grad_() for name, w in weights.items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("no parameter of the model requires gradients; expected some to train")
        self._parameters = torch.optim.Adam(trained, weight_decay=decay)
        self._scales = torch.optim.Adam(self._parts.values())

    def uniform(self, width: int) -> dict[str, int]:
        """Return a width for each weight: this one, or the largest below that the weight has."""
        return {name: max(b for b in w.widths if b <= max(width, w.widths[0])) for name, w in self._weights.items()}

    def scales(self, name: str) -> Tensor:
        """Return the scales of a weight."""
        return self._weights[name].scales.values * self._parts[name]

    def step(self, call: ModelCall, served: Mapping[str, int], width: int, rate: float) -> None:
        """Take a step with these widths of weights; ``width`` is the one that ALRS asks about, ``rate`` Adam's."""
        if call.target is None:
            raise ValueError("a batch of the data has no target; expected batches of arguments and a target")
        rounded = {name: self._rounded(name, bits) for name, bits in served.items()}
        result = torch.func.functional_call(self._model, rounded, call.args, call.kwargs)
        loss = self._loss(result, call.target)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.isfinite():
            wanted = "expected a finite scalar: choose a lower rate, or data without NaNs"
            raise ValueError(f"the loss in {width} bits is {shown(loss)}; {wanted}")
        self._parameters.zero_grad()
        self._scales.zero_grad()
        loss.backward()
        gradients = [part.grad for part in self._parts.values() if part.grad is not None]
        adapted = adapted_rate(rate, self.widths[-1], width, gradients) if self._adaptive else rate
        for optimizer, own in ((self._parameters, rate), (self._scales, adapted)):
            optimizer.param_groups[0]["lr"] = own
            optimizer.step()
        with torch.no_grad():
            for part in self._parts.values():
                part.clamp_(min=_LEAST_PART)

    def _rounded(self, name: str, served: int) -> Tensor:
        weight, value = self._weights[name], self.values[name]
        full = Scales(self.scales(name), weight.scales.blocks).full(value.shape)
        count = value.numel() / weight.scales.values.numel()
        how = count, weight.widths[-1], served, weight.mode
        rounded: Tensor = applied(DoubleRounding, value, full, *how)
        return rounded


def _train_mode(model: nn.Module) -> None:
    """Set the training mode, but for batch norms, whose statistics would be those of all widths."""
    model.train()
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.eval()


def _require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {type_of(value)}; expected a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {shown(value)}; expected 0 to 1")


__all__ = ["DoubleRounding", "Roulette", "adapted_rate", "train_widths"]
