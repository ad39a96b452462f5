"""Gradients of roundings: eager ones, and those of a policy's rules, compared with roundings composed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gmpy2
import numpy as np
import pytest
import torch
from repdl import fma
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.capture.gradient_marks import MARKED, MARKED_GRADIENT
from fxround.numerics.formats import Format
from fxround.numerics.gradients import Gradient, unclamped
from fxround.numerics.modes import Rounding

SATURATING = [
    *(f"e4m3fn/{mode}/saturate" for mode in ("nearest_even", "away_from_zero", "stochastic")),
    *(f"{name}/stochastic_equal/saturate" for name in ("e2m1fn", "bfloat16")),
]


def short(*shape: int, seed: int, bits: int = 4, scale: float = 1.0) -> Tensor:
    """Numbers of few bits: sums and products of some of them are exact in binary32."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return fxround.round(drawn, f"ieee(8,{bits})")


def stepped(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The result of a function of the module, and the gradients of x and of all parameters."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = function(leaf)
    y.backward(short(*y.shape, seed=6, bits=3))
    gradients = [leaf.grad, *(p.grad for p in module.parameters())]
    assert all(gradient is not None for gradient in gradients), "a gradient is missing"
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("text", SATURATING)
def test_a_clamp_after_an_unclamped_rounding_has_the_bits_of_the_one_rounding(text: str) -> None:
    rounding = Rounding.parse(text)
    top = rounding.format.maximum
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * min(top, 1e30)
    steps = torch.linspace(0.9, 1.2, 301) * min(top, 1e38)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38])
    x = torch.cat([drawn, drawn / top, steps, -steps, special])
    once = fxround.round(x, rounding, seed=3)
    twice = fxround.round(fxround.round(x, unclamped(rounding), seed=3), rounding)
    assert torch.equal(once.view(torch.int32), twice.view(torch.int32))


@pytest.mark.parametrize("mode, last", [("nearest_even", 464.0), ("toward_zero", 479.9), ("away_from_zero", 448.0)])
def test_the_gradient_is_zero_where_the_rounding_clamped(mode: str, last: float) -> None:
    """448 is the maximum of e4m3fn, 480 would be the next value: what rounds to at most 448 is not clamped."""
    x = torch.tensor([0.0, 448.0, last, 480.0, 1e9, math.inf, math.nan])
    x = torch.cat([x, -x]).requires_grad_()
    g = torch.arange(1.0, 15.0)
    fxround.round(x, f"e4m3fn/{mode}/saturate", gradient="zero_clamped").backward(g)
    kept = torch.tensor([1, 1, 1, 0, 0, 0, 1]).repeat(2)
    assert x.grad is not None and torch.equal(x.grad, g * kept)
    beyond = torch.tensor(math.nextafter(last, math.inf) + 1e-3, requires_grad=True)
    fxround.round(beyond, f"e4m3fn/{mode}/saturate", gradient="zero_clamped").backward()
    assert mode == "toward_zero" or beyond.grad == 0


def test_the_gradient_is_rounded_with_bits_of_its_own() -> None:
    g = torch.full((4096,), 1 + 2.0**-4)
    x = torch.full((4096,), 1 + 2.0**-4, requires_grad=True)
    y = fxround.round(x, "e5m2/stochastic", seed=7, gradient="e5m2/stochastic")
    y.backward(g)
    assert x.grad is not None and not torch.equal(x.grad, y)
    assert sorted(set(x.grad.tolist())) == [1.0, 1.25]
    # A quarter goes up: six sigma, a false alarm in 5e8 seeds.
    assert abs((x.grad > 1).double().mean() - 0.25) < 6 * (0.25 * 0.75 / 4096) ** 0.5
    again = x.detach().requires_grad_()
    fxround.round(again, "e5m2/stochastic", seed=7, gradient="e5m2/stochastic").backward(g)
    assert again.grad is not None and torch.equal(again.grad, x.grad)
    z = torch.tensor([3.1, 1e6], requires_grad=True)
    fxround.round(z, "e4m3fn/nearest_even/saturate", gradient="zero_clamped e5m2").backward(torch.tensor([0.3, 0.3]))
    assert z.grad is not None and z.grad.tolist() == [0.3125, 0.0]


