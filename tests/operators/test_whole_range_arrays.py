"""Norms, losses, products, bags and scatters of float64 and float32 operands of every exponent.

The references are those of ``array_rationals``; seed and length of a run are those of test_whole_range.
"""

from __future__ import annotations

import math

import array_rationals as again
import numpy as np
import pytest
import torch
from array_rationals import MEAN, NONE, SUM
from formula_cases import BAGS, IGNORED, INDICES, LABELS, OFFSETS, PIXELS, Case, compare
from torch.nn import functional as F
from whole_range import ROUNDS

aten = torch.ops.aten
PLACES = torch.tensor([[0, 1, 0, 0], [2, 2, 1, 2]])

NORMS = {
    "group_norm": Case(
        [(2, 4, 1, 3), (4,), (4,)],
        lambda x, w, b: aten.native_group_norm(x, w, b, x.shape[0], 4, 3, 2, 1e-5),
        lambda o, x, w, b: again.group_norm(o, x, w, b, 2),
        3,
    ),
    "batch_norm": Case(
        [(3, 2, 2), (2,), (2,), (2,), (2,)],
        lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.3, 1e-5),
        lambda o, x, w, b, m, v: again.batch_norm(o, x, w, b, m, v, 0.3),
        5,
    ),
    "weight_norm": Case(
        [(2, 3, 2), (2, 1, 1)],
        lambda v, g: aten._weight_norm_interface(v, g, 0),
        lambda o, v, g: again.weight_norm(o, v, g),
        2,
    ),
}
LOSSES = {
    **{
        f"bce {reduction}": Case(
            [(2, 3)] * 3,
            lambda x, t, w, r=reduction: aten.binary_cross_entropy(x, t, w, r),
            lambda o, x, t, w, r=reduction: again.reduced(o, again.bce(o, x, t, w), r),
        )
        for reduction in (NONE, MEAN, SUM)
    },
    **{
        f"bce_with_logits {reduction}": Case(
            [(2, 3)] * 3 + [(3,)],
            lambda x, t, w, p, r=reduction: aten.binary_cross_entropy_with_logits(x, t, w, p, r),
            lambda o, x, t, w, p, r=reduction: again.reduced(o, again.bce_with_logits(o, x, t, w, p), r),
        )
        for reduction in (NONE, MEAN)
    },
    "smooth_l1_loss": Case(
        [(2, 3)] * 2,
        lambda x, t: aten.smooth_l1_loss(x, t, MEAN, 0.7),
        lambda o, x, t: again.reduced(o, again.smooth_l1(o, x, t, 0.7), MEAN),
    ),
    "huber_loss": Case(
        [(2, 3)] * 2,
        lambda x, t: aten.huber_loss(x, t, SUM, 0.7),
        lambda o, x, t: again.reduced(o, again.huber(o, x, t, 0.7), SUM),
    ),
    **{
        f"nll_loss {reduction}": Case(
            [(4, 3), (3,)],
            lambda x, w, r=reduction: aten.nll_loss_forward(x, LABELS, w, r, IGNORED),
            lambda o, x, w, r=reduction: again.nll_loss(o, x, LABELS.numpy(), w, r, IGNORED),
            2,
        )
        for reduction in (MEAN, SUM)
    },
    "nll_loss unweighted": Case(
        [(4, 3)],
        lambda x: aten.nll_loss_forward(x, LABELS, None, MEAN, IGNORED),
        lambda o, x: again.nll_loss(o, x, LABELS.numpy(), None, MEAN, IGNORED),
        2,
    ),
    "nll_loss none": Case(
        [(4, 3), (3,)],
        lambda x, w: aten.nll_loss_forward(x, LABELS, w, NONE, IGNORED)[0],
        lambda o, x, w: again.nll_loss(o, x, LABELS.numpy(), w, NONE, IGNORED),
    ),
    "nll_loss2d": Case(
        [(2, 3, 2, 2), (3,)],
        lambda x, w: aten.nll_loss2d_forward(x, PIXELS, w, MEAN, IGNORED),
        lambda o, x, w: again.nll_loss(o, x, PIXELS.numpy(), w, MEAN, IGNORED),
        2,
    ),
    "cross_entropy": Case(
        [(4, 3), (3,)],
        lambda x, w: F.cross_entropy(x, LABELS, w, ignore_index=IGNORED),
        lambda o, x, w: again.nll_loss(o, again.log_softmax(o, x), LABELS.numpy(), w, MEAN, IGNORED)[0],
    ),
    "label_smoothing": Case(
        [(4, 3), (3,)],
        lambda x, w: F.cross_entropy(x, LABELS, w, ignore_index=IGNORED, label_smoothing=0.1),
        lambda o, x, w: again.smoothed(o, x, LABELS.numpy(), w, 0.1, IGNORED),
    ),
    "label_smoothing unweighted": Case(
        [(4, 3)],
        lambda x: F.cross_entropy(x, LABELS, ignore_index=IGNORED, label_smoothing=0.3),
        lambda o, x: again.smoothed(o, x, LABELS.numpy(), None, 0.3, IGNORED),
    ),
}
PRODUCTS = {
    **{
        f"cdist {p}": Case(
            [(3, 2), (2, 2)],
            lambda a, b, p=p: torch.cdist(a, b, p),
            lambda o, a, b, p=p: again.cdist(o, a, b, p),
        )
        for p in (0.0, 1.0, 1.5, 2.0, math.inf)
    },
    "attention": Case(
        [(2, 3)] + [(3, 3)] * 2,
        lambda q, k, v: F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None]),
        again.attention,
    ),
    "addmm": Case(
        [(2, 2), (2, 3), (3, 2)],
        lambda c, a, b: torch.addmm(c, a, b, beta=0.3, alpha=0.7),
        lambda o, c, a, b: o.add(o.mul(o.mm(a, b), 0.7), o.mul(c, 0.3)),
    ),
    **{
        f"cdist backward {p}": Case(
            [(3, 2), (3, 2), (2, 2)],
            lambda g, a, b, p=p: aten._cdist_backward(g, a, b, p, torch.cdist(a, b, p)),
            lambda o, g, a, b, p=p: again.cdist_backward(o, g, a, b, p),
        )
        for p in (0.0, 1.0, 1.5, 2.0, 2.7, 3.0, math.inf)
    },
    "baddbmm": Case(
        [(2, 2, 2), (2, 2, 3), (2, 3, 2)],
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.3, alpha=0.7),
        lambda o, c, a, b: o.add(o.mul(np.stack([o.mm(p, q) for p, q in zip(a, b, strict=True)]), 0.7), o.mul(c, 0.3)),
    ),
    "baddbmm alone": Case(
        [(2, 2, 2), (2, 2, 3), (2, 3, 2)],
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0),
        lambda o, c, a, b: np.stack([o.mm(p, q) for p, q in zip(a, b, strict=True)]),
    ),
    "addbmm alpha": Case(
        [(2, 2), (2, 2, 3), (2, 3, 2)],
        lambda c, a, b: torch.addbmm(c, a, b, alpha=0.7),
        lambda o, c, a, b: o.add(o.mul(o.mm(np.hstack(a), np.vstack(b)), 0.7), c),
    ),
    "addbmm": Case(
        [(2, 2), (2, 2, 3), (2, 3, 2)],
        lambda c, a, b: torch.addbmm(c, a, b, beta=0.3),
        lambda o, c, a, b: o.add(o.mm(np.hstack(a), np.vstack(b)), o.mul(c, 0.3)),
    ),
    "addr": Case(
        [(2, 3), (2,), (3,)],
        lambda c, x, y: torch.addr(c, x, y, alpha=0.7),
        lambda o, c, x, y: o.add(o.mul(o.mul(x[:, None], y[None]), 0.7), c),
    ),
    "bilinear": Case(
        [(2, 3), (2, 3, 2), (2, 2)],
        lambda a, w, b: F.bilinear(a, b, w),
        lambda o, a, w, b: o.total(o.mul(o.mul(a[:, None, :, None], w[None]), b[:, None, None, :]), 2, 3),
    ),
}


