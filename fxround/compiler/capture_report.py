"""The captures of a compiled module as a table: for which arguments each graph is right, and why it was needed.

A call that no graph fits is captured again. The reason is the first difference between the key of the call and the key
of the most similar capture before it; for calls by way of ``torch.compile``, it is the guard of Dynamo that failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxround.capture import Captured
from fxround.capture.dynamo import ADVICE, GRAPHS
from fxround.capture.processes import own_shape
from fxround.compiler.signature import PackedKind
from fxround.errors import CaptureError
from fxround.views.table import Table

_COLUMNS: Final = ("capture", "module", "mode", "arguments", "conditions", "reason", "seconds")
_FIRST: Final = "first call"


@dataclass(frozen=True)
class Capture:
    """One capture.

    captured    the graph, with the sizes for which it is right
    mode        "eval" or "training", and "with gradients" if the graph has them
    reason      why no earlier graph could be used
    seconds     the time of tracing, lowering and scheduling
    module      the path of a submodule that a method calls; "" for the model itself
    """

    captured: Captured
    mode: str
    reason: str
    seconds: float
    module: str = ""


def table_of(captures: Sequence[Capture]) -> Table:
    """Return a table with a row for each capture, in their order."""
    rows = [
        (i, c.module, c.mode, *_admitted(c.captured), c.reason, round(c.seconds, 2)) for i, c in enumerate(captures)
    ]
    return Table(_COLUMNS, tuple(rows))


def _admitted(captured: Captured) -> tuple[str, str]:
    """Return the arguments, as dtypes with sizes or symbols, and the conditions on the symbols."""
    placeholders = zip(captured.graph.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    values = {port.index: node.meta.get("val") for node, port in placeholders if port.kind == "argument"}
    sizes = captured.sizes
    symbols = [s for d in sizes.dimensions for e in d or () for s in getattr(e, "free_symbols", ())]
    names: dict[Any, str] = {}
    for symbol in symbols:
        names.setdefault(symbol, chr(ord("a") + len(names)) if len(names) < 26 else f"n{len(names)}")
    spelled = {str(symbol): name for symbol, name in names.items()}

    def text(expression: Any) -> str:
        return re.sub(r"\w+", lambda word: spelled.get(word[0], word[0]), str(expression))

    arguments = [
        f"{str(values[i].dtype).removeprefix('torch.')}[{', '.join(map(text, dimensions))}]"
        for i, dimensions in enumerate(sizes.dimensions)
        if dimensions is not None and i in values
    ]
    counts = {argument: arguments.count(argument) for argument in arguments}
    shown = [f"{n} x {argument}" if n > 1 else argument for argument, n in counts.items()]
    return ", ".join(shown), ", ".join(map(text, sizes.conditions))


def mode_of(training: bool, gradients: bool) -> str:
    """Return "eval" or "training", and whether the graph has gradients."""
    return ("training" if training else "eval") + (" with gradients" if gradients else "")


def guard_of(failed: str | None) -> str:
    """Return the reason that Dynamo states for a capture, without its numbers and the stack of the model's code."""
    if failed is None:
        return _FIRST
    return re.sub(r"^\d+/\d+: ", "", failed.strip().partition("\n")[0]).partition("  # ")[0].strip()


