"""Reductions, scans, scatters and exact sums as CUDA C++ text.

A thread computes one output element, with the stream and the order of its own. In a reduction in several chains, a
group of threads computes one, a chain each; a whole block may compute one exact sum, whose order is free. Where a
warp's threads would read places that are far apart, or too few threads would read, lines pass through shared memory.
Sizes are arguments, so a text serves every shape of operands. No number depends on the grid: a grid of any size visits
every element once. Indices have 64 bits.

    reduce    (lines, out, x, key)                                   element i of out is of line i
    reduce    (lines, shards, out, x, key)                           of an order of shards: those of a line's length
    scan      (lines, out, x, key)                                   out: (outer, length, inner), row-major
    scatter   (elements, inner, out, self, x, starts, order, key)    row r takes rows order[starts[r] .. starts[r + 1]]
    exact     (lines, out, x, key)                                   as reduce

Line i begins at i / inner * outer_step + i % inner * inner_step of x; its element k is k / run * far + k % run * near
further. Steps are any numbers.
"""

from __future__ import annotations

from typing import Final

from fxround.kernels.kinds import Exact, Reduce, Scan, Scatter
from fxround.numerics.arithmetic.scalar import const
from fxround.numerics.formats.storage import CARRIER_OF
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
from fxround.runtime.cuda.cpp.limbs import SIZES
from fxround.runtime.cuda.cpp.lines import GROUP, LINES, PLAIN, LineLoop, combined, loop_name, parameters, staged_text
from fxround.runtime.cuda.cpp.table import TYPES, constant


def loop_text(kernel: Reduce | Scan | Scatter | Exact, shape: LineLoop = PLAIN) -> str:
    """The text of a kernel and of the device functions that are its own."""
    match kernel:
        case Reduce() | Scan() if shape.staging:
            return staged_text(kernel, shape)
        case Reduce() if kernel.order.shards > 1:
            return _shards(kernel, shape)
        case Reduce() if kernel.order.chains > 1:
            return _chains(kernel, shape)
        case Reduce() | Scan():
            return _chain(kernel, shape)
        case Scatter():
            return _scatter(kernel, shape)
        case Exact():
            return _exact(kernel, shape)


# The elements of a line that are on their way to a thread at once, twice as many where there are few threads; and the
# contributions to an element.
_AHEAD: Final = 8
_CONTRIBUTIONS: Final = 4

# ``next`` is the address of the thread's element, ``within`` the number of that element in its run.
_OWN: Final = """\
      const {memory}* next = x + line_at(lines, i) + place_at(lines, {first});
      u64 within = {first} % lines.run;
      for (u64 n = 0; n < own; n += {ahead}) {{
        const int left = own - n < {ahead} ? (int)(own - n) : {ahead};
        {memory} held[{ahead}];
#pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
          held[j] = 0;
          if (j < left) held[j] = *next;
          next += move;
          within += part;
          if (within >= lines.run) within -= lines.run, next += turn;
        }}
#pragma unroll
        for (int j = 0; j < {ahead}; ++j)
          if (j < left) {{
            acc = {name}_step(acc, {element}, {step_bits});
{store}          }}
      }}
"""
# How far the next element of a thread is, where it is in the same run, and how much further otherwise.
_MOVES: Final = """\
  const u64 part = {chains} % lines.run;
  const i64 move = (i64)({chains} / lines.run) * lines.far + (i64)part * lines.near;
  const i64 turn = lines.far - (i64)lines.run * lines.near;
"""


def _own(kernel: Reduce | Scan, shape: LineLoop, first: str, store: str = "") -> str:
    """The loop over a thread's elements of a line, which reads some before it takes their steps."""
    name = loop_name(kernel, shape)
    return _OWN.format(
        name=name,
        memory=MEMORY[kernel.loads[0]],
        first=first,
        ahead=_AHEAD if shape.threads == GROUP else 2 * _AHEAD,
        element=element(kernel.loads[0], "held[j]"),
        step_bits=bits(kernel.draws, "state"),
        store=store,
    )


_CHAIN: Final = """\
{moves}  for (u64 i = first_item(); i < lines.count; i += item_step()) {{
    const u64 own = lines.length;
    {type} acc = {first};
{start}{place}    {{
{own}    }}
{end}  }}
"""


