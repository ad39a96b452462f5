"""Composite operators on float64 operands, in every deterministic mode, against formulas written a second time.

The compiled module's lowered graph is run node by node through the NumPy reference, and must have the bits of
``formula_rationals``. Seed and length of a run are those of test_whole_range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import formula_rationals as again
import numpy as np
import torch
from formula_rationals import Arithmetic
from layers import Calls
from test_whole_range import DETERMINISTIC, NO_KEY, ROUNDS, Operands, check
from torch import Tensor, fx
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.kernel import Reduce
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.program import Program
from fxround.runtime import reference
from fxround.specialize import contract_kernel, map_kernel, sum_kernel

aten, OPS = torch.ops.aten, torch.ops.fxround
COUNT = 5


class Reference(fx.Interpreter):
    """The NumPy reference in place of compiled kernels."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        run = _RUN.get(target)
        if run is None:
            assert "fxround" not in str(target), target
            return super().call_function(target, args, kwargs)
        return run(*args)


def _pointwise(xs: list[Tensor], text: str, dtype: torch.dtype, *rest: Any) -> Tensor:
    body = map_kernel(Program.parse(text), ("f64",) * len(xs), "f64").body
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    found = body.evaluate(*(x.expand(shape).double().numpy() for x in xs))[0]
    return torch.from_numpy(np.broadcast_to(found, shape).copy())


def _sum(x: Tensor, dims: list[int], keepdim: bool, order: str, step: str, value: str, *rest: Any) -> Tensor:
    kernel = sum_kernel(Order.parse(order), Rounding.parse(step), Rounding.parse(value), "f64", "f64")
    assert isinstance(kernel, Reduce)
    dims = [d % x.dim() for d in dims]
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*kept, *sorted(dims)).reshape(math.prod(x.shape[d] for d in kept), -1)
    found = torch.from_numpy(np.array(reference.reduce(kernel, rows.numpy(), NO_KEY)))
    return found.reshape([1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims])


def _matmul(a: Tensor, b: Tensor, step: str, value: str, *rest: Any) -> Tensor:
    kernel = contract_kernel(Accumulation.parse(step), Rounding.parse(value), ("f64", "f64"), "f64")
    left, right = (t.reshape(-1, *t.shape[-2:]).numpy() for t in (a, b))
    return torch.from_numpy(np.array(reference.contract(kernel, left, right, NO_KEY))).reshape(
        *a.shape[:-1], b.shape[-1]
    )


_RUN: dict[Any, Callable[..., Tensor]] = {
    OPS.pointwise.default: _pointwise,
    OPS.sum.default: _sum,
    OPS.matmul.default: _matmul,
}

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


def _operands(draw: Operands, shape: tuple[int, ...], value: Rounding) -> list[Tensor]:
    """x, y, z: of every exponent, of the format's own, and of a few binades around 1, where functions bend."""
    count = math.prod(shape)

    def one() -> Tensor:
        wide, near = draw.values(count, 0.04), np.ldexp(draw.significands(count), draw.rng.integers(-5, 4, count) - 52)
        fmt = value.format
        own = np.ldexp(draw.significands(count), draw.rng.integers(fmt.emin - 8, fmt.emax + 2, count) - 52)
        sign = draw.rng.choice([-1.0, 1.0], count)
        kind = draw.rng.integers(0, 3)
        mixed = draw.some(0.4, wide, draw.some(0.6, near * sign, own * sign))
        return torch.from_numpy([mixed, near * sign, wide][kind]).reshape(shape)

    return [one() for _ in range(3)]


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
        x, y, z = _operands(draw, (2, COUNT), value)

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
            x, y, z = _operands(draw, (2, COUNT), value)
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
