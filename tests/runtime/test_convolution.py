"""Transposed convolutions and both gradients against their definition (docs/numerics.md, section 3), by its indices.

The matrices are built here, element by element of the definition, and multiplied by ``fxround::matmul``, which
test_contraction.py compares with NumPy.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from product_operands import OPS, RNE, same, threads, values
from torch import Tensor
from torch.nn import functional as F

import fxround

# One of each kind of step: the hardware's, a quick one, those that draw, a short format, a chunked one.
STEPS = (
    RNE,
    "binary32/stochastic",
    "binary32/up_down",
    "bfloat16",
    "bfloat16 chunk=3 combine=binary32",
)
RNG = torch.tensor([11, 4])


class Case:
    """Sizes of a convolution, one number a dimension."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.dims = draw(st.integers(1, 3))
        small = {1: 12, 2: 6, 3: 4}[self.dims]

        def each(low: int, high: int) -> list[int]:
            return [draw(st.integers(low, high)) for _ in range(self.dims)]

        self.images, self.groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
        # Input and output channels of a group.
        self.narrow, self.wide = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        self.size, self.taps, self.stride = each(1, small), each(1, 3), each(1, 3)
        self.padding, self.dilation = each(0, 2), each(1, 2)
        self.extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(self.stride, self.dilation, strict=True)]
        self.kind, self.seed = draw(st.sampled_from(["normal", "integers", "special"])), draw(st.integers(0, 99))
        self.threads = draw(st.integers(1, 3))

    @property
    def reach(self) -> list[int]:
        return [d * (t - 1) for d, t in zip(self.dilation, self.taps, strict=True)]

    def call(self, transposed: bool) -> tuple[Any, ...]:
        extra = self.extra if transposed else [0] * self.dims
        return self.stride, self.padding, self.dilation, transposed, extra, self.groups

    def tensor(self, *shape: int) -> Tensor:
        self.seed += 1
        return values(shape, self.seed, self.kind)


cases = st.composite(Case)


def transposed(x: Tensor, w: Tensor, case: Case, size: list[int], accumulate: str) -> Tensor:
    """The plain convolution over x with zeros between and around its elements, the kernel turned around."""
    images, groups, dims = x.shape[0], case.groups, range(case.dims)
    into, out = w.shape[0] // groups, w.shape[1]
    width = [size[d] + case.reach[d] for d in dims]
    weights: Any = w.numpy()
    spread: Any = np.zeros((*x.shape[:2], *width), np.float32)
    for place in product(*(range(x.shape[d + 2]) for d in dims)):
        where = [case.stride[d] * place[d] + case.reach[d] - case.padding[d] for d in dims]
        if all(0 <= where[d] < width[d] for d in dims):
            spread[(..., *where)] = x.numpy()[(..., *place)]
    left: Any = np.zeros((images * groups, out, into * int(np.prod(case.taps))), np.float32)
    right: Any = np.zeros((images * groups, left.shape[2], int(np.prod(size))), np.float32)
    every = list(product(range(into), *map(range, case.taps)))
    for batch, (k, (channel, *tap)) in product(range(images * groups), enumerate(every)):
        image, group = divmod(batch, groups)
        turned = tuple(case.taps[d] - 1 - tap[d] for d in dims)
        left[batch, :, k] = weights[(group * into + channel, slice(None), *turned)]
        window = tuple(slice(t * case.dilation[d], t * case.dilation[d] + size[d]) for d, t in enumerate(tap))
        right[batch, k] = spread[(image, group * into + channel, *window)].reshape(-1)
    product_ = OPS.matmul(torch.from_numpy(left), torch.from_numpy(right), accumulate, RNE, RNG, 5)
    result: Tensor = product_.reshape(images, groups * out, *size)
    return result


@pytest.mark.part(2)
@pytest.mark.parametrize("accumulate", STEPS)
@settings(max_examples=12)
@given(case=cases())
def test_transposed_convolutions_are_their_definition(accumulate: str, case: Case) -> None:
    into, out = case.groups * case.narrow, case.wide
    size = [
        (n - 1) * s - 2 * p + r + e + 1
        for n, s, p, r, e in zip(case.size, case.stride, case.padding, case.reach, case.extra, strict=True)
    ]
    assume(min(size) > 0)
    x, w = case.tensor(case.images, into, *case.size), case.tensor(into, out, *case.taps)
    with threads(case.threads):
        got = OPS.convolution(x, w, *case.call(True), accumulate, RNE, RNG, 5)
    same(got, transposed(x, w, case, size, accumulate))


