"""Compare what a key, compiled guards and stock Dynamo say after a change of what a model may read.

``fxround`` uses a graph again if its key is the same and its guards hold. Dynamo's own guards, of a trace of its own,
are the definition of what a trace depends on. After a change,

- a graph whose results would be other bits must not be used;
- a graph is used if, and only if, the key is the same and the guards hold;
- a graph that stock Dynamo would trace again is used only for a reason of ``DYNAMO_ALONE``;
- a graph that Dynamo would use, and that is right, is captured again only for a reason of ``FOR_NOTHING``.

    python tests/support/state_verdicts.py [--random 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import state_changes
import torch
from state_changes import VALUES, Case, Reading, X
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

import fxround
from fxround.errors import FxroundError

# Why a graph may be used though stock Dynamo traces again, by the case.
DYNAMO_ALONE: Final = {
    "deterministic algorithms that no code reads": "no kernel of fxround depends on it; what reads it is compared",
    "threads": "no bit depends on it; what reads it is compared",
}
# Why a graph may be captured again though it is right and Dynamo would use it, by the case. All are changes of modules,
# which the key compares as a whole, so that the check of a call takes microseconds, and happen once, not in each call.
FOR_NOTHING: Final = {
    "training mode of a layer that does not": "the key has the training flag of every module",
    "training mode of a layer that is not called": "the key has the training flag of every module",
    "binary64 of a layer that is not called": "the key has the dtype of every parameter",
    "a frozen parameter of a layer that is not called": "the key has requires_grad of every parameter",
    "an equal layer": "modules are compared by identity",
    "an equal module": "modules are compared by identity",
    "a layer more": "the key has every module",
    "a buffer more": "the key has every buffer",
    "a hook that does nothing": "hooks are compared by their numbers",
    "a hook of a layer that is not called": "hooks are compared by their numbers",
    "a hook of all modules": "hooks are compared by their numbers",
}


class Layers(nn.Module):
    """A model with layers, one of which has running statistics, and with a part that ``forward`` does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(2, 2)
        nn.init.constant_(self.norm.running_mean, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def _of_layers(change: Callable[[Layers], object]) -> Callable[[], Case]:
    def case() -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = Layers()
        return model, lambda: change(model)

    return case


def nothing(*args: Any) -> None:
    """A hook that does nothing."""


def _twice(module: Any, given: Any, result: Tensor) -> Tensor:
    return result * 2


def _same_layer(model: Layers) -> None:
    model.first = copy.deepcopy(model.first)


def _hook_that_left(model: Layers) -> None:
    model.first.register_forward_hook(nothing).remove()


STATE: dict[str, Callable[[], Case]] = {
    name: _of_layers(change)
    for name, change in {
        "training mode": lambda m: m.train(),
        "training mode of a layer that reads it": lambda m: m.norm.train(),
        "training mode of a layer that does not": lambda m: m.first.train(),
        "training mode of a layer that is not called": lambda m: m.unused.train(),
        "a frozen parameter": lambda m: m.first.weight.requires_grad_(False),
        "numbers of a parameter": lambda m: m.first.weight.data.mul_(2),
        "another parameter of the same shape": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(4, 4))),
        "data of a parameter": lambda m: setattr(m.first.weight, "data", torch.ones(4, 4)),
        "a parameter without gradient": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(4, 4), False)),
        "no bias": lambda m: setattr(m.first, "bias", None),
        "binary64 of a layer that is not called": lambda m: m.unused.double(),
        "a layer of another kind": lambda m: setattr(m, "norm", nn.Tanh()),
        "an equal layer": _same_layer,
        "a layer more": lambda m: m.add_module("more", nn.Linear(2, 2)),
        "a buffer more": lambda m: m.register_buffer("more", torch.zeros(1)),
        "a frozen parameter of a layer that is not called": lambda m: m.unused.weight.requires_grad_(False),
        "an attribute more": lambda m: setattr(m, "more", 3.0),
        "an attribute of a layer": lambda m: setattr(m.norm, "eps", 0.5),
        "an attribute that no code reads": lambda m: setattr(m.first, "in_features", 7),
        "a hook": lambda m: m.first.register_forward_hook(_twice),
        "a hook that does nothing": lambda m: m.first.register_forward_hook(nothing),
        "a hook of a layer that is not called": lambda m: m.unused.register_forward_hook(_twice),
        "a hook that left": _hook_that_left,
        "a hook of gradients": lambda m: m.first.register_full_backward_hook(nothing),
        "a hook of all modules": lambda m: hooks_of_all.register_module_forward_hook(nothing),
        "autocast": lambda m: torch.set_autocast_enabled("cpu", True),
        "default dtype that no code reads": lambda m: torch.set_default_dtype(torch.float64),
        "deterministic algorithms that no code reads": lambda m: torch.use_deterministic_algorithms(True),
        "threads": lambda m: torch.set_num_threads(3 - torch.get_num_threads()),
        "random state": lambda m: torch.manual_seed(3),
    }.items()
}

