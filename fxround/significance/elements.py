"""Significant bits of each element of the results, batch by batch, and the images that they belong to.

The bits of a batch are computed from its streamed statistics when its samples are complete, and kept in binary32: 4
bytes for each element, and no sample. Bits are kept while the results of all batches have no more than MOST elements,
and so are the first floating-point inputs, which ``VariabilityReport.map`` draws below the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fxround.errors import shown
from fxround.short_reprs import Short
from fxround.significance.figures import Options, Tally, bits_of
from fxround.significance.inputs import ModelCall
from fxround.significance.moments import Moments, chunks
from fxround.significance.places import OUTPUT

# 256 MiB of bits.
MOST: Final = 1 << 26
Bits = NDArray[np.float32]


@dataclass(repr=False)
class Elements(Short):
    """Bits by the name of a result, one array for each batch; the first input of each batch; and what was counted."""

    bits: dict[str, list[Bits]] = field(default_factory=dict)
    inputs: list[NDArray[np.float32] | None] = field(default_factory=list)
    elements: int = 0
    of_inputs: int = 0

    def _line(self) -> str:
        shapes = {name: " and ".join(f"{part.shape}" for part in parts) for name, parts in self.bits.items()}
        return "bits of " + (", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing")

    def add(self, name: str, moments: Moments, options: Options, precision: int) -> None:
        """Add the bits of one batch of a result."""
        self.elements += moments.size
        if self.elements > MOST:
            self.bits.clear()
            return
        bits = np.empty(moments.size, np.float32)
        for part in chunks(moments.size):
            bits[part] = np.clip(bits_of(moments, part, options), 0.0, float(precision))
        self.bits.setdefault(name, []).append(bits.reshape(moments.shape))

    def add_results(
        self, moments: Mapping[tuple[str, str], Moments], tallies: Mapping[tuple[str, str], Tally], options: Options
    ) -> None:
        """Add the bits of the results of one batch; the tallies, of all places, have their precisions."""
        for key, of_key in moments.items():
            if key[0] == OUTPUT:
                self.add(key[1], of_key, options, tallies[key].precision)

    def add_input(self, call: ModelCall) -> None:
        """Add the first floating-point argument of one batch."""
        first = next((t for t in call.tensors if t.is_floating_point() and t.dim() > 2), None)
        self.of_inputs += 0 if first is None else first.numel()
        if first is None or self.of_inputs > MOST:
            self.inputs.append(None)
            return
        self.inputs.append(first.detach().cpu().float().numpy().copy())

    def of(self, name: str, batch: int | None) -> Bits:
        """Return the bits of one batch, or of all batches along the first dimension.

        Raises ValueError for a batch that there is not, for batches of different shapes, and where nothing was kept.
        """
        parts = self.parts(name)
        if batch is not None:
            if isinstance(batch, bool) or not isinstance(batch, int) or not -len(parts) <= batch < len(parts):
                raise ValueError(f"batch is {shown(batch)}; expected one of the {len(parts)} batches, 0 or more")
            return parts[batch].copy()
        shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
        if len(shapes) > 1 or (not parts[0].ndim and len(parts) > 1):
            raise ValueError(
                f"the batches of {name} have the shapes {', '.join(str(part.shape) for part in parts[:4])}, ..., which "
                "are no rows of one array; say which: bits(..., batch=0)"
            )
        return np.concatenate(parts) if len(parts) > 1 else parts[0].copy()

    def parts(self, name: str) -> list[Bits]:
        """Return the bits of each batch. Raises ValueError where nothing was kept."""
        if self.elements > MOST:
            raise ValueError(
                f"the results have {self.elements:,} elements, and the bits of each are kept of up to {MOST:,}: study "
                "fewer rows, such as a part of the inputs"
            )
        if name not in self.bits:
            raise ValueError(f"{name} has no batch with two samples of one shape, so that no element has bits")
        return self.bits[name]

    def located(self, name: str, row: int) -> tuple[int, int]:
        """Return the batch of a row of all batches, and its number there. Raises ValueError for another row."""
        sizes = [len(part) if part.ndim else 1 for part in self.parts(name)]
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < sum(sizes):
            raise ValueError(f"row is {shown(row)}; expected a whole number from 0 to {sum(sizes) - 1}")
        first = np.cumsum([0, *sizes])
        batch = int(np.searchsorted(first, row, side="right")) - 1
        return batch, row - int(first[batch])
