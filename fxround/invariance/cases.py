"""Cases: the ways of running a model that must not change a bit, as data.

A ``CaseGroup`` is a list of cases whose compared parts must be equal: all of the results, or the rows that belong to
one row of the inputs. A case holds its arguments and its setting (threads, instruction set, another process). This
module runs nothing. Every case of a group has the same numbers: rows are copied, views are made from copies, and the
caller's arguments are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.choices import INVARIANCE_AXES
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.significance.inputs import ModelCall

BATCHES: Final = (1, 2, 3, 4, 7, 8, 16)
THREADS: Final = (1, 2, 3)
# The environment variables by which stock libraries choose their code when a process starts.
STOCK_SETS: Final = MappingProxyType(
    {
        "avx512": {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
        "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        "sse2": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    }
)


@dataclass(frozen=True)
class Setting:
    """Where a case runs: threads, instruction set, device, and whether in another process; None leaves it as it is.

    environment: the variables of that process. world_size: how many other processes share the model, of which ``rank``
    is compared.
    """

    threads: int | None = None
    isa: str | None = None
    device: str | None = None
    process: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    world_size: int | None = None
    rank: int = 0


@dataclass(frozen=True)
class Row:
    """The row whose results are compared, of a case with a batch of ``count`` rows."""

    position: int
    count: int


@dataclass(frozen=True)
class Case:
    """One run; ``row``: the part of its results that is compared (None: everything)."""

    label: str
    call: ModelCall
    setting: Setting = field(default_factory=Setting)
    row: Row | None = None


@dataclass(frozen=True)
class CaseGroup:
    """Runs that must agree with the first one; ``what``: the compared part, in words."""

    what: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Axis:
    """A property that must not matter; ``groups``: (call, dim, stock) to the groups, raises Inapplicable."""

    name: str
    meaning: str
    groups: Callable[[ModelCall, int, bool], Iterator[CaseGroup]]


class Inapplicable(ValueError):
    """The axis does not apply to this model or these inputs; the message says why."""


def batch(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The first row alone, and with others in batches of several sizes."""
    rows = rows_of(call, dim)
    sizes = sorted({*BATCHES, rows})
    cases = (Case(f"batch of {n}", taken(call, dim, range(n)), row=Row(0, n)) for n in sizes)
    yield CaseGroup(f"row 0 in batches of {', '.join(map(str, sizes))}", tuple(cases))


