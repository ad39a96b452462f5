"""Inputs: a tensor, arguments, or a DataLoader in; calls of the model out.

What is true here. A ``Call`` is what one forward pass takes, and the target that came with it. A tensor is one
argument, a tuple is the arguments, a mapping the keyword arguments, a tuple and a mapping both; ``batch_size`` splits
them along dimension 0. Any other iterable (a DataLoader) gives one such thing a batch, each read once.

Why it is safe. Whether the last part of a loader's batch is a target is decided by the model's signature, and never
guessed where the batch has the wrong number of parts: that is a TypeError that names both.

    before   for x, y in loader: model(x)
    after    for call in calls(model, loader): model(*call.args, **call.kwargs)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """Arguments of a forward pass, the target beside them (or None), and the position of its first row among all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    offset: int = 0

    @property
    def rows(self) -> int:
        """The size of the first tensor's dimension 0: what the model sees as its batch."""
        tensors = (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return next((t.shape[0] for t in tensors if t.dim()), 1)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def calls(model: nn.Module, inputs: Any, batch_size: int | None = None) -> Iterator[Call]:
    """The calls, in order. Raises TypeError for inputs that the model's forward does not take, ValueError for none."""
    offset = 0
    for call in _calls(model, inputs, batch_size):
        yield Call(call.args, call.kwargs, call.target, offset)
        offset += call.rows
    if offset == 0:
        raise ValueError("inputs hold no batch: there is nothing to run the model on")


def count(inputs: Any, batch_size: int | None = None) -> int | None:
    """How many calls there will be; None where only running tells."""
    whole = _whole(inputs)
    if whole is not None:
        return 1 if batch_size is None else -(-whole.rows // _positive(batch_size))
    return len(inputs) if isinstance(inputs, Sized) else None


def _calls(model: nn.Module, inputs: Any, batch_size: int | None) -> Iterator[Call]:
    whole = _whole(inputs)
    if whole is not None:
        return iter((whole,)) if batch_size is None else _split(whole, batch_size)
    if not isinstance(inputs, Iterable):
        expected = "a tensor, a tuple of arguments, a dict of keywords, or an iterable of batches (a DataLoader)"
        raise TypeError(f"inputs is a {type(inputs).__name__}; expected {expected}")
    if batch_size is not None:
        raise ValueError("batch_size splits tensors; a DataLoader has a batch size of its own: set it there")
    return (_of_batch(model, batch) for batch in inputs)


def _whole(inputs: Any) -> Call | None:
    if isinstance(inputs, Tensor):
        return Call((inputs,))
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs))
    if isinstance(inputs, tuple) and tuple(map(type, inputs)) == (tuple, dict):
        return Call(inputs[0], inputs[1])
    return Call(inputs) if isinstance(inputs, tuple) else None


def _split(call: Call, batch_size: int) -> Iterator[Call]:
    """Rows batch_size at a time: tensors with as many rows as the first are cut, the rest goes to every call."""
    rows = call.rows
    for low in range(0, rows, _positive(batch_size)):
        cut = slice(low, low + batch_size)
        parts = pytree.tree_map_only(Tensor, partial(_cut, rows=rows, part=cut), (call.args, call.kwargs))
        yield Call(*parts)


def _cut(t: Tensor, rows: int, part: slice) -> Tensor:
    return t[part] if t.dim() and t.shape[0] == rows else t


def _positive(batch_size: int) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; expected a whole number of at least 1")
    return batch_size


def _of_batch(model: nn.Module, batch: Any) -> Call:
    """A loader's batch: a tensor, a mapping, or parts of which the last is a target if forward does not take it."""
    if isinstance(batch, Tensor | Mapping):
        found = _whole(batch)
        assert found is not None
        return found
    if not isinstance(batch, list | tuple):
        raise TypeError(f"a batch is a {type(batch).__name__}; expected a tensor, a mapping, or a tuple of tensors")
    parts = tuple(batch)
    if _takes(model, parts):
        return Call(parts)
    if len(parts) > 1 and _takes(model, parts[:-1]):
        return Call(parts[:-1], target=parts[-1])
    raise TypeError(
        f"a batch has {len(parts)} parts, and {type(model).__name__}.forward{inspect.signature(model.forward)} takes "
        "neither all of them nor all but the last (a target): yield tuples of arguments, or dicts of keywords"
    )


def _takes(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError:
        return False
    return True
