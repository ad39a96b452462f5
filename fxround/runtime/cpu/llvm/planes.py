"""The Contract shape on the windows of few channels: image planes in scratch, vectors along their lines.

A plane is the padded image of one input channel, or some of its rows, split by the stride into parts: the elements that
one tap of the kernel meets for adjacent results are adjacent in a part. The lines of a part follow one another, so a
vector of results may cross the end of a line, and a tap is one offset for all results. Lanes between two lines belong
to no result; they compute on whatever is stored there and are left out when results are copied to their places.

    stride 1      x00 x01 x02 | x10 x11 x12                          results are 3 apart, taps 0, 1, 3, 4
    stride 2      x00 x02 | x20 x22 || x01 x03 | x21 x23 || ...      one part for each remainder of row and column

Each lane takes the steps k = 0, 1, 2, ... from +0 with its own stream, which is numbered by the place of its result:
exactly as the packed kernel does (``contract``). Nothing outside of the image is loaded; it counts as +0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Contract
from fxround.numerics.formats.storage import ELEMENT_OF
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    count,
    define,
    iota,
    masked_load,
    masked_store,
    store_vector,
    with_sizes,
)
from fxround.runtime.cpu.llvm.packing import gather
from fxround.runtime.cpu.llvm.render import bytes_of, literal, llvm_type, splat
from fxround.runtime.cpu.llvm.shards import each_shard
from fxround.runtime.cpu.llvm.steps import Steps, WaitingSums
from fxround.runtime.cpu.llvm.streams import Streams

SIZES: Final = (
    *("outputs", "channels", "groups", "length", "block", "cuts", "cut"),
    *(f"{name}{d}" for name in ("results", "image", "padding", "stride", "lines") for d in range(3)),
    *("part", "plane"),
)
POINTERS: Final = ("layout", "x", "w", "taps", "places", "out", "scratch", "key", "flags")


@dataclass(frozen=True)
class PlanesVariant:
    """A Contract over planes: lanes of a vector, and the numbers of vectors of results to compute together, in turn.

    ``step`` is the stride of the last dimension if that is 1 or 2, and 0 if it is an argument: all other strides share
    one code, whose size does not grow with the stride. ``flat`` says that the middle dimension has size 1 and no
    padding.
    """

    kernel: Contract
    lanes: int
    tiles: tuple[int, ...]
    step: int
    flat: bool
    machine: Machine

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"{self.kernel.digest}:planes:{self.lanes}x{self.tiles}:{self.step}:{self.flat}:{self.machine}"

    def scratch_bytes(self, length: int, planes: int, positions: int) -> int:
        """The bytes of scratch for the lifted weights, ``planes`` elements, and an item's results with gaps."""
        return bytes_of(self.kernel.accumulator) * (length + planes) + 8 * (positions + self.lanes)


def build_planes(variant: PlanesVariant) -> str:
    """The LLVM text of ``planes(begin, end, POINTERS...)``; the array ``layout`` holds SIZES as int64,
    and then the table of the shards of ``length`` (``shards``).

    Items count (image, group, cut of the first dimension), the cuts fastest. Tensors are row-major with three spatial
    dimensions: x (images, groups * channels, *image), w (groups * outputs, length), out (images, groups * outputs,
    *results).

    A plane has one part for each remainder by the stride, ``part`` elements apart. A part has lines0 * lines1 lines of
    lines2 elements, and at least a vector of elements after them. taps[k] is the offset in the group's planes of the
    element of step k for the result at position 0. places[p] is the number within the item of the result at position p
    of a part (any number where there is none), for all positions up to a whole vector after the last result.
    """
    module = ir.Module("planes")
    args = [("begin", I64), ("end", I64), *((n, PTR) for n in POINTERS)]
    b, a = define(module, "planes", args, variant.kernel.direction, variant.kernel.watched)
    a = with_sizes(b, a, SIZES)
    work = _Planes(b, a, variant)
    with count(b, a["begin"], a["end"]) as item:
        work.enter(item)
        with count(b, I64(0), a["channels"]) as channel:
            work.fill(channel)
        with count(b, I64(0), a["outputs"]) as output:
            work.contract(output)
            work.deliver()
    b.ret_void()
    return str(module)


