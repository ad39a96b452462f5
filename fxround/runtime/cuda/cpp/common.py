"""What all texts have in common: memory, random streams, and the frame of a ``__global__`` function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from fxround.kernels.kinds import Contract, Exact, Kernel, Reduce, Scan, Scatter
from fxround.numerics.arithmetic.randomness import (
    WIDTHS,
    coins_function,
    draw_function,
    seed_function,
    shared_function,
    stream_functions,
)
from fxround.numerics.formats.storage import BYTES_OF, ELEMENT_OF, Storage
from fxround.numerics.orders import Shard
from fxround.runtime.cuda.cpp.limbs import LIMBS
from fxround.runtime.cuda.cpp.table import device_function

_TYPES: Final = {"u32": {1: "unsigned char", 2: "unsigned short"}, "f32": {4: "float"}, "f64": {8: "double"}}
MEMORY: Final[Mapping[Storage, str]] = MappingProxyType({s: _TYPES[ELEMENT_OF[s]][n] for s, n in BYTES_OF.items()})

# SHARED declares an array that the threads of a block share, APART a function that is not inlined; a host that runs the
# text defines ON_HOST and its own ones.
_HEAD: Final = """\
#ifndef ON_HOST
#define SHARED(type, name, count) __shared__ alignas(16) type name[count]
#define APART __device__ __noinline__
#endif
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct Key { u32 seed_low, seed_high, sample, node; const u64* state; };
__device__ __forceinline__ Key read_state(Key key) {
  if (key.state) {
    key.seed_low = (u32)key.state[0];
    key.seed_high = (u32)(key.state[0] >> 32);
    key.sample = (u32)key.state[1];
  }
  return key;
}
#ifndef ON_HOST
// N adjacent elements at once, N * sizeof(T) at most 16; the address is a multiple of that.
template <int N, class T> struct alignas(N * sizeof(T)) Piece { T values[N]; };
template <int N, class T> __device__ __forceinline__ void read_piece(const T* from, T* to) {
  const Piece<N, T> piece = *reinterpret_cast<const Piece<N, T>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = piece.values[i];
}
template <int N, class T> __device__ __forceinline__ void write_piece(T* to, const T* from) {
  Piece<N, T> piece;
#pragma unroll
  for (int i = 0; i < N; ++i) piece.values[i] = from[i];
  // The compiler may make several stores of an assignment.
  if constexpr (sizeof(piece) == 16) __stwb(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&piece));
  else if constexpr (sizeof(piece) == 8) __stwb(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(&piece));
  else *reinterpret_cast<Piece<N, T>*>(to) = piece;
}
#endif
__device__ __forceinline__ u64 first_item() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 item_step() { return (u64)gridDim.x * blockDim.x; }
"""
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


def structure(name: str, fields: Iterable[str]) -> str:
    """A structure of 64-bit integers."""
    return f"struct {name} {{ i64 {', '.join(fields)}; }};\n"


@cache
def preamble(shape: tuple[str, ...]) -> str:
    """The text before all kernels, once in a translation unit. shape: the fields of a contraction's ``Shape``."""
    randoms = (draw_function(), *map(shared_function, WIDTHS), seed_function(), *stream_functions(), coins_function())
    return _HEAD + structure("Shape", shape) + "".join(map(device_function, randoms)) + _DRAW + LIMBS


KEY: Final = "const Key key"
"""The parameter of a kernel that draws: seed and sample, or the address of both, which the kernel then reads."""


def global_(name: str, parameters: Sequence[str], body: str, threads: int = 0, blocks: int = 1) -> str:
    """A ``__global__`` function; ``threads``: those of its blocks; ``blocks``: how many must fit by their registers."""
    if KEY in parameters and "key." in body:
        parameters = ["const Key given" if each == KEY else each for each in parameters]
        body = f"  {KEY} = read_state(given);\n{body}"
    bounds = f" __launch_bounds__({threads}, {blocks})" if threads else ""
    return f'extern "C" __global__ void{bounds} {name}({", ".join(parameters)}) {{\n{body}}}\n'


def pointer(storage: Storage, name: str, readonly: bool = True, alone: bool = True) -> str:
    """A parameter that points to stored elements. alone: what it points to is written through no other parameter."""
    return f"{'const ' if readonly else ''}{MEMORY[storage]}* {'__restrict__ ' if alone else ''}{name}"


def element(storage: Storage, place: str) -> str:
    """A stored element as a scalar body takes it: a code of 16 or 8 bits or a mask as a u32."""
    return f"(u32){place}" if MEMORY[storage].startswith("unsigned") else place


def stored(storage: Storage, value: str) -> str:
    """A body's result as it is stored."""
    return f"({MEMORY[storage]}){value}" if MEMORY[storage].startswith("unsigned") else value


def bodies(kernel: Reduce | Scan | Contract | Scatter | Exact, name: str) -> str:
    """The scalar functions of a kernel, named ``name_role``."""
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
    return "".join(device_function(f, f"{name}_{role}") for role, f in functions.items())


def shards_structure(shards: int) -> str:
    """The structure of the shards of a length (``numerics.orders``), of which ``count`` have elements."""
    return f"struct Shards {{ i64 count, {', '.join(f'{name}[{shards}]' for name in Shard._fields)}; }};\n"


def stream(kernel: Kernel, declaration: str, number: str, node: str = "key.node") -> str:
    """The first state of stream ``number``, assigned to ``declaration``; nothing if the kernel does not draw."""
    if not _draws(kernel):
        return ""
    return f"{declaration} = start_stream({number}, stream_seed(key.seed_low, key.seed_high, key.sample, {node}));\n"


def _draws(kernel: Kernel) -> bool:
    if isinstance(kernel, Exact):
        return any(kernel.draws)
    return bool(kernel.draws) or (isinstance(kernel, Reduce | Scan | Contract) and kernel.finish_draws)


def bits(wanted: bool, state: str) -> str:
    """The next random bits of a stream, or zeros."""
    return f"draw({state})" if wanted else "0u"
