"""``@fxround.compile(policy=...)`` on functions and methods, and its errors for anything else."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround

X = torch.linspace(-1, 1, 12).reshape(3, 4)
COMPILED = fxround.compile(policy="bfloat16", seed=3)


def plain(x: Tensor, scale: float = 2.0) -> Tensor:
    """Scale, then tanh."""
    return torch.tanh(x * scale)


@COMPILED
def decorated(x: Tensor, scale: float = 2.0) -> Tensor:
    """Scale, then tanh."""
    return torch.tanh(x * scale)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = nn.Linear(4, 4)
        self.scale = 2.0

    @fxround.compile(policy="stochastic", seed=1)
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        return y

    @fxround.compile(policy="reproducible")
    def loss(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


class Stock(nn.Module):
    """The same, without decorators."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.fc, self.scale = net.fc, net.scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        return y


class Holder:
    """Not a module: the method is called with the object as an argument."""

    def __init__(self) -> None:
        self.scale = 0.5

    @fxround.compile(policy="bfloat16")
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_decorated_function_is_the_compiled_one_and_looks_like_the_function() -> None:
    assert isinstance(decorated, fxround.RoundedModule) and decorated.policy.name == "bfloat16"
    assert same(decorated(X), fxround.compile(plain, "bfloat16", seed=3)(X))
    assert same(decorated(X, scale=3.0), fxround.compile(plain, torch.bfloat16)(X, scale=3.0))
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Scale, then tanh.")
    assert inspect.signature(decorated) == inspect.signature(plain)
    assert decorated.rng.tolist() == [3, 0]


def test_a_decorated_function_is_pickled_and_copied_by_its_name_as_functions_are() -> None:
    assert copy.deepcopy(decorated) is decorated
    again = fxround.compile(plain, "bfloat16")
    assert same(pickle.loads(pickle.dumps(again))(X), again(X))


def test_the_decorator_takes_models_too() -> None:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        assert same(COMPILED(model)(X), fxround.compile(model, "bfloat16")(X))


def test_a_decorated_forward_is_compiled_for_each_module() -> None:
    net, other = Net().eval(), Net(seed=5).eval()
    with torch.no_grad():
        for module in (net, other):
            wanted = fxround.compile(Stock(module).eval(), "stochastic", seed=1)
            assert same(module(X), wanted(X))
            assert same(module.forward.reseed(7)(X), wanted.reseed(7)(X))
        assert net.forward is net.forward is not other.forward
        assert net.forward.rng.tolist() == [7, 0] and net.forward.coverage().unrounded == ()
        assert net.forward.summary()[0].module == "fc"
        before = net(X)
        net.scale = 4.0
        assert same(net(X), 2 * before)


def test_hooks_and_state_are_the_modules_own() -> None:
    net = Net().eval()
    keys, calls = list(net.state_dict()), []
    net.register_forward_hook(lambda module, args, result: calls.append(result))
    with torch.no_grad():
        result = net(X)
    assert len(calls) == 1 and calls[0] is result and list(net.state_dict()) == keys
    assert [name for name, _ in net.named_modules()] == ["", "fc"]


def test_a_decorated_method_trains() -> None:
    net, stock = Net(), nn.Sequential(Net().fc)
    net.loss(X).backward()
    square = fxround.compile(lambda y: y.square().mean(), "reproducible")
    square(fxround.compile(stock, "reproducible")(X)).backward()
    for p, q in zip(net.parameters(), stock.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same(p.grad, q.grad)


def test_a_copy_of_a_module_compiles_its_own() -> None:
    net = Net().eval()
    with torch.no_grad():
        result = net(X)
        for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            again.fc.weight.mul_(2)
            again.fc.bias.mul_(2)
            assert same(again(X), 2 * result) and same(net(X), result)


def test_a_module_with_a_compiled_forward_is_freed() -> None:
    net = Net()
    with torch.no_grad():
        net(X)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_a_method_of_an_object_that_is_no_module() -> None:
    holder = Holder()
    assert same(holder.scaled(X), X.bfloat16().float() * 0.5)
    holder.scale = 0.25
    assert same(holder.scaled(X), X.bfloat16().float() * 0.25)


def test_a_compiled_model_as_a_class_attribute_is_no_method() -> None:
    class Uses:
        net = fxround.compile(nn.Linear(4, 4), "bfloat16")

    assert Uses().net is Uses.net


class Nests(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @fxround.compile(policy="bfloat16")
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fxround.compile(Net(), "bfloat16"), "Net: the model itself has a forward that is decorated"),
        (lambda: fxround.compile(nn.Sequential(Net()), "bfloat16"), "Sequential: 0 has a forward that is decorated"),
        (lambda: fxround.compile(nn.Sequential(COMPILED(nn.Tanh())), "bfloat16"), "Sequential: 0 is compiled already"),
        (lambda: Nests(Net()), "inner has a forward that is decorated with fxround.compile, and is captured by itself"),
    ],
)
def test_a_compiled_module_inside_of_another_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(fxround.CaptureError, match=message):
        make()(X)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fxround.compile(plain), r"no policy is given: fxround\.compile\(model, 'stochastic'\), or @fxround"),
        (lambda: fxround.compile(), "no policy is given"),
        (lambda: fxround.compile(Net, "bfloat16"), "model is the class Net: pass an instance, or decorate the class's"),
        (lambda: COMPILED(Net), "model is the class Net"),
        (lambda: fxround.compile(policy="bfloat16", example_inputs=X), "example_inputs is for a model that is given"),
        (lambda: fxround.compile("bfloat16"), "no policy is given"),
        (lambda: fxround.compile("bfloat16", "bfloat16"), "model is a str; expected"),
    ],
)
def test_wrong_uses_say_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_a_wrong_policy_is_reported_where_it_is_written() -> None:
    with pytest.raises(fxround.PolicyError, match="did you mean 'bfloat16'"):
        fxround.compile(policy="bfloat61")