# How a value is held: made of a value and a neighbour, the value that is read, and what puts another value there.
Holder = tuple[Callable[[Any, Any], Any], Callable[[Any], Any], Callable[[Any, Any], object]]
HOLDERS: dict[str, Holder] = {
    "list": (lambda v, o: [o, v], lambda h: h[1], lambda h, v: h.__setitem__(1, v)),
    "dict": (lambda v, o: {"o": o, "k": v}, lambda h: h["k"], lambda h, v: h.update(k=v)),
    "object": (lambda v, o: SimpleNamespace(o=o, k=v), lambda h: h.k, lambda h, v: setattr(h, "k", v)),
    "deque": (lambda v, o: collections.deque([o, v]), lambda h: h[1], lambda h, v: h.__setitem__(1, v)),
    "found by get": (lambda v, o: {1: v, 2: o}, lambda h: h.get(1, 0), lambda h, v: h.update({1: v})),
    "module": (lambda v, o: _holding(v, o), lambda h: h.k, lambda h, v: setattr(h, "k", v)),
}


def _holding(value: Any, other: Any) -> nn.Module:
    module: Any = nn.Identity()
    module.k, module.o = value, other
    return module


def _neighbour(held: Any) -> None:
    """Change what stands beside the value."""
    if isinstance(held, list | collections.deque):
        held[0] = "changed"
    elif isinstance(held, dict):
        held["o" if "o" in held else 2] = "changed"
    else:
        held.o = "changed"


def _grown(held: Any) -> None:
    """Add something beside the value."""
    if isinstance(held, list | collections.deque):
        held.append("more")
    elif isinstance(held, dict):
        held["more"] = 1
    else:
        held.more = 1


def nested(names: Sequence[str], value: str, change: str, depth: int) -> Case:
    """Return a model that reads a value in nested holders, and a change at a depth of them.

    names: of ``HOLDERS``, the outermost first. change: "another value", "an equal value", "an equal holder", "a
    neighbour", "one more".
    """
    a, b = VALUES[value]
    holders, held = [HOLDERS[name] for name in names], a
    for make, _, _ in reversed(holders):
        held = make(held, "beside")
    reads = [read for _, read, _ in holders]

    def use(outer: Any, x: Tensor) -> Tensor:
        found = outer
        for read in reads:
            found = read(found)
        return state_changes.apply(found, x)

    model = Reading(held, use)

    def at(depth: int) -> Any:
        found = model.held
        for read in reads[:depth]:
            found = read(found)
        return found

    def changed() -> None:
        if change == "another value":
            holders[-1][2](at(len(holders) - 1), b)
        elif change == "an equal value":
            holders[-1][2](at(len(holders) - 1), copy.copy(a))
        elif change == "a neighbour":
            _neighbour(at(depth))
        elif change == "one more":
            _grown(at(depth))
        elif depth == 0:
            model.held = copy.copy(at(0))
        else:
            holders[depth - 1][2](at(depth - 1), copy.copy(at(depth)))

    return model, changed


def drawn(count: int, seed: int) -> dict[str, Callable[[], Case]]:
    """Draw values in nested holders, and changes of them and beside them."""
    chosen, found = random.Random(seed), dict[str, Callable[[], Case]]()
    changes = ("another value", "another value", "an equal value", "an equal holder", "a neighbour", "one more")
    while len(found) < count:
        names = chosen.choices(list(HOLDERS), k=chosen.randint(1, 3))
        value, change, depth = chosen.choice(list(VALUES)), chosen.choice(changes), chosen.randrange(len(names))
        place = f" at {depth}" if change in ("an equal holder", "a neighbour", "one more") else ""
        told = "an equal module" if change == "an equal holder" and names[depth] == "module" else change
        name = f"{value} in {', '.join(names)}: {told}{place}"
        found[name] = functools.partial(nested, names, value, change, depth)
    return found


