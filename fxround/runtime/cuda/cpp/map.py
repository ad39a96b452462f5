"""Maps as CUDA C++ text: a thread computes the seeds of the draws, then elements that are as far apart as the grid.

Neighbouring threads therefore read neighbouring elements. How an operand is read is part of the text: at the element's
own index, always at element 0, or by sizes and steps. Sizes are arguments, so one text serves every shape of operands
that are read in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fxround.kernels.shapes import Map
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
{seeds}#pragma unroll 4
  for (u64 item = first_item(); item < layout.count; item += item_step()) {{
    const {index} i = ({index})item;
{walk}{store}  }}
"""


def map_name(variant: MapVariant) -> str:
    """The name of the ``__global__`` function."""
    how = "".join(access[0] if access != "strided" else "d" for access in variant.accesses)
    return f"map_{variant.kernel.digest[:16]}_{how}{variant.dims}{'w' if variant.wide else ''}"


def map_text(variant: MapVariant) -> str:
    """The text of a map and of the device functions that are its own."""
    kernel, name = variant.kernel, map_name(variant)
    drawn = list(enumerate(kernel.draws))
    nodes = ["key.node", *(f"node{n}" for n in range(1, kernel.nodes))]
    seeds = "".join(
        f"  const u64 seed{d} = draw_seed(key.seed_low, key.seed_high, key.sample, {nodes[word.node]}, {word.draw}u);\n"
        for d, word in drawn
    )
    places = {"contiguous": "i", "scalar": "0"}
    read = [
        element(s, f"x{n}[{places.get(access, f'o{n}')}]")
        for n, (s, access) in enumerate(zip(kernel.loads, variant.accesses, strict=True))
    ]
    arguments = [*read, *(f"random_{word.width}(i, seed{d})" for d, word in drawn)]
    body = _MAP.format(
        index="u64" if variant.wide else "u32",
        seeds=seeds,
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
    return device_function(kernel.body, f"{name}_body") + global_(name, parameters, body)


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
    return "".join(f"    {line}\n" for line in lines)


def _store(kernel: Map, body: str, arguments: list[str]) -> str:
    if len(kernel.results) == 1:
        call = f"{body}({', '.join(arguments)})"
        return f"    out[i] = {stored(kernel.results[0], call)};\n"
    types = [TYPES[r.type] for r in kernel.body.results]
    values = [f"value{n}" for n in range(len(types))]
    lines = [f"{t} {v};" for t, v in zip(types, values, strict=True)]
    lines.append(f"{body}({', '.join([*arguments, *values])});")
    for n, (storage, value) in enumerate(zip(kernel.results, values, strict=True)):
        lines.append(f"out{n or ''}[i] = {stored(storage, value)};")
    return "".join(f"    {line}\n" for line in lines)
