"""What a captured graph depends on beside its arguments, as a key.

The key holds the modules with their plain attributes and hooks, the dtypes, shapes and devices of the state, and
autocast. To read all of it takes longer than a small model. A reading therefore keeps the objects that it found, and is
made again only if one of them was replaced or changed. What a model reads from elsewhere (a global, a nested object) is
compared for each graph (``capture/constants.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.compiler.executable import Function, Sharing
from fxround.compiler.signature import MODULE, baked, constant
from fxround.graph.dtypes import DEVICES

# The attributes of every module on whose content the key depends.
_CONTENTS: Final = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_SCALARS: Final = bool | int | float | str | bytes | None


class StateKeys:
    """The key of one model, or of its submodule at ``path``, which is read again where it has changed."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._latest: _Reading | None = None

    def of(self, model: nn.Module) -> Any:
        """Return the key of a model as it is now."""
        if isinstance(model, Function):
            model.adopt()
        latest = self._latest
        if latest is None or not latest.holds():
            latest = self._latest = _Reading(model.get_submodule(self._path) if self._path else model)
        cast = tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in DEVICES)
        return latest.modules, latest.state, torch.get_default_dtype(), cast


class _Reading:
    """The modules and the state of a model, with the objects that they were read from.

    The objects are compared by identity, which no other object can have while they are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        found = tuple(model.modules())
        # The modules themselves, not their ids: the key keeps them alive, so that no new module takes an old id.
        self.modules = tuple((m, baked(m)) for m in found)
        self._tensors: tuple[Tensor, ...] = (*model.parameters(), *model.buffers())
        self.state = _described(self._tensors)
        watched = [vars(owner) for m in found for owner in _owners(m)]
        self._chosen = [(own, len(own), *_read(own)) for own in watched]
        inner = [own[name] for own in watched for name in _CONTENTS if name in own]
        self._empty = [content for content in inner if not content]
        self._whole = [(content, tuple(content), tuple(content.values())) for content in inner if content]
        plain = [value for own in watched for name, value in own.items() if name not in MODULE]
        self._texts = [(value, constant(value)) for value in plain if _can_change(value)]

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        if any(self._empty):
            return False
        try:
            for own, size, read, values in self._chosen:
                if len(own) != size or not all(map(is_, read(own), values)):
                    return False
        except KeyError:  # an attribute was deleted
            return False
        for content, keys, values in self._whole:
            if len(content) != len(keys) or not (
                all(map(is_, content, keys)) and all(map(is_, content.values(), values))
            ):
                return False
        if self._texts and any(constant(value) != text for value, text in self._texts):
            return False
        return self.state == _described(self._tensors)


def _described(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(t.dtype, t.shape, t.requires_grad, t.device) for t in tensors])


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, and the one that it shares its training flag with."""
    yield module
    if isinstance(module, Sharing):
        yield module.source


def _read(own: Mapping[str, Any]) -> tuple[Callable[[Mapping[str, Any]], tuple[Any, ...]], tuple[Any, ...]]:
    """Return the attributes that the key is made of: the function that reads them, and their values."""
    read = itemgetter(*(name for name in own if name not in MODULE or name in _CONTENTS or name == "training"))
    return read, read(own)


def _can_change(value: Any) -> bool:
    """Whether a value of which the key holds the text can change while it stays the same object."""
    if isinstance(value, tuple | frozenset):
        return not all(isinstance(item, _SCALARS) for item in value)
    return isinstance(value, list | set | dict)
