"""Second derivatives: gradients that were computed with ``create_graph=True`` and are differentiated again.

Where the model is in binary64, numbers are compared with stock PyTorch's, within a part in 1e9 of the largest: both are
right but for rounding errors of some 1e-15, and a term that is missing is far larger. Everything else is compared bit
for bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.compiler.derivatives import Derivatives
from fxround.errors import FxroundError


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def points(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def require_close(found: Any, wanted: Any) -> None:
    """See the first lines of this file for the tolerance."""
    pairs = list(zip([found], [wanted], strict=True) if isinstance(found, Tensor) else zip(found, wanted, strict=True))
    assert pairs
    for value, other in pairs:
        assert torch.allclose(value, other, rtol=0, atol=1e-9 * float(other.abs().max()))


def penalty(f: Any, model: nn.Module) -> Any:
    """The gradients of a loss with a gradient penalty, as of WGAN-GP."""
    z = points(5, 4).requires_grad_()
    (g,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
    loss = f(z).mean() + 10 * ((g.norm(dim=1) - 1) ** 2).mean()
    return torch.autograd.grad(loss, list(model.parameters()))


def adapted(f: Any, model: nn.Module) -> Any:
    """The gradients of a loss after two steps of training, as of MAML."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = (torch.func.functional_call(f, weights, (points(5, 4),)) - 1).square().mean()
        found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), found, strict=True)}
    after = torch.func.functional_call(f, weights, (points(5, 4, seed=6),))
    return torch.autograd.grad((after - 2).square().mean(), list(model.parameters()))


def residual(f: Any, model: nn.Module) -> Any:
    """The gradients of the residual of a differential equation, u'' + u = 0 along each direction."""
    z = points(5, 4).requires_grad_()
    u = f(z)
    (first,) = torch.autograd.grad(u.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z, create_graph=True)
    (second + u).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found[:-1]  # autograd counts the last bias as reached or not


def fourth(f: Any, model: nn.Module) -> Any:
    z = points(5, 4).requires_grad_()
    value = f(z).square().sum()
    for _ in range(3):
        value = torch.autograd.grad(value, z, create_graph=True)[0].square().sum()
    return torch.autograd.grad(value, [z, *model.parameters()])


def transforms(f: Any, model: nn.Module) -> Any:
    """What ``torch.autograd.functional`` computes by second derivatives, one row at a time and all at once."""

    def total(z: Tensor) -> Any:
        return f(z).square().sum()

    x, v = points(3, 4), points(3, 4, seed=7)
    found: list[Any] = [getattr(functional, name)(total, x, v)[1] for name in ("hvp", "vhp")]
    found.append(functional.jvp(f, x, v)[1])
    found += [functional.hessian(total, x, vectorize=vectorize) for vectorize in (False, True)]
    return [*found, functional.jacobian(f, x, create_graph=True, vectorize=True).detach()]


def through(name: str, model: nn.Module) -> Any:
    if name == "torch.compile":
        return torch.compile(model, backend="fxround", options={"policy": "reproducible"})
    compiled = fxround.compile(model, "identity" if name == "identity" else "reproducible")
    return compiled.eval() if name == "eval" else compiled


@pytest.mark.part(4)
@pytest.mark.parametrize("problem", [penalty, adapted, residual, fourth, transforms])
@pytest.mark.parametrize("way", ["reproducible", "eval"])
def test_second_derivatives_are_those_of_the_model(problem: Callable[..., Any], way: str) -> None:
    model = network()
    require_close(problem(through(way, model), model), problem(model, model))


@pytest.mark.parametrize("way", ["identity", "torch.compile"])
def test_a_penalty_is_the_same_in_every_way_of_running(way: str) -> None:
    model = network()
    wanted = penalty(model, model)
    found = penalty(through(way, model), model)
    require_close(found, wanted)
    if way == "torch.compile":
        with fxround.perturb(model, "reproducible"):
            perturbed = penalty(model, model)
        for value, other in zip(found, perturbed, strict=True):
            assert torch.equal(value, other)


def test_an_iteration_is_differentiated_twice() -> None:
    w = points(3).requires_grad_()

    def step(s: Tensor) -> Tensor:
        return s + 0.1 * torch.tanh(s * w)

    def found(run: Callable[[Tensor], Tensor]) -> Any:
        s = points(3, seed=6).requires_grad_()
        first = torch.autograd.grad(run(s).pow(3).sum(), [s, w], create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), [s, w])

    def stepped(s: Tensor) -> Tensor:
        for _ in range(5):
            s = step(s)
        return s

    require_close(found(lambda s: fxround.iterate(step, s, 5, "reproducible")), found(stepped))


