"""Reductions, scans, scatters and exact sums as CUDA C++ text.

A thread computes one output element, with the stream and the order of its own. In a reduction in several chains, a
group of threads computes one, a chain each; a whole block may compute one exact sum, whose order is free. Sizes are
arguments, so a text serves every shape of operands. No number depends on the grid: a grid of any size visits every
element once. Indices have 64 bits.

    reduce    (results, length, inner, out, x, key)                  x: (outer, length, inner), row-major
    scan      (lines, length, inner, out, x, key)                    the same, out like x
    scatter   (elements, inner, out, self, x, starts, order, key)    row r takes rows order[starts[r] .. starts[r + 1]]
    exact     (results, length, inner, out, x, key)                  as reduce
"""

from __future__ import annotations

from typing import Final

from fxround.kernels.shapes import Exact, Reduce, Scan, Scatter
from fxround.numerics.scalar import const
from fxround.numerics.storage import CARRIER_OF
from fxround.runtime.cuda.cpp.common import KEY, MEMORY, bits, bodies, element, global_, pointer, stored, stream
from fxround.runtime.cuda.cpp.limbs import SIZES
from fxround.runtime.cuda.cpp.table import TYPES, constant

# The threads of a block of a reduction in chains: a multiple of every number of chains.
GROUP: Final = 256


def loop_name(kernel: Reduce | Scan | Scatter | Exact, shared: bool = False) -> str:
    """The name of the ``__global__`` function. shared: whether the threads of a block share an exact sum."""
    return f"{type(kernel).__name__.lower()}_{kernel.digest[:16]}{'_shared' if shared else ''}"


def loop_text(kernel: Reduce | Scan | Scatter | Exact, shared: bool = False) -> str:
    """The text of a kernel and of the device functions that are its own."""
    match kernel:
        case Reduce():
            return _chain(kernel) if kernel.order.chains == 1 else _chains(kernel)
        case Scan():
            return _scan(kernel)
        case Scatter():
            return _scatter(kernel)
        case Exact():
            return _exact(kernel, shared)


_CHAIN: Final = """\
  for (u64 i = first_item(); i < results; i += item_step()) {{
    const {memory}* line = x + i / inner * length * inner + i % inner;
    {type} acc = {first};
{start}    for (u64 k = 0; k < length; ++k) acc = {name}_step(acc, {element}, {step_bits});
    out[i] = {value};
  }}
"""


def _chain(kernel: Reduce) -> str:
    """One chain: a thread a result."""
    name = loop_name(kernel)
    body = _CHAIN.format(
        name=name,
        memory=MEMORY[kernel.loads[0]],
        type=TYPES[kernel.accumulator],
        first=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", "i"),
        element=element(kernel.loads[0], "line[k * inner]"),
        step_bits=bits(kernel.draws, "state"),
        value=stored(kernel.result, f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})"),
    )
    return bodies(kernel, name) + global_(name, _line_parameters(kernel, "results"), body)


# Every thread of a block meets every barrier: the number of rounds depends on the block alone.
_CHAINS: Final = """\
  SHARED({type}, tile, {threads});
  // Neighbouring threads read neighbouring elements: of one line, or of several if these are stored side by side.
  const bool along = inner == 1;
  const int chain = along ? threadIdx.x % {chains} : threadIdx.x / {lines};
  const int line_of = along ? threadIdx.x / {chains} : threadIdx.x % {lines}, next = along ? 1 : {lines};
  const u64 used = length < {chains} ? length : {chains};
  for (u64 i_0 = (u64)blockIdx.x * {lines}; i_0 < results; i_0 += (u64)gridDim.x * {lines}) {{
    const u64 i = i_0 + line_of;
    const bool inside = i < results;
    {type} acc = {initial};
{start}    if (inside) {{
      const {memory}* line = x + i / inner * length * inner + i % inner;
      for (u64 k = chain; k < length; k += {chains}) acc = {name}_step(acc, {element}, {step_bits});
    }}
    for (int w = {chains} / 2; w > 0; w /= 2) {{
      tile[threadIdx.x] = acc;
      __syncthreads();
      if (inside && chain < w && (u64)(chain + w) < used) {{
        const {type} other = tile[threadIdx.x + w * next];
        acc = {name}_combine(acc, other, {step_bits});
      }}
      __syncthreads();
    }}
    if (inside && chain == 0) out[i] = {value};
  }}
"""


