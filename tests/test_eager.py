"""fxround.round: types, shapes, strides, bad input, gradients, threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fxround
from fxround.numerics.exact import round_float
from fxround.numerics.modes import Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_rounded_from_its_own_bits(dtype: torch.dtype) -> None:
    rounding = Rounding.parse("e4m3fn/toward_positive")
    x = torch.tensor([0.0, -0.0, 0.3, -0.3, 1 + 2.0**-7, 447.0, 449.0, -449.0, math.inf, -math.inf, math.nan]).to(dtype)
    got = fxround.round(x, rounding)
    want = torch.tensor([round_float(float(v), rounding) for v in x], dtype=torch.float64).to(dtype)
    assert got.dtype == dtype and got.shape == x.shape
    assert torch.equal(got.nan_to_num(1234.0), want.nan_to_num(1234.0))
    assert torch.equal(got.signbit(), want.signbit())


def test_float64_is_not_rounded_twice() -> None:
    just_above_the_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert fxround.round(just_above_the_tie, "bfloat16").item() == 1 + 2.0**-7
    assert fxround.round(just_above_the_tie.float(), "bfloat16").item() == 1.0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7, 11), (129,)])
def test_numpy_and_torch_agree_in_any_shape(shape: tuple[int, ...]) -> None:
    x = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    text = "binary16/stochastic"
    array, tensor = fxround.round(x, text, seed=5), fxround.round(torch.from_numpy(x), text, seed=5)
    assert isinstance(array, np.ndarray) and array.shape == shape and array.dtype == np.float32
    np.testing.assert_array_equal(array, tensor.numpy())


def test_strides_do_not_matter() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    want = fxround.round(x, "e5m2/stochastic", seed=1)
    wide = torch.zeros(6, 20)
    wide[:, ::2] = x
    assert torch.equal(fxround.round(wide[:, ::2], "e5m2/stochastic", seed=1), want)
    assert torch.equal(fxround.round(x.t().contiguous().t(), "e5m2/stochastic", seed=1), want)
    reversed_ = x.numpy()[::-1, ::-1][::-1, ::-1]
    np.testing.assert_array_equal(fxround.round(reversed_, "e5m2/stochastic", seed=1), want.numpy())
    fixed = x.numpy().copy()
    fixed.flags.writeable = False
    np.testing.assert_array_equal(fxround.round(fixed, "e5m2/stochastic", seed=1), want.numpy())


def test_seed_and_sample_choose_the_bits() -> None:
    x = torch.full((1000,), 1 + 2.0**-9)
    first = fxround.round(x, "bfloat16/stochastic", seed=1, sample=2)
    assert torch.equal(first, fxround.round(x, "bfloat16/stochastic", seed=1, sample=2))
    assert not torch.equal(first, fxround.round(x, "bfloat16/stochastic", seed=1, sample=3))
    assert not torch.equal(first, fxround.round(x, "bfloat16/stochastic", seed=2, sample=2))
    assert not torch.equal(first, fxround.round(x, "bfloat16/stochastic", seed=1 + 2**40, sample=2))


def test_out_is_written_and_returned() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    want = fxround.round(x, "e4m3fn")
    plain, strided = torch.empty(4, 6), torch.empty(6, 4).t()
    assert fxround.round(x, "e4m3fn", out=plain) is plain and torch.equal(plain, want)
    assert fxround.round(x, "e4m3fn", out=strided) is strided and torch.equal(strided, want)
    itself = x.clone()
    assert torch.equal(fxround.round(itself, "e4m3fn", out=itself), want)
    array = np.empty((4, 6), np.float32)
    assert fxround.round(x.numpy(), "e4m3fn", out=array) is array
    np.testing.assert_array_equal(array, want.numpy())


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (fxround.round(x, "e2m1fn/stochastic") * torch.arange(20.0)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.arange(20.0))


@pytest.mark.parametrize(
    "x, rounding, error, message",
    [
        (torch.zeros(3, dtype=torch.int32), "bfloat16", TypeError, r"got dtype torch\.int32; expected one of float32"),
        (torch.zeros(3, dtype=torch.complex64), "bfloat16", TypeError, "complex64"),
        (torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "bfloat16", TypeError, "expected a dense one"),
        (torch.zeros(3).to_sparse(), "bfloat16", TypeError, "to_dense"),
        (torch.zeros(3, device="meta"), "bfloat16", ValueError, "kernels run on the CPU"),
        (np.zeros(3, np.int64), "bfloat16", TypeError, "dtype int64"),
        ([1.0], "bfloat16", TypeError, "x is a list; expected a torch tensor or a NumPy array"),
        (torch.zeros(3), "bfloat61", ValueError, r"did you mean bfloat16"),
        (torch.zeros(3), "bfloat16/nearest_evne", ValueError, r"did you mean nearest_even"),
        (
            torch.zeros(3),
            "e4m3fn/nearest_even/inf",
            ValueError,
            r"e4m3fn cannot overflow to 'inf'; it can: saturate, nan",
        ),
        (torch.zeros(3), "binary64", ValueError, "precision 53, more than the 24 bits"),
        (torch.zeros(3), "ieee(9,8)", ValueError, "range"),
        (torch.zeros(3), "stochastic", ValueError, "no format is named"),
        (torch.zeros(3), "bfloat16/stochastic:33", ValueError, "stochastic:1 to stochastic:32"),
        (torch.zeros(3), 7, TypeError, "a rounding is a text"),
    ],
)
def test_bad_input_is_refused_with_help(x: Any, rounding: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fxround.round(x, rounding)


def test_a_bad_out_is_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"expected Tensor torch\.float32 \(3,\)"):
        fxround.round(x, "e4m3fn", out=torch.zeros(4))
    with pytest.raises(ValueError, match="out="):
        fxround.round(torch.zeros(3, requires_grad=True), "e4m3fn", out=torch.zeros(3))


def test_a_large_tensor_is_rounded_whole() -> None:
    """1e8 elements: offsets beyond 2^27 elements, two threads, the last block short."""
    n = 10**8 + 3
    x = torch.arange(n, dtype=torch.int32).remainder_(4096).float()
    got = fxround.round(x, "bfloat16", out=x)
    want = torch.arange(4096).float().bfloat16().float()
    assert torch.equal(got[:4096], want)
    assert torch.equal(got[n - 7 :], want[torch.arange(n - 7, n) % 4096])
    assert (
        got.double().sum().item() == want.double().sum().item() * (n // 4096) + want[: n % 4096].double().sum().item()
    )


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")
def test_the_callers_floating_point_state_changes_nothing() -> None:
    """Flushing subnormals is a thread's state: were it to reach a kernel, threads would disagree."""
    x = torch.tensor([2.0**-140, 3 * 2.0**-149, 1.0]).repeat(50)
    program = "t0 = mul(x0, x1) @ binary32/nearest_even/inf"
    rng = torch.zeros(2, dtype=torch.int64)
    want = torch.ops.fxround.pointwise([x, torch.ones(150)], program, torch.float32, rng, 0)
    try:
        torch.set_flush_denormal(True)
        got = torch.ops.fxround.pointwise([x, torch.ones(150)], program, torch.float32, rng, 0)
        flushed = (x * torch.ones(150))[0].view(torch.int32).item()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0, "the state was set, and reached torch's own kernel"
    assert torch.equal(got.view(torch.int32), want.view(torch.int32)) and want[0].item() == 2.0**-140
