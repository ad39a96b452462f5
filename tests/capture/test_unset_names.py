"""A name or a key that a model does not find, and that ``__getattr__`` or another dict serves, may be set later."""

from __future__ import annotations

import collections
import functools
import random
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError

X = torch.arange(1.0, 4.0)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
Use = Callable[[Any, Tensor], Tensor]


class Reading(nn.Module):
    """A model that applies functions to an object and its argument. counting: it changes Python state, too."""

    def __init__(self, held: Any, uses: Sequence[Use], counting: bool = False) -> None:
        super().__init__()
        self.held, self.uses, self.counting, self.calls = held, uses, counting, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.calls += 1
        for use in self.uses:
            x = use(self.held, x)
        return x if self.training else x * 2


def admits(held: Any, use: Use, counting: bool = False) -> bool:
    """Whether a model may read an object in this way. Dynamo refuses some of the ways before torch 2.13."""
    if VERSION >= (2, 13):
        return True
    model = Reading(held, [use], counting)
    try:
        result = fxround.compile(model, "reproducible")(X)
    except CaptureError:
        return False
    assert torch.equal(result, model(X))
    return True


def serve(self: Any, name: str) -> float:
    if name == "factor":
        return 2.0
    raise AttributeError(name)


def raising(self: Any) -> float:
    raise AttributeError("factor")


