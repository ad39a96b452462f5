"""What a graph holds as constants, besides its model's own state and attributes: globals, closures, nested objects.

Dynamo notes a guard for every Python value that its trace depends on, with an expression that reads the value again.
``constants_of`` keeps those that no other check covers. Before a graph is used again, ``changed`` names the ones that
have another value now: a global number, an attribute of a configuration, the training flag of a module that the
function reads from outside.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn

# What guards of Dynamo compare, by the names of the functions that make them: a value, a length, or the keys of a dict.
_VALUES: Final = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH")
_FORMS: Final = {**dict.fromkeys(_VALUES, "{}"), "SEQUENCE_LENGTH": "len({})", "DICT_KEYS_MATCH": "tuple({})"}
_BUILTINS: Final = {"len": len, "tuple": tuple}
_SCALARS: Final = bool | int | float | complex | str | bytes | None
_MUTABLE: Final = list | tuple | set | dict
_BUILTIN: Final = (list, tuple, set, frozenset, dict, range, slice)


_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# The expressions of attributes and items of a variable.
_ACCESS: Final = r"[LG]\['\w+'\](?:\.\w+|\['[^']*'\]|\[-?\d+\])*"
# An attribute of one of the model's modules, or an item of it, which belongs to the key of a graph.
_OWN: Final = re.compile(r"L\['\w+'\](\._modules\['[^']*'\])*(\.\w+)?(\[[^\]]*\])*")


@dataclass(frozen=True)
class Constant:
    """A value that a graph has: the expression that reads it, the value, and a key of its contents.

    source: the expression as the model's author spells it.
    """

    expression: str
    source: str
    value: Any = field(repr=False)
    key: Any = field(repr=False)

    def is_now(self, value: Any) -> bool:
        """Whether a value is the one that the graph has."""
        if value is self.value and not isinstance(value, _MUTABLE):
            return True
        try:
            return bool(_key(value) == self.key)
        except Exception:  # a comparison of the object's own
            return False


@dataclass(frozen=True)
class Constants:
    """The values that a graph has, and a function that reads all of them as they are now."""

    listed: tuple[Constant, ...] = ()
    read: Callable[[], tuple[Any, ...]] = field(default=tuple, repr=False)

    def are_current(self) -> bool:
        """Whether every value is the one that the graph has."""
        return not self.listed or not self.changed()

    def changed(self) -> list[str]:
        """Return the sources of the values that are others now."""
        try:
            now = self.read()
        except Exception:  # an attribute is missing, or raises
            return ["a value that the model reads"]
        return [c.source for c, value in zip(self.listed, now, strict=True) if not c.is_now(value)]


def constants_of(guards: Iterable[Any], scope: Mapping[str, Mapping[str, Any]], model: nn.Module) -> Constants:
    """Return the values of Dynamo's guards that neither the model's modules nor the arguments of a call determine.

    scope: what the names ``L`` (with the model alone, under the name of its first parameter) and ``G`` of Dynamo's
    expressions mean. The globals of installed libraries count as unchanging.
    """
    found: dict[str, Constant] = {}
    modules = {id(module) for module in model.modules()}
    for guard in guards:
        form = _FORMS.get(guard.create_fn_name())
        # An attribute of a class, which one of the object itself may replace.
        source = re.sub(rf"\bdict\(type\(({_ACCESS})\)\.__dict__\)\['(\w+)'\]", r"\1.\2", str(guard.name))
        if form is not None and _is_outside(source, scope) and id(_holder(source, scope)) not in modules:
            known = _constant(form.format(source), _said(source, model), scope)
            if known is not None:
                found[known.expression] = known
    return Constants(tuple(found.values()), _reader(found, scope)) if found else Constants()


def spelled(source: str) -> str:
    """Return a source as the model's author spells it: self.cache for ``L['self'].cache``."""
    named = re.sub(r"^([LG]\['(\w+)'\])", r"\2", source)
    named = re.sub(r"^__import_(\w+?)\.", "", named)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", named)


def _is_outside(source: str, scope: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether an expression reads a global, or an object that an attribute holds."""
    if re.fullmatch(_ACCESS, source) is None or _OWN.fullmatch(source) is not None:
        return False
    kind, root = re.findall(r"([LG])\['(\w+)'\]", source)[0]
    if kind == "L":
        return root in scope["L"]
    module = scope["G"].get(root) if root.startswith("__import_") else None
    return not root.startswith("__builtins_dict__") and not is_installed(vars(module) if module else scope["G"])


def is_installed(names: Mapping[str, Any]) -> bool:
    """Whether the globals are those of a file of a library."""
    file = str(names.get("__file__") or "")
    return file.startswith(_LIBRARIES)


def _holder(source: str, scope: Mapping[str, Any]) -> Any:
    """Return the object of which an expression reads an attribute, or an item of an attribute."""
    place = re.fullmatch(rf"({_ACCESS})\.\w+(\[[^\]]*\])*", source)
    try:
        return None if place is None else _reader([place[1]], scope)()[0]
    except Exception:  # an expression that only Dynamo can read
        return None


def _reader(expressions: Iterable[str], scope: Mapping[str, Any]) -> Callable[[], tuple[Any, ...]]:
    code = compile(f"({' '.join(f'{each},' for each in expressions)})", "<constants>", "eval")
    names = {"__builtins__": _BUILTINS, **scope}
    return lambda: eval(code, names)


def _said(source: str, model: nn.Module) -> str:
    """Return a source as the model's author spells it; of a compiled function, the variables of its closure by name."""
    inside = re.sub(r"^L\['self'\]\.function\.__self__", "self", source)
    code = getattr(getattr(model, "function", None), "__code__", None)
    if code is not None:
        cell = r"^L\['self'\]\.function\.__closure__\[(\d+)\]\.cell_contents"
        inside = re.sub(cell, lambda found: str(code.co_freevars[int(found[1])]), inside)
    return spelled(inside)


def _constant(expression: str, source: str, scope: Mapping[str, Any]) -> Constant | None:
    """Return the value of an expression as a constant; None if it cannot be read, or is another one at each reading."""
    read = _reader([expression], scope)
    try:
        made = Constant(expression, source, read()[0], _key(read()[0]))
        return made if made.is_now(read()[0]) else None
    except Exception:  # an expression that only Dynamo can read, or an attribute that raises
        return None


def _key(value: Any) -> Any:
    """Return what a value is compared by: its type and digits, or the object itself."""
    if isinstance(value, _SCALARS) or type(value) in _BUILTIN:
        return type(value), repr(value)
    value = value.__func__ if isinstance(value, MethodType) else value
    return value.__code__ if isinstance(value, FunctionType) else value
