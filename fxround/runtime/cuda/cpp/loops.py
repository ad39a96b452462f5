"""The loop nests of kernels as CUDA C++ text: one emitter for each shape.

Every kernel is one ``__global__`` function over raw pointers. In a Map, a thread computes the four elements that share
a Philox block; in every other shape, a thread computes one output element with chains, stream and order of its own.
Sizes and steps are arguments, so a text serves every shape of operands.

    map       (layout, out, out1, ..., x0, x1, ..., key, node1, ...)   layout: sizes of the results, steps of operands
    reduce    (results, length, inner, out, x, key)              x: (outer, length, inner), row-major
    scan      (lines, length, inner, out, x, key)                the same, out like x
    contract  (shape, out, a, b, key)                            out: (batch, rows, columns), row-major; see ``SHAPE``
    scatter   (elements, inner, out, self, x, starts, order, key)    row r takes rows order[starts[r] .. starts[r + 1]]
    exact     (results, length, inner, out, x, key)              as reduce

No thread reads what another writes, and no number depends on the grid: a grid of any size, with blocks of any size,
visits every element once. Indices have 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import MappingProxyType
from typing import Final

from fxround.kernels.shapes import Contract, Exact, Kernel, Map, Reduce, Scan, Scatter
from fxround.numerics.randomness import BLOCK, STRIDE, Key, block_words, coins_function, seed_function, stream_functions
from fxround.numerics.scalar import Function, const, param
from fxround.numerics.storage import CARRIER_OF, Storage
from fxround.runtime.cuda.cpp.limbs import LIMBS, SIZES
from fxround.runtime.cuda.cpp.table import TYPES, constant, device_function

MEMORY: Final = MappingProxyType(
    {"f32": "float", "f64": "double", "f16": "unsigned short", "bf16": "unsigned short", "mask": "unsigned char"}
)
MAX_DIMS: Final = 8

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
    "b_length",
    "b_column",
)
"""The fields of a contraction's shape, 64-bit integers in this order: sizes, then steps in elements."""

_HEAD: Final = f"""\
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct Key {{ u32 seed_low, seed_high, sample, node; }};
struct Shape {{ i64 {", ".join(SHAPE)}; }};
template <int N> struct Layout {{ u64 count; u64 dims; u64 sizes[{MAX_DIMS}]; i64 steps[N][{MAX_DIMS}]; }};
__device__ __forceinline__ u64 first_item() {{ return (u64)blockIdx.x * blockDim.x + threadIdx.x; }}
__device__ __forceinline__ u64 item_step() {{ return (u64)gridDim.x * blockDim.x; }}
"""


@cache
def preamble() -> str:
    """The text before all kernels, once in a translation unit: types, and the streams of ``randomness``."""
    return (
        _HEAD
        + "".join(device_function(f) for f in (seed_function(), *stream_functions(), coins_function()))
        + _DRAW
        + LIMBS
    )


_DRAW: Final = """\
__device__ __forceinline__ u32 draw(u64& state) {
  u32 bits;
  u64 next;
  advance_stream(state, bits, next);
  state = next;
  return bits;
}
__device__ __forceinline__ u32 toss(u64& state) { return spread_coins(draw(state)); }
"""


def kernel_name(kernel: Kernel) -> str:
    """The name of the ``__global__`` function: the shape and the digest, unique in any translation unit."""
    return f"{type(kernel).__name__.lower()}_{kernel.digest[:16]}"


def kernel_text(kernel: Kernel) -> str:
    """The text of a kernel and of the device functions that are its own; ``preamble()`` comes before it."""
    match kernel:
        case Map():
            return _map(kernel)
        case Reduce():
            return _reduce(kernel)
        case Scan():
            return _scan(kernel)
        case Contract():
            return _contract(kernel)
        case Scatter():
            return _scatter(kernel)
        case Exact():
            return _exact(kernel)


def kernel_source(kernels: Iterable[Kernel]) -> str:
    """A translation unit of some kernels, each once."""
    distinct = {kernel_name(k): k for k in kernels}
    return preamble() + "".join(kernel_text(k) for k in distinct.values())


def _global(name: str, parameters: Iterable[str], body: str) -> str:
    return f'extern "C" __global__ void {name}({", ".join(parameters)}) {{\n{body}}}\n'


def _pointer(storage: Storage, name: str, readonly: bool = True) -> str:
    return f"{'const ' if readonly else ''}{MEMORY[storage]}* __restrict__ {name}"


