"""Straight runs: a graph of small operations with all consecutive kernels in one call of machine code.

A call of a compiled model that is small costs what Python needs for each kernel: layouts, results, arguments. A graph
is therefore planned by its target (``Target.program``) for inputs of given layouts when they come for the second time;
the planner computes every operation, so that call returns what it has computed. If an operation that Python calls gives
a result of another layout than it did while planning, the call starts again without the plan. A graph with large values
gains nothing by that; it is planned if PyTorch's operators compute everything in it (``reused_memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.graph.comparing import comparing
from fxround.numerics.lazy import cached_property
from fxround.runtime.call_programs import CallPlan, Computed, rounds_nothing
from fxround.runtime.operands import resolved
from fxround.runtime.schedule.plan_cache import PlanCache
from fxround.runtime.schedule.reused_memory import reusing
from fxround.runtime.target import Target, is_forced, target_of
from fxround.runtime.torch_ops import CHOICES, KERNELS

# The key of a scheduled graph's ``meta`` for the graph that it was made of, with loops as modules.
SOURCE: Final = "fxround_source"
# The most elements of an input.
_ELEMENTS: Final = 1 << 18


@dataclass(frozen=True)
class _Planned:
    """The plan of a target for inputs of one layout; False: there is none.

    settings: what it was made under. admits: the function that says whether inputs are like those that it was made for.
    """

    plan: CallPlan | bool
    target: Target
    settings: tuple[Any, ...]
    admits: Callable[..., bool]


class Straight:
    """A scheduled graph, called by way of a plan for small inputs of layouts that were seen before."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self._source: fx.GraphModule | None = graph.meta.get(SOURCE)
        # None: the layout was seen, and is planned when it comes again.
        self._plans = PlanCache[_Planned | None]()
        self._latest: _Planned | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Return what the graph returns. Negative views among the inputs are resolved."""
        # Inside a transform of torch.func a tensor stands for several, whose layouts are others.
        if self._source is None or is_forced() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self.graph.forward(*resolved(inputs))
        latest = self._latest
        # To compare with the latest inputs takes less than to describe these; alike, they have no negative view either.
        plan: CallPlan | Computed | bool
        if latest is not None and latest.admits(*inputs) and latest.settings == latest.target.settings(inputs):
            plan = latest.plan
        else:
            inputs = tuple(resolved(inputs))
            plan = self._plan(inputs)
        if isinstance(plan, CallPlan):
            result = plan.run(inputs)
            return self.graph.forward(*inputs) if result is None else result
        return plan.results if isinstance(plan, Computed) else self.graph.forward(*inputs)

    def _plan(self, inputs: Sequence[Any]) -> CallPlan | Computed | bool:
        """Return the plan for inputs, or what the graph returns if they have just been planned for."""
        try:
            target = target_of(inputs)
            key = self._plans.key(target, inputs)
            known = self._plans.get(key)
        except (RuntimeError, TypeError):  # a tensor without strides, a value without a hash
            return False
        if known is None:
            return self._planned(key, target, inputs)
        if known is self._latest:  # inputs differ from those before in what no plan depends on
            known = _Planned(known.plan, target, known.settings, comparing(inputs, strides=True))
            self._plans.put(key, known)
        self._latest = known
        return known.plan

    def _may_plan(self, inputs: Sequence[Any]) -> bool:
        return all(map(_is_plain, inputs)) and (self._rounds_nothing or all(map(_is_small, inputs)))

    @cached_property
    def _rounds_nothing(self) -> bool:
        return self._source is not None and rounds_nothing(self._source)

    def _planned(self, key: Any, target: Target, inputs: Sequence[Any]) -> Computed | bool:
        """Note a layout that is new, and plan one that was seen before, which computes what the graph returns."""
        assert self._source is not None
        settings, alike = target.settings(inputs), comparing(inputs, strides=True)
        if key not in self._plans:
            self._plans.put(key, None if self._may_plan(inputs) else _Planned(False, target, settings, alike))
            return False
        with torch.no_grad():
            made = target.program(self._source, inputs, KERNELS | CHOICES) if all(map(_is_small, inputs)) else None
            if made is None and self._rounds_nothing:
                made = reusing(self._source, inputs)
        plan = False if made is None or made.plan is None else made.plan
        self._plans.put(key, _Planned(plan, target, settings, alike))
        return made or False


def _is_plain(x: Any) -> bool:
    # Another class of tensors may define what an operator does.
    return not isinstance(x, Tensor) or type(x) in (Tensor, nn.Parameter)


def _is_small(x: Any) -> bool:
    return not isinstance(x, Tensor) or x.numel() <= _ELEMENTS
