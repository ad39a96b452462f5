"""Operations whose values, losses and perturbations need no second evaluation.

They move values, or a kernel of ``kernels.perturbed`` computes all at once. The derivatives are those of PyTorch, and
later operations read the bits of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor

from fxround.attribution.derivatives import Chain, ProductBits, Start, decided, directional, missed_by
from fxround.attribution.functions import computed, linear_of
from fxround.attribution.graphs import Step
from fxround.attribution.losses import Kept, carried_losses
from fxround.attribution.sites import Sites, doubt_of
from fxround.attribution.states import Decisions, State, derivable, floats, is_float, leaves_of, mapped, wide_enough
from fxround.graph.dialect import ContractionCall, Convolution, Matmul, Pointwise, Sum
from fxround.graph.dtypes import result_storage
from fxround.kernels.kinds import Exact
from fxround.kernels.perturbed import Perturbed, perturbed_statement, perturbed_store
from fxround.operators.rules import argument
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import loads_of
from fxround.runtime.run import run_kernel

States = Mapping[Any, State]

_MOVES: Final = """
    view _unsafe_view reshape alias permute transpose.int t expand squeeze squeeze.dim squeeze.dims unsqueeze
    slice.Tensor select.int clone cat stack split.Tensor split_with_sizes unbind.int diagonal unfold flip roll repeat
    tril triu embedding gather index.Tensor index_select where.self
"""
_SHAPES: Final = """
    sym_size.int sym_stride.int sym_numel sym_storage_offset full_like zeros_like ones_like empty_like new_full
    new_zeros new_ones new_empty