class Layer(nn.Module):
    """A layer whose weight ``nn.Module.__getattr__`` serves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))


class Delegating:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _made(*bases: type, **names: Any) -> Any:
    """Return an object of a new class, which may get attributes."""
    return type("Serving", bases, {"__getattr__": serve} | names)()


def _python_module() -> ModuleType:
    module = ModuleType("serving")
    exec("def __getattr__(name):\n    if name == 'factor': return 2.0\n    raise AttributeError(name)", vars(module))
    return module


def _metaclass() -> type:
    kind = type("Kind", (type,), {"__getattr__": serve})
    cls: type = kind("Serving", (), {})
    return cls


def on_object(held: Any) -> Any:
    return held


def on_class(held: Any) -> Any:
    return type(held)


def on_base(held: Any) -> Any:
    return type(held).__mro__[1]


# What makes an object whose factor is served, and what says where the factor is set later.
SERVED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (_made, on_object),
    "class": (_made, on_class),
    "base": (lambda: _made(type("Base", (), {})), on_base),
    "slot": (lambda: _made(__slots__=("factor",)), on_object),
    "dict": (lambda: _made(dict), on_object),
    "slot of a dict": (lambda: _made(dict, __slots__=("factor",)), on_object),
    "tuple": (
        lambda: _made(collections.namedtuple("Pair", "a b"), __new__=lambda cls: tuple.__new__(cls, (1, 2))),
        on_object,
    ),
    "local of a thread": (lambda: _made(threading.local), on_object),
    "delegating": (lambda: Delegating(SimpleNamespace(factor=2.0)), on_object),
    "module": (lambda: _made(nn.Module), on_object),
    "class of a module": (lambda: _made(nn.Module), on_class),
    "buffer": (Layer, on_object),
    "class of a buffer": (lambda: type("Served", (Layer,), {})(), on_class),
    "Python module": (_python_module, on_object),
    "metaclass": (_metaclass, on_object),
    "class of a class": (_metaclass, on_class),
}


def served(held: Any, x: Tensor) -> Tensor:
    for each in held:
        x = x * each.factor
    return x


def _set(owner: Any) -> None:
    vars(owner).update(factor=3.0) if isinstance(owner, nn.Module) else setattr(owner, "factor", 3.0)


def _unset(owner: Any) -> None:
    vars(owner).pop("factor") if isinstance(owner, nn.Module) else delattr(owner, "factor")


def test_a_name_that_was_served_may_be_set_later() -> None:
    cases = {case: row for case, row in SERVED.items() if admits([row[0]()], served)}
    assert len(cases) > len(SERVED) // 2
    model = Reading([make() for make, _ in cases.values()], [served])
    compiled: Any = fxround.compile(model, "reproducible")
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
        guards = compiled._called().captured.guards
        for held, (case, (_, owner_of)) in zip(model.held, cases.items(), strict=True):
            assert guards.hold((X,), {}), case
            _set(owner_of(held))
            assert not guards.hold((X,), {}), case
            _unset(owner_of(held))


def test_a_name_is_set_between_calls() -> None:
    """And the report of captures says which."""
    cases = [SERVED[case] for case in ("object", "class", "slot of a dict")]
    for counting in (False, True):
        model = Reading([make() for make, _ in cases], [served], counting)
        compiled = fxround.compile(model, "reproducible")
        for held, (_, owner_of) in [(None, (None, None)), *zip(model.held, cases, strict=True)]:
            if owner_of is not None:
                _set(owner_of(held))
            assert torch.equal(compiled(X), model(X)) and torch.equal(compiled(X), model(X))
        report = str(compiled.captures())
        assert len(compiled.captures().rows) == 4 and (counting or "self.held[0].factor has changed" in report)


def tried(held: Any, x: Tensor) -> Tensor:
    try:
        return x * held.factor
    except AttributeError:
        return x * 7


def gotten(held: Any, x: Tensor) -> Tensor:
    return x * getattr(held, "factor", 5.0)


def asked(held: Any, x: Tensor) -> Tensor:
    return x * (2 if hasattr(held, "factor") else 3)


class Hiding:
    """An object whose ``__getattribute__`` denies an attribute that it has."""

    def __init__(self) -> None:
        self.factor = 11.0

    def __getattribute__(self, name: str) -> Any:
        return raising(self) if name == "factor" else object.__getattribute__(self, name)

    __getattr__ = serve


LACKING: dict[str, Callable[[], Any]] = {
    "slot": lambda: type("Lacking", (), {"__slots__": ("factor",)})(),
    "slot that is served": lambda: _made(__slots__=("factor",)),
    "property": lambda: type("Lacking", (), {"factor": property(raising)})(),
    "property that is served": lambda: _made(factor=property(raising)),
    "hidden": Hiding,
    "Python module": lambda: ModuleType("lacking"),
    "function": lambda: FunctionType(serve.__code__, {}),
    "tensor": lambda: torch.ones(3),
}


@pytest.mark.parametrize("counting", [False, True], ids=["captured", "replayed"])
def test_what_python_serves_or_denies_a_graph_serves_or_denies(counting: bool) -> None:
    """Also where a descriptor or ``__getattribute__`` raises AttributeError."""

    def use(held: Any, x: Tensor) -> Tensor:
        return torch.stack([each(h, x) for h in held for each in (tried, gotten, asked)])

    cases = {case: make for case, make in LACKING.items() if admits([make()], use, counting)}
    assert len(cases) > len(LACKING) // 2
    model = Reading([make() for make in cases.values()], [use], counting)
    compiled = fxround.compile(model, "reproducible")
    for _ in range(2):
        results = zip(compiled(X), model(X), [case for case in cases for _ in range(3)], strict=True)
        assert not [case for a, b, case in results if not torch.equal(a, b)]
        for case, held in zip(cases, model.held, strict=True):
            if "property" not in case:
                held.factor = 1.5


class Missing(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 5.0


def _at(key: str) -> Use:
    return lambda held, x: x * (held[key] + 1)


def _in(key: str) -> Use:
    return lambda held, x: x * (2 if key in held else 4)


def _get(key: str) -> Use:
    return lambda held, x: x * held.get(key, 9.0)


def _try(key: str) -> Use:
    def use(held: Any, x: Tensor) -> Tensor:
        try:
            return x * held[key]
        except KeyError:
            return x * 7

    return use


def _values(held: Any, x: Tensor) -> Tensor:
    for value in held.values():
        x = x * (value + 1) + 1
    return x


def _spread(held: Any, x: Tensor) -> Tensor:
    for key in [*held, "u"]:
        x = x * ord(key) + 1
    return x


KEYS = ("u", "w")
USES_OF_W: list[Use] = [
    *(make("w") for make in (_at, _in, _get, _try)),
    _values,
    _spread,
    lambda held, x: x * (1 + len(held)),
    lambda held, x: x * (1 + len({"w", "z"}.union(held))),
]
USES = [*USES_OF_W, *(make("u") for make in (_at, _in, _get, _try))]
_DEFAULT: Final = functools.partial(defaultdict, float)
DICTS: list[Callable[[dict[str, float]], Any]] = [
    dict,
    Counter,
    OrderedDict,
    UserDict,
    Missing,
    _DEFAULT,
    lambda items: ChainMap({}, items),
    lambda items: ChainMap({"u": 1.0}, OrderedDict(), items),
]


def _changes(held: Any, chosen: random.Random) -> Iterator[None]:
    """Change a dict, or one of a ChainMap, from step to step."""
    while True:
        yield
        key, one = chosen.choice(KEYS), chosen.choice(held.maps) if isinstance(held, ChainMap) else held
        if key in one and chosen.random() < 0.5:
            del one[key]
        else:
            one[key] = chosen.randint(1, 3)


def test_a_key_that_was_not_found_may_appear() -> None:
    """In each kind of dict, by each way to read it, but for a defaultdict, in which a read sets it."""
    kinds = [make for make in DICTS if make is not _DEFAULT]
    helds = [make(items) for make in kinds for items in ({"u": 2}, {}) for _ in USES_OF_W]
    uses = USES_OF_W * (2 * len(kinds))
    cases = [(held, use) for held, use in zip(helds, uses, strict=True) if _finds(held, use) and admits(held, use)]
    assert len(cases) > len(helds) // 2

    def use(held: Any, x: Tensor) -> Tensor:
        for each, read in held:
            x = read(each, x)
        return x

    compiled: Any = fxround.compile(Reading(cases, [use]), "reproducible")
    compiled(X)
    guards = compiled._called().captured.guards
    for number, (held, read) in enumerate(cases):
        before = read(held, X)
        assert guards.hold((X,), {}), number
        held["w"] = 3
        assert torch.equal(read(held, X), before) or not guards.hold((X,), {}), (number, held)
        del held["w"]


def _finds(held: Any, use: Use) -> bool:
    try:
        use(held, X)
    except KeyError:
        return False
    return True


@pytest.mark.part(12)
@pytest.mark.parametrize("seed", range(12))
def test_a_dict_is_read_as_it_is_in_each_call(seed: int) -> None:
    """With and without gradients, for a batch and one item, in training and out of it."""
    chosen = random.Random(seed)
    held = chosen.choice(DICTS)({key: 2 for key in KEYS if chosen.random() < 0.5})
    model = Reading(held, chosen.sample(USES, 2), counting=seed % 2 == 0)
    compiled = fxround.compile(model, "reproducible")
    for _, _ in zip(range(5), _changes(held, chosen), strict=False):
        model.train(chosen.random() < 0.5)
        x = torch.full((chosen.choice((1, 4)), 2), 3.0)
        with torch.set_grad_enabled(chosen.random() < 0.5):
            try:
                expected = model(x)
            except KeyError:
                continue
            try:
                assert torch.equal(compiled(x), expected)
            except CaptureError:  # by Dynamo
                assert VERSION < (2, 13)
                return
