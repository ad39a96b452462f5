"""Maps as CUDA C++ text: a thread computes the seeds of the draws, then elements that are as far apart as the grid.

Neighbouring threads therefore read neighbouring elements. How an operand is read is part of the text: at the element's
own index, always at element 0, or by sizes and steps. Sizes are arguments, so one text serves every shape of operands
that are read in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fxround.kernels.shapes import Map
from fxround.runtime.cuda.cpp.common import MEMORY, element, global_, pointer, stored
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
    nodes = ["key.node", *(f"node{n}" for n in range(1, kernel.nodes))]
    places = {"contiguous": "i", "scalar": "0"}
    read = [
        element(s, f"x{n}[{places.get(access, f'o{n}')}]")
        for n, (s, access) in enumerate(zip(kernel.loads, variant.accesses, strict=True))
    ]
    index = "u64" if variant.wide else "u32"
    strided = [n for n, access in enumerate(variant.accesses) if access == "strided"]
    outs = ["out", *(f"out{n}" for n in range(1, len(kernel.results)))]
    lines = map_call(kernel, f"{name}_body", read, [f"made{n}" for n in range(len(outs))], "i")
    lines += [f"{out}[i] = made{n};" for n, out in enumerate(outs)]
    store = "".join(f"    {line}\n" for line in lines)
    body = _MAP.format(
        index=index, seeds=seeds(kernel, nodes), walk=walk(strided, variant.dims, index, "i"), store=store
    )
    parameters = [
        f"const Layout<{len(kernel.loads)}> layout",
        *(pointer(s, out, readonly=False) for s, out in zip(kernel.results, outs, strict=True)),
        *(pointer(s, f"x{n}") for n, s in enumerate(kernel.loads)),
        "const Key key",
        *(f"const u32 {node}" for node in nodes[1:]),
    ]
    return device_function(kernel.body, f"{name}_body") + global_(name, parameters, body)


def seeds(kernel: Map, nodes: Sequence[str], prefix: str = "") -> str:
    """The seed of each draw as ``seed{prefix}{d}``, from the expressions of the kernel's node numbers."""
    return "".join(
        f"  const u64 seed{prefix}{d} = "
        f"draw_seed(key.seed_low, key.seed_high, key.sample, {nodes[word.node]}, {word.draw}u);\n"
        for d, word in enumerate(kernel.draws)
    )


def walk(operands: Sequence[int], dims: int, index: str, start: str) -> str:
    """The offset ``o{n}`` of each operand at index ``start``, from the last of ``dims`` dimensions to the first."""
    if not operands:
        return ""
    lines = [f"i64 {', '.join(f'o{n} = 0' for n in operands)};", f"{index} rest = {start};"]
    for d in reversed(range(dims)):
        at = f"rest % ({index})layout.sizes[{d}]" if d else "rest"
        lines += [f"o{n} += (i64)({at}) * layout.steps[{n}][{d}];" for n in operands]
        lines += [f"rest /= ({index})layout.sizes[{d}];"] if d else []
    return "".join(f"    {line}\n" for line in lines)


def map_call(
    kernel: Map, body: str, operands: Sequence[str], made: Sequence[str], index: str, prefix: str = ""
) -> list[str]:
    """The lines that compute element ``index`` of each result, as it is stored, from expressions of the operands."""
    arguments = [*operands, *(f"random_{word.width}({index}, seed{prefix}{d})" for d, word in enumerate(kernel.draws))]
    if len(made) == 1:
        value = stored(kernel.results[0], f"{body}({', '.join(arguments)})")
        return [f"const {MEMORY[kernel.results[0]]} {made[0]} = {value};"]
    lines = [f"{TYPES[r.type]} {name}_value;" for r, name in zip(kernel.body.results, made, strict=True)]
    lines.append(f"{body}({', '.join([*arguments, *(f'{name}_value' for name in made)])});")
    for storage, name in zip(kernel.results, made, strict=True):
        lines.append(f"const {MEMORY[storage]} {name} = {stored(storage, f'{name}_value')};")
    return lines
