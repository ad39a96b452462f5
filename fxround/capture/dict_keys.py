"""Keys of dicts that Dynamo reads without a guard, while it traces a model.

A key that ``d[key]`` does not find, and that ``__missing__``, the next dict of a ChainMap or an ``except KeyError`` may
serve, has no guard; neither have the keys of a dict that becomes part of a list or a set (``[*d]``,
``set().union(d)``, ``len`` of a ChainMap) or of a constant (``str(d)``, ``max(d, key=d.get)``). Dynamo
has guards for both, which are added here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
        if is_tracing():
            _require_keys(self, InstructionTranslator.current_tx())
        return constant(self)

    def unpacking(call: Any) -> Any:
        def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if is_tracing():
                for each in args:
                    _require_keys(each.realize(), tx)
            return call(self, tx, name, args, kwargs)

        return called

    of_torch: Any = variables
    made = (of_torch.ListVariable, of_torch.DequeVariable, of_torch.SetVariable, *of_torch.SetVariable.__subclasses__())
    kinds = {base for kind in made for base in kind.__mro__}
    owners: list[Any] = [kind for kind in kinds - {VariableTracker, ConstDictVariable} if "call_method" in vars(kind)]
    replaced: list[tuple[Any, str, Any]] = [
        (ConstDictVariable, "getitem_const_raise_exception_if_absent", item_of),
        (ConstDictVariable, "as_python_constant", constant_of),
        *((kind, "call_method", unpacking(kind.call_method)) for kind in owners),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)


def _require_keys(variable: Any, tx: Any) -> None:
    """Let the trace require that a dict which exists before the call has the same keys, in the same order."""
    from torch._dynamo.variables.dicts import ConstDictVariable

    parts = (variable, *(vars(variable).get(name) for name in _PARTS))
    for part in (part for part in parts if isinstance(part, ConstDictVariable) and part.source is not None):
        part.install_dict_keys_match_guard()
        tx.output.guard_on_key_order.add(part.source)
