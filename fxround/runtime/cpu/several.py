"""A map over several lists of CPU tensors that it overwrites: one native call for all of them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime.cpu.code import address_of, current_set, native
from fxround.runtime.cpu.llvm.several import build_several
from fxround.runtime.cpu.pointwise import ENOUGH, addresses, array, map_call
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.several import Several

_SEVERAL: Final = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
_LOW: Final = (1 << 32) - 1
_WORD: Final = ctypes.sizeof(ctypes.c_int64)
# Blocks of a row: an entry with more of them has several rows, which threads share.
_ROW_BLOCKS: Final = ENOUGH // BLOCK


def run_several(several: Several) -> None:
    """Run the map; the entries share no memory."""
    given = addresses([x for x in several.numbers if x is not None])
    numbers = iter(given)
    shared = [0 if x is None else next(numbers) for x in several.numbers]
    words: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    # A key: seed, sample, nodes, each of 32 bits but the seed of 64.
    halves = [several.sample, *several.nodes, 0]
    nodes = [low & _LOW | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=False)]
    for entry, seed in zip(several.entries, several.seeds, strict=True):
        total = entry[0].numel()
        if not total:
            continue
        at = addresses(entry)
        start, blocks = len(words), -(-total // BLOCK)
        words += [at[c] if c >= 0 else own for c, own in zip(several.columns, shared, strict=True)]
        words += [at[c] for c in several.targets]
        words.append(seed)
        words += nodes
        rows += [(start, i, min(i + _ROW_BLOCKS, blocks), total) for i in range(0, blocks, _ROW_BLOCKS)]
    if not rows:
        return
    held = array(words)
    base = ctypes.addressof(held)
    table = array([n for start, *rest in rows for n in (base + _WORD * start, *rest)])
    count = len(several.columns)
    function = native("several", build_several, None, "several", _SEVERAL)
    arguments = (
        ctypes.addressof(table),
        address_of(_function(several.kernel, several.columns)),
        _WORD * count,
        _WORD * (count + len(several.targets)),
    )
    pieces = pieces_of(sum(end - begin for _, begin, end, _ in rows), _ROW_BLOCKS)
    spread(function, range(len(rows)), min(pieces, len(rows)), arguments)


def _function(kernel: Map, columns: tuple[int, ...]) -> Any:
    """The kernel's code for row-major operands and numbers."""
    # The code is the same for every length above one.
    call = map_call(kernel, tuple(((), ()) if c < 0 else ((2,), (1,)) for c in columns), current_set())
    assert call is not None
    return call.function
