"""Contractions as CUDA C++ text: a block of 256 threads computes a tile of the result, k ascending.

The block copies a few steps of its rows and columns to shared memory, in the accumulator's type (``copies``); then each
thread does these steps for its own elements, in registers, while the next steps are on their way. Every element has its
own accumulator, its own stream and all of its k in order, so a tile of any size gives the same bits. Elements of the
second operand are at multiples of two steps, or, for the windows of an image, where two tables of offsets say; a third
table says where column n of the result is stored, which is also the number of its stream.

A map may follow (``After``): the thread computes it for its own elements, as they would be stored, with the numbers and
the random bits that the map alone has. The elements wait in an array, since the map's text is too long for a copy for
each of them; where a thread has several, it is on the thread's stack. Adjacent columns of a thread are stored at once,
where the layout of the results allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.kernels.kinds import Contract
from fxround.runtime.cuda.cpp.common import (
    KEY,
    MEMORY,
    bits,
    bodies,
    element,
    global_,
    pointer,
    shards_structure,
    stored,
    stream,
)
from fxround.runtime.cuda.cpp.copies import COPIES, THREADS, Copying, Operand, SharedStage, Way
from fxround.runtime.cuda.cpp.map import CudaMapVariant, how_read, indented, seeds, stores, walk
from fxround.runtime.cuda.cpp.table import TYPES, device_function

SHAPE: Final = (
    "batch",
    "rows",
    "length",
    "columns",
    "groups",  # 0: a has one matrix a batch; else batch i takes a's matrix i mod groups
    "a_batch",
    "a_row",
    "a_length",
    "b_batch",
    "b_length",  # 0 and 0 where b's offsets are in tables
    "b_column",
    "out_batch",
    "out_row",
)
"""The fields of a contraction's shape, 64-bit integers in this order: sizes, then steps in elements."""

# A tile is 16 x 16 threads of SIDE x SIDE elements each.
_LINE: Final = 16


@dataclass(frozen=True)
class After:
    """A map over a contraction's result: element i of its results is of element i of the contraction's.

    variant     the map, whose elements are taken one by one
    taken       which of its operands are the contraction's result
    kept        whether the contraction's result is stored as well
    """

    variant: CudaMapVariant
    taken: tuple[bool, ...]
    kept: bool

    @property
    def name(self) -> str:
        """A part of the text's name."""
        which = "".join("r" if taken else "x" for taken in self.taken)
        return f"{self.variant.kernel.digest[:16]}_{how_read(self.variant)}_{which}{'_kept' if self.kept else ''}"

    @property
    def nodes(self) -> list[str]:
        """The names of the map's node numbers."""
        return [f"node{n}" for n in range(self.variant.kernel.nodes if self.variant.kernel.draws else 0)]


