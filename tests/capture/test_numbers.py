"""Numbers that are attributes of modules and change from call to call: inputs of one graph, with bits of constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError, FxroundError

VALUES = (0.5, 0.1, 3.0, -0.0, float("inf"), float("nan"), 1e-40, 1e300, 7, 2**24 + 1, 2**60 + 1)
Function = Callable[[Tensor, Any, nn.Module], Tensor]
# What has the number as an input from its second value on.
FREE: dict[str, Function] = {
    "product": lambda x, a, layer: layer(x) * a,
    "product with a number first": lambda x, a, layer: a * layer(x),
    "sum": lambda x, a, layer: a + layer(x),
    "difference": lambda x, a, layer: layer(x) - a,
    "quotient": lambda x, a, layer: torch.softmax(layer(x) / a, -1),
    "several": lambda x, a, layer: (x * a + a) / a - a,
    "in place": lambda x, a, layer: (x + 0).mul_(a),
    "a sum over a list": lambda x, a, layer: sum((x * a for _ in range(3)), start=layer(x)),
    "a test for None": lambda x, a, layer: x if a is None else x * a,
}
# What needs the number itself, or computes otherwise with a number than with a tensor.
FIXED: dict[str, Function] = {
    "subtracted from": lambda x, a, layer: a - x,
    "divided": lambda x, a, layer: a / x,
    "a branch": lambda x, a, layer: x * a if a > 1 else x + a,
    "a branch behind its type": lambda x, a, layer: x + a if not isinstance(a, float) or a > 5 else x * a,
    "a branch behind type()": lambda x, a, layer: x + a if type(a) is not float or a > 5 else x * a,
    "a branch behind is_tensor": lambda x, a, layer: x + a if torch.is_tensor(a) or a > 5 else x * a,
    "a branch behind an attribute": lambda x, a, layer: x + a if hasattr(a, "shape") or a > 5 else x * a,
    "a number made of it": lambda x, a, layer: x * (1 - a),
    "an argument": lambda x, a, layer: x.clamp(max=a),
    "a factor": lambda x, a, layer: torch.add(x, x, alpha=a),
    "a power": lambda x, a, layer: x.abs() ** a,
    "a choice": lambda x, a, layer: torch.where(x > 0, x, a),
    "a result of another dtype": lambda x, a, layer: (x > 0).int() * a + x,
    "a tensor without dimensions, of 16 bits": lambda x, a, layer: (x.half() * a).float(),
    "two dtypes": lambda x, a, layer: x * a + (x.double() * a).float(),
}


class Holding(nn.Module):
    """A module that computes a function of its number."""

    def __init__(self, function: Function, number: Any) -> None:
        super().__init__()
        self.layer, self.function, self.number = nn.Linear(4, 4), function, number

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.number, self.layer)


class Nested(nn.Module):
    """Numbers of the module itself, of a block, and of a block in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.width = 0.5, 3
        self.block = Holding(FREE["product"], 0.25)
        self.blocks = nn.ModuleList([Holding(FREE["sum"], 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) * self.gain
        for block in self.blocks:
            x = block(x)
        return x * self.width if self.width > 2 else x


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    codes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.detach().contiguous().view(codes[t.element_size()]) for t in tensors]


def _computed(compiled: fxround.RoundedModule, x: Tensor, differentiated: bool) -> list[Tensor]:
    """The result, and the gradients of the argument and the parameters, for sample 0."""
    compiled.reseed(3)
    if not differentiated:
        with torch.no_grad():
            return [compiled(x)]
    given = x.clone().requires_grad_()
    result = compiled.train()(given)
    wanted = [given, *(p for p in compiled.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(result.sum(), wanted, allow_unused=True)
    return [result, *(g for g in gradients if g is not None)]


def _assert_constants(model: nn.Module, compiled: fxround.RoundedModule, x: Tensor, differentiated: bool) -> None:
    """Assert that a call has the bits of a model that is compiled anew, and so has constants."""
    fresh = fxround.compile(model, compiled.policy, seed=3)
    own, expected = (_computed(module, x, differentiated) for module in (compiled, fresh))
    assert len(own) == len(expected) and all(map(torch.equal, _bits(own), _bits(expected)))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FREE)
def test_a_number_becomes_an_input_at_its_second_value(name: str) -> None:
    model = Holding(FREE[name], VALUES[0])
    compiled, x = fxround.compile(model, "reproducible", seed=3), torch.randn(3, 4)
    for value in VALUES:
        model.number = value
        _assert_constants(model, compiled, x, differentiated=False)
    assert len(compiled.captures()) == 2 and list(compiled.captured.numbers.values()) == [torch.float32]


@pytest.mark.part(4)
@pytest.mark.parametrize("name", FIXED)
def test_a_number_that_decides_or_is_converted_stays_a_constant(name: str) -> None:
    model = Holding(FIXED[name], 0.5)
    compiled, x = fxround.compile(model, "reproducible", seed=3), torch.randn(3, 4)
    values = (0.5, 0.25, 7.0, 2)
    for value in values:
        model.number = value
        _assert_constants(model, compiled, x, differentiated=False)
    assert len(compiled.captures()) == len(values) and not compiled.captured.numbers


@pytest.mark.parametrize("policy", ["stochastic", "bfloat16", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_have_the_bits_and_draws_of_constants_forward_and_backward(policy: str, dtype: torch.dtype) -> None:
    model = Holding(FREE["several"], 0.5).to(dtype)
    compiled, x = fxround.compile(model, policy, seed=3), torch.randn(3, 4, dtype=dtype)
    for value in (0.5, 0.3, 0.1):
        model.number = value
        _assert_constants(model, compiled, x, differentiated=True)
    assert len(compiled.captures()) == 2 and list(compiled.captured.numbers.values()) == [dtype]


def test_numbers_of_submodules_and_several_at_once() -> None:
    model, x = Nested(), torch.randn(3, 4)
    compiled = fxround.compile(model, "bfloat16", seed=3)
    for step in range(5):
        model.gain, model.block.number, model.blocks[0].number = 0.1 + step, 0.3 * step, step
        _assert_constants(model, compiled, x, differentiated=False)
    assert {str(number) for number in compiled.captured.numbers} == {"gain", "block.number", "blocks.0.number"}
    captures = len(compiled.captures())
    model.width = 2
    _assert_constants(model, compiled, x, differentiated=False)
    assert len(compiled.captures()) == captures + 1
    model.gain = 9.0
    _assert_constants(model, compiled, x, differentiated=False)
    assert len(compiled.captures()) == captures + 1


def test_what_is_no_number_any_more_is_captured_anew() -> None:
    model, x = Holding(FREE["a test for None"], 0.5), torch.randn(3, 4)
    compiled = fxround.compile(model, "reproducible", seed=3)
    for value in (0.5, 0.25, None, 0.125, True, np.float64(0.1), torch.tensor(0.75), 0.5):
        model.number = value
        assert torch.equal(compiled(x), x if value is None else x * float(value)), value
    del model.number
    with pytest.raises((AttributeError, CaptureError), match=r"number"):
        compiled(x)


def test_a_program_has_the_number_of_its_export(tmp_path: Path) -> None:
    model, x = Holding(FREE["product"], 0.5), torch.randn(3, 4)
    compiled = fxround.compile(model.eval(), "reproducible")
    for value in (0.5, 0.25, 0.125):
        model.number = value
        compiled(x)
    program = fxround.load(compiled.export(tmp_path / "model.pt2", x))
    model.number = 8.0
    assert torch.equal(program(x), compiled(x) / 64)


def test_a_first_gradient_in_eval_mode_is_of_the_number_of_its_call() -> None:
    model, x = Holding(FREE["product"], 0.5), torch.randn(3, 4, requires_grad=True)
    compiled = fxround.compile(model.eval(), "reproducible")
    for value in (0.5, 0.25):
        model.number = value
        with torch.no_grad():
            compiled(x)
    model.number = 0.75
    result = compiled(x)
    model.number = 1.0
    with pytest.raises(FxroundError, match="an attribute"):
        result.sum().backward()
    expected = {}
    for value in (2.0, 4.0, 8.0):
        model.number = value
        (expected[value],) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(expected[4.0], 2 * expected[2.0]) and torch.equal(expected[8.0], 4 * expected[2.0])


def test_the_model_is_not_changed() -> None:
    model, x = Nested(), torch.randn(3, 4)
    compiled = fxround.compile(model, "reproducible")
    for step in range(3):
        model.gain = 0.5 + step
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        buffers = {name: dict(module._buffers) for name, module in model.named_modules()}
        compiled(x)
        assert before == {name: dict(vars(module)) for name, module in model.named_modules()}
        assert buffers == {name: dict(module._buffers) for name, module in model.named_modules()}


class Scaled(nn.Module):
    """Scales by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Reached(nn.Module):
    """A part that is reached as a submodule, and by another path; or a model that its own parts know."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.part, self.act = way, Scaled(), nn.ReLU()
        part = self.part
        self.twin = part if way == "twin" else None
        self.parts = nn.ModuleList([part, part] if way == "list of modules" else [])
        self.plain: Any = {
            "list": [part],
            "bound method": {"scale": part.forward},
            "object": Helper(part),
            "closure": lambda x: x * part.gain,
            "dict": vars(part),
        }.get(way)
        if way == "hook":
            self.act.register_forward_hook(lambda module, args, result: result * part.gain)
        if way == "forward":
            part.forward = lambda x: x * part.gain  # type: ignore[method-assign,assignment]

    def forward(self, x: Tensor) -> Tensor:
        other: dict[str, Callable[[Tensor], Tensor]] = {
            "twin": lambda x: self.twin(x),  # type: ignore[misc]
            "list of modules": lambda x: self.parts[1](self.parts[0](x)),
            "list": lambda x: self.plain[0](x),
            "bound method": lambda x: self.plain["scale"](x),
            "object": lambda x: self.plain(x),
            "closure": lambda x: self.plain(x),
            "dict": lambda x: x * self.plain["gain"],
            "hook": self.act,
            "forward": lambda x: x * self.part.gain,
        }
        return self.part(x) + other[self.way](x)


class Helper:
    """An object that knows a module."""

    def __init__(self, module: Scaled) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.module.gain


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "way", ["twin", "list of modules", "list", "bound method", "object", "closure", "dict", "hook", "forward"]
)
def test_a_number_that_is_read_by_two_paths_is_never_a_constant_on_one(way: str) -> None:
    model, x = Reached(way), torch.randn(3, 4)
    compiled = fxround.compile(model, "reproducible", seed=3)
    for value in (1.0, 2.0, 3.0, 4.0, 2.0):
        model.part.gain = value
        _assert_constants(model, compiled, x, differentiated=False)
