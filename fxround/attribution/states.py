"""What a run with derivatives has of a value: its bits, the same numbers for autograd, and its perturbation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.eager.round import round as round_stochastically
from fxround.graph.dtypes import FORMAT_OF


@dataclass(frozen=True)
class Decisions:
    """The values, no floating point, to which a perturbation and its opposite lead."""

    plus: Any
    minus: Any


class State(NamedTuple):
    """What a run has of a value: three pytrees of one structure.

    bits      the value of the run
    derived   the same numbers for autograd, at least float32
    moved     the perturbation of a floating-point tensor, None if there is none; ``Decisions`` of another value, None
              if the perturbation changes nothing
    """

    bits: Any
    derived: Any
    moved: Any

    @staticmethod
    def constant(value: Any) -> State:
        """Return the state of a value that does not depend on a rounding."""
        return State(value, pytree.tree_map(derivable, value), pytree.tree_map(lambda _: None, value))

    @property
    def moves(self) -> bool:
        """Whether the perturbation changes the value."""
        if self.moved is None or isinstance(self.moved, Tensor):
            return self.moved is not None
        return any(leaf is not None for leaf in leaves_of(self.moved))

    @property
    def decides(self) -> bool:
        """Whether the perturbation changes a value that is no floating point."""
        if self.moved is None or isinstance(self.moved, Tensor):
            return False
        return any(isinstance(leaf, Decisions) for leaf in leaves_of(self.moved))

    def moved_or_zero(self) -> Any:
        """Return the perturbation of floating-point tensors, zeros where there is none; other values as they are."""
        if isinstance(self.moved, Tensor):
            return self.moved
        bits, structure = pytree.tree_flatten(self.bits)
        leaves = [
            moved if moved is not None else x.new_zeros(x.shape, dtype=wide_enough(x.dtype)) if is_float(x) else x
            for x, moved in zip(bits, leaves_of(self.moved), strict=True)
        ]
        return pytree.tree_unflatten(leaves, structure)

    def as_numbers(self) -> State:
        """Return the state of a mask as numbers, zeros and ones."""
        decided = self.moved
        if decided is not None:
            decided = Decisions(decided.plus.to(torch.float32), decided.minus.to(torch.float32))
        numbers = self.bits.to(torch.float32)
        return State(numbers, numbers, decided)

    def reshaped(self, shape: Sequence[int]) -> State:
        """Return the state of a floating-point tensor in another shape."""
        moved = None if self.moved is None else self.moved.reshape(shape)
        return State(self.bits.reshape(shape), self.derived.reshape(shape), moved)

    def shifted(self, sign: int) -> Any:
        """Return the value in binary64, with the perturbation added ``sign`` times."""
        bits, structure = pytree.tree_flatten(self.bits)
        shifted = [shifted_value(value, moved, sign) for value, moved in zip(bits, leaves_of(self.moved), strict=True)]
        return pytree.tree_unflatten(shifted, structure)

    def nearby(self, noise: torch.Generator | None) -> Any:
        """Return the value with the perturbation added, rounded to numbers of its dtype at random."""
        bits, structure = pytree.tree_flatten(self.bits)
        moved = zip(bits, self.shifted_leaves(1), leaves_of(self.moved), strict=True)
        return pytree.tree_unflatten([on_grid(value, to, by, noise) for value, to, by in moved], structure)

    def shifted_leaves(self, sign: int) -> list[Any]:
        """Return the leaves of ``shifted``."""
        return pytree.tree_leaves(self.shifted(sign))


def is_float(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def has_floats(value: Any) -> bool:
    """Whether a pytree has floating-point tensors."""
    return any(map(is_float, pytree.tree_leaves(value)))


def floats(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a pytree."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [leaf for leaf in pytree.tree_leaves(value) if is_float(leaf)]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tensor's, or a tuple's, image under a function."""
    return function(value) if isinstance(value, Tensor) else pytree.tree_map(function, value)


def leaves_of(moved: Any) -> list[Any]:
    """Return the leaves of a perturbation, None among them."""
    if moved is None or isinstance(moved, Tensor | Decisions):
        return [moved]
    return pytree.tree_leaves(moved, is_leaf=lambda one: one is None or isinstance(one, Decisions))


def derivable(value: Any) -> Any:
    """Return a floating-point tensor in the dtype of derivatives, anything else as it is."""
    if not is_float(value):
        return value
    return value.detach() if value.dtype == torch.float32 else value.detach().to(wide_enough(value.dtype))


def derived_or_bits(derived: Any, bits: Any) -> Any:
    """Return what autograd knows of a value that was moved; indices are those of the run."""
    return derived if is_float(bits) else bits


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, or two other values, are equal."""
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def shifted_value(value: Any, moved: Any, sign: int) -> Any:
    """Return one leaf of ``State.shifted``."""
    if isinstance(moved, Decisions):
        return (value, moved.plus, moved.minus)[sign]
    if not is_float(value):
        return value
    wide = value.detach().double()
    return wide if moved is None or sign == 0 else wide + sign * moved.double()


def widened(value: Any) -> Any:
    """Return a floating-point tensor in binary64, anything else as it is."""
    return value.double() if is_float(value) else value


def on_grid(value: Any, shifted: Any, moved: Any, noise: torch.Generator | None) -> Any:
    """Return a shifted value as a tensor of its own dtype, rounded stochastically."""
    if moved is None or not is_float(value) or value.dtype == torch.float64:
        return shifted if isinstance(moved, Decisions) else value if moved is None else shifted.to(value.dtype)
    seed = int(torch.randint(1 << 62, (), generator=noise))
    return round_stochastically(shifted, f"{FORMAT_OF[value.dtype]}/stochastic", seed).to(value.dtype)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of derivatives for values of a dtype."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def binary64(dtype: torch.dtype) -> torch.dtype:
    """Return binary64 for values of any dtype."""
    return torch.float64
