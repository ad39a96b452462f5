"""Updates: the step of each optimizer as a formula over rounded operations, for one parameter.

An ``Update`` names its states as PyTorch does, and computes the new parameter and states from the old ones, the
gradient and a few numbers. The numbers (a learning rate, a bias correction) are computed in binary64 on the host and
passed as tensors of no dimensions, so that a scheduler changes no graph. The formulas are those of ``torch.optim``'s
single-tensor code, with one rounding per multiplication and addition, where PyTorch's kernels fuse some. Options that
change a formula are part of its key: a group whose momentum becomes zero gets another graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

Group = Mapping[str, Any]
Numbers = dict[str, float]
States = dict[str, Tensor]


@dataclass(frozen=True)
class Update(ABC):
    """The formula of one parameter's step, for one setting of the options that change it.

    maximize    whether the gradient is negated
    decay       whether ``weight_decay * p`` is added to the gradient
    first       whether this is the first step of a parameter, where the first step has another formula
    """

    maximize: bool
    decay: bool
    first: bool

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The names of the tensors kept from step to step, each of the parameter's shape."""

    @abstractmethod
    def numbers(self, group: Group, step: int) -> Numbers:
        """Return the numbers of the formula for a step; ``step`` counts from 1."""

    @abstractmethod
    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        """Return the new parameter and the new states."""

    def gradient(self, p: Tensor, g: Tensor, n: dict[str, Tensor]) -> Tensor:
        """Return g, negated and with p * weight_decay added where the options say so."""
        g = -g if self.maximize else g
        return g + p * n["weight_decay"] if self.decay else g

    def initial(self, name: str, p: Tensor, group: Group) -> Tensor:
        """Return a state before the first step."""
        return torch.zeros_like(p, memory_format=torch.preserve_format)


def power(base: float, n: int) -> float:
    """Return base^n in binary64, the same on every machine: ``base**n`` calls the C library's pow, whose bits vary.

    Fifty decimal digits are computed in integer arithmetic, and so is the conversion to binary64.
    """
    return float(_DIGITS.power(Decimal(base), n))


_DIGITS: Final = Context(prec=50)


@dataclass(frozen=True)
class SGD(Update):
    """b = b * momentum + g * (1 - dampening), at first g; p = p + d * -lr, d = b, or g + b * momentum (Nesterov)."""

    momentum: bool
    nesterov: bool
    dampening: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def numbers(self, group: Group, step: int) -> Numbers:
        keep = {"weight_decay": group["weight_decay"], "momentum": group["momentum"]}
        return keep | {"rest": 1 - group["dampening"], "rate": -float(group["lr"])}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        if not self.momentum:
            return p + g * n["rate"], {}
        part = g * n["rest"] if self.dampening else g
        buffer = g.clone() if self.first else s["momentum_buffer"] * n["momentum"] + part
        direction = g + buffer * n["momentum"] if self.nesterov else buffer
        return p + direction * n["rate"], {"momentum_buffer": buffer}

    @staticmethod
    def of(group: Group, first: bool) -> SGD:
        """Return the formula of a group of ``torch.optim.SGD``."""
        momentum, dampening = group["momentum"] != 0, group["dampening"] != 0
        return SGD(group["maximize"], group["weight_decay"] != 0, first, momentum, group["nesterov"], dampening)


