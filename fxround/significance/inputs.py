"""Inputs: convert a tensor, arguments or a DataLoader into calls of the model.

A ``ModelCall`` holds the arguments of one forward pass and the target that came with them. A tensor is one argument, a
tuple holds positional arguments, a mapping keyword arguments, a tuple and a mapping both; ``batch_size`` splits them
along dimension 0. Any other iterable (a DataLoader) yields one of these per batch and is read once. The signature of
the model decides whether the last part of a loader's batch is a target; a wrong number of parts is a TypeError, and so
is a last part that may be a target or an optional argument. A tuple or a mapping and a tensor are all arguments and
their target if the model does not take both, and a tuple, a dict and a target always are. ``batches`` says it for
batches of any other form, by a function of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.compiler.signature import signature_of
from fxround.errors import shown, type_of
from fxround.short_reprs import Short

# The names that a message lists before "...".
_SHOWN: Final = 8


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a forward pass, their target (or None), and the position of their first row in all inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    offset: int = 0

    @property
    def rows(self) -> int:
        """The size of dimension 0 of the first tensor, which is the batch; 1 if no tensor has dimensions."""
        tensors = (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return next((t.shape[0] for t in tensors if t.dim()), 1)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, repr=False)
class Batches(Short):
    """What ``batches`` returns: data, and the function that takes each of their batches apart."""

    data: Iterable[Any]
    apart: Callable[[Any], Any]

    def _line(self) -> str:
        function = getattr(self.apart, "__qualname__", type(self.apart).__name__)
        return f"{type_of(self.data)} whose batches {function} takes apart"

    def __iter__(self) -> Iterator[ModelCall]:
        return (self._call(batch) for batch in self.data)

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError if the data do not say it."""
        return len(self.data)  # type: ignore[arg-type]

    def _call(self, batch: Any) -> ModelCall:
        parts = self.apart(batch)
        call = _whole(parts[0]) if isinstance(parts, tuple) and len(parts) == 2 else None
        if call is None:
            raise TypeError(
                f"the function of batches returned {_kinds(parts)}; expected (arguments, target): arguments are a "
                "tensor, a tuple, a dict of keywords, or a tuple and a dict, and the target is None if there is none"
            )
        return replace(call, target=parts[1])


def batches(data: Iterable[Any], apart: Callable[[Any], Any]) -> Batches:
    """Say what the arguments of a model are in each batch of some data, and what the target is.

    Args:
        data: an iterable of batches of any form, such as a DataLoader. It is read when it is used.
        apart: a function of a batch that returns (arguments, target). The arguments are a tensor, a tuple of positional
            arguments, a dict of keyword arguments, or a tuple and a dict; the target is None if there is none.

    Returns:
        An iterable that ``variability``, ``compare``, ``tune``, ``calibrate`` and all other functions take as their
        data, as long as ``data``.

    Raises:
        TypeError: for data that cannot be iterated, and for what is no function; later, for what the function returns.

    Example::

        data = fxround.batches(loader, lambda batch: (batch["image"], batch["label"]))
        fxround.variability(model, data, metrics=[fxround.metric("dice", against="target")])
    """
    if isinstance(data, Tensor | Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"data is {type_of(data)}; expected an iterable of batches, such as a DataLoader")
    if not callable(apart):
        raise TypeError(f"apart is {type_of(apart)}; expected a function of a batch that returns (arguments, target)")
    return Batches(data, apart)


def calls(model: nn.Module, inputs: Any, batch_size: int | None = None) -> Iterator[ModelCall]:
    """Yield the calls in order.

    Raises TypeError for inputs that the model's forward does not take, ValueError if there are none.
    """
    offset = 0
    for call in _calls(model, inputs, batch_size):
        yield ModelCall(call.args, call.kwargs, call.target, offset)
        offset += call.rows
    if offset == 0:
        raise ValueError("inputs hold no batch: there is nothing to run the model on")


