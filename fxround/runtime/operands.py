"""Operands of kernels: what a tensor must be for a kernel to read its memory, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.graph.dialect import ProgramCall
from fxround.graph.dtypes import DEVICES, LOADS, STORAGES, dtype_of, stored_as
from fxround.kernels.kinds import Map
from fxround.numerics.formats.storage import Storage


def storage_of(x: Tensor, what: str, known: Mapping[torch.dtype, Storage] = STORAGES) -> Storage:
    """The storage of a dense tensor of a known dtype; TypeError or ValueError for anything else."""
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(f"{what}: got a {x.layout} {x.dtype} tensor; expected a dense one (call .to_dense() first)")
    storage = stored_as(x.dtype, what, known)
    if x.device.type not in DEVICES:
        raise ValueError(f"{what}: got a tensor on {x.device}; kernels run on {' and '.join(DEVICES)}: move it there")
    if x.is_neg():
        raise ValueError(f"{what}: got a view with the negative bit; pass x.resolve_neg()")
    return storage


def loads_of(operands: Sequence[Tensor]) -> tuple[Storage, ...]:
    """How a map's operands are stored, masks among them; raises for what cannot be an operand."""
    if all(_is_dense(x) and x.dtype in LOADS and not x.is_neg() for x in operands):
        return tuple([LOADS[x.dtype] for x in operands])
    return tuple(storage_of(x, f"operand {i}", LOADS) for i, x in enumerate(operands))


def loads_of_call(call: ProgramCall[Tensor]) -> tuple[Storage, ...]:
    """How the operands of a program are stored; raises for what cannot be an operand, and if there is none."""
    return loads_of(call.xs) if call.xs else call.loads()


def map_of(call: ProgramCall[Any], operands: Sequence[Tensor]) -> Map | None:
    """The kernel of a map over these operands; None for a program that runs in parts."""
    return call.kernel(tuple(LOADS[x.dtype] for x in operands))


def _is_dense(x: Tensor) -> bool:
    return (x.is_cpu or x.is_cuda) and x.layout is torch.strided


def writable(out: Tensor, shape: tuple[int, ...], storage: Storage) -> Tensor:
    """A caller's tensor, if a kernel may write results of this shape into it; else ValueError."""
    if out.shape != shape or out.dtype != dtype_of(storage) or not out.is_contiguous() or out.is_neg():
        wanted = f"row-major {dtype_of(storage)} {shape}"
        raise ValueError(f"a kernel writes {wanted}; got {out.dtype} {tuple(out.shape)} of strides {out.stride()}")
    return out


def resolved(values: Iterable[Any]) -> list[Any]:
    """Return the values, with the signs of negative views in memory, because kernels ignore the negative bit."""
    return [value.resolve_neg() if isinstance(value, Tensor) and value.is_neg() else value for value in values]
