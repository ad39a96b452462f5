"""The operands of products in forward passes without roundings, and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.compiler.executable import Entry
from fxround.graph.site import PORT, Port, site
from fxround.graph.values import memory_of
from fxround.passes.rewrite import source_of
from fxround.passes.round_inputs import operands_of


@dataclass(frozen=True)
class Operand:
    """What shares a scale, or several: the path of the module of a product, and the role of its operand."""

    path: str
    role: str

    def __str__(self) -> str:
        return f"an operand of {self.path or 'the model'} with the role {self.role}"

    def rows(self, value: Tensor) -> Tensor:
        """Return the elements of a batch, [blocks, elements], in float32, or float64 for that dtype."""
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        return value.detach().to("cpu", wide).reshape(1, -1)


@dataclass
class Range:
    """What is known of an operand after all batches.

    most    the largest finite magnitude of each block, [blocks]
    counts  how many finite elements each has, [blocks], int64
    others  the number of elements that are not finite
    zeros   whether an element is zero
    """

    most: Tensor = field(default_factory=lambda: torch.zeros(1))
    counts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    others: int = 0
    zeros: bool = False

    def add(self, rows: Tensor) -> None:
        """Take a batch."""
        finite = rows.isfinite()
        magnitudes = torch.where(finite, rows.abs(), 0.0)
        most = magnitudes.amax(1) if rows.shape[1] else magnitudes.new_zeros(len(rows))
        self.most, self.counts = torch.maximum(self.most.to(most), most), self.counts + finite.sum(1)
        self.others += int((~finite).sum())
        self.zeros |= bool((rows == 0).any())


def observed(compiled: Any, batches: Sequence[Any], tick: Callable[[], None]) -> Iterator[tuple[Operand, Tensor]]:
    """Yield the operands of products and their elements (``Operand.rows``), batch by batch; a parameter once.

    compiled: without roundings. tick: called after each batch.
    """
    done: set[tuple[Operand, str]] = set()
    for args, kwargs in batches:
        with torch.no_grad():
            entry = compiled._entry(args, kwargs)
        wanted = _operands(entry)
        named = entry.named(pytree.tree_leaves((args, kwargs)))
        for name, value in [*named.items(), *(compiled.observe(*args, **kwargs) if wanted else ())]:
            for operand in wanted.get(name, ()):
                if isinstance(value, Tensor) and (operand, name) not in done:
                    if operand.role == "weight":
                        done.add((operand, name))
                    yield operand, operand.rows(value)
        tick()


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


def _operands(entry: Entry) -> dict[str, list[Operand]]:
    """Return the operands of the products of a graph by the names of the nodes that yield their elements."""
    wanted: dict[str, list[Operand]] = {}
    for node in entry.lowered.graph.nodes:
        place = site(node)
        if place is None or place.kind != "contraction" or node.op != "call_function":
            continue
        for source in dict.fromkeys(map(source_of, operands_of(node))):
            own = site(source)
            if own is not None and Operand(place.path, own.role) not in wanted.get(source.name, []):
                wanted.setdefault(source.name, []).append(Operand(place.path, own.role))
    return wanted


__all__ = ["Operand", "Range", "observed", "unreached"]