def _element(storage: Storage, place: str) -> str:
    """A stored element as a scalar body takes it: a 16-bit code or a mask as a u32."""
    return f"(u32){place}" if MEMORY[storage].startswith("unsigned") else place


def _stored(storage: Storage, value: str) -> str:
    return f"(unsigned short){value}" if MEMORY[storage] == "unsigned short" else value


# ---- map ----


def _words(name: str, draw: int) -> Function:
    counter, key = param("counter", "u64"), Key.params()
    return Function(name, (counter, *key.exprs), block_words(counter, draw, key))


_MAP: Final = """\
  const u64 quads = (layout.count + {last}) / {block} * {stride};
  for (u64 q = first_item(); q < quads; q += item_step()) {{
{draws}    for (u64 word = 0; word < 4; ++word) {{
      const u64 i = q / {stride} * {block} + word * {stride} + q % {stride};
      if (i >= layout.count) break;
      i64 {offsets};
      u64 rest = i;
      for (u64 d = layout.dims; d-- > 0;) {{
        const i64 at = (i64)(rest % layout.sizes[d]);
        rest /= layout.sizes[d];
{walk}      }}
{store}    }}
  }}
"""


def _map(kernel: Map) -> str:
    name, operands = kernel_name(kernel), range(len(kernel.loads))
    drawn = list(enumerate(kernel.draws))
    words = [_words(f"{name}_words{d}", word.draw) for d, word in drawn]
    nodes = ["key.node", *(f"node{n}" for n in range(1, kernel.nodes))]
    draws = "".join(
        f"    u32 r{d}[4];\n    {w.name}(q, key.seed_low, key.seed_high, key.sample, {nodes[word.node]}, "
        f"r{d}[0], r{d}[1], r{d}[2], r{d}[3]);\n"
        for (d, word), w in zip(drawn, words, strict=True)
    )
    arguments = [*(_element(s, f"x{n}[o{n}]") for n, s in enumerate(kernel.loads)), *(f"r{d}[word]" for d, _ in drawn)]
    body = _MAP.format(
        last=BLOCK - 1,
        block=BLOCK,
        stride=STRIDE,
        draws=draws,
        offsets=", ".join(f"o{n} = 0" for n in operands),
        walk="".join(f"        o{n} += at * layout.steps[{n}][d];\n" for n in operands),
        store=_map_store(kernel, f"{name}_body", arguments),
    )
    outs = ["out", *(f"out{n}" for n in range(1, len(kernel.results)))]
    parameters = [
        f"const Layout<{len(kernel.loads)}> layout",
        *(_pointer(s, out, readonly=False) for s, out in zip(kernel.results, outs, strict=True)),
        *(_pointer(s, f"x{n}") for n, s in enumerate(kernel.loads)),
        "const Key key",
        *(f"const u32 {node}" for node in nodes[1:]),
    ]
    functions = "".join(map(device_function, words)) + device_function(kernel.body, f"{name}_body")
    return functions + _global(name, parameters, body)


def _map_store(kernel: Map, body: str, arguments: list[str]) -> str:
    if len(kernel.results) == 1:
        call = f"{body}({', '.join(arguments)})"
        return f"      out[i] = {_stored(kernel.results[0], call)};\n"
    types = [TYPES[r.type] for r in kernel.body.results]
    values = [f"value{n}" for n in range(len(types))]
    lines = [f"{t} {v};" for t, v in zip(types, values, strict=True)]
    lines.append(f"{body}({', '.join([*arguments, *values])});")
    for n, (storage, value) in enumerate(zip(kernel.results, values, strict=True)):
        lines.append(f"out{n or ''}[i] = {_stored(storage, value)};")
    return "".join(f"      {line}\n" for line in lines)


# ---- one thread, one output element ----


def _bodies(kernel: Reduce | Scan | Contract | Scatter | Exact) -> str:
    functions = {"finish": kernel.finish}
    if isinstance(kernel, Exact):
        functions["read"] = kernel.read
    else:
        functions["step"] = kernel.step
    if isinstance(kernel, Scatter):
        functions["lift"] = kernel.lift
    if isinstance(kernel, Reduce):
        functions["combine"] = kernel.combine
    if isinstance(kernel, Contract):
        functions["lift_a"], functions["lift_b"] = kernel.lifts
        if kernel.combine is not None:
            functions["combine"] = kernel.combine
    return "".join(device_function(f, f"{kernel_name(kernel)}_{role}") for role, f in functions.items())


