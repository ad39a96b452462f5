"""The CPU as a target (``runtime.target.Target``): kernels in machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Call, Fused, Pointwise
from fxround.runtime.contractions import Product
from fxround.runtime.cpu.begin import begin
from fxround.runtime.cpu.blocks import run_blocks
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.contraction import begin_product
from fxround.runtime.cpu.exact_sum import run_exact
from fxround.runtime.cpu.gather import run_gather
from fxround.runtime.cpu.iterations import iterations
from fxround.runtime.cpu.llvm.map import MAX_DIMS
from fxround.runtime.cpu.long_programs import run_parts
from fxround.runtime.cpu.matmul import run_chain
from fxround.runtime.cpu.pointwise import run_kernel, run_part
from fxround.runtime.cpu.pooling import run_max_pool2d
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.cpu.scatter import run_scatter
from fxround.runtime.cpu.several import run_several
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import loads_of_call

if TYPE_CHECKING:
    from fxround.runtime.call_programs import Computed
    from fxround.runtime.cpu.epilogues import Stepping
    from fxround.runtime.cpu.plans.machine_loops import ScanPlan
    from fxround.runtime.cpu.row_chains import Ranges
    from fxround.runtime.epilogues import Followed
    from fxround.runtime.row_chains import Chain


class CpuTarget:
    """The CPU. What plans is imported when a schedule asks for it."""

    map = staticmethod(run_kernel)
    part = staticmethod(run_part)
    several = staticmethod(run_several)
    blocks = staticmethod(run_blocks)
    exact = staticmethod(run_exact)
    reduce = staticmethod(run_reduce)
    scan = staticmethod(run_scan)
    scatter = staticmethod(run_scatter)
    gather = staticmethod(run_gather)
    max_pool2d = staticmethod(run_max_pool2d)
    product_of = staticmethod(run_chain)
    iterations = staticmethod(iterations)

    def takes_parts(self, x: Tensor) -> bool:
        """Return whether a map has code for x, whatever its strides are."""
        return x.dim() <= MAX_DIMS

    def pointwise(self, call: Pointwise[Tensor]) -> Tensor:
        """Run a program, in parts if it is too long for one kernel."""
        kernel = call.kernel(loads_of_call(call))
        if kernel is None:
            return run_parts(call.program, call.xs, call.results, Draw.of(call.rng, call.node), None)[0]
        if not kernel.draws:
            return run_kernel(kernel, call.xs, NO_KEY)[0]
        draw = Draw.of(call.rng, call.node)
        return run_kernel(draw.of_part(kernel), call.xs, draw.key())[0]

    def fused(self, call: Fused[Tensor]) -> list[Tensor]:
        """Run a chain in one pass over memory, or in parts if it is too long for one kernel."""
        kernel = call.kernel(loads_of_call(call))
        if kernel is None:
            return run_parts(call.program, call.xs, call.results, Draw.of(call.rng, 0), call.nodes)
        return run_kernel(kernel, call.xs, Draw.of(call.rng, 0).keys(call.nodes) if kernel.draws else NO_KEY)

    def contraction(self, call: Call[Tensor]) -> Tensor:
        """Run a contraction of the dialect."""
        return begin(call).finish()

    def product(self, product: Product) -> Tensor:
        """Compute a contraction."""
        return begin_product(product).finish()

    def settings(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the instruction set and the number of threads."""
        return current_set(), torch.get_num_threads()

    def rows(self, chain: Chain, inputs: Sequence[Any], spent: tuple[int, ...]) -> Ranges | None:
        """Plan a chain in ranges of rows."""
        from fxround.runtime.cpu.row_chains import plan_rows

        return plan_rows(chain, inputs, spent)

    def followed(self, followed: Followed, inputs: Sequence[Any], spent: tuple[int, ...]) -> Stepping | None:
        """Plan a contraction and the map after it in steps."""
        from fxround.runtime.cpu.epilogues import plan_followed

        return plan_followed(followed, inputs, spent)

    def scan_of(
        self, body: fx.GraphModule, inputs: Sequence[Any], carries: int, xs: int, stacked: Sequence[int]
    ) -> ScanPlan | None:
        """Plan all steps of a scan in machine code."""
        from fxround.runtime.cpu.plans.machine_loops import plan_scan

        return plan_scan(body, inputs, carries, xs, stacked)

    def program(
        self, graph: fx.GraphModule, inputs: Sequence[Any], functions: Mapping[Any, Callable[..., Any]]
    ) -> Computed | None:
        """Run a graph, and plan its calls with consecutive kernels in one call of machine code."""
        from fxround.runtime.cpu.plans.straight import program

        return program(graph, inputs, functions)