def _chain(kernel: Reduce | Scan, shape: LineLoop) -> str:
    """One chain: a thread a line."""
    name = loop_name(kernel, shape)
    value = stored(kernel.result, f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})")
    whole = isinstance(kernel, Reduce)
    body = _CHAIN.format(
        moves=_MOVES.format(chains="1ull"),
        type=TYPES[kernel.accumulator],
        first=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", "i"),
        place="" if whole else "    u64 at = i / lines.inner * lines.length * lines.inner + i % lines.inner;\n",
        own=_own(
            kernel, shape, "0ull", "" if whole else f"            out[at] = {value};\n            at += lines.inner;\n"
        ),
        end=f"    out[i] = {value};\n" if whole else "",
    )
    return LINES + bodies(kernel, name) + global_(name, parameters(kernel), body)


_CHAINS: Final = """\
  SHARED({type}, ends, {threads});
  // Neighbouring threads read neighbouring elements: of one line, or of several if these are stored side by side.
  const bool along = lines.along;
  const int chain = along ? threadIdx.x % {chains} : threadIdx.x / {lines};
  const int line_of = along ? threadIdx.x / {chains} : threadIdx.x % {lines}, next_chain = along ? 1 : {lines};
  const u64 used = lines.length < {chains} ? lines.length : {chains};
{moves}  for (u64 i_0 = (u64)blockIdx.x * {lines}; i_0 < lines.count; i_0 += (u64)gridDim.x * {lines}) {{
    const u64 i = i_0 + line_of;
    const bool inside = i < lines.count;
    {type} acc = {initial};
{start}    if (inside && (u64)chain < used) {{
      const u64 own = (lines.length - chain - 1) / {chains} + 1;
{own}    }}
{combine}    if (inside && chain == 0) out[i] = {value};
  }}
"""


def _chains(kernel: Reduce, shape: LineLoop) -> str:
    """Several chains: a thread a chain."""
    name, chains = loop_name(kernel, shape), kernel.order.chains
    body = _CHAINS.format(
        type=TYPES[kernel.accumulator],
        threads=shape.threads,
        chains=chains,
        lines=shape.threads // chains,
        moves=_MOVES.format(chains=f"{chains}ull"),
        initial=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", f"i * {chains} + chain"),
        own=_own(kernel, shape, "(u64)chain"),
        combine=combined(kernel, name),
        value=stored(kernel.result, f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})"),
    )
    return LINES + bodies(kernel, name) + global_(name, parameters(kernel), body, shape.threads)


# The chains of one shard after the other. ``waiting`` has the sums of shards, and their streams, by their levels.
_SHARDS: Final = """\
  SHARED({type}, ends, {threads});
  const bool along = lines.along;
  const int chain = along ? threadIdx.x % {chains} : threadIdx.x / {lines};
  const int line_of = along ? threadIdx.x / {chains} : threadIdx.x % {lines}, next_chain = along ? 1 : {lines};
{moves}  for (u64 i_0 = (u64)blockIdx.x * {lines}; i_0 < lines.count; i_0 += (u64)gridDim.x * {lines}) {{
    const u64 i = i_0 + line_of;
    const bool inside = i < lines.count;
    {type} waiting[{levels} + 1];
    u64 state = 0, waiting_state[{levels} + 1];
    for (int s = 0; s < shards.count; ++s) {{
      const u64 begin = shards.begin[s], length = shards.end[s] - begin, used = length < {chains} ? length : {chains};
      {type} acc = {initial};
{start}      if (inside && (u64)chain < used) {{
        const u64 own = (length - chain - 1) / {chains} + 1;
{own}      }}
{combine}      for (int level = (int)shards.first[s]; level < (int)shards.last[s]; ++level) {{
        acc = {name}_combine(waiting[level], acc, {waiting_bits});
        state = waiting_state[level];
      }}
      waiting[shards.last[s]] = acc;
      waiting_state[shards.last[s]] = state;
    }}
    if (inside && chain == 0) out[i] = {value};
  }}
"""