def test_mistakes_are_reported() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="clamps nothing"):
        fxround.round(x, "e4m3fn", gradient="zero_clamped")
    with pytest.raises(ValueError, match="clamps nothing"):
        fxround.round(x, "e4m3fn/up_down/saturate", gradient="zero_clamped")
    with pytest.raises(ValueError, match="did you mean 'straight_through'"):
        fxround.round(x, "e4m3fn", gradient="straight_trough")
    with pytest.raises(ValueError, match="did you mean bfloat16"):
        fxround.round(x, "e4m3fn", gradient="bfloat61")
    with pytest.raises(ValueError, match="a NumPy array has no gradient"):
        fxround.round(x.numpy(), "e4m3fn", gradient="e5m2")


@pytest.mark.parametrize(
    "text",
    ["straight_through", "zero_clamped", "estimate", "e5m2/stochastic:3/inf", "zero_clamped bfloat16", "estimate e5m2"],
)
def test_a_gradient_is_its_text(text: str) -> None:
    assert Gradient.parse(str(Gradient.parse(text))) == Gradient.parse(text)


# ---- the estimated derivative ----


def derivatives(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of the curve between the neighbours of x among all values of a format, each step rounded to x's dtype.

    The power is MPFR's, which rounds once to binary32 or binary64.
    """
    dtype = x.dtype.type
    context = gmpy2.context(precision=24, emin=-148, emax=128, subnormalize=True)
    if dtype is np.float64:
        context = gmpy2.context(precision=53, emin=-1073, emax=1024, subnormalize=True)
    values = np.unique(values.astype(dtype))
    wanted = []
    for number in x:
        if np.isnan(number):
            wanted.append(dtype(np.nan))
            continue
        below, above = values[values <= number], values[values >= number]
        if not len(below) or not len(above):
            # Nearest without a bound is the end itself, or a number that is clamped. No end is a power of two.
            end, step = values[0 if not len(below) else -1], values[-1] - values[-2]
            at_end = end != 0 and np.isfinite(number) and np.round(np.abs(number) / step) * step == np.abs(end)
            wanted.append(dtype(0.2 if at_end else 0.0))
            continue
        low, high = below[-1], above[0]
        if low == high:
            wanted.append(dtype(0.2))
            continue
        place = np.abs((number - low) - (high - number)) / (high - low)
        with gmpy2.context(context):
            power = gmpy2.mpfr(float(place)) ** gmpy2.mpfr(float(dtype(-0.8)))
        wanted.append(min(dtype(float(power)) * dtype(0.2), dtype(3.0)))
    return np.array(wanted, dtype)


def values_of(form: Format) -> np.ndarray:
    positive = np.array([float(v) for v in form.magnitudes()])
    return np.concatenate([-positive, positive]) if form.signed else positive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["e2m1fn", "e4m3fn", "e5m2", "ue5m3", "ieee(3,3)"])
def test_the_estimated_derivative_is_that_of_the_curve(name: str, dtype: torch.dtype) -> None:
    form = Format.parse(name)
    values = values_of(form)
    top = float(values.max())
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=dtype) * min(top / 2, 8.0)
    middle = torch.tensor((np.unique(values)[1:] + np.unique(values)[:-1]) / 2, dtype=dtype)
    step = float(np.unique(values)[-1] - np.unique(values)[-2])
    ends = torch.tensor([top, 2 * top, math.inf, 0.0, 1e-30, *(top + step * k / 8 for k in range(9))], dtype=dtype)
    ends = torch.cat([ends, -ends, torch.tensor([math.nan], dtype=dtype)])
    x = torch.cat([drawn, middle, torch.tensor(values, dtype=dtype), ends]).requires_grad_()
    for mode in ("nearest_even", "stochastic"):
        x.grad = None
        y = fxround.round(x, f"{name}/{mode}/saturate", seed=3, gradient="estimate")
        assert torch.equal(y.nan_to_num(7), fxround.round(x.detach(), f"{name}/{mode}/saturate", seed=3).nan_to_num(7))
        y.sum().backward()
        assert x.grad is not None
        wanted = derivatives(x.detach().numpy(), values)
        if dtype == torch.float32:
            np.testing.assert_array_equal(x.grad.numpy(), wanted)
        else:
            # Bits cannot be compared: powers of binary64 are faithful, within 0.7 ulp (docs/functions.md), not nearest.
            np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=2.0**-51, atol=0.0)


@pytest.mark.parametrize(
    "text, unit, elements",
    [
        ("int4:scale=0.25", 0.25, range(-7, 8)),
        ("uint4:scale=0.5,zero=3", 0.5, range(-3, 13)),
        ("fixed(6,2)", 1.0, [i / 4 for i in range(-32, 32)]),
        ("mxfp4", 0.5, [s * m for s in (-1, 1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]),
    ],
)
def test_the_curve_of_scaled_elements_is_that_of_their_quotients(text: str, unit: float, elements: Any) -> None:
    """All scales are powers of two, so that quotients are exact; that of mxfp4 is 2^(1 - 2) for 2 <= max < 4."""
    drawn = torch.randn(4, 31, generator=torch.Generator().manual_seed(2))
    x = torch.cat([drawn.clamp(-2, 2), torch.full((4, 1), 2.5)], 1).requires_grad_()
    fxround.round(x, text, gradient="estimate").backward(torch.full((4, 32), 2.0))
    quotients = (x.detach() / unit).flatten().numpy()
    wanted = 2 * derivatives(quotients, np.array(list(elements), dtype=np.float64))
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.flatten().numpy(), wanted)


class Scaled(nn.Module):
    """A linear layer, a function and a selection of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x) + 0.25) * 0.0078125