@pytest.mark.parametrize("accumulate", STEPS)
@settings(max_examples=12)
@given(case=cases())
def test_input_gradients_are_transposed_convolutions(accumulate: str, case: Case) -> None:
    into, out = case.groups * case.narrow, case.groups * case.wide
    reached = [
        (n + 2 * p - r - 1) // s + 1
        for n, p, r, s in zip(case.size, case.padding, case.reach, case.stride, strict=True)
    ]
    assume(min(reached) > 0)
    grad, w = case.tensor(case.images, out, *reached), case.tensor(out, case.narrow, *case.taps)
    with threads(case.threads):
        size = [case.images, into, *case.size]
        got = OPS.convolution_input_gradient(grad, w, size, *case.call(False), accumulate, RNE, RNG, 5)
    same(got, transposed(grad, w, case, case.size, accumulate))


def gradient(small: Tensor, image: Tensor, case: Case, accumulate: str) -> Tensor:
    """sum over k = (image, pixel) of small[n, o, i] * image[n, c, s * i + d * t - p]."""
    groups, dims, pixels = case.groups, range(case.dims), small.shape[2:]
    out, into = small.shape[1] // groups, image.shape[1] // groups
    left = small.numpy().swapaxes(0, 1).reshape(groups, out, -1)
    right: Any = np.zeros((groups, left.shape[2], into * int(np.prod(case.taps))), np.float32)
    grouped: Any = image.numpy().reshape(-1, groups, into, *image.shape[2:])
    places = list(product(range(small.shape[0]), *map(range, pixels)))
    columns = list(product(range(into), *map(range, case.taps)))
    for (k, (n, *i)), (column, (channel, *tap)) in product(enumerate(places), enumerate(columns)):
        y = [case.stride[d] * i[d] + case.dilation[d] * tap[d] - case.padding[d] for d in dims]
        if all(0 <= y[d] < image.shape[d + 2] for d in dims):
            right[:, k, column] = grouped[(n, slice(None), channel, *y)]
    product_ = OPS.matmul(torch.from_numpy(left.copy()), torch.from_numpy(right), accumulate, RNE, RNG, 5)
    result: Tensor = product_.reshape(groups * out, into, *case.taps)
    return result


@pytest.mark.part(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("accumulate", STEPS)
@settings(max_examples=8)
@given(case=cases())
def test_weight_gradients_are_their_definition(accumulate: str, turned: bool, case: Case) -> None:
    """turned: of a transposed convolution, in which input and gradient are exchanged."""
    into, out = case.groups * case.narrow, case.groups * case.wide
    reached = [
        (n + 2 * p - r - 1) // s + 1
        for n, p, r, s in zip(case.size, case.padding, case.reach, case.stride, strict=True)
    ]
    assume(min(reached) > 0)
    small, image = case.tensor(case.images, out, *reached), case.tensor(case.images, into, *case.size)
    # What a stride leaves over at the end of the image is a transposed convolution's output_padding.
    case.extra = [
        n - ((m - 1) * s - 2 * p + r + 1)
        for n, m, s, p, r in zip(case.size, reached, case.stride, case.padding, case.reach, strict=True)
    ]
    operands = (image, small) if turned else (small, image)
    size = [out, case.narrow, *case.taps]
    with threads(case.threads):
        got = OPS.convolution_weight_gradient(*operands, size, *case.call(turned), accumulate, RNE, RNG, 5)
    same(got, gradient(small, image, case, accumulate))


@pytest.mark.parametrize("dims", [2, 3])
def test_one_number_stands_for_all_dimensions(dims: int) -> None:
    """PyTorch passes the padding of ``padding="valid"``, and what a caller gives as one number, as a list of one."""
    convolution = (F.conv2d, F.conv3d)[dims - 2]
    x, w = values((2, 3, *[6] * dims), 1), values((4, 3, *[2] * dims), 2)

    def gradients(*arguments: Any) -> list[Tensor]:
        operands = [t.clone().requires_grad_() for t in (x, w)]
        compiled = fxround.compile(lambda x, w: convolution(x, w, None, *arguments), "reproducible")
        result = compiled(*operands)
        result.square().sum().backward()
        return [result.detach(), *(t.grad for t in operands if t.grad is not None)]

    for one, each in (((1, "valid"), (1, 0)), (((2,), (1,), (1,)), (2, 1, 1))):
        for found, expected in zip(gradients(*one), gradients(*each), strict=True):
            same(found, expected)
