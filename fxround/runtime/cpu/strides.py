"""The lines of a reduction: any reduced dimensions of an operand of any strides, described without a copy.

A *line* is the elements that one result is computed from. Lines are numbered by the row-major index of their result; k
runs over the reduced dimensions, row-major too. A kernel may visit lines in any order, so the dimensions of the results
are sorted by the operand's strides, and neighbouring dimensions that are walked as one are merged. The reduced
dimensions keep their order, unless the kernel's result does not depend on it. A line keeps its number wherever it is
visited, hence its random bits and its place in the result.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxround.numerics.lazy import cached_property
from fxround.runtime.cpu.llvm.lines import MAX_DIMS
from fxround.runtime.cpu.llvm.shards import table_of
from fxround.runtime.layouts import row_major


@dataclass(frozen=True)
class Dim:
    """A dimension: its size, and its steps in the operand, in the result, and in the numbering of lines."""

    size: int
    x: int
    out: int
    line: int

    def spans(self, inner: Dim) -> bool:
        """Whether this dimension and the next one inside of it are walked as one."""
        own, others = (self.x, self.out, self.line), (inner.x, inner.out, inner.line)
        return all(a == b * inner.size for a, b in zip(own, others, strict=True))


def _merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The dimensions without those of size 1, neighbours that are walked as one merged; at least one."""
    merged: list[Dim] = []
    for d in dims:
        if d.size == 1:
            continue
        if merged and merged[-1].spans(d):
            merged[-1] = Dim(merged[-1].size * d.size, d.x, d.out, d.line)
        else:
            merged.append(d)
    return tuple(merged) or (Dim(1, 0, 0, 0),)


def _apart(d: Dim) -> float:
    """A sorting key: large steps first."""
    # A repeated dimension (a step of 0) is visited in the outermost loop.
    return -d.x if d.x else -math.inf


@dataclass(frozen=True)
class Lines:
    """The dimensions of the results, outermost first, and the reduced ones, in order."""

    results: tuple[Dim, ...]
    k: tuple[Dim, ...]

    @staticmethod
    def of(x: Tensor, reduced: Sequence[int], scan: bool = False, ordered: bool = True) -> Lines:
        """The lines of ``x`` over the dimensions ``reduced`` (ascending).

        scan: the result has the shape of x. ordered: the kernel's result depends on the order of k.
        """
        kept = [d for d in range(x.dim()) if d not in reduced]
        lines = row_major([x.shape[d] for d in kept])
        whole = row_major(x.shape) if scan else [0] * x.dim()
        steps = x.stride()
        results = [
            Dim(x.shape[d], steps[d], whole[d] if scan else line, line) for d, line in zip(kept, lines, strict=True)
        ]
        k = [Dim(x.shape[d], steps[d], whole[d], 0) for d in reduced]
        if any(d.size == 0 for d in k):
            # All lines without elements have the same description: one dimension of size 0.
            k = [Dim(0, 0, 0, 0)]
        return Lines(_merged(sorted(results, key=_apart)), _merged(k if ordered else sorted(k, key=_apart)))

    @cached_property
    def count(self) -> int:
        """The number of results."""
        return math.prod(d.size for d in self.results)

    @cached_property
    def length(self) -> int:
        """The number of elements of a line."""
        return math.prod(d.size for d in self.k)

    @property
    def fits(self) -> bool:
        """Whether a kernel's description holds that many dimensions."""
        return len(self.results) <= MAX_DIMS and len(self.k) <= MAX_DIMS

    @property
    def dense(self) -> bool:
        """Whether k walks adjacent elements, all of a line in one run."""
        return len(self.k) == 1 and (self.k[0].x == 1 or self.length <= 1)

    def array(self, shards: int = 1) -> Any:
        """The description as kernels read it (``llvm.lines``), then the table of the shards of a line."""
        sizes = [self.count, self.length, len(self.results), len(self.k)]
        results = [[getattr(d, name) for d in self.results] for name in ("size", "x", "out", "line")]
        k = [[getattr(d, name) for d in self.k] for name in ("size", "x", "out")]
        padded = [value for column in (*results, *k) for value in (column + [0] * MAX_DIMS)[:MAX_DIMS]]
        words = (*sizes, *padded, *table_of(self.length, shards))
        return (ctypes.c_int64 * len(words))(*words)
