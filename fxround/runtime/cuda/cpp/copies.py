"""How a block brings the tiles of a contraction's operands into shared memory, as CUDA C++ text.

Shared memory has two stages of each operand. The next tile of k is fetched into one stage while the threads compute
from the other, with one barrier for each tile. Elements that need no conversion are copied asynchronously
(``cp.async``) where the device can do that; the others pass through registers, and are stored after the computation. An
element outside of the operand is +0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

THREADS: Final = 256
# A stage of both operands has this many bytes, so that a thread copies 16 bytes of each.
_STAGE: Final = 8192
# Neighbouring threads that copy neighbours in k: a sector of memory, 32 bytes of binary32.
_RUN: Final = 8

COPIES: Final = """\
#ifndef ON_HOST
template <int N, class T> __device__ __forceinline__ void copy_async(T* tile, int at, const T* from, int count) {
  const u32 to = (u32)__cvta_generic_to_shared(tile + at), bytes = count * sizeof(T);
  const u64 source = (u64)__cvta_generic_to_global(from);
  if constexpr (N * sizeof(T) == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(source), "n"(N * sizeof(T)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int N, class T> __device__ __forceinline__ void take(const T* tile, int at, T* to) {
  read_piece<N>(tile + at, to);
}
#endif
__device__ __forceinline__ int least(i64 a, int b) { return a < b ? (int)a : b; }
__device__ __forceinline__ int clipped(int a, int b) { return a < 0 ? 0 : a < b ? a : b; }
"""
"""``copy_async<N>``: begin to copy N adjacent elements to a shared array, of which those from ``count`` on are +0. The
16 bytes of a long piece go past the first-level cache, which shorter copies cannot do. ``wait_for_copies``: wait until
the copies of this thread have arrived. ``take<N>``: read N adjacent elements at once."""


@dataclass(frozen=True)
class Way:
    """How an operand is copied.

    along       whether neighbouring threads copy neighbours in k, and not in the other dimension
    piece       the elements of an asynchronous copy; 0: elements pass through registers and are converted
    tables      whether the offsets of elements come from two tables; otherwise they are multiples of two steps
    """

    along: bool = False
    piece: int = 0
    tables: bool = False

    @property
    def name(self) -> str:
        """A part of the text's name."""
        return f"{'k' if self.along else 'n'}{self.piece}{'t' if self.tables else ''}"


@dataclass(frozen=True)
class SharedStage:
    """A stage of one operand in shared memory: ``steps`` lines of ``width`` elements, ``pitch`` elements apart.

    A line ends with 16 bytes that are not used: lines begin at multiples of 16 bytes, and eight threads that write
    neighbours in k write into different banks.
    """

    width: int
    size: int

    @property
    def steps(self) -> int:
        """The steps of k."""
        return _STAGE // (2 * self.width * self.size)

    @property
    def pitch(self) -> int:
        """The elements from a line to the next."""
        return self.width + 16 // self.size

    @property
    def elements(self) -> int:
        """The elements of a stage in memory."""
        return self.steps * self.pitch

    @property
    def each(self) -> int:
        """The elements that a thread copies."""
        return self.steps * self.width // THREADS


@dataclass(frozen=True)
class Operand:
    """An operand of a contraction as its text names it; its lines are the rows of a, or the columns of b.

    name        a or b
    base        the address of its batch
    first       the first line of the tile
    count       the lines of the operand
    memory      the type of its stored elements
    lift        the name of the function that converts a stored element, and how it takes ``{0}``
    steps       the steps in memory from a line to the next, and along k
    """

    name: str
    base: str
    first: str
    count: str
    memory: str
    lift: str
    steps: tuple[str, str]


@dataclass(frozen=True)
class Copying:
    """The texts that copy one operand: what is declared before the first tile of k, ``fetch``, and ``put``.

    A thread copies elements (k + dk, n + dn) with its own k and n, and constant dk and dn. Its place in memory moves
    from a tile to the next, so that a copy needs few registers.
    """

    stage: SharedStage
    way: Way
    operand: Operand

    def threads(self) -> str:
        """A thread's own k and n."""
        x, width = self.operand.name, self.stage.width
        if self.way.along:
            lines = THREADS // _RUN
            k, n = f"threadIdx.x % {_RUN}", f"threadIdx.x / {_RUN}"
            if width < lines:
                k, n = f"{k} + threadIdx.x / {_RUN * width} * {_RUN}", f"{n} % {width}"
        else:
            pieces = width // max(1, self.way.piece)
            k, n = f"threadIdx.x / {pieces}", f"threadIdx.x % {pieces} * {max(1, self.way.piece)}"
        return f"  const int k_{x} = {k}, n_{x} = {n}, place_{x} = k_{x} * {self.stage.pitch} + n_{x};\n"

    def declared(self) -> str:
        """Where the thread reads, the lines that are left there, and registers for held elements.

        Entries of the tables along k are read a tile before they are used.
        """
        o, x = self.operand, self.operand.name
        lines = [f"const int lines_{x} = least({o.count} - {o.first} - n_{x}, {self.stage.width});"]
        if not self.way.piece:
            lines.append(f"{o.memory} held_{x}[{self.stage.each}];")
        if self.way.tables:
            dk, dn = self._distances()
            lines.append(f"i64 column_{x}[{len(dn)}], next_{x}[{len(dk)}];")
            places = [f"{d} < lines_{x} ? b_n[{o.first} + n_{x} + {d}]" for d in dn]
            lines += [f"column_{x}[{i}] = {place} : 0;" for i, place in enumerate(places)]
            lines += self._entries("0")
        else:
            line, along = o.steps
            lines.append(f"const {o.memory}* next_{x} = {o.base} + ({o.first} + n_{x}) * {line} + k_{x} * {along};")
        return "".join(f"    {line}\n" for line in lines)

    def fetch(self) -> str:
        """Begin to copy the tile of ``left`` steps from k_0 on to stage ``to``, or read it into registers."""
        o, x, piece = self.operand, self.operand.name, self.way.piece
        lines = []
        for i, (dk, dn) in enumerate(self._elements()):
            inside = f"k_{x} + {dk} < left && {dn} < lines_{x}"
            place = f"tile_{x}, to * {self.stage.elements} + place_{x} + {dk * self.stage.pitch + dn}"
            source = f"{inside} ? {self._source(dk, dn)} : {o.base}"
            if piece > 1:
                count = f"k_{x} < left ? clipped(lines_{x}, {piece}) : 0"
                lines.append(f"copy_async<{piece}>({place}, {source}, {count});")
            elif piece:
                lines.append(f"copy_async<1>({place}, {source}, {inside});")
            else:
                lines.append(f"held_{x}[{i}] = {inside} ? *({self._source(dk, dn)}) : 0;")
        if self.way.tables:
            lines += self._entries(f"k_0 + {self.stage.steps}")
        else:
            lines.append(f"next_{x} += {self.stage.steps} * {o.steps[1]};")
        return "".join(f"      {line}\n" for line in lines)

    def put(self) -> str:
        """Store what registers hold to stage ``to``."""
        if self.way.piece:
            return ""
        x, elements, pitch = self.operand.name, self.stage.elements, self.stage.pitch
        return "".join(
            f"      tile_{x}[to * {elements} + place_{x} + {dk * pitch + dn}] = "
            f"{self.operand.lift.format(f'held_{x}[{i}]')};\n"
            for i, (dk, dn) in enumerate(self._elements())
        )

    def _source(self, dk: int, dn: int) -> str:
        """The address of an element in memory."""
        o, x = self.operand, self.operand.name
        if not self.way.tables:
            return f"next_{x} + ({dn} * {o.steps[0]} + {dk} * {o.steps[1]})"
        all_dk, all_dn = self._distances()
        return f"{o.base} + (next_{x}[{all_dk.index(dk)}] + column_{x}[{all_dn.index(dn)}])"

    def _entries(self, k_0: str) -> list[str]:
        """Read the entries of the table along k for the tile from k_0 on."""
        x = self.operand.name
        places = [f"{k_0} + k_{x} + {d}" for d in self._distances()[0]]
        return [f"next_{x}[{i}] = {at} < shape.length ? b_k[{at}] : 0;" for i, at in enumerate(places)]

    def _elements(self) -> list[tuple[int, int]]:
        """The distances (dk, dn) of what a thread copies from its own k and n."""
        width, copies = self.stage.width, self.stage.each // max(1, self.way.piece)
        if not self.way.along:
            return [(i * THREADS // width, 0) for i in range(copies)]
        lines = THREADS // _RUN
        return [(i * lines // width * _RUN, i * lines % width) for i in range(copies)]

    def _distances(self) -> tuple[list[int], list[int]]:
        """The different distances along k, and those of lines."""
        elements = self._elements()
        return sorted({dk for dk, _ in elements}), sorted({dn for _, dn in elements})
