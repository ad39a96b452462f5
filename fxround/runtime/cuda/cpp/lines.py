"""Lines of numbers as reductions and scans take them: where they are, and how they pass through shared memory.

Where a warp's threads would read places that are far apart (neighbouring lines in one chain each), or too few threads
would read (a few long lines), all threads of a block read adjacent elements of some lines into shared memory, 16 bytes
at once where the layout allows it. Those of the chains take the steps from there, while the next elements are on their
way. The order of the steps is that of the chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fxround.kernels.kinds import Exact, Reduce, Scan, Scatter
from fxround.numerics.arithmetic.scalar import const
from fxround.runtime.cuda.cpp.common import KEY, MEMORY, bits, bodies, element, global_, pointer, stored, stream
from fxround.runtime.cuda.cpp.table import TYPES, constant

# The threads of a block at most: a multiple of every number of chains.
GROUP: Final = 256
# The elements in a block's shared memory, all from one line or from several.
_STAGED_AT_ONCE: Final = 2048
# The elements that a thread reads from there before it takes their steps; it divides a line's in shared memory.
_HELD: Final = 8

LINE_SIZES: Final = ("count", "length", "inner", "run", "along")
LINE_STEPS: Final = ("outer_step", "inner_step", "far", "near")
"""The fields of ``Lines``: unsigned ones, then signed ones."""

LINES: Final = (
    f"struct Lines {{ u64 {', '.join(LINE_SIZES)}; i64 {', '.join(LINE_STEPS)}; }};\n"
    + """\
__device__ __forceinline__ i64 line_at(const Lines& lines, const u64 i) {
  return (i64)(i / lines.inner) * lines.outer_step + (i64)(i % lines.inner) * lines.inner_step;
}
__device__ __forceinline__ i64 place_at(const Lines& lines, const u64 k) {
  if (lines.run >= lines.length) return (i64)k * lines.near;
  return (i64)(k / lines.run) * lines.far + (i64)(k % lines.run) * lines.near;
}
"""
)
"""Where element k of line i is: at ``line_at(i) + place_at(k)``. along: whether neighbours of a line are nearer than
neighbouring lines."""


@dataclass(frozen=True)
class Staging:
    """Lines that pass through shared memory, as many elements of each as fit; a thread reads ``piece`` at once."""

    lines: int
    piece: int = 1

    @property
    def steps(self) -> int:
        """The elements of a line in shared memory."""
        return _STAGED_AT_ONCE // self.lines

    @property
    def count(self) -> int:
        """The pieces that a thread reads."""
        return _STAGED_AT_ONCE // GROUP // self.piece

    @property
    def far(self) -> int:
        """The lines from one piece of a thread to the next."""
        return GROUP * self.piece // self.steps if self.lines > 1 else 0

    @property
    def ahead(self) -> int:
        """The elements of a line from one piece of a thread to the next."""
        return 0 if self.lines > 1 else GROUP * self.piece

    @property
    def bases(self) -> int:
        """The lines that a thread reads from."""
        return self.count if self.lines > 1 else 1


@dataclass(frozen=True)
class LineLoop:
    """How threads share the work of a kernel; no bit depends on it.

    staging     how lines pass through shared memory, if they do
    threads     the threads of a block
    exact       whether the threads of a block share an exact sum ("shared"); several blocks share one if each computes
                a part ("parts"), and one joins these ("joined")
    piece       the adjacent elements of a scatter's result that a thread computes
    """

    staging: Staging | None = None
    threads: int = GROUP
    exact: Literal["", "shared", "parts", "joined"] = ""
    piece: int = 1

    @property
    def name(self) -> str:
        """The end of a text's name."""
        if self.staging:
            return f"_l{self.staging.lines}p{self.staging.piece}"
        threads = f"_t{self.threads}" if self.threads != GROUP else ""
        return f"{threads}{f'_{self.exact}' if self.exact else ''}{f'_p{self.piece}' if self.piece > 1 else ''}"


PLAIN: Final = LineLoop()
"""A thread, or a thread for each chain, reads what it computes with."""


def loop_name(kernel: Reduce | Scan | Scatter | Exact, shape: LineLoop = PLAIN) -> str:
    """The name of the ``__global__`` function."""
    return f"{type(kernel).__name__.lower()}_{kernel.digest[:16]}{shape.name}"


# Chains of threads that are ``next`` apart, as ``numerics.orders`` says. Every thread meets every barrier.
_COMBINED: Final = """\
    for (int w = {chains} / 2; w > 0; w /= 2) {{
      ends[threadIdx.x] = acc;
      __syncthreads();
      if (inside && chain < w && (u64)(chain + w) < used) {{
        const {type} other = ends[threadIdx.x + w * next_chain];
        acc = {name}_combine(acc, other, {step_bits});
      }}
      __syncthreads();
    }}
"""


def combined(kernel: Reduce, name: str) -> str:
    """The chains of a line combined by its threads."""
    return _COMBINED.format(
        name=name,
        type=TYPES[kernel.accumulator],
        chains=kernel.order.chains,
        step_bits=bits(kernel.draws, "state"),
    )


def parameters(kernel: Reduce | Scan | Exact) -> list[str]:
    """The parameters of a text over lines."""
    out, x = pointer(kernel.result, "out", readonly=False), pointer(kernel.loads[0], "x")
    shards = ["const Shards shards"] if isinstance(kernel, Reduce) and kernel.order.shards > 1 else []
    return ["const Lines lines", *shards, out, x, KEY]


