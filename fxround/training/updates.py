"""Updates: the formulas of PyTorch's optimizers, a class each.

The formulas are those of ``torch.optim``'s single-tensor code, with one rounding per multiplication and addition, where
PyTorch's kernels fuse some. Options that change a formula are part of its key: a group whose momentum becomes zero gets
another graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import torch
from torch import Tensor

from fxround.training.update import Group, Numbers, Progress, States, Update, lerp, power


@dataclass(frozen=True)
class SGD(Update):
    """b = b * momentum + g * (1 - dampening), at first g; p = p + d * -lr, d = b, or g + b * momentum (Nesterov)."""

    momentum: bool
    nesterov: bool
    dampening: bool

    counts: ClassVar[bool] = False

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def numbers(self, group: Group, at: Progress) -> Numbers:
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
    def of(group: Group, at: Progress) -> SGD:
        """Return the formula of a group of ``torch.optim.SGD``."""
        momentum, dampening = group["momentum"] != 0, group["dampening"] != 0
        return SGD(group["maximize"], group["weight_decay"] != 0, at.first, momentum, group["nesterov"], dampening)


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

    def numbers(self, group: Group, at: Progress) -> Numbers:
        b1, b2 = (float(b) for b in group["betas"])
        lr, decay = float(group["lr"]), group["weight_decay"]
        values = {"weight_decay": decay, "shrink": 1 - lr * decay, "first": 1 - b1, "kept": b1, "second": b2}
        rate, scale = -(lr / (1 - power(b1, at.step))), math.sqrt(1 - power(b2, at.step))
        return values | {"rest": 1 - b2, "rate": rate, "scale": scale, "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        p = p * n["shrink"] if self.decoupled else p
        m = lerp(s["exp_avg"], g, n["first"], n["kept"], self.near)
        v = s["exp_avg_sq"] * n["second"] + (g * n["rest"]) * g
        state = {"exp_avg": m, "exp_avg_sq": v}
        if self.amsgrad:
            v = state["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        return p + (m * n["rate"]) / (v.sqrt() / n["scale"] + n["eps"]), state

    @staticmethod
    def of(group: Group, at: Progress) -> Adam:
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
    def of(group: Group, at: Progress) -> RepDLAdam:
        """Return the formula of a group of ``torch.optim.Adam``, by RepDL's definitions."""
        return RepDLAdam(group["maximize"], group["weight_decay"] != 0, False, group["amsgrad"], False, False)


