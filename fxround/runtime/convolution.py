"""Convolution as a contraction: which input elements meet which weights, and in what order.

What is true here. For an output pixel, k runs over (input channel of the group, kernel position), row-major,
ascending; padding contributes products with +0. A transposed convolution is the plain one over an input
with stride - 1 zeros between its elements and the kernel turned around, its zeros contributing too.

Why it is safe. Shapes are checked here, so that no view below can reach outside the padded input.

    before   im2col by index arithmetic
    after    windows_of: two tables of offsets, no copy but the padding's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.runtime.execute import Right


def output_size(
    x: Tensor,
    w: Tensor,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: Any,
) -> list[Any]:
    """[batch, channels, *spatial] of the result; ValueError where operand and weight do not fit."""
    dims = x.dim() - 2
    if dims not in (1, 2, 3) or w.dim() != x.dim():
        raise ValueError(f"convolution takes 1 to 3 spatial dimensions, got {tuple(x.shape)} with {tuple(w.shape)}")
    lists = (stride, padding, dilation, *([output_padding] if transposed else []))
    if any(len(v) != dims for v in lists):
        raise ValueError(f"convolution in {dims} dimensions: stride, padding and dilation need {dims} values each")
    expected = w.shape[0] if transposed else w.shape[1] * groups
    if x.shape[1] != expected or w.shape[0] % groups:
        raise ValueError(
            f"convolution of {tuple(x.shape)} with weights {tuple(w.shape)}: channels differ for {groups=}"
        )
    channels = w.shape[1] * groups if transposed else w.shape[0]
    spatial = []
    for d in range(dims):
        reach = dilation[d] * (w.shape[d + 2] - 1)
        if transposed:
            spatial.append((x.shape[d + 2] - 1) * stride[d] - 2 * padding[d] + reach + output_padding[d] + 1)
        else:
            spatial.append((x.shape[d + 2] + 2 * padding[d] - reach - 1) // stride[d] + 1)
    if any(isinstance(s, int) and s < 0 for s in spatial):
        raise ValueError(f"convolution of {tuple(x.shape)} with weights {tuple(w.shape)}: the kernel exceeds the input")
    return [x.shape[0], channels, *spatial]


def transposed_as_plain(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Operand, weight, stride and padding of the plain convolution with the same result."""
    dims = x.dim() - 2
    spread = [(s - 1) * t + 1 if s else 0 for s, t in zip(x.shape[2:], stride, strict=True)]
    spaced = x.new_zeros(*x.shape[:2], *spread)
    every = [slice(None, None, t) for t in stride]
    spaced[(slice(None), slice(None), *every)] = x
    edges: list[int] = []
    for d in reversed(range(dims)):
        edge = dilation[d] * (w.shape[d + 2] - 1) - padding[d]
        edges += [edge, edge + output_padding[d]]
    turned = w.flip(list(range(2, w.dim()))).reshape(groups, w.shape[0] // groups, *w.shape[1:]).transpose(1, 2)
    plain = turned.reshape(groups * w.shape[1], w.shape[0] // groups, *w.shape[2:])
    return torch.nn.functional.pad(spaced, edges), plain, [1] * dims, [0] * dims


def windows_of(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Right:
    """The windows of the padded image as the second operand: k a tap of a group's channels, n an output pixel."""
    dims = x.dim() - 2
    edges = [p for d in reversed(range(dims)) for p in (padding[d], padding[d])]
    padded = torch.nn.functional.pad(x, edges).contiguous() if any(edges) else x.contiguous()
    steps = padded.stride()
    channels = x.shape[1] // groups
    taps = [torch.arange(channels) * steps[1]]
    taps += [torch.arange(w.shape[d + 2]) * (dilation[d] * steps[d + 2]) for d in range(dims)]
    pixels = [
        torch.arange((padded.shape[d + 2] - dilation[d] * (w.shape[d + 2] - 1) - 1) // stride[d] + 1)
        * (stride[d] * steps[d + 2])
        for d in range(dims)
    ]
    return Right(padded, x.shape[0] * groups, channels * steps[1], _sums(taps), _sums(pixels))


def _sums(offsets: list[Tensor]) -> Tensor:
    """Every sum of one offset from each list, row-major."""
    total = offsets[0]
    for more in offsets[1:]:
        total = (total[:, None] + more).reshape(-1)
    return total