def _shards(kernel: Reduce, shape: LineLoop) -> str:
    """The chains of shards: a thread a chain."""
    name, order = loop_name(kernel, shape), kernel.order
    body = _SHARDS.format(
        name=name,
        type=TYPES[kernel.accumulator],
        threads=shape.threads,
        chains=order.chains,
        lines=shape.threads // order.chains,
        levels=order.shards.bit_length() - 1,
        moves=_MOVES.format(chains=f"{order.chains}ull"),
        initial=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "      state", f"(i * {order.shards} + shards.number[s]) * {order.chains} + chain"),
        own=_own(kernel, shape, "(begin + (u64)chain)"),
        combine=combined(kernel, name),
        waiting_bits=bits(kernel.draws, "waiting_state[level]"),
        value=stored(
            kernel.result,
            f"{name}_finish(waiting[{order.shards.bit_length() - 1}], "
            f"{bits(kernel.finish_draws, f'waiting_state[{order.shards.bit_length() - 1}]')})",
        ),
    )
    head = LINES + shards_structure(order.shards) + bodies(kernel, name)
    return head + global_(name, parameters(kernel), body, shape.threads)


# A thread has {piece} adjacent elements, and some of their contributions on the way.
_SCATTER: Final = """\
  for (u64 item = first_item(); item < elements / {piece}; item += item_step()) {{
    const u64 i = item * {piece}, row = i / inner, column = i % inner;
    const i64 end = starts[row + 1];
    {memory} own[{piece}], held[{ahead}][{piece}];
    {type} acc[{piece}];
{declare}    read_piece<{piece}>(self + i, own);
#pragma unroll
    for (int e = 0; e < {piece}; ++e) {{
      acc[e] = {name}_lift({own});
{start}    }}
    for (i64 c = starts[row]; c < end; c += {ahead}) {{
#pragma unroll
      for (int j = 0; j < {ahead}; ++j)
        if (c + j < end) read_piece<{piece}>(x + (u64)order[c + j] * inner + column, held[j]);
#pragma unroll
      for (int j = 0; j < {ahead}; ++j)
#pragma unroll
        for (int e = 0; e < {piece}; ++e)
          if (c + j < end) acc[e] = {name}_step(acc[e], {element}, {step_bits});
    }}
#pragma unroll
    for (int e = 0; e < {piece}; ++e) own[e] = {value};
    write_piece<{piece}>(out + i, own);
  }}
"""


def _scatter(kernel: Scatter, shape: LineLoop) -> str:
    name, storage = loop_name(kernel, shape), kernel.loads[0]
    start = stream(kernel, "      state[e]", "i + e")
    body = _SCATTER.format(
        name=name,
        memory=MEMORY[storage],
        type=TYPES[kernel.accumulator],
        piece=shape.piece,
        ahead=_CONTRIBUTIONS,
        declare=f"    u64 state[{shape.piece}];\n" if start else "",
        own=element(storage, "own[e]"),
        start=start,
        element=element(storage, "held[j][e]"),
        step_bits=bits(kernel.draws, "state[e]"),
        value=stored(kernel.result, f"{name}_finish(acc[e], 0u)"),
    )
    operands = [pointer(storage, "self"), pointer(storage, "x")]
    places = [f"const i64* __restrict__ {n}" for n in ("starts", "order")]
    out = pointer(kernel.result, "out", readonly=False)
    parameters = ["const u64 elements", "const u64 inner", out, *operands, *places, KEY]
    return bodies(kernel, name) + global_(name, parameters, body)