"""


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())


# Operators of ATen that move values, or choose among them by a mask, and are linear in all of their floating-point
# tensors together.
MOVES: Final = _named(_MOVES)
# Operators of ATen that read the shape of a tensor, and no value.
SHAPES: Final = _named(_SHAPES)


class OnePass:
    """Evaluates nodes in one pass. ``noise`` is that of the run, to whose ``sites`` roundings are added."""

    def __init__(self, noise: torch.Generator | None, sites: Sites) -> None:
        self.noise, self.sites = noise, sites

    def state(self, step: Step, states: States) -> State | None:
        """Return the state of a node's value; None for a node that needs other evaluations."""
        if step.call is not None:
            return self._call(step, states)
        if step.node.target is getitem:
            of, place = states[step.reads[0]], step.node.args[1]
            return State(of.bits[place], of.derived[place], of.moved[place]) if is_float(of.bits[place]) else None
        if step.name in MOVES:
            return _moved(step, states)
        if step.name in SHAPES:
            with torch.no_grad():
                return State.constant(step.call_with(lambda used: states[used].bits))
        if step.kind != "exact" or len(step.numbers) != 1:
            return None
        of = states[step.numbers[0]]
        if not is_float(of.bits) or any(states[used].moves for used in step.reads if used not in step.numbers):
            return None
        if step.statement is None:
            return self._choice(step, states, of) if of.bits.dtype == torch.float32 else None
        with torch.no_grad():
            bits = step.call_with(lambda used: states[used].bits)
        return self._statement(step, [of.bits], [of], bits.dtype, NO_KEY, bits)

    def _call(self, step: Step, states: States) -> State | None:
        call: Any = step.call
        operands = [states[used] for used in call.operands]
        if not all(is_float(one.bits) and not isinstance(one.moved, Decisions) for one in operands):
            return None
        if isinstance(call, Pointwise):
            key = Draw.of(states[call.rng].bits, call.node).key()
            xs = [one.bits for one in operands]
            return self._statement(step, xs, operands, call.dtype, key)
        if isinstance(call, ContractionCall | Sum) and self.noise is not None:
            return self._chain(step, step.read(lambda used: states[used].bits), operands)
        return None

    def _statement(
        self,
        step: Step,
        xs: Sequence[Tensor],
        operands: Sequence[State],
        dtype: torch.dtype,
        key: Any,
        bits: Tensor | None = None,
    ) -> State | None:
        """Return the state of a program's only statement. bits: its value, if another kernel computes it."""
        if step.statement is None:
            return None
        text, statement = step.statement
        names = {f"x{i}": one for i, one in enumerate(operands) if f"x{i}" in statement.operands}
        moved = tuple([f"x{i}" in names and one.moved is not None for i, one in enumerate(operands)])
        kernel = perturbed_statement(text, loads_of(xs), result_storage(dtype), moved, self.noise is not None)
        if kernel is None:
            return None
        given = [one.moved for one, moves in zip(operands, moved, strict=True) if moves]
        made = run_kernel(kernel.kernel, [*xs, *given], key)
        if bits is not None:
            made[0] = bits
        value = derived = derivable(made[0])
        if any(one.derived.requires_grad for one in names.values()):
            with torch.enable_grad():
                derived = computed(statement, {name: one.derived for name, one in names.items()}, value)
            # The derivatives are those of PyTorch, and later operations read the bits.
            derived.data = value
        return self._enter(step, kernel, made, derived)

    def _choice(self, step: Step, states: States, of: State) -> State | None:
        """Return the state of what chooses among the values of one tensor in binary32, such as a maximum.

        The chosen values, and those of other dtypes, are the first results of PyTorch's operator; None for several.
        """
        with_value = _called_by(step, states)
        with torch.enable_grad():
            derived = _several(with_value(of.derived))
        places = [i for i, one in enumerate(derived) if is_float(one)]
        if len(places) != 1:
            return None
        (at,) = places
        bits, moved = [one.detach() for one in derived], list[Any]([None] * len(derived))
        missed = None
        if of.moved is not None:
            first = _passed_by_choice(step, of.bits, bits, of.moved)
            if first is None:
                (passed,) = directional(lambda x: (_several(with_value(x))[at],), (of.bits,), (of.moved,))
                first = None if passed is None else passed.nan_to_num(0.0, 0.0, 0.0)
            with torch.no_grad():
                wide, by = of.bits.double(), of.moved.double()
                plus, minus = _several(with_value(wide + by)), _several(with_value(wide - by))
                moved = [first if i == at else decided(one, plus[i], minus[i]) for i, one in enumerate(bits)]
                missed = doubt_of(missed_by(bits[at].double(), plus[at], minus[at], first), first)
        derived[at] = self._reached(derived[at])
        self.sites.add(step.node.name, step.place, derived[at], [], missed, bits[at])
        return State(bits, derived, moved) if step.several else State(bits[0], derived[0], moved[0])

    def _chain(self, step: Step, call: Chain, operands: Sequence[State]) -> State | None:
        """Return the state of a chain that draws; None for one that has no packed losses."""
        kernel = call.kernel(call.loads())
        packed = None if isinstance(kernel, Exact) else carried_losses(call, kernel)
        if packed is None:
            return None
        assert not isinstance(kernel, Exact)
        linear, values, by = linear_of(call), [derivable(one.bits) for one in operands], [o.moved for o in operands]
        given: list[Tensor] = []
        with torch.no_grad():
            # A sum of products is linear in each of its operands.
            parts = [
                linear(*(m if i == j else x for j, x in enumerate(values))) for i, m in enumerate(by) if m is not None
            ]
            if parts:
                given.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
            if len(parts) > 1:
                given.append(linear(*by))
            store = perturbed_store(kernel, len(given))
            numbered: Any = call
            made = run_kernel(store.kernel, [packed, *given], Draw.of(call.rng, numbered.node).key())
            # A sum that is finite has no other elements.
            if not math.isfinite(float(made[0].sum())) and not bool(made[0].isfinite().all()):
                made[0] = type(call).overload(*call.arguments())
        value = derivable(made[0])
        derived = [one.derived for one in operands]
        if not any(one.requires_grad for one in derived):
            new = value
        elif isinstance(call, Matmul | Convolution):
            replaced: Any = ProductBits.apply
            new = replaced(*derived, value, call)
        else:
            with torch.enable_grad():
                new = linear(*derived)
            new.data = value
        return self._enter(step, store, made, new)

    def _enter(self, step: Step, kernel: Perturbed, made: Sequence[Tensor], derived: Tensor) -> State:
        """Return the state of a value by a kernel's results, and add what its rounding lost to the sites."""
        derived = self._reached(derived)
        missed = None if kernel.missed is None else made[kernel.missed]
        missed = None if missed is None or not bool(missed.any()) else missed.to(torch.bfloat16)
        lost = None if kernel.lost is None else made[kernel.lost]
        kept = [] if lost is None else [Kept(lost, None, None) if self.noise is None else Kept(None, lost, None)]
        self.sites.add(step.node.name, step.place, derived, kept, missed, made[0])
        return State(made[0], derived, None if kernel.moved is None else made[kernel.moved])

    def _reached(self, derived: Tensor) -> Tensor:
        """Return a value for autograd that a backward pass reaches."""
        started: Any = Start.apply
        return derived if derived.requires_grad else started(derived, self.sites.root)