@pytest.mark.parametrize("gradient", ["estimate", "estimate e5m2"])
def test_a_compiled_graph_estimates_derivatives_as_roundings_composed_by_hand(gradient: str) -> None:
    """Of parameters and results; a selection, which rounds nothing, passes its gradient on."""
    module = Scaled()
    for i, p in enumerate(module.parameters()):
        p.data = short(*p.shape, seed=i, scale=4)
    x = short(2, 5, 3, seed=5, scale=4)

    def by_hand(x: Tensor) -> Tensor:
        w = fxround.round(module.layer.weight, RW, gradient=gradient)
        product = fxround.round(Linear.apply(x, w), R, gradient=gradient)  # type: ignore[no-untyped-call]
        y = fxround.round(product + 0.25, R, gradient=gradient)
        return fxround.round(F.relu(y) * 0.0078125, R, gradient=gradient)

    compiled = fxround.compile(module, policy(gradient))
    results = [stepped(module, function, x) for function in (by_hand, compiled)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    plain = fxround.compile(module, policy("straight_through"))
    assert torch.equal(plain(x), results[1][0]), "no bit of the result changes"


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "moved",
    [
        lambda t: t.clone().clone(),
        lambda t: t.t().contiguous(),
        lambda t: t.view(4, 2, 3).transpose(0, 1).reshape(2, 12),
        lambda t: t.flip(0),
        lambda t: F.pad(t, (1, 1)),
        lambda t: torch.cat([t.t().reshape(-1), t.reshape(-1)]),
    ],
    ids=["clone", "contiguous", "heads", "flip", "pad", "two uses"],
)
@pytest.mark.parametrize("rounding", ["e2m1fn/nearest_even/saturate", "mxfp4"])
def test_the_derivative_is_that_of_one_rounding_however_its_result_is_moved(moved: Any, rounding: str) -> None:
    """Of a parameter and of a result: a movement with memory of its own is a value with a gradient of its own."""
    weight = nn.Parameter(torch.rand(4, 6) * 4)

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return moved(self.weight) - moved(x * 1.25)

    rules = [Rule(role="weight", rounding=rounding), Rule(operator="mul", direction="forward", rounding=rounding)]
    x = torch.rand(4, 6) * 3
    gradients = []
    for how in ("straight_through", "estimate"):
        policy = Policy("p", tuple(replace(rule, match="", gradient=how) for rule in rules))
        leaf, weight.grad = x.clone().requires_grad_(), None
        fxround.compile(Moved(), policy)(leaf).sum().backward()
        assert weight.grad is not None and leaf.grad is not None
        gradients.append((weight.grad.clone(), leaf.grad))
    for value, straight, estimated in zip((weight.detach(), x * 1.25), *gradients, strict=True):
        slope = value.clone().requires_grad_()
        fxround.round(slope, rounding, gradient="estimate").sum().backward()
        assert slope.grad is not None
        assert torch.equal(estimated, straight * slope.grad)


