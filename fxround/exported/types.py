"""The types of arguments and results of exported programs, which a file has by name.

PyTorch writes a type that was registered under a name. fxround registers those that a program often has: packed
sequences, the named tuples of PyTorch's operators (``torch.sort``), and a user's named tuples.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

from fxround.errors import FxroundError, shown

_SEPARATOR: Final = ":"

if PackedSequence not in pytree.SUPPORTED_SERIALIZED_TYPES:
    pytree._register_namedtuple(PackedSequence, serialized_type_name="torch.nn.utils.rnn.PackedSequence")


def _name_types_of_operators() -> None:
    """Name the named tuples that PyTorch's operators return: PyTorch registers them without a name."""
    for kind in torch.return_types.all_return_types:
        node = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        if node is not None and node.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            name = f"torch.return_types.{kind.__name__}"
            pytree.SUPPORTED_SERIALIZED_TYPES[kind] = node._replace(serialized_type_name=name)
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind


_name_types_of_operators()


def imports_of(spec: Any) -> list[str]:
    """Return the modules whose types arguments and results have, such as a model's output class of transformers.

    PyTorch reads a file with such a type only after its module has registered it.
    """
    names = {getattr(kind, "__module__", "builtins") for kind in _types(spec)}
    return sorted(n for n in names if n not in sys.stdlib_module_names and n.partition(".")[0] != "torch")


def named_tuples_of(spec: Any) -> list[str]:
    """Return the user's named tuples among the types of arguments and results, as module:name, and register them.

    Raises FxroundError for one that its module does not have under its name.
    """
    names = []
    for kind in filter(_is_named_tuple, set(_types(spec))):
        name = f"{kind.__module__}{_SEPARATOR}{kind.__qualname__}"
        node = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        if node is None or node.serialized_type_name == name:  # any other name is PyTorch's, or the user's own
            register(name, kind)
            names.append(name)
    return sorted(names)


def module_of(name: str) -> str:
    """Return the module of a named tuple that is named as module:name."""
    return name.partition(_SEPARATOR)[0]


def register(name: str, kind: type | None = None) -> None:
    """Register a named tuple, named as module:name, for PyTorch's files. Its module has been imported.

    kind: the type that has this name. Raises FxroundError if the module has another type under it, or no named tuple.
    """
    module, _, path = name.partition(_SEPARATOR)
    try:
        held = attrgetter(path)(sys.modules[module])
    except (AttributeError, KeyError):
        held = None
    if not _is_named_tuple(held) or kind not in (None, held):
        raise FxroundError(
            f"arguments or results have the type {shown(name)}, and the module {shown(module)} has no named tuple "
            f"{shown(path)}, or another one: a file has the name alone, so define it at the top level of a module, or "
            "use a plain tuple"
        )
    if held not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(held, serialized_type_name=name)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _types(spec: Any) -> Iterator[Any]:
    """Yield the types of the containers of an exported program's arguments and results."""
    specs = [spec.in_spec, spec.out_spec]
    while specs:
        one = specs.pop()
        specs += one.children()
        yield one.context if one.type is namedtuple else one.type  # as PyTorch writes the type of a named tuple
