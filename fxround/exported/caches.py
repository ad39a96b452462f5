"""Exported programs of models that take a cache of keys and values.

``Cached`` is a model with tuples of tensors in place of its caches, among its arguments and its results, so that a
graph can hold it. A loaded program takes the caches themselves: it gives their tensors to the graph, changes them as
the model would, and returns them where the model does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.capture.caches import CacheLayer, cache_of, is_cache, layers_of, put, require_layers, tensors_of
from fxround.errors import type_of
from fxround.python_model.functions import Method


@dataclass(frozen=True)
class CacheArgument:
    """A cache among the arguments: its position or name, its layers, and whether it is a ``DynamicCache``."""

    place: int | str
    layers: tuple[CacheLayer, ...]
    dynamic: bool

    def __post_init__(self) -> None:
        """Raise ValueError for a position below zero, or no layers."""
        if (isinstance(self.place, int) and self.place < 0) or not self.layers:
            raise ValueError(f"argument {self.place} is a cache of {len(self.layers)} layers; expected 0 and 1 or more")


def caches_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CacheArgument, ...]:
    """Return the caches that are arguments. Raises TypeError for one that no program can take."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    caches = [(place, cache) for place, cache in places if is_cache(cache)]
    return tuple(CacheArgument(p, layers_of(cache), type(cache).__name__ == "DynamicCache") for p, cache in caches)


def with_tensors(caches: Sequence[CacheArgument], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments with tensors in place of the caches."""
    return _changed(caches, args, kwargs, lambda _, cache: tensors_of(cache))


class Cached(Method):
    """A model with tuples of tensors in place of its caches; it returns the model's result and those tensors.

    In the result, ``_mark(k)`` stands for the model's cache number k.
    """

    caches: tuple[CacheArgument, ...]

    def __init__(self, source: nn.Module, caches: Sequence[CacheArgument]) -> None:
        super().__init__(source.__call__)
        self.__dict__["caches"] = tuple(caches)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make the caches of the tensors, call the model, and return its result and the tensors of the caches."""
        made: list[Any] = []

        def put_together(argument: CacheArgument, tensors: Any) -> Any:
            made.append(cache_of(tensors, argument.layers, argument.dynamic))
            return made[-1]

        args, kwargs = _changed(self.caches, args, kwargs, put_together)
        result = self.function(*args, **kwargs)
        for k, cache in enumerate(made):
            result = _replaced(result, partial(operator.is_, cache), _mark(k))
        return result, tuple(tensors_of(cache) for cache in made)

    def lengths(self, args: Any, kwargs: Any) -> set[tuple[int, int]]:
        """Return (leaf, dimension) of the positions of growing layers, which differ from call to call."""
        growing: list[Tensor] = []

        def noted(argument: CacheArgument, tensors: Any) -> Any:
            growing.extend(
                t for (*layer,), row in zip(tensors, argument.layers, strict=True) if not row.room for t in layer
            )
            return tensors

        _changed(self.caches, args, kwargs, noted)
        leaves = pytree.tree_leaves((args, kwargs))
        return {(i, 2) for i, leaf in enumerate(leaves) if any(leaf is tensor for tensor in growing)}


def given(caches: Sequence[CacheArgument], args: Any, kwargs: Any) -> tuple[Any, Any, list[Any]]:
    """Return a call's arguments with tensors in place of its caches, and the caches.

    An empty cache gets the layers of the example. Raises TypeError if an argument is no cache where the example had
    one, and ValueError for a cache of other layers.
    """
    texts = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), torch.zeros(1))
    filled: list[Any] = []

    def taken(argument: CacheArgument, cache: Any) -> Any:
        if not is_cache(cache):
            raise TypeError(f"argument {argument.place!r} is {type_of(cache)}; the program was exported with a cache")
        require_layers(cache, argument.layers, texts.shape[0], texts.device)
        filled.append(cache)
        return tensors_of(cache)

    return *_changed(caches, args, kwargs, taken), filled


def returned(result: Any, caches: Sequence[Any]) -> Any:
    """Change the caches by what a program of ``Cached`` returned; return the model's own result."""
    result, tensors = result
    for k, (cache, own) in enumerate(zip(caches, tensors, strict=True)):
        put(cache, own)
        result = _replaced(result, partial(_is_mark, k), cache)
    return result


def _mark(k: int) -> tuple[Any, ...]:
    """Return what has no tensors and occurs in no result by chance: k + 1 empty tuples."""
    return ((),) * (k + 1)


def _is_mark(k: int, value: Any) -> bool:
    return type(value) in (tuple, list) and len(value) == k + 1 and all(type(v) is tuple and not v for v in value)


def _changed(
    caches: Sequence[CacheArgument], args: Any, kwargs: Any, change: Callable[[CacheArgument, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with ``change(argument, value)`` in place of each cache's value."""
    args, kwargs = list(args), dict(kwargs)
    for argument in caches:
        own: Any = args if isinstance(argument.place, int) else kwargs
        try:
            own[argument.place] = change(argument, own[argument.place])
        except LookupError:
            raise TypeError(f"argument {argument.place!r} is missing; the program was exported with a cache") from None
    return tuple(args), kwargs


def _replaced(result: Any, wanted: Callable[[Any], bool], new: Any) -> Any:
    """Return a result with ``new`` in place of those of its own values that are wanted."""
    if type(result) in (tuple, list):
        return type(result)(new if wanted(value) else value for value in result)
    if isinstance(result, Mapping):
        changed = {name: new if wanted(value) else value for name, value in result.items()}
        return changed if type(result) is dict else type(result)(**changed)  # transformers' outputs
    return new if wanted(result) else result