def test_a_selection_that_rounds_has_a_derivative_and_one_that_chooses_has_none() -> None:
    text = "e2m1fn/nearest_even/saturate"
    x = torch.randn(6, 7)
    slope = x.clone().requires_grad_()
    fxround.round(torch.relu(slope), text, gradient="estimate").sum().backward()
    alone = Policy("p", (Rule(operator="relu", rounding=text, gradient="estimate"),))
    leaf = x.clone().requires_grad_()
    fxround.compile(torch.relu, alone)(leaf).sum().backward()
    # ReLU's derivative is that at the rounded value, which may be 0.
    above = fxround.round(torch.relu(x), text) > 0
    assert slope.grad is not None and leaf.grad is not None and torch.equal(leaf.grad, slope.grad * above)
    rules = [
        Rule(role=role, direction="forward", rounding=text, gradient="estimate") for role in ("input", "activation")
    ]
    both = Policy("p", tuple(rules))
    leaf, entering = x.clone().requires_grad_(), x.clone().requires_grad_()
    fxround.compile(torch.relu, both)(leaf).sum().backward()
    torch.relu(fxround.round(entering, text, gradient="estimate")).sum().backward()
    assert leaf.grad is not None and entering.grad is not None and torch.equal(leaf.grad, entering.grad)


def test_no_derivative_of_zero_makes_a_nan_of_an_infinity() -> None:
    x, g = torch.tensor([10.0, 1.0, 0.75]), torch.tensor([math.inf, math.inf, 1.0])
    text = "e2m1fn/nearest_even/saturate"
    policy = Policy("p", (Rule(operator="mul", direction="forward", rounding=text, gradient="estimate"),))
    for f in (lambda x: fxround.round(x, text, gradient="estimate"), fxround.compile(lambda x: x * 1.0, policy)):
        leaf = x.clone().requires_grad_()
        f(leaf).backward(g)
        assert leaf.grad is not None and leaf.grad.tolist() == [0.0, math.inf, 3.0]


def test_a_compiled_graph_estimates_derivatives_of_blocks() -> None:
    module, x = nn.Linear(32, 5, bias=False), torch.randn(6, 32)
    rule = Rule(role="weight", rounding="nvfp4")
    gradients = []
    for rules in ((rule,), (rule, Rule(role="weight", gradient="estimate"))):
        module.zero_grad()
        fxround.compile(module, Policy("p", (Rule(accumulate="dtype"), *rules)))(x).sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad.clone())
    w = module.weight.detach().requires_grad_()
    fxround.round(w, "nvfp4", gradient="estimate").sum().backward()
    assert w.grad is not None and torch.equal(gradients[1], gradients[0] * w.grad) and not torch.equal(*gradients)


def test_a_traced_rounding_estimates_as_a_plain_call() -> None:
    x = torch.randn(4, 32)

    def function(x: Tensor) -> Tensor:
        return fxround.round(x, "mxfp4", gradient="estimate") * 3

    grads = []
    for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True), torch.func.vmap(function)):
        leaf = x.clone().requires_grad_()
        f(leaf).sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert torch.equal(torch.func.jvp(function, (x,), (torch.ones_like(x),))[1], grads[0])