def test_a_second_derivative_has_the_bits_of_hand_composed_roundings() -> None:
    """tanh(x * w), each result in bfloat16: operations on 8 bits are exact in binary64, and rounded once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(r(points(6, dtype=torch.float32)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.w)

    def r(value: Tensor) -> Tensor:
        return fxround.round(value.detach().double(), "bfloat16").float()

    model = Model()
    compiled = fxround.compile(model, Policy("b", (Rule(rounding="bfloat16"),)))
    x, t, u = (r(points(6, dtype=torch.float32, seed=seed)) for seed in (6, 7, 8))
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(z), z, t, create_graph=True)
    on_x, on_w = torch.autograd.grad(g, [z, model.w], u)

    def d(a: Tensor, b: Tensor) -> Tensor:
        return r(a.double() * b.double())

    w = model.w.detach()
    y = r(torch.tanh(d(x, w).double()))
    slope = r(1 - d(y, y).double())
    error = d(t, slope)
    assert torch.equal(g.detach(), d(error, w))
    of_error = d(u, w)
    of_square = -d(of_error, t)
    of_y = r(d(of_square, y).double() + d(of_square, y).double())
    before = d(of_y, r(1 - d(y, y).double()))
    assert torch.equal(on_x, d(before, w))
    assert torch.equal(on_w, r(d(u, error).double() + d(before, x).double()))


def test_second_derivatives_have_the_same_bits_for_one_row_and_for_several_threads() -> None:
    model = network(torch.float32)
    compiled, x, v = (
        fxround.compile(model, "reproducible"),
        *(points(9, 4, dtype=torch.float32, seed=s) for s in (5, 6)),
    )

    def product(x: Tensor, v: Tensor) -> Any:
        return functional.hvp(lambda z: compiled(z).square().sum(), x, v)[1]

    threads, whole = torch.get_num_threads(), product(x, v)
    assert whole.any()
    try:
        torch.set_num_threads(1)
        assert torch.equal(product(x, v), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([product(x[i : i + 1], v[i : i + 1]) for i in range(9)]), whole)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x))))).softmax(1)


class Writing(nn.Module):
    """States of a loop are written into a tensor of another dtype, in place, as one does for a sequence of results."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.zeros(x.shape[0], 2, 4)
        states[:, 0] = h = self.first(x.double()).tanh()
        states[:, 1] = self.first(h)
        states[:, 1, 2] = states[:, 0, 1].sum(0)
        return self.last(states.sin()).sum(1).exp()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Drawing, Writing])
def test_create_graph_changes_no_bit_and_the_gradients_are_computed_again_with_the_bits_they_had(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind()
    compiled, x = fxround.compile(model, "stochastic", seed=4), points(6, 4, dtype=torch.float32).requires_grad_()
    sources = [x, *model.parameters()]
    plain = torch.autograd.grad(compiled.reseed(4)(x).square().sum(), sources)
    created = torch.autograd.grad(compiled.reseed(4)(x).square().sum(), sources, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, created, strict=True))
    again: list[Tensor] = []
    make = Derivatives.step

    def watched(self: Derivatives, gradients: Any, wanted: Any, values: Any) -> Any:
        step = make(self, gradients, wanted, values)
        assert step is not None
        with torch.no_grad():
            again.extend(step.forwards(*values, torch.tensor([4, 0]))[: step.results])
        return step

    monkeypatch.setattr(Derivatives, "step", watched)
    loss = sum((g.square().sum() for g in created), torch.zeros(()))
    torch.autograd.grad(loss, sources, retain_graph=True, allow_unused=True)
    assert len(again) == len(created) and all(any(torch.equal(a, g) for g in created) for a in again)


def detached(x: Tensor, h: Tensor) -> Tensor:
    return h * h.detach() * x


def without_gradients(x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        q = torch.sin(h) * 2
    return h * q * x


def straight_through(x: Tensor, h: Tensor) -> Tensor:
    return (h + (h.round() - h).detach()) * x * h


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


class Detaching(Cube):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x.detach() * gradients[0]


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.fc = nn.Linear(4, 4).double()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.fc(x).tanh())


def squares(f: Any, model: nn.Module) -> Any:
    z = points(5, 4).requires_grad_()
    sources = [z, *model.parameters()]
    first = torch.autograd.grad(f(z).square().sum(), sources, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), sources)


def written(x: Tensor, h: Tensor) -> Tensor:
    states = torch.zeros(x.shape[0], 2, 4, dtype=h.dtype)
    states[:, 0] = h
    states[:, 1] = h.sin() * x[0]
    states[:, 1, 2] = states[:, 0, 1].sum(0)
    return states.square().prod(1)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "function", [detached, without_gradients, straight_through, lambda x, h: Cube.apply(h) * x, written]
)
def test_what_autograd_takes_for_a_constant_is_one_in_second_derivatives(function: Any) -> None:
    model = Calling(function)
    require_close(squares(fxround.compile(model, "identity"), model), squares(model, model))


