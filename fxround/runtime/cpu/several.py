"""A map over several lists of CPU tensors that it overwrites: one call of machine code for all of them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.launches import ALL, Address, Launch, LaunchTable, Read
from fxround.runtime.cpu.pointwise import ENOUGH, addresses, array, map_call
from fxround.runtime.cpu.threads import pieces_of
from fxround.runtime.draw import Draw
from fxround.runtime.several import Several

_LOW: Final = (1 << 32) - 1
_WORD: Final = ctypes.sizeof(ctypes.c_int64)
# A step reads a row: a range of blocks of an entry, how many elements the entry has, and where the addresses of its
# operands, those of its results and its random key are.
_ROW: Final = ("begin", "end", "total", "operands", "results", "key")
# Blocks of a row: an entry with more of them has several rows, which threads share.
_ROW_BLOCKS: Final = ENOUGH // BLOCK


def run_several(several: Several) -> None:
    """Run the map; the entries share no memory."""
    given = addresses([x for x in several.numbers if x is not None])
    numbers = iter(given)
    shared = [0 if x is None else next(numbers) for x in several.numbers]
    words: list[int] = []
    ranges: list[tuple[int, int, int, int]] = []
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
        ranges += [(start, i, min(i + _ROW_BLOCKS, blocks), total) for i in range(0, blocks, _ROW_BLOCKS)]
    if not ranges:
        return
    held = array(words)
    base, results = ctypes.addressof(held), _WORD * len(several.columns)
    key = results + _WORD * len(several.targets)
    places = ((base + _WORD * start, *rest) for start, *rest in ranges)
    rows = array([n for at, *rest in places for n in (*rest, at, at + results, at + key)])
    pieces = pieces_of(sum(end - begin for _, begin, end, _ in ranges), _ROW_BLOCKS)
    table = _table(several.kernel, several.columns, current_set())
    table.spread([ctypes.addressof(rows)], Draw(), len(ranges), min(pieces, len(ranges)))


@lru_cache(maxsize=256)
def _table(kernel: Map, columns: tuple[int, ...], isa: str) -> LaunchTable:
    """The launch of a step: the kernel's code for row-major operands and numbers."""
    # The code is the same for every length above one.
    call = map_call(kernel, tuple(((), ()) if c < 0 else ((2,), (1,)) for c in columns), isa)
    assert call is not None
    begin, end, total, operands, results, key = (
        Read(Address(0, _WORD * i, _WORD * len(_ROW))) for i in range(len(_ROW))
    )
    # Such a map reads neither sizes nor strides.
    arguments = total, 1, operands, operands, operands, results, key
    return LaunchTable([Launch(call.function, ALL, arguments, (call,), span=(begin, end))], [0], {})
