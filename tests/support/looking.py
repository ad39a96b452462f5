"""What a model is, before and after somebody looks at it: state, gradients, attributes, hooks, random numbers.

``looks`` are the functions that must leave a model as it was. ``changes`` applies one to a model and returns what has
changed. ``python tests/support/looking.py`` tries all of them on every model of the suite.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from layers import LAYERS, All, Together
from models import ZOO, build
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.utils import parametrizations

import fxround
from fxround.errors import FxroundError
from fxround.localization.localize import NothingFails

X: Final = torch.linspace(-1, 2, 12).reshape(3, 4)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque)
Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Counting(nn.Module):
    """Counts in a buffer how often a property is read, by eager calls and by whoever evaluates it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))
        self.register_buffer("reads", torch.zeros(()))

    @property
    def weight(self) -> Tensor:
        self.reads.add_(1)
        return self.factor * 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Averaging(nn.Module):
    """Keeps a moving average of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - self.mean


class Noting(nn.Module):
    """Changes plain attributes in each call: a number, a list, a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.seen, self.last = nn.Linear(4, 4), 0, [0], {"x": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[0] = self.seen[0] + 1
        self.last["x"] = x.detach() * 2
        return self.fc(x)


class InPlace(nn.Module):
    """Changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


def averaged() -> nn.Module:
    """Return a model whose average is kept beside."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    return torch.optim.swa_utils.AveragedModel(inner, multi_avg_fn=average)


# Models in training mode whose calls change them.
CHANGING: Final[dict[str, Callable[[], nn.Module]]] = {
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "counting property": Counting,
    "averaging": Averaging,
    "averaged model": averaged,
    "batch norm and dropout": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()),
}
OTHERS: Final[dict[str, Callable[[], nn.Module]]] = {"attributes": Noting, "in place": InPlace}


def _trained(make: Callable[[], nn.Module]) -> Callable[[], Model]:
    return lambda: (make().train(), (X.clone(),), {})


def _layer(name: str, training: bool) -> Callable[[], Model]:
    def made() -> Model:
        module, args = copy.deepcopy(LAYERS[name])
        return (module.train() if training else module), args, {}

    return made


def _of_zoo(name: str) -> Callable[[], Model]:
    def made() -> Model:
        example = build(name)
        return example.model, example.args, example.kwargs

    return made


def sample() -> dict[str, Callable[[], Model]]:
    """Return what makes models for a quick look: those whose calls change them, and a tenth of the layers, at once."""

    def layers() -> Model:
        parts, arguments = zip(*(copy.deepcopy(LAYERS[name]) for name in list(LAYERS)[4::10]), strict=True)
        return (
            Together(list(parts), [len(args) for args in arguments]),
            tuple(x for args in arguments for x in args),
            {},
        )

    changing = _trained(lambda: All(*(make() for make in CHANGING.values())))
    return {"changing": changing, "layers": layers} | {name: _trained(make) for name, make in OTHERS.items()}


def models() -> dict[str, Callable[[], Model]]:
    """Return what makes each model of the suite with its arguments; layers are in training mode too."""
    found = {name: _trained(make) for name, make in (CHANGING | OTHERS).items()}
    for name, (module, _) in LAYERS.items():
        found[name] = _layer(name, False)
        if any(type(part).__name__.startswith(("BatchNorm", "Dropout", "RReLU")) for part in module.modules()):
            found[f"{name}, training"] = _layer(name, True)
    return found | {name: _of_zoo(name) for name in ZOO}


class Watched(nn.Module):
    """A model with properties, at the root and in a part, that count who reads them; no call does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.part = inner, Peeked()
        self.train(inner.training)

    @property
    def peeked(self) -> int:
        Peeked.count += 1
        return Peeked.count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Peeked(nn.Module):
    """A part that counts how often somebody reads its properties."""

    count = 0

    @property
    def weight(self) -> Tensor:
        Peeked.count += 1
        return torch.ones(())


def _content(value: Any, seen: set[int]) -> Any:
    """Return what a value holds: numbers of tensors, items of containers, attributes of objects."""
    if isinstance(value, Tensor):
        return _of_tensor(value, seen)
    if id(value) in seen or isinstance(value, type | nn.Module) or callable(value):
        return id(value)
    if isinstance(value, _CONTAINERS):
        inner = {*seen, id(value)}
        keys = [(id(key), repr(key)) for key in value] if isinstance(value, dict) else []
        return type(value), id(value), keys, [_content(v, inner) for v in (value.values() if keys else value)]
    if hasattr(value, "__dict__"):
        return id(value), [(k, _content(v, {*seen, id(value)})) for k, v in vars(value).items()]
    return id(value), repr(value)


def _of_tensor(tensor: Tensor, seen: set[int]) -> Any:
    """Return the numbers of a tensor, what it is, and how often it was written."""
    if id(tensor) in seen:
        return id(tensor)
    inner = {*seen, id(tensor)}
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    gradient = tensor.grad if tensor.is_leaf else None
    kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.data_ptr(), tensor._version)
    own = [(k, _content(v, inner)) for k, v in vars(tensor).items()] if hasattr(tensor, "__dict__") else []
    return id(tensor), kind, numbers, None if gradient is None else _of_tensor(gradient, inner), own


def _of_class(cls: type) -> list[tuple[str, int]]:
    """Return the attributes of a class, but for what copying and ``torch.compile`` add once in a process."""
    added = ("__slotnames__", "__init__", "__setstate__", "___needs_generation_tag_patch")
    return [(k, id(v)) for k, v in vars(cls).items() if k not in added and k != "count"]


def facts(model: nn.Module, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything of a model, its arguments and the process that a look must leave as it is, by name."""
    for name, module in model.named_modules():
        yield f"class of {name}", (type(module), _of_class(type(module)))
        for key, value in vars(module).items():
            yield f"{name}.{key}", _content(value, set())
    for key, value in model.state_dict().items():
        yield f"{key} of the state", (value.data_ptr(), value.detach().clone().numpy().tobytes())
    for i, leaf in enumerate(pytree.tree_leaves(given)):
        yield f"argument {i}", _content(leaf, set())
    yield "random numbers of torch", torch.get_rng_state().numpy().tobytes()
    yield "random numbers of NumPy", repr(np.random.get_state())
    yield "random numbers of random", random.getstate()
    yield "hooks of all modules", [list(vars(hooks_of_all)[name]) for name in vars(hooks_of_all) if "_hooks" in name]
    yield "grad mode", torch.is_grad_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "threads", torch.get_num_threads()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "fast path", torch.backends.mha.get_fastpath_enabled()
    yield "autocast", torch.is_autocast_enabled("cpu")
    yield "class of modules", _of_class(nn.Module)
    yield "properties that were read", Peeked.count