class _Planes:
    """The results of one item, and the scratch in which they are computed."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: PlanesVariant) -> None:
        if variant.flat:
            a = a | {"image1": I64(1), "lines1": I64(1), "results1": I64(1), "padding1": I64(0)}
        if variant.step:
            a = a | {"stride2": I64(variant.step)}
        self.b, self.a, self.variant, self.kernel, self.lanes = b, a, variant, variant.kernel, variant.lanes
        self.steps = Steps(b, self.kernel, self.lanes, variant.machine, a["flags"])
        self.streams: Any = Streams.load(b, a["key"], variant.kernel.parts) if variant.kernel.streams else None
        self.value = llvm_type(self.kernel.accumulator, 1)
        self.vector = llvm_type(self.kernel.accumulator, self.lanes)
        self.image, self.result = MEMORY[self.kernel.loads[1]], MEMORY[self.kernel.result]
        # Scratch: the lifted weights of one output channel, the planes, and the results in the stored type.
        self.weights = a["scratch"]
        self.planes = at(b, self.weights, a["length"], self.value)
        self.done = at(b, self.planes, b.mul(a["channels"], a["plane"]), self.value)

    def enter(self, item: Any) -> None:
        """Find the image, group and rows of an item."""
        b, a = self.b, self.a
        self.line = b.sdiv(item, a["cuts"])
        self.group = b.srem(self.line, a["groups"])
        self.first = b.mul(b.sub(item, b.mul(self.line, a["cuts"])), a["cut"])
        left = b.sub(a["results0"], self.first)
        self.outer = b.select(b.icmp_signed("<", left, a["cut"]), left, a["cut"])
        # Positions run from the first result's to the last one's, gaps included. A cut of fewer rows than ``cut`` has
        # fewer vectors; its plane has the same size, and rows beyond the image are +0.
        rows = b.mul(b.sub(self.outer, I64(1)), a["lines1"])
        last = b.mul(b.add(rows, b.sub(a["results1"], I64(1))), a["lines2"])
        self.vectors = b.sdiv(b.add(b.add(last, a["results2"]), I64(self.lanes - 1)), I64(self.lanes))

    def fill(self, channel: Any) -> None:
        """Fill the plane of one input channel, line by line.

        A line is stored in whole vectors; the line after it overwrites what it leaves after its end.
        """
        b, a = self.b, self.a
        plane = at(b, self.planes, b.mul(channel, a["plane"]), self.value)
        size = b.mul(b.mul(a["image0"], a["image1"]), a["image2"])
        image = at(b, a["x"], b.mul(b.add(b.mul(self.line, a["channels"]), channel), size), self.image)
        with count(b, I64(0), a["stride0"]) as r0, count(b, I64(0), a["stride1"]) as r1:
            number = b.mul(b.add(b.mul(r0, a["stride1"]), r1), a["stride2"])
            part = b.mul(number, a["part"])
            with count(b, I64(1), b.add(a["stride2"], I64(1))) as r2:
                # The last vector of results reads up to lanes - 1 elements after a part's last line. With 16 lanes that
                # is these zeros, or what the last line leaves there. With fewer lanes some are whatever scratch held
                # before: they meet lanes without a result, so they may raise a flag, which costs a second run, and
                # change no result.
                end = b.sub(b.mul(b.add(number, r2), a["part"]), I64(self.lanes))
                b.store(self.steps.zero, at(b, plane, end, self.value), align=4)
            with count(b, I64(0), a["lines0"]) as q0, count(b, I64(0), a["lines1"]) as q1:
                y0, inside0 = self._source(0, b.add(q0, self.first), r0)
                y1, inside1 = self._source(1, q1, r1)
                inside = b.and_(inside0, inside1)
                row = b.mul(b.add(b.mul(y0, a["image1"]), y1), a["image2"])
                line = at(b, plane, b.add(part, b.mul(b.add(b.mul(q0, a["lines1"]), q1), a["lines2"])), self.value)
                self._fill_line(at(b, image, b.select(inside, row, I64(0)), self.image), inside, line)

    def _source(self, d: int, line: Any, remainder: Any) -> tuple[Any, Any]:
        """The row of the image that a line holds, and whether the image has it."""
        b, a = self.b, self.a
        y = b.sub(b.add(b.mul(line, a[f"stride{d}"]), remainder), a[f"padding{d}"])
        # A negative row is a large number without its sign, so one comparison excludes both sides.
        return y, b.icmp_unsigned("<", y, a[f"image{d}"])

    def _fill_line(self, row: Any, inside: Any, line: Any) -> None:
        """Distribute a row of the image to the parts of its columns' remainders."""
        b, a, step = self.b, self.a, self.variant.step
        # A row outside of the image has size 0: every mask is empty, and the line becomes +0.
        size = b.select(inside, a["image2"], I64(0))
        with count(b, I64(0), a["lines2"], self.lanes) as q:
            column = b.sub(b.mul(q, a["stride2"]), a["padding2"])
            read = [self._read(row, b.add(column, I64(n * self.lanes)), size) for n in range(step)]
            if step == 1:
                self._put(read[0], line, q)
            elif step == 2:
                # The two adjacent vectors hold 2 * lanes columns: the even ones go to part 0, the odd ones to part 1.
                for remainder in range(2):
                    value = b.shuffle_vector(*read, _every_other(remainder, self.lanes))
                    self._put(value, at(b, line, b.mul(I64(remainder), a["part"]), self.value), q)
            else:
                with count(b, I64(0), a["stride2"]) as r2:
                    value = self._gather(row, b.add(column, r2), size)
                    self._put(value, at(b, line, b.mul(r2, a["part"]), self.value), q)

    def _read(self, row: Any, column: Any, size: Any) -> Any:
        """Adjacent elements of a row, +0 outside of it."""
        b, lanes = self.b, self.lanes
        narrow = [b.trunc(v, I32) for v in (column, size)]
        at_lane, end = b.add(splat(b, narrow[0], lanes), iota(lanes, I32)), splat(b, narrow[1], lanes)
        return masked_load(b, at(b, row, column, self.image), self.image, b.icmp_unsigned("<", at_lane, end), lanes)

    def _gather(self, row: Any, column: Any, size: Any) -> Any:
        """Elements of a row that are ``stride2`` apart, +0 outside of it."""
        b, lanes = self.b, self.lanes
        columns = b.add(splat(b, column, lanes), b.mul(iota(lanes), splat(b, self.a["stride2"], lanes)))
        pointers = b.gep(row, [columns], source_etype=self.image)
        pointers.type = ir.VectorType(PTR, lanes)
        return gather(b, pointers, self.image, b.icmp_unsigned("<", columns, splat(b, size, lanes)), lanes)

    def _put(self, stored: Any, line: Any, place: Any) -> None:
        """Lift a vector of stored elements and store it in a line."""
        b = self.b
        if ELEMENT_OF[self.kernel.loads[1]] == "u32":
            stored = b.zext(stored, llvm_type("u32", self.lanes))
        b.store(self.steps.lift(1, stored, self.lanes), at(b, line, place, self.value), align=4)

    def contract(self, output: Any) -> None:
        """Compute the item's results of one output channel, with gaps, in scratch."""
        b, a = self.b, self.a
        channel = b.mul(self.group, a["outputs"])
        weights = at(b, a["w"], b.mul(b.add(channel, output), a["length"]), MEMORY[self.kernel.loads[0]])
        with count(b, I64(0), a["length"]) as k:
            # Lifted once for an output channel: every tile reads them again.
            one = self.steps.load_lifted(0, at(b, weights, k, MEMORY[self.kernel.loads[0]]), 1)
            b.store(one, at(b, self.weights, k, self.value))
        size = b.mul(a["results1"], a["results2"])
        whole = b.mul(b.add(b.mul(self.line, a["outputs"]), output), a["results0"])
        self.base = b.mul(b.add(whole, self.first), size)
        # The widest tiles first; the last width is 1, so every vector is computed.
        vector: Any = I64(0)
        for tile in self.variant.tiles:
            end = b.add(vector, b.mul(b.sdiv(b.sub(self.vectors, vector), I64(tile)), I64(tile)))
            with count(b, vector, end, tile) as v:
                self._tile(b.mul(v, I64(self.lanes)), tile)
            vector = end

    def _tile(self, position: Any, vectors: int) -> None:
        """Compute ``vectors`` vectors of results from this position on."""
        b, a = self.b, self.a
        offsets = [b.add(position, I64(v * self.lanes)) for v in range(vectors)]
        states = [self._start(offset, I64(0)) for offset in offsets] if self.kernel.streams else []
        carried = self.steps.carried([self.steps.zero] * vectors, states)
        here = at(b, self.planes, position, self.value)
        if self.kernel.shards > 1:
            waiting = WaitingSums(self.steps, vectors)
            with each_shard(b, at(b, a["layout"], I64(len(SIZES)), I64)) as shard:
                states = [self._start(offset, shard.number) for offset in offsets] if self.kernel.streams else []
                carried.store([self.steps.zero] * vectors + states + carried.load()[vectors + len(states) :])
                self._take(carried, here, vectors, shard.begin, shard.end)
                self.steps.add_shards(carried, vectors, shard, waiting.load)
                waiting.store(shard.last, carried.load())
        elif not self.kernel.chunk:
            self._take(carried, here, vectors, I64(0), a["length"])
        else:
            totals = Carried(b, [self.steps.zero] * vectors)
            with count(b, I64(0), a["length"], a["block"]) as k:
                # A chunk starts from +0; the streams go on.
                carried.store([self.steps.zero] * vectors + carried.load()[vectors:])
                end = b.add(k, a["block"])
                end = b.select(b.icmp_signed("<", end, a["length"]), end, a["length"])
                self._take(carried, here, vectors, k, end)
                values = carried.load()
                self.steps.combine(values, totals.load())
                carried.store(values)
                totals.store(values[:vectors])
        values = carried.load()
        if not self.kernel.streams:
            values += [literal("u64", 0, self.lanes)] * vectors
        for v, offset in enumerate(offsets):
            rounded = self.steps.finish(values[v], values[vectors + v])
            store_vector(b, rounded, at(b, self.done, offset, self.result), self.kernel.result, self.lanes)

    def _start(self, offset: Any, shard: Any) -> Any:
        """The first states of a vector's streams in a shard; a lane without a result gets any."""
        b = self.b
        # The same numbers as in ``contract``: the place in the row-major result.
        places = b.load(at(b, self.a["places"], offset, I64), typ=ir.VectorType(I64, self.lanes), align=8)
        elements = b.add(splat(b, self.base, self.lanes), places)
        return self.streams.start(
            b, self.streams.number(b, elements, self.lanes, self.kernel.shards, shard), self.lanes, True
        )

    def _take(self, carried: Carried, here: Any, vectors: int, first: Any, end: Any) -> None:
        """Take the steps first ... end, ascending."""
        b = self.b
        with self.steps.along(first, end, carried, vectors) as k:
            values = carried.load()
            one = b.load(at(b, self.weights, k, self.value), typ=self.value, align=4)
            left = splat(b, one, self.lanes)
            # Results and the elements of one tap have the same distances in a part, so one offset is right for every
            # lane of every vector. The order of k is the table's, that of the packed kernel.
            line = at(b, here, b.load(at(b, self.a["taps"], k, I64), typ=I64), self.value)
            for v in range(vectors):
                right = b.load(at(b, line, I64(v * self.lanes), self.value), typ=self.vector, align=4)
                self.steps.step(values, vectors, v, left, right)
            carried.store(values)

    def deliver(self) -> None:
        """Copy the results of one output channel from scratch to their places, line by line."""
        b, a, lanes = self.b, self.a, self.lanes
        with count(b, I64(0), self.outer) as i0, count(b, I64(0), a["results1"]) as i1:
            line = at(b, self.done, b.mul(b.add(b.mul(i0, a["lines1"]), i1), a["lines2"]), self.result)
            row = b.add(self.base, b.mul(b.add(b.mul(i0, a["results1"]), i1), a["results2"]))
            target = at(b, a["out"], row, self.result)
            with count(b, I64(0), a["results2"], lanes) as j:
                # The mask leaves out the gap at the end of a line, which in the result is the next line's beginning.
                left = splat(b, b.trunc(b.sub(a["results2"], j), I32), lanes)
                value = b.load(at(b, line, j, self.result), typ=ir.VectorType(self.result, lanes), align=2)
                mask = b.icmp_signed("<", iota(lanes, I32), left)
                masked_store(b, value, at(b, target, j, self.result), self.result, mask, lanes)


def _every_other(first: int, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, lanes), [I32(2 * n + first) for n in range(lanes)])