# A thread brings {count} pieces, of {lines} lines or of one, while the threads of the chains take the steps of the
# elements that are in ``tile``. It stores pieces of a scan's results in the same way.
_STAGED: Final = """\
  SHARED({memory}, tile, {elements});
{shared}  const int t = threadIdx.x, line_of = t / {chains}, chain = t % {chains};
  const int s_0 = t * {piece} % {steps}, l_0 = t * {piece} / {steps};
{used}  for (u64 i_0 = (u64)blockIdx.x * {lines}; i_0 < lines.count; i_0 += (u64)gridDim.x * {lines}) {{
    const u64 i = i_0 + line_of;
    const bool inside = line_of < {lines} && i < lines.count;
    const {memory}* base[{bases}];
#pragma unroll
    for (int j = 0; j < {bases}; ++j)
      base[j] = i_0 + l_0 + j * {far} < lines.count ? x + line_at(lines, i_0 + l_0 + j * {far}) : nullptr;
    {memory} held[{count}][{piece}];
    const auto fetch = [&](const u64 k_0) {{
      i64 place[{places}];
#pragma unroll
      for (int j = 0; j < {places}; ++j) place[j] = place_at(lines, k_0 + s_0 + j * {ahead});
#pragma unroll
      for (int j = 0; j < {count}; ++j) {{
#pragma unroll
        for (int n = 0; n < {piece}; ++n) held[j][n] = 0;
        const {memory}* from = base[j % {bases}];
        if (from && k_0 + s_0 + j * {ahead} < lines.length) read_piece<{piece}>(from + place[j % {places}], held[j]);
      }}
    }};
    {type} acc = {initial};
{start}    if (lines.length) fetch(0);
    for (u64 k_0 = 0; k_0 < lines.length; k_0 += {steps}) {{
#pragma unroll
      for (int j = 0; j < {count}; ++j)
#pragma unroll
        for (int n = 0; n < {piece}; ++n)
          tile[(l_0 + j * {far}) * {pitch} + s_0 + j * {ahead} + n] = held[j][n];
      __syncthreads();
      const int end = lines.length - k_0 < {steps} ? (int)(lines.length - k_0) : {steps};
      if (k_0 + {steps} < lines.length) fetch(k_0 + {steps});
      if (inside)
        for (int k = chain; k < end; k += {chains} * {held}) {{
          {memory} own[{held}];
#pragma unroll
          for (int j = 0; j < {held}; ++j) own[j] = tile[line_of * {pitch} + k + j * {chains}];
#pragma unroll
          for (int j = 0; j < {held}; ++j)
            if (k + j * {chains} < end) {{
              acc = {name}_step(acc, {element}, {step_bits});
{make}            }}
        }}
      __syncthreads();
{write}    }}
{combine}{store}  }}
"""
_WRITE: Final = """\
#pragma unroll
      for (int j = 0; j < {count}; ++j) {{
        const u64 line = i_0 + l_0 + j * {far}, k = k_0 + s_0 + j * {ahead};
        if (line >= lines.count || k >= lines.length) continue;
        {memory} piece[{piece}];
#pragma unroll
        for (int n = 0; n < {piece}; ++n) piece[n] = made[(l_0 + j * {far}) * {pitch} + s_0 + j * {ahead} + n];
        write_piece<{piece}>(out + line * lines.length + k, piece);
      }}
"""


def staged_text(kernel: Reduce | Scan, shape: LineLoop) -> str:
    """Lines whose elements pass through shared memory: all threads of a block read, those of the chains compute."""
    name, staging = loop_name(kernel, shape), shape.staging
    assert staging is not None
    chains = kernel.order.chains if isinstance(kernel, Reduce) else 1
    own = TYPES[kernel.accumulator]
    # Threads of different lines and chains read different banks.
    pitch = staging.steps + (chains if staging.lines > 1 else 0)
    value = stored(kernel.result, f"{name}_finish(acc, {bits(kernel.finish_draws, 'state')})")
    sizes = {n: getattr(staging, n) for n in ("piece", "count", "far", "ahead")} | {"pitch": pitch}
    shared, make, write, combine, store = "", "", "", "", ""
    if isinstance(kernel, Scan):
        shared = f"  SHARED({MEMORY[kernel.result]}, made, {staging.lines * pitch});\n"
        make = f"              made[line_of * {pitch} + k + j] = {value};\n"
        write = _WRITE.format(memory=MEMORY[kernel.result], **sizes)
    else:
        store = f"    if (inside && chain == 0) out[i] = {value};\n"
        if chains > 1:
            shared = f"  SHARED({own}, ends, {GROUP});\n"
            combine = combined(kernel, name)
    used = f"  const int next_chain = 1;\n  const u64 used = lines.length < {chains} ? lines.length : {chains};\n"
    number = "i" if chains == 1 else f"i * {chains} + chain"
    body = _STAGED.format(
        name=name,
        memory=MEMORY[kernel.loads[0]],
        type=own,
        elements=staging.lines * pitch,
        shared=shared,
        chains=chains,
        lines=staging.lines,
        steps=staging.steps,
        bases=staging.bases,
        places=1 if staging.lines > 1 else staging.count,
        used=used if combine else "",
        initial=constant(const(kernel.accumulator, kernel.first)),
        start=stream(kernel, "    u64 state", number),
        element=element(kernel.loads[0], "own[j]"),
        held=_HELD,
        step_bits=bits(kernel.draws, "state"),
        make=make,
        write=write,
        combine=combine,
        store=store,
        **sizes,
    )
    return LINES + bodies(kernel, name) + global_(name, parameters(kernel), body, GROUP)
