"""Maps as CUDA C++ text: a thread computes the seeds of the draws, then elements that are as far apart as the grid.

Neighbouring threads therefore read neighbouring elements; or neighbouring pieces of up to 16 bytes, where all operands
allow that. Neighbours in a piece also share random words. How an operand is read is part of the text: at the element's
own index, always at element 0, or by sizes and steps. Sizes are arguments, so one text serves every shape of operands
that are read in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fxround.kernels.kinds import Map
from fxround.runtime.cuda.cpp.common import KEY, MEMORY, element, global_, pointer, stored
from fxround.runtime.cuda.cpp.table import TYPES, device_function

MAX_DIMS: Final = 8
LAYOUT: Final = f"template <int N> struct Layout {{ u64 count; u64 sizes[{MAX_DIMS}]; i64 steps[N][{MAX_DIMS}]; }};\n"
Access = Literal["contiguous", "scalar", "strided", "lines", "repeated"]
"""At its own index; at element 0; by sizes and steps. In pieces: as strided, but adjacent, or the same element."""


@dataclass(frozen=True)
class CudaMapVariant:
    """A map for operands that are read in given ways.

    accesses    how each operand is read
    dims        the dimensions of a strided operand, after neighbours were merged
    wide        whether an index needs 64 bits
    piece       the elements that a thread reads and writes at once; more than one only without strided operands
    in_place    whether a result is written over an operand, so that no pointer is ``__restrict__``: a compiler may read
                again what nothing writes
    """

    kernel: Map
    accesses: tuple[Access, ...]
    dims: int
    wide: bool
    piece: int = 1
    in_place: bool = False

    @property
    def walked(self) -> list[int]:
        """The operands that are read by sizes and steps."""
        return [n for n, access in enumerate(self.accesses) if access not in ("contiguous", "scalar")]


_MAP: Final = """\
{seeds}#pragma unroll 4
  for (u64 item = first_item(); item < layout.count; item += item_step()) {{
    const {index} i = ({index})item;
{walk}{store}  }}
"""
_PIECES: Final = """\
{seeds}  const u64 pieces = layout.count / {piece};
  for (u64 item = first_item(); item < pieces; item += item_step()) {{
    const {index} i_0 = ({index})item * {piece};
{walk}{read}#pragma unroll
    for (int j = 0; j < {piece}; ++j) {{
      const {index} i = i_0 + j;
{store}    }}
{write}  }}
"""
# The elements after the last whole piece.
_REST: Final = """  for (u64 item = pieces * {piece} + first_item(); item < layout.count; item += item_step()) {{
    const {index} i = ({index})item;
{store}  }}
"""


def map_name(variant: CudaMapVariant) -> str:
    """The name of the ``__global__`` function."""
    return f"map_{variant.kernel.digest[:16]}_{how_read(variant)}"


def how_read(variant: CudaMapVariant) -> str:
    """How operands are read, as a part of a text's name."""
    how = "".join(access[0] if access != "strided" else "d" for access in variant.accesses)
    piece = f"p{variant.piece}" if variant.piece > 1 else ""
    return f"{how}{variant.dims}{'w' if variant.wide else ''}{piece}{'i' if variant.in_place else ''}"


def map_text(variant: CudaMapVariant) -> str:
    """The text of a map and of the device functions that are its own."""
    kernel, name = variant.kernel, map_name(variant)
    nodes = ["key.node", *(f"node{n}" for n in range(1, kernel.nodes))]
    outs, alone = ["out", *(f"out{n}" for n in range(1, len(kernel.results)))], not variant.in_place
    own_seeds = seeds(kernel, nodes)
    body = (
        _in_pieces(variant, name, outs, own_seeds) if variant.piece > 1 else _one_by_one(variant, name, outs, own_seeds)
    )
    parameters = [
        f"const Layout<{len(kernel.loads)}> layout",
        *(pointer(s, out, readonly=False, alone=alone) for s, out in zip(kernel.results, outs, strict=True)),
        *(pointer(s, f"x{n}", alone=alone) for n, s in enumerate(kernel.loads)),
        KEY,
        *(f"const u32 {node}" for node in nodes[1:]),
    ]
    return device_function(kernel.body, f"{name}_body") + global_(name, parameters, body)


def _one_by_one(variant: CudaMapVariant, name: str, outs: Sequence[str], own_seeds: str) -> str:
    """The body of a map whose threads compute element by element."""
    index = "u64" if variant.wide else "u32"
    places = {"contiguous": "i", "scalar": "0"}
    read = [f"x{n}[{places.get(access, f'o{n}')}]" for n, access in enumerate(variant.accesses)]
    store = stores(variant.kernel, name, read, [f"{out}[i]" for out in outs])
    return _MAP.format(
        index=index, seeds=own_seeds, walk=walk(variant.walked, variant.dims, index, "i"), store=indented(store, 4)
    )


def _in_pieces(variant: CudaMapVariant, name: str, outs: Sequence[str], own_seeds: str) -> str:
    """The body of a map whose threads compute piece by piece, and what is left element by element."""
    kernel, piece, index = variant.kernel, variant.piece, "u64" if variant.wide else "u32"
    lines, read = [], []
    for n, (storage, access) in enumerate(zip(kernel.loads, variant.accesses, strict=True)):
        if access == "repeated":
            lines.append(f"const {MEMORY[storage]} piece{n} = x{n}[o{n}];")
        elif access != "scalar":
            place = f"x{n} + {'i_0' if access == 'contiguous' else f'o{n}'}"
            lines += [f"{MEMORY[storage]} piece{n}[{piece}];", f"read_piece<{piece}>({place}, piece{n});"]
        read.append({"scalar": f"x{n}[0]", "repeated": f"piece{n}"}.get(access, f"piece{n}[j]"))
    made = [f"{out}_piece" for out in outs]
    lines += [f"{MEMORY[s]} {each}[{piece}];" for s, each in zip(kernel.results, made, strict=True)]
    write = [f"write_piece<{piece}>({out} + i_0, {each});" for out, each in zip(outs, made, strict=True)]
    text = _PIECES.format(
        index=index,
        piece=piece,
        seeds=own_seeds,
        walk=walk(variant.walked, variant.dims, index, "i_0"),
        read=indented(lines, 4),
        store=indented(stores(kernel, name, read, [f"{each}[j]" for each in made]), 6),
        write=indented(write, 4),
    )
    if variant.walked:
        # The last dimension is a multiple of a piece, and so is the number of elements.
        return text
    read = [f"x{n}[{'i' if access == 'contiguous' else '0'}]" for n, access in enumerate(variant.accesses)]
    store = stores(kernel, name, read, [f"{out}[i]" for out in outs])
    return text + _REST.format(index=index, piece=piece, store=indented(store, 4))


def stores(kernel: Map, name: str, read: Sequence[str], places: Sequence[str]) -> list[str]:
    """The lines that compute element i of each result and store it."""
    made = [f"made{n}" for n in range(len(places))]
    operands = [element(s, place) for s, place in zip(kernel.loads, read, strict=True)]
    lines = map_call(kernel, f"{name}_body", operands, made, "i")
    return lines + [f"{place} = {value};" for place, value in zip(places, made, strict=True)]


def indented(lines: Iterable[str], spaces: int) -> str:
    """Lines of text after ``spaces`` spaces each."""
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)


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
