"""The operands of products in forward passes without roundings, and their ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.compiler.executable import Entry
from fxround.graph.site import PORT, Port, Site, site
from fxround.graph.values import memory_of
from fxround.numerics.formats.scaled.format import Block
from fxround.passes.held_scales import HeldNames, Layout
from fxround.passes.rewrite import source_of
from fxround.passes.round_inputs import operands_of
from fxround.significance.inputs import ModelCall


@dataclass(frozen=True)
class Operand:
    """What has scales of its own.

    path, role  the path of the module of a product, and the role of its operand
    name        that of held scales; "" for one scale of all operands of the module with this role
    layout      how blocks lie in the operand, for held scales
    block       the elements that share one of the held scales
    """

    path: str
    role: str
    name: str = ""
    layout: Layout | None = None
    block: Block = "tensor"

    def __str__(self) -> str:
        return f"an operand of {self.path or 'the model'} with the role {self.role}"

    def batch(self, value: Tensor) -> Batch:
        """Return the elements of a batch."""
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        x = value.detach().to("cpu", wide)
        others = int((~x.isfinite()).sum())
        if self.layout is None:
            return Batch(x.reshape(1, -1), others, ())
        sizes = self.layout.sizes(self.block, x.dim(), self.role == "weight")
        return _in_rows(x.reshape(self.layout.split(x.shape)), sizes, others)


@dataclass(frozen=True)
class Batch:
    """The elements of an operand: [blocks, elements], float32 or float64, with NaNs at the ends of short blocks.

    others  the number of elements that are not finite
    shape   the number of blocks in each dimension of the operand, for held scales
    """

    rows: Tensor
    others: int
    shape: tuple[int, ...]


# An operand, and the name of the node that yields its elements.
Seen = tuple[Operand, str]


def _in_rows(x: Tensor, sizes: Sequence[int], others: int) -> Batch:
    pairs = list(zip(x.shape, sizes, strict=True))
    blocks, lengths = [-(-size // n) if n else 1 for size, n in pairs], [n or max(1, size) for size, n in pairs]
    whole = x.new_full([b * n for b, n in zip(blocks, lengths, strict=True)], torch.nan)
    whole[tuple(slice(size) for size in x.shape)] = x
    apart = whole.view([n for pair in zip(blocks, lengths, strict=True) for n in pair])
    order = [*range(0, 2 * x.dim(), 2), *range(1, 2 * x.dim(), 2)]
    return Batch(apart.permute(order).reshape(math.prod(blocks), -1), others, tuple(blocks))


@dataclass
class Range:
    """What is known of an operand after some batches.

    most    the largest finite magnitude of each block, [blocks]
    counts  how many finite elements each has, [blocks], int64
    others  the number of elements that are not finite
    zeros   whether an element is zero
    shape   that of held scales
    """

    most: Tensor = field(default_factory=lambda: torch.zeros(1))
    counts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    others: int = 0
    zeros: bool = False
    shape: tuple[int, ...] = ()

    @staticmethod
    def of(batch: Batch) -> Range:
        """Return the range of one batch."""
        rows, finite = batch.rows, batch.rows.isfinite()
        magnitudes = torch.where(finite, rows.abs(), 0.0)
        most = magnitudes.amax(1) if rows.shape[1] else magnitudes.new_zeros(len(rows))
        return Range(most, finite.sum(1), batch.others, bool((rows == 0).any()), batch.shape)

    def add(self, other: Range) -> None:
        """Take the range of the next batch."""
        self.most = torch.maximum(self.most.to(other.most), other.most)
        self.counts = self.counts + other.counts
        self.others, self.shape = self.others + other.others, other.shape
        self.zeros |= other.zeros


class Observer:
    """Takes the operands of products of one batch after the other; a parameter once.

    compiled: without roundings. block: for held scales; None for one scale for each module and role.
    """

    def __init__(self, compiled: Any, block: Block | None) -> None:
        self._compiled, self._block = compiled, block
        self.done: set[Seen] = set()

    def operands(self, call: ModelCall) -> Iterator[tuple[Operand, Batch]]:
        """Yield the operands of a batch and their elements."""
        entry, wanted = self._wanted(call)
        named = entry.named(pytree.tree_leaves((call.args, call.kwargs)))
        for name, value in [*named.items(), *(self._compiled.observe(*call.args, **call.kwargs) if wanted else ())]:
            for operand in wanted.get(name, ()):
                if isinstance(value, Tensor) and (operand, name) not in self.done:
                    if operand.role == "weight":
                        self.done.add((operand, name))
                    yield operand, operand.batch(value)

    def leave(self, call: ModelCall) -> frozenset[Seen]:
        """Leave a batch to a worker; returns the parameters that batches before it have."""
        before = frozenset(self.done)
        _, wanted = self._wanted(call)
        self.done |= {(operand, name) for name, own in wanted.items() for operand in own if operand.role == "weight"}
        return before

    def _wanted(self, call: ModelCall) -> tuple[Entry, dict[str, list[Operand]]]:
        with torch.no_grad():
            entry = self._compiled._entry(call.args, call.kwargs)
        return entry, _operands(entry) if self._block is None else _held_operands(entry, self._block)


def readers(entries: Iterable[Entry]) -> set[tuple[str, str]]:
    """Return the path of each module with products, with each role of an operand."""
    return {
        (place.path, own.role)
        for entry in entries
        for node, place in _products(entry)
        for operand in operands_of(node)
        if (own := site(source_of(operand))) is not None
    }


def unreached(model: nn.Module, entries: Iterable[Entry]) -> list[str]:
    """Return the names of the parameters with at least two dimensions that no captured graph reads."""
    read = {
        port.name
        for entry in entries
        for node in entry.lowered.graph.find_nodes(op="placeholder")
        if (port := _port(node)) is not None and port.kind == "parameter" and node.users
    }
    names = dict(model.named_parameters(remove_duplicate=False))
    memory = {memory_of(names[name]) for name in read & names.keys()}
    return [name for name, p in names.items() if p.dim() > 1 and memory_of(p) not in memory]


def _port(node: fx.Node) -> Port | None:
    port: Port | None = node.meta.get(PORT)
    return port


def _products(entry: Entry) -> Iterator[tuple[fx.Node, Site]]:
    for node in entry.lowered.graph.nodes:
        place = site(node)
        if place is not None and place.kind == "contraction" and node.op == "call_function":
            yield node, place


def _operands(entry: Entry) -> dict[str, list[Operand]]:
    """Return the operands of the products of a graph by the names of the nodes that yield their elements."""
    wanted: dict[str, list[Operand]] = {}
    for node, place in _products(entry):
        for source in dict.fromkeys(map(source_of, operands_of(node))):
            own = site(source)
            if own is not None and Operand(place.path, own.role) not in wanted.get(source.name, []):
                wanted.setdefault(source.name, []).append(Operand(place.path, own.role))
    return wanted


def _held_operands(entry: Entry, block: Block) -> dict[str, list[Operand]]:
    """Return the same with the names of held scales, which the products of several modules may share."""
    names, wanted, done = HeldNames(), dict[str, list[Operand]](), set[str]()
    for node, place in _products(entry):
        for operand in operands_of(node):
            source = source_of(operand)
            own = site(source)
            for _, layout in Layout.of(node, operand) if own is not None else ():
                assert own is not None
                name = names.name(source, layout, place.path, own.role)
                if name not in done:
                    done.add(name)
                    wanted.setdefault(operand.name, []).append(Operand(place.path, own.role, name, layout, block))
    return wanted


__all__ = ["Batch", "Observer", "Operand", "Range", "Seen", "readers", "unreached"]