@pytest.mark.parametrize("text", ["posit(8,1)", "nf4", "e4m3fn/up_down", "fixed(6,2)/nearest_even/wrap"])
def test_what_has_no_curve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has no smooth curve: that needs a floating-point format"):
        fxround.round(torch.zeros(3), text, gradient="estimate")
    with pytest.raises(fxround.PolicyError, match="has no smooth curve"):
        Rule(rounding=text, gradient="estimate")


# ---- policies, against hand-composed roundings under eager autograd ----

R, RW = "e4m3fn/nearest_even/saturate", "e2m1fn/nearest_even/saturate"


def policy(gradient: str) -> Policy:
    """Roundings that no rule sets are binary32's, without error on short numbers."""
    return Policy(
        "p",
        (
            Rule(rounding="dtype", accumulate="dtype"),
            Rule(role="activation", direction="forward", rounding=R, gradient=gradient),
            Rule(role="weight", rounding=RW, gradient=gradient),
        ),
    )


class Tanh(torch.autograd.Function):
    """tanh rounded once, and its derivative at the rounded value, the only value that is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Of binary64's tanh the first bits are kept; the last ones, which differ between processors, do not matter.
        y = fxround.round(torch.tanh(x.double()), R).float()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g[0] * (1 - y * y)


class Linear(torch.autograd.Function):
    """x w^T, exact on short numbers, and gradients that accumulate in order by fused multiply-adds: a stock product's
    order is its processor's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        rows = g[0].flatten(0, -2)
        return chained(rows, w).reshape(x.shape), chained(rows.T, x.flatten(0, -2))


def chained(a: Tensor, b: Tensor) -> Tensor:
    """a b, acc = fma(a_ik, b_kj, acc), k ascending."""
    found = torch.zeros(a.shape[0], b.shape[1])
    for i, row in enumerate(a.numpy()):
        for j, column in enumerate(b.T.numpy()):
            acc = np.float32(0)
            for p, q in zip(row, column, strict=True):
                acc = fma(p, q, acc)
            found[i, j] = float(acc)
    return found


