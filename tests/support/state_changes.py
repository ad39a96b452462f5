"""Changes of Python state that a model reads: kinds of values, the places that hold them, and changes of other kinds.

``state_verdicts.py`` judges them.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

X = torch.linspace(-1, 2, 12).reshape(3, 4)
# A model, and the function that changes what it reads.
Case = tuple[Any, Callable[[], object]]


class Kind(Enum):
    ONE = 1
    TWO = 2


@dataclass
class Record:
    factor: float = 2.0


def apply(value: Any, x: Tensor) -> Tensor:
    """Return a tensor that depends on a value and its type."""
    result: Tensor
    if isinstance(value, bool):
        result = x * (3 if value else 5)
    elif isinstance(value, int | float):
        result = x * value
    elif value is None:
        result = x * 7
    elif isinstance(value, complex):
        result = x * value.real + value.imag * x + (x if str(value).startswith(("(-0", "-0")) else 0)
    elif isinstance(value, str | bytes | range):
        result = x * (9 if value == "b" else len(value))
    elif isinstance(value, Kind):
        result = x * value.value
    elif isinstance(value, torch.dtype):
        result = x.to(value).float() + (1 if value == torch.float16 else 0)
    elif isinstance(value, torch.device):
        result = x * (2 if value.type == "cpu" else 3)
    elif isinstance(value, torch.memory_format):
        result = x * (2 if value == torch.contiguous_format else 3)
    elif isinstance(value, type):
        result = x * (2 if value is int else 3)
    elif isinstance(value, SimpleNamespace | Record):
        result = x * value.factor
    elif isinstance(value, torch.Size):
        result = x * value[0]
    else:
        result = value(x)
    return result


VALUES: dict[str, tuple[Any, Any]] = {
    "float": (2.0, 3.0),
    "int": (2, 3),
    "flag": (True, False),
    "minus zero": (0.0, -0.0),
    "none": (None, 2.0),
    "complex": (1 + 2j, 2 + 3j),
    "complex minus zero": (0j, complex(-0.0, 0)),
    "text": ("a", "b"),
    "bytes": (b"a", b"aa"),
    "enum": (Kind.ONE, Kind.TWO),
    "dtype": (torch.float16, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "memory format": (torch.contiguous_format, torch.channels_last),
    "class": (int, float),
    "function of torch": (torch.relu, torch.tanh),
    "function of functional": (F.relu, F.silu),
    "method of Tensor": (Tensor.relu, Tensor.tanh),
    "operator": (torch.ops.aten.relu.default, torch.ops.aten.tanh.default),
    "partial": (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0)),
    "namespace": (SimpleNamespace(factor=2.0), SimpleNamespace(factor=3.0)),
    "dataclass": (Record(2.0), Record(3.0)),
    "size": (torch.Size([2]), torch.Size([3])),
    "lambda": (lambda x: x * 2, lambda x: x * 3),
    "int of the same number": (2.5, 2),
    "infinity": (float("inf"), 1.0),
}


class Reading(nn.Module):
    """A model that applies a function to an object and its own linear layer's result."""

    def __init__(self, held: Any, use: Callable[[Any, Tensor], Tensor] = apply) -> None:
        super().__init__()
        self.held, self.use, self.fc = held, use, nn.Linear(4, 4)
        nn.init.eye_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.held, self.fc(x))


def _held(
    make: Callable[[Any], Any], use: Callable[[Any, Tensor], Tensor], change: Callable[[Any, Any], object]
) -> Any:
    """Return the place that an attribute of the model is, or holds."""

    def case(a: Any, b: Any) -> Case:
        model = Reading(make(a), use)
        return model, lambda: change(model.held, b)

    return case


def _attribute(a: Any, b: Any) -> Case:
    model = Reading(a)
    return model, lambda: setattr(model, "held", b)


def _proxy(a: Any, b: Any) -> Case:
    inside = {"k": a}
    return Reading(MappingProxyType(inside), lambda v, x: apply(v["k"], x)), lambda: inside.update(k=b)


