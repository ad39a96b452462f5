"""What a device does. Every kernel, operator and part of a schedule runs on a ``Target``, chosen by its operands.

``target_of`` is the one place that asks which device runs a call. Everything else in ``runtime`` asks a target: the
CPU's is in ``cpu``, that of CUDA devices in ``cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from torch import Tensor, fx

from fxround.graph.dialect import Call, Fused, Iterations, Matmul, Pointwise
from fxround.kernels.kinds import Blocks, Contract, Exact, Map, Reduce, Scan, Scatter
from fxround.runtime.contractions import Product
from fxround.runtime.contributions import Contributions
from fxround.runtime.cpu.target import CpuTarget
from fxround.runtime.cuda.launcher import forces_texts, runs_texts
from fxround.runtime.draw import Draw
from fxround.runtime.several import Several

if TYPE_CHECKING:
    from fxround.runtime.call_programs import Computed
    from fxround.runtime.epilogues import Followed
    from fxround.runtime.row_chains import Chain


class Plan(Protocol):
    """How a part of a schedule runs on a target, for inputs of given layouts."""

    def run(self, inputs: Sequence[Any], /) -> list[Any] | None:
        """Return the part's results, and release its spent inputs; None if the part is to run as its graph says.

        In place of a result of a loop that nothing reads there is None.
        """


class Target(Protocol):
    """A device. All targets give the same bits."""

    def pointwise(self, call: Pointwise[Tensor], /) -> Tensor:
        """Run a program of rounded pointwise operations over operands that broadcast."""

    def fused(self, call: Fused[Tensor], /) -> list[Tensor]:
        """Run a chain of rounded pointwise operations: the bits of one call for each operation."""

    def contraction(self, call: Call[Tensor], /) -> Tensor:
        """Run a product of matrices, a convolution or one of its gradients."""

    def iterations(self, call: Iterations[Tensor], /) -> Tensor:
        """Return (seed, sample) of each iteration of a loop."""

    def map(
        self, kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None] | None = None, /
    ) -> list[Tensor]:
        """Run a map over operands that broadcast. key: the words of a draw. outs: as ``run.run_kernel`` has them."""

    def takes_parts(self, x: Tensor, /) -> bool:
        """Return whether ``part`` takes an operand of x's layout."""

    def part(
        self, kernel: Map, x: Tensor, parts: Sequence[Tensor], out: Tensor, key: Any, d: int, start: int, size: int, /
    ) -> None:
        """Run a map over ``size`` rows of x from ``start`` on along d, with the numbers that elements have in x.

        parts: the other operands, of the rows alone. out: a row-major tensor of x's shape, whose rows are written.
        """

    def several(self, several: Several, /) -> None:
        """Run a map over several lists of tensors that share no memory, and overwrite them."""

    def blocks(
        self, kernel: Blocks, x: Tensor, sizes: Sequence[int], shared: Sequence[Tensor], out: Tensor | None = None, /
    ) -> Tensor | None:
        """Run a kernel over a tensor in blocks of these sizes; None if there is no such code."""

    def exact(self, kernel: Exact, x: Tensor, draw: Draw, dims: Sequence[int], /) -> Tensor:
        """Sum ``dims`` (ascending, none negative) of x exactly; the result has the other dimensions."""

    def reduce(self, kernel: Reduce, x: Tensor, draw: Draw, dims: Sequence[int], /) -> Tensor:
        """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""

    def scan(self, kernel: Scan, x: Tensor, draw: Draw, dim: int, /) -> Tensor:
        """Compute every prefix along ``dim``, in the shape of x."""

    def scatter(self, kernel: Scatter, x: Tensor, contributions: Contributions, draw: Draw, /) -> Tensor:
        """Return x with the contributions added, row-major."""

    def gather(self, x: Tensor, dim: int, index: Tensor, /) -> Tensor:
        """Return the elements of x that indices choose along a dimension, or raise PyTorch's error."""

    def max_pool2d(
        self,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int] | int,
        dilation: Sequence[int] | int,
        ceil_mode: bool,
        /,
    ) -> Sequence[Tensor]:
        """Return the largest elements of windows and their indices, or raise PyTorch's error."""

    def product(self, product: Product, /) -> Tensor:
        """Compute a contraction."""

    def product_of(self, call: Matmul[Tensor], kernel: Contract, /) -> Tensor:
        """Compute a product of matrices by another kernel of the same chain."""

    def settings(self, inputs: Sequence[Any], /) -> tuple[Any, ...]:
        """Return what a plan depends on besides the layouts of inputs."""

    def rows(self, chain: Chain, inputs: Sequence[Any], spent: tuple[int, ...], /) -> Plan | None:
        """Return a plan for a chain over rows; None if it is to run kernel by kernel.

        spent: the indices of inputs that nothing reaches after a call.
        """

    def followed(self, followed: Followed, inputs: Sequence[Any], spent: tuple[int, ...], /) -> Plan | None:
        """Return a plan for a contraction and the map after it; None if they are to run one after the other."""

    def scan_of(
        self, body: fx.GraphModule, inputs: Sequence[Any], carries: int, xs: int, stacked: Sequence[int], /
    ) -> Plan | None:
        """Return a plan for all steps of a scan; None if the body is to be called for each step.

        inputs: the first carries, tensors of which each step takes a row, and what all steps read. A plan serves any
        number of steps. stacked: the positions of the results that are stacked.
        """

    def program(
        self, graph: fx.GraphModule, inputs: Sequence[Any], functions: Mapping[Any, Callable[..., Any]], /
    ) -> Computed | None:
        """Run a graph, and plan its calls for small inputs; None if its values are large, or nothing is planned.

        functions: those of the operators of the dialect, and of operators that choose values.
        """


CPU: Final[Target] = CpuTarget()


@cache
def cuda() -> Target:
    """Return the target of CUDA devices, whose modules nothing else needs."""
    from fxround.runtime.cuda.target import CudaTarget

    return CudaTarget()


# Whether this thread's calls run on one target, wherever their operands are.
is_forced: Final = forces_texts


def target_of(operands: Sequence[Any]) -> Target:
    """Return what runs a call with these operands. Arguments that are no tensors do not count."""
    if runs_texts(operands):
        return cuda()
    return CPU