_EXACT: Final = """\
  for (u64 i = first_item(); i < lines.count; i += item_step()) {{
    const {memory}* line = x + line_at(lines, i);
    i64 limbs[{count}] = {{0}};
    u32 flags = 0;
    for (u64 k = 0; k < lines.length; ++k) {{
{add}      if ((k + 1) % (1u << 30) == 0) carry_limbs(limbs, {count});
    }}
{finish}  }}
"""
# After a carry, the sum of all threads' limbs fits into 64 bits. A thread has too few elements for an earlier carry.
_EXACT_SHARED: Final = """\
  SHARED(i64, limb, {threads});
  SHARED(u32, special, {threads});
  const int t = threadIdx.x;
  for (u64 item = blockIdx.x; item < lines.count{times}; item += gridDim.x) {{
    const u64 i = item{over}, part = {part};
    i64 limbs[{count}] = {{0}};
    u32 flags = 0;
{load}    carry_limbs(limbs, {count});
    special[t] = flags;
    for (int n = 0; n < {count}; ++n) {{
      limb[t] = limbs[n];
      __syncthreads();
      for (int w = {threads} / 2; w > 0; w /= 2) {{
        if (t < w) limb[t] = (i64)limb[t] + (i64)limb[t + w];
        if (t < w && n == 0) special[t] = (u32)special[t] | (u32)special[t + w];
        __syncthreads();
      }}
      if (t == 0) limbs[n] = limb[t];
    }}
    if (t == 0) {{
      flags = special[t];
{finish}    }}
  }}
"""
# What a thread of a block adds: elements of a line, or of its part, or parts of a line.
_LOAD: Final = """\
    const {memory}* line = x + line_at(lines, i);
    for (u64 k = part * {threads} + t; k < lines.length; k += {threads}ull{times}) {{
{add}    }}
"""
_LOAD_PARTS: Final = """\
#pragma unroll 1
    for (u64 p = t; p < parts; p += {threads}) {{
      const i64* of_part = partial + (i * parts + p) * {pitch};
      for (int n = 0; n < {count}; ++n) limbs[n] += of_part[n];
      flags |= (u32)of_part[{count}];
    }}
"""
_STORE_PART: Final = """\
      i64* of_part = partial + item * {pitch};
      for (int n = 0; n < {count}; ++n) of_part[n] = limbs[n];
      of_part[{count}] = flags;
"""
_ADD: Final = """\
      const u64 code = {name}_read({element});
      const u32 field = (u32)(code >> {trailing}) & {last}u;
      const u64 fraction = code & ((1ull << {trailing}) - 1);
      const bool negative = code >> {sign} & 1;
      if (field == {last}u) flags |= fraction ? 4u : negative ? 2u : 1u;
      else add_limbs(limbs, field ? field : 1u, fraction | (u64)(field != 0) << {trailing}, -(i64)negative);
"""
_FINISH: Final = """\
    const double total = flags ? special_of(flags) : total_of(limbs, {count}, {bias}, {to_odd});
{start}    const u32 once = {once}, again = {again};
    out[i] = {value};
"""


def _exact(kernel: Exact, shape: LineLoop) -> str:
    name, storage = loop_name(kernel, shape), kernel.loads[0]
    count, trailing, last, bias = SIZES[CARRIER_OF[storage]]
    add = _ADD.format(
        name=name,
        element=element(storage, "line[place_at(lines, k)]"),
        trailing=trailing,
        last=last,
        sign=31 if CARRIER_OF[storage] == "f32" else 63,
    )
    finish = _FINISH.format(
        count=count,
        bias=bias,
        to_odd="true" if kernel.to_odd else "false",
        start=stream(kernel, "    u64 state", "i"),
        once=bits(kernel.draws[0], "state"),
        again=bits(kernel.draws[1], "state"),
        value=stored(kernel.result, f"{name}_finish(total, once, again)"),
    )
    sizes = {"memory": MEMORY[storage], "count": count, "threads": GROUP}
    if not shape.exact:
        return (
            LINES
            + bodies(kernel, name)
            + global_(name, parameters(kernel), _EXACT.format(add=add, finish=finish, **sizes))
        )
    first, last = shape.exact == "parts", shape.exact == "joined"
    times = " * parts" if first else ""
    load = _LOAD_PARTS if last else _LOAD
    body = _EXACT_SHARED.format(
        load=load.format(add=add, pitch=count + 1, times=times, **sizes),
        finish=_STORE_PART.format(count=count, pitch=count + 1) if first else finish,
        times=times,
        over=" / parts" if first else "",
        part="item % parts" if first else "0",
        **sizes,
    )
    given = parameters(kernel)
    if first:
        given = [given[0], given[2], "const u64 parts", "i64* __restrict__ partial"]
    elif last:
        given = [*given[:2], "const u64 parts", "const i64* __restrict__ partial", KEY]
    return LINES + bodies(kernel, name) + global_(name, given, body, GROUP)


def parts_size(kernel: Exact) -> int:
    """The 64-bit numbers of a part of an exact sum."""
    return SIZES[CARRIER_OF[kernel.loads[0]]][0] + 1