@dataclass(frozen=True)
class KeyedCall:
    """A call of a compiled module: names and shapes of the leaves, the key, and the arguments."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    key: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any, key: Any) -> KeyedCall:
        """Return the call with these arguments."""
        leaves = pytree.tree_leaves((args, kwargs))
        try:
            names = tuple(_name(path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0])
        except ValueError:  # a library's type of argument without names for its parts
            names = tuple(f"tensor or value {i}" for i in range(len(leaves)))
        shapes = tuple(map(own_shape, leaves))
        return cls(names, shapes, key, args, kwargs)


def reason_for(call: KeyedCall, earlier: Mapping[Any, Sequence[Any]]) -> str:
    """Return why a call needs a graph of its own.

    earlier: the entries of the captures before, by their keys. Raises CaptureError if as many of them as a model may
    have were captured for other values that the model reads.
    """
    if not earlier:
        return _FIRST
    near = max(earlier, key=lambda key: sum(a == b for a, b in zip(key, call.key, strict=True)))
    if near == call.key:
        reason = next(_of_same_key(call, earlier[near]), "an earlier graph does not fit")
        if sum(not entry.captured.guards.hold(call.args, call.kwargs) for entry in earlier[near]) >= GRAPHS:
            raise CaptureError(f"{GRAPHS} graphs already, and this call would need another one ({reason}): {ADVICE}")
        return reason
    return next(_differences(call, near), "the model has changed")


def _of_same_key(call: KeyedCall, entries: Sequence[Any]) -> Iterator[str]:
    """Yield the reasons why the newest of the entries cannot be used."""
    captured = entries[-1].captured
    for name, dimensions, shape in zip(call.names, captured.sizes.dimensions, call.shapes, strict=True):
        for d, (expected, size) in enumerate(zip(dimensions or (), shape or (), strict=True)):
            if isinstance(expected, int) and expected != size:
                yield f"{name} has size {size} in dimension {d}; the graph before has {expected}"
            elif size == 0 and not isinstance(expected, int):
                yield f"{name} has size 0 in dimension {d}; the graph before is for other sizes"
    if not captured.sizes.admit(call.shapes):
        yield f"sizes {', '.join(str(s) for s in call.shapes if s is not None)} do not meet the conditions before"
    yield from (f"{source} has changed" for source in captured.guards.changed(call.args, call.kwargs))
    yield from (f"{read.source} has changed" for read in captured.reads if not read.is_current())


def _differences(call: KeyedCall, near: Any) -> Iterator[str]:
    (spec, kinds, state, gradients), (spec_before, kinds_before, state_before, gradients_before) = call.key, near
    if spec != spec_before:
        yield f"other arguments: {', '.join(call.names)}"
    for name, kind, before in zip_longest(call.names, kinds, kinds_before):
        if isinstance(kind, PackedKind) and isinstance(before, PackedKind) and kind != before:
            count = "1 sequence" if kind.sequences == 1 else f"{kind.sequences} sequences"
            yield f"a packed sequence of {count}; before, it had {before.sequences}"
        elif kind != before:
            moved = len({_device_of(kind), _device_of(before)} - {None}) > 1
            yield f"{name} is {_kind(kind, moved)}; before, it was {_kind(before, moved)}"
    if gradients != gradients_before:
        yield "gradients are wanted" if gradients else "no gradients are wanted"
    (modules, tensors, *flags), (modules_before, tensors_before, *flags_before) = state, state_before
    (dtype, cast, hooks), (dtype_before, cast_before, hooks_before) = flags, flags_before
    for (module, *values), (module_before, *values_before) in zip(modules, modules_before, strict=False):
        if module is not module_before:
            yield f"{type(module_before).__name__} was replaced by another module"
        yield from _changed(module, values, values_before)
    if len(modules) != len(modules_before):
        yield "modules were added or removed"
    if tensors != tensors_before:
        yield "parameters or buffers have another dtype, shape, device or requires_grad"
    if dtype != dtype_before:
        yield f"the default dtype is {dtype}; before, it was {dtype_before}"
    if cast != cast_before:
        now, then = (next((str(c) for c in casts if c), "off") for casts in (cast, cast_before))
        yield f"autocast is {now}; before, it was {then}"
    if hooks != hooks_before:
        yield "hooks of all modules have changed"


def _changed(module: nn.Module, now: Any, before: Any) -> Iterator[str]:
    """Yield what the training flags, the names of the state and the hooks of a module differ in."""
    name = type(module).__name__
    (training, names, *hooks), (training_before, names_before, *hooks_before) = now, before
    if training != training_before:
        yield f"{name} is in {mode_of(training, False)} mode"
    if names != names_before:
        yield f"{name} has parameters or buffers of other names"
    if hooks != hooks_before:
        yield f"hooks of {name} have changed"


def _name(path: Any) -> str:
    (group, first, *rest) = path
    name = f"argument {first.idx}" if group.idx == 0 else str(first.key)
    return name + pytree.keystr(tuple(rest))


def _device_of(kind: Any) -> Any:
    return kind[3] if kind is not None and isinstance(kind[0], torch.dtype) else None


def _kind(kind: Any, placed: bool = False) -> str:
    """Return a leaf's part of the key for a reader. placed: with the device of a tensor."""
    if kind is None:
        return "missing"
    if isinstance(kind[0], torch.dtype):
        dtype, rank, gradient, device, *shared = kind
        told = f"{' that wants a gradient' if gradient else ''}{f' on {device}' if placed else ''}"
        if shared:
            shape, placements, _ = shared
            return f"{str(dtype)[6:]} of shape {shape}, a DTensor with the placements {placements}{told}"
        return f"{str(dtype)[6:]} of {rank} dimensions{told}"
    cls, *values = kind
    value = values[0] if values else ""
    return str(float.fromhex(value) if cls is float else value)
