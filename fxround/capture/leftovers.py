"""What PyTorch keeps of a trace after it: removed, so that a model that is dropped takes its traces along.

The symbolic sizes of fake tensors are C++ objects. A cycle of references through them is never collected: a list or a
cache of Python's that holds a fake tensor and is reached from its sizes keeps the whole environment of a trace. A
name in the globals of a model's code stays, too. (The sources of generated code are in ``graph.generated_code``.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxround.graph.values import fake_mode, forget_values

# The graphs to forget at the end of ``computed_once``, by thread.
_LATER: Final = threading.local()


@contextlib.contextmanager
def forgotten_environments() -> Iterator[None]:
    """Forget the fake tensors of the traces in this block, failed ones too; guards on sizes can be made in it alone.

    One thread of the process traces at a time; what another thread makes is left alone.
    """
    made, thread = list[Any](), threading.get_ident()
    begin = ShapeEnv.__init__

    @functools.wraps(begin)
    def noted(environment: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            made.append(environment)
        begin(environment, *args, **kwargs)

    with mock.patch.object(ShapeEnv, "__init__", noted):
        try:
            yield
        finally:
            for environment in made:
                _forget_tensors(environment)
            _clear_caches()


@contextlib.contextmanager
def computed_once() -> Iterator[None]:
    """Keep what is computed with the fake values of graphs until this block ends, for several lowerings of one graph.

    It belongs to one thread. What ``forget_computed`` is asked to forget in the block is forgotten at its end.
    """
    if getattr(_LATER, "graphs", None) is not None:
        yield
        return
    _LATER.graphs = {}
    try:
        yield
    finally:
        graphs, _LATER.graphs = _LATER.graphs, None
        for graph in graphs.values():
            forget_computed(graph)


def forget_computed(graph: fx.GraphModule) -> None:
    """Forget what was computed with the fake values of a graph, which computing with them again gives."""
    later = getattr(_LATER, "graphs", None)
    if later is not None:
        later[id(graph)] = graph
        return
    mode = fake_mode(graph)
    forget_values(mode)
    _forget_results(mode.shape_env)
    _clear_caches()


def forget_export(graph: fx.GraphModule) -> None:
    """Forget the fake tensors of a graph that ``torch.export`` has made; guards on sizes can no longer be made."""
    forget_computed(graph)
    _forget_tensors(fake_mode(graph).shape_env)


def _forget_tensors(environment: Any) -> None:
    if getattr(environment, "tracked_fakes", None):
        environment.tracked_fakes = None
    _forget_results(environment)


def _forget_results(environment: Any) -> None:
    # torch 2.11 to 2.13 have this cache; its entries are computed again when they are missing.
    getattr(environment, "fake_tensor_cache", {}).clear()


def _clear_caches() -> None:
    """Clear the caches of the methods of environments, which hold environments."""
    for method in vars(ShapeEnv).values():
        function = method
        while function is not None and not hasattr(function, "cache_clear"):
            function = getattr(function, "__wrapped__", None)
        if function is not None:
            function.cache_clear()


class Installed:
    """What keeps the names that ``installed_names`` gives it: they are removed when this object is dropped."""


@contextlib.contextmanager
def installed_names(scope: dict[str, Any]) -> Iterator[Installed]:
    """Yield an object that keeps the names that Dynamo puts into the globals of a model's code in this block.

    One thread of the process traces at a time.
    """
    installed, before = Installed(), _builtins_in(scope)
    try:
        yield installed
    finally:
        weakref.finalize(installed, _remove, scope, _builtins_in(scope) - before).atexit = False


def _builtins_in(scope: dict[str, Any]) -> set[str]:
    return {name for name in list(scope) if name.startswith("__builtins_dict__")}


def _remove(scope: dict[str, Any], names: set[str]) -> None:
    for name in names:
        scope.pop(name, None)
