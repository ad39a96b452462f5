"""A map over several lists of CUDA tensors that it overwrites: one launch for as many as a kernel's arguments hold."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import accumulate
from typing import Any, Final

from torch import Tensor

from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.several import CHUNK, TABLE, THREADS, SeveralVariant, several_text
from fxround.runtime.cuda.launcher import Text, device_of, for_device, launch
from fxround.runtime.cuda.pointwise import CODES
from fxround.runtime.several import Several

_UNSIGNED: Final = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def run_several(several: Several) -> None:
    """Run the map; the entries share no memory."""
    kept = [i for i, entry in enumerate(several.entries) if entry[0].numel()]
    if not kept:
        return
    width = len(several.entries[0])
    device = device_of([several.entries[i][0] for i in kept], "an optimizer's step")
    variant = SeveralVariant(for_device(several.kernel, device), several.columns, several.targets, width)
    numbers = [_number(x) for x in several.numbers if x is not None]
    nodes = [ctypes.c_uint32(n) for n in (several.sample, *several.nodes)][: 1 + several.kernel.nodes]
    for start in range(0, len(kept), variant.most):
        part = kept[start : start + variant.most]
        counts = [several.entries[i][0].numel() for i in part]
        *first, chunks = accumulate((-(-n // CHUNK) for n in counts), initial=0)
        table = _table(width, variant.most)(entries=len(part), chunks=chunks)
        table.first[: len(part)], table.count[: len(part)] = first, counts
        table.seed[: len(part)] = [several.seeds[i] for i in part]
        for row, i in enumerate(part):
            table.at[row][:] = [x.data_ptr() for x in several.entries[i]]
        launch(_text(variant), chunks * THREADS, [table, *numbers, *nodes], device)


def _number(x: Tensor) -> Any:
    """The bits of a number as a C value."""
    return _UNSIGNED[x.itemsize](int(x.detach().view(CODES[x.itemsize]).item()))


@cache
def _table(width: int, most: int) -> Any:
    words, pointers = ctypes.c_uint64 * most, ctypes.c_uint64 * width * most
    names = ("entries", "chunks", "first", "count", "seed", "at")
    kinds = (ctypes.c_uint64, ctypes.c_uint64, words, words, words, pointers)
    return type("Table", (ctypes.Structure,), {"_fields_": tuple(zip(names, kinds, strict=True))})


@cache
def _text(variant: SeveralVariant) -> Text:
    return Text(variant.name, lambda: preamble(SHAPE) + TABLE + several_text(variant), THREADS)
