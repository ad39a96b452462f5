"""A formula does what its docstring says, computes the operator that it replaces, and is in the compiled graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.utils._pytree as pytree
from layers import Calls
from models import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.capture.torch_private import defined_before_autograd
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.operators.formulas import FORMULAS

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]
Array = npt.NDArray[np.float32]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


WINDOWS = (aten.hamming_window, aten.blackman_window, aten.bartlett_window, aten.kaiser_window)


def samples() -> dict[Any, list[Call]]:
    """Arguments for every formula, float64."""
    generator = torch.Generator().manual_seed(3)

    def t(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).float()

    x, y, image, volume, weight = t(3, 6), t(3, 6), t(2, 4, 7, 6), t(2, 4, 5, 6, 4), t(4)
    stats = (t(4), t(4).abs() + 0.5)
    unary = (
        aten.silu.default,
        aten.mish.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.log_sigmoid_forward.default,
        aten.softshrink.default,
        aten.glu.default,
        aten.leaky_relu.default,
    )
    # PyTorch computes _scaled_mm in binary32: exactly, for these numbers.
    quarter, one = whole(16, 32).to(torch.float8_e4m3fn), torch.exp2(whole(1, 16))
    moments = (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
    pools = [([2], [2], [0]), ([3], [2], [1], True), ([3], [2], [1], True, False)]
    found = {op: [call(x * 2)] for op in unary}
    found |= {op: [call(x), call(image, [0, 2], correction=0), call(x, [1], keepdim=True)] for op in moments}
    found |= {op: [call(x, 1, False), call(x, 0, False)] for op in (aten._softmax.default, aten._log_softmax.default)}
    return found | {
        aten.mean.default: [call(x), call(x.float(), dtype=torch.float64)],
        aten.mean.dim: [call(image, [1, -1], True), call(x, None)],
        aten.linalg_vector_norm.default: [call(x, p, [1]) for p in (0, 1, 2, 3, math.inf, -math.inf)],
        aten.maximum.default: [call(x, y), call(x, y[:1].float())],
        aten.minimum.default: [call(x, y), call(x[:, :1], y)],
        aten.clamp.Tensor: [call(x, y, y + 1), call(x, None, y), call(x, y)],
        aten.clamp_min.Tensor: [call(x, y)],
        aten.clamp_max.Tensor: [call(x, y)],
        **{op: [call(x), call(x, [1]), call(image, [0, -1], True)] for op in (aten.amax.default, aten.amin.default)},
        **{op: [call(x)] for op in (aten.max.default, aten.min.default)},
        aten.aminmax.default: [call(x), call(x, dim=1), call(image, dim=-2, keepdim=True)],
        aten.logsumexp.default: [call(x, [1]), call(torch.full((2, 3), -math.inf, dtype=torch.float64), [1], True)],
        aten._safe_softmax.default: [call(x, 1), call(x.masked_fill(x[:, :1] > 0, -math.inf), 1)],
        aten.native_layer_norm.default: [call(x, [6], t(6), t(6), 1e-5), call(image, [7, 6], None, None, 1e-3)],
        aten.native_group_norm.default: [call(image, weight, t(4), 2, 4, 42, 2, 1e-5)],
        aten._native_batch_norm_legit_no_training.default: [call(image, weight, t(4), *stats, 0.1, 1e-5)],
        aten._native_batch_norm_legit.no_stats: [call(image, weight, t(4), True, 0.1, 1e-5)],
        aten._native_batch_norm_legit_functional.default: [call(image, weight, t(4), *stats, True, 0.1, 1e-5)],
        aten._weight_norm_interface.default: [call(x, t(3, 1), 0), call(x, t(1, 6), 1)],
        **{
            op: [call(n, *rest, dtype=torch.float64) for n in (0, 1, 2, 7, 16)]
            for op, rest in (
                *((window.default, ()) for window in WINDOWS),
                *((window.periodic, (False,)) for window in WINDOWS),
                (aten.hamming_window.periodic_alpha, (True, 0.5)),
                (aten.hamming_window.periodic_alpha_beta, (False, 0.5, 0.4)),
                (aten.kaiser_window.beta, (True, 5.0)),
            )
        },
        aten.addmm.default: [call(t(6), x.t(), y, beta=0.5, alpha=2), call(t(6, 6), x.t(), y, beta=0)],
        aten.baddbmm.default: [call(t(2, 4, 4), t(2, 4, 3), t(2, 3, 4), beta=2, alpha=0.5)],
        aten._scaled_mm.default: [
            call(quarter, quarter.t(), one[:, 0], one[:, 1], out_dtype=torch.float32),
            call(quarter, quarter.t(), one.reshape(16, 1), one, torch.ones(16).bfloat16(), out_dtype=torch.bfloat16),
        ],
        aten.addbmm.default: [call(t(4, 4), t(2, 4, 3), t(2, 3, 4), beta=2, alpha=0.5)],
        # The stock kernel takes binary32 in rows of 16 bytes: whole numbers, whose products and sums are exact.
        aten._grouped_mm.default: [
            call(whole(5, 4), whole(3, 4, 8), torch.tensor([2, 2, 5], dtype=torch.int32)),
            call(whole(4, 8), whole(8, 4), torch.tensor([3, 3, 8], dtype=torch.int32)),
            call(whole(2, 3, 4), whole(2, 4, 4)),
        ],
        aten.mv.default: [call(x, t(6))],
        aten.addmv.default: [call(t(3), x, t(6), beta=2, alpha=0.5)],
        aten.dot.default: [call(t(6), t(6))],
        aten.vdot.default: [call(t(6), t(6))],
        aten.addr.default: [call(t(3, 6), t(3), t(6), beta=2, alpha=0.5)],
        aten.convolution.default: [call(image, t(6, 4, 3, 3), t(6), [2, 1], [1, 1], [1, 1], False, [0, 0], 1)],
        aten.convolution_backward.default: [
            call(t(2, 6, 4, 4), image, t(6, 4, 3, 3), [6], [2, 1], [1, 0], [1, 1], False, [0, 0], 1, [True] * 3),
        ],
        **backward_samples(t),
        **linear_algebra_samples(t),
        aten._trilinear.default: [call(t(2, 3), t(5, 3, 4), t(2, 4), [1, 3], [0], [1, 2], [2, 3])],
        aten._cdist_forward.default: [call(x, y, p, None) for p in (2.0, 1.0, 3.0)],
        aten._cdist_backward.default: [
            call(t(3, 3), x, y, p, torch.cdist(x, y, p)) for p in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf)
        ],
        **{
            op: [call(image, [3, 9], False), call(image, [3, 9], True), call(image, [3, 4], False, 0.43, 0.7)]
            for op in (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default)
        },
        **{
            op: [
                call(t(2, 4, 3, 9), [3, 9], [2, 4, 7, 6], False),
                call(t(2, 4, 3, 4), [3, 4], [2, 4, 7, 6], False, 0.43, 0.7),
            ]
            for op in (aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default)
        },
        aten.avg_pool1d.default: [call(image[0], *pool) for pool in pools],
        aten.avg_pool2d.default: [call(image, *pool) for pool in pools]
        + [call(image, [2, 3], [], [1, 0], True, True, 5)],
        aten.avg_pool3d.default: [call(volume, *pool) for pool in pools],
        aten.adaptive_avg_pool1d.default: [call(image[0], [3]), call(image[0], [4])],
        aten._adaptive_avg_pool2d.default: [call(image, size) for size in ([1, 1], [7, 3], [5, 4], [9, 11])],
        aten._adaptive_avg_pool3d.default: [call(volume, [2, 3, 3])],
        aten.add.Tensor: [call(x, y, alpha=0.3)],
        aten.sub.Tensor: [call(x, y, alpha=0.3)],
        aten.rsub.Tensor: [call(x, y, alpha=0.3)],
        aten.rsub.Scalar: [call(x, 2.0, 0.3)],
        aten.addcmul.default: [call(x, y, x, value=0.3)],
        aten.addcdiv.default: [call(x, y, x, value=0.3)],
        aten.lerp.Scalar: [call(x, y, 0.3), call(x, y, 0.7)],
        aten.lerp.Tensor: [call(x, y, x)],
        aten.pow.Tensor_Scalar: [call(x.abs(), e) for e in (1, 2, 0.5, -0.5, -1)],
        aten.arange.start_step: [call(0, 3, 0.3, dtype=torch.float64), call(1.5, 9, 2, dtype=torch.float64)],
        aten.fft_fftfreq.default: [call(n, 0.3, dtype=torch.float64) for n in (7, 8)],
        aten.fft_rfftfreq.default: [call(n, 0.3, dtype=torch.float64) for n in (7, 8)],
        aten.gelu.default: [call(x), call(x, approximate="tanh")],
        aten.softplus.default: [call(x, 2.0, 1.0), call(x, 1, 0.5)],
        aten.elu.default: [call(x, 1.5, 0.5, 2.0), call(x)],
        aten._prelu_kernel.default: [call(x, y)],
        aten.native_dropout.default: [call(x, 0.3, False), call(x, 1.0, True), call(x, 0.0, True)],
        aten.dist.default: [call(x, y, p) for p in (0, 1, 2, 3.5, math.inf)],
        aten.scatter_reduce.two: [
            call(x, 0, torch.tensor([[0, 1, 1], [2, 1, 0]]), y, how, include_self=own)
            for how in ("sum", "mean")
            for own in (True, False)
        ],
        aten.scatter.reduce: [call(x, 1, torch.tensor([[0, 1, 1], [2, 1, 0]]), y, reduce="add")],
        aten.index_reduce.default: [
            call(x, 1, torch.tensor([0, 4, 4]), y[:, :3], "mean", include_self=own) for own in (True, False)
        ],
        **{op: bags(x, y[0]) for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)},
        aten._embedding_bag_backward.default: bag_gradients(x, y[0]),
        aten._embedding_bag_per_sample_weights_backward.default: [
            call(x, y, torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2]), torch.tensor([0, 0, 2, 2]), 0, p)
            for p in (-1, 1)
        ],
        aten.index_add.default: [call(x, 1, torch.tensor([0, 4, 4]), y[:, :3], alpha=0.5)],
        **{op: [call(x * 9)] for op in (aten.sinc.default, torch.sinc, torch.special.sinc, torch.Tensor.sinc)},
        aten.logit.default: [call(x.sigmoid()), call(x.sigmoid(), 0.3)],
        **{op: [call(x * 2)] for op in (torch.special.ndtr, F.tanhshrink, F.softsign)},
        aten.polygamma.default: [call(n, x * 3) for n in (0, 1, 2, 5)],
        **{
            op: [call(x * 9)]
            for op in (aten.i0.default, aten.special_i0e.default, aten.special_i1.default, aten.special_i1e.default)
        },
        **{op: [call(x, 0.2, 0.4)] for op in (F.rrelu, torch.rrelu)},
        F.grid_sample: [
            call(image, t(2, 3, 3, 2).sigmoid(), mode, align_corners=False)
            for mode in ("bilinear", "nearest", "bicubic")
        ],
        torch.gru_cell: [call(x, t(3, 2), t(6, 6), t(6, 2), t(6), t(6)), call(x, t(3, 2), t(6, 6), t(6, 2))],
        torch.lstm_cell: [
            call(x, (t(3, 2), t(3, 2)), t(8, 6), t(8, 2), t(8), t(8)),
            call(x, (t(3, 2), t(3, 2)), t(8, 6), t(8, 2)),
        ],
    }


def bag_gradients(grad: Tensor, weights: Tensor) -> list[Call]:
    """Arguments as PyTorch passes them: the bag of each index and the sizes of bags are results of the forward call."""
    indices, offsets, found = torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([0, 2, 2]), []
    for mode, own, padding in ((0, weights, -1), (1, None, -1), (0, None, 1), (1, None, 1)):
        _, *saved = aten._embedding_bag(grad, indices, offsets, False, mode, False, own, False, padding)
        found.append(call(grad, indices, offsets, *saved, 3, False, mode, False, own, padding))
    return found


def bags(w: Tensor, weights: Tensor) -> list[Call]:
    """Sums and means, with weights, an empty bag, a last offset, padding."""
    indices, offsets, more = torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([0, 2, 2]), torch.tensor([0, 2, 2, 6])
    return [
        call(w, indices, offsets, False, 0, False, weights),
        call(w, indices, offsets, False, 1, False, None),
        call(w, indices, more, False, 0, False, None, True),
        call(w, indices, offsets, False, 0, False, None, False, 1),
        call(w, indices, offsets, False, 1, False, None, False, 1),
    ]


def backward_samples(t: Callable[..., Tensor]) -> dict[Any, list[Call]]:
    """Arguments for the formulas of derivatives and losses."""
    x, g, image, volume, w = t(3, 6), t(3, 6), t(2, 4, 7, 6), t(2, 4, 5, 6, 4), t(4)
    unit, other = t(3, 6).sigmoid(), t(3, 6).sigmoid()
    found = {op: [call(g, x)] for op in (aten.silu_backward.default, aten.mish_backward.default)}
    found |= {op: [call(g, x * 4)] for op in (aten.hardsigmoid_backward.default, aten.hardswish_backward.default)}
    found[aten.hardswish_backward.default].append(call(t(4), torch.tensor([-3.0, 3.0, -4.0, 4.0])))
    found |= {op: [call(g, x, 0.4)] for op in (aten.softshrink_backward.default, aten.hardshrink_backward.default)}
    found |= {op: [call(g, unit)] for op in (aten.sigmoid_backward.default, aten.tanh_backward.default)}
    found |= {op: [call(g, x, 1, x.dtype)] for op in (aten._softmax_backward_data.default,)}
    classes = torch.tensor([1, -100, 5])
    # The targets before the first -1 count: all, some, one of them twice, none.
    several = torch.tensor([[5, 0, 3, 2, 4, 1], [1, 4, -1, 2, 0, -1], [2, 2, -1, -1, 3, -1], [-1, 1, 2, 3, 4, 5]])
    several = torch.stack([several[:3], several[1:]])
    pixels = torch.tensor([3, 0, -100, 2, 1, 1]).expand(2, 7, 6)
    nll = aten.nll_loss_forward(x, classes, t(6).abs(), 1, -100)[1]
    pooled, at = aten.max_pool2d_with_indices(image, [3, 2], [2, 2], [1, 0])
    tiles, tiled = aten.max_pool2d_with_indices(image, [2, 2])
    cubes, cubed = aten.max_pool3d_with_indices(volume, [2, 2, 2], [1, 1, 1])
    wide, widely = aten.adaptive_max_pool2d(image, [3, 4])
    deep, deeply = aten.adaptive_max_pool3d(volume, [2, 4, 3])
    normal = aten.native_layer_norm(image, [7, 6], t(7, 6), t(7, 6), 1e-3)
    groups = aten.native_group_norm(image, w, t(4), 2, 4, 42, 2, 1e-5)
    batch = aten._native_batch_norm_legit.no_stats(image, w, t(4), True, 0.1, 1e-5)
    same, everything = t(2, 4, 7, 6), [True] * 3
    stats = (t(4), t(4).abs() + 0.5)
    padded = [([1, 2], t(2, 4, 10)), ([1, 2, 0, 3], t(2, 4, 10, 9)), ([1, 2, 0, 3, 2, 1], t(2, 4, 8, 9, 7))]
    sources = (t(2, 4, 7), image, volume)
    pads = [getattr(aten, f"replication_pad{d}d_backward").default for d in (1, 2, 3)]
    found |= {op: [call(p[1], s, p[0])] for op, p, s in zip(pads, padded, sources, strict=True)}
    return found | {
        aten._log_softmax_backward_data.default: [call(g, x.log_softmax(1), 1, x.dtype)],
        aten.gelu_backward.default: [call(g, x), call(g, x, approximate="tanh")],
        aten.elu_backward.default: [call(g, 1.5, 0.5, 2.0, False, x), call(g, 1.5, 0.5, 2.0, True, x.clamp(-0.7))],
        aten.leaky_relu_backward.default: [call(g, x, 0.1, False)],
        aten._prelu_kernel_backward.default: [call(g, x, t(1, 6))],
        aten.softplus_backward.default: [call(g, x, 2.0, 1.0), call(g, x, 1, 20)],
        aten.log_sigmoid_backward.default: [call(g, x, (-x.abs()).exp())],
        aten.glu_backward.default: [call(g[:, :3], x, 1)],
        aten.native_dropout_backward.default: [call(g, x > 0, 1.25)],
        aten.embedding_dense_backward.default: [
            call(t(2, 3, 5), torch.tensor([[0, 3, 3], [1, 3, 0]]), 4, 1, scaled) for scaled in (False, True)
        ],
        aten._weight_norm_interface_backward.default: [
            call(g, x, t(3, 1), torch.linalg.vector_norm(x, dim=1, keepdim=True), 0)
        ],
        aten.mse_loss.default: [call(x, g, reduction) for reduction in range(3)],
        aten.mse_loss_backward.default: [call(t(), x, g, 1), call(g, x, x * 2, 0)],
        aten.smooth_l1_loss.default: [call(x, g, 1, 0.5), call(x, g, 2, 0.0)],
        aten.smooth_l1_loss_backward.default: [call(t(), x, g, 1, 0.5), call(t(), x, g, 2, 0.0)],
        aten.huber_loss.default: [call(x, g, 1, 0.5), call(x, g, 0, 1.0)],
        aten.huber_loss_backward.default: [call(t(), x, g, 1, 0.5)],
        aten.binary_cross_entropy.default: [call(unit, other), call(unit, other, x.abs(), 2)],
        aten.binary_cross_entropy_backward.default: [call(t(), unit, other), call(t(), unit, other, x.abs(), 2)],
        aten.binary_cross_entropy_with_logits.default: [call(x, unit), call(x, unit, g.abs(), t(6).abs(), 2)],
        aten.multi_margin_loss.default: [
            *(call(x, several[1][:, 1], reduction=r) for r in range(3)),
            *(call(x, several[1][:, 1], 2, 0.3, t(6), r) for r in range(3)),
            call(x[0], several[1][0, 1], reduction=0),
        ],
        aten.multilabel_margin_loss_forward.default: [
            *(call(x, labels, r) for labels in several for r in range(3)),
            call(x[0], several[0][0], 0),
        ],
        aten.nll_loss_forward.default: [call(x, classes, v, r, -100) for v in (None, t(6)) for r in range(3)],
        aten.nll_loss2d_forward.default: [call(image, pixels, w, r, -100) for r in range(3)],
        **dict.fromkeys((F.ctc_loss, torch.ctc_loss), ctc_samples(t(5, 3, 4).log_softmax(2))),
        aten.nll_loss_backward.default: [
            call(t(), x, classes, t(6), 1, -100, nll),
            call(t(3), x, classes, None, 0, -100, nll),
        ],
        aten.nll_loss2d_backward.default: [call(t(), image, pixels, w, 1, -100, nll)],
        aten.avg_pool2d_backward.default: [
            call(t(2, 4, 3, 3), image, [2, 2], [], [0, 0], False, True, None),
            call(t(2, 4, 4, 3), image, [3, 2], [2, 2], [1, 0], False, False, None),
            call(t(2, 4, 2, 2), image[:, :, :6], [3, 3], [3, 3], [0, 0], False, True, 5),
        ],
        aten.avg_pool3d_backward.default: [
            call(t(2, 4, 4, 5, 3), volume, [2, 2, 2], [1, 1, 1], [0, 0, 0], False, True, None)
        ],
        aten._adaptive_avg_pool2d_backward.default: [call(t(2, 4, 3, 4), image), call(t(2, 4, 7, 6), image)],
        aten._adaptive_avg_pool3d_backward.default: [call(t(2, 4, 2, 4, 3), volume)],
        aten.max_pool2d_with_indices_backward.default: [
            call(t(*pooled.shape), image, [3, 2], [2, 2], [1, 0], [1, 1], False, at),
            call(t(*tiles.shape), image, [2, 2], [], [0, 0], [1, 1], False, tiled),
        ],
        aten.max_pool3d_with_indices_backward.default: [
            call(t(*cubes.shape), volume, [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1], False, cubed)
        ],
        aten.adaptive_max_pool2d_backward.default: [call(t(*wide.shape), image, widely)],
        aten.adaptive_max_pool3d_backward.default: [call(t(*deep.shape), volume, deeply)],
        aten.native_layer_norm_backward.default: [
            call(same, image, [7, 6], *normal[1:], t(7, 6), t(7, 6), everything),
            call(same, image, [7, 6], *normal[1:], None, None, [True, False, False]),
        ],
        aten.native_group_norm_backward.default: [call(same, image, *groups[1:], w, 2, 4, 42, 2, everything)],
        aten.native_batch_norm_backward.default: [
            call(same, image, w, *stats, *batch[1:], True, 1e-5, everything),
            call(same, image, w, *stats, None, None, False, 1e-5, everything),
        ],
    }


def linear_algebra_samples(t: Callable[..., Tensor]) -> dict[Any, list[Call]]:
    """Arguments for the formulas of factorizations and triangular systems, batched ones too."""
    a, b, tall, batch = t(5, 5), t(5, 2), t(6, 4), t(2, 1, 5, 5)
    lower = t(5, 5).tril() / 8 + 2 * torch.eye(5, dtype=torch.float64)
    positive = lower @ lower.mT
    packed, pivots = torch.linalg.lu_factor(batch)
    solve = [call(a, b), call(batch, b), call(batch, t(2, 1, 5)), call(a.mT, b.mT, left=False)]
    return {
        aten.linalg_solve_triangular.default: [
            call(lower, b, upper=False),
            call(lower.expand(3, 5, 5), b.mT, upper=True, left=False),
            call(lower, b, upper=False, unitriangular=True),
        ],
        aten.triangular_solve.default: [call(b, lower, *flags) for flags in itertools.product((True, False), repeat=2)],
        aten.linalg_cholesky_ex.default: [call(positive), call(positive.expand(2, 5, 5), upper=True)],
        **({aten.cholesky.default: [call(positive), call(positive, upper=True)]} if hasattr(aten, "cholesky") else {}),
        aten.cholesky_solve.default: [call(b, lower), call(b.expand(2, 5, 2), lower.mT, True)],
        aten.cholesky_inverse.default: [call(lower), call(lower.mT, True)],
        aten.linalg_lu_factor_ex.default: [call(a), call(tall), call(tall.mT), call(batch)],
        aten.linalg_lu.default: [call(a), call(tall), call(tall.mT), call(batch)],
        aten.linalg_lu_solve.default: [
            call(packed, pivots, b),
            call(packed, pivots, b, adjoint=True),
            call(packed, pivots, b.mT, left=False),
            call(packed, pivots, b.mT, left=False, adjoint=True),
        ],
        aten._linalg_solve_ex.default: solve,
        aten.linalg_inv_ex.default: [call(a), call(batch)],
        aten.linalg_qr.default: [
            call(x, mode) for x in (tall, tall.mT, batch) for mode in ("reduced", "complete", "r")
        ],
        aten.geqrf.default: [call(tall), call(tall.mT), call(batch)],
        aten.linalg_householder_product.default: [call(*torch.geqrf(tall)), call(*torch.geqrf(batch))],
        aten.ormqr.default: [
            call(*torch.geqrf(a), b if left else b.mT, left, turned)
            for left, turned in itertools.product((True, False), repeat=2)
        ],
        torch.linalg.lstsq: [
            call(x, t(x.shape[-2], 2), driver=driver) for x in (tall, tall.mT) for driver in (None, "gels")
        ],
        **dict.fromkeys((aten._linalg_det.default, torch.det, torch.Tensor.det), det_samples(a, batch)),
        **dict.fromkeys((aten._linalg_slogdet.default, torch.slogdet, torch.Tensor.slogdet), det_samples(a, batch)),
        **dict.fromkeys((torch.logdet, torch.Tensor.logdet), det_samples(positive)[:2]),
        **dict.fromkeys((torch.linalg.det, torch.linalg.slogdet), det_samples(a, batch)),
    }


def det_samples(*matrices: Tensor) -> list[Call]:
    return [call(x) for a in matrices for x in (a, a.mT.contiguous().mT, a.flip(-1), a * 0)]


def ctc_samples(x: Tensor) -> list[Call]:
    padded, joined = torch.tensor([[1, 1], [2, 3], [3, 0]]), torch.tensor([1, 1, 3])
    steps, sizes = torch.tensor([5, 4, 2]), torch.tensor([2, 0, 1])
    return [call(x, padded, steps, sizes, 0), call(x, joined, (5, 4, 2), (2, 0, 1), 2, zero_infinity=True)]


SAMPLES = samples()


def name_of(op: Any) -> str:
    """The name of an operator or a function; the text of a function would have its address."""
    return str(op) if isinstance(op, torch._ops.OpOverload) else op.__name__


def test_every_formula_has_samples() -> None:
    assert set(SAMPLES) == set(FORMULAS)


@pytest.mark.parametrize("op", FORMULAS, ids=name_of)
def test_a_formula_states_itself_in_one_line(op: Any) -> None:
    doc = FORMULAS[op].__doc__ or ""
    assert doc and "\n" not in doc and ("=" in doc or "as without" in doc)


@pytest.mark.parametrize("op", FORMULAS, ids=name_of)
def test_a_formula_computes_its_operator(op: Any) -> None:
    """In binary64, where the two may differ by a few roundings in another order: hence the tolerance."""
    for args, kwargs in SAMPLES[op]:
        result = FORMULAS[op](*args, **kwargs)
        assert result is not NotImplemented
        expected = op(*args, **kwargs)
        for ours, reference in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
            # A second result of no elements is scratch that nothing reads.
            if isinstance(ours, Tensor) and ours.numel():
                # A tolerance: in binary64, the stock operator adds in another order than the formula; one multiplies
                # by a binary32 number for 1/6, and polygamma of order 1 is good to 4e-10 alone.
                loose = 1e-7 if op in (aten.hardsigmoid_backward.default, aten.polygamma.default) else 1e-11
                torch.testing.assert_close(ours.reshape(reference.shape), reference, rtol=loose, atol=1e-12)


def test_products_in_groups_of_rows_are_those_of_each_group() -> None:
    pytest.importorskip("transformers")
    hugging_face()
    from transformers.integrations import moe  # defines the operator

    assert moe
    generator = torch.Generator().manual_seed(8)
    a, b, g = (torch.randn(shape, generator=generator) for shape in ((7, 5), (3, 5, 4), (7, 4)))
    offs = torch.tensor([2, 2, 6])  # two rows, none, four; one row beyond the last group
    a, b = a.requires_grad_(), b.requires_grad_()
    compiled = fxround.compile(
        lambda a, b, offs: torch.ops.transformers.grouped_mm_fallback(a, b, offs), "reproducible"
    )
    mm = fxround.compile(torch.mm, "reproducible")
    found = compiled(a, b, offs)
    found.backward(g)
    with torch.no_grad():
        for group, (low, high) in enumerate(((0, 2), (2, 2), (2, 6))):
            rows = slice(low, high)
            if high > low:
                assert torch.equal(found[rows], mm(a[rows], b[group]))
                assert torch.equal(a.grad[rows], mm(g[rows], b[group].t()))
                assert torch.equal(b.grad[group], mm(a[rows].t(), g[rows]))
            else:
                assert not b.grad[group].any()
    assert not found[6].any() and not a.grad[6].any()


def test_formulas_leave_integers_and_primitives_alone() -> None:
    n, x = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
    assert FORMULAS[aten.addmm.default](n, n, n.t()) is NotImplemented
    assert FORMULAS[aten.add.Tensor](x, x) is NotImplemented
    assert FORMULAS[aten.pow.Tensor_Scalar](x, 3) is NotImplemented
    assert FORMULAS[aten.arange.start_step](0, 5, 1, dtype=torch.float32) is NotImplemented
    i = torch.zeros(2, 3, dtype=torch.int64)
    assert FORMULAS[aten.scatter_reduce.two](x, 0, i, x, "prod") is NotImplemented
    assert FORMULAS[aten.scatter.reduce](x, 0, i, x, reduce="multiply") is NotImplemented


# ---- the compiled graph against NumPy, bit for bit ----


def lanes(x: Array) -> Array:
    """The sum over the last dimension under lanes:16, as numerics/orders.py words it."""
    acc = np.zeros((*x.shape[:-1], 16), np.float32)
    for k in range(x.shape[-1]):
        acc[..., k % 16] += x[..., k]
    n = min(16, x.shape[-1])
    w = 1 << (n - 1).bit_length()
    while w > 1:
        w //= 2
        for i in range(w):
            if i + w < n:
                acc[..., i] += acc[..., i + w]
    return acc[..., :1]


def once(function: Callable[[Any], Any], x: Array) -> Array:
    """An elementary function through binary64: correctly rounded, except for rare arguments that no test here has."""
    return np.asarray(function(x.astype(np.float64))).astype(np.float32)


def softmax(x: Array) -> Array:
    e = once(np.exp, x - x.max(-1, keepdims=True))
    return e / lanes(e)


def log_softmax(x: Array) -> Array:
    s = x - x.max(-1, keepdims=True)
    return s - once(np.log, lanes(once(np.exp, s)))


def layer_norm(x: Array) -> Array:
    n = np.float32(x.shape[-1])
    d = x - lanes(x) / n
    return d * once(lambda v: 1 / np.sqrt(v), lanes(d * d) / n + np.float32(1e-5))


def silu(x: Array) -> Array:
    return x * once(lambda v: 1 / (1 + np.exp(-v)), x)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "ours, specified",
    [
        (lambda x: F.softmax(x, -1), softmax),
        (lambda x: F.log_softmax(x, -1), log_softmax),
        (lambda x: F.layer_norm(x, x.shape[-1:]), layer_norm),
        (F.silu, silu),
        (lambda x: x.mean(-1, keepdim=True), lambda x: lanes(x) / np.float32(x.shape[-1])),
    ],
    ids=["softmax", "log_softmax", "layer_norm", "silu", "mean"],
)
@pytest.mark.parametrize("length", [1, 5, 16, 37])
def test_the_compiled_formula_is_the_specified_one(ours: Any, specified: Any, length: int) -> None:
    x = torch.randn(6, length, generator=torch.Generator().manual_seed(length))
    result = fxround.compile(Calls(ours), "reproducible")(x).numpy()
    expected = specified(x.numpy())
    assert result.dtype == expected.dtype and np.array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_average_pooling_sums_its_window_and_divides_once() -> None:
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    result = fxround.compile(Calls(lambda x: F.avg_pool2d(x, 3, 2, 1)), "reproducible")(x).numpy()
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i in range(3):
        for j in range(3):
            window = padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].reshape(2, 1, 9)
            assert np.array_equal(result[:, :, i, j], (lanes(window) / np.float32(9))[..., 0])


def test_16_bit_operands_are_widened_and_rounded_once_at_the_end() -> None:
    x = torch.randn(4, 9).bfloat16()
    result = fxround.compile(Calls(lambda x: F.softmax(x, -1)), "reproducible")(x)
    expected = torch.from_numpy(softmax(x.float().numpy())).bfloat16()
    assert torch.equal(result, expected)


def test_no_formula_is_passed_over_for_one_that_pytorch_puts_above_it() -> None:
    """A Python kernel for autograd takes precedence over tables of formulas; the capture replaces two of three."""
    above = {op for op in FORMULAS if torch._C.DispatchKey.Autograd in getattr(op, "py_kernels", ())}
    replaced = {aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default}
    assert above == {aten.softshrink.default} | replaced
    kernels = {op: op.py_kernels[torch._C.DispatchKey.Autograd] for op in replaced}
    for op in replaced:
        with defined_before_autograd(FORMULAS):
            assert op.py_kernels[torch._C.DispatchKey.Autograd] is not kernels[op]
        assert op.py_kernels[torch._C.DispatchKey.Autograd] is kernels[op]


MARGINS = {
    "one class": (F.multi_margin_loss, [1, 0, 2, 3]),
    "all classes": (F.multilabel_margin_loss, [[0, 2, 1, 3], [1, 2, 0, 3], [2, 1, 3, 0], [3, 0, 1, 2]]),
    "some classes": (F.multilabel_margin_loss, [[0, 2, -1, 1], [1, -1, 0, 2], [-1, 0, 1, 2], [3, 0, 1, -1]]),
}


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margin_losses_are_those_of_pytorchs_kernels(name: str, reduction: str) -> None:
    """Not those of its decompositions; also where a term is 0, at which the gradient is 0.

    Of four rows of four classes and these numbers, no sum and no quotient is rounded, in whatever order.
    """
    function, classes = MARGINS[name]
    target = torch.tensor(classes)
    compiled = fxround.compile(lambda x: function(x, target, reduction=reduction), "reproducible")
    x = torch.tensor([[1.0, 0.0, 3.5, 2.0], [2.0, 2.0, 1.0, -1.0], [-1.0, 0.5, 0.25, 1.5], [0.5, -0.5, 1.5, 2.5]])
    results, gradients = [], []
    for run in (compiled, lambda x: function(x, target, reduction=reduction)):
        leaf = x.clone().requires_grad_()
        results.append(run(leaf))
        gradients += torch.autograd.grad(results[-1].sum(), leaf)
    assert torch.equal(*results) and torch.equal(*gradients)  # stock: exact numbers, of which none is rounded
    with torch.no_grad():
        assert torch.equal(compiled(x), results[0])


def test_gradients_of_masked_scatter_are_moved() -> None:
    x, source, mask = torch.zeros(2, 5), torch.zeros(2, 5), torch.tensor([[1, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).bool()
    leaves = [t.requires_grad_() for t in (x, source)]
    compiled = fxround.compile(lambda a, b: a.masked_scatter(mask, b), "reproducible")
    gradient = torch.arange(1.0, 11.0).view(2, 5)
    of_x, of_source = torch.autograd.grad(compiled(*leaves), leaves, gradient)
    assert torch.equal(of_x, gradient.masked_fill(mask, 0.0))
    assert of_source.flatten().tolist() == [1.0, 4.0, 5.0, 7.0] + [0.0] * 6


REFUSED_BY_KERNELS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a bias of integers": (F.linear, (torch.ones(2, 4), torch.ones(3, 4), torch.arange(3))),
    "a bias of another dtype": (F.linear, (torch.ones(2, 4), torch.ones(3, 4), torch.ones(3).half())),
    "addbmm": (torch.addbmm, (torch.arange(3), torch.ones(2, 2, 4), torch.ones(2, 4, 3))),
    "targets of integers": (F.binary_cross_entropy, (torch.full((2, 4), 0.5), torch.ones(2, 4).long())),
    "index_add": (
        lambda x, index, source: x.index_add(0, index, source),
        (torch.ones(3, 3), torch.arange(2), torch.ones(2, 3, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_KERNELS)
def test_what_pytorchs_kernels_refuse_is_refused(name: str) -> None:
    function, arguments = REFUSED_BY_KERNELS[name]
    with pytest.raises(RuntimeError) as stock:
        function(*arguments)
    with pytest.raises(RuntimeError) as refused:
        fxround.compile(lambda *given: function(*given), "reproducible")(*arguments)
    assert str(refused.value) == str(stock.value)


@pytest.mark.parametrize("target", [4, -2])
def test_a_target_that_is_no_class_is_refused_after_the_last_one_too(target: int) -> None:
    targets = torch.tensor([[1, -1, target, 0], [0, 2, -1, -1]])
    with pytest.raises(RuntimeError, match=rf"index {target} is out of bounds for dimension 1 with size 4"):
        fxround.compile(F.multilabel_margin_loss, "reproducible")(torch.ones(2, 4), targets)


@pytest.mark.parametrize("weight", [torch.tensor([1, 2, 3, 4]), torch.tensor([0.5, 1, 2, 4]).double()])
def test_weights_of_binary_cross_entropy_have_any_dtype(weight: Tensor) -> None:
    """-log(1/2) times a weight, rounded once each."""
    half, log2 = torch.full((1, 4), 0.5), Fraction(float(np.float32(0.6931471805599453)))
    loss = nn.BCELoss(weight=weight, reduction="none")
    (got,) = fxround.compile(loss, "reproducible")(half, torch.ones(1, 4)).tolist()
    assert got == [round_exact(log2 * Fraction(w), False, Rounding.parse("binary32")) for w in weight.tolist()]


@pytest.mark.parametrize("name", MARGINS)
def test_margin_losses_refuse_the_dtypes_that_pytorchs_kernels_refuse(name: str) -> None:
    function, classes = MARGINS[name]
    x, target = torch.randn(4, 4), torch.tensor(classes, dtype=torch.int32)
    with pytest.raises(RuntimeError) as stock:
        function(x, target)
    with pytest.raises(RuntimeError) as refused:
        fxround.compile(lambda x: function(x, target), "identity")(x)
    assert str(refused.value) == str(stock.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.adaptive_max_pool2d(x, 3),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    ],
    ids=["max_pool", "adaptive_max_pool", "max_unpool", "reflect"],
)
def test_no_images_have_gradients(function: Any) -> None:
    x = torch.zeros(0, 2, 4, 6, requires_grad=True)
    result = fxround.compile(Calls(function), "identity")(x)
    result.sum().backward()
    assert result.shape == function(x).shape and x.grad is not None and x.grad.shape == x.shape
