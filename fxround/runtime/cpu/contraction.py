"""Contractions over CPU tensors: how operands are stored, and how the work is cut into items.

The second operand is described by two tables of offsets into one tensor, so a matrix of any strides and the windows of
an image are one case. Chunks of rows, blocks of k and threads cut the work without changing a bit of the result. Sizes
are compared before a pointer is taken, and a kernel reads memory only by the sizes and offsets that are made here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Contract
from fxround.numerics.orders import shards_of
from fxround.runtime import buffers
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cpu.code import current_set, native, signature
from fxround.runtime.cpu.llvm import contract, direct
from fxround.runtime.cpu.llvm.contract import build_contract
from fxround.runtime.cpu.llvm.direct import DirectVariant, build_direct, direct_for
from fxround.runtime.cpu.llvm.engine import machine_of
from fxround.runtime.cpu.llvm.render import bytes_of
from fxround.runtime.cpu.llvm.shards import table_of
from fxround.runtime.cpu.llvm.tile import ContractVariant, quick_for, tile_for
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.cpu.threads import piece_of, pieces_of, scratch, spread

_CONTRACT: Final = signature(2, len(contract.POINTERS))
_DIRECT: Final = signature(2, len(direct.POINTERS))
# The steps that make another thread worth its start: of a general kernel, and of one whose step is an instruction or
# two.
_ENOUGH: Final = 1 << 17
_ENOUGH_QUICK: Final = 1 << 19
# Steps of a block: a packed panel of them stays in the first-level cache, the packed rows of an item in the second one.
# A multiple of 32, because steps that share a word of coins begin at multiples of 32 (``Steps.along``).
_BLOCK: Final = 192
_CHUNK_BYTES: Final = 1 << 20
# The steps that take as long as packing an element.
_PACKED: Final = 20
# What one item for each thread must save: none of them can take over what a delayed one has.
_ALONE: Final = 1.1
_PARKED_BYTES: Final = 1 << 21
# Products of at most this many rows, or of at most this many steps, are not packed.
_FEW_ROWS: Final = 8
_SMALL: Final = 1 << 15


@dataclass(frozen=True)
class Code:
    """A compiled variant, its array of sizes and strides (int64), and the bytes of scratch that a thread needs."""

    function: Any
    layout: Any
    scratch: int

    def arguments(self, pointers: tuple[int, ...], space: int, key: Any, flags: Any) -> tuple[int, ...]:
        """The arguments of ``function`` after the range of items; the caller keeps the arrays alive."""
        at = ctypes.addressof
        return at(self.layout), *pointers, space, 0 if key is None else at(key), at(flags)

    def run(self, items: range, pieces: int, pointers: tuple[int, ...], key: Any) -> list[range]:
        """Do the items, cut into pieces; returns the pieces whose results do not count."""
        flags = (ctypes.c_int32 * pieces)()
        space, step = scratch(self.scratch, pieces > 1)
        arguments = self.arguments(pointers, space.data_ptr(), key, flags)
        last = len(arguments) - 1
        # Each thread has scratch of its own, and each piece a flag of its own: no two write to the same memory.
        spread(self.function, items, pieces, arguments, {last - 2: step}, {last: ctypes.sizeof(ctypes.c_int32)})
        return [piece_of(items, pieces, i) for i in range(pieces) if flags[i]]


@dataclass(frozen=True)
class Work:
    """How operands of one shape are contracted: the items of the work, and the code that does them.

    general    the code whose results always count, compiled when it is first needed
    quick      code whose results may not count; ``general`` then does the items again
    items      the number of items
    enough     the items that make another thread worth its start
    complete   from a number of items, counted from the first, to the number of leading elements of the result that are
               final once these items are done
    """

    general: Callable[[], Code]
    quick: Code | None
    items: int
    enough: int
    complete: Callable[[int], int]

    def run(self, pointers: tuple[int, ...], key: Any, items: range | None = None) -> None:
        """Do every item, or a range of them. ``pointers`` are the addresses of operands, tables and result."""
        chosen = range(self.items) if items is None else items
        pieces = pieces_of(len(chosen), self.enough)
        if self.quick is None:
            self.general().run(chosen, pieces, pointers, key)
            return
        for piece in self.quick.run(chosen, pieces, pointers, key):
            # One bad result spoils its whole piece. The piece is done again with a flag for each item, so that the slow
            # code does only the items that need it. Writing a result twice is safe: no item reads one.
            again = self.quick.run(piece, len(piece), pointers, key) if len(piece) > 1 else [piece]
            for run in joined(again):
                self.general().run(run, len(run), pointers, key)


class Pending(NamedTuple):
    """A contraction that has its operands and is still to be done.

    ``shape`` and ``dtype`` are those of the row-major result. ``plan`` is None if that has no element. ``pointers`` are
    the addresses of operands and tables, which ``held`` keeps alive.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    plan: Work | None = None
    pointers: tuple[int, ...] = ()
    held: tuple[Tensor, ...] = ()
    key: Any = None

    def run(self, result: int, items: range | None = None) -> None:
        """Do every item, or a range of them; ``result`` is the address of the result's element 0."""
        if self.plan is not None:
            self.plan.run((*self.pointers, result), self.key, items)

    def finish(self) -> Tensor:
        """Allocate and compute the result."""
        made = buffers.empty(self.shape, self.dtype)
        self.run(made.data_ptr())
        return made


