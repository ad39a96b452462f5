"""The torch operators: opcheck, layouts of fake and real results, purity, export, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxround  # noqa: F401  registers the operators
from fxround.graph.dialect import CALLS

SR = "binary32/stochastic/inf"
RNE = "binary32/nearest_even/inf"
OPS = torch.ops.fxround


def rng(seed: int = 3, sample: int = 0) -> torch.Tensor:
    return torch.tensor([seed, sample])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def leaves(results: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(results)


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def calls() -> dict[str, tuple[Any, ...]]:
    """Every operator with arguments that are not contiguous, so that layouts matter."""
    turned = normal(5, 4).t()
    image, kernel, gradient = normal(2, 6, 7, 4).transpose(1, 3), normal(6, 2, 3, 3), normal(2, 7, 6, 3).transpose(1, 2)
    windows = ([1, 2], [1, 1], [1, 1], False, [0, 0], 2)
    rows = torch.tensor([[3, 0, 0], [1, 1, 2]])
    part = OPS.state_of_part(rng(), [], 0, 1, 1, 8, 0)
    return {
        "pointwise": ([turned, normal(5)], f"t0 = add(x0, x1) @ {SR}", torch.float32, rng(), 1),
        "fused": ([turned, normal(5)], f"t0 = add(x0, x1) @ {SR}; return t0", "f32", rng(), [1]),
        "add_processes": (
            turned.double(),
            "one",
            1,
            torch.float32,
            "",
            f"{SR} shards=8",
            "bfloat16/stochastic/inf",
            3,
            part,
            6,
        ),
        "state_of_part": (rng(), [4, 5], 1, 1, 2, 8, 4),
        "matmul": (turned, turned.t(), SR, RNE, rng(), 2),
        "convolution": (image, kernel, *windows, SR, RNE, rng(), 3),
        "convolution_input_gradient": (gradient, kernel, [2, 4, 7, 6], *windows, SR, RNE, rng(), 3),
        "convolution_weight_gradient": (gradient, image, [6, 2, 3, 3], *windows, SR, RNE, rng(), 3),
        "sum": (normal(3, 4, 5).transpose(0, 2), [0, 2], False, "lanes:16", SR, RNE, rng(), 4),
        "prod": (turned, [1], True, SR, RNE, rng(), 5),
        "cumsum": (turned, 0, SR, RNE, rng(), 5),
        "cumprod": (turned, 0, SR, RNE, rng(), 5),
        "scatter_add": (turned, 1, rows, normal(4, 3).t()[:2, :3], SR, rng(), 5),
        "index_put": (turned, [None, rows], normal(4, 2, 3), SR, rng(), 5),
        "block_maximum": (turned, [0, 2]),
        "block_percentile": (turned, [0, 2], 50.0),
        "block_sum": (turned, [0, 2]),
        "hadamard": (normal(4, 3, 9), 2, 4, 1),
        "iterations": (torch.arange(5), rng(), 3),
        "packed_lengths": (torch.tensor([4, 2, 1]), turned),
        "block_expand": (normal(2, 1).t(), turned, [0, 3]),
    }


def test_every_operator_of_the_dialect_is_called_here() -> None:
    assert set(calls()) == {cls.name for cls in CALLS.values()}


@pytest.mark.part(5)
@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, calls()[name])


@pytest.mark.parametrize("name", calls())
def test_real_and_fake_results_are_row_major_and_pure(name: str) -> None:
    operator, args = getattr(OPS, name), calls()[name]
    real = leaves(operator(*args))
    assert all(x.is_contiguous() for x in real) and equal(real, leaves(operator(*args)))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        fake = leaves(operator(*faked))
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    other = [rng(4) if isinstance(a, torch.Tensor) and a.shape == (2,) else a for a in args]
    same = equal(real, leaves(operator(*other)))
    draws = any(isinstance(a, torch.Tensor) and a.shape == (2,) for a in args)
    assert same == (not draws), "another seed, another result"


@pytest.mark.parametrize("name", calls())
def test_operators_survive_export(name: str, tmp_path: Any) -> None:
    operator, args = getattr(OPS, name), calls()[name]

    class Holder(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return operator(x, *args[1:])

    program = torch.export.export(Holder(), (args[0],))
    torch.export.save(program, tmp_path / "op.pt2")
    loaded = torch.export.load(tmp_path / "op.pt2").module()
    assert equal(leaves(loaded(args[0])), leaves(operator(*args)))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_of_integers_is_torchs(dims: int, transposed: bool, groups: int) -> None:
    """Small integers: no sum has a rounding error, so that all orders and libraries agree."""
    sizes = [9, 8, 7][:dims]
    x = torch.randint(-4, 5, (3, 4, *sizes), generator=torch.Generator().manual_seed(dims)).float()
    shape = (4, 8 // groups) if transposed else (8, 4 // groups)
    w = torch.randint(-4, 5, (*shape, *[3, 2, 3][:dims]), generator=torch.Generator().manual_seed(9)).float()
    stride, padding, dilation = [2, 1, 3][:dims], [1, 2, 0][:dims], [1, 2, 1][:dims]
    extra = [1, 0, 2][:dims] if transposed else [0] * dims
    args = (x, w, stride, padding, dilation, transposed, extra, groups)
    want = torch.ops.aten.convolution(x, w, None, *args[2:6], args[6], args[7])  # stock: small integers
    assert torch.equal(OPS.convolution(*args, RNE, RNE, rng(), 0), want)


def test_convolution_visits_taps_in_order() -> None:
    """Rounded toward zero to 8 bits, 256 absorbs every later tap; the order is (channel, row, column)."""
    w = torch.zeros(1, 2, 2, 2)
    x = torch.ones(1, 2, 2, 2)
    for first in range(8):
        w.zero_().view(-1)[first:] = torch.tensor([2.0**8, *[1.0] * (7 - first)])
        got = OPS.convolution(x, w, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, "bfloat16/toward_zero", RNE, rng(), 0)
        assert got.item() == 2.0**8, "ones added to 256 are lost one by one; added to each other first they are not"


@pytest.mark.parametrize("dims", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [], [-1, 0]])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sum_of_integers_is_torchs(dims: list[int], keepdim: bool) -> None:
    x = torch.randint(-9, 10, (3, 70, 5), generator=torch.Generator().manual_seed(1)).float()
    want = x.sum(dims or [0, 1, 2], keepdim=keepdim)  # stock: small integers
    for order in ("sequential", "lanes:16"):
        assert torch.equal(OPS.sum(x, dims, keepdim, order, RNE, RNE, rng(), 0), want)
    assert torch.equal(OPS.cumsum(x, 1, RNE, RNE, rng(), 0), x.cumsum(1))  # stock: small integers


def test_empty_contractions_and_sums_are_zero() -> None:
    assert torch.equal(OPS.matmul(torch.ones(2, 0), torch.ones(0, 3), SR, RNE, rng(), 0), torch.zeros(2, 3))
    assert OPS.matmul(torch.ones(0, 4), torch.ones(4, 3), SR, RNE, rng(), 0).shape == (0, 3)
    assert torch.equal(OPS.sum(torch.ones(2, 0), [1], False, "lanes:16", SR, RNE, rng(), 0), torch.zeros(2))
    assert OPS.sum(torch.tensor(3.0), [], False, "lanes:16", SR, RNE, rng(), 0).item() == 3.0


@pytest.mark.parametrize(
    "name, change, error, message",
    [
        ("matmul", {1: torch.ones(3, 3)}, ValueError, "inner sizes or batches differ"),
        ("matmul", {1: torch.ones(5)}, ValueError, "two matrices"),
        ("matmul", {1: torch.ones(5, 4, dtype=torch.float64)}, TypeError, "one dtype"),
        ("matmul", {2: "binary33"}, ValueError, "no format is named"),
        ("convolution", {1: torch.ones(6, 3, 3, 3)}, ValueError, "channels differ"),
        ("convolution", {1: torch.ones(6, 2, 99, 3)}, ValueError, "the kernel exceeds the input"),
        ("sum", {1: [7]}, IndexError, "out of range"),
        ("sum", {1: [0, -3]}, ValueError, "twice"),
        ("sum", {3: "pairwise"}, ValueError, "known: sequential, lanes"),
        ("pointwise", {0: [torch.ones(3, dtype=torch.int64)]}, TypeError, "int64"),
        ("pointwise", {1: "t0 = frobnicate(x0) @ binary32"}, ValueError, "no pointwise operator is named 'frobnicate'"),
        ("pointwise", {1: "t0 = add(x0, x7) @ binary32"}, ValueError, "uses 8 operands, got 2"),
        ("pointwise", {1: "nonsense"}, ValueError, "is not a statement"),
        ("pointwise", {3: torch.zeros(3)}, ValueError, "expected int64"),
    ],
)
def test_bad_arguments_are_refused(name: str, change: dict[int, Any], error: type[Exception], message: str) -> None:
    args = [change.get(i, a) for i, a in enumerate(calls()[name])]
    with pytest.raises(error, match=message):
        getattr(OPS, name)(*args)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_gradients_of_integers_are_torchs(dims: int, transposed: bool, groups: int) -> None:
    """Small integers: no sum has a rounding error, so that autograd's gradients are the only correct ones."""
    generator = torch.Generator().manual_seed(dims)
    x = torch.randint(-3, 4, (3, 4, *[9, 8, 7][:dims]), generator=generator).float().requires_grad_()
    shape = (4, 6 // groups) if transposed else (6, 4 // groups)
    w = torch.randint(-3, 4, (*shape, *[3, 2, 3][:dims]), generator=generator).float().requires_grad_()
    extra = [1, 0, 2][:dims] if transposed else [0] * dims
    geometry = ([2, 1, 3][:dims], [1, 2, 0][:dims], [1, 2, 1][:dims], transposed, extra, groups)
    y = torch.ops.aten.convolution(x, w, None, *geometry)
    grad = torch.randint(-3, 4, y.shape, generator=generator).float()
    gx, gw = torch.autograd.grad(y, (x, w), grad)
    tail = (RNE, RNE, rng(), 0)
    assert torch.equal(OPS.convolution_input_gradient(grad, w, x.shape, *geometry, *tail), gx)
    assert torch.equal(OPS.convolution_weight_gradient(grad, x, w.shape, *geometry, *tail), gw)


def test_one_channel_may_have_any_stride() -> None:
    """A channels-last image of one channel is contiguous, with a channel stride of 1."""
    x = torch.randint(-4, 5, (3, 6, 5, 1), generator=torch.Generator().manual_seed(1)).float().permute(0, 3, 1, 2)
    w = torch.randint(-4, 5, (2, 1, 3, 3), generator=torch.Generator().manual_seed(2)).float()
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert x.is_contiguous() and x.stride(1) != 30
    want = torch.nn.functional.conv2d(x, w)  # stock: small integers
    assert torch.equal(OPS.convolution(x, w, *args, RNE, RNE, rng(), 0), want)