@dataclass(frozen=True)
class Verdicts:
    """What is said after a change, and what happened.

    key, guards   whether the key is the same, and whether the guards and other comparisons of the graph hold
    dynamo        whether stock Dynamo uses its trace again; None if it cannot trace the model
    used          whether the compiled module used the graph from before
    right         whether the graph from before still has the bits of a new one
    """

    key: bool
    guards: bool
    dynamo: bool | None
    used: bool
    right: bool

    def fault(self, name: str) -> str:
        """Return what is wrong; "" if nothing is."""
        if self.used and not self.right:
            return "a stale graph was used"
        if self.used != (self.key and self.guards):
            return "the graph was used" if self.used else "the graph was not used"
        if self.used and self.dynamo is False and name not in DYNAMO_ALONE:
            return "Dynamo traces again, and the graph was used without a reason in DYNAMO_ALONE"
        if not self.used and self.right and self.dynamo and _change(name) not in FOR_NOTHING:
            return f"captured for nothing ({'guards' if self.key else 'key'}) without a reason in FOR_NOTHING"
        return ""


def _change(name: str) -> str:
    """Return the change of a drawn case, or the name of another one."""
    return name.rpartition(": ")[2].partition(" at ")[0]


class _Traces:
    """Stock Dynamo's traces of a model, counted."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.count = 0
        self.call = torch.compile(model, backend=self._backend, fullgraph=True)

    def _backend(self, graph: Any, args: Any) -> Any:
        self.count += 1
        return graph.forward

    def again(self) -> bool | None:
        """Return whether a call traces; None if it cannot be traced."""
        before = self.count
        try:
            self.call(X)
        except Exception:  # whatever Dynamo, or the model with the changed value, raises
            return None
        return self.count != before


def verdicts_of(make: Callable[[], Case]) -> Verdicts | None:
    """Return what is said after a change; None if the model, or the change, is refused."""
    model, change = make()
    if isinstance(model, nn.Module):
        model.eval()
    threads = torch.get_num_threads()
    compiled: Any = fxround.compile(model, "reproducible", strict=False)
    try:
        compiled(X)
        key, entry = _key(compiled), compiled._called()
        compiled(X)
        if compiled._called() is not entry:
            raise AssertionError(f"an equal call was captured again: {compiled.captures()}")
        traces = _Traces(model)
        traced = (traces.again(), traces.again())
        change()
        same = _key(compiled) == key
        holds = entry.captured.guards.hold((X,), {}) and all(read.is_current() for read in entry.captured.reads)
        again = None if None in traced else traces.again()
        before = _of_graph(entry, compiled.rng)
        after = compiled(X)
        fresh = fxround.compile(model, "reproducible", strict=False)(X)
    except FxroundError:
        return None
    finally:
        state_changes.undo()
        torch.set_num_threads(threads)
        torch.set_autocast_enabled("cpu", False)
        hooks_of_all._global_forward_hooks.clear()
    used = compiled._called() is entry
    if not state_changes.same(after, fresh):
        raise AssertionError(f"wrong: {after} for {fresh}")
    right = before is not None and state_changes.same(before, fresh)
    return Verdicts(same, holds, None if again is None else not again, used, right)


def _key(compiled: Any) -> Any:
    return compiled._captures.key((X,), {}), torch.is_grad_enabled()


def _of_graph(entry: Any, rng: Tensor) -> Tensor | None:
    """Return the result of a graph with the state as it is; None if that no longer fits."""
    try:
        result: Tensor = entry.evaluate([X], rng)
    except Exception:  # a parameter that is gone, or has another shape
        return None
    return result


def cases() -> dict[str, Callable[[], Case]]:
    """Return all changes of ``state_changes`` and those of layers."""
    return state_changes.cases() | STATE


def fault_of(name: str, make: Callable[[], Case]) -> str:
    """Return what is wrong after a change; "" if nothing is, or if the model, or the change, is refused."""
    found = verdicts_of(make)
    return found.fault(name) if found is not None else ""


def judged(made: dict[str, Callable[[], Case]]) -> Iterator[tuple[str, Verdicts | None, str]]:
    """Yield the name, the verdicts and the fault of each case."""
    for name, make in made.items():
        try:
            found = verdicts_of(make)
        except AssertionError as error:
            yield name, None, str(error)
        else:
            yield name, found, found.fault(name) if found is not None else ""


def main() -> None:
    """Print every fault, and how often each combination of verdicts came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=300, help="how many drawn changes (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn changes (0)")
    chosen = parser.parse_args()
    counts, faults = collections.Counter[Verdicts | None](), 0
    for name, verdicts, fault in judged(cases() | drawn(chosen.random, chosen.seed)):
        counts[verdicts] += 1
        faults += bool(fault)
        if fault:
            print(f"{name}: {fault} ({verdicts})", flush=True)
    for verdicts, count in counts.most_common():
        print(f"{count:5} {'refused' if verdicts is None else verdicts}")
    print(f"{counts.total()} changes, {faults} faults")


if __name__ == "__main__":
    main()