def slices(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The first row at other positions of a batch of one size; a batch that is a slice of a larger one."""
    rows = rows_of(call, dim)
    count = max(rows, 4)
    places = sorted({0, 1, count // 2, count - 1})
    orders = ([*range(1, p + 1), 0, *range(p + 1, count)] for p in places)
    moved = (
        Case(f"row {p} of {count}", taken(call, dim, order), row=Row(p, count))
        for p, order in zip(places, orders, strict=True)
    )
    yield CaseGroup(f"a row at places {', '.join(map(str, places))} of {count}", tuple(moved))
    cut = (Case(f"rows {n}: of a bigger batch", _cut_out(call, dim, n)) for n in (1, 3))
    yield CaseGroup("a batch cut out of a bigger one", (Case("a batch of its own", owned(call)), *cut))


def stride(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The same numbers with other strides."""
    if not call.tensors:
        raise Inapplicable("no argument is a tensor")
    made = [(label, mapped(call, view)) for label, view in VIEWS.items()]
    plain = owned(call)
    different = [(label, c) for label, c in made if _strides(c) != _strides(plain)]
    if different:
        cases = tuple(Case(label, c) for label, c in different)
        words = ", ".join(label for label, _ in different)
        yield CaseGroup(f"row-major and {words} arguments", (Case("row-major", plain), *cases))
    spread = mapped(call, lambda t: t[:1].expand_as(t) if t.dim() else t)
    if _strides(spread) != _strides(owned(spread)):
        yield CaseGroup("one row, expanded and copied", (Case("copied", owned(spread)), Case("expanded", spread)))
    elif not different:
        raise Inapplicable("the arguments have one element each: all strides are the same")


def threads(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The same call with other numbers of threads."""
    cases = tuple(Case(f"{n} thread{'s' * (n > 1)}", call, Setting(threads=n)) for n in THREADS)
    yield CaseGroup(f"{', '.join(map(str, THREADS))} threads", cases)


def isa(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The same call with code of every instruction set that this machine has.

    stock: whether kernels of PyTorch run, which choose their instruction set when a process starts.
    """
    names = [name for name in instruction_sets() if name != "host"]
    if len(names) < 2:
        raise Inapplicable(f"this machine has one instruction set, {', '.join(names)}")
    settings = (Setting(isa=n, process=stock, environment=tuple(STOCK_SETS[n].items()) if stock else ()) for n in names)
    cases = tuple(Case(name, call, setting) for name, setting in zip(names, settings, strict=True))
    yield CaseGroup(", ".join(names), cases)


def device(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The same call on the CPU and on every CUDA device."""
    names = devices()
    if len(names) < 2:
        raise Inapplicable("PyTorch finds no CUDA device on this machine")
    yield CaseGroup(", ".join(names), tuple(Case(name, call, Setting(device=name)) for name in names))


def devices() -> list[str]:
    """Return the names of the devices on which a model may run."""
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def process(call: ModelCall, dim: int, stock: bool) -> Iterator[CaseGroup]:
    """The same call in this process and in a new interpreter."""
    cases = Case("here", call), Case("a new process", call, Setting(process=True))
    yield CaseGroup("here and in a new process", cases)


def world_size(call: ModelCall, dim: int, stock: bool, sizes: Sequence[int] = ()) -> Iterator[CaseGroup]:
    """The same call in one process, and in every one of several that share the model; with one thread each."""
    if not sizes:
        raise Inapplicable(
            "nothing says how processes share the model: pass parallelize=, a plan of parallelize_module or a function "
            "of (model, mesh)"
        )
    ranks = [(rank, size) for size in sizes for rank in range(size)]
    others = (
        Case(f"process {rank} of {size}", call, Setting(threads=1, world_size=size, rank=rank)) for rank, size in ranks
    )
    words = ", ".join(map(str, sizes))
    yield CaseGroup(f"one process, and each of {words}", (Case("one process", call, Setting(threads=1)), *others))


_CASES: Final = {
    "batch": batch,
    "slice": slices,
    "stride": stride,
    "threads": threads,
    "isa": isa,
    "device": device,
    "process": process,
    "world_size": world_size,
}
AXES: Final = MappingProxyType({name: Axis(name, meaning, _CASES[name]) for name, meaning in INVARIANCE_AXES.items()})


def rows_of(call: ModelCall, dim: int) -> int:
    """Return the size of the first tensor with dimension ``dim``. Raises Inapplicable for none or 0 rows."""
    sizes = [t.shape[dim] for t in call.tensors if t.dim() > dim]
    if not sizes or not sizes[0]:
        shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors) or "no tensor"
        raise Inapplicable(f"no argument has rows along dimension {dim}: the arguments are {shapes}")
    return sizes[0]


def taken(call: ModelCall, dim: int, order: Sequence[int]) -> ModelCall:
    """Return the call with the rows of ``order``, modulo the number of rows, in new memory."""
    index = torch.tensor([i % rows_of(call, dim) for i in order])
    return _rowwise(call, dim, lambda t: t.index_select(dim, index.to(t.device)))


def _cut_out(call: ModelCall, dim: int, skipped: int) -> ModelCall:
    """Return the same rows as a view that starts after ``skipped`` other rows, so that addresses are less aligned."""
    rows = rows_of(call, dim)
    index = torch.arange(-skipped, rows + 1) % rows
    return _rowwise(call, dim, lambda t: t.index_select(dim, index.to(t.device)).narrow(dim, skipped, rows))


def _rowwise(call: ModelCall, dim: int, change: Callable[[Tensor], Tensor]) -> ModelCall:
    """Return the call with ``change`` applied to every tensor that has as many rows as the first."""
    rows = rows_of(call, dim)
    return mapped(call, lambda t: change(t) if t.dim() > dim and t.shape[dim] == rows else t)


def mapped(call: ModelCall, change: Callable[[Tensor], Tensor]) -> ModelCall:
    """Return the call with ``change`` applied to every tensor."""
    args, kwargs = pytree.tree_map_only(Tensor, change, (call.args, call.kwargs))
    return ModelCall(args, kwargs)


def owned(call: ModelCall) -> ModelCall:
    """Return the call with row-major copies of its tensors."""
    return mapped(call, lambda t: t.detach().clone(memory_format=torch.contiguous_format))


def _gapped(t: Tensor) -> Tensor:
    """Return a view of every other element of a larger tensor."""
    wide = torch.zeros((*t.shape, 2), dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


def _laid_out(t: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy whose dimensions are stored in another order."""
    back = [order.index(d) for d in range(t.dim())]
    return t.permute(*order).contiguous().permute(*back)


def _transposed(t: Tensor) -> Tensor:
    return _laid_out(t, [*range(1, t.dim()), 0]) if t.dim() > 1 else t


def _channels_last(t: Tensor) -> Tensor:
    return _laid_out(t, [0, *range(2, t.dim()), 1]) if t.dim() > 2 else t


VIEWS: Final = MappingProxyType({"gapped": _gapped, "transposed": _transposed, "channels-last": _channels_last})


def _strides(call: ModelCall) -> list[tuple[int, ...]]:
    return [tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1) for t in call.tensors]
