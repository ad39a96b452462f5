"""Scalars of NumPy are numbers to PyTorch: they leave the dtype of a result as it is."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.capture.numpy_numbers import numpy_numbers
from fxround.errors import CaptureError

X = torch.arange(4.0) + 1
SCALE = np.float64(0.5)


def _require_same(function: Callable[[Tensor], Any], x: Tensor = X) -> None:
    computed, expected = fxround.compile(function, "reproducible")(x), function(x)
    assert computed.dtype == expected.dtype
    # Every factor is a power of two, or the operation is one correctly rounded product or quotient.
    assert torch.equal(computed, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() / np.sqrt(4),
        lambda x: x.sum() * np.float64(0.1),
        lambda x: np.float64(0.1) * x.sum(),
        lambda x: x.half().sum() * np.float32(0.5),
        lambda x: x.int() * np.float64(0.1),
        lambda x: x.int() * np.int64(3),
        lambda x: x.sum() * SCALE,
        lambda x: x.sum() * (np.float64(-4) / 2),
        lambda x: x.sum() / np.sqrt(x.shape[0]),
        lambda x: x / np.sqrt(4),
        lambda x: x.sum() * (2 if isinstance(np.float64(1.0), np.floating) else 3),
    ],
)
def test_dtype_is_that_of_the_tensor(function: Callable[[Tensor], Tensor]) -> None:
    _require_same(function)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1

    def forward(self, x: Tensor) -> Any:
        return x.sum() * self.scale


class _Counted(_Scaled):
    """Changes Python state: a call goes through torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.calls.append(x.shape[0])
        return super().forward(x)


@pytest.mark.parametrize("kind", [_Scaled, _Counted])
def test_attribute_is_read_in_every_call(kind: type[_Scaled]) -> None:
    model = kind()
    compiled = fxround.compile(model, "reproducible")
    for scale in (np.float64(0.5), np.float64(0.25), np.float32(0.0), np.float32(-0.0), np.int64(3), 2.0):
        model.scale = scale
        computed, expected = compiled(X), model(X)
        assert computed.dtype == expected.dtype
        assert torch.equal(computed.view(torch.int32), expected.view(torch.int32))


def test_number_that_numpy_computes_from_an_array_is_refused() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x.mean() * np.array([1.0, 2.0]).mean()

    for function in (lambda x: x.mean() * np.array([1.0, 2.0]).mean(), counted):
        with pytest.raises(CaptureError, match="NumPy computes a number"):
            fxround.compile(function, "reproducible")(X)


class _Attributes(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first * self.second)


def test_arithmetic_of_scalars_in_the_forward_is_refused_with_its_line_or_computed_by_numpy() -> None:
    model = _Attributes(np.float32(0.1), np.float32(3))
    compiled = fxround.compile(model, "reproducible")
    if torch.__version__ < "2.13":  # Dynamo computes it there, by the scalars' own operators
        for model.first in (np.float32(0.1), np.float32(0.2)):
            assert torch.equal(compiled(X.double()), model(X.double()))
        return
    with pytest.raises(CaptureError) as error:
        compiled(X)
    text = str(error.value)
    assert "x * (self.first * self.second)" in text and "NumPy computes float32 * float32" in text
    assert "in __init__" in text and "compiled region" not in text


def _result_or_refusal(compiled: Any, x: Tensor) -> Any:
    try:
        return compiled(x)
    except CaptureError as error:
        return error


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "number",
    [
        lambda size: size * np.float32(0.1),
        lambda size: np.int8(100) * size,
        lambda size: size / np.float32(3),
        lambda size: size ** np.float32(3.1),
        lambda size: size << np.int8(7),
        lambda size: math.prod([size, np.float32(0.1)]),
        lambda size: sum([size, np.float32(0.1)]),
        lambda size: size + np.float64(0.1),
        lambda size: 2 if size == np.float32(5) else 3,
        lambda size: 2 if size <= np.int64(5) else 3,
        lambda size: 2 if size in (np.int64(5), np.int8(7)) else 3,
    ],
)
def test_arithmetic_of_a_size_is_numpys_or_refused(number: Callable[[Any], Any]) -> None:
    # NumPy computes in the scalar's dtype, where a size has no digits to spare.
    compiled, computed = fxround.compile(lambda x: x * number(x.shape[0]), "reproducible"), 0
    for size in (3, 5, 7):
        x = torch.arange(float(size), dtype=torch.float64)
        result = _result_or_refusal(compiled, x)
        if isinstance(result, CaptureError):
            assert "NumPy computes" in str(result) and "in __init__" in str(result)
            continue
        assert torch.equal(result, x * number(size))
        computed += 1
    assert computed in (0, 3)


