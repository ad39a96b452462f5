"""Transposed convolutions and their gradients, in every small geometry, against sums over integers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import fxround

RNE = "binary64/nearest_even/inf"
RNG = torch.tensor([0, 0])
OPS = torch.ops.fxround
# (size, kernel, stride, padding, dilation, output_padding) of one dimension, as PyTorch admits them.
EVERY = [
    case
    for case in product((1, 3), (1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2))
    if case[5] < max(case[2], case[4])
    and (case[0] - 1) * case[2] - 2 * case[3] + case[4] * (case[1] - 1) + case[5] + 1 > 0
]


def integers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-9, 10, shape)


def meetings(case: tuple[tuple[int, ...], ...], result: tuple[int, ...]) -> Any:
    """(index in the input, tap, index in the result) for every product of one channel."""
    sizes, taps, stride, padding, dilation, _ = zip(*case, strict=True)
    for i, t in product(product(*map(range, sizes)), product(*map(range, taps))):
        y = tuple(s * a + d * b - p for s, a, d, b, p in zip(stride, i, dilation, t, padding, strict=True))
        if all(0 <= a < n for a, n in zip(y, result, strict=True)):
            yield i, t, y


def check(*case: tuple[int, ...]) -> None:
    sizes, taps, stride, padding, dilation, extra = zip(*case, strict=True)
    result = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in case)
    x, w, g = integers(1, 2, 2, *sizes), integers(2, 2, 3, *taps), integers(3, 2, 3, *result)
    y, gx, gw = np.zeros(g.shape, np.int64), np.zeros(x.shape, np.int64), np.zeros(w.shape, np.int64)
    for i, t, to in meetings(case, result):
        y[(..., *to)] += x[(..., *i)] @ w[(..., *t)]
        gx[(..., *i)] += g[(..., *to)] @ w[(..., *t)].T
        gw[(..., *t)] += x[(..., *i)].T @ g[(..., *to)]
    tx, tw, tg = (torch.from_numpy(v).double() for v in (x, w, g))
    geometry = (list(stride), list(padding), list(dilation), True, list(extra), 1, RNE, RNE, RNG, 0)
    found = (
        OPS.convolution(tx, tw, *geometry),
        OPS.convolution_input_gradient(tg, tw, list(x.shape), *geometry),
        OPS.convolution_weight_gradient(tg, tx, list(w.shape), *geometry),
    )
    for what, got, want in zip(("result", "input gradient", "weight gradient"), found, (y, gx, gw), strict=True):
        assert got.shape == want.shape, f"{what} of {case}: {tuple(got.shape)} for {want.shape}"
        assert (got.numpy() == want).all(), f"{what} of {case}"


def test_every_small_geometry_in_one_dimension() -> None:
    for case in EVERY:
        check(case)


def test_every_small_geometry_beside_another_in_two_dimensions() -> None:
    for number, case in enumerate(EVERY):
        check(case, EVERY[-7 * number % len(EVERY)])


@pytest.mark.parametrize("kernel, dilation, extra", [(3, 2, (0, 1)), (2, 3, (2, 1))])
def test_modules_with_more_output_padding_than_stride(kernel: int, dilation: int, extra: tuple[int, int]) -> None:
    """Integers: no sum has a rounding error, so that PyTorch's gradients are the only correct ones."""
    stock = torch.nn.ConvTranspose2d(2, 2, kernel, dilation=dilation, output_padding=extra).double()
    with torch.no_grad():
        for p in stock.parameters():
            p.copy_(torch.from_numpy(integers(p.dim(), *p.shape)))
    x = torch.from_numpy(integers(7, 2, 2, 3, 4)).double().requires_grad_()
    found = []
    for module in (stock, fxround.compile(stock, "reproducible")):
        y = module(x)
        found.append((y, *torch.autograd.grad((y * y.detach().sign()).sum(), (x, *stock.parameters()))))
    assert all(map(torch.equal, *found))
