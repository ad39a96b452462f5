"""How often bits of an operation's accumulators flip: the operation itself, run with a kernel that counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxround.faults.counting import counting
from fxround.graph.dialect import Call, Matmul
from fxround.graph.dialect.reductions import ScanCall
from fxround.numerics.formats.storage import Storage
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_product
from fxround.runtime.torch_ops import function_of


def count_faults(call: Call[Tensor], number: int | None) -> int:
    """Return how many steps of the accumulators fault ``number`` hits, or the number of steps for None.

    call: of an operator that accumulates, whose operands are of the shapes and have the indices of the real ones.
    """
    cls: Any = type(call)
    values = [_without_values(value) for value in call.arguments()]
    if isinstance(call, Matmul):
        made: Matmul[Tensor] = Matmul.of(values)
        a, b = (x.unsqueeze(0) if x.dim() == 2 else x for x in (made.a, made.b))
        kernel = counting(made.kernel(made.loads()), made.accumulate, number)
        return _total(run_product(kernel, a, b, 0, Draw.of(made.rng, made.node)))

    class Counting(cls):  # type: ignore[misc]
        def kernel(self, loads: tuple[Storage, ...]) -> Any:
            """Return the kernel that counts."""
            return counting(super().kernel(loads), self.accumulate, number)

    result: Tensor = function_of(cls)(Counting.of(values))
    # The last prefix has the faults of all steps.
    if isinstance(call, ScanCall) and result.dim() and result.numel():
        result = result.select(call.dim, -1)
    return _total(result)


def _total(counts: Tensor) -> int:
    return int(counts.sum(dtype=torch.float64))


def _without_values(value: Any) -> Any:
    """Return zeros in place of a floating-point tensor, in a dtype that holds large counts; tensors on the CPU."""
    if isinstance(value, list | tuple):
        return [_without_values(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.cpu()
    return torch.zeros(value.shape, dtype=torch.float64 if value.dtype == torch.float64 else torch.float32)