class _Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doubles: Any = np.bool_(True)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.doubles else x * 3


class _CountedChoice(_Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [_Chosen, _CountedChoice])
def test_a_truth_value_of_numpy_is_a_bool_and_is_read_in_every_call(kind: type[_Chosen]) -> None:
    model = kind()
    compiled = fxround.compile(model, "reproducible")
    for value in (np.bool_(True), np.bool_(False), True, np.False_):
        model.doubles = value
        assert torch.equal(compiled(X), model(X))
    compiled(X)
    assert len(compiled.captures()) <= 4


def test_other_traces_of_torch_compile_take_scalars_of_numpy_as_before() -> None:
    from torch._dynamo.utils import common_constant_types

    before = common_constant_types.copy()
    model = _Counted()
    model.scale = np.float64(0.5)
    fxround.compile(model, "reproducible")(X)
    assert common_constant_types == before
    assert torch.compile(lambda x: x.sum() * SCALE, backend="eager")(X).dtype == torch.float64  # Dynamo's own answer
    with numpy_numbers():
        assert common_constant_types == before


class _WithArray(nn.Module):
    def __init__(self, use: Callable[[Tensor, Any], Any], counting: bool) -> None:
        super().__init__()
        self.use, self.counting, self.calls, self.array = use, counting, 0, np.array([1.0, 2.0, 4.0, 8.0])

    def forward(self, x: Tensor) -> Any:
        if self.counting:
            self.calls += 1
        return self.use(x, self.array)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
def test_an_array_meets_a_tensor_where_it_does_in_python() -> None:
    """NumPy refuses a tensor that requires gradients, and PyTorch's functions refuse an array."""

    def refused(use: Callable[[Tensor, Any], Any], x: Tensor, counting: bool = False) -> None:
        with pytest.raises((CaptureError, RuntimeError, TypeError)):
            fxround.compile(_WithArray(use, counting), "reproducible")(x)

    wanted = X.clone().requires_grad_()
    of_numpy: list[Callable[[Tensor, Any], Any]] = [lambda x, a: x * a, lambda x, a: np.add(x, a)]
    never: list[Callable[[Tensor, Any], Any]] = [
        *(lambda x, a: a - x, lambda x, a: torch.mul(x, a), lambda x, a: x.mul(a), lambda x, a: x * (x > a))
    ]
    refused(of_numpy[0], wanted, counting=True)
    refused(never[0], X, counting=True)
    for use in of_numpy:
        refused(use, wanted)
    for use in never:
        refused(use, X)
    for allowed in (of_numpy[0], lambda x, a: x * torch.from_numpy(a), lambda x, a: x[a.astype(np.int64) // 4]):
        # Products of small integers are exact.
        model = _WithArray(allowed, counting=False)
        assert torch.equal(fxround.compile(model, "reproducible")(X), model(X))


def test_the_refusal_of_an_array_names_the_line_and_the_remedy() -> None:
    model = _WithArray(lambda x, a: x * a, counting=True)
    with pytest.raises(CaptureError, match=r"mul.*test_numpy_numbers\.py.*requires gradients.*torch\.from_numpy"):
        fxround.compile(model, "reproducible")(X.clone().requires_grad_())


def test_an_array_of_a_module_has_its_name_in_a_refusal() -> None:
    model = nn.Sequential(_WithArray(lambda x, a: x * torch.from_numpy(a), counting=False))
    for study in (fxround.variability, fxround.attribute):
        with pytest.raises(CaptureError, match=r"relies on (self|input)?\S*\.array \(") as refused:
            study(model, X)
        assert "from_numpy" not in str(refused.value).splitlines()[1]
