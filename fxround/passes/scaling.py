"""The operations of a rounding to a scaled format, written once for graphs and for tensors.

A writer says what an operation is: in a graph, a new node (``NodeWriter``); for a tensor, its result. The operations
are the figures of blocks, programs of ``kernels.scaled`` on them, and the program of the elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Generic, Literal, Protocol

import torch
from torch import fx

from fxround.graph.dialect import Pointwise
from fxround.graph.dialect.blocks import (
    BlockExpand,
    BlockMaximum,
    BlockPercentile,
    BlockSum,
    block_sizes,
)
from fxround.graph.dialect.call import Call, T
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import Site
from fxround.kernels.program import Program
from fxround.kernels.scaled import (
    choice_program,
    element_parts,
    element_program,
    error_program,
    inner_program,
    outer_program,
    scale_program,
    whole_program,
    zero_program,
)
from fxround.numerics.faults import Faults
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes import streams
from fxround.passes.inject_faults import flip_of, site_of
from fxround.passes.rewrite import ROUND, locating, rng_of
from fxround.passes.streams import Part


class Writer(Protocol[T]):
    """Writes operations on operands of one kind."""

    def call(self, call: Call[T]) -> T:
        """Return the result of an operator on blocks."""

    def program(self, program: Program, operands: Sequence[T], dtype: torch.dtype) -> T:
        """Return the result of a program, which is stored in this dtype, and is no element of the result."""

    def elements(self, program: Program, operands: Sequence[T], held: Sequence[T]) -> T:
        """Return the result of the program of the elements, whose modes may draw.

        held: its operands but the first one, as memory holds them, by which an element is multiplied.
        """

    @property
    def flips_scales(self) -> bool:
        """Whether bits of the scales flip, of blocks or of the tensor."""

    def flipped(self, scale: T, fmt: Format, whole: bool = False) -> T:
        """Return scales of this format with flipped bits; whole: those of the tensor, and not of blocks."""

    def multiplier(self, rounding: ScaledRounding) -> T:
        """Return the multiplier of a delayed scale, or held scales. Raises ValueError where there is no state."""


# What a new node is: what scales are computed from, the elements before their bits flip, the elements, or flipped bits.
What = Literal["scale", "quotient", "elements", "flipped_elements", "flipped_scales", "flipped_tensor"]
_FLIPPED: Final[dict[Part, What]] = {
    "elements": "flipped_elements",
    "scales": "flipped_scales",
    "tensor": "flipped_tensor",
}


@dataclass
class NodeWriter(ABC):
    """A Writer of nodes. Elements draw from ``stream``, and bits flip as the assignment of ``place`` says."""

    graph: fx.GraphModule
    place: Site
    stream: int

    # The kind of the elements.
    KIND: ClassVar[str]

    @abstractmethod
    def call(self, call: Call[fx.Node]) -> fx.Node:
        """Return a new node that calls an operator on blocks."""

    @abstractmethod
    def write(self, call: Call[fx.Node], place: Site, what: What) -> fx.Node:
        """Return a new node that calls an operator, with this Site."""

    @abstractmethod
    def multiplier(self, rounding: ScaledRounding) -> fx.Node:
        """Return the node of the multiplier of a delayed scale. Raises ValueError where there is no state."""

    @property
    def faults(self) -> Faults | None:
        """The faults that the policy wants."""
        return self.place.assignment.faults if self.place.assignment is not None else None

    @property
    def flips_scales(self) -> bool:
        """Whether the policy flips bits of the scales."""
        return self.faults is not None and bool(self.faults.of_scales or self.faults.of_tensors)

    def write_rounded(self, call: Call[fx.Node], what: What, kind: str = "operand") -> fx.Node:
        """Return a new node that rounds. Raises UnsupportedRounding, with the place, if there is no kernel for it."""
        with locating(self.place):
            call.kernel(call.loads())
            return self.write(call, replace(self.place, operator=ROUND, kind=kind, status="rounded", reason=""), what)

    def program(self, program: Program, operands: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
        """Return the node of a program for scales, which draws nothing."""
        return self.write_rounded(Pointwise(list(operands), str(program), dtype, rng_of(self.graph), 0), "scale")

    def elements(self, program: Program, operands: Sequence[fx.Node], held: Sequence[fx.Node]) -> fx.Node:
        """Return the node of the elements, which draws from the stream."""
        dtype, rng, xs = operands[0].meta["val"].dtype, rng_of(self.graph), list(operands)
        wanted = self.place.assignment
        assert wanted is not None
        rounding = wanted.scaled or wanted.blocks
        if wanted.faults is not None and rounding is not None:
            first, program = element_parts(rounding, Format.parse(FORMAT_OF[dtype]))
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            quotient = self.write_rounded(Pointwise(xs, str(first), wide, rng, self.stream), "quotient")
            with locating(self.place):
                encoding = Encoding.of_elements(rounding.format)
            xs = [self.write_flipped(quotient, encoding), *held]
        return self.write_rounded(Pointwise(xs, str(program), dtype, rng, self.stream), "elements", self.KIND)

    def flipped(self, scale: fx.Node, fmt: Format, whole: bool = False) -> fx.Node:
        """Return the scales with flipped bits."""
        with locating(self.place):
            encoding = Encoding(fmt)
        return self.write_flipped(scale, encoding, "tensor" if whole else "scales")

    def write_flipped(self, node: fx.Node, encoding: Encoding, part: Part = "elements") -> fx.Node:
        """Return a value, its elements or its scales with the bits flipped that the policy says, one node a fault."""
        all_faults = self.faults or Faults(())
        faults = {"elements": all_faults.of_elements, "scales": all_faults.of_scales, "tensor": all_faults.of_tensors}
        at = replace(self.place, kind="operand")
        for i, fault in enumerate(faults[part]):
            call = flip_of(self.graph, node, at, fault, encoding, streams.of_fault(self.stream, i, part))
            node = self.write(call, site_of(at, fault, encoding.format), _FLIPPED[part])
        return node


def scaled(x: T, ndim: int, dtype: torch.dtype, rounding: ScaledRounding, dims: Sequence[int], writer: Writer[T]) -> T:
    """Return x rounded to a scaled format.

    ndim, dtype: the number of x's dimensions, at least 1 unless the format has no scale, and its dtype. dims: the
    dimension along which blocks run; several for "channel".

    Raises ValueError for a block that the dimensions cannot have, IndexError for a dimension out of range.
    """
    scaling = rounding.format.scaling
    sizes = None if scaling is None else block_sizes(scaling.block, dims, ndim)
    return rounded_in_blocks(x, dtype, rounding, sizes, writer)


def rounded_in_blocks(
    x: T, dtype: torch.dtype, rounding: ScaledRounding, sizes: Sequence[int] | None, writer: Writer[T]
) -> T:
    """Return x rounded to a scaled format in blocks of these sizes; None for a format without scales of blocks."""
    program, scaling = element_program(rounding, Format.parse(FORMAT_OF[dtype])), rounding.format.scaling
    if scaling is None:
        return writer.elements(program, [x], [])
    if scaling.how == "delayed":
        given = writer.multiplier(rounding)
        held = writer.flipped(given, scaling.format) if writer.flips_scales else given
        return writer.elements(program, [x, given], [held])
    if sizes is None:
        raise LookupError(f"{rounding.format} has scales of blocks, and the sizes of blocks are missing")
    if scaling.how == "held":
        given = writer.multiplier(rounding)
        flipped = writer.flipped(given, scaling.format) if writer.flips_scales else given
        wide = [writer.call(BlockExpand(scale, x, sizes)) for scale in dict.fromkeys((given, flipped))]
        return writer.elements(program, [x, wide[0]], [wide[-1]])
    scales = _Scales(x, dtype, rounding, sizes, writer)
    factors = scales.affine() if scaling.how == "affine" else [scales.best() if scaling.fit else scales.scale()]
    wide = [writer.call(BlockExpand(f, x, sizes)) for f in factors]
    if not writer.flips_scales:
        return writer.elements(program, [x, *wide], wide)
    held = writer.call(BlockExpand(scales.held(factors[0]), x, sizes))
    return writer.elements(program, [x, *wide], [held, *wide[1:]])


class _Scales(Generic[T]):
    """The scales of one tensor's blocks."""

    def __init__(
        self, x: T, dtype: torch.dtype, rounding: ScaledRounding, sizes: Sequence[int], writer: Writer[T]
    ) -> None:
        self.x, self.dtype, self.rounding, self.sizes, self.writer = x, dtype, rounding, sizes, writer
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.carrier = Format.parse(FORMAT_OF[self.wide])
        assert rounding.format.scaling is not None
        self.scaling = rounding.format.scaling
        if self.scaling.how == "affine":
            return
        self.errors: list[T] = []
        self.largest = writer.call(
            BlockMaximum(x, sizes)
            if self.scaling.percentile is None
            else BlockPercentile(x, sizes, self.scaling.percentile)
        )
        self.read = [self.largest]
        if self.scaling.whole is not None:
            self.read.append(writer.call(BlockMaximum(x, [0] * len(sizes))))

    def scale(self, fit: int = 0) -> T:
        """Return the scale of each block; ``fit``: the position among ``Scaling.fit``."""
        return self.writer.program(scale_program(self.rounding, self.carrier, fit), self.read, self.wide)

    def best(self) -> T:
        """Return the scale of each block that has the least error."""
        write, count = self.writer, len(self.scaling.fit)
        scales = [self.scale(i) for i in range(count)]
        most = write.call(BlockExpand(self.largest, self.x, self.sizes))
        measured = error_program(self.rounding, self.carrier)
        for scale in scales:
            wide = write.call(BlockExpand(scale, self.x, self.sizes))
            lost = write.program(measured, [self.x, wide, most], self.wide)
            self.errors.append(write.call(BlockSum(lost, self.sizes)))
        return write.program(choice_program(count), [*self.errors, *scales], self.wide)

    def held(self, scale: T) -> T:
        """Return the scale of each block after bits of it have flipped, those of its own format."""
        write, scaling, count = self.writer, self.scaling, len(self.scaling.fit)
        if scaling.whole is None:
            return write.flipped(scale, scaling.format)
        # Relative to the scale of the tensor.
        programs = [inner_program(self.rounding, self.carrier, fit) for fit in range(max(1, count))]
        own, *others = (write.program(program, self.read, self.wide) for program in programs)
        if count:
            own = write.program(choice_program(count), [*self.errors, own, *others], self.wide)
        whole = write.program(whole_program(self.rounding), [self.read[1]], self.wide)
        flipped = [write.flipped(own, scaling.format), write.flipped(whole, scaling.whole, whole=True)]
        return write.program(outer_program(self.rounding), flipped, self.wide)

    def affine(self) -> list[T]:
        """Return the scale and the zero point of each block."""
        write = self.writer
        sides = [Program.parse(f"t0 = {sign}(x0) @ exact; t1 = relu(t0) @ exact") for sign in ("identity", "neg")]
        above, below = (
            write.call(BlockMaximum(write.program(side, [self.x], self.dtype), self.sizes)) for side in sides
        )
        scale = write.program(scale_program(self.rounding, self.carrier), [above, below], self.wide)
        zero = write.program(zero_program(self.rounding, self.carrier), [below, scale], self.wide)
        return [scale, zero]


__all__ = ["NodeWriter", "What", "Writer", "rounded_in_blocks", "scaled"]