def _of_class(a: Any, b: Any) -> Case:
    def plain(value: Any) -> Any:
        return staticmethod(value) if callable(value) and not isinstance(value, type) else value

    names = {"q": plain(a), "forward": lambda self, x: apply(self.q, x)}
    cls = type("Model", (nn.Module,), names)
    return cls(), lambda: setattr(cls, "q", plain(b))


def _global(a: Any, b: Any) -> Case:
    names: dict[str, Any] = {"nn": nn, "apply": apply, "V": a}
    exec("class Model(nn.Module):\n    def forward(self, x): return apply(V, x)", names)
    return names["Model"](), lambda: names.update(V=b)


def _closure(a: Any, b: Any) -> Case:
    value = a

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return apply(value, x)

    def change() -> None:
        nonlocal value
        value = b

    return Model(), change


def _hook(a: Any, b: Any) -> Case:
    inside, model = {"k": a}, nn.Sequential(nn.Identity())
    model[0].register_forward_hook(lambda module, given, result: apply(inside["k"], result))
    return model, lambda: inside.update(k=b)


def _own_hook(a: Any, b: Any) -> Case:
    inside, model = {"k": a}, nn.Sequential(nn.Identity())
    model.register_forward_pre_hook(lambda module, given: apply(inside["k"], given[0]))
    return model, lambda: inside.update(k=b)


def _of_tensor(a: Any, b: Any) -> Case:
    model: Any = Reading(0, lambda _, x: x)
    model.use = lambda _, x: apply(model.fc.weight.mark, x)
    model.fc.weight.mark = a
    return model, lambda: setattr(model.fc.weight, "mark", b)


def _default(a: Any, b: Any) -> Case:
    class Model(nn.Module):
        def forward(self, x: Tensor, value: Any = a) -> Tensor:
            return apply(value, x)

    return Model(), lambda: setattr(Model.forward, "__defaults__", (b,))


def _of_module(a: Any, b: Any) -> Case:
    settings: Any = ModuleType("settings_of_a_test")
    settings.q = a
    sys.modules[settings.__name__] = settings
    return Reading(settings, lambda v, x: apply(v.q, x)), lambda: setattr(settings, "q", b)


def _function(a: Any, b: Any) -> Case:
    held = [a]
    return lambda x: apply(held[0], x), lambda: held.__setitem__(0, b)


PLACES: dict[str, Callable[[Any, Any], Case]] = {
    "attribute": _attribute,
    "item of a list": _held(lambda a: [a], lambda v, x: apply(v[0], x), lambda v, b: v.__setitem__(0, b)),
    "item of a dict": _held(lambda a: {"k": a}, lambda v, x: apply(v["k"], x), lambda v, b: v.update(k=b)),
    "nested dict": _held(
        lambda a: {"o": {"k": a}}, lambda v, x: apply(v["o"]["k"], x), lambda v, b: v["o"].update(k=b)
    ),
    "deque": _held(lambda a: collections.deque([a]), lambda v, x: apply(v[0], x), lambda v, b: v.__setitem__(0, b)),
    "mappingproxy": _proxy,
    "object": _held(lambda a: SimpleNamespace(q=[a]), lambda v, x: apply(v.q[0], x), lambda v, b: setattr(v, "q", [b])),
    "key that appears": _held(lambda a: {0: a}, lambda v, x: apply(v.get("k", v[0]), x), lambda v, b: v.update(k=b)),
    "class attribute": _of_class,
    "global": _global,
    "closure": _closure,
    "hook": _hook,
    "hook of the model": _own_hook,
    "attribute of a tensor": _of_tensor,
    "default of an argument": _default,
    "module": _of_module,
    "compiled function": _function,
}


def _class_of(**names: Any) -> Any:
    return type("Model", (nn.Module,), names)


def _set(owner: Any, name: str, value: Any) -> Case:
    model = owner() if isinstance(owner, type) else owner
    return nn.Sequential(model), lambda: setattr(owner, name, value)