def _chains(kernel: Reduce) -> str:
    """Several chains: a thread a chain, so that neighbouring threads read neighbouring elements of a line."""
    name, chains = loop_name(kernel), kernel.order.chains
    body = _CHAINS.format(
        name=name,
        memory=MEMORY[kernel.loads[0]],
        type=TYPES[kernel.accumulator],
        threads=GROUP,
        chains=chains,
        lines=GROUP // chains,
        initial=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", f"i * {chains} + chain"),
        element=element(kernel.loads[0], "line[k * inner]"),
        step_bits=bits(kernel.draws, "state"),
        value=stored(kernel.result, f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})"),
    )
    return bodies(kernel, name) + global_(name, _line_parameters(kernel, "results"), body, GROUP)


def _line_parameters(kernel: Reduce | Scan | Exact, count: str) -> list[str]:
    sizes = [f"const u64 {n}" for n in (count, "length", "inner")]
    out, x = pointer(kernel.result, "out", readonly=False), pointer(kernel.loads[0], "x")
    return [*sizes, out, x, KEY]


_SCAN: Final = """\
  for (u64 i = first_item(); i < lines; i += item_step()) {{
    const u64 base = i / inner * length * inner + i % inner;
    {type} acc = {first};
{start}    for (u64 k = 0; k < length; ++k) {{
      acc = {name}_step(acc, {element}, {step_bits});
      out[base + k * inner] = {value};
    }}
  }}
"""


def _scan(kernel: Scan) -> str:
    name = loop_name(kernel)
    finish = f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})"
    body = _SCAN.format(
        name=name,
        type=TYPES[kernel.accumulator],
        first=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", "i"),
        element=element(kernel.loads[0], "x[base + k * inner]"),
        step_bits=bits(kernel.draws, "state"),
        value=stored(kernel.result, finish),
    )
    return bodies(kernel, name) + global_(name, _line_parameters(kernel, "lines"), body)


_SCATTER: Final = """\
  for (u64 i = first_item(); i < elements; i += item_step()) {{
    const u64 row = i / inner, column = i % inner;
    {type} acc = {name}_lift({own});
{start}    for (i64 c = starts[row]; c < starts[row + 1]; ++c)
      acc = {name}_step(acc, {element}, {step_bits});
    out[i] = {value};
  }}
"""


def _scatter(kernel: Scatter) -> str:
    name, storage = loop_name(kernel), kernel.loads[0]
    body = _SCATTER.format(
        name=name,
        type=TYPES[kernel.accumulator],
        own=element(storage, "self[i]"),
        start=stream(kernel, "    u64 state", "i"),
        element=element(storage, "x[(u64)order[c] * inner + column]"),
        step_bits=bits(kernel.draws, "state"),
        value=stored(kernel.result, f"{name}_finish(acc, 0u)"),
    )
    operands = [pointer(storage, "self"), pointer(storage, "x")]
    places = [f"const i64* __restrict__ {n}" for n in ("starts", "order")]
    out = pointer(kernel.result, "out", readonly=False)
    parameters = ["const u64 elements", "const u64 inner", out, *operands, *places, KEY]
    return bodies(kernel, name) + global_(name, parameters, body)


_EXACT: Final = """\
  for (u64 i = first_item(); i < results; i += item_step()) {{
    const {memory}* line = x + i / inner * length * inner + i % inner;
    i64 limbs[{count}] = {{0}};
    u32 flags = 0;
    for (u64 k = 0; k < length; ++k) {{
{add}      if ((k + 1) % (1u << 30) == 0) carry_limbs(limbs, {count});
    }}
{finish}  }}
"""
# After a carry, the sum of all threads' limbs fits into 64 bits. A thread has too few elements for an earlier carry.
_EXACT_SHARED: Final = """\
  SHARED(i64, limb, {threads});
  SHARED(u32, special, {threads});
  const int t = threadIdx.x;
  for (u64 i = blockIdx.x; i < results; i += gridDim.x) {{
    const {memory}* line = x + i / inner * length * inner + i % inner;
    i64 limbs[{count}] = {{0}};
    u32 flags = 0;
    for (u64 k = t; k < length; k += {threads}) {{
{add}    }}
    carry_limbs(limbs, {count});
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


def _exact(kernel: Exact, shared: bool) -> str:
    name, storage = loop_name(kernel, shared), kernel.loads[0]
    count, trailing, last, bias = SIZES[CARRIER_OF[storage]]
    add = _ADD.format(
        name=name,
        element=element(storage, "line[k * inner]"),
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
    text = _EXACT_SHARED if shared else _EXACT
    body = text.format(memory=MEMORY[storage], count=count, add=add, finish=finish, threads=GROUP)
    parameters = _line_parameters(kernel, "results")
    return bodies(kernel, name) + global_(name, parameters, body, GROUP if shared else 0)
