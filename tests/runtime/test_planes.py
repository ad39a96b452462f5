"""Convolutions over planes equal the same convolutions over packed panels, encoding for encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_operands import KINDS, RNE, same, threads, values
from torch import Tensor

from fxround.kernels import from_text
from fxround.kernels.kinds import Contract
from fxround.runtime.cpu import convolution as module
from fxround.runtime.cpu import planes
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets

convolution = torch.ops.fxround.convolution.default
input_gradient = torch.ops.fxround.convolution_input_gradient.default

FEW = (RNE, "binary32/stochastic", "binary32/toward_zero", "bfloat16")
# One of each kind of step: the hardware's, quick ones, those that draw, short formats, products and chunks apart.
KINDS_OF_STEP = (
    *FEW,
    "binary32/up_down",
    "binary32/to_odd",
    "binary16/stochastic",
    "e5m2/up_down/saturate",
    "bfloat16 chunk=7 combine=binary32",
    "binary32/stochastic product=bfloat16 chunk=4 combine=binary32/stochastic",
)
RNG = torch.tensor([5, 2])
CALL = ("binary32/nearest_even/inf", RNG, 9)


@contextmanager
def always_planes(plane_bytes: int = 1 << 19) -> Iterator[list[planes.Planes | None]]:
    """Use planes for every convolution that they support; yields the plans that were made."""
    made: list[planes.Planes | None] = []

    def planned(kernel: Contract, shape: planes.Shape) -> planes.Planes | None:
        plan = planes._planned.__wrapped__
        made.append(plan(kernel, planes.current_set(), torch.get_num_threads(), shape))
        return made[-1]

    with (
        mock.patch.multiple(planes, _GAPS=1 << 20, _FEW=1 << 20, _PLANES_BYTES=plane_bytes),
        mock.patch.object(module, "planned", planned),
    ):
        yield made


def never_planes() -> Any:
    return mock.patch.object(module, "planned", return_value=None)


def check(x: Tensor, w: Tensor, geometry: Sequence[Any], accumulate: str, plane_bytes: int = 1 << 19) -> None:
    with never_planes():
        want = convolution(x, w, *geometry, accumulate, *CALL)
    with always_planes(plane_bytes) as made:
        got = convolution(x, w, *geometry, accumulate, *CALL)
    assert want.numel() == 0 or made[0] is not None, "the planes' kernel was not asked"
    same(got, want)


STRIDES = {1: ((1,), (2,), (3,)), 2: ((1, 1), (2, 2), (1, 3), (3, 1)), 3: ((1, 1, 1), (2, 1, 2))}


@st.composite
def shapes(draw: st.DrawFn, dims: int, strides: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[Any]]:
    """Operands and geometry of a plain convolution of few channels a group."""
    taps = [draw(st.integers(1, 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    padding = [draw(st.integers(0, 2)) for _ in range(dims)]
    most = {1: 70, 2: 23, 3: 7}[dims]
    size = [
        draw(st.integers(max(1, d * (t - 1) + 1 - 2 * p), most))
        for t, d, p in zip(taps, dilation, padding, strict=True)
    ]
    groups, channels, outputs = draw(
        st.sampled_from([(1, 1, 1), (3, 1, 1), (4, 1, 2), (2, 2, 1), (2, 3, 5), (7, 1, 1)])
    )
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 99))
    x = values((draw(st.integers(1, 3)), groups * channels, *size), seed, kind)
    w = values((groups * outputs, channels, *taps), seed + 1, kind)
    if draw(st.booleans()):
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    return x, w, [list(draw(st.sampled_from(strides))), padding, dilation, False, [0] * dims, groups]


@pytest.mark.part(3)
@pytest.mark.parametrize("accumulate", KINDS_OF_STEP)
@settings(max_examples=6)
@given(data=st.data())
def test_planes_equal_panels_in_every_mode(accumulate: str, data: st.DataObject) -> None:
    x, w, geometry = data.draw(shapes(2, STRIDES[2][:1]))
    with threads(data.draw(st.integers(1, 3))):
        check(x, w, geometry, accumulate, data.draw(st.sampled_from([1 << 12, 1 << 19])))


@pytest.mark.parametrize("accumulate", FEW[:2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@settings(max_examples=15)
@given(data=st.data())
def test_planes_equal_panels_at_every_stride(accumulate: str, dims: int, data: st.DataObject) -> None:
    x, w, geometry = data.draw(shapes(dims, STRIDES[dims]))
    check(x, w, geometry, accumulate, data.draw(st.sampled_from([1 << 14, 1 << 19])))


@pytest.mark.part(3)
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("accumulate", FEW)
def test_planes_are_the_same_on_every_instruction_set(accumulate: str, isa: str) -> None:
    for size, kind in ((19, "normal"), (4, "special"), (7, "integers")):
        x, w = values((2, 6, size, size + 3), 1, kind), values((6, 1, 3, 3), 2, kind)
        geometry: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 6]
        with never_planes():
            want = convolution(x, w, *geometry, accumulate, *CALL)
        with instruction_set(isa), always_planes():
            same(convolution(x, w, *geometry, accumulate, *CALL), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_planes_take_every_storage(dtype: torch.dtype) -> None:
    store = {torch.bfloat16: "bfloat16", torch.float16: "binary16", torch.float64: "binary64"}[dtype]
    accumulate = "binary64" if dtype == torch.float64 else "binary32/stochastic"
    x, w = values((2, 4, 9, 21), 1).to(dtype), values((4, 1, 3, 3), 2).to(dtype)
    call = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4, accumulate, store, RNG, 9)
    with never_planes():
        want = convolution(x, w, *call)
    with always_planes():
        got = convolution(x, w, *call)
    assert got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("accumulate", FEW[:2])
@settings(max_examples=10)
@given(stride=st.integers(1, 3), padding=st.integers(0, 2), size=st.integers(5, 17), kind=st.sampled_from(KINDS))
def test_input_gradients_of_depthwise_convolutions(
    accumulate: str, stride: int, padding: int, size: int, kind: str
) -> None:
    reached = (size + 2 * padding - 3) // stride + 1
    grad, w = values((2, 5, reached, reached), 1, kind), values((5, 1, 3, 3), 2, kind)
    rest = ([2, 5, size, size], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 5, accumulate, *CALL)
    with never_planes():
        want = input_gradient(grad, w, *rest)
    with always_planes() as made:
        same(input_gradient(grad, w, *rest), want)
    assert made[0] is not None


def test_a_depthwise_convolution_is_done_over_planes_and_a_dense_one_is_not() -> None:
    def plan(channels: int, groups: int) -> planes.Planes | None:
        shape = planes.shape_of(
            (2, channels, 28, 28), (channels, channels // groups, 3, 3), [1, 1], [1, 1], [1, 1], groups
        )
        kernel = from_text.contract(RNE, RNE, ("f32", "f32"), "f32")
        return planes.planned(kernel, shape)

    assert plan(64, 64) is not None
    assert plan(64, 1) is None


def test_a_plane_that_is_too_large_is_cut_or_left_to_panels() -> None:
    kernel = from_text.contract(RNE, RNE, ("f32", "f32"), "f32")
    shape = planes.shape_of((1, 1, 3000, 3000), (1, 1, 3, 3), [1, 1], [1, 1], [1, 1], 1)
    plan = planes.planned(kernel, shape)
    assert plan is not None and plan.plan.items > 60
    assert planes.planned(kernel, planes.shape_of((1, 1, 1_000_000), (1, 1, 3), [1], [1], [1], 1)) is None
