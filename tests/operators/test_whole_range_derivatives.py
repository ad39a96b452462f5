"""Derivatives of formulas on float64 and float32 operands of every exponent, against ``derivative_rationals``.

Seed and length of a run are those of test_whole_range.
"""

from __future__ import annotations

import math

import array_rationals as again
import derivative_rationals as backward
import pytest
import repdl_rationals as repdl
import torch
import window_rationals as windows
from array_rationals import MEAN, NONE, SUM
from formula_cases import BAGS, IGNORED, INDICES, LABELS, OFFSETS, PIXELS, Case, compare, drawn, narrowed
from formula_rationals import Arithmetic
from layers import Calls
from torch import Tensor
from torch.nn import functional as F
from whole_range import DETERMINISTIC, ROUNDS, Operands, check

import fxround
from fxround import Policy, Rule
from fxround.numerics.modes import Rounding
from fxround.operators.formulas import FORMULAS

aten = torch.ops.aten
ALL = [True, True, True]
ROW = [(2, 6)] * 2
MASK = torch.tensor([True, False, True, True, False, True])

ACTIVATIONS = {
    "mish": Case(ROW, aten.mish_backward, backward.mish),
    "gelu": Case(ROW, aten.gelu_backward, backward.gelu),
    "gelu tanh": Case(ROW, lambda g, x: aten.gelu_backward(g, x, approximate="tanh"), backward.gelu_tanh),
    "elu": Case(
        ROW,
        lambda g, x: aten.elu_backward(g, 0.7, 1.3, 0.9, False, x),
        lambda o, g, x: backward.elu(o, g, x, 0.7, 1.3, 0.9),
    ),
    "elu plain": Case(
        ROW,
        lambda g, x: aten.elu_backward(g, 1, 1, 1, False, x),
        lambda o, g, x: backward.elu(o, g, x, 1, 1, 1),
    ),
    "elu of the result": Case(
        ROW,
        lambda g, y: aten.elu_backward(g, 0.7, 1.3, 0.9, True, y),
        lambda o, g, y: backward.elu_of_result(o, g, y, 0.7, 1.3, 0.9),
    ),
    "leaky_relu": Case(
        ROW,
        lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
        lambda o, g, x: backward.leaky_relu(o, g, x, 0.1),
    ),
    "prelu": Case([*ROW, (6,)], aten._prelu_kernel_backward, backward.prelu, 2),
    "softplus": Case(
        ROW,
        lambda g, x: aten.softplus_backward(g, x, 2.0, 1.0),
        lambda o, g, x: backward.softplus(o, g, x, 2.0, 1.0),
    ),
    "softplus plain": Case(
        ROW, lambda g, x: aten.softplus_backward(g, x, 1, 20), lambda o, g, x: backward.softplus(o, g, x, 1, 20)
    ),
    "log_sigmoid": Case(ROW, lambda g, x: aten.log_sigmoid_backward(g, x, x), backward.log_sigmoid),
    "hardsigmoid": Case(ROW, aten.hardsigmoid_backward, backward.hardsigmoid),
    "hardswish": Case(ROW, aten.hardswish_backward, backward.hardswish),
    "softshrink": Case(
        ROW, lambda g, x: aten.softshrink_backward(g, x, 0.4), lambda o, g, x: backward.shrink(o, g, x, 0.4)
    ),
    "hardshrink": Case(
        ROW, lambda g, x: aten.hardshrink_backward(g, x, 0.4), lambda o, g, x: backward.shrink(o, g, x, 0.4)
    ),
    "glu": Case([(2, 3), (2, 6)], lambda g, x: aten.glu_backward(g, x, 1), backward.glu),
    "dropout": Case(
        [(2, 6)],
        lambda g: aten.native_dropout_backward(g, MASK, 1 / (1 - 0.3)),
        lambda o, g: backward.dropout(o, g, MASK.double().numpy().astype(object), 1 / (1 - 0.3)),
    ),
    "log_softmax": Case(
        [(3, 4)] * 2, lambda g, y: aten._log_softmax_backward_data(g, y, 1, y.dtype), backward.log_softmax
    ),
}
NORMS = {
    "layer_norm": Case(
        [(3, 5), (3, 5), (3, 1), (3, 1), (5,)],
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [5], m, r, w, w, ALL),
        backward.layer_norm,
        3,
    ),
    "group_norm": Case(
        [(2, 4, 3), (2, 4, 3), (2, 2), (2, 2), (4,)],
        lambda g, x, m, r, w: aten.native_group_norm_backward(g, x, m, r, w, x.shape[0], 4, 3, 2, ALL),
        lambda o, g, x, m, r, w: backward.group_norm(o, g, x, m, r, w, 2),
        3,
    ),
    "batch_norm": Case(
        [(3, 2, 2), (3, 2, 2), (2,), (2,), (2,)],
        lambda g, x, w, m, r: aten.native_batch_norm_backward(g, x, w, None, None, m, r, True, 1e-5, ALL),
        lambda o, g, x, w, m, r: backward.batch_norm(o, g, x, w, m, r, True),
        3,
    ),
    "batch_norm inference": Case(
        [(3, 2, 2), (3, 2, 2), (2,), (2,), (2,)],
        lambda g, x, w, m, v: aten.native_batch_norm_backward(g, x, w, m, v, None, None, False, 1e-5, ALL),
        lambda o, g, x, w, m, v: backward.batch_norm(o, g, x, w, m, o.rsqrt(o.add(v, 1e-5)), False),
        3,
    ),
    "weight_norm": Case(
        [(2, 3, 2), (2, 3, 2), (2, 1, 1), (2, 1, 1)],
        lambda h, v, g, n: aten._weight_norm_interface_backward(h, v, g, n, 0),
        backward.weight_norm,
        2,
    ),
}
LOSSES = {
    "mse_loss": Case(
        [(), (2, 3), (2, 3)],
        lambda g, x, t: aten.mse_loss_backward(g, x, t, MEAN),
        lambda o, g, x, t: backward.mse(o, g, x, t, MEAN),
    ),
    "mse_loss none": Case(
        [(2, 3)] * 3,
        lambda g, x, t: aten.mse_loss_backward(g, x, t, NONE),
        lambda o, g, x, t: backward.mse(o, g, x, t, NONE),
    ),
    "smooth_l1_loss": Case(
        [(), (2, 3), (2, 3)],
        lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, MEAN, 0.7),
        lambda o, g, x, t: backward.smooth_l1(o, g, x, t, MEAN, 0.7),
    ),
    "huber_loss": Case(
        [(), (2, 3), (2, 3)],
        lambda g, x, t: aten.huber_loss_backward(g, x, t, MEAN, 0.7),
        lambda o, g, x, t: backward.huber(o, g, x, t, MEAN, 0.7),
    ),
    "bce": Case(
        [(), (2, 3), (2, 3), (2, 3)],
        lambda g, x, t, w: aten.binary_cross_entropy_backward(g, x, t, w, SUM),
        lambda o, g, x, t, w: backward.bce(o, g, x, t, w, SUM),
    ),
    **{
        f"nll_loss {reduction}": Case(
            [(4,) if reduction == NONE else (), (4, 3), (3,), ()],
            lambda g, x, w, s, r=reduction: aten.nll_loss_backward(g, x, LABELS, w, r, IGNORED, s),
            lambda o, g, x, w, s, r=reduction: backward.nll_loss(o, g, x, LABELS.numpy(), w, r, IGNORED, s),
        )
        for reduction in (NONE, MEAN, SUM)
    },
    "nll_loss2d unweighted": Case(
        [(), (2, 3, 2, 2), ()],
        lambda g, x, s: aten.nll_loss2d_backward(g, x, PIXELS, None, MEAN, IGNORED, s),
        lambda o, g, x, s: backward.nll_loss(o, g, x, PIXELS.numpy(), None, MEAN, IGNORED, s),
    ),
}