@dataclass(frozen=True)
class Adam(Update):
    """m = m + (g - m) * (1 - b1); v = v * b2 + (g * (1 - b2)) * g; p = p + (m * -r) / (sqrt(v) / c + eps).

    r = lr / (1 - b1^t), c = sqrt(1 - b2^t). Decoupled decay (AdamW): p = p * (1 - lr * weight_decay) first.
    """

    amsgrad: bool
    decoupled: bool
    near: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def numbers(self, group: Group, step: int) -> Numbers:
        b1, b2 = (float(b) for b in group["betas"])
        lr, decay = float(group["lr"]), group["weight_decay"]
        values = {"weight_decay": decay, "shrink": 1 - lr * decay, "first": 1 - b1, "kept": b1, "second": b2}
        rate, scale = -(lr / (1 - power(b1, step))), math.sqrt(1 - power(b2, step))
        return values | {"rest": 1 - b2, "rate": rate, "scale": scale, "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        p = p * n["shrink"] if self.decoupled else p
        difference = g - s["exp_avg"]
        m = s["exp_avg"] + difference * n["first"] if self.near else g - difference * n["kept"]
        v = s["exp_avg_sq"] * n["second"] + (g * n["rest"]) * g
        state = {"exp_avg": m, "exp_avg_sq": v}
        if self.amsgrad:
            v = state["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        return p + (m * n["rate"]) / (v.sqrt() / n["scale"] + n["eps"]), state

    @staticmethod
    def of(group: Group, first: bool) -> Adam:
        """Return the formula of a group of ``torch.optim.Adam`` or ``AdamW``."""
        decoupled, decays = group["decoupled_weight_decay"], group["weight_decay"] != 0
        plain = decays and not decoupled
        near = 1 - float(group["betas"][0]) < 0.5
        return Adam(group["maximize"], plain, False, group["amsgrad"], decays and decoupled, near)


@dataclass(frozen=True)
class RepDLAdam(Adam):
    """m = m * b1 + g * (1 - b1); v = v * b2 + (g * g) * (1 - b2); p = p + (m / (sqrt(v) / c + eps)) * -r."""

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        m = s["exp_avg"] * n["kept"] + g * n["first"]
        v = s["exp_avg_sq"] * n["second"] + (g * g) * n["rest"]
        state = {"exp_avg": m, "exp_avg_sq": v}
        if self.amsgrad:
            v = state["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        return p + (m / (v.sqrt() / n["scale"] + n["eps"])) * n["rate"], state

    @staticmethod
    def of(group: Group, first: bool) -> RepDLAdam:
        """Return the formula of a group of ``torch.optim.Adam``, by RepDL's definitions."""
        return RepDLAdam(group["maximize"], group["weight_decay"] != 0, False, group["amsgrad"], False, False)


@dataclass(frozen=True)
class Adagrad(Update):
    """s = s + g * g; p = p + (g * -r) / (sqrt(s) + eps), r = lr / (1 + (t - 1) * lr_decay)."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    def numbers(self, group: Group, step: int) -> Numbers:
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return {"weight_decay": group["weight_decay"], "rate": -rate, "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        total = s["sum"] + g * g
        return p + (g * n["rate"]) / (total.sqrt() + n["eps"]), {"sum": total}

    def initial(self, name: str, p: Tensor, group: Group) -> Tensor:
        return torch.full_like(p, group["initial_accumulator_value"], memory_format=torch.preserve_format)

    @staticmethod
    def of(group: Group, first: bool) -> Adagrad:
        """Return the formula of a group of ``torch.optim.Adagrad``."""
        return Adagrad(group["maximize"], group["weight_decay"] != 0, False)


@dataclass(frozen=True)
class RMSprop(Update):
    """v = v * a + (g * (1 - a)) * g; d = sqrt(v) + eps, centered: sqrt(v - m * m) + eps, m = m + (g - m) * (1 - a).

    p = p + (g * -lr) / d; with momentum b = b * momentum + g / d, p = p + b * -lr.
    """

    momentum: bool
    centered: bool
    near: bool

    @property
    def states(self) -> tuple[str, ...]:
        more = (("momentum_buffer", self.momentum), ("grad_avg", self.centered))
        return ("square_avg", *(name for name, kept in more if kept))

    def numbers(self, group: Group, step: int) -> Numbers:
        kept = {"weight_decay": group["weight_decay"], "alpha": group["alpha"], "rest": 1 - group["alpha"]}
        return kept | {"momentum": group["momentum"], "rate": -float(group["lr"]), "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        v = s["square_avg"] * n["alpha"] + (g * n["rest"]) * g
        state = {"square_avg": v}
        if self.centered:
            d = g - s["grad_avg"]
            m = state["grad_avg"] = s["grad_avg"] + d * n["rest"] if self.near else g - d * n["alpha"]
            v = v - m * m
        scale = v.sqrt() + n["eps"]
        if not self.momentum:
            return p + (g * n["rate"]) / scale, state
        state["momentum_buffer"] = s["momentum_buffer"] * n["momentum"] + g / scale
        return p + state["momentum_buffer"] * n["rate"], state

    @staticmethod
    def of(group: Group, first: bool) -> RMSprop:
        """Return the formula of a group of ``torch.optim.RMSprop``."""
        near = 1 - group["alpha"] < 0.5
        decays = group["weight_decay"] != 0
        return RMSprop(group["maximize"], decays, False, group["momentum"] > 0, group["centered"], near)


UPDATES: Final = MappingProxyType(
    {
        torch.optim.SGD: SGD.of,
        torch.optim.Adam: Adam.of,
        torch.optim.AdamW: Adam.of,
        torch.optim.Adagrad: Adagrad.of,
        torch.optim.RMSprop: RMSprop.of,
    }
)
# The updates of definitions other than fxround's own.
_REDEFINED: Final[Mapping[tuple[str, type], Callable[[Group, bool], Update]]] = MappingProxyType(
    {("repdl", torch.optim.Adam): RepDLAdam.of}
)


def update_of(kind: type[torch.optim.Optimizer], definitions: str) -> Callable[[Group, bool], Update]:
    """Return the function from a parameter group, and whether this is its first step, to the formula of the step."""
    return _REDEFINED.get((definitions, kind)) or UPDATES[kind]
