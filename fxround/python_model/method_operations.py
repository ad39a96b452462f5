"""Single operations that a model's method computes between the calls of the model, rounded by the policy.

Each operator is compiled as a function of its own, outside of all modules: only rules for all modules apply to it. The
number of an operation within the call of the method selects its random bits. ``compiled.generate`` with sampling, for
example, divides by a temperature and computes a softmax: both have the roundings of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.errors import FxroundError
from fxround.graph.values import memory_of
from fxround.policy import Policy
from fxround.runtime.random_state import seed_of

# Arguments that AOTAutograd does not take from a caller, so that each value has an operation of its own.
_KINDS: Final = torch.dtype | torch.device | torch.layout | torch.memory_format


class Operations:
    """The operators of a module's methods, each compiled by ``compiled_by``, under one policy."""

    def __init__(self, policy: Policy, compiled_by: Callable[[Any, Policy], Any]) -> None:
        self._compiled_by = compiled_by
        self._policy = policy.with_optional_rules()
        self._known: dict[Any, Any] = {}
        self._complete: dict[int, bool] = {}
        # A rule for some modules does not say what applies to an operation outside of all modules.
        self._everywhere = all(rule.match == "*" for rule in policy.rules)

    def rounded(self, func: Any, args: Any, kwargs: Any, rng: tuple[int, int], number: int) -> Any:
        """Return the result of an operator under the policy; None if it cannot be rounded completely.

        func: an operator that changes nothing in place. rng: seed and sample. number: that of the operation.
        """
        if not self._everywhere:
            return None
        kinds = {name: value for name, value in kwargs.items() if isinstance(value, _KINDS)}
        key = func, *kinds.items()
        compiled = self._known.get(key)
        if compiled is None:
            compiled = self._known[key] = self._compiled_by(_function(func, kinds), self._policy)
        if self._policy.draws:
            compiled.reseed(seed_of(rng[0], f"operation {number}"), rng[1])
        try:
            result = compiled(*_tensors(func, args), **{k: v for k, v in kwargs.items() if k not in kinds})
        except FxroundError:
            return None
        graph = id(compiled.lowered)
        if graph not in self._complete:
            self._complete[graph] = not compiled.coverage().unrounded
        return result if self._complete[graph] else None


def functional_of(func: Any) -> Any:
    """Return the operator, or the one that computes the result of an operator in place; None if there is none."""
    if not func._schema.is_mutable:
        return func
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, func._overloadname, None)


def storages_of(model: nn.Module) -> frozenset[int]:
    """Return what identifies the memory of the model's parameters and buffers."""
    return frozenset(memory_of(tensor) for group in (model.parameters(), model.buffers()) for tensor in group)


def uses(values: Any, storages: Iterable[int]) -> bool:
    """Whether a tensor among the values is in this memory."""
    return any(memory_of(x) in storages for x in pytree.tree_leaves(values) if isinstance(x, Tensor))


def _function(func: Any, kinds: dict[str, Any]) -> Callable[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kinds, **kwargs)

    return operation


def _tensors(func: Any, args: Any) -> list[Any]:
    """Return the arguments, with a number for an operand as a tensor, so that another number needs no other graph."""
    dtypes = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    operands = [str(argument.type) == "Tensor" for argument in func._schema.arguments]
    return [
        torch.tensor(x, dtype=dtypes[0]) if operand and dtypes and type(x) in (int, float) else x
        for x, operand in zip(args, operands, strict=False)
    ]
