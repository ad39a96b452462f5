"""CUDA devices as a target (``runtime.target.Target``): kernels as texts in CUDA C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxround.kernels.kinds import Blocks, Map
from fxround.runtime.cuda.contraction import run, run_chain, run_product
from fxround.runtime.cuda.epilogues import plan_followed
from fxround.runtime.cuda.iterations import iterations
from fxround.runtime.cuda.launcher import device_among, has_slow_binary64
from fxround.runtime.cuda.pointwise import fused, pointwise, run_kernel
from fxround.runtime.cuda.reduction import run_reduce, run_scan, run_scatter
from fxround.runtime.cuda.row_chain import plan_rows
from fxround.runtime.cuda.several import run_several


class CudaTarget:
    """CUDA devices."""

    map = staticmethod(run_kernel)
    several = staticmethod(run_several)
    exact = staticmethod(run_reduce)
    reduce = staticmethod(run_reduce)
    scan = staticmethod(run_scan)
    scatter = staticmethod(run_scatter)
    gather = staticmethod(torch.gather)
    max_pool2d = staticmethod(torch.ops.aten.max_pool2d_with_indices.default)
    product = staticmethod(run_product)
    product_of = staticmethod(run_chain)
    pointwise = staticmethod(pointwise)
    fused = staticmethod(fused)
    contraction = staticmethod(run)
    iterations = staticmethod(iterations)
    rows = staticmethod(plan_rows)
    followed = staticmethod(plan_followed)

    def takes_parts(self, x: Tensor) -> bool:
        """Return that no map runs on a part of x with the numbers that elements have in x."""
        return False

    def part(
        self, kernel: Map, x: Tensor, parts: Sequence[Tensor], out: Tensor, key: Any, d: int, start: int, size: int
    ) -> None:
        """Raise NotImplementedError: ``takes_parts`` is false."""
        raise NotImplementedError("a map on a part of a CUDA tensor; expected the whole tensor (see takes_parts)")

    def blocks(
        self, kernel: Blocks, x: Tensor, sizes: Sequence[int], shared: Sequence[Tensor], out: Tensor | None = None
    ) -> Tensor | None:
        """Return None: there is no text for blocks."""
        return None

    def settings(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return whether texts should avoid binary64."""
        return (has_slow_binary64(device_among(inputs)),)

    def scan_of(
        self, body: fx.GraphModule, inputs: Sequence[Any], carries: int, xs: int, stacked: Sequence[int]
    ) -> None:
        """Return None: the body is called for each step."""

    def program(
        self, graph: fx.GraphModule, inputs: Sequence[Any], functions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        """Return None: kernels are launched one by one."""
