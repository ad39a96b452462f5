"""What a captured graph depends on beside its arguments and what its guards read, as a key.

The key holds the modules with their training flags, names of state and hooks, the dtypes, shapes and devices of the
state, and autocast. To read all of it takes longer than a small model. A reading therefore keeps the objects that it
found, and is made again only if one of them was replaced or changed. What else a model reads (attributes, globals,
nested objects) is compared for each graph (``capture/guards.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.parameter import is_lazy

from fxround.errors import CaptureError
from fxround.graph.comparing import comparing, versions
from fxround.graph.dtypes import DEVICES
from fxround.python_model.functions import Function, Method, Sharing

# The hooks of a module, by the attributes that hold them.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The attributes of every module on whose content the key depends.
_CONTENTS: Final = ("_parameters", "_buffers", "_modules", *_HOOKS)
_ALL: Final = itemgetter(*_CONTENTS)
_GLOBAL: Final = (
    hooks_of_all._global_forward_hooks,
    hooks_of_all._global_forward_pre_hooks,
    hooks_of_all._global_backward_hooks,
    hooks_of_all._global_backward_pre_hooks,
)
_NO_CAST: Final = (None,) * len(DEVICES)


class StateKeys:
    """The key of one model, or of its submodule at ``path``, which is read again where it has changed."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._latest: _Reading | None = None

    def forget(self) -> None:
        """Hold nothing of the latest reading; the next one reads everything."""
        self._latest = None

    def of(self, model: nn.Module) -> Any:
        """Return the key of a model as it is now."""
        if isinstance(model, Function):
            model.adopt()
        latest = self._latest
        if latest is None or not latest.holds():
            latest = self._latest = _Reading(model.get_submodule(self._path) if self._path else model)
        hooks = tuple(map(tuple, _GLOBAL)) if any(_GLOBAL) else ()
        return latest.modules, latest.state, torch.get_default_dtype(), _autocast(), hooks


def _autocast() -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of autocast by devices; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return _NO_CAST
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in DEVICES)


class _Reading:
    """The modules and the state of a model, with the objects that they were read from.

    The objects are compared by identity, which no other object can have while they are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = tuple(model.modules())
        _refuse_lazy(model)
        # The modules themselves, not their ids: the key keeps them alive, so that no new module takes an old id.
        self.modules = tuple(map(_read, modules))
        self._tensors = tuple({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
        self.state = _described(self._tensors)
        self._unchanged = comparing(self._tensors)
        watched = [vars(owner) for m in modules for owner in _owners(m)]
        self._flags = [(own, *_flag(own)) for own in watched]
        self._chosen = [(own, *_contents(own)) for own in watched]
        inner = [content for _, _, contents in self._chosen for content in contents]
        self._empty = [content for content in inner if not content]
        # An OrderedDict has no number for its order.
        self._ordered = [content for content in inner if content and type(content) is not dict]
        self._whole = [content for content in inner if content]
        self._sizes = list(map(len, self._whole))
        self._names = list(chain.from_iterable(self._whole))
        self._values = list(chain.from_iterable(map(dict.values, self._whole)))
        self._versioned = [*watched, *(content for content in self._whole if type(content) is dict)]
        # Made when nothing has changed since the reading, which says that it is worth its time.
        self._versions: list[int] = []

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        if any(self._empty):
            return False
        now = versions(self._versioned)
        if self._ordered or now != self._versions:
            if not self._is_same():
                return False
            # Read before the comparison: a change of another thread in between has another number.
            self._versions = now
        return self._unchanged(*self._tensors) or self.state == _described(self._tensors)

    def _is_same(self) -> bool:
        """Whether the modules have the flags and the contents that were read."""
        if list(map(len, self._whole)) != self._sizes:
            return False
        try:
            for own, read, contents in self._chosen:
                if not all(map(is_, read(own), contents)):
                    return False
        except KeyError:  # an attribute was deleted
            return False
        for own, name, flag in self._flags:
            if own.get(name) is not flag:
                return False
        names, values = chain.from_iterable(self._whole), chain.from_iterable(map(dict.values, self._whole))
        return all(map(is_, names, self._names)) and all(map(is_, values, self._values))


def _refuse_lazy(model: nn.Module) -> None:
    """Raise CaptureError for a parameter or buffer that gets its shape in the first call of the model itself."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} of {type(model).__name__} has no shape yet; a lazy module takes it from its first call: call "
                "the model itself once, as in model(x), before the compiled module is called or prepared."
            )


def _read(module: nn.Module) -> tuple[Any, ...]:
    """Return a module with its training flag, the names of its state and the numbers of its hooks, unique in a process.

    A tensor that leaves one of two names is state as before: the names tell that the other is no parameter any more.
    """
    own = module.source if isinstance(module, Method) else module
    named = (*own._parameters.items(), *own._buffers.items())
    names = tuple(name for name, tensor in named if tensor is not None)
    return module, own.training, names, *(tuple(getattr(own, hooks, ())) for hooks in _HOOKS)


def _flag(own: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the training flag that a module, or a function's module, has itself."""
    name = "training" if "training" in own else "_training"
    return name, own.get(name)


def _contents(own: Mapping[str, Any]) -> tuple[Callable[[Mapping[str, Any]], tuple[Any, ...]], tuple[Any, ...]]:
    """Return the function that reads what the key depends on, and the objects that it reads."""
    read = _ALL if all(name in own for name in _CONTENTS) else itemgetter(*(n for n in _CONTENTS if n in own))
    return read, read(own)


def _described(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(t.dtype, t.shape, t.requires_grad, t.device) for t in tensors])


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, and the one that it shares its training flag with."""
    yield module
    if isinstance(module, Sharing):
        yield module.source