def test_a_constant_that_a_graph_does_not_show_is_refused() -> None:
    model = Calling(lambda x, h: Detaching.apply(h) * x)
    compiled = fxround.compile(model, "identity")
    with pytest.raises(FxroundError, match=r"autograd_function_apply.*detaches a value inside of its body"):
        squares(compiled, model)


def test_a_gradient_that_counts_its_rows_is_refused() -> None:
    """PyTorch's second derivative leaves the counts out."""
    table, rows = nn.Embedding(4, 3, scale_grad_by_freq=True), torch.tensor([0, 1, 1])
    compiled = fxround.compile(table, "reproducible")
    (g,) = torch.autograd.grad(compiled(rows).square().sum(), table.weight, create_graph=True)
    assert torch.equal(g.detach()[:2], 2 * table.weight.detach()[:2])
    with pytest.raises(FxroundError, match=r"embedding .* has scale_grad_by_freq=True"):
        torch.autograd.grad(g.sum(), table.weight)


def test_gradients_that_depend_on_nothing_cannot_be_differentiated_as_in_pytorch() -> None:
    model = Calling(lambda x, h: x * 3)
    for f in (model, fxround.compile(model, "reproducible")):
        z = points(5, 4).requires_grad_()
        (g,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
        assert not g.requires_grad


def test_a_second_derivative_that_is_always_zero_is_zeros() -> None:
    compiled, z = fxround.compile(nn.MaxPool1d(2), "reproducible"), points(2, 3, 6).requires_grad_()
    (g,) = torch.autograd.grad(compiled(z).square().sum(), z, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), z)
    assert torch.equal(h, (g.detach() != 0) * 2.0)
    t = points(2, 3, 3, seed=6).requires_grad_()
    (g,) = torch.autograd.grad(compiled(z), z, t, create_graph=True)
    assert torch.equal(torch.autograd.grad(g.sum(), t)[0], torch.ones(2, 3, 3))


def test_a_loaded_program_has_no_second_derivatives(tmp_path: Path) -> None:
    x = points(5, 4).requires_grad_()
    path = fxround.compile(network(), "reproducible").export(tmp_path / "step.pt2", x, gradients=True)
    loaded = fxround.load(path)
    (g,) = torch.autograd.grad(loaded(x).sum(), x, create_graph=True)
    for source in (x, *list(loaded.parameters())[:1]):
        with pytest.raises(FxroundError, match="a loaded program, which has no second derivatives"):
            torch.autograd.grad(g.square().sum(), source, retain_graph=True)


@pytest.mark.parametrize(
    "policy, said",
    [
        (Policy("c", (Rule(rounding="e4m3fn/nearest_even/saturate", gradient="zero_clamped"),)), "straight_through"),
        ("fp8_delayed", "delayed scales"),
    ],
)
def test_rounded_gradients_and_delayed_scales_are_refused_when_they_are_differentiated(policy: Any, said: str) -> None:
    compiled, x = fxround.compile(network(torch.float32), policy), points(5, 4, dtype=torch.float32).requires_grad_()
    (g,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(FxroundError, match=said):
        torch.autograd.grad(g.square().sum(), x)


def test_an_input_that_has_changed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled, x = fxround.compile(model, "reproducible"), points(4, 3, dtype=torch.float32).requires_grad_()
    y = compiled(x)
    with torch.no_grad():
        model[0].bias.add_(1)
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # the first derivative does not need it
    with pytest.raises(FxroundError, match=r"parameter 0\.bias was changed in place"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_running_statistics_may_change_before_a_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    compiled, x = fxround.compile(model, "reproducible"), points(5, 4).requires_grad_()
    y = compiled(x * 2)
    compiled(points(5, 4))  # changes the running statistics
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(g.square().sum(), x)
    (g,) = torch.autograd.grad(model(x * 2).square().sum(), x, create_graph=True)
    require_close(found, torch.autograd.grad(g.square().sum(), x)[0])


def test_inputs_are_freed_by_a_backward_pass_that_retains_nothing() -> None:
    compiled, x = fxround.compile(network(), "reproducible"), points(5, 4).requires_grad_()
    h = x * 2
    kept, y = weakref.ref(h), compiled(h)
    del h
    y.sum().backward()
    gc.collect()
    assert kept() is None and y.grad_fn is not None


def test_derivatives_of_gradients_are_listed_as_captures() -> None:
    compiled = fxround.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "reproducible")
    x = torch.randn(3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert len(compiled.captures()) == 1
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.sum().backward()
    rows = [row[2:6] for row in compiled.captures().rows]
    assert len(rows) == 4 and rows[0][0] == "training with gradients" and rows[0][3] == "first call"
    assert set(rows[1:]) == {("derivative of gradients", rows[0][1], "", "a gradient was differentiated")}
