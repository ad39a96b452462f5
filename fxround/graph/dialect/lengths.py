"""The lengths of sequences that are to be packed, as an operator that checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fxround.graph.dialect.call import Call, T, empty, operator
from fxround.numerics.formats.storage import Storage


@operator("packed_lengths")
@dataclass(frozen=True)
class PackedLengths(Call[T]):
    """A copy of the lengths of sequences, none of which is above the number of rows of ``padded``."""

    rounds: ClassVar[bool] = False

    lengths: T
    padded: T

    def loads(self) -> tuple[Storage, ...]:
        """Nothing that a kernel loads."""
        return ()

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Nothing is rounded, and there is no kernel to build."""

    def fake(self: PackedLengths[Tensor]) -> Tensor:
        """Return lengths without values."""
        if not self.padded.dim():
            raise ValueError("packed_lengths: a padded tensor without dimensions")
        return empty(self.lengths, self.lengths.shape)
