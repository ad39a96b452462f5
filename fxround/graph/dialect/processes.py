"""Sums over processes: each process has the sum of its part, and all get the sum of the parts.

add_processes(x, "tp", 2, "binary32/nearest_even/inf", "binary32/nearest_even/inf", rng, 4)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fxround.graph.dialect.call import STATE, Call, T, empty, operator, require_state
from fxround.graph.geometry import Sizes
from fxround.kernels import from_text
from fxround.kernels.kinds import Map
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.randomness import Part
from fxround.numerics.formats.storage import Storage


@operator("add_processes")
@dataclass(frozen=True)
class AddProcesses(Call[T]):
    """The sum of the tensors x of the processes of a group, in a balanced tree of neighbours; then its rounding.

    group       the name of the process group
    processes   their number, a power of two
    accumulate  the rounding of each addition of the tree
    """

    x: T
    group: str
    processes: int
    accumulate: str
    rounding: str
    rng: T
    node: int

    @property
    def program(self) -> str:
        """The program of the sum: its operands are the tensors of the processes in the order of their ranks."""
        return tree_of(self.processes, self.accumulate, self.rounding)

    def kernel(self, loads: tuple[Storage, ...]) -> Map:
        """Return the kernel of the program."""
        (stored,) = loads
        return from_text.pointwise(self.program, (stored,) * self.processes, stored)

    def fake(self: AddProcesses[Tensor]) -> Tensor:
        """Return a tensor of the operand's size."""
        self.kernel(self.loads())
        require_state(self.rng)
        return empty(self.x, self.x.shape)


@operator("state_of_part")
@dataclass(frozen=True)
class StateOfPart(Call[T]):
    """The random state (seed, sample) of a part of a result: with the numbers of ``randomness.Part``, [7]."""

    rounds: ClassVar[bool] = False

    rng: T
    numbers: Sizes

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Return None: nothing is computed."""

    def fake(self: StateOfPart[Tensor]) -> Tensor:
        """Return an int64 tensor [7]."""
        require_state(self.rng, parts=False)
        if len(self.numbers) != len(Part._fields):
            raise ValueError(f"a part has {len(Part._fields)} numbers, got {len(self.numbers)}")
        return empty(self.rng, (STATE + len(Part._fields),))


def tree_of(count: int, accumulate: str, rounding: str) -> str:
    """Return the program that adds count operands in a balanced tree, and rounds the sum.

    Raises ValueError unless the count is a power of two.
    """
    if count < 1 or count & (count - 1):
        raise ValueError(f"{count} processes have no balanced tree; expected a power of two")
    values = [f"x{i}" for i in range(count)]
    statements: list[str] = []
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = []
        for first, second in pairs:
            values.append(f"t{len(statements)}")
            statements.append(f"{values[-1]} = add({first}, {second}) @ {accumulate}")
    if rounding != accumulate or not statements:
        statements.append(f"t{len(statements)} = identity({values[0]}) @ {rounding}")
    return str(Program.parse("; ".join(statements)))
