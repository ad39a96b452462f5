"""Chains over rows as CUDA C++ text: all maps and sums of a softmax or a norm in one kernel, a group of threads a row.

Thread ``lane`` of a group of G computes elements k = lane, lane + G, ... of its row. G divides the number of chains of
every sum, so a chain's elements are all computed by the thread that adds them, in their order: values between two
kernels need no barrier. Only the ends of the chains, and what a sum makes of a row, pass from thread to thread.

A loop over the row computes everything that needs no sum of a later loop. Values that a later loop reads are in shared
memory, or in a result. ``row_chain_text`` takes a ``RowChain``; the arguments of the text are

    (layout, results..., operands..., key, further nodes...)

where the layout has the number of rows, sizes, and steps whose last one is along a row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from fxround.kernels.kinds import Map, Reduce
from fxround.numerics.arithmetic.scalar import const
from fxround.numerics.formats.storage import Storage
from fxround.runtime.cuda.cpp.common import KEY, MEMORY, bits, bodies, element, global_, pointer, stored, stream
from fxround.runtime.cuda.cpp.map import LAYOUT, Access, map_call, seeds, walk
from fxround.runtime.cuda.cpp.table import TYPES, constant, device_function

# The bytes of shared memory that a text may declare, those of a multiprocessor and its threads, as every architecture
# has them at least (CUDA C++ Programming Guide), and the sizes of a block.
_MOST_SHARED: Final = 48 << 10
_SHARED_OF_ALL: Final = 64 << 10
_THREADS_OF_ALL: Final = 1024
_BLOCKS: Final = (32, 64, 128, 256)
_BYTES: Final = {"float": 4, "double": 8, "unsigned short": 2, "unsigned char": 1}
# The number of an element in its row is an int.
_LONGEST: Final = 1 << 30
# A row of fewer threads would read a few bytes at a time.
_FEWEST: Final = 8


@dataclass(frozen=True)
class RowStage:
    """A kernel of a chain.

    operands    numbers of values; a sum has one
    results     numbers of values; a sum has one
    wide        whether it runs for each element of a row, else once a row
    """

    kernel: Map | Reduce
    operands: tuple[int, ...]
    results: tuple[int, ...]
    wide: bool

    @property
    def nodes(self) -> int:
        """The node numbers that it is passed: none if it draws nothing."""
        if isinstance(self.kernel, Map):
            return self.kernel.nodes if self.kernel.draws else 0
        return int(self.kernel.draws or self.kernel.finish_draws)


@dataclass(frozen=True)
class Operand:
    """A value that a chain is given: how it is stored, and how it is read along a row."""

    storage: Storage
    access: Access


@dataclass(frozen=True)
class RowChain:
    """A chain over rows.

    stages      its kernels, in an order in which they can run
    operands    values 0, 1, ..., which are read
    stored      the numbers of the values that are results of the whole
    length      the elements of a row
    dims        the dimensions that rows are numbered by, after neighbours were merged
    """

    stages: tuple[RowStage, ...]
    operands: tuple[Operand, ...]
    stored: tuple[int, ...]
    length: int
    dims: int

    @cached_property
    def group(self) -> int:
        """The threads of a row: the fewest chains of a sum."""
        return min(kernel.order.chains for kernel in self._sums)

    @property
    def _sums(self) -> list[Reduce]:
        return [stage.kernel for stage in self.stages if isinstance(stage.kernel, Reduce)]

    @cached_property
    def storages(self) -> dict[int, Storage]:
        """How each value is stored."""
        storages = {i: operand.storage for i, operand in enumerate(self.operands)}
        for stage in self.stages:
            kinds = stage.kernel.results if isinstance(stage.kernel, Map) else (stage.kernel.result,)
            storages |= dict(zip(stage.results, kinds, strict=True))
        return storages

    @cached_property
    def levels(self) -> dict[int, int]:
        """The loop in which each value is computed; a value of a row alone is there before that loop."""
        levels = dict.fromkeys(range(len(self.operands)), 0)
        for stage in self.stages:
            level = max(levels[i] for i in stage.operands)
            levels |= dict.fromkeys(stage.results, level + isinstance(stage.kernel, Reduce))
        return levels

    @cached_property
    def wide(self) -> frozenset[int]:
        """The values made that have an element for each k."""
        return frozenset(i for s in self.stages if s.wide and isinstance(s.kernel, Map) for i in s.results)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The values that are in shared memory: those that a later loop reads and that are no result."""
        read = {i for s in self.stages for i in s.operands if i in self.wide and self.level(s) > self.levels[i]}
        return tuple(sorted(read - {*self.stored}))

    def level(self, stage: RowStage) -> int:
        """The loop that a stage is a part of."""
        return max(self.levels[i] for i in stage.operands)

    @property
    def pitch(self) -> int:
        """The elements from one row to the next in shared memory: neighbouring rows lie in different banks."""
        return -(-self.length // 32) * 32 + self.group % 32

    def shared(self, threads: int) -> int:
        """The bytes of shared memory of a block."""
        rows = threads // self.group
        kept = sum(_BYTES[MEMORY[self.storages[i]]] for i in self.kept) * rows * self.pitch
        tiles = sum(_BYTES[TYPES[t]] * threads for t in {kernel.accumulator for kernel in self._sums})
        return kept + tiles + sum(_BYTES[m] * rows for m in {MEMORY[kernel.result] for kernel in self._sums})

    @cached_property
    def threads(self) -> int | None:
        """The threads of a block; None if there is no text: long rows, sums of few chains, sums in shards."""
        fitting = [t for t in _BLOCKS if t >= self.group and self.shared(t) <= _MOST_SHARED]
        of_rows = all(stage.wide for stage in self.stages if isinstance(stage.kernel, Reduce))
        of_rows = of_rows and all(kernel.order.shards == 1 for kernel in self._sums)
        possible = of_rows and self.group >= _FEWEST and self.length < _LONGEST
        return max(fitting, key=self._busy, default=None) if possible else None

    def _busy(self, threads: int) -> tuple[int, int]:
        """The threads that a multiprocessor holds at once in blocks of so many, then the size of a block."""
        return min(_THREADS_OF_ALL, _SHARED_OF_ALL // self.shared(threads) * threads), threads

    @cached_property
    def name(self) -> str:
        """The name of the ``__global__`` function."""
        stages = [(type(s.kernel).__name__, s.kernel.digest, s.operands, s.results, s.wide) for s in self.stages]
        parts = repr((stages, self.operands, self.stored, self.length, self.dims))
        return f"rows_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


_ROWS: Final = """\
{shared}{seeds}  const int lane = threadIdx.x % {group}, group_of = threadIdx.x / {group};
  for (u64 row_0 = (u64)blockIdx.x * {rows}; row_0 < layout.count; row_0 += (u64)gridDim.x * {rows}) {{
    const u64 row = row_0 + group_of;
    const bool inside = row < layout.count;
{walk}{statistics}{loops}  }}
"""
# ``fits`` is a constant unless the row ends within a round.
_LOOP: Final = """\
{declare}    if (inside) {{
      for (int k_0 = lane; k_0 < {length}; k_0 += {round}) {{
#pragma unroll
        for (int c = 0; c < {most}; ++c) {{
          const int k = k_0 + c * {group};
          if (k < {length}) {{
            const u64 i = row * {length} + k;
{body}          }}
        }}
      }}
    }}
{ends}"""
_FIRST: Final = """\
    {type} acc{s}[{chains}];
{state}#pragma unroll
    for (int c = 0; c < {chains}; ++c) {{
      acc{s}[c] = {initial};
{start}    }}
"""
# Chains of one thread, then those of a row: acc[l] = acc[l] + acc[l + w] as ``numerics.orders`` says.
_WITHIN: Final = """\
#pragma unroll
    for (int c = 0; c < {half}; ++c)
      if (inside && c * {group} + lane + {w} < {used})
        acc{s}[c] = {name}_combine(acc{s}[c], acc{s}[c + {half}], {step_bits});
"""
_ACROSS: Final = """\
    for (int w = {half}; w > 0; w /= 2) {{
      tile_{type}[threadIdx.x] = acc{s}[0];
      __syncthreads();
      if (inside && lane < w && lane + w < {used}) {{
        const {type} other = tile_{type}[threadIdx.x + w];
        acc{s}[0] = {name}_combine(acc{s}[0], other, {step_bits});
      }}
      __syncthreads();
    }}
    if (inside && lane == 0) {tell}[group_of] = {value};
    __syncthreads();
    if (inside) v{result} = {tell}[group_of];
"""


def row_chain_text(chain: RowChain) -> str:
    """The text of a chain, with the layout and the device functions that are its own."""
    return _Writer(chain).text()


class _Writer:
    """Writes one chain's text."""

    def __init__(self, chain: RowChain) -> None:
        assert chain.threads is not None
        self.chain, self.threads = chain, chain.threads
        self.rows = chain.threads // chain.group
        self.names = [f"{chain.name}_{s}" for s in range(len(chain.stages))]
        counts = [stage.nodes for stage in chain.stages]
        numbers = ["key.node", *(f"node{n}" for n in range(1, sum(counts)))]
        self.nodes = [numbers[sum(counts[:s]) : sum(counts[: s + 1])] for s in range(len(counts))]

    def text(self) -> str:
        """Everything."""
        chain, drawn = self.chain, [stage.kernel for stage in self.chain.stages]
        numbers = range(len(chain.operands) if chain.dims else 0)
        loops = range(1 + max(chain.level(stage) for stage in chain.stages))
        body = _ROWS.format(
            shared=self._shared(),
            seeds="".join(seeds(k, self.nodes[s], f"{s}_") for s, k in enumerate(drawn) if isinstance(k, Map)),
            group=chain.group,
            rows=self.rows,
            walk=walk(numbers, chain.dims, "u64", "row"),
            statistics="".join(self._declared(s) for s in chain.stages),
            loops="".join(map(self._loop, loops)),
        )
        parameters = [
            f"const Layout<{len(chain.operands)}> layout",
            *(pointer(chain.storages[i], f"out{i}", readonly=False) for i in chain.stored),
            *(pointer(operand.storage, f"x{i}") for i, operand in enumerate(chain.operands)),
            KEY,
            *(f"const u32 {node}" for nodes in self.nodes for node in nodes if node != "key.node"),
        ]
        functions = "".join(
            device_function(kernel.body, f"{name}_body") if isinstance(kernel, Map) else bodies(kernel, name)
            for kernel, name in zip(drawn, self.names, strict=True)
        )
        return LAYOUT + functions + global_(chain.name, parameters, body, self.threads)

    def _shared(self) -> str:
        """The arrays that threads share."""
        chain, sums = self.chain, self.chain._sums
        tiles = [(t, f"tile_{t}", self.threads) for t in sorted({TYPES[k.accumulator] for k in sums})]
        results = [(m, _shared_result(m), self.rows) for m in sorted({MEMORY[k.result] for k in sums})]
        kept = [(MEMORY[chain.storages[i]], f"kept{i}", self.rows * chain.pitch) for i in chain.kept]
        return "".join(f"  SHARED({t}, {name}, {count});\n" for t, name, count in (*tiles, *results, *kept))

    def _declared(self, stage: RowStage) -> str:
        """Variables for values of a row alone, which every thread of the row has."""
        made = [i for i in stage.results if i not in self.chain.wide]
        return "".join(f"    {MEMORY[self.chain.storages[i]]} v{i} = 0;\n" for i in made)

    def _loop(self, level: int) -> str:
        """What is computed before loop ``level``, the loop, and the ends of its sums."""
        chain = self.chain
        own = [(s, stage) for s, stage in enumerate(chain.stages) if chain.level(stage) == level]
        before, inside = ([x for x in own if x[1].wide is wide] for wide in (False, True))
        text = "".join(self._statistic(s, stage) for s, stage in before)
        if not inside:
            return text
        sums = [(s, stage, stage.kernel) for s, stage in inside if isinstance(stage.kernel, Reduce)]
        most = max([1, *(kernel.order.chains // chain.group for _, _, kernel in sums)])
        loop = _LOOP.format(
            declare="".join(self._first(s, kernel) for s, _, kernel in sums),
            length=chain.length,
            round=most * chain.group,
            most=most,
            group=chain.group,
            body="".join(self._step(s, stage, level) for s, stage in inside),
            ends="".join(self._end(s, stage, kernel) for s, stage, kernel in sums),
        )
        return text + loop

    def _read(self, i: int, level: int) -> str:
        """Value i in loop ``level``, or before it if it belongs to a row alone."""
        chain, storage = self.chain, self.chain.storages[i]
        if i < len(chain.operands):
            offset, along = f"o{i}" if chain.dims else "0", f" + (i64)k * layout.steps[{i}][{chain.dims}]"
            step = {"contiguous": " + k", "scalar": ""}.get(chain.operands[i].access, along)
            return element(storage, f"x{i}[{offset}{step}]")
        if i not in chain.wide or chain.levels[i] == level:
            return element(storage, f"v{i}")
        return element(storage, f"out{i}[i]" if i in chain.stored else f"{self._place(i)}")

    def _place(self, i: int) -> str:
        return f"kept{i}[group_of * {self.chain.pitch} + k]"

    def _statistic(self, s: int, stage: RowStage) -> str:
        """A map of values of a row alone."""
        lines = self._map(s, stage, self.chain.level(stage), "row")
        lines += [f"v{i} = made{i};" for i in stage.results]
        lines += [f"if (lane == 0) out{i}[row] = v{i};" for i in stage.results if i in self.chain.stored]
        return "    if (inside) {\n" + "".join(f"      {line}\n" for line in lines) + "    }\n"

    def _step(self, s: int, stage: RowStage, level: int) -> str:
        """What a stage does for one element."""
        if isinstance(stage.kernel, Reduce):
            chains = stage.kernel.order.chains // self.chain.group
            at = f"[c % {chains}]"
            step_bits = bits(stage.kernel.draws, f"state{s}{at}")
            value = self._read(stage.operands[0], level)
            return f"            acc{s}{at} = {self.names[s]}_step(acc{s}{at}, {value}, {step_bits});\n"
        lines = self._map(s, stage, level, "i")
        for i in stage.results:
            lines.append(f"const {MEMORY[self.chain.storages[i]]} v{i} = made{i};")
            lines += [f"out{i}[i] = v{i};"] if i in self.chain.stored else []
            lines += [f"{self._place(i)} = v{i};"] if i in self.chain.kept else []
        return "".join(f"            {line}\n" for line in lines)

    def _map(self, s: int, stage: RowStage, level: int, index: str) -> list[str]:
        """Lines that make ``made{i}`` of each result of a map."""
        assert isinstance(stage.kernel, Map)
        operands = [self._read(i, level) for i in stage.operands]
        made = [f"made{i}" for i in stage.results]
        return map_call(stage.kernel, f"{self.names[s]}_body", operands, made, index, f"{s}_")

    def _first(self, s: int, kernel: Reduce) -> str:
        """The accumulators of a thread's chains, and their streams."""
        chains, group = kernel.order.chains // self.chain.group, self.chain.group
        number = f"row * {kernel.order.chains} + c * {group} + lane"
        start = stream(kernel, f"      state{s}[c]", number, *self.nodes[s])
        return _FIRST.format(
            s=s,
            type=TYPES[kernel.accumulator],
            chains=chains,
            state=f"    u64 state{s}[{chains}];\n" if start else "",
            initial=constant(const(kernel.accumulator, kernel.first)),
            start=start,
        )

    def _end(self, s: int, stage: RowStage, kernel: Reduce) -> str:
        """The ends of the chains combined, and the result for every thread of the row."""
        chain, name, (result,) = self.chain, self.names[s], stage.results
        group, used = chain.group, min(kernel.order.chains, chain.length)
        parts, w = [], kernel.order.chains // 2
        while w >= group:
            step_bits = bits(kernel.draws, f"state{s}[c]")
            parts.append(
                _WITHIN.format(s=s, half=w // group, group=group, w=w, used=used, name=name, step_bits=step_bits)
            )
            w //= 2
        finish = f"{name}_finish(acc{s}[0], {bits(kernel.finish_draws, f'state{s}[0]')})"
        across = _ACROSS.format(
            s=s,
            half=w,
            type=TYPES[kernel.accumulator],
            used=used,
            name=name,
            step_bits=bits(kernel.draws, f"state{s}[0]"),
            tell=_shared_result(MEMORY[kernel.result]),
            value=stored(kernel.result, finish),
            result=result,
        )
        keep = f"    if (inside && lane == 0) out{result}[row] = v{result};\n" if result in chain.stored else ""
        return "".join([*parts, across, keep])


def _shared_result(memory: str) -> str:
    """The array by which a row's threads hear a sum."""
    return f"told_{memory.replace(' ', '_')}"