@dataclass(frozen=True)
class Adagrad(Update):
    """s = s + g * g; p = p + (g * -r) / (sqrt(s) + eps), r = lr / (1 + (t - 1) * lr_decay)."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    def numbers(self, group: Group, at: Progress) -> Numbers:
        rate = float(group["lr"]) / (1 + (at.step - 1) * group["lr_decay"])
        return {"weight_decay": group["weight_decay"], "rate": -rate, "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        total = s["sum"] + g * g
        return p + (g * n["rate"]) / (total.sqrt() + n["eps"]), {"sum": total}

    def initial(self, name: str, p: Tensor, group: Group) -> Tensor:
        return torch.full_like(p, group["initial_accumulator_value"], memory_format=torch.preserve_format)

    @staticmethod
    def of(group: Group, at: Progress) -> Adagrad:
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

    def numbers(self, group: Group, at: Progress) -> Numbers:
        kept = {"weight_decay": group["weight_decay"], "alpha": group["alpha"], "rest": 1 - group["alpha"]}
        return kept | {"momentum": group["momentum"], "rate": -float(group["lr"]), "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        v = s["square_avg"] * n["alpha"] + (g * n["rest"]) * g
        state = {"square_avg": v}
        if self.centered:
            m = state["grad_avg"] = lerp(s["grad_avg"], g, n["rest"], n["alpha"], self.near)
            v = v - m * m
        scale = v.sqrt() + n["eps"]
        if not self.momentum:
            return p + (g * n["rate"]) / scale, state
        state["momentum_buffer"] = s["momentum_buffer"] * n["momentum"] + g / scale
        return p + state["momentum_buffer"] * n["rate"], state

    @staticmethod
    def of(group: Group, at: Progress) -> RMSprop:
        """Return the formula of a group of ``torch.optim.RMSprop``."""
        near = 1 - group["alpha"] < 0.5
        decays = group["weight_decay"] != 0
        return RMSprop(group["maximize"], decays, False, group["momentum"] > 0, group["centered"], near)


@dataclass(frozen=True)
class NAdam(Update):
    """m and v as Adam; d = sqrt(v / c) + eps; p = p + (g * -r) / d, then p = p + (m * -q) / d.

    c = 1 - b2^t, u_t = b1 (1 - 0.96^(t momentum_decay) / 2), U = u_1 ... u_t (``mu_product``),
    r = lr (1 - u_t) / (1 - U), q = lr u_(t+1) / (1 - U u_(t+1)).
    """

    decoupled: bool
    near: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def scalars(group: Group) -> Numbers:
        return {"mu_product": 1.0}

    def advanced(self, group: Group, at: Progress) -> Numbers:
        return {"mu_product": at.scalars["mu_product"] * self._momentum(group, at.step)}

    @staticmethod
    def _momentum(group: Group, step: int) -> float:
        return float(group["betas"][0]) * (1 - 0.5 * power(0.96, step * group["momentum_decay"]))

    def numbers(self, group: Group, at: Progress) -> Numbers:
        b1, b2 = (float(b) for b in group["betas"])
        lr, decay = float(group["lr"]), group["weight_decay"]
        values = {"weight_decay": decay, "shrink": 1 - lr * decay, "first": 1 - b1, "kept": b1, "second": b2}
        now, then = self._momentum(group, at.step), self._momentum(group, at.step + 1)
        product = self.advanced(group, at)["mu_product"]
        rates = {"rate": -lr * (1 - now) / (1 - product), "ahead": -lr * then / (1 - product * then)}
        return values | rates | {"rest": 1 - b2, "scale": 1 - power(b2, at.step), "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        p = p * n["shrink"] if self.decoupled else p
        m = lerp(s["exp_avg"], g, n["first"], n["kept"], self.near)
        v = s["exp_avg_sq"] * n["second"] + (g * n["rest"]) * g
        d = (v / n["scale"]).sqrt() + n["eps"]
        p = p + (g * n["rate"]) / d
        return p + (m * n["ahead"]) / d, {"exp_avg": m, "exp_avg_sq": v}

    @staticmethod
    def of(group: Group, at: Progress) -> NAdam:
        """Return the formula of a group of ``torch.optim.NAdam``."""
        decoupled, decays = group["decoupled_weight_decay"], group["weight_decay"] != 0
        near = 1 - float(group["betas"][0]) < 0.5
        return NAdam(group["maximize"], decays and not decoupled, False, decays and decoupled, near)


@dataclass(frozen=True)
class RAdam(Update):
    """m and v as Adam; p = p - (m / (1 - b1^t)) * lr, and where r_t > 5, times (c / (sqrt(v) + eps)) and times a.

    c = sqrt(1 - b2^t), r = 2 / (1 - b2) - 1, r_t = r - 2 t b2^t / (1 - b2^t),
    a = sqrt((r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t)).
    """

    decoupled: bool
    near: bool
    rectified: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def _lengths(group: Group, step: int) -> tuple[float, float]:
        b2 = float(group["betas"][1])
        most, kept = 2 / (1 - b2) - 1, power(b2, step)
        return most, most - 2 * step * kept / (1 - kept)

    def numbers(self, group: Group, at: Progress) -> Numbers:
        b1, b2 = (float(b) for b in group["betas"])
        lr, decay = float(group["lr"]), group["weight_decay"]
        values = {"weight_decay": decay, "shrink": 1 - lr * decay, "first": 1 - b1, "kept": b1, "second": b2}
        values |= {"rest": 1 - b2, "bias": 1 - power(b1, at.step), "rate": lr}
        if not self.rectified:
            return values
        most, length = self._lengths(group, at.step)
        factor = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
        return values | {"scale": math.sqrt(1 - power(b2, at.step)), "eps": group["eps"], "factor": factor}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        p = p * n["shrink"] if self.decoupled else p
        m = lerp(s["exp_avg"], g, n["first"], n["kept"], self.near)
        v = s["exp_avg_sq"] * n["second"] + (g * n["rest"]) * g
        step = (m / n["bias"]) * n["rate"]
        if self.rectified:
            step = step * (n["scale"] / (v.sqrt() + n["eps"])) * n["factor"]
        return p - step, {"exp_avg": m, "exp_avg_sq": v}

    @staticmethod
    def of(group: Group, at: Progress) -> RAdam:
        """Return the formula of a group of ``torch.optim.RAdam``."""
        decoupled, decays = group["decoupled_weight_decay"], group["weight_decay"] != 0
        near, rectified = 1 - float(group["betas"][0]) < 0.5, RAdam._lengths(group, at.step)[1] > 5
        return RAdam(group["maximize"], decays and not decoupled, False, decays and decoupled, near, rectified)


@dataclass(frozen=True)
class Adamax(Update):
    """m as Adam; u = max(u * b2, |g| + eps); p = p + (m * -r) / u, r = lr / (1 - b1^t)."""

    near: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def numbers(self, group: Group, at: Progress) -> Numbers:
        b1, b2 = (float(b) for b in group["betas"])
        values = {"weight_decay": group["weight_decay"], "first": 1 - b1, "kept": b1, "second": b2, "eps": group["eps"]}
        return values | {"rate": -float(group["lr"]) / (1 - power(b1, at.step))}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        m = lerp(s["exp_avg"], g, n["first"], n["kept"], self.near)
        u = torch.maximum(s["exp_inf"] * n["second"], g.abs() + n["eps"])
        return p + (m * n["rate"]) / u, {"exp_avg": m, "exp_inf": u}

    @staticmethod
    def of(group: Group, at: Progress) -> Adamax:
        """Return the formula of a group of ``torch.optim.Adamax``."""
        return Adamax(group["maximize"], group["weight_decay"] != 0, False, 1 - float(group["betas"][0]) < 0.5)


@dataclass(frozen=True)
class Adadelta(Update):
    """v = v * a + (g * (1 - a)) * g; d = (sqrt(w + eps) / sqrt(v + eps)) * g; w = w * a + (d * (1 - a)) * d.

    p = p + d * -lr, with a = rho.
    """

    @property
    def states(self) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def numbers(self, group: Group, at: Progress) -> Numbers:
        values = {"weight_decay": group["weight_decay"], "rho": group["rho"], "rest": 1 - group["rho"]}
        return values | {"rate": -float(group["lr"]), "eps": group["eps"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        v = s["square_avg"] * n["rho"] + (g * n["rest"]) * g
        d = ((s["acc_delta"] + n["eps"]).sqrt() / (v + n["eps"]).sqrt()) * g
        w = s["acc_delta"] * n["rho"] + (d * n["rest"]) * d
        return p + d * n["rate"], {"square_avg": v, "acc_delta": w}

    @staticmethod
    def of(group: Group, at: Progress) -> Adadelta:
        """Return the formula of a group of ``torch.optim.Adadelta``."""
        return Adadelta(group["maximize"], group["weight_decay"] != 0, False)


@dataclass(frozen=True)
class ASGD(Update):
    """p = p * (1 - lambd * eta) + g * -eta; ax = ax + (p - ax) * mu, or p where mu is 1.

    After step t, eta = lr / (1 + lambd lr t)^alpha and mu = 1 / max(1, t - t0).
    """

    averages: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("ax",)

    @staticmethod
    def scalars(group: Group) -> Numbers:
        return {"eta": float(group["lr"]), "mu": 1.0}

    def advanced(self, group: Group, at: Progress) -> Numbers:
        lr = float(group["lr"])
        eta = lr / power(1 + group["lambd"] * lr * at.step, group["alpha"])
        return {"eta": eta, "mu": 1 / max(1, at.step - group["t0"])}

    def numbers(self, group: Group, at: Progress) -> Numbers:
        eta = at.scalars["eta"]
        shrink = 1 - group["lambd"] * eta
        return {"weight_decay": group["weight_decay"], "shrink": shrink, "rate": -eta, "mu": at.scalars["mu"]}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        p = p * n["shrink"] + g * n["rate"]
        return p, {"ax": s["ax"] + (p - s["ax"]) * n["mu"] if self.averages else p.clone()}

    @staticmethod
    def of(group: Group, at: Progress) -> ASGD:
        """Return the formula of a group of ``torch.optim.ASGD``."""
        return ASGD(group["maximize"], group["weight_decay"] != 0, False, at.scalars["mu"] != 1)


@dataclass(frozen=True)
class Rprop(Update):
    """With x = g * prev: l = l * (plus where x > 0, minus where x < 0), within the least and the largest step size.

    g = 0 where x < 0; p = p - sign(g) * l; prev = g.
    """

    @property
    def states(self) -> tuple[str, ...]:
        return ("prev", "step_size")

    def numbers(self, group: Group, at: Progress) -> Numbers:
        (minus, plus), (least, most) = group["etas"], group["step_sizes"]
        return {"minus": minus, "plus": plus, "least": least, "most": most}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        g = self.gradient(p, g, n)
        product = g * s["prev"]
        # A NaN stays one.
        factor = torch.where(product == 0, torch.ones_like(product), product)
        factor = torch.where(product > 0, n["plus"], torch.where(product < 0, n["minus"], factor))
        size = torch.minimum(torch.maximum(s["step_size"] * factor, n["least"]), n["most"])
        g = torch.where(product < 0, torch.zeros_like(g), g)
        return p - g.sign() * size, {"prev": g, "step_size": size}

    def initial(self, name: str, p: Tensor, group: Group) -> Tensor:
        value = float(group["lr"]) if name == "step_size" else 0.0
        return torch.full_like(p, value, memory_format=torch.preserve_format)

    @staticmethod
    def of(group: Group, at: Progress) -> Rprop:
        """Return the formula of a group of ``torch.optim.Rprop``."""
        return Rprop(group["maximize"], False, False)


@dataclass(frozen=True)
class Muon(Update):
    """m = m + (g - m) * (1 - momentum); u = g + (m - g) * momentum (Nesterov), or m; p = p * (1 - lr decay) - O * r.

    O comes of u, transposed if it has more rows than columns: X = u / max(|u|, eps), with the norm of all elements, and
    then ``steps`` times A = X X^T, B = A b + (A A) c, X = X a + B X, with (a, b, c) the group's coefficients. Each of
    these is computed in binary32 and stored in bfloat16. r is lr, adjusted to the parameter's shape.
    """

    nesterov: bool
    near: bool
    ahead: bool
    steps: int

    counts: ClassVar[bool] = False
    of_matrices: ClassVar[bool] = True

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def numbers(self, group: Group, at: Progress) -> Numbers:
        lr, (rows, columns) = float(group["lr"]), at.shape
        original, rms = math.sqrt(max(1, rows / columns)), 0.2 * math.sqrt(max(rows, columns))
        ratio = {None: original, "original": original, "match_rms_adamw": rms}[group["adjust_lr_fn"]]
        a, b, c = group["ns_coefficients"]
        values = {"momentum": group["momentum"], "rest": 1 - group["momentum"], "eps": group["eps"]}
        return values | {"a": a, "b": b, "c": c, "shrink": 1 - lr * group["weight_decay"], "rate": lr * ratio}

    def formula(self, p: Tensor, g: Tensor, s: States, n: dict[str, Tensor]) -> tuple[Tensor, States]:
        m = lerp(s["momentum_buffer"], g, n["rest"], n["momentum"], self.near)
        u = lerp(g, m, n["momentum"], n["rest"], self.ahead) if self.nesterov else m
        turned = p.shape[0] > p.shape[1]
        x = _stored(u.t() if turned else u)
        x = _stored(x / torch.maximum(_stored(x.square().sum().sqrt()), n["eps"].float()))
        a, b, c = (n[name].float() for name in ("a", "b", "c"))
        for _ in range(self.steps):
            gram = _stored(x @ x.t())
            x = _stored(x * a + _stored(gram * b + (gram @ gram) * c) @ x)
        x = x.t() if turned else x
        return p * n["shrink"] - x.to(p.dtype) * n["rate"], {"momentum_buffer": m}

    @staticmethod
    def of(group: Group, at: Progress) -> Muon:
        """Return the formula of a group of ``torch.optim.Muon``."""
        weight = group["momentum"]
        return Muon(False, False, False, group["nesterov"], 1 - weight < 0.5, weight < 0.5, group["ns_steps"])


def _stored(x: Tensor) -> Tensor:
    return x.bfloat16().float()


UPDATES: Final[Mapping[type, type[Update]]] = MappingProxyType(
    {
        torch.optim.SGD: SGD,
        torch.optim.Adam: Adam,
        torch.optim.AdamW: Adam,
        torch.optim.NAdam: NAdam,
        torch.optim.RAdam: RAdam,
        torch.optim.Adamax: Adamax,
        torch.optim.Adagrad: Adagrad,
        torch.optim.Adadelta: Adadelta,
        torch.optim.RMSprop: RMSprop,
        torch.optim.Rprop: Rprop,
        torch.optim.ASGD: ASGD,
        torch.optim.Muon: Muon,
    }
)
# Why the others have no formula.
NO_FORMULA: Final = MappingProxyType(
    {
        torch.optim.LBFGS: "its step calls the model several times, and decides on the host how far to go",
        torch.optim.SparseAdam: "its gradients are sparse",
        torch.optim.Adafactor: "its states are means of rows and columns",
    }
)
# The updates of definitions other than fxround's own.
_REDEFINED: Final[Mapping[tuple[str, type], type[Update]]] = MappingProxyType({("repdl", torch.optim.Adam): RepDLAdam})


def update_of(kind: type[torch.optim.Optimizer], definitions: str) -> type[Update]:
    """Return the class of the formulas of an optimizer's steps."""
    return _REDEFINED.get((definitions, kind)) or UPDATES[kind]