INDEXED = {
    "embedding": Case(
        [(7, 2)],
        lambda g: aten.embedding_dense_backward(g, INDICES, 4, 3, False),
        lambda o, g: backward.embedding(o, g, BAGS.indices, 4, 3, False),
    ),
    "embedding by count": Case(
        [(7, 2)],
        lambda g: aten.embedding_dense_backward(g, INDICES, 5, -1, True),
        lambda o, g: backward.embedding(o, g, BAGS.indices, 5, -1, True),
    ),
    "embedding_bag": Case(
        [(4, 2), (7,)],
        lambda g, w: aten._embedding_bag_backward(
            g, INDICES, OFFSETS, INDICES, OFFSETS, OFFSETS, 4, False, 0, False, w, 3
        ),
        lambda o, g, w: again.embedding_bag_backward(o, g, 4, BAGS, w),
    ),
    "embedding_bag mean": Case(
        [(4, 2)],
        lambda g: aten._embedding_bag_backward(
            g, INDICES, OFFSETS, INDICES, OFFSETS, OFFSETS, 4, False, 1, False, None, 3
        ),
        lambda o, g: again.embedding_bag_backward(o, g, 4, BAGS, mean=True),
    ),
    "embedding_bag weights": Case(
        [(4, 2), (4, 2)],
        lambda g, w: aten._embedding_bag_per_sample_weights_backward(g, w, INDICES, OFFSETS, INDICES, 0, 3),
        lambda o, g, w: again.embedding_bag_weights_backward(o, g, w, BAGS),
    ),
    "convolution": Case(
        [(2, 2, 2), (2, 2, 3), (2, 2, 2)],
        lambda g, x, w: aten.convolution_backward(g, x, w, [2], [1], [0], [1], False, [0], 1, ALL)[2],
        lambda o, g, x, w: o.total(g, 0, 2),
    ),
}


