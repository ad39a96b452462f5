"""Contractions as CUDA C++ text: a block of 256 threads computes a tile of the result, k ascending.

The block copies a few steps of its rows and columns to shared memory, converted to the accumulator's type; then each
thread does these steps for its own elements, in registers. Every element has its own accumulator, its own stream and
all of its k in order, so a tile of any size gives the same bits. Two tables of offsets say where element (k, n) of the
second operand is, so a matrix of any strides and the windows of an image are one case; a third one says where column n
of the result is stored, which is also the number of its stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.kernels.shapes import Contract
from fxround.runtime.cuda.cpp.common import MEMORY, bits, bodies, element, global_, pointer, stored, stream
from fxround.runtime.cuda.cpp.table import TYPES

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
    "out_batch",
    "out_row",
)
"""The fields of a contraction's shape, 64-bit integers in this order: sizes, then steps in elements."""

THREADS: Final = 256
# A tile is 16 x 16 threads of SIDE x SIDE elements each.
_LINE: Final = 16
# Steps between two barriers.
_STEPS: Final = 16


@dataclass(frozen=True)
class Tile:
    """A contraction whose threads compute ``side`` x ``side`` elements each.

    single: whether its steps are those of ``kernel.single``, in binary32 where that is possible.
    """

    kernel: Contract
    side: int
    single: bool = False

    @property
    def width(self) -> int:
        """The rows and columns of a tile."""
        return _LINE * self.side


# a_rows and b_columns differ by an odd number of words from a power of two, so that a column of shared memory lies in
# different banks.
_CONTRACT: Final = """\
  SHARED({type}, tile_a, {steps} * {pitch});
  SHARED({type}, tile_b, {steps} * {pitch});
  const i64 tiles_n = (shape.columns + {width} - 1) / {width}, tiles_m = (shape.rows + {width} - 1) / {width};
  const u64 tiles = (u64)(shape.batch * tiles_m * tiles_n);
  const int row_of = threadIdx.x / {line}, column_of = threadIdx.x % {line};
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {{
    const i64 batch = (i64)(tile / (u64)(tiles_m * tiles_n));
    const i64 row_0 = (i64)(tile / (u64)tiles_n) % tiles_m * {width}, column_0 = (i64)(tile % (u64)tiles_n) * {width};
    const {a}* left = a + (shape.groups ? batch % shape.groups : batch) * shape.a_batch;
    const {b}* right = b + batch * shape.b_batch;
    {type} acc[{side}][{side}];
{declare}#pragma unroll
    for (int r = 0; r < {side}; ++r)
#pragma unroll
      for (int c = 0; c < {side}; ++c) {{
        acc[r][c] = 0;
{start}      }}
    for (i64 k_0 = 0; k_0 < shape.length; k_0 += {steps}) {{
      const int steps = shape.length - k_0 < {steps} ? (int)(shape.length - k_0) : {steps};
      for (int e = threadIdx.x; e < {steps} * {width}; e += {threads}) {{
        // Neighbouring threads read neighbouring elements: along k if the rows are stored so, else along the rows.
        const int k = shape.a_length == 1 ? e % {steps} : e / {width};
        const int m = shape.a_length == 1 ? e / {steps} : e % {width};
        {type} value = 0;
        if (k < steps && row_0 + m < shape.rows) {{
          const i64 at = (row_0 + m) * shape.a_row + (k_0 + k) * shape.a_length;
          value = {name}_lift_a({x});
        }}
        tile_a[k * {pitch} + m] = value;
      }}
      for (int e = threadIdx.x; e < {steps} * {width}; e += {threads}) {{
        const int k = e / {width}, n = e % {width};
        {type} value = 0;
        if (k < steps && column_0 + n < shape.columns) {{
          const i64 at = b_k[k_0 + k] + b_n[column_0 + n];
          value = {name}_lift_b({y});
        }}
        tile_b[k * {pitch} + n] = value;
      }}
      __syncthreads();
      for (int k = 0; k < steps; ++k) {{
        {type} x[{side}], y[{side}];
#pragma unroll
        for (int r = 0; r < {side}; ++r) x[r] = tile_a[k * {pitch} + r * {line} + row_of];
#pragma unroll
        for (int c = 0; c < {side}; ++c) y[c] = tile_b[k * {pitch} + c * {line} + column_of];
{again}#pragma unroll
        for (int r = 0; r < {side}; ++r)
#pragma unroll
          for (int c = 0; c < {side}; ++c) {{
{step}{combine}          }}
      }}
      __syncthreads();
    }}
#pragma unroll
    for (int r = 0; r < {side}; ++r)
#pragma unroll
      for (int c = 0; c < {side}; ++c) {{
        const i64 row = row_0 + r * {line} + row_of, column = column_0 + c * {line} + column_of;
        if (row < shape.rows && column < shape.columns)
{store}      }}
  }}
"""

