"""Pools, interpolations and folds of float64 and float32 operands of every exponent, and their derivatives.

The references are those of ``window_rationals``; seed and length of a run are those of test_whole_range.
"""

from __future__ import annotations

import pytest
import torch
import window_rationals as again
from formula_cases import Case, compare
from torch.nn import functional as F
from whole_range import ROUNDS
from window_rationals import Antialias, Blocks, Pool

aten = torch.ops.aten


def _pool(dims: int, pool: Pool) -> Case:
    sizes, torch_name = {1: (2, 5), 2: (1, 2, 5, 4), 3: (1, 4, 3, 3)}[dims], f"avg_pool{dims}d"
    divisor = {} if dims == 1 else {"divisor_override": pool.divisor}
    return Case(
        [sizes],
        lambda x: getattr(F, torch_name)(x, pool.kernel, pool.stride, pool.pad, pool.ceil, pool.include_pad, **divisor),
        lambda o, x: again.avg_pool(o, x, pool),
    )


def _adaptive(kind: str, size: tuple[int, ...], outs: tuple[int, ...]) -> Case:
    want = again.adaptive_avg_pool if kind == "avg" else again.adaptive_max_pool
    run = getattr(F, f"adaptive_{kind}_pool{len(outs)}d")
    return Case([size], lambda x: run(x, list(outs)), lambda o, x: want(o, x, outs))


def _interpolation(mode: str, size: tuple[int, ...], outs: tuple[int, ...], align: bool | None) -> Case:
    return Case(
        [size],
        lambda x: F.interpolate(x, size=outs, mode=mode, align_corners=align),
        lambda o, x: again.nearest(x, outs) if align is None else again.interpolated(o, x, outs, None, align),
    )


def _bicubic(size: tuple[int, ...], outs: tuple[int, ...], align: bool) -> Case:
    return Case(
        [size],
        lambda x: F.interpolate(x, size=outs, mode="bicubic", align_corners=align),
        lambda o, x: again.bicubic(o, x, outs, align),
    )


def _antialias(size: tuple[int, ...], how: Antialias) -> Case:
    run = getattr(aten, f"_upsample_{how.mode}2d_aa")
    return Case([size], lambda x: run(x, how.outs, how.align, *how.scales), lambda o, x: again.antialiased(o, x, how))