def count(inputs: Any, batch_size: int | None = None) -> int | None:
    """Return the number of calls; None if it is not known in advance."""
    whole = _whole(inputs)
    if whole is not None:
        return 1 if batch_size is None else -(-whole.rows // positive("batch_size", batch_size))
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except TypeError:
        # A DataLoader has a length only if its data set has one.
        return None


def _calls(model: nn.Module, inputs: Any, batch_size: int | None) -> Iterator[ModelCall]:
    whole = _whole(inputs)
    if whole is not None:
        return iter((whole,)) if batch_size is None else _split(whole, batch_size)
    if not isinstance(inputs, Iterable):
        expected = "a tensor, a tuple of arguments, a dict of keywords, or an iterable of batches (a DataLoader)"
        raise TypeError(f"inputs is {type_of(inputs)}; expected {expected}")
    if batch_size is not None:
        raise ValueError("batch_size splits tensors; a DataLoader has a batch size of its own: set it there")
    return (_of_batch(model, batch) for batch in inputs)


def _whole(inputs: Any) -> ModelCall | None:
    if isinstance(inputs, Tensor):
        return ModelCall((inputs,))
    if isinstance(inputs, Mapping):
        return ModelCall((), dict(inputs))
    if isinstance(inputs, tuple) and tuple(map(type, inputs)) == (tuple, dict):
        return ModelCall(inputs[0], inputs[1])
    return ModelCall(inputs) if isinstance(inputs, tuple) else None


def _split(call: ModelCall, batch_size: int) -> Iterator[ModelCall]:
    """Yield ``batch_size`` rows at a time: tensors with as many rows as the first are cut, others go to every call."""
    rows = call.rows
    for low in range(0, rows, positive("batch_size", batch_size)):
        cut = slice(low, low + batch_size)
        parts = pytree.tree_map_only(Tensor, partial(_cut, rows=rows, part=cut), (call.args, call.kwargs))
        yield ModelCall(*parts)


def _cut(t: Tensor, rows: int, part: slice) -> Tensor:
    return t[part] if t.dim() and t.shape[0] == rows else t


def positive(name: str, number: int) -> int:
    """Return the argument of this name. Raises ValueError unless it is a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} is {shown(number)}; expected a whole number of at least 1")
    return number


def _of_batch(model: nn.Module, batch: Any) -> ModelCall:
    """Return the call of a loader's batch; the last of its parts is a target if forward does not take it."""
    if isinstance(batch, ModelCall):
        return batch
    if isinstance(batch, Tensor):
        return ModelCall((batch,))
    if isinstance(batch, Mapping):
        return _of_mapping(model, batch)
    if not isinstance(batch, list | tuple):
        raise TypeError(f"a batch is {type_of(batch)}; expected a tensor, a mapping, or a tuple of tensors")
    parts = tuple(batch)
    if tuple(map(type, parts[:-1])) in ((tuple, dict), (list, dict)):
        return ModelCall(tuple(parts[0]), parts[1], target=parts[-1])
    if _takes(model, parts):
        _require_needed(model, parts)
        return ModelCall(parts)
    grouped = _grouped(parts)
    if grouped is not None and _takes(model, grouped.args, grouped.kwargs):
        if len(grouped.args) == 1:
            raise TypeError(
                f"a batch of a {type(parts[0]).__name__} of one tensor and a target may mean that tensor or the "
                f"{type(parts[0]).__name__} as the argument: yield ((argument,), {{}}, target)"
            )
        return grouped
    if len(parts) > 1 and _takes(model, parts[:-1]):
        return ModelCall(parts[:-1], target=parts[-1])
    raise TypeError(
        f"a batch has {len(parts)} parts, and {_forward(model)} takes neither all of them nor all but the last (a "
        "target): yield tuples of arguments, or dicts of keywords, or say what is what: fxround.batches(loader, lambda "
        "batch: (arguments, target))"
    )


def _of_mapping(model: nn.Module, batch: Mapping[str, Any]) -> ModelCall:
    """Return the call of keywords. Raises TypeError if forward does not take them."""
    if not _takes(model, (), batch):
        names = [name for name, value in batch.items() if isinstance(value, Tensor)]
        target = f"batch[{names[1]!r}]" if len(names) > 1 else None
        raise TypeError(
            f"a batch is a {type(batch).__name__} with {_listed(batch)}, and {_forward(model)} does not take these "
            "keywords: say what its arguments are, and the target, such as fxround.batches(loader, lambda batch: "
            f"(batch[{(names or list(batch) or ['image'])[0]!r}], {target}))"
        )
    return ModelCall((), dict(batch))


def _require_needed(model: nn.Module, parts: tuple[Any, ...]) -> None:
    """Raise TypeError if the last of several parts would be an optional argument: it may be a target."""
    if len(parts) < 2 or not _takes(model, parts[:-1]):
        return
    name = list(signature_of(model.forward).bind(*parts).arguments)[-1]
    rest = ", ".join(f"batch[{i}]" for i in range(len(parts) - 1))
    raise TypeError(
        f"a batch has {len(parts)} parts, and the last may be the target or the optional argument {name!r} of "
        f"{_forward(model)}: say which: fxround.batches(loader, lambda batch: (({rest},), batch[{len(parts) - 1}])) "
        "for a target, (tuple(batch), None) for an argument"
    )


def _forward(model: nn.Module) -> str:
    return f"{type(model).__name__}.forward{signature_of(model.forward)}"


def _listed(names: Iterable[Any]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")


def _kinds(parts: Any) -> str:
    return f"({', '.join(map(type_of, parts))})" if isinstance(parts, tuple) else type_of(parts)


def _grouped(parts: tuple[Any, ...]) -> ModelCall | None:
    """Return the call of a batch of two parts, all arguments and their target; None for any other batch."""
    if len(parts) != 2 or not isinstance(parts[0], list | tuple | Mapping) or not isinstance(parts[1], Tensor):
        return None
    whole = _whole(parts[0] if isinstance(parts[0], Mapping) else tuple(parts[0]))
    assert whole is not None
    return replace(whole, target=parts[1])


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    try:
        signature_of(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True