def _draws(kernel: Reduce | Scan | Contract | Scatter | Exact) -> bool:
    if isinstance(kernel, Exact):
        return any(kernel.draws)
    return kernel.draws or (not isinstance(kernel, Scatter) and kernel.finish_draws)


def _stream(kernel: Reduce | Scan | Contract | Scatter | Exact, declaration: str, element: str) -> str:
    """The first state of a stream, if the kernel draws at all."""
    if not _draws(kernel):
        return ""
    return f"{declaration} = start_stream({element}, stream_seed(key.seed_low, key.seed_high, key.sample, key.node));\n"


def _bits(wanted: bool, state: str) -> str:
    return f"draw({state})" if wanted else "0u"


_REDUCE: Final = """\
  for (u64 i = first_item(); i < results; i += item_step()) {{
    const {memory}* line = x + i / inner * length * inner + i % inner;
    {type} acc[{chains}];
{states}#pragma unroll
    for (u64 c = 0; c < {chains}; ++c) {{
      acc[c] = {first};
{start}    }}
    for (u64 k = 0; k < length; k += {chains}) {{
#pragma unroll
      for (u64 c = 0; c < {chains}; ++c)
        if (k + c < length) acc[c] = {name}_step(acc[c], {element}, {step_bits});
    }}
    const u64 used = length < {chains} ? length : {chains};
#pragma unroll
    for (u64 w = {chains} / 2; w > 0; w /= 2) {{
#pragma unroll
      for (u64 c = 0; c < w; ++c)
        if (c + w < used) acc[c] = {name}_combine(acc[c], acc[c + w], {step_bits});
    }}
    out[i] = {value};
  }}
"""


def _reduce(kernel: Reduce) -> str:
    name, chains = kernel_name(kernel), kernel.order.chains
    start = _stream(kernel, "      state[c]", f"i * {chains} + c")
    finish = f"{name}_finish(acc[0], {_bits(kernel.finish_draws, 'state[0]')})"
    body = _REDUCE.format(
        name=name,
        memory=MEMORY[kernel.loads[0]],
        type=TYPES[kernel.accumulator],
        chains=chains,
        first=constant(const(kernel.accumulator, kernel.first)),
        states=f"    u64 state[{chains}];\n" if start else "",
        start=start,
        element=_element(kernel.loads[0], "line[(k + c) * inner]"),
        step_bits=_bits(kernel.draws, "state[c]"),
        value=_stored(kernel.result, finish),
    )
    return _bodies(kernel) + _global(name, _line_parameters(kernel, "results"), body)


def _line_parameters(kernel: Reduce | Scan | Exact, count: str) -> list[str]:
    sizes = [f"const u64 {n}" for n in (count, "length", "inner")]
    out, x = _pointer(kernel.result, "out", readonly=False), _pointer(kernel.loads[0], "x")
    return [*sizes, out, x, "const Key key"]


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
    name = kernel_name(kernel)
    finish = f"{name}_finish(acc, {_bits(kernel.finish_draws, 'state')})"
    body = _SCAN.format(
        name=name,
        type=TYPES[kernel.accumulator],
        first=constant(const(kernel.accumulator, kernel.first)),
        start=_stream(kernel, "    u64 state", "i"),
        element=_element(kernel.loads[0], "x[base + k * inner]"),
        step_bits=_bits(kernel.draws, "state"),
        value=_stored(kernel.result, finish),
    )
    return _bodies(kernel) + _global(name, _line_parameters(kernel, "lines"), body)


_CONTRACT: Final = """\
  const u64 results = (u64)(shape.batch * shape.rows * shape.columns);
  for (u64 i = first_item(); i < results; i += item_step()) {{
    const i64 column = (i64)(i % shape.columns), row = (i64)(i / shape.columns % shape.rows);
    const i64 batch = (i64)(i / shape.columns / shape.rows);
    const {a}* left = a + (shape.groups ? batch % shape.groups : batch) * shape.a_batch + row * shape.a_row;
    const {b}* right = b + batch * shape.b_batch + column * shape.b_column;
    {type} acc = 0;
{start}{total}    for (i64 k = 0; k < shape.length; ++k) {{
      acc = {name}_step({name}_lift_a({x}), {name}_lift_b({y}), acc, {step_bits});
{combine}    }}
    out[i] = {value};
  }}
"""