WINDOWS = {
    "avg_pool1d": _pool(1, Pool((3,), (2,), (1,))),
    "avg_pool1d ceil": _pool(1, Pool((2,), (2,), (0,), ceil=True)),
    "avg_pool2d": _pool(2, Pool((3, 2), (2, 2), (1, 1), ceil=True, include_pad=False)),
    "avg_pool2d ceil": _pool(2, Pool((3, 2), (2, 3), (1, 1), ceil=True)),
    "avg_pool2d divisor": _pool(2, Pool((5, 4), (1, 1), (0, 0), divisor=7)),
    "avg_pool3d": _pool(3, Pool((2, 3, 2), (1, 1, 2), (1, 0, 1))),
    "adaptive_avg_pool1d": _adaptive("avg", (1, 2, 5), (3,)),
    "adaptive_avg_pool1d even": _adaptive("avg", (1, 1, 6), (3,)),
    "adaptive_avg_pool1d all": _adaptive("avg", (1, 1, 19), (1,)),
    "adaptive_avg_pool2d": _adaptive("avg", (1, 2, 5, 4), (3, 3)),
    "adaptive_avg_pool2d long": _adaptive("avg", (1, 1, 9, 10), (2, 3)),
    "adaptive_avg_pool3d": _adaptive("avg", (1, 1, 5, 4, 3), (2, 2, 2)),
    "adaptive_max_pool1d": _adaptive("max", (1, 2, 5), (3,)),
    "adaptive_max_pool2d": _adaptive("max", (1, 1, 5, 4), (3, 3)),
    "max_pool2d": Case(
        [(1, 1, 5, 4)],
        lambda x: F.max_pool2d(x, (3, 2), 2, 1, ceil_mode=True),
        lambda o, x: again.max_pool(o, x, Pool((3, 2), (2, 2), (1, 1), ceil=True)),
    ),
    "max_pool3d": Case(
        [(1, 1, 3, 4, 3)],
        lambda x: F.max_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 0, 1), ceil_mode=True),
        lambda o, x: again.max_pool(o, x, Pool((2, 3, 2), (1, 2, 2), (1, 0, 1), ceil=True)),
    ),
    "adaptive_max_pool3d": _adaptive("max", (1, 1, 3, 4, 3), (2, 3, 2)),
    "area": Case(
        [(1, 1, 5, 4)],
        lambda x: F.interpolate(x, size=(3, 3), mode="area"),
        lambda o, x: again.adaptive_avg_pool(o, x, (3, 3)),
    ),
    "area up": Case(
        [(1, 2, 3)],
        lambda x: F.interpolate(x, size=4, mode="area"),
        lambda o, x: again.adaptive_avg_pool(o, x, (4,)),
    ),
    "nearest": _interpolation("nearest", (1, 2, 5), (3,), None),
    "nearest2d": _interpolation("nearest", (1, 1, 7, 3), (5, 11), None),
    "nearest3d": _interpolation("nearest", (1, 1, 2, 3, 5), (3, 2, 7), None),
    "nearest-exact": Case(
        [(1, 1, 5, 6)],
        lambda x: F.interpolate(x, size=(3, 13), mode="nearest-exact"),
        lambda o, x: again.nearest(x, (3, 13), exact=True),
    ),
    "bicubic": _bicubic((1, 1, 3, 4), (2, 5), False),
    "bicubic aligned": _bicubic((1, 1, 2, 3), (3, 2), True),
    **{
        f"{how.mode} antialias {size} {how.align}": _antialias((1, 1, *size), how)
        for size, how in (
            ((5, 7), Antialias("bilinear", (3, 3))),
            ((5, 3), Antialias("bilinear", (2, 5), align=True)),
            ((7, 5), Antialias("bicubic", (2, 3))),
            ((4, 3), Antialias("bicubic", (2, 3), scales=(0.6, 1.3))),
        )
    },
    "fold": Case(
        [(1, 12, 9)],
        lambda x: F.fold(x, (4, 5), (2, 3), padding=(1, 0), stride=(2, 1), dilation=1),
        lambda o, x: again.fold(o, x, Blocks((4, 5), (2, 3), (2, 1), (1, 0), (1, 1))),
    ),
    "unfold": Case(
        [(1, 2, 4, 3)],
        lambda x: F.unfold(x, (2, 2), padding=1, dilation=(2, 1)),
        lambda o, x: again.unfold(x, Blocks((4, 3), (2, 2), (1, 1), (1, 1), (2, 1))),
    ),
    "linear": _interpolation("linear", (1, 2, 3), (5,), False),
    "linear aligned": _interpolation("linear", (1, 2, 3), (5,), True),
    "linear scale": Case(
        [(1, 2, 3)],
        lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"),
        lambda o, x: again.interpolated(o, x, (5,), 1.7),
    ),
    "bilinear": _interpolation("bilinear", (1, 1, 3, 5), (4, 3), False),
    "bilinear aligned": _interpolation("bilinear", (1, 1, 3, 2), (4, 3), True),
    "trilinear": _interpolation("trilinear", (1, 1, 2, 3, 2), (3, 2, 3), False),
    "trilinear aligned": _interpolation("trilinear", (1, 1, 2, 2, 3), (2, 3, 2), True),
}


