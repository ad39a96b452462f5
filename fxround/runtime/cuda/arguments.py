"""The arguments of CUDA kernels as C values."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxround.numerics.orders import Shard, shards_of
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.lines import LINE_SIZES, LINE_STEPS
from fxround.runtime.cuda.cpp.map import MAX_DIMS


class Key(ctypes.Structure):
    """Seed, sample and node, as ``Key`` of the texts. ``state``: the address of a tensor (seed, sample), or none."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("seed_low", "seed_high", "sample", "node")),
        ("state", ctypes.c_void_p),
    )


class ContractionShape(ctypes.Structure):
    """A contraction's sizes and steps, as ``Shape`` of the texts."""

    _fields_ = tuple((name, ctypes.c_int64) for name in SHAPE)


class LineSteps(ctypes.Structure):
    """Where the elements of lines are, as ``Lines`` of the texts."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in LINE_SIZES),
        *((name, ctypes.c_int64) for name in LINE_STEPS),
    )


def key_of(words: Sequence[int], state: Tensor | None, device: torch.device) -> tuple[Any, ...]:
    """The key, and the numbers of further nodes, from ``Draw.words``.

    state: the tensor (seed, sample) that kernels on the device read; None if the words are all.
    """
    key = Key(*words[:4])
    if state is not None:
        # The copy to another device waits for nothing. It must live until the launch.
        key.tensor = state.to(device, non_blocking=True).contiguous()
        key.state = key.tensor.data_ptr()
    return key, *(ctypes.c_uint32(word) for word in words[4:])


@cache
def shards_of_length(length: int, shards: int) -> Any:
    """The shards of a length, as ``Shards`` of the texts."""
    rows = shards_of(length, shards)
    fields = (("count", ctypes.c_int64), *((name, ctypes.c_int64 * shards) for name in Shard._fields))
    structure = type("Shards", (ctypes.Structure,), {"_fields_": fields})(count=len(rows))
    for name, column in zip(Shard._fields, zip(*rows, strict=True), strict=True):
        getattr(structure, name)[: len(rows)] = column
    return structure


def count(value: int) -> Any:
    """An unsigned 64-bit number."""
    return ctypes.c_uint64(value)


@cache
def _layout(operands: int) -> Any:
    fields = (
        ("count", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * MAX_DIMS),
        ("steps", ctypes.c_int64 * MAX_DIMS * operands),
    )
    return type("Layout", (ctypes.Structure,), {"_fields_": fields})


def layout(total: int, sizes: Sequence[int], steps: Sequence[Sequence[int]]) -> Any:
    """A map's sizes, and the steps of its operands in elements."""
    structure = _layout(len(steps))(count=total)
    structure.sizes[: len(sizes)] = sizes
    for n, own in enumerate(steps):
        structure.steps[n][: len(own)] = own
    return structure