_COMBINE: Final = """      if ((k + 1) % {chunk} == 0 || k + 1 == shape.length) {{
        total = {name}_combine(total, acc, {step_bits});
        acc = 0;
      }}
"""


def _contract(kernel: Contract) -> str:
    name, chunked = kernel_name(kernel), kernel.combine is not None
    finish = f"{name}_finish({'total' if chunked else 'acc'}, {_bits(kernel.finish_draws, 'state')})"
    step_bits = "word = k % 32 ? word << 1 : toss(state)" if kernel.coins else _bits(kernel.draws, "state")
    body = _CONTRACT.format(
        name=name,
        a=MEMORY[kernel.loads[0]],
        b=MEMORY[kernel.loads[1]],
        type=TYPES[kernel.accumulator],
        start=_stream(kernel, "    u64 state", "i") + ("    u32 word = 0;\n" if kernel.coins else ""),
        x=_element(kernel.loads[0], "left[k * shape.a_length]"),
        y=_element(kernel.loads[1], "right[k * shape.b_length]"),
        step_bits=step_bits,
        total=f"    {TYPES[kernel.accumulator]} total = 0;\n" if chunked else "",
        combine=_COMBINE.format(name=name, chunk=kernel.chunk, step_bits=step_bits) if chunked else "",
        value=_stored(kernel.result, finish),
    )
    operands = [_pointer(kernel.loads[0], "a"), _pointer(kernel.loads[1], "b")]
    parameters = ["const Shape shape", _pointer(kernel.result, "out", readonly=False), *operands, "const Key key"]
    return _bodies(kernel) + _global(name, parameters, body)


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
    name, storage = kernel_name(kernel), kernel.loads[0]
    body = _SCATTER.format(
        name=name,
        type=TYPES[kernel.accumulator],
        own=_element(storage, "self[i]"),
        start=_stream(kernel, "    u64 state", "i"),
        element=_element(storage, "x[(u64)order[c] * inner + column]"),
        step_bits=_bits(kernel.draws, "state"),
        value=_stored(kernel.result, f"{name}_finish(acc, 0u)"),
    )
    operands = [_pointer(storage, "self"), _pointer(storage, "x")]
    places = [f"const i64* __restrict__ {n}" for n in ("starts", "order")]
    out = _pointer(kernel.result, "out", readonly=False)
    parameters = ["const u64 elements", "const u64 inner", out, *operands, *places, "const Key key"]
    return _bodies(kernel) + _global(name, parameters, body)


_EXACT: Final = """\
  for (u64 i = first_item(); i < results; i += item_step()) {{
    const {memory}* line = x + i / inner * length * inner + i % inner;
    i64 limbs[{count}] = {{0}};
    u32 flags = 0;
    for (u64 k = 0; k < length; ++k) {{
      const u64 code = {name}_read({element});
      const u32 field = (u32)(code >> {trailing}) & {last}u;
      const u64 fraction = code & ((1ull << {trailing}) - 1);
      const bool negative = code >> {sign} & 1;
      if (field == {last}u) flags |= fraction ? 4u : negative ? 2u : 1u;
      else add_limbs(limbs, field ? field : 1u, fraction | (u64)(field != 0) << {trailing}, -(i64)negative);
      if ((k + 1) % (1u << 30) == 0) carry_limbs(limbs, {count});
    }}
    const double total = flags ? special_of(flags) : total_of(limbs, {count}, {bias}, {to_odd});
{start}    const u32 once = {once}, again = {again};
    out[i] = {value};
  }}
"""


def _exact(kernel: Exact) -> str:
    name, storage = kernel_name(kernel), kernel.loads[0]
    count, trailing, last, bias = SIZES[CARRIER_OF[storage]]
    body = _EXACT.format(
        name=name,
        memory=MEMORY[storage],
        element=_element(storage, "line[k * inner]"),
        count=count,
        trailing=trailing,
        last=last,
        sign=31 if CARRIER_OF[storage] == "f32" else 63,
        bias=bias,
        to_odd="true" if kernel.to_odd else "false",
        start=_stream(kernel, "    u64 state", "i"),
        once=_bits(kernel.draws[0], "state"),
        again=_bits(kernel.draws[1], "state"),
        value=_stored(kernel.result, f"{name}_finish(total, once, again)"),
    )
    return _bodies(kernel) + _global(name, _line_parameters(kernel, "results"), body)