@pytest.mark.part("losses-dtype1", "activations-dtype0", "indexed-dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cases", [ACTIVATIONS, NORMS | LOSSES, INDEXED], ids=["activations", "losses", "indexed"])
def test_derivatives_round_every_operation(cases: dict[str, Case], dtype: torch.dtype) -> None:
    compare(cases, dtype, 2 * ROUNDS)


BATCH = [(3, 2, 2), (2,), (2,), (2,), (2,)]
REPDL = {
    "mean": Case([(3, 4)], lambda x: aten.mean.dim(x, [1]), lambda o, x: repdl.mean(o, x, 1)),
    "batch_norm": Case(
        BATCH,
        lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.3, 1e-5),
        lambda o, x, w, b, m, v: repdl.batch_norm(o, x, w, b, m, v, 0.3),
        5,
    ),
    "batch_norm inference": Case(
        BATCH,
        lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.3, 1e-5)[0],
        repdl.inference,
    ),
    "batch_norm backward": Case(
        [(3, 2, 2), *BATCH[:4]],
        lambda g, x, w, m, s: aten.native_batch_norm_backward(g, x, w, None, None, m, s, True, 1e-5, ALL),
        lambda o, g, x, w, m, s: repdl.batch_norm_backward(o, g, x, w, m, s, True),
        3,
    ),
    "batch_norm backward inference": Case(
        [(3, 2, 2), *BATCH[:4]],
        lambda g, x, w, m, v: aten.native_batch_norm_backward(g, x, w, m, v, None, None, False, 1e-5, ALL),
        lambda o, g, x, w, m, v: repdl.batch_norm_backward(o, g, x, w, m, o.sqrt(o.add(v, 1e-5)), False),
        3,
    ),
    "cross_entropy": Case(
        [(4, 3)], lambda x: F.cross_entropy(x, LABELS), lambda o, x: repdl.cross_entropy(o, x, LABELS.numpy())
    ),
}
REPDL_GRADIENTS = {
    "mean": Case([(3,), (3, 4)], lambda x: torch.mean(x, 1), lambda o, g, x: repdl.mean_backward(o, g, x, 1)),
    "cross_entropy": Case(
        [(), (4, 3)],
        lambda x: F.cross_entropy(x, LABELS),
        lambda o, g, x: repdl.cross_entropy_backward(o, g, x, LABELS.numpy()),
    ),
}


@pytest.mark.part("dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_definitions_of_repdl_round_every_operation(dtype: torch.dtype) -> None:
    compare(REPDL, dtype, 2 * ROUNDS, definitions="repdl")
    compare(REPDL_GRADIENTS, dtype, 2 * ROUNDS, gradients=True, definitions="repdl")


def test_the_gradient_of_smooth_l1_loss_keeps_a_nan() -> None:
    x = torch.tensor([math.nan, 2.0, 0.0])
    got = FORMULAS[aten.smooth_l1_loss_backward.default](torch.tensor(1.0), x, torch.zeros(3), SUM, 0.7)
    assert math.isnan(got[0]) and got[1:].tolist() == [1, 0]


def test_a_compiled_backward_graph_has_the_derivatives() -> None:
    draw = Operands("backward")
    value, step = (Rounding.parse(f"{f}/{draw.choice(DETERMINISTIC)}") for f in ("bfloat16", "tf32"))
    policy = Policy("drawn", (Rule(rounding=str(value), accumulate=str(step)),))
    shapes = [(2, 4, 2), (4,), (4,), (4, 2), (1, 1, 5, 4), (2, 4, 2), (4, 2), (1, 1, 3, 3)]
    tensors = [narrowed(draw, x) for x in drawn(draw, shapes, value)]
    leaves, gradients = [x.requires_grad_() for x in tensors[:5]], tensors[5:]

    def forward(x: Tensor, w: Tensor, b: Tensor, table: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        bags = F.embedding_bag(INDICES, table, OFFSETS, mode="mean", padding_idx=3)
        return F.group_norm(x, 2, w, b), bags, F.adaptive_avg_pool2d(image, (3, 3))

    results = fxround.compile(Calls(forward), policy)(*leaves)
    torch.autograd.backward(results, gradients)
    o = again.Arrays(Arithmetic(value, step, True))
    x, w, b, table, image, g, h, k = (t.detach().double().numpy().astype(object) for t in tensors)
    y, mean, r = again.group_norm(o, x, w, b, 2)
    want = [
        *(y, again.embedding_bag(o, table, BAGS, mean=True), windows.adaptive_avg_pool(o, image, (3, 3))),
        *backward.group_norm(o, g, x, mean[:, :, 0], r[:, :, 0], w, 2),
        again.embedding_bag_backward(o, h, 4, BAGS, mean=True),
        windows.adaptive_avg_pool_backward(o, k, (5, 4)),
    ]
    for got, wanted in zip((*results, *(t.grad for t in leaves)), want, strict=True):
        assert got is not None
        check(got.detach(), wanted, str(value), str(step))
