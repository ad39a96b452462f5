"""Maps as CUDA C++ text: a thread computes the four elements of a block of random words, 16 apart.

Neighbouring threads therefore read neighbouring elements, whether the map draws or not. How an operand is read is part
of the text: at the element's own index, always at element 0, or by sizes and steps. Sizes are arguments, so one text
serves every shape of operands that are read in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fxround.kernels.shapes import Map
from fxround.numerics.randomness import BLOCK, STRIDE, Key, block_words
from fxround.numerics.scalar import Function, param
from fxround.runtime.cuda.cpp.common import element, global_, pointer, stored
from fxround.runtime.cuda.cpp.table import TYPES, device_function

MAX_DIMS: Final = 8
LAYOUT: Final = f"template <int N> struct Layout {{ u64 count; u64 sizes[{MAX_DIMS}]; i64 steps[N][{MAX_DIMS}]; }};\n"
Access = Literal["contiguous", "scalar", "strided"]


@dataclass(frozen=True)
class MapVariant:
    """A map for operands that are read in given ways.

    accesses    how each operand is read
    dims        the dimensions of a strided operand, after neighbours were merged
    wide        whether an index needs 64 bits
    """

    kernel: Map
    accesses: tuple[Access, ...]
    dims: int
    wide: bool


_MAP: Final = """\
  const u64 quads = (layout.count + {last}) / {block} * {stride};
  for (u64 q = first_item(); q < quads; q += item_step()) {{
{draws}#pragma unroll
    for (int word = 0; word < 4; ++word) {{
      const {index} i = ({index})(q / {stride} * {block} + word * {stride} + q % {stride});
      if (i >= layout.count) break;
{walk}{store}    }}
  }}
"""


def map_name(variant: MapVariant) -> str:
    """The name of the ``__global__`` function."""
    how = "".join(access[0] if access != "strided" else "d" for access in variant.accesses)
    return f"map_{variant.kernel.digest[:16]}_{how}{variant.dims}{'w' if variant.wide else ''}"


def map_text(variant: MapVariant) -> str:
    """The text of a map and of the device functions that are its own."""
    kernel, name = variant.kernel, map_name(variant)
    drawn = list(enumerate(kernel.draws))
    words = [_words(f"{name}_words{d}", word.draw) for d, word in drawn]
    nodes = ["key.node", *(f"node{n}" for n in range(1, kernel.nodes))]
    draws = "".join(
        f"    u32 r{d}[4];\n    {w.name}(q, key.seed_low, key.seed_high, key.sample, {nodes[word.node]}, "
        f"r{d}[0], r{d}[1], r{d}[2], r{d}[3]);\n"
        for (d, word), w in zip(drawn, words, strict=True)
    )
    places = {"contiguous": "i", "scalar": "0"}
    read = [
        element(s, f"x{n}[{places.get(access, f'o{n}')}]")
        for n, (s, access) in enumerate(zip(kernel.loads, variant.accesses, strict=True))
    ]
    arguments = [*read, *(f"r{d}[word]" for d, _ in drawn)]
    body = _MAP.format(
        last=BLOCK - 1,
        block=BLOCK,
        stride=STRIDE,
        index="u64" if variant.wide else "u32",
        draws=draws,
        walk=_walk(variant),
        store=_store(kernel, f"{name}_body", arguments),
    )
    outs = ["out", *(f"out{n}" for n in range(1, len(kernel.results)))]
    parameters = [
        f"const Layout<{len(kernel.loads)}> layout",
        *(pointer(s, out, readonly=False) for s, out in zip(kernel.results, outs, strict=True)),
        *(pointer(s, f"x{n}") for n, s in enumerate(kernel.loads)),
        "const Key key",
        *(f"const u32 {node}" for node in nodes[1:]),
    ]
    functions = "".join(map(device_function, words)) + device_function(kernel.body, f"{name}_body")
    return functions + global_(name, parameters, body)


def _words(name: str, draw: int) -> Function:
    counter, key = param("counter", "u64"), Key.params()
    return Function(name, (counter, *key.exprs), block_words(counter, draw, key))


def _walk(variant: MapVariant) -> str:
    """The offsets of strided operands, from the last dimension to the first."""
    strided = [n for n, access in enumerate(variant.accesses) if access == "strided"]
    if not strided:
        return ""
    index = "u64" if variant.wide else "u32"
    lines = [f"i64 {', '.join(f'o{n} = 0' for n in strided)};", f"{index} rest = i;"]
    for d in reversed(range(variant.dims)):
        at = f"rest % ({index})layout.sizes[{d}]" if d else "rest"
        lines += [f"o{n} += (i64)({at}) * layout.steps[{n}][{d}];" for n in strided]
        lines += [f"rest /= ({index})layout.sizes[{d}];"] if d else []
    return "".join(f"      {line}\n" for line in lines)


def _store(kernel: Map, body: str, arguments: list[str]) -> str:
    if len(kernel.results) == 1:
        call = f"{body}({', '.join(arguments)})"
        return f"      out[i] = {stored(kernel.results[0], call)};\n"
    types = [TYPES[r.type] for r in kernel.body.results]
    values = [f"value{n}" for n in range(len(types))]
    lines = [f"{t} {v};" for t, v in zip(types, values, strict=True)]
    lines.append(f"{body}({', '.join([*arguments, *values])});")
    for n, (storage, value) in enumerate(zip(kernel.results, values, strict=True)):
        lines.append(f"out{n or ''}[i] = {stored(storage, value)};")
    return "".join(f"      {line}\n" for line in lines)