def _passed_by_choice(step: Step, x: Tensor, made: Sequence[Tensor], moved: Tensor) -> Tensor | None:
    """Return the perturbation that a choice passes on, by its results, without dual numbers; None if it needs them.

    That of a maximum is the mean over equal elements, that of a pooling the one at the index.
    """
    if step.name == "aten.max_pool2d_with_indices.default":
        value, index = made
        passed = moved.flatten(-2).gather(-1, index.flatten(-2)).reshape(value.shape)
    elif step.name in ("aten.amax.default", "aten.amin.default") and x.dim():
        (value,) = made
        dims = [d % x.dim() for d in argument(step.node, "dim") or range(x.dim())]
        equal = x == value.reshape([1 if d in dims else size for d, size in enumerate(x.shape)])
        passed = torch.where(equal, moved, 0.0).sum(dims) / equal.sum(dims).clamp_(min=1)
        passed = passed.reshape(value.shape)
    else:
        return None
    return passed.nan_to_num_(0.0, 0.0, 0.0)


def _several(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _called_by(step: Step, states: States) -> Callable[[Tensor], Any]:
    """Return the function of the only floating-point tensor that an operation reads."""
    (number,) = step.numbers
    return lambda value: step.call_with(lambda used: value if used is number else states[used].bits)


def _moved(step: Step, states: States) -> State | None:
    """Return the state of what moves values, whose perturbation moves as they do; None for decisions among them."""
    if len(step.numbers) == 1 and all(states[one].moved is None for one in step.reads if one not in step.numbers):
        of = states[step.numbers[0]]
        if isinstance(of.bits, Tensor) and of.bits.dtype == torch.float32:
            return _moved_alone(step, states, of)
    used = {one: states[one] for one in step.reads}
    perturbations = [leaf for one in used.values() for leaf in leaves_of(one.moved)]
    if any(not isinstance(leaf, Tensor | None) for leaf in perturbations):
        return None
    numbers = [leaf for one in used.values() for leaf in floats(one.bits)]
    if not numbers:
        return None
    own = all(leaf.dtype == torch.float32 for leaf in numbers)
    with torch.enable_grad():
        derived = step.call_with(lambda one: used[one].derived, None if own else wide_enough)
    with torch.no_grad():
        # The derived values are the bits, in another dtype.
        bits = mapped(Tensor.detach, derived) if own else step.call_with(lambda one: used[one].bits)
        if all(leaf is None for leaf in perturbations):
            return State(bits, derived, mapped(lambda _: None, bits))
        moved = step.call_with(lambda one: used[one].moved_or_zero(), None if own else wide_enough)
    return State(bits, derived, moved)


def _moved_alone(step: Step, states: States, of: State) -> State:
    """Return the state of the moved values of one tensor in binary32."""
    with_value = _called_by(step, states)
    with torch.enable_grad():
        derived = with_value(of.derived)
    bits = [one.detach() for one in derived] if step.several else derived.detach()
    if of.moved is None:
        return State(bits, derived, [None] * len(derived) if step.several else None)
    return State(bits, derived, with_value(of.moved))
