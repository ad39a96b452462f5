"""Keys of dicts that Dynamo reads without a guard, while it traces a model.

A key that ``d[key]`` does not find, and that ``__missing__``, the next dict of a ChainMap or an ``except KeyError`` may
serve, has no guard; neither have the keys of a dict that becomes part of a list or a set (``[*d]``,
``set().union(d)``, ``len`` of a ChainMap) or of a constant (``str(d)``, ``max(d, key=d.get)``). Dynamo
has guards for both, which are added here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

# The methods of a dict whose result has the keys of two.
_JOINS: Final = ("__or__", "__ror__", "__ior__", "update")
# Dynamo's methods for ``repr`` of an object, by version.
REPR_METHODS: Final = ("repr_impl", "tp_repr_impl")
# Dynamo's function for ``dict.fromkeys``.
_FROM_KEYS: Final = "call_custom_dict_fromkeys"
# Where Dynamo's variable of an object that is a dict, or shows one, has the variable of that dict, by version.
_PARTS: Final = ("_base_vt", "_dict_vt", "dv_dict")


def wrap_dicts(is_tracing: Callable[[], bool]) -> None:
    """Wrap, once and for good, Dynamo's reads of dicts. is_tracing: whether a trace is for fxround."""
    from torch._dynamo import variables
    from torch._dynamo.exc import ObservedKeyError
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.dicts import ConstDictVariable

    item = ConstDictVariable.getitem_const_raise_exception_if_absent
    constant = ConstDictVariable.as_python_constant

    def item_of(self: Any, tx: Any, key: Any) -> Any:
        try:
            return item(self, tx, key)
        except ObservedKeyError:
            if is_tracing():
                self.install_dict_contains_guard(tx, [key])
            raise

    def constant_of(self: Any) -> Any:
        if not is_tracing():
            return constant(self)
        _require_keys(self, InstructionTranslator.current_tx())
        # Before torch 2.12 it is a dict, whose text is another.
        return OrderedDict(constant(self)) if getattr(self, "user_cls", None) is OrderedDict else constant(self)

    def requiring(call: Any, dicts_of: Callable[..., Iterable[Any]]) -> Any:
        """Return a method of a variable that requires, before it calls, the keys of dicts among its arguments."""

        def required(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                for each in dicts_of(self, *args):
                    _require_keys(each.realize(), tx)
            return call(self, tx, *args, **kwargs)

        return required

    def from_keys(make: Any) -> Any:
        made = requiring(lambda kind, tx, *args, **kwargs: make(tx, kind, *args, **kwargs), lambda _, *given: given[:1])
        return staticmethod(lambda tx, kind, *args, **kwargs: made(kind, tx, *args, **kwargs))

    def joined(self: Any, name: str, args: Any, *_: Any) -> Any:
        return (self, *args) if name in _JOINS else ()

    of_torch: Any = variables
    sets = (of_torch.SetVariable, *of_torch.SetVariable.__subclasses__())
    made: tuple[Any, ...] = (of_torch.ListVariable, of_torch.lists.DequeVariable, *sets)
    kinds = {base for kind in made for base in kind.__mro__}
    owners: list[Any] = [kind for kind in kinds - {VariableTracker, ConstDictVariable} if "call_method" in vars(kind)]
    # Since torch 2.14 they inherit the method of all variables.
    owners.extend(kind for kind in made if not any(base in owners for base in kind.__mro__))
    texts = [(kind, name) for kind in all_kinds(VariableTracker) for name in REPR_METHODS if name in vars(kind)]
    replaced: list[tuple[Any, str, Any]] = [
        (ConstDictVariable, "getitem_const_raise_exception_if_absent", item_of),
        (ConstDictVariable, "as_python_constant", constant_of),
        (ConstDictVariable, "call_method", requiring(ConstDictVariable.call_method, joined)),
        *((kind, _FROM_KEYS, from_keys(getattr(kind, _FROM_KEYS))) for kind in _makers(of_torch.builtin)),
        *((kind, name, requiring(vars(kind)[name], lambda self: [self])) for kind, name in texts),
        *((kind, "call_method", requiring(kind.call_method, lambda self, name, args, *_: args)) for kind in owners),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)


def all_kinds(kind: Any) -> Iterator[Any]:
    """Yield a class and all classes that derive from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from all_kinds(derived)


def _makers(module: Any) -> Iterator[Any]:
    """Yield the class in a module that makes dicts of keys, which differs between versions of PyTorch."""
    for kind in vars(module).values():
        if isinstance(kind, type) and _FROM_KEYS in vars(kind):
            yield kind


def _require_keys(variable: Any, tx: Any) -> None:
    """Let the trace require that a dict which exists before the call has the same keys, in the same order."""
    from torch._dynamo.variables.dicts import ConstDictVariable

    parts = (variable, *(vars(variable).get(name) for name in _PARTS))
    for part in (part for part in parts if isinstance(part, ConstDictVariable) and part.source is not None):
        part.install_dict_keys_match_guard()
        tx.output.guard_on_key_order.add(part.source)
