"""What a kernel's random bits depend on, as kernels take it: seed, sample and the number of a node."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from fxround.errors import type_of
from fxround.graph.dialect import Fused, Pointwise, Sum, require_state
from fxround.kernels.kinds import in_part
from fxround.numerics.arithmetic.randomness import Part

_WORD: Final = (1 << 32) - 1
# The random key that is passed to a kernel that draws nothing.
NO_KEY: Final = (ctypes.c_uint32 * 4)()


@dataclass(frozen=True)
class Draw:
    """What a kernel's random bits depend on: seed (0 to 2^63 - 1), sample (0 to 2^32 - 1) and the number of the node.

    part: where the elements stand in the whole that they are a part of; None: they are the whole. state: the tensor
    (seed, sample) of a device, which only a kernel of the device reads; ``seed`` and ``sample`` are then 0.

    Raises TypeError for a seed or a sample that is no int, ValueError for one out of range.
    """

    seed: int = 0
    sample: int = 0
    node: int = 0
    part: Part | None = None
    state: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if type(self.seed) is type(self.sample) is int and 0 <= self.seed < 2**63 and 0 <= self.sample < 2**32:
            return
        for name, value, bits in (("seed", self.seed, 63), ("sample", self.sample, 32)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {type_of(value)}; expected an int")
            if not 0 <= value < 2**bits:
                raise ValueError(f"{name} is {value}; expected 0 to 2^{bits} - 1")

    @staticmethod
    def of(rng: Tensor, node: int) -> Draw:
        """The draw of a node, from the run-time tensor (seed, sample), int64 of shape [2]."""
        require_state(rng)
        seed, sample, *numbers = rng.tolist()
        return Draw(seed, sample, node, Part(*numbers) if numbers else None)

    @staticmethod
    def unread(rng: Tensor, node: int) -> Draw:
        """The draw of a node, for a kernel that runs where its operands are: a state on a device is not read here."""
        if rng.is_cpu:
            return Draw.of(rng, node)
        require_state(rng, parts=False)
        return Draw(node=node, state=rng)

    def of_part(self, kernel: Any) -> Any:
        """The kernel that draws by these numbers: for a part, the one that reads where its elements stand."""
        return kernel if self.part is None else in_part(kernel)

    def read(self) -> Draw:
        """The draw with its seed and sample as numbers, for which the host waits if they are on a device."""
        return self if self.state is None else Draw.of(self.state, self.node)

    def key(self) -> Any:
        """Seed, sample and node as a C array of four u32, then the numbers of a part."""
        return self.keys((self.node,))

    def keys(self, nodes: Sequence[int]) -> Any:
        """Seed and sample in three u32, one u32 for each of the nodes (at least one), a part's numbers; a C array."""
        words = (*self.read()._words(nodes or (0,)), *(word for n in self.part or () for word in (n & _WORD, n >> 32)))
        return (ctypes.c_uint32 * len(words))(*words)

    def words(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Seed and sample in three u32, as far as the host knows them, then one u32 for each of the nodes.

        Raises ValueError for a part, whose numbers are no such words.
        """
        if self.part is not None:
            raise ValueError("a part of a result draws on the CPU alone: expected operands there (move them by .cpu())")
        return self._words(nodes)

    def _words(self, nodes: Sequence[int]) -> tuple[int, ...]:
        return (self.seed & _WORD, self.seed >> 32, self.sample, *(n & _WORD for n in nodes))


def key_of(call: Pointwise[Any] | Fused[Any] | Sum[Any], rng: Tensor | None, draws: bool = True) -> Any:
    """The random key of a kernel's call, without seed and sample if there is no state. draws: whether it is used."""
    if not draws:
        return NO_KEY
    nodes = call.nodes if isinstance(call, Fused) else (call.node,)
    return (Draw() if rng is None else Draw.of(rng, 0)).keys(nodes)