def _avg_backward(sizes: tuple[int, ...], outs: tuple[int, ...], pool: Pool) -> Case:
    run = aten.avg_pool2d_backward if len(sizes) == 2 else aten.avg_pool3d_backward
    rest = (pool.kernel, pool.stride, pool.pad, pool.ceil, pool.include_pad, pool.divisor)
    return Case(
        [(1, 2, *outs), (1, 2, *sizes)],
        lambda g, x: run(g, x, *rest),
        lambda o, g, x: again.avg_pool_backward(o, g, sizes, pool),
    )


def _adaptive_backward(sizes: tuple[int, ...], outs: tuple[int, ...]) -> Case:
    run = aten._adaptive_avg_pool2d_backward if len(sizes) == 2 else aten._adaptive_avg_pool3d_backward
    return Case([(1, 2, *outs), (1, 2, *sizes)], run, lambda o, g, x: again.adaptive_avg_pool_backward(o, g, sizes))


# The numbers of the largest elements, as a pooling of windows that overlap may find them: some twice.
MAXIMA = torch.tensor([[[[0, 2, 2], [6, 6, 11]], [[5, 5, 5], [9, 6, 11]]]])
DEEP = torch.tensor([[[[[3], [3]], [[8], [11]]]]])
APART = torch.tensor([[[[0, 3], [9, 10]]]])


def _antialias_backward(size: tuple[int, ...], how: Antialias) -> Case:
    run = getattr(aten, f"_upsample_{how.mode}2d_aa_backward")
    return Case(
        [(1, 1, *how.outs)],
        lambda g: run(g, how.outs, (1, 1, *size), how.align, *how.scales),
        lambda o, g: again.antialiased_backward(o, g, size, how),
    )


BACKWARD = {
    **{
        f"{how.mode} antialias {size} {how.align}": _antialias_backward(size, how)
        for size, how in (
            ((5, 7), Antialias("bilinear", (3, 3))),
            ((5, 3), Antialias("bicubic", (2, 5), align=True)),
            ((4, 3), Antialias("bicubic", (2, 3), scales=(0.6, 1.3))),
        )
    },
    "max_pool3d": Case(
        [(1, 1, 2, 2, 1), (1, 1, 2, 3, 2)],
        lambda g, x: aten.max_pool3d_with_indices_backward(
            g, x, [1, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1], False, DEEP
        ),
        lambda o, g, x: again.at_maxima(o, g, (2, 3, 2), DEEP.numpy(), False),
    ),
    "adaptive_max_pool3d": Case(
        [(1, 1, 2, 2, 1), (1, 1, 2, 3, 2)],
        lambda g, x: aten.adaptive_max_pool3d_backward(g, x, DEEP),
        lambda o, g, x: again.at_maxima(o, g, (2, 3, 2), DEEP.numpy(), False),
    ),
    "avg_pool2d": _avg_backward((5, 4), (3, 3), Pool((3, 2), (2, 2), (1, 1), include_pad=False)),
    "avg_pool2d ceil": _avg_backward((4, 4), (2, 2), Pool((3, 3), (2, 2), (0, 0), ceil=True)),
    "avg_pool2d apart": _avg_backward((4, 6), (2, 2), Pool((2, 3), (2, 3), (0, 0), divisor=7)),
    "avg_pool3d": _avg_backward((3, 3, 2), (2, 3, 2), Pool((2, 3, 1), (1, 1, 1), (0, 1, 0))),
    "adaptive_avg_pool2d": _adaptive_backward((5, 4), (3, 3)),
    "adaptive_avg_pool3d": _adaptive_backward((5, 2, 3), (2, 2, 2)),
    "max_pool2d": Case(
        [(1, 2, 2, 3), (1, 2, 3, 4)],
        lambda g, x: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [1, 1], [0, 0], [1, 1], False, MAXIMA),
        lambda o, g, x: again.at_maxima(o, g, (3, 4), MAXIMA.numpy(), False),
    ),
    "max_pool2d apart": Case(
        [(1, 1, 2, 2), (1, 1, 4, 4)],
        lambda g, x: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, APART),
        lambda o, g, x: again.at_maxima(o, g, (4, 4), APART.numpy(), True),
    ),
    "adaptive_max_pool2d": Case(
        [(1, 2, 2, 3), (1, 2, 3, 4)],
        lambda g, x: aten.adaptive_max_pool2d_backward(g, x, MAXIMA),
        lambda o, g, x: again.at_maxima(o, g, (3, 4), MAXIMA.numpy(), False),
    ),
    "replication_pad1d": Case(
        # A batch of 2: with batches of 1 alone, a capture traces twice.
        [(2, 1, 7), (2, 1, 3)],
        lambda g, x: aten.replication_pad1d_backward(g, x, [3, 1]),
        lambda o, g, x: again.replication_pad_backward(o, g, (3,), (3,)),
    ),
    "replication_pad2d": Case(
        [(1, 1, 4, 6), (1, 1, 2, 3)],
        lambda g, x: aten.replication_pad2d_backward(g, x, [1, 2, 2, 0]),
        lambda o, g, x: again.replication_pad_backward(o, g, (2, 3), (2, 1)),
    ),
}