@dataclass(frozen=True)
class Tile:
    """A contraction whose threads compute ``side`` x ``side`` elements each.

    single: whether its steps are those of ``kernel.single``, in binary32 where that is possible.
    ways: how the operands are copied. after: the map that follows, if one does. stored: the adjacent columns that a
    thread stores at once, 1 or ``vector``; then results are adjacent in runs of so many, and begin at multiples of it.
    """

    kernel: Contract
    side: int
    single: bool = False
    ways: tuple[Way, Way] = (Way(), Way(tables=True))
    after: After | None = None
    stored: int = 1

    @property
    def steps(self) -> Contract:
        """The contraction whose steps the text does."""
        return self.kernel.single if self.single and self.kernel.single is not None else self.kernel

    @property
    def width(self) -> int:
        """The rows and columns of a tile."""
        return _LINE * self.side

    @property
    def stage(self) -> SharedStage:
        """A stage of an operand in shared memory."""
        return SharedStage(self.width, _SIZES[self.steps.accumulator])

    @property
    def vector(self) -> int:
        """The adjacent rows and columns of a thread: 16 bytes of accumulators at most."""
        return min(self.side, 16 // self.stage.size)


_SIZES: Final = {"f32": 4, "f64": 8}

# A thread has {vector} adjacent rows and columns, and as many again a band further, so that it reads 16 bytes at once.
# A warp has 4 x 8 threads. At the one barrier of a tile of k, this tile is in ``stage``, and no thread reads the other
# stage any more, so that the next tile may go there: of this tile of the result, or of the block's next one.
_CONTRACT: Final = """\
  SHARED({type}, tile_a, 2 * {elements});
  SHARED({type}, tile_b, 2 * {elements});
  const i64 tiles_n = (shape.columns + {width} - 1) / {width}, tiles_m = (shape.rows + {width} - 1) / {width};
  const u64 tiles = (u64)(shape.batch * tiles_m * tiles_n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_of = (warp / 2 * 4 + lane / 8) * {vector}, column_of = (warp % 2 * 8 + lane % 8) * {vector};
{threads}  int stage = 0;
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {{
    const i64 batch = (i64)(tile / (u64)(tiles_m * tiles_n));
    const i64 row_0 = (i64)(tile / (u64)tiles_n) % tiles_m * {width}, column_0 = (i64)(tile % (u64)tiles_n) * {width};
    const {a}* base_a = a + (shape.groups ? batch % shape.groups : batch) * shape.a_batch;
    const {b}* base_b = b + batch * shape.b_batch;
{held}    const auto fetch = [&](const i64 k_0, const int to) {{
      const int left = least(shape.length - k_0, {steps});
{fetch}    }};
    const auto put = [&](const int to) {{
{put}    }};
    {type} acc[{side}][{side}];
{declare}#pragma unroll
    for (int r = 0; r < {side}; ++r)
#pragma unroll
      for (int c = 0; c < {side}; ++c) {{
        acc[r][c] = 0;
{start}      }}
    if (shape.length) {{
      fetch(0, stage);
      put(stage);
    }}
    for (i64 k_0 = 0; k_0 < shape.length; k_0 += {steps}) {{
{wait}      __syncthreads();
      const bool more = k_0 + {steps} < shape.length;
      if (more) fetch(k_0 + {steps}, stage ^ 1);
      const int steps = least(shape.length - k_0, {steps}), from = stage * {elements};
      for (int k = 0; k < steps; ++k) {{
        {type} x[{side}], y[{side}];
#pragma unroll
        for (int r = 0; r < {side}; r += {vector})
          take<{vector}>(tile_a, from + k * {pitch} + r * {line} + row_of, x + r);
#pragma unroll
        for (int c = 0; c < {side}; c += {vector})
          take<{vector}>(tile_b, from + k * {pitch} + c * {line} + column_of, y + c);
{again}#pragma unroll
        for (int r = 0; r < {side}; ++r)
#pragma unroll
          for (int c = 0; c < {side}; ++c) {{
{step}{combine}          }}
      }}
      if (more) put(stage ^ 1);
      stage ^= 1;
    }}
{results}{store}{after}  }}
"""
# The text of each element, one by one or for pieces of adjacent ones.
_EACH: Final = """\
#pragma unroll
    for (int r = 0; r < {side}; ++r)
#pragma unroll
      for (int c = 0; c < {side}; ++c) {{
{text}      }}
"""
_EACH_PIECE: Final = """\
#pragma unroll
    for (int r = 0; r < {side}; ++r)
#pragma unroll
      for (int c_0 = 0; c_0 < {side}; c_0 += {vector}) {{
        const int c = c_0;
{places}        if (row >= shape.rows || column >= shape.columns) continue;
        const i64 at = {place};
{text}      }}
"""
_PIECE: Final = """\
        {memory} piece[{vector}];
        const i64 column_of_piece = column;
#pragma unroll
        for (int j = 0; j < {vector}; ++j) {{
          const int c = c_0 + j;
          const i64 column = column_of_piece + j;
{text}        }}
        write_piece<{vector}>(out + at, piece);
"""
# The map that follows. A loop that is not unrolled: its text may have a thousand instructions.
_AFTER: Final = """\
{seeds}#pragma unroll 1
    for (int e = 0; e < {count}; ++e) {{
      const int r = e / {side}, c = e % {side};
{places}      if (row >= shape.rows || column >= shape.columns) continue;
      const {index} i = ({index})({place});
      const {memory} result = results[e];
{body}    }}
{write}"""

# An element beyond the edge draws from a stream whose results are dropped.
_START: Final = """\
{places}        const i64 place = column < shape.columns ? out_n[column] : 0;
        const u64 number = (u64)(batch * shape.out_batch + row * shape.out_row + place);
"""
_PLACES: Final = """\
        const i64 row = row_0 + r / {vector} * {band} + row_of + r % {vector};
        const i64 column = column_0 + c / {vector} * {band} + column_of + c % {vector};
"""
_PLACE: Final = "batch * shape.out_batch + row * shape.out_row + out_n[column]"
_INSIDE: Final = "        if (row < shape.rows && column < shape.columns)\n"
# After the last step of a shard. The next shard has streams of its own.
_ADD_SHARDS: Final = """\
            if (ends) {{
              for (int level = (int)shards.first[shard]; level < (int)shards.last[shard]; ++level) {{
                acc[r][c] = {name}_combine(waiting[level][r][c], acc[r][c], {waiting_bits});
{followed}              }}
              waiting[shards.last[shard]][r][c] = acc[r][c];
{kept}              acc[r][c] = 0;
{start}            }}
"""
_COMBINE: Final = """\
            if (ends) {{
              total[r][c] = {name}_combine(total[r][c], acc[r][c], {step_bits});
              acc[r][c] = 0;
            }}
"""


# Steps in binary32 that also say whether the next one may be in binary32.
_SINGLE_STEP: Final = """\
            const u32 random = {step_bits};
            bool inside;
            {name}_step(x[r], y[c], acc[r][c], random, acc[r][c], inside);
            left_range |= (u32)!inside << (r * {side} + c);
"""
# An element whose sum left the range is computed again, from its first step.
_AGAIN: Final = """\
APART {result} {name}_again(const {a}* left, const {b}* right, const i64* b_k, const i64 length, const i64 step,
    const u64 number, const Key key) {{
  {type} acc = 0;
{start}  for (i64 k = 0; k < length; ++k) {{
{again}    acc = {name}_wide_step({name}_wide_lift_a({x}), {name}_wide_lift_b({y}), acc, {step_bits});
  }}
  return {value};
}}
"""


def contract_name(tile: Tile) -> str:
    """The name of the ``__global__`` function."""
    how = "_".join(way.name for way in tile.ways)
    then = f"_then_{tile.after.name}" if tile.after else ""
    stores = f"_s{tile.stored}" if tile.stored > 1 else ""
    return f"contract_{tile.kernel.digest[:16]}_{tile.side}_{how}{'_single' if tile.single else ''}{stores}{then}"


def contract_text(tile: Tile) -> str:
    """The text of a contraction and of the device functions that are its own."""
    kernel, name, side, stage = tile.steps, contract_name(tile), tile.side, tile.stage
    type, chunked, element_stream = TYPES[kernel.accumulator], bool(kernel.chunk), "state[r][c]"
    sharded, levels = kernel.shards > 1, kernel.shards.bit_length() - 1
    begun = "number" if not sharded else f"number * {kernel.shards} + shards.number[0]"
    start = stream(kernel, f"        {element_stream}", begun)
    declare, again, step_bits = "", "", bits(kernel.draws, element_stream)
    vector = tile.vector
    places = _PLACES.format(vector=vector, band=vector * _LINE)
    if start:
        declare += f"    u64 state[{side}][{side}];\n"
        start = _START.format(places=places) + start
    if chunked:
        declare += f"    {type} total[{side}][{side}];\n"
        start += "        total[r][c] = 0;\n"
        again += f"        const bool ends = (k_0 + k + 1) % {kernel.chunk} == 0 || k_0 + k + 1 == shape.length;\n"
    if sharded:
        declare += f"    {type} waiting[{levels} + 1][{side}][{side}];\n    int next_shard = 0;\n"
        start += f"        waiting[{levels}][r][c] = 0;\n"
        again += "        const int shard = next_shard;\n"
        again += "        const bool ends = k_0 + k + 1 == shards.end[shard];\n        next_shard += ends;\n"
    if kernel.streams and sharded:
        declare += f"    u64 waiting_state[{levels} + 1][{side}][{side}];\n"
        start += f"        waiting_state[{levels}][r][c] = {element_stream};\n"
    if kernel.coins:
        # 32 steps share a word, which is drawn before the first of them.
        declare += f"    u32 word[{side}][{side}];\n"
        start += "        word[r][c] = 0;\n"
        k = "(k_0 + k - shards.begin[shard])" if sharded else "(k_0 + k)"
        again += f"        const bool fresh = {k} % 32 == 0;\n"
        step_bits = f"word[r][c] = fresh ? toss({element_stream}) : word[r][c] << 1"
    if tile.single:
        declare += "    u32 left_range = 0;\n"
    step = f"            acc[r][c] = {name}_step(x[r], y[c], acc[r][c], {step_bits});\n"
    total, last_stream = "total" if chunked else "acc", element_stream
    if sharded:
        total, last_stream = f"waiting[{levels}]", f"waiting_state[{levels}][r][c]"
    finish = f"{name}_finish({total}[r][c], {bits(kernel.finish_draws, last_stream)})"
    copied = _copied(tile, name)
    # Elements beyond the edge are computed as the others, unless that would read beyond the operands.
    zeros = " = {}" if tile.single else ""
    results = f"    {MEMORY[kernel.result]} results[{side * side}]{zeros};\n"
    body = _CONTRACT.format(
        a=MEMORY[kernel.loads[0]],
        b=MEMORY[kernel.loads[1]],
        type=type,
        side=side,
        line=_LINE,
        width=tile.width,
        vector=vector,
        steps=stage.steps,
        pitch=stage.pitch,
        elements=stage.elements,
        threads="".join(copying.threads() for copying in copied),
        held="".join(copying.declared() for copying in copied),
        fetch="".join(copying.fetch() for copying in copied),
        put="".join(copying.put() for copying in copied),
        wait="      wait_for_copies();\n" if any(way.piece for way in tile.ways) else "",
        declare=declare,
        start=start,
        again=again,
        step=_SINGLE_STEP.format(name=name, side=side, step_bits=step_bits) if tile.single else step,
        combine=_combined(kernel, name, step_bits, places),
        store=_stores(tile, name, stored(kernel.result, finish), places),
        results=results if tile.after else "",
        after=_after(tile.after, tile, name, places) if tile.after else "",
    )
    operands = [pointer(storage, x) for storage, x in zip(kernel.loads, "ab", strict=True)]
    tables = [f"const i64* __restrict__ {table}" for table in ("b_k", "b_n", "out_n")]
    out = [pointer(kernel.result, "out", readonly=False)] if tile.after is None or tile.after.kept else []
    shards = ["const Shards shards"] if sharded else []
    parameters = ["const Shape shape", *shards, *out, *operands, *tables, KEY, *_parameters(tile.after)]
    functions = COPIES + bodies(kernel, name) + (_again(tile.kernel, name) if tile.single else "")
    functions = (shards_structure(kernel.shards) if sharded else "") + functions
    if tile.after:
        functions += device_function(tile.after.variant.kernel.body, f"{name}_body")
    # Two blocks of 128 registers a thread hide each other's barriers. 16 elements with a stream or two sums need more.
    light = side < 4 or not (kernel.streams or kernel.combine is not None)
    return functions + global_(name, parameters, body, THREADS, 2 if light else 1)


def _combined(kernel: Contract, name: str, step_bits: str, places: str) -> str:
    """What adds the partial sum of an element to others, after a chunk or a shard."""
    if kernel.shards == 1:
        return _COMBINE.format(name=name, step_bits=step_bits) if kernel.chunk else ""
    start, followed, kept = "", "", ""
    if kernel.streams:
        number = f"number * {kernel.shards} + shards.number[shard + 1]"
        start = "              if (shard + 1 < shards.count) {\n"
        start += indented((_START.format(places=places) + stream(kernel, "state[r][c]", number)).splitlines(), 16)
        start += "              }\n"
        followed = "                state[r][c] = waiting_state[level][r][c];\n"
        kept = "              waiting_state[shards.last[shard]][r][c] = state[r][c];\n"
    waiting_bits = bits(kernel.draws, "waiting_state[level][r][c]")
    return _ADD_SHARDS.format(name=name, waiting_bits=waiting_bits, start=start, followed=followed, kept=kept)


def _copied(tile: Tile, name: str) -> tuple[Copying, Copying]:
    """How the text copies its operands."""
    a, b = tile.steps.loads
    left = Operand(
        "a",
        "base_a",
        "row_0",
        "shape.rows",
        MEMORY[a],
        f"{name}_lift_a({element(a, '{0}')})",
        ("shape.a_row", "shape.a_length"),
    )
    right = Operand(
        "b",
        "base_b",
        "column_0",
        "shape.columns",
        MEMORY[b],
        f"{name}_lift_b({element(b, '{0}')})",
        ("shape.b_column", "shape.b_length"),
    )
    return Copying(tile.stage, tile.ways[0], left), Copying(tile.stage, tile.ways[1], right)


def _stores(tile: Tile, name: str, value: str, places: str) -> str:
    """The loops that store a thread's elements."""
    side, vector, memory = tile.side, tile.stored, MEMORY[tile.kernel.result]
    if tile.after is None and vector > 1:
        text = _PIECE.format(memory=memory, vector=vector, text=_store(tile, name, value, "piece[j]"))
        return _EACH_PIECE.format(side=side, vector=vector, places=places, place=_PLACE, text=text)
    target = f"results[r * {side} + c]" if tile.after else f"out[{_PLACE}]"
    at = "" if tile.after and not tile.single else places + _INSIDE
    text = _EACH.format(side=side, text=at + _store(tile, name, value, target))
    if tile.after and tile.after.kept and vector > 1:
        text += _written(tile, places, "out", "results")
    return text


def _written(tile: Tile, places: str, out: str, values: str) -> str:
    """The loops that store pieces of a thread's array."""
    text = f"        write_piece<{tile.stored}>({out} + at, {values} + r * {tile.side} + c);\n"
    return _EACH_PIECE.format(side=tile.side, vector=tile.stored, places=places, place=_PLACE, text=text)


def _store(tile: Tile, name: str, value: str, target: str) -> str:
    """The statement that stores an element."""
    if not tile.single:
        return f"          {target} = {value};\n"
    operands = "base_a + row * shape.a_row, base_b + b_n[column]"
    again = f"{name}_again({operands}, b_k, shape.length, shape.a_length, place, key)"
    lines = (
        "{",
        f"  const u64 place = (u64)({_PLACE});",
        f"  if (left_range >> (r * {tile.side} + c) & 1) {target} = {again};",
        f"  else {target} = {value};",
        "}",
    )
    return indented(lines, 10)


def _after(after: After, tile: Tile, name: str, places: str) -> str:
    """The loop that computes the map for the elements of a thread."""
    variant = after.variant
    kernel, index = variant.kernel, "u64" if variant.wide else "u32"
    places_of = {"contiguous": "i", "scalar": "0"}
    read = [
        "result" if taken else f"x{n}[{places_of.get(access, f'o{n}')}]"
        for n, (access, taken) in enumerate(zip(variant.accesses, after.taken, strict=True))
    ]
    memory = [MEMORY[storage] for storage in kernel.results]
    declared, write, targets = [], "", [f"after{n}[i]" for n in range(len(memory))]
    if tile.stored > 1:
        # Results of the map wait where those of the product were, or in arrays of their own.
        arrays = [f"made_{n}" for n in range(len(memory))]
        if (own := MEMORY[tile.kernel.result]) in memory:
            arrays[memory.index(own)] = "results"
        declared = [f"{m} {a}[{tile.side**2}];" for m, a in zip(memory, arrays, strict=True) if a != "results"]
        targets = [f"{array}[e]" for array in arrays]
        write = "".join(_written(tile, places, f"after{n}", array) for n, array in enumerate(arrays))
    lines = ["out[i] = result;"] if after.kept and tile.stored == 1 else []
    lines += stores(kernel, name, read, targets)
    return indented(declared, 4) + _AFTER.format(
        seeds=indented(seeds(kernel, after.nodes).splitlines(), 2),
        count=tile.side**2,
        side=tile.side,
        places=indented((line.strip() for line in places.splitlines()), 6),
        index=index,
        place=_PLACE,
        memory=MEMORY[tile.kernel.result],
        body=indented((line.strip() for line in walk(variant.walked, variant.dims, index, "i").splitlines()), 6)
        + indented(lines, 6),
        write=write,
    )


def _parameters(after: After | None) -> list[str]:
    """The parameters of the map that follows: its numbers of nodes, its layout, its results and its operands."""
    if after is None:
        return []
    kernel = after.variant.kernel
    return [
        *(f"const u32 {node}" for node in after.nodes),
        f"const Layout<{len(kernel.loads)}> layout",
        *(pointer(storage, f"after{n}", readonly=False) for n, storage in enumerate(kernel.results)),
        *(pointer(s, f"x{n}") for n, (s, t) in enumerate(zip(kernel.loads, after.taken, strict=True)) if not t),
    ]


def _again(kernel: Contract, name: str) -> str:
    """The function that computes one element by the general steps."""
    again, declared, step_bits = "", "", bits(kernel.draws, "state")
    if kernel.coins:
        declared, step_bits = "  u32 word = 0;\n", "word"
        again = "    word = k % 32 == 0 ? toss(state) : word << 1;\n"
    text = _AGAIN.format(
        name=name,
        a=MEMORY[kernel.loads[0]],
        b=MEMORY[kernel.loads[1]],
        result=MEMORY[kernel.result],
        type=TYPES[kernel.accumulator],
        start=stream(kernel, "  u64 state", "number") + declared,
        again=again,
        x=element(kernel.loads[0], "left[k * step]"),
        y=element(kernel.loads[1], "right[b_k[k]]"),
        step_bits=step_bits,
        value=stored(kernel.result, f"{name}_wide_finish(acc, {bits(kernel.finish_draws, 'state')})"),
    )
    return bodies(kernel, f"{name}_wide") + text
