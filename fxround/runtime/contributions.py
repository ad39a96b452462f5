"""Scatters: scatter_add and accumulating index_put as one list of (destination row, source row).

Both operators add source rows to destination rows; a row is the longest run of trailing elements that move together.
``Contributions`` lists the destination row of each source row, and a stable sort by destination keeps the order of the
source within each. Every index is compared with the size of its dimension before any pointer is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fxround.graph.dialect import IndexPut, ScatterAdd, ScatterCall
from fxround.graph.geometry import broadcast
from fxround.runtime.operands import storage_of


@dataclass(frozen=True)
class Contributions:
    """``rows``: int64 (n,), the destination row of source row k; ``source``: (n, inner), row-major."""

    rows: Tensor
    source: Tensor

    def sorted(self, rows: int) -> tuple[Tensor, Tensor]:
        """The source rows by their destination, in order, and where each of ``rows`` destinations begins among them."""
        order = self.rows.argsort(stable=True)
        if not self.rows.is_cpu:
            # A count would wait for the device.
            return order, torch.searchsorted(self.rows[order], torch.arange(rows + 1, device=order.device))
        starts = self.rows.new_zeros(rows + 1)
        torch.cumsum(torch.bincount(self.rows, minlength=rows), 0, out=starts[1:])
        return order, starts


def contributions_of(call: ScatterCall[Tensor]) -> Contributions:
    """The contributions of a call's source. Raises what the operator raises for its arguments."""
    call.require()
    if isinstance(call, ScatterAdd):
        parts, made = (call.x, call.src), partial(scatter_rows, call.x, call.dim, call.index, call.src)
    else:
        assert isinstance(call, IndexPut)
        parts, made = (call.x, call.values), partial(put_rows, call.x, call.indices, call.values)
    for x, what in zip(parts, ("destination", "source"), strict=True):
        storage_of(x, f"{call.name}'s {what}")
    return made()


def _in_range(index: Tensor, size: int, dim: int, what: str) -> Tensor:
    """The index with negative entries counted from the end; IndexError names the first that is out of range."""
    index = index.detach().long()
    wrong = (index < -size) | (index >= size)
    if not index.is_cpu:
        # The device stops at a wrong index, as for PyTorch's own operators; to wait for the answer would cost more.
        torch._assert_async(~wrong.any(), f"{what}: an index is out of range for dimension {dim} of size {size}")
    elif wrong.any():
        first = index[wrong].flatten()[0].item()
        raise IndexError(f"{what}: index {first} is out of range for dimension {dim} of size {size}")
    return torch.where(index < 0, index + size, index)


def scatter_rows(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Contributions:
    """The rows of scatter_add: source[i, j, k] goes to x[index[i, j, k], j, k] for dim 0, and so on."""
    # A tensor of no dimensions counts as one of a single element.
    x, index, source = (t.reshape(1) if t.dim() == 0 else t for t in (x, index, source))
    dim %= x.dim()
    # Trailing dimensions along which the index is one number repeated move together.
    depth = x.dim()
    while depth > dim + 1 and index.stride(depth - 1) == 0 and index.shape[depth - 1] == x.shape[depth - 1]:
        depth -= 1
    inner = x.shape[depth:].numel()
    source = source.detach()[tuple(slice(0, n) for n in index.shape)]
    if index.numel() == 0:
        return Contributions(index.new_empty(0, dtype=torch.int64), source.new_empty(0, inner))
    for _ in range(x.dim() - depth):
        index = index.select(-1, 0)
    rows = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(depth):
        own = _in_range(index, x.shape[d], d, "scatter_add") if d == dim else _along(index.shape[d], d, depth, x.device)
        rows = rows * x.shape[d] + own
    return Contributions(rows.reshape(-1), source.contiguous().reshape(rows.numel(), inner))


def _along(size: int, dim: int, dims: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... along dimension ``dim`` of ``dims``."""
    return torch.arange(size, device=device).reshape([-1 if d == dim else 1 for d in range(dims)])


def put_rows(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Contributions:
    """The rows of index_put: values[p] goes to x[indices[0][p], indices[1][p], ...]; None takes a whole dimension.

    ``IndexPut.require`` has checked the arguments; what depends on the elements of a mask is checked here.
    """
    places = _expanded(x, indices)
    used = [d for d, i in enumerate(places) if i is not None]
    shape = broadcast("index_put", *(i.shape for i in places if i is not None))
    depth, front = used[-1] + 1, len(shape)
    # As in indexing: if the indexed dimensions are adjacent, the places take their position, else they come first.
    whole = [d for d in range(x.dim()) if d not in used]
    position = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    kept = [x.shape[d] for d in whole]
    target = (*kept[:position], *shape, *kept[position:])
    if broadcast("index_put", values.shape, target) != target:
        raise ValueError(f"index_put: values of shape {tuple(values.shape)} for places of shape {target}")
    full = values.detach().expand(target)
    order = [*range(position, position + front), *range(position), *range(position + front, full.dim())]
    before = [d for d in whole if d < depth]
    rows = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(depth):
        place = places[d]
        if place is None:
            own = _along(x.shape[d], before.index(d), len(before), x.device)
        else:
            own = _in_range(place.to(x.device), x.shape[d], d, "index_put")
            own = own.expand(shape).reshape([*shape, *[1] * len(before)])
        rows = rows * x.shape[d] + own
    rows = rows.expand([*shape, *(x.shape[d] for d in before)])
    inner = x.shape[depth:].numel()
    return Contributions(rows.reshape(-1), full.permute(order).contiguous().reshape(rows.numel(), inner))


def _expanded(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """One index for each dimension of x; a mask becomes the indices of its true elements."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            places.append(index)
        else:
            places.extend(index.nonzero(as_tuple=True))
    return places + [None] * (x.dim() - len(places))
