"""fxround.round: types, shapes, strides, bad input, gradients, threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fxround
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float
from fxround.training import compile_optimizer


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
        (torch.zeros(3, device="meta"), "bfloat16", ValueError, "kernels run on cpu and cuda"),
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
        (torch.zeros(3), "binary64", ValueError, "values of binary64 that a binary32 tensor cannot store"),
        (torch.zeros(3), "ieee(9,8)", ValueError, r"values of ieee\(9,8\) that a binary32 tensor cannot store"),
        (torch.zeros(3), "stochastic", ValueError, "no format is named"),
        (torch.zeros(3), "bfloat16/stochastic:33", ValueError, "stochastic:1 to stochastic:32"),
        (torch.zeros(3), torch.int8, ValueError, "is a dtype of integers or truth values"),
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
    # stock: integers below 2^53, exact in any order
    assert (
        got.double().sum().item() == want.double().sum().item() * (n // 4096) + want[: n % 4096].double().sum().item()
    )


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")
def test_the_callers_floating_point_state_changes_nothing() -> None:
    """Flushing subnormal numbers is state of a thread: if it affected kernels, threads would give different results."""
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


def test_views_with_the_negative_bit_keep_their_sign() -> None:
    """The imaginary part of a conjugate is a view whose values are the negatives of the stored ones."""
    view = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert view.is_neg() and fxround.round(view, "bfloat16").tolist() == [-2.0, 4.0]
    assert fxround.hash(view) == fxround.hash(torch.tensor([-2.0, 4.0])) != fxround.hash(view.neg())
    conjugate = torch.tensor([1 + 2j]).conj()
    assert fxround.hash(conjugate) == fxround.hash(conjugate.resolve_conj()) != fxround.hash(conjugate.conj())
    out = torch.zeros(2, dtype=torch.complex64).conj().imag
    fxround.round(torch.tensor([-2.0, 4.0]), "bfloat16", out=out)
    assert out.is_neg() and out.tolist() == [-2.0, 4.0]


def test_compiled_modules_resolve_the_negative_bit_of_all_that_enters() -> None:
    """Arguments, parameters, buffers, incoming and optimizer's gradients; no product has a rounding error."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]).conj().imag)
            self.register_buffer("b", torch.tensor([5 + 6j, 7 - 8j]).conj().imag)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w + self.b

    model = Scaled()
    compiled = fxround.compile(model, "reproducible")
    assert model.w.is_neg() and model.b.is_neg()
    found = []
    for module in (model, compiled, compiled.eval()):
        for _ in range(2):
            x = torch.tensor([1 + 8j, 1 - 4j]).conj().imag.detach().requires_grad_()
            y = module(x)
            found.append((y.detach(), *torch.autograd.grad(torch.complex(y, y).conj().imag.sum(), (x, model.w))))
    assert all(torch.equal(*pair) for other in found for pair in zip(found[0], other, strict=True))
    assert dict(compiled.observe(x))["output"].tolist() == found[0][0].tolist()

    model.w.grad = torch.tensor([1 + 2j, 1 - 4j]).conj().imag
    want = (model.w.detach() - model.w.grad).clone()
    compile_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), "reproducible").step()
    assert torch.equal(model.w, want)


def overlapping() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of x and out that share memory, by the fault."""
    a, b, c = torch.arange(12.0), torch.arange(9.0).reshape(3, 3), torch.zeros(1)
    return {
        "shifted": (a[:-1], a[1:]),
        "turned": (b, b.t()),
        "repeated": (torch.arange(5.0), c.expand(5)),
        "overlapping itself": (b.clone(), torch.zeros(10).as_strided((3, 3), (1, 2))),
    }


@pytest.mark.parametrize("kind", overlapping())
def test_an_out_on_shared_memory_is_refused(kind: str) -> None:
    x, out = overlapping()[kind]
    with pytest.raises(ValueError, match="share"):
        fxround.round(x, "bfloat16", out=out)


def test_an_array_that_overlaps_itself_is_refused() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(10, np.float32), (3, 3), (4, 8))
    with pytest.raises(ValueError, match="share"):
        fxround.round(np.zeros((3, 3), np.float32), "bfloat16", out=out)


def test_an_out_between_the_elements_of_x_is_written() -> None:
    a = torch.arange(12.0) + 2.0**-9
    want = fxround.round(a[0:10:2].clone(), "bfloat16")
    fxround.round(a[0:10:2], "bfloat16", out=a[2:12:2])
    assert torch.equal(a[2:12:2], want)


def test_what_out_overwrites_is_noticed_by_autograd() -> None:
    p = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (p * saved).sum()
    fxround.round(torch.zeros(3), "bfloat16", out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="requires no gradient"):
        fxround.round(torch.zeros(3), "bfloat16", out=p)
    with torch.inference_mode():
        inference = torch.zeros(3)
        assert fxround.round(torch.ones(3), "bfloat16", out=inference) is inference
    with pytest.raises(ValueError, match="inference"):
        fxround.round(torch.zeros(3), "bfloat16", out=inference)


def test_a_tensor_without_memory_is_refused() -> None:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    for empty in (x, torch._efficientzerotensor((3,))):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"no memory|without memory"):
            fxround.round(empty, "bfloat16")


def test_a_dtype_is_the_rounding_to_its_format() -> None:
    x = torch.linspace(-500, 500, 1001)
    for rounding, name in ((torch.float8_e4m3fn, "e4m3fn"), (torch.half, "binary16"), (FORMATS["e5m2"], "e5m2")):
        assert torch.equal(fxround.round(x, rounding).view(torch.int32), fxround.round(x, name).view(torch.int32))
    assert torch.equal(fxround.round(x, torch.float16), x.to(torch.float16).float())


def test_a_dim_is_for_scaled_formats() -> None:
    x = torch.linspace(-3, 3, 80).reshape(2, 40)
    for dim in (0, -1, (0, 1)):
        with pytest.raises(ValueError, match=r"dim is .*: bfloat16/nearest_even.* is not scaled; leave dim away"):
            fxround.round(x, "bfloat16", dim=dim)
    with pytest.raises(ValueError, match="is not scaled"):
        fxround.round(x.numpy(), "e4m3fn", dim=0)
    with pytest.raises(ValueError, match="at least one dimension"):
        fxround.round(x, "mxfp8", dim=())
    with pytest.raises(Exception, match="is not scaled"):
        torch.compile(lambda v: fxround.round(v, "bfloat16", dim=0), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("text, how", [("bfloat16", "mxfp4"), ("mxfp4", "e5m2"), ("mxfp4", "mxfp8")])
def test_a_dim_is_that_of_the_gradient_s_blocks(text: str, how: str) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(33, 5), torch.randn(33, 5)
    leaf = x.clone().requires_grad_()
    plain = fxround.round(leaf, text, gradient=how, dim=0)
    plain.backward(g)
    wanted = fxround.round(g, how, dim=0) if how.startswith("mx") else fxround.round(g, how)
    assert leaf.grad is not None and torch.equal(leaf.grad, wanted)
    other = x.clone().requires_grad_()
    call = torch.compile(lambda v: fxround.round(v, text, gradient=how, dim=0), backend="aot_eager", fullgraph=True)
    traced = call(other)
    traced.backward(g)
    assert torch.equal(traced, plain) and other.grad is not None and torch.equal(other.grad, wanted)
