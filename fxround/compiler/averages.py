"""The average of a parameter's gradients over processes, in the order of their ranks.

For every element, with N processes and the gradients g_0 ... g_(N-1) of one parameter,

    s = g_0;  s = R(s + g_r) for r = 1, ..., N - 1;  gradient = R(s / N)

R is the rounding that the policy has for a gradient (role ``gradient``, direction ``backward``) of that parameter's
module, for the operators ``add`` and ``div``. Random bits come from the module's (seed, sample), which all processes
share, and from a number of the parameter that no node of a graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fxround.graph.dtypes import STORAGES
from fxround.kernels.maps import draws
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.randomness import Part
from fxround.numerics.formats.storage import FORMAT_OF
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# What no graph has draws from the last number downwards: a graph counts its nodes from 0.
LAST_NODE: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Call:
    """A call of a module: its (seed, sample), which all processes have, and whether the sample advances."""

    seed: int = 0
    sample: int = 0
    trains: bool = False

    def __str__(self) -> str:
        if not self.trains:
            return "one that does not train"
        return f"one that trains, with seed {self.seed} and sample {self.sample}"


class Averages(Protocol):
    """How the processes average the gradients of parameters, which have the names of the model."""

    @property
    def said(self) -> str:
        """What must be the same in all processes, in words."""
        ...

    def own(
        self, name: str, gradient: Tensor | None, call: Call, synchronizes: bool, place: Part | None = None
    ) -> Tensor | None:
        """Take the gradient of a backward pass, and return what this process contributes to the average.

        None if it contributes nothing yet: while ``synchronizes`` is False, and without any gradient. place: where the
        gradient stands in that of the whole parameter, whose elements number the random bits; None: it is the whole.
        """
        ...

    @property
    def needs_all(self) -> bool:
        """Whether a parameter of which one process has a gradient needs one of every process."""
        ...

    def draws(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the average draws random bits."""
        ...

    def average(self, name: str, gradients: Sequence[Tensor], place: Part | None = None) -> Tensor:
        """Return the average of what the processes contributed, in the order of their ranks; place: as of ``own``."""
        ...


class OrderOfRanks:
    """The average in the order of the ranks, of what the backward passes of a process have accumulated.

    policy: of sums and quotients of gradients. numbers: of the parameters, by their names. rng: the module's (seed,
    sample). A process without a gradient of a parameter contributes zeros, as in PyTorch.
    """

    needs_all = False

    def __init__(self, policy: Policy, numbers: dict[str, int], world_size: int, rng: Callable[[], Tensor]) -> None:
        self._policy, self._numbers, self._size, self._rng = policy, numbers, world_size, rng
        self._programs: dict[tuple[str, torch.dtype], Program] = {}
        self._accumulated: dict[str, Tensor] = {}
        self.said = f"the order of the ranks, {policy.name!r}"

    @staticmethod
    def of(module: Any, policy: Policy, world_size: int) -> OrderOfRanks:
        """Return the average of a compiled module's parameters."""
        numbers = {name: k for k, (name, _) in enumerate(module.named_parameters())}
        return OrderOfRanks(policy, numbers, world_size, lambda: module.rng)

    def own(
        self, name: str, gradient: Tensor | None, call: Call, synchronizes: bool, place: Part | None = None
    ) -> Tensor | None:
        """Add a gradient to those of earlier backward passes, as PyTorch does; return the sum if it is averaged now."""
        del call, place
        before = self._accumulated.pop(name, None)
        total = gradient if before is None else before if gradient is None else before + gradient
        if synchronizes:
            return total
        if total is not None:
            self._accumulated[name] = total
        return None

    def draws(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the sum or the quotient draws."""
        return any(map(draws, self._program(name, dtype).statements))

    def average(self, name: str, gradients: Sequence[Tensor], place: Part | None = None) -> Tensor:
        """Return the average of what the processes contributed, in the order of their ranks."""
        seed, sample = self._rng().tolist()
        dtype = gradients[0].dtype
        drawn = Draw(seed, sample, LAST_NODE - self._numbers[name], place)
        return run_map(self._program(name, dtype), gradients, dtype, drawn)

    def _program(self, name: str, dtype: torch.dtype) -> Program:
        key = name, dtype
        if key not in self._programs:
            self._programs[key] = average_program(self._policy, name.rpartition(".")[0], dtype, self._size)
        return self._programs[key]


def average_program(policy: Policy, path: str, dtype: torch.dtype, world_size: int) -> Program:
    """Return the program of (g_0, ..., g_(N-1)) -> gradient, for a parameter of the module ``path``.

    Raises TypeError for a dtype that no kernel stores.
    """
    add, div = (rounding_of_gradients(policy, path, dtype, operator) for operator in ("add", "div"))
    others = range(1, world_size)
    sums = [f"t{r - 1} = add({'x0' if r == 1 else f't{r - 2}'}, x{r}) @ {add}" for r in others]
    total = f"t{world_size - 2}" if sums else "x0"
    return Program.parse("; ".join([*sums, f"t{world_size - 1} = div({total}, {world_size}) @ {div}"]))


def rounding_of_gradients(policy: Policy, path: str, dtype: torch.dtype, operator: str) -> str:
    """Return the rounding of a sum or quotient of gradients of a parameter of the module ``path``."""
    if dtype not in STORAGES:
        raise TypeError(f"a parameter of {path or 'the root module'} is {dtype}; expected a real floating dtype")
    own = FORMAT_OF[STORAGES[dtype]].name
    place = {"path": path, "operator": f"aten.{operator}.Tensor", "kind": "pointwise", "role": "gradient"}
    rule = policy.assign(**place, dtype=own, direction="backward")
    return str(rule.rounding) if rule is not None and rule.rounding is not None else f"{own}/nearest_even"
