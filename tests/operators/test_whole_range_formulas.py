"""Composite operators on float64 operands, in every deterministic mode, against formulas written a second time.

The compiled module's lowered graph is run node by node through the NumPy reference, and must have the bits of
``formula_rationals``. Seed and length of a run are those of test_whole_range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import formula_rationals as again
import torch
from formula_cases import Reference, drawn
from formula_rationals import Arithmetic
from layers import Calls
from torch import Tensor
from torch.nn import functional as F
from whole_range import DETERMINISTIC, ROUNDS, Operands, check

import fxround
from fxround import Policy, Rule
from fxround.numerics.modes import Rounding

aten = torch.ops.aten
COUNT = 5


# Each: the operator on rows x, y, z (two of five elements), and its formula on one row of each.
ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mean": (lambda x, y, z: x.mean(1), lambda o, x, y, z: again.mean(o, x)),
    "var": (lambda x, y, z: x.var(1), lambda o, x, y, z: again.variance(o, x)),
    "std": (lambda x, y, z: x.std(1), lambda o, x, y, z: o.sqrt(again.variance(o, x))),
    "softmax": (lambda x, y, z: x.softmax(1), lambda o, x, y, z: again.softmax(o, x)),
    "log_softmax": (lambda x, y, z: x.log_softmax(1), lambda o, x, y, z: again.log_softmax(o, x)),
    "logsumexp": (lambda x, y, z: x.logsumexp(1), lambda o, x, y, z: again.logsumexp(o, x)),
    "norm 2": (lambda x, y, z: x.norm(2, 1), lambda o, x, y, z: again.norm(o, x, 2)),
    "norm 1": (lambda x, y, z: x.norm(1, 1), lambda o, x, y, z: again.norm(o, x, 1)),
    "norm inf": (lambda x, y, z: x.norm(math.inf, 1), lambda o, x, y, z: again.norm(o, x, math.inf)),
    "layer_norm": (
        lambda x, y, z: F.layer_norm(x, [COUNT], y[0], z[0]),
        lambda o, x, y, z: again.layer_norm(o, x, y, z),
    ),
    "batch_norm": (
        lambda x, y, z: F.batch_norm(x[:, None], y[0, :1], z[0, :1], y[0, 1:2], z[0, 1:2]),
        lambda o, x, y, z: again.batch_norm(o, x, y[0], z[0], y[1], z[1]),
    ),
    "mv": (lambda x, y, z: x.mv(y[0]), lambda o, x, y, z: o.dot(x, y)),
    "mse_loss": (
        lambda x, y, z: torch.stack([F.mse_loss(a, y[0]) for a in x]),
        lambda o, x, y, z: again.mean(o, [o.mul(d, d) for d in (o.sub(a, b) for a, b in zip(x, y, strict=True))]),
    ),
    "avg_pool1d": (
        lambda x, y, z: F.avg_pool1d(x[None], 2, 1)[0],
        lambda o, x, y, z: [o.div(o.total(x[i : i + 2]), 2.0) for i in range(COUNT - 1)],
    ),
    "softmax_backward": (
        lambda x, y, z: aten._softmax_backward_data(x, y.expand_as(x), 1, x.dtype),
        lambda o, x, y, z: again.softmax_backward(o, x, y),
    ),
}

# Each: the operator on numbers, and its formula.
POINTS: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
    "add": (lambda x, y, z: torch.add(x, y, alpha=0.3), lambda o, x, y, z: o.add(x, o.mul(y, 0.3))),
    "sub": (lambda x, y, z: torch.sub(x, y, alpha=0.3), lambda o, x, y, z: o.sub(x, o.mul(y, 0.3))),
    "rsub": (lambda x, y, z: torch.rsub(x, y, alpha=0.3), lambda o, x, y, z: o.sub(y, o.mul(x, 0.3))),
    "addcmul": (
        lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
        lambda o, x, y, z: o.add(x, o.mul(o.mul(y, z), 0.3)),
    ),
    "addcmul_": (
        lambda x, y, z: x.clone().addcmul_(y, z, value=0.3),
        lambda o, x, y, z: o.add(x, o.mul(o.mul(y, z), 0.3)),
    ),
    "addcdiv": (
        lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
        lambda o, x, y, z: o.add(x, o.mul(o.div(y, z), 0.3)),
    ),
    "addcdiv_": (
        lambda x, y, z: x.clone().addcdiv_(y, z, value=0.3),
        lambda o, x, y, z: o.add(x, o.mul(o.div(y, z), 0.3)),
    ),
    "aten.addcdiv": (
        lambda x, y, z: aten.addcdiv(x, y, z, value=0.3),
        lambda o, x, y, z: o.add(x, o.mul(o.div(y, z), 0.3)),
    ),
    "lerp 0.3": (lambda x, y, z: torch.lerp(x, y, 0.3), lambda o, x, y, z: again.lerp(o, x, y, 0.3)),
    "lerp 0.7": (lambda x, y, z: torch.lerp(x, y, 0.7), lambda o, x, y, z: again.lerp(o, x, y, 0.7)),
    "silu": (lambda x, y, z: F.silu(x), lambda o, x, y, z: o.mul(x, o.sigmoid(x))),
    "gelu": (lambda x, y, z: F.gelu(x), lambda o, x, y, z: again.gelu(o, x)),
    "gelu tanh": (lambda x, y, z: F.gelu(x, approximate="tanh"), lambda o, x, y, z: again.gelu_tanh(o, x)),
    "softplus": (
        lambda x, y, z: F.softplus(x, 2.0, 1.0),
        lambda o, x, y, z: x if o.mul(x, 2.0) > 1 else o.div(o.softplus(o.mul(x, 2.0)), 2.0),
    ),
    "logsigmoid": (lambda x, y, z: F.logsigmoid(x), lambda o, x, y, z: -o.softplus(o.kept(-x))),
    "mish": (lambda x, y, z: F.mish(x), lambda o, x, y, z: o.mul(x, o.tanh(o.softplus(x)))),
    "hardsigmoid": (
        lambda x, y, z: F.hardsigmoid(x),
        lambda o, x, y, z: o.div(again.clamped(o.add(x, 3.0), 0.0, 6.0), 6.0),
    ),
    "hardswish": (
        lambda x, y, z: F.hardswish(x),
        lambda o, x, y, z: o.div(o.mul(x, again.clamped(o.add(x, 3.0), 0.0, 6.0)), 6.0),
    ),
    "elu": (
        lambda x, y, z: F.elu(x, 0.7),
        lambda o, x, y, z: x if x > 0 else o.mul(o.expm1(x), 0.7),
    ),
    "leaky_relu": (lambda x, y, z: F.leaky_relu(x, 0.1), lambda o, x, y, z: x if x > 0 else o.mul(x, 0.1)),
    "softshrink": (
        lambda x, y, z: F.softshrink(x, 0.4),
        lambda o, x, y, z: again.softshrink(o, x, 0.4),
    ),
    "huber_loss": (
        lambda x, y, z: F.huber_loss(x, y, reduction="none", delta=0.7),
        lambda o, x, y, z: again.huber(o, x, y, 0.7),
    ),
    "smooth_l1_loss": (
        lambda x, y, z: F.smooth_l1_loss(x, y, reduction="none", beta=0.7),
        lambda o, x, y, z: again.smooth_l1(o, x, y, 0.7),
    ),
    "bce_with_logits": (
        lambda x, y, z: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        lambda o, x, y, z: again.bce_with_logits(o, x, y),
    ),
    "sigmoid_backward": (
        lambda x, y, z: aten.sigmoid_backward(x, y),
        lambda o, x, y, z: o.mul(x, o.mul(y, o.sub(1.0, y))),
    ),
    "tanh_backward": (
        lambda x, y, z: aten.tanh_backward(x, y),
        lambda o, x, y, z: o.mul(x, o.sub(1.0, o.mul(y, y))),
    ),
    "silu_backward": (lambda x, y, z: aten.silu_backward(x, y), lambda o, x, y, z: again.silu_backward(o, x, y)),
}


def test_formulas_round_every_operation() -> None:
    for turn in range(ROUNDS):
        draw = Operands("formulas", turn)
        value = Rounding.parse(
            f"{draw.choice(['binary32', 'bfloat16', 'binary16', 'tf32'])}/{draw.choice(DETERMINISTIC)}"
        )
        step = Rounding.parse(f"{draw.choice(['binary32', 'bfloat16', 'tf32'])}/{draw.choice(DETERMINISTIC)}")
        policy = Policy("drawn", (Rule(rounding=str(value), accumulate=str(step)),))
        names = [str(n) for n in draw.rng.permutation([*ROWS, *POINTS])[: 14 if ROUNDS == 1 else None]]
        functions = [(ROWS.get(n) or POINTS[n])[0] for n in names]
        x, y, z = drawn(draw, [(2, COUNT)] * 3, value)

        def forward(x: Tensor, y: Tensor, z: Tensor, functions: Any = functions) -> list[Tensor]:
            return [f(x, y, z) for f in functions]

        graph = fxround.compile(Calls(forward), policy, example_inputs=(x, y, z)).graph
        compared = 0
        for _ in range(8):
            found = Reference(graph).run(x, y, z, torch.tensor([0, 0]))
            for name, got in zip(names, found, strict=True):
                want = expected(name, Arithmetic(value, step), [x, y, z])
                told = [(g, w) for g, w in zip(got.flatten().tolist(), want, strict=True) if w is not None]
                compared += len(told)
                rows = (x.tolist(), y.tolist(), z.tolist())
                check([g for g, _ in told], [w for _, w in told], name, str(value), str(step), rows)
            x, y, z = drawn(draw, [(2, COUNT)] * 3, value)
        assert compared > 500


def expected(name: str, o: Arithmetic, xs: list[Tensor]) -> list[float | None]:
    """One number an element of the result; None for what the contract leaves open."""
    x, y, z = (t.tolist() for t in xs)
    if name in POINTS:
        flat = zip(*(t.flatten().tolist() for t in xs), strict=True)
        return [decided(lambda three=three: o.kept(POINTS[name][1](o, *three))) for three in flat]
    others = [y[0], y[0]] if name in _SHARED else y
    rows = [decided(lambda a=a, b=b: ROWS[name][1](o, a, b, z[0])) for a, b in zip(x, others, strict=True)]
    return [v for row in rows for v in (row if isinstance(row, list) else [row] * _LENGTH.get(name, 1))]


def decided(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except again.Undecided:
        return None


# How many numbers a row of the result has, where that is not one.
_LENGTH = dict.fromkeys(("softmax", "log_softmax", "layer_norm", "batch_norm", "softmax_backward"), COUNT)
_SHARED = ("layer_norm", "batch_norm", "mv", "mse_loss")
