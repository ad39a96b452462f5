"""A map over several lists of tensors that it overwrites, as CUDA C++ text.

The lists come as a table in the kernel's own arguments, which a launch copies: there is no memory to keep alive for a
stream or a captured graph. A block takes chunks of elements, finds the list of each by bisection, and computes the
seeds of that list's draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.kernels.kinds import Map
from fxround.numerics.formats.storage import BYTES_OF
from fxround.runtime.cuda.cpp.common import MEMORY, element, global_
from fxround.runtime.cuda.cpp.map import indented, map_call, seeds
from fxround.runtime.cuda.cpp.table import device_function

# The elements of a chunk, for a block of THREADS.
THREADS: Final = 256
CHUNK: Final = 16 * THREADS
# A kernel's arguments have 4 kB on every device; numbers and nodes need the rest.
_TABLE_BYTES: Final = 3584
TABLE: Final = (
    "template <int M, int N> struct Table "
    "{ u64 entries, chunks; u64 first[N]; u64 count[N]; u64 seed[N]; u64 at[N][M]; };\n"
)


@dataclass(frozen=True)
class SeveralVariant:
    """A map over entries of ``width`` tensors; columns and targets as in ``fxround.runtime.several.Several``."""

    kernel: Map
    columns: tuple[int, ...]
    targets: tuple[int, ...]
    width: int

    @property
    def most(self) -> int:
        """The entries that fit into a table."""
        return (_TABLE_BYTES - 16) // (8 * (3 + self.width))

    @property
    def name(self) -> str:
        """The name of the ``__global__`` function."""
        places = ["n" if c < 0 else str(c) for c in self.columns]
        return f"several_{self.kernel.digest[:16]}_{self.width}_{'_'.join([*places, 'to', *map(str, self.targets)])}"


_SEVERAL: Final = """\
  for (u64 chunk = blockIdx.x; chunk < table.chunks; chunk += gridDim.x) {{
    u32 e = 0;
    for (u32 past = (u32)table.entries; past - e > 1;) {{
      const u32 middle = (e + past) / 2;
      if (table.first[middle] <= chunk) e = middle;
      else past = middle;
    }}
    const u64 begin = (chunk - table.first[e]) * {chunk}u, rest = table.count[e] - begin;
    const u64 end = begin + (rest < {chunk}u ? rest : {chunk}u);
{key}{pointers}    // Pieces of 16 bytes, where all tensors begin at multiples of that; then what is left.
    const u64 pieces = ({addresses}) % 16 == 0 ? (end - begin) / {piece} : 0;
    for (u64 item = threadIdx.x; item < pieces; item += blockDim.x) {{
      const u64 i_0 = begin + item * {piece};
{read}#pragma unroll
      for (int j = 0; j < {piece}; ++j) {{
        const u64 i = i_0 + j;
{each}      }}
{write}    }}
    for (u64 i = begin + pieces * {piece} + threadIdx.x; i < end; i += blockDim.x) {{
{store}    }}
  }}
"""


def several_text(variant: SeveralVariant) -> str:
    """The text of the kernel and of the device functions that are its own."""
    kernel, name = variant.kernel, variant.name
    nodes = [f"node{n}" for n in range(kernel.nodes)]
    # An operand may be the tensor that a result overwrites, so that no pointer is ``__restrict__``.
    pointers = [
        f"const {MEMORY[s]}* x{n} = (const {MEMORY[s]}*)table.at[e][{c}];"
        for n, (s, c) in enumerate(zip(kernel.loads, variant.columns, strict=True))
        if c >= 0
    ]
    pointers += [
        f"{MEMORY[s]}* out{n} = ({MEMORY[s]}*)table.at[e][{c}];"
        for n, (s, c) in enumerate(zip(kernel.results, variant.targets, strict=True))
    ]
    made = [f"made{n}" for n in range(len(kernel.results))]

    def lines(place: str, target: str) -> list[str]:
        """The map of one element, from where operands are to where results go."""
        read = [
            element(s, f"number{n}" if c < 0 else place.format(n))
            for n, (s, c) in enumerate(zip(kernel.loads, variant.columns, strict=True))
        ]
        statements = map_call(kernel, f"{name}_body", read, made, "i")
        return statements + [f"{target.format(n)} = {value};" for n, value in enumerate(made)]

    piece = 16 // max(BYTES_OF[s] for s in (*kernel.loads, *kernel.results))
    taken = [n for n, c in enumerate(variant.columns) if c >= 0]
    read = [f"{MEMORY[kernel.loads[n]]} piece{n}[{piece}];" for n in taken]
    read += [f"read_piece<{piece}>(x{n} + i_0, piece{n});" for n in taken]
    read += [f"{MEMORY[s]} out_piece{n}[{piece}];" for n, s in enumerate(kernel.results)]
    key = "    const Key key = {(u32)table.seed[e], (u32)(table.seed[e] >> 32), sample, 0u};\n" if kernel.draws else ""
    body = _SEVERAL.format(
        chunk=CHUNK,
        key=key + seeds(kernel, nodes),
        pointers="".join(f"    {line}\n" for line in pointers),
        addresses=" | ".join(f"table.at[e][{c}]" for c in range(variant.width)),
        piece=piece,
        read=indented(read, 6),
        each=indented(lines("piece{}[j]", "out_piece{}[j]"), 8),
        write=indented([f"write_piece<{piece}>(out{n} + i_0, out_piece{n});" for n in range(len(made))], 6),
        store=indented(lines("x{}[i]", "out{}[i]"), 6),
    )
    parameters = [
        f"const __grid_constant__ Table<{variant.width}, {variant.most}> table",
        *(f"const {MEMORY[s]} number{n}" for n, s in enumerate(kernel.loads) if variant.columns[n] < 0),
        "const u32 sample",
        *(f"const u32 {node}" for node in nodes),
    ]
    return device_function(kernel.body, f"{name}_body") + global_(name, parameters, body)
