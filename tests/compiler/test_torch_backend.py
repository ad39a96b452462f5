"""torch.compile(backend=...): it has the bits of fxround.compile and its errors, and leaves nothing to Python."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import CaptureError, Policy, PolicyError, Rule
from fxround.compiler.torch_backend import rounding_backend


class Net(nn.Module):
    """Norm and dropout, a parameter and a buffer that nothing reads, and one weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.fc = nn.Parameter(torch.ones(7)), nn.Linear(4, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.out, self.again = nn.Linear(6, 4), nn.Linear(6, 4)
        self.again.weight = self.out.weight
        self.register_buffer("nobody", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.drop(F.gelu(self.norm(self.fc(x)))))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=rounding_backend, options=options)


def trained(step: Any, model: nn.Module, batches: tuple[int, ...]) -> list[Tensor]:
    """The losses of one step per batch, then the state of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, size in enumerate(batches):
        x = torch.linspace(-1, 1 + i, size * 4).view(size, 4)
        loss = step(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values() if isinstance(value, Tensor))]


def test_training_gives_the_bits_of_fxround_compile() -> None:
    batches = (5, 5, 3)  # Dynamo makes a second graph for the third: it goes on where the first one stopped
    ours, theirs = net(), net()
    expected = trained(fxround.compile(ours, "stochastic", seed=5), ours, batches)
    found = trained(compiled(theirs, policy="stochastic", seed=5), theirs, batches)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_evaluation_is_a_function_of_seed_and_sample() -> None:
    model, x, state = net().eval(), torch.ones(3, 4), torch.tensor([5, 0])
    module = compiled(model, policy="stochastic", seed=state)
    expected = fxround.compile(model, "stochastic", seed=5)
    first = module(x)
    assert torch.equal(first, expected(x)) and torch.equal(module(x), first)
    state[1] = 1
    assert torch.equal(module(x), expected.reseed(5, sample=1)(x)) and not torch.equal(module(x), first)
    module.train()(x)
    assert state.tolist() == [5, 2]


def test_rules_find_modules_and_roles() -> None:
    rules = (Rule("fc", role="weight", rounding="e4m3fn/stochastic"), Rule("again", rounding="bfloat16"))
    model, x, policy = net().eval(), torch.linspace(0, 1, 12).view(3, 4), Policy("p", rules)
    with torch.no_grad():
        assert torch.equal(compiled(model, policy=policy)(x), fxround.compile(model, policy)(x))
    missed = Policy("p", (Rule("fcc", rounding="bfloat16"),))
    with pytest.raises(PolicyError, match="matches no operation"):
        compiled(model, policy=missed)(x)


def test_a_function_is_compiled() -> None:
    x = torch.linspace(0, 1, 12, requires_grad=True)
    results = [f(x) for f in (compiled(torch.erf, policy="bfloat16"), fxround.compile(torch.erf, "bfloat16"))]
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in results]
    assert torch.equal(*results) and torch.equal(*gradients)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({}, PolicyError, "no policy is given"),
        ({"policy": "stocastic"}, PolicyError, "did you mean 'stochastic'"),
        ({"policy": "stochastic", "sead": 3}, TypeError, "no key 'sead'; expected policy, seed"),
        ({"policy": "stochastic", "seed": -1}, ValueError, "seed is -1"),
        ({"policy": "stochastic", "seed": torch.zeros(2)}, TypeError, r"expected an int, or int64 \(2,\)"),
        ({"policy": "stochastic", "strict": 1}, TypeError, "expected True or False"),
    ],
)
def test_wrong_options_are_our_own_errors(options: dict[str, Any], error: type[Exception], said: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=said) as caught:
            compiled(nn.ReLU(), **options)(torch.ones(2))
    assert type(caught.value) is error


@pytest.mark.parametrize("model", [Broken(), Late()])
def test_a_part_of_a_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match="fullgraph=True"):
        compiled(model, policy="stochastic")(torch.ones(2))


def test_an_operator_without_a_rule_is_refused_unless_strict_is_off() -> None:
    x = torch.eye(3)
    with pytest.raises(fxround.UnsupportedOperator, match="strict"):
        compiled(torch.linalg.svdvals, policy="bfloat16")(x)
    assert torch.equal(compiled(torch.linalg.svdvals, policy="bfloat16", strict=False)(x), torch.ones(3))


def test_the_entry_point_is_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (name, value), *rest = project["entry-points"]["torch_dynamo_backends"].items()
    assert name == "fxround" and not rest
    assert EntryPoint(name, value, "torch_dynamo_backends").load() is rounding_backend


class Decoder(nn.Module):
    """Attention over an argument's cache of keys, to which each call adds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        own = self.key(x)
        cache["k"] = torch.cat([cache["k"], own], 1) if cache else own
        return (x @ cache["k"].mT).softmax(-1) @ cache["k"]


def test_a_cache_grows_step_by_step_through_a_bound_forward() -> None:
    """Dynamo treats sizes of 0 and 1 as constants, and others as symbols after a second call."""
    torch._dynamo.reset()
    model = Decoder()
    compiled = torch.compile(model.forward, backend="fxround", options={"policy": "identity"})
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    with torch.no_grad():
        for length in (3, 1, 1, 1):
            x = torch.randn(1, length, 4)
            # A tolerance: the captured graph need not call the kernels that eager PyTorch calls.
            torch.testing.assert_close(compiled(x, ours), model(x, theirs))
    assert ours["k"].shape == (1, 6, 4)
    # As above: eager PyTorch made the other one.
    torch.testing.assert_close(ours["k"], theirs["k"])