SCATTERS = {
    "embedding_bag sum": Case(
        [(4, 2)],
        lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="sum", padding_idx=3),
        lambda o, w: again.embedding_bag(o, w, BAGS),
    ),
    "embedding_bag weights": Case(
        [(4, 2), (7,)],
        lambda w, own: F.embedding_bag(INDICES, w, OFFSETS, mode="sum", padding_idx=3, per_sample_weights=own),
        lambda o, w, own: again.embedding_bag(o, w, BAGS, own),
    ),
    "embedding_bag mean": Case(
        [(4, 2)],
        lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="mean", padding_idx=3),
        lambda o, w: again.embedding_bag(o, w, BAGS, mean=True),
    ),
    # PyTorch's own choice, rounded once.
    "embedding_bag max": Case(
        [(4, 2)],
        lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="max", padding_idx=3),
        lambda o, w: o.kept(again.embedding_bag_max(w, BAGS)),
    ),
    "index_add": Case(
        [(3, 2), (4, 2)],
        lambda x, s: x.index_add(0, PLACES[0], s, alpha=0.7),
        lambda o, x, s: added(o, x, PLACES[0, :, None].expand(4, 2), o.mul(s, 0.7)),
    ),
    "scatter_add": Case(
        [(2, 3), (2, 4)], lambda x, s: x.scatter_add(1, PLACES, s), lambda o, x, s: added(o, x.T, PLACES.T, s.T).T
    ),
    "scatter_reduce": Case(
        [(2, 3), (2, 4)],
        lambda x, s: x.scatter_reduce(1, PLACES, s, "mean", include_self=False),
        lambda o, x, s: averaged(o, x.T, PLACES.T, s.T, False).T,
    ),
    "index_reduce": Case(
        [(3, 2), (4, 2)],
        lambda x, s: x.index_reduce(0, PLACES[1], s, "mean"),
        lambda o, x, s: averaged(o, x, PLACES[1, :, None].expand(4, 2), s, True),
    ),
}


def added(o: again.Arrays, x: again.Array, index: torch.Tensor, s: again.Array) -> again.Array:
    """x with s added along dimension 0, in the order of s."""
    out = np.empty(x.shape, object)
    for i, j in np.ndindex(x.shape):
        out[i, j] = o.o.added([s[k, j] for k in range(len(s)) if index[k, j] == i], float(x[i, j]))
    return out


def averaged(o: again.Arrays, x: again.Array, index: torch.Tensor, s: again.Array, own: bool) -> again.Array:
    """The sum divided by the number of its terms; what has none divides by 1."""
    counts = [[int((index[:, j] == i).sum()) for j in range(x.shape[1])] for i in range(len(x))]
    divisor = o.kept(np.array([[float(max(1, n + own)) for n in row] for row in counts], object))
    begin = x if own else np.where(np.array(counts) > 0, 0.0, x)
    return o.div(added(o, begin, index, s), divisor)


@pytest.mark.part("products-dtype1", "losses-dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cases", [NORMS | LOSSES, PRODUCTS | SCATTERS], ids=["losses", "products"])
def test_arrays_round_every_operation(cases: dict[str, Case], dtype: torch.dtype) -> None:
    compare(cases, dtype, 2 * ROUNDS)