# An element beyond the edge draws from a stream whose results are dropped.
_START: Final = """\
        const i64 row = row_0 + r * {line} + row_of, column = column_0 + c * {line} + column_of;
        const i64 place = column < shape.columns ? out_n[column] : 0;
        const u64 number = (u64)(batch * shape.out_batch + row * shape.out_row + place);
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
    return f"contract_{tile.kernel.digest[:16]}_{tile.side}{'_single' if tile.single else ''}"


def contract_text(tile: Tile) -> str:
    """The text of a contraction and of the device functions that are its own."""
    whole, name, side = tile.kernel, contract_name(tile), tile.side
    kernel = whole.single if tile.single and whole.single is not None else whole
    type, chunked, element_stream = TYPES[kernel.accumulator], kernel.combine is not None, "state[r][c]"
    start = stream(kernel, f"        {element_stream}", "number")
    declare, again, step_bits = "", "", bits(kernel.draws, element_stream)
    if start:
        declare += f"    u64 state[{side}][{side}];\n"
        start = _START.format(line=_LINE) + start
    if chunked:
        declare += f"    {type} total[{side}][{side}];\n"
        start += "        total[r][c] = 0;\n"
        again += f"        const bool ends = (k_0 + k + 1) % {kernel.chunk} == 0 || k_0 + k + 1 == shape.length;\n"
    if kernel.coins:
        # 32 steps share a word, which is drawn before the first of them.
        declare += f"    u32 word[{side}][{side}];\n"
        start += "        word[r][c] = 0;\n"
        again += "        const bool fresh = (k_0 + k) % 32 == 0;\n"
        step_bits = f"word[r][c] = fresh ? toss({element_stream}) : word[r][c] << 1"
    if tile.single:
        declare += "    u32 left_range = 0;\n"
    step = f"            acc[r][c] = {name}_step(x[r], y[c], acc[r][c], {step_bits});\n"
    finish = f"{name}_finish({'total' if chunked else 'acc'}[r][c], {bits(kernel.finish_draws, element_stream)})"
    body = _CONTRACT.format(
        name=name,
        a=MEMORY[kernel.loads[0]],
        b=MEMORY[kernel.loads[1]],
        type=type,
        side=side,
        line=_LINE,
        width=tile.width,
        pitch=tile.width + 1,
        steps=_STEPS,
        threads=THREADS,
        declare=declare,
        start=start,
        x=element(kernel.loads[0], "left[at]"),
        y=element(kernel.loads[1], "right[at]"),
        again=again,
        step=_SINGLE_STEP.format(name=name, side=side, step_bits=step_bits) if tile.single else step,
        combine=_COMBINE.format(name=name, step_bits=step_bits) if chunked else "",
        store=_store(tile, name, stored(kernel.result, finish)),
    )
    operands = [pointer(storage, x) for storage, x in zip(kernel.loads, "ab", strict=True)]
    tables = [f"const i64* __restrict__ {table}" for table in ("b_k", "b_n", "out_n")]
    out = pointer(kernel.result, "out", readonly=False)
    parameters = ["const Shape shape", out, *operands, *tables, "const Key key"]
    functions = bodies(kernel, name) + (_again(whole, name) if tile.single else "")
    return functions + global_(name, parameters, body, THREADS)


def _store(tile: Tile, name: str, value: str) -> str:
    """The statement that stores an element."""
    place = "batch * shape.out_batch + row * shape.out_row + out_n[column]"
    if not tile.single:
        return f"          out[{place}] = {value};\n"
    operands = "left + row * shape.a_row, right + b_n[column]"
    again = f"{name}_again({operands}, b_k, shape.length, shape.a_length, place, key)"
    lines = (
        "{",
        f"  const u64 place = (u64)({place});",
        f"  if (left_range >> (r * {tile.side} + c) & 1) out[place] = {again};",
        f"  else out[place] = {value};",
        "}",
    )
    return "".join(f"          {line}\n" for line in lines)


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