def _environment(read: Callable[[], Any]) -> Case:
    os.environ.pop("OF_A_TEST", None)
    return Reading(0, lambda _, x: x * float(read())), lambda: os.environ.update(OF_A_TEST="3")


def _flag(read: Callable[[], bool], change: Callable[[], object]) -> Case:
    return Reading(0, lambda _, x: x * (2 if read() else 3)), change


def _replaced_class() -> Case:
    model = _class_of(forward=lambda self, x: x * 2)()
    return model, lambda: setattr(model, "__class__", _class_of(forward=lambda self, x: x * 3))


def _tied() -> Case:
    model: Any = Reading(0, lambda _, x: x * model.a + x * x * model.b + model.c)
    model.a = model.b = nn.Parameter(torch.ones(4))
    model.c = nn.Parameter(torch.full((4,), 3.0))
    return model, lambda: setattr(model, "b", model.c)


def _wrapped(factor: int) -> Any:
    @functools.wraps(nn.Module.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * factor

    return forward


def _code() -> Case:
    def helper(x: Tensor) -> Tensor:
        return x * 2

    return Reading(0, lambda _, x: helper(x)), lambda: setattr(helper, "__code__", (lambda x: x * 3).__code__)


def _other_tensor(read: Callable[[Tensor], float], new: Tensor) -> Case:
    """Return a model that reads a number, and no more, of a tensor in a list, and the change to another tensor."""
    model = Reading([torch.ones(2, 3)], lambda v, x: x * read(v[0]))
    return model, lambda: model.held.__setitem__(0, new)


def _hooked(hook: Callable[[nn.Module], object]) -> Case:
    """Return a model that applies a layer that it does not register, and the change of the layer's hooks."""
    layer = nn.Linear(4, 4)
    return Reading([layer], lambda v, x: v[0](x)), lambda: hook(layer)


def _laid_out(register: Callable[[Any, Tensor], object], read: Callable[[Any, Tensor], Tensor]) -> Case:
    """Return a model that reads the layout of a tensor of its own, and the change to a transposed one."""
    model: Any = Reading(0, lambda _, x: read(model.w, x))
    register(model, torch.arange(16.0).view(4, 4))
    return model, lambda: setattr(model.w, "data", model.w.detach().T.contiguous().T)


def _parameter(model: Any, w: Tensor) -> None:
    model.w = nn.Parameter(w)


def _buffer(model: Any, w: Tensor) -> None:
    model.register_buffer("w", w)


def _plain(model: Any, w: Tensor) -> None:
    model.w = w


def _is_row_major(w: Tensor, x: Tensor) -> Tensor:
    return x * (2 if w.is_contiguous() else 3)


def _channels_last() -> Case:
    model: Any = Reading(0, lambda _, x: x * (2 if model.conv.weight.is_contiguous() else 3))
    model.conv = nn.Conv2d(2, 3, 2)
    return model, lambda: model.to(memory_format=torch.channels_last)


def _inherited(depth: int) -> Case:
    """Return a model that reads an attribute of a base class, and the change that gives a class before it its own."""

    class First:
        factor = 2.0

    class Second(First):
        pass

    class Third(Second):
        pass

    return Reading(Third(), lambda v, x: x * v.factor), lambda: setattr(Third.__mro__[depth], "factor", 3.0)


def _inherited_by_the_model() -> Case:
    base = _class_of(q=2.0, forward=lambda self, x: x * self.q)
    cls = type("Derived", (base,), {})
    return cls(), lambda: setattr(cls, "q", 3.0)


def _inherited_by_super() -> Case:
    class First(nn.Module):
        q = 2.0

    class Second(First):
        pass

    class Third(Second):
        q = 5.0

        def forward(self, x: Tensor) -> Tensor:
            return x * super().q

    return Third(), lambda: setattr(Second, "q", 3.0)


def _served() -> Case:
    """Return a model that reads a name which ``__getattr__`` serves, and the change that sets it."""
    held = type("Serving", (), {"__getattr__": lambda self, name: 2.0})()
    return Reading(held, lambda v, x: x * v.factor), lambda: setattr(held, "factor", 3.0)


def _in_front(use: Callable[[Any, Tensor], Tensor]) -> Case:
    """Return a model that reads a ChainMap, and the change that gives its first dict a key of the second."""
    model = Reading(collections.ChainMap({"a": 1.0}, {"b": 2.0}), use)
    return model, lambda: model.held.maps[0].update(b=3.0, c=4.0)


def _parameter_no_more() -> Case:
    model: Any = Reading(0, lambda _, x: x * model.a * (2 if isinstance(model.a, nn.Parameter) else 3))
    model.a = model.b = nn.Parameter(torch.ones(4))

    def change() -> None:
        del model.a
        model.a = torch.ones(4)

    return model, change


def _made_one(make: Callable[[], Any], is_one: Callable[[Any, Any], bool] = operator.is_) -> Case:
    """Return a model that asks whether two objects are one, and the change that makes them one."""
    model = Reading([make(), make()], lambda v, x: x * (2 if is_one(*v) else 3))
    return model, lambda: model.held.__setitem__(1, model.held[0])


def _made_two(make: Callable[[], Any]) -> Case:
    one = make()
    model = Reading([one, one], lambda v, x: x * (2 if v[0] is v[1] else 3))
    return model, lambda: model.held.__setitem__(1, make())


def _reordered(use: Callable[[Any, Tensor], Tensor]) -> Case:
    model = Reading(collections.OrderedDict(a=2.0, b=3.0), use)
    return model, lambda: model.held.move_to_end("a")


OTHERS: dict[str, Callable[[], Case]] = {
    "objects become one": lambda: _made_one(SimpleNamespace),
    "objects become one, by ==": lambda: _made_one(object, operator.eq),
    "lists become one": lambda: _made_one(lambda: [1.0]),
    "dicts become one": lambda: _made_one(lambda: {"a": 1.0}),
    "tensors become one": lambda: _made_one(lambda: torch.ones(4)),
    "a list becomes two": lambda: _made_two(lambda: [1.0]),
    "an object becomes two": lambda: _made_two(object),
    "order of an OrderedDict": lambda: _reordered(lambda v, x: functools.reduce(lambda y, k: y * v[k] + 1, v, x)),
    "order of the items of an OrderedDict": lambda: _reordered(lambda v, x: x * next(iter(v.items()))[1]),
    "rows of a tensor": lambda: _other_tensor(len, torch.ones(5, 3)),
    "shape of a tensor": lambda: _other_tensor(lambda t: t.shape[1], torch.ones(2, 4)),
    "numbers of a tensor": lambda: _other_tensor(lambda t: t.numel(), torch.ones(2, 4)),
    "rank of a tensor": lambda: _other_tensor(lambda t: t.dim(), torch.ones(2, 3, 1)),
    "stride of a tensor": lambda: _other_tensor(lambda t: t.stride(0), torch.ones(3, 2).T),
    "order of a tensor": lambda: _other_tensor(lambda t: 2 + t.is_contiguous(), torch.ones(3, 2).T),
    "dtype of a tensor": lambda: _other_tensor(
        lambda t: 2 + t.is_floating_point(), torch.ones(2, 3, dtype=torch.int32)
    ),
    "requires_grad of a tensor": lambda: _other_tensor(
        lambda t: 2 + t.requires_grad, torch.ones(2, 3).requires_grad_()
    ),
    "type of a tensor": lambda: _other_tensor(
        lambda t: 2 + isinstance(t, nn.Parameter), nn.Parameter(torch.ones(2, 3))
    ),
    "hook of a layer outside": lambda: _hooked(lambda m: m.register_forward_hook(lambda m, x, y: y * 2)),
    "hook before a layer outside": lambda: _hooked(lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] * 2,))),
    "hook with keywords of a layer outside": lambda: _hooked(
        lambda m: m.register_forward_hook(lambda m, x, named, y: y * 2, with_kwargs=True)
    ),
    "order of a parameter": lambda: _laid_out(_parameter, _is_row_major),
    "order of a buffer": lambda: _laid_out(_buffer, _is_row_major),
    "order of an attribute": lambda: _laid_out(_plain, _is_row_major),
    "stride of a view of a parameter": lambda: _laid_out(_parameter, lambda w, x: x * w.T.stride(0)),
    "memory of an attribute": lambda: _laid_out(_plain, lambda w, x: x * w.as_strided((4,), (1,))),
    "channels last": _channels_last,
    "attribute of a class before its base": lambda: _inherited(0),
    "attribute of a base before its base": lambda: _inherited(1),
    "attribute of the model's class before its base": _inherited_by_the_model,
    "attribute by super": _inherited_by_super,
    "name that __getattr__ serves": _served,
    "key of a ChainMap": lambda: _in_front(lambda v, x: x * v["b"]),
    "length of a ChainMap": lambda: _in_front(lambda v, x: x * len(v)),
    "parameter under one of two names": _parameter_no_more,
    "forward of a class": lambda: _set(_class_of(forward=lambda self, x: x * 2), "forward", lambda self, x: x * 3),
    "forward of a layer": lambda: _set(nn.ReLU(), "forward", lambda x: x * 5),
    "forward in a wrapper": lambda: _set(_class_of(forward=_wrapped(2)), "forward", _wrapped(3)),
    "forward of the model": lambda: (lambda m: (m, lambda: setattr(m, "forward", lambda x: x * 5)))(Reading(2.0)),
    "method of a class": lambda: _set(
        _class_of(forward=lambda self, x: self.h(x), h=lambda self, x: x * 2), "h", lambda self, x: x * 3
    ),
    "property of a class": lambda: _set(
        _class_of(forward=lambda self, x: x * self.h, h=property(lambda self: 2)), "h", property(lambda self: 3)
    ),
    "class of the model": _replaced_class,
    "code of a function": _code,
    "environment": lambda: _environment(lambda: os.environ.get("OF_A_TEST", "1")),
    "environment by getenv": lambda: _environment(lambda: os.getenv("OF_A_TEST", "1")),
    "environment by in": lambda: _environment(lambda: "OF_A_TEST" in os.environ),
    "deterministic algorithms": lambda: _flag(
        torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)
    ),
    "default dtype": lambda: _flag(
        lambda: torch.get_default_dtype() == torch.float32, lambda: torch.set_default_dtype(torch.float64)
    ),
    "TF32": lambda: _flag(
        lambda: torch.backends.cuda.matmul.allow_tf32, lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    ),
    "grad mode": lambda: _flag(torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "tied parameters": _tied,
}


def undo() -> None:
    """Set what changes of the process have changed."""
    os.environ.pop("OF_A_TEST", None)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(True)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results have one dtype and the same numbers, NaNs and signs of zeros."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*(_bits(t) for t in (a, b)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().nan_to_num(7.5).double().view(torch.int64)


def cases() -> dict[str, Callable[[], Case]]:
    """Return every value in every place, and the other changes."""
    made = {
        f"{value}, {place}": functools.partial(PLACES[place], *VALUES[value])
        for place, value in itertools.product(PLACES, VALUES)
    }
    return made | OTHERS


def drawn(count: int, seed: int) -> dict[str, Callable[[], Case]]:
    """Return values in places, drawn without repetition; every place and every value is among enough of them."""
    chosen = random.Random(seed)
    values, places = (chosen.sample(list(table), len(table)) for table in (VALUES, PLACES))
    pairs = [(values[i % len(values)], places[i % len(places)]) for i in range(count)]
    return {f"{value}, {place}": functools.partial(PLACES[place], *VALUES[value]) for value, place in pairs}