def _derivative(mode: str, size: tuple[int, ...], outs: tuple[int, ...], align: bool | None) -> Case:
    own = size[2:]
    want = {
        None: lambda o, g, x: again.nearest_backward(o, g, own, mode == "nearest-exact"),
        "bicubic": lambda o, g, x: again.bicubic_backward(o, g, own, outs, bool(align)),
        "area": lambda o, g, x: again.adaptive_avg_pool_backward(o, g, own),
        "linear": lambda o, g, x: again.interpolated_backward(o, g, own, outs, None, bool(align)),
    }
    kind = mode if mode in ("bicubic", "area") else None if align is None else "linear"
    return Case(
        [(*size[:2], *outs), size],
        lambda x: F.interpolate(x, size=outs, mode=mode, align_corners=align),
        want[kind],
    )


BLOCKS = Blocks((4, 3), (2, 2), (1, 1), (1, 1), (2, 1))
GRADIENTS = {
    # A batch of 2: with batches of 1 alone, a capture traces twice.
    "linear": _derivative("linear", (2, 1, 3), (5,), False),
    "linear aligned": _derivative("linear", (1, 1, 5), (3,), True),
    "bilinear": _derivative("bilinear", (1, 1, 3, 2), (2, 5), False),
    "trilinear": _derivative("trilinear", (1, 1, 2, 3, 2), (3, 2, 2), False),
    "bicubic": _derivative("bicubic", (1, 1, 3, 2), (2, 3), False),
    "nearest2d": _derivative("nearest", (1, 1, 3, 2), (5, 3), None),
    "nearest3d": _derivative("nearest", (1, 1, 2, 1, 3), (3, 2, 4), None),
    "nearest-exact": _derivative("nearest-exact", (1, 1, 4, 3), (5, 2), None),
    "area": _derivative("area", (1, 1, 5, 4), (3, 3), None),
    "unfold": Case(
        [(1, 8, 16), (1, 2, 4, 3)],
        lambda x: F.unfold(x, (2, 2), padding=1, dilation=(2, 1)),
        lambda o, g, x: again.fold(o, g, BLOCKS),
    ),
    "fold": Case(
        [(1, 2, 4, 3), (1, 8, 16)],
        lambda x: F.fold(x, (4, 3), (2, 2), padding=1, dilation=(2, 1)),
        lambda o, g, x: again.unfold(g, BLOCKS),
    ),
}


@pytest.mark.part("forward-dtype1", "backward-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cases", [WINDOWS, BACKWARD], ids=["forward", "backward"])
def test_windows_round_every_operation(cases: dict[str, Case], dtype: torch.dtype) -> None:
    compare(cases, dtype, 2 * ROUNDS)


@pytest.mark.part("dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_derivatives_of_interpolations_and_folds_round_every_operation(dtype: torch.dtype) -> None:
    compare(GRADIENTS, dtype, 2 * ROUNDS, gradients=True)