def _compiled(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return fxround.compile(model, "identity", strict=False)


def _prepare(model: nn.Module, args: Any, kwargs: Any) -> None:
    compiled = _compiled(model, args, kwargs).prepare(*args, **kwargs)
    for look in (compiled.summary, compiled.coverage, compiled.captures, compiled.leaks, compiled.graph_text):
        str(look())
    repr(compiled)
    compiled.state_dict()


def _variability(model: nn.Module, args: Any, kwargs: Any) -> None:
    fxround.variability(model, (args, kwargs), samples=2, capture="layers", metrics=())


def _localize(model: nn.Module, args: Any, kwargs: Any) -> None:
    runs: list[Any] = []

    def unchanged(result: Any) -> bool:
        """Whether a result is the first one, that of the quiet run."""
        runs.append([leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)])
        return len(runs) == 1 or all(map(_equal, runs[0], runs[-1]))

    with contextlib.suppress(NothingFails, ValueError):  # a model without roundings
        fxround.localize(model, (args, kwargs), unchanged, runs=1, limit=1, level="modules")


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a != a) & (b != b)).all())


def _export(model: nn.Module, args: Any, kwargs: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _compiled(model, args, kwargs).export(Path(folder) / "model.pt2", (args, kwargs))


def _perturb(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Enter, look, and leave; a call in the block changes a model in training mode as a call of the model does."""
    with fxround.perturb(model, strict=False) as compiled:
        compiled.prepare(*args, **kwargs)
        if not any(part.training for part in model.modules()):
            model(*args, **kwargs)


def _observe(model: nn.Module, args: Any, kwargs: Any) -> None:
    compiled = _compiled(model, args, kwargs)
    for _ in compiled.observe(*args, **kwargs):
        pass
    compiled.evaluate(*args, **kwargs)


# The looks that a model refuses: what changes Python state has no graph that another program could hold.
REFUSED: Final = {"attributes": ("observe", "perturb", "export", "variability", "localize")}
Look = Callable[[nn.Module, Any, Any], Any]
LOOKS: Final[dict[str, Look]] = {
    "compile": _compiled,
    "prepare": _prepare,
    "observe": _observe,
    "perturb": _perturb,
    "export": _export,
    "variability": _variability,
    "localize": _localize,
}


def changes(make: Callable[[], Model], looks: dict[str, Look] = LOOKS) -> Iterator[tuple[str, list[str], str]]:
    """Yield for each look its name, what it has changed, and why it was refused, if it was."""
    inner, args, kwargs = make()
    model = inner if kwargs else Watched(inner)  # PyTorch exports no **kwargs
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad = torch.full_like(parameter, 0.5)
    for name, look in looks.items():
        before, refusal = dict(facts(model, (args, kwargs))), ""
        try:
            look(model, args, kwargs)
        except FxroundError as error:
            refusal = str(error)
        except Exception as error:  # a fault of the look, which may have changed the model as well
            refusal = f"{type(error).__name__}: {error}"
        after = dict(facts(model, (args, kwargs)))
        named = [key for key in before | after if before.get(key) != after.get(key)]
        yield name, named, refusal


def main() -> None:
    """Try every look on every model, and print what has changed and what was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="these models alone")
    chosen = parser.parse_args()
    began, faults, refused, tried = time.monotonic(), 0, 0, 0
    for name, make in models().items():
        if chosen.only and name not in chosen.only:
            continue
        for look, changed, refusal in changes(make):
            tried += 1
            faults += bool(changed)
            refused += bool(refusal)
            if changed or refusal:
                told = f"changes {', '.join(changed[:8])}" if changed else f"refused: {refusal.splitlines()[0][:120]}"
                print(f"{name}, {look}: {told}", flush=True)
    print(f"{tried} looks, {refused} refused, {faults} faults, {time.monotonic() - began:.0f} s")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