@dataclass(frozen=True)
class Contraction:
    """A plan for operands and results of given layouts, with its tables; addresses are given for each run."""

    plan: Work
    tables: tuple[Tensor, ...]

    @staticmethod
    def of(kernel: Contract, left: Sequence[int], strides: Sequence[int], right: Right, groups: int) -> Contraction:
        """The contraction of a first operand of shape ``left`` = (g, rows, length) and ``strides`` with ``right``.

        With groups = 0 the first operand has one matrix for each batch (g == batch); otherwise batch i uses matrix i
        mod groups.
        """
        _, rows, length = left
        batch, columns = right.batch, right.n_offsets.numel()
        isa, sizes = current_set(), (batch, rows, columns, length, groups)
        if right.k_step is not None and _unpacked(kernel, isa, sizes):
            return Contraction(_direct(kernel, isa, sizes, (*strides, right.step, right.k_step)), ())
        out = right.place(rows)
        plan = _packed(kernel, isa, torch.get_num_threads(), sizes, (*strides, right.step, out.step, out.row_step))
        return Contraction(plan, (right.k_offsets, right.n_offsets, out.offsets))

    def of_operands(self, shape: Sequence[int], dtype: torch.dtype, a: Tensor, b: Tensor, key: Any) -> Pending:
        """The contraction with its operands; ``shape`` and ``dtype`` are those of the result."""
        held = (a, b, *self.tables)
        return Pending(shape, dtype, self.plan, addresses(held), held, key)


def _unpacked(kernel: Contract, isa: str, sizes: tuple[int, ...]) -> bool:
    """Whether panels would be read too seldom to be worth packing, and the processor has masked loads."""
    machine, (_, rows, columns, length, _) = machine_of(isa), sizes
    # AVX2 masks loads of 32 and 64 bits only; without masks the last columns could not be loaded in place.
    masks = machine.vector_bytes == 64 or (machine.vector_bytes == 32 and kernel.loads[1] in ("f32", "f64"))
    return masks and length > 0 and (rows <= _FEW_ROWS or rows * columns * length <= _SMALL)


