"""What targets have planned, by the layouts of the inputs that it was planned for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from fxround.runtime.target import Target, target_of

P = TypeVar("P")
# The most layouts that plans are kept for.
_MANY: Final = 32
_UNKNOWN: Final = object()


class PlanCache(Generic[P]):
    """Plans by layouts, in the order in which they were made; those of many layouts are forgotten."""

    def __init__(self, lengths: range = range(0)) -> None:
        """lengths: the indices of inputs whose first dimension may have another length under the same plan."""
        self._lengths = lengths
        self._plans: dict[Hashable, P] = {}

    def key(self, target: Target, inputs: Sequence[Any]) -> Hashable:
        """Return everything that a plan depends on; addresses, and the numbers in tensors, are given with each call.

        Raises RuntimeError for a tensor without strides. The key has no hash if a value among the inputs has none.
        """
        layouts = (
            (x.shape[i in self._lengths :], x.stride(), x.dtype, x.device, x.is_neg(), type(x))
            if isinstance(x, Tensor)
            else (type(x), x)
            for i, x in enumerate(inputs)
        )
        return (target, *target.settings(inputs), *layouts)

    def of(self, inputs: Sequence[Any], make: Callable[[Target, Sequence[Any]], P]) -> P:
        """Return the plan for inputs, which ``make`` makes if there is none for their layouts."""
        target = target_of(inputs)
        key = self.key(target, inputs)
        plan: Any = self._plans.get(key, _UNKNOWN)
        known: P = self.put(key, make(target, inputs)) if plan is _UNKNOWN else plan
        return known

    def get(self, key: Hashable) -> P | None:
        """Return what was planned; None if nothing was."""
        return self._plans.get(key)

    def put(self, key: Hashable, plan: P) -> P:
        """Keep a plan, and return it."""
        if len(self._plans) > _MANY:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def __contains__(self, key: Hashable) -> bool:
        """Whether something was planned, or noted, for this key."""
        return key in self._plans

    def values(self) -> list[P]:
        """Return all plans."""
        return list(self._plans.values())