class Layers(nn.Module):
    """A linear layer over three dimensions, or a convolution; then two functions of the model's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4) if kind == "linear" else nn.Conv2d(2, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.relu(self.layer(x)) * 0.0078125)


def by_hand(module: Layers, x: Tensor, gradient: str) -> Tensor:
    def r(value: Tensor) -> Tensor:
        return fxround.round(value, R, gradient=gradient)

    w, b = (fxround.round(p, RW, gradient=gradient) for p in module.layer.parameters())
    # The convolution's gradients are sums of short numbers, exact in any order.
    product = Linear.apply(x, w) if isinstance(module.layer, nn.Linear) else F.conv2d(x, w)  # type: ignore[no-untyped-call]
    b = b if isinstance(module.layer, nn.Linear) else b.reshape(-1, 1, 1)
    y = F.relu(r(fxround.round(product, R) + b))
    return r(Tanh.apply(r(y * 0.0078125)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "kind, shape, gradient",
    [
        ("linear", (2, 5, 3), "straight_through"),
        ("linear", (2, 5, 3), "zero_clamped"),
        ("linear", (5, 3), "e5m2"),
        ("conv", (2, 2, 3, 4), "zero_clamped e4m3fn/toward_zero"),
    ],
)
def test_a_compiled_graph_treats_gradients_as_roundings_composed_by_hand(kind: str, shape: Any, gradient: str) -> None:
    module = Layers(kind)
    for i, p in enumerate(module.parameters()):
        p.data = short(*p.shape, seed=i, scale=4)
    x = short(*shape, seed=5, scale=30)
    compiled = fxround.compile(module, policy(gradient))
    found = [stepped(module, function, x) for function in (lambda x: by_hand(module, x, gradient), compiled)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert not [n for n in compiled._called().lowered.graph.nodes if n.target in (MARKED, MARKED_GRADIENT)]
    clamped = [p.detach().abs() > 6.9 for p in module.parameters()]
    assert any(bool(c.any()) for c in clamped), "the weights clamp"
    if "zero_clamped" in gradient:
        assert all(bool((g[c] == 0).all()) for g, c in zip(found[1][2:], clamped, strict=True))
    else:
        assert any(bool((g[c] != 0).any()) for g, c in zip(found[1][2:], clamped, strict=True))


def test_treated_gradients_change_no_bit_of_the_results_and_seeds_still_repeat() -> None:
    module = Layers("linear")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 100
    rules = (
        Rule(rounding="dtype/stochastic", accumulate="dtype/stochastic"),
        Rule(role="activation", direction="forward", rounding="e4m3fn/stochastic/saturate"),
    )
    plain = fxround.compile(module, Policy("plain", rules), seed=2)
    treated = plain.with_policy(Policy("treated", (*rules, Rule(gradient="zero_clamped e5m2/stochastic"))))
    first = treated(x)
    assert torch.equal(first, plain(x)) and torch.equal(first, treated.reseed(2)(x))
    with torch.no_grad():
        assert torch.equal(first, treated.reseed(2)(x))


# ---- the preset fp8 ----


def test_fp8_rounds_the_operands_of_products_and_nothing_else() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(3, 4, bias=False), nn.RMSNorm(4, eps=1e-12)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.norm(self.fc(x)), -1)

    module = Net()
    module.fc.weight.data = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    x = (torch.randn(5, 3, generator=torch.Generator().manual_seed(2)) / 64).requires_grad_()
    g = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    compiled = fxround.compile(module, "fp8")
    seen = dict(compiled.observe_step({0: g}, x))
    products = [node for node in compiled.lowered.graph.nodes if str(node.target) == "aten.mm.default"]
    compiled(x).backward(g)

    def forward(value: Tensor) -> Tensor:
        return fxround.round(value, "scaled(e4m3fn;tensor,binary32,inverse)")

    w, a = forward(module.fc.weight.detach()), forward(x.detach())
    # The policy leaves the products to the stock kernel, and rounds what that reads.
    assert all(torch.equal(seen[node.name], want) for node, want in zip(products[0].args, (a, w.T), strict=True))
    # After the product, the reproducible model's bits: norm, softmax and their gradients are binary32's.
    tail = nn.Sequential(module.norm, nn.Softmax(-1))
    h = (a @ w.T).requires_grad_()
    y = fxround.compile(tail, "reproducible")(h)
    assert torch.equal(y, compiled(x))
    (error,) = torch.autograd.grad(y, h, g)
    e = fxround.round(error, "scaled(e5m2;tensor,binary32,inverse)")
    read = [[seen[n.name] for n in node.all_input_nodes] for node in products[1:]]
    for wanted in ((e, w), (e.T, a)):
        assert any(len(r) == 2 and all(map(torch.equal, r, wanted)) for r in read)
    assert x.grad is not None and module.fc.weight.grad is not None
    assert "the policy keeps the stock kernel, whose bits depend on the device" in str(compiled.coverage())


def test_operands_share_their_bits_forwards_and_backwards_through_views() -> None:
    """A stochastic rounding of weights: the product, and the gradient that reads them transposed, see one value."""
    rule = Rule(operator="contraction", role="weight", operands="e2m1fn/stochastic/saturate")
    module = nn.Linear(6, 5, bias=False)
    compiled = fxround.compile(module, Policy("w", (Rule(accumulate="dtype"), rule)), seed=3)
    x = torch.eye(6).requires_grad_()
    y = compiled(x)
    y.backward(torch.eye(5, 5).repeat(2, 1)[:6])
    assert x.grad is not None and torch.equal(x.grad[:5], y.T[:, :].detach()[:5])
    assert torch.equal(y, fxround.round(y, "e2m1fn")) and not torch.equal(y.T, fxround.round(module.weight, "e2m1fn"))
    lost = Policy("lost", (Rule(operator="convolution", operands="e4m3fn"),))
    with pytest.raises(fxround.PolicyError, match=r"rule 1, .*operands=e4m3fn/nearest_even/nan', matches no operation"):
        fxround.compile(module, lost)(x)