@lru_cache(maxsize=4096)
def _direct(kernel: Contract, isa: str, sizes: tuple[int, ...], steps: tuple[int, ...]) -> Work:
    """The plan of ``direct`` for these sizes and steps."""
    batch, rows, columns, length, groups = sizes
    machine = machine_of(isa)
    general, quick = direct_for(kernel, machine, rows), quick_for(kernel, machine)
    first = general if quick is None else direct_for(quick, machine, rows)
    # Both variants work on the same items: an item's columns are whole panels of either.
    width = max(general.width, first.width)
    batches = _ceiling(columns, width)

    def code(variant: DirectVariant) -> Code:
        run = native(variant.digest, build_direct, variant, "direct", _DIRECT)
        # ``width // variant.width`` panels make an item of the same columns for either variant.
        layout = (rows, columns, length, kernel.chunk or length, groups, batches, width // variant.width, *steps)
        return Code(run, array((*layout, *table_of(length, kernel.shards))), 0)

    enough = max(1, enough_for(kernel) // (rows * width * length))
    first_code = None if quick is None else code(first)
    return Work(cache(lambda: code(general)), first_code, batch * batches, enough, in_lines(batches, rows * columns))


@lru_cache(maxsize=4096)
def _packed(kernel: Contract, isa: str, threads: int, sizes: tuple[int, ...], steps: tuple[int, ...]) -> Work:
    """The plan of ``contract`` for these sizes and steps."""
    batch, rows, columns, length, groups = sizes
    # With chunks, every block is a chunk: ``Item._combine`` adds a block's sums to the totals.
    block = kernel.chunk or _block(length, kernel.shards)
    machine = machine_of(isa)
    general = tile_for(kernel, machine, max(block, _BLOCK))
    quick = quick_for(kernel, machine)
    first = general if quick is None else tile_for(quick, machine, max(block, _BLOCK))
    chunk, wide = _cut(general, first, batch, rows, columns, threads)

    def code(variant: ContractVariant) -> Code:
        run = native(variant.digest, build_contract, variant, "contract", _CONTRACT)
        panels, panels_wide = _ceiling(columns, variant.width), wide // variant.width
        layout = (rows, columns, length, panels, chunk, panels_wide, block, groups, *steps)
        return Code(
            run, array((*layout, *table_of(length, kernel.shards))), variant.scratch_bytes(chunk, panels_wide, block)
        )

    chunks, runs, row_step = _ceiling(rows, chunk), _ceiling(columns, wide), steps[-1]
    if row_step == columns:
        complete = in_lines(runs, chunk * columns, rows * columns)
    else:
        complete = _in_images((batch * chunks - 1) * runs, wide, columns, row_step, batch * rows * row_step)
    enough = max(1, enough_for(kernel) // max(1, chunk * wide * length))
    first_code = None if quick is None else code(first)
    return Work(cache(lambda: code(general)), first_code, batch * chunks * runs, enough, complete)


def _block(length: int, shards: int) -> int:
    """The steps of a block of a chain; of a shard's chain, equal parts of the longest one."""
    longest = shards_of(length, shards)[0]
    return min(max(length, 1), _BLOCK) if shards == 1 else _even(max(longest.end - longest.begin, 1), _BLOCK, 32)


def in_lines(items: int, line: int, batch: int | None = None) -> Callable[[int], int]:
    """``Work.complete`` if ``items`` items make a line, and lines a batch; the last line of a batch may be short."""
    whole = batch or line
    lines = _ceiling(whole, line)

    def complete(done: int) -> int:
        batches, left = divmod(done // items, lines)
        return batches * whole + min(left * line, whole)

    return complete


def _in_images(before: int, wide: int, columns: int, pixels: int, image: int) -> Callable[[int], int]:
    """``Work.complete`` where items of the last rows end one image after another.

    ``before`` is the number of items of the other rows.
    """
    return lambda done: min(max(0, done - before) * wide, columns) // pixels * image


def begin_product(product: Product) -> Pending:
    """Begin a contraction."""
    kernel, size = product.kernel, product.size
    if product.is_empty:
        return Pending(size, dtype_of(kernel.result))
    contraction = Contraction.of(kernel, product.a.shape, product.a.stride(), product.right, product.groups)
    return contraction.of_operands(size, dtype_of(kernel.result), product.a, product.b, product.draw.key())


def enough_for(kernel: Contract) -> int:
    """The steps of a kernel that make another thread worth its start."""
    return _ENOUGH_QUICK if kernel.accumulator == "f32" else _ENOUGH


def joined(ranges: Sequence[range]) -> list[range]:
    """Ascending ranges, adjacent ones joined."""
    merged: list[range] = []
    for one in ranges:
        if merged and merged[-1].stop == one.start:
            one = range(merged.pop().start, one.stop)
        merged.append(one)
    return merged


def _cut(
    general: ContractVariant, first: ContractVariant, batch: int, rows: int, columns: int, threads: int
) -> tuple[int, int]:
    """Rows and columns of an item: as many as the scratch allows, and one or some items for every thread.

    An item's columns are whole panels of both variants. Every item packs its own rows and columns; with several threads
    the cut is the one that ends first if all threads are equally fast.
    """
    tallest = max(first.rows[0], _CHUNK_BYTES // (general.pitch * bytes_of(general.kernel.accumulator)))
    chunk = _even(rows, tallest, first.rows[0])
    unit = max(general.width, first.width)
    panels = _ceiling(columns, unit)
    widest = max(1, _PARKED_BYTES // (chunk * unit * general.parked_bytes))
    if threads == 1:
        return chunk, _even(panels, widest, 1) * unit

    def sizes(parts: int) -> Iterator[tuple[int, int]]:
        tall = _even(rows, _ceiling(rows, parts), first.rows[0])
        some, one = (_ceiling(share * threads, batch * _ceiling(rows, tall)) for share in (2, 1))
        for wide in (panels // some, _ceiling(panels, one)):
            yield tall, _even(panels, min(widest, max(1, wide)), 1)

    def cost(size: tuple[int, int]) -> float:
        tall, columns_of = size[0], min(columns, size[1] * unit)
        items = batch * _ceiling(rows, tall) * _ceiling(panels, size[1])
        seconds = _ceiling(items, threads) * (tall * columns_of + _PACKED * (tall + columns_of))
        return seconds * (_ALONE if items < 2 * threads else 1)

    # The cut may depend on the number of threads: it decides who computes a result, and no result depends on it.
    fewest = _ceiling(rows, chunk)
    parts = range(fewest, fewest + _ceiling(2 * threads, batch * fewest))
    chunk, wide = min((size for part in parts for size in sizes(part)), key=cost)
    return chunk, wide * unit


def _even(total: int, most: int, unit: int) -> int:
    """The size of equal parts of ``total``, at most about ``most``; a multiple of ``unit`` if there are several."""
    parts = _ceiling(total, most)
    return total if parts == 1 else _ceiling(_ceiling(total, parts), unit) * unit


def _ceiling(n: int, parts: int) -> int:
    return -(-n // parts)


def scratch_of(kernel: Contract, a: Tensor, b: Tensor) -> int:
    """The bytes that one thread packs and parks in for a product of two matrices."""
    right = Right.matrices((1, *b.shape), (0, *b.stride()))
    plan = Contraction.of(kernel, (1, *a.shape), (0, *a.stride()), right, 1).plan
    return (plan.quick or plan.general()).scratch
