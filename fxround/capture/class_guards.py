"""What a trace depends on in classes, of which Dynamo takes much for constant.

Dynamo guards the attributes that a trace reads from a class. It traces methods without a guard on them, and asks a
class whether it has ``__bool__``, ``__len__`` or ``__eq__`` without a guard if it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn

# What is compared before a graph is used again: an object, the function that reads something from it, and what it read.
Row = tuple[Any, Callable[[Any], Any], Any]

# Of a class that Python code has made, and may change: Py_TPFLAGS_HEAPTYPE.
_HEAP: Final = 1 << 9
# Each has a reflected and an in-place kind.
_OPERATORS: Final = ("add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor",)
_OTHERS: Final = (
    "bool len eq ne lt le gt ge hash str repr format contains iter next reversed getitem setitem delitem missing",
    "getattr getattribute setattr delattr call enter exit int float index complex round trunc floor ceil abs neg pos",
    "invert init new copy deepcopy getstate setstate reduce reduce_ex class_getitem instancecheck subclasscheck get",
    "set delete post_init torch_function",
)
# The methods that Python calls for operations on an object.
_SPECIAL: Final = frozenset(
    f"__{kind}{name}__"
    for names, kinds in ((_OPERATORS, ("", "r", "i")), (_OTHERS, ("",)))
    for name in " ".join(names).split()
    for kind in kinds
)


def methods_of(values: Iterable[Any], codes: Collection[CodeType]) -> Iterator[tuple[type, list[str]]]:
    """Yield the classes of values, with the expressions that read the methods and properties whose code was traced."""
    overridden: dict[type, list[str]] = {}
    for cls in {value if isinstance(value, type) else type(value): None for value in values}:
        names: dict[str, None] = {}
        for base in cls.__mro__:
            own = [name for name, value in vars(base).items() if _code(value) in codes]
            # What super() calls.
            overridden.setdefault(base, []).extend(name for name in own if name in names)
            names.update(dict.fromkeys(own))
        called = ["__call__"] if issubclass(cls, nn.Module) else []
        if names or called:
            yield cls, called + [each for name in names for each in _parts(cls, name)]
    for base, own in overridden.items():
        if own:
            yield base, [each for name in dict.fromkeys(own) for each in _parts(base, name)]


def constructors(classes: Iterable[type | None], codes: Collection[CodeType]) -> Iterator[Row]:
    """Yield the defaults of the ``__init__`` of each class of which the trace made an object."""
    for cls in dict.fromkeys(classes):
        if cls is not None and _code(getattr(cls, "__init__", None)) in codes:
            yield cls, _defaults_of_init, _defaults_of_init(cls)


class _Same:
    """An object that equals itself alone, and lives as long."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _defaults_of_init(cls: Any) -> list[_Same]:
    init = cls.__init__
    return [_Same(value) for value in (*(init.__defaults__ or ()), *(init.__kwdefaults__ or {}).values())]


def special_names(classes: Iterable[type | None]) -> Iterator[Row]:
    """Yield, for each class of the model's author that is no module, that it gains no method which Python calls itself.

    Dynamo asks a class whether it has ``__bool__``, ``__len__`` or ``__eq__``, and makes no guard if it has none.
    """
    for cls in dict.fromkeys(classes):
        if cls is None or not _is_own(cls):
            continue
        fixed = [base for base in cls.__mro__ if not base.__flags__ & _HEAP]
        names = _SPECIAL.union(*(vars(base) for base in fixed if base is not object))
        yield cls, _lacks([() if base in fixed else names - vars(base).keys() for base in cls.__mro__]), True


def all_names(values: Iterable[Any]) -> Iterator[Row]:
    """Yield the names in each class of the model's author that the trace read: it may have made objects of it."""
    for cls in dict.fromkeys(value for value in values if isinstance(value, type)):
        if _is_own(cls):
            yield cls, _names, _names(cls)


def _names(cls: type) -> list[list[str]]:
    return [list(vars(base)) for base in cls.__mro__ if base.__flags__ & _HEAP]


def _is_own(cls: type | None) -> bool:
    """Whether Python code made a class that is no module, and not PyTorch's."""
    return (
        cls is not None
        and bool(cls.__flags__ & _HEAP)
        and not (issubclass(cls, nn.Module) or cls.__module__.startswith("torch."))
    )


def _lacks(names: Sequence[Collection[str]]) -> Callable[[type], bool]:
    """Return the function that says whether each class of a class's order lacks these names."""
    sets = [frozenset(each) for each in names]

    def lacks(cls: type) -> bool:
        bases = cls.__mro__
        return len(bases) == len(sets) and all(
            lacking.isdisjoint(vars(base)) for base, lacking in zip(bases, sets, strict=True) if lacking
        )

    return lacks


def _code(value: Any) -> CodeType | None:
    """Return the code of what a class has under a name: a function, a property, a method of the class."""
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return function.__code__ if isinstance(function, FunctionType) else None


def _parts(cls: type, name: str) -> list[str]:
    """Return the expressions that read a method of a class and its code."""
    held = getattr(cls, name)
    if isinstance(held, property):
        return [name, f"{name}.fget.__code__"]
    return [f"{name}.__func__" if isinstance(held, MethodType) else name, f"{name}.__code__"]


__all__ = ["Row", "all_names", "constructors", "methods_of", "special_names"]
