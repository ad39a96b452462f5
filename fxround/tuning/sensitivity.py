"""How sensitive a loss is to each weight: traces of its Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.significance.inputs import ModelCall
from fxround.tuning.choices import generator

# The data and the random vectors of an estimate: the rows of Dong et al., and enough vectors for a mean over elements.
_ROWS: Final = 1000
_VECTORS: Final = 16


def traces(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[ModelCall],
    loss: Callable[[Any, Any], Tensor],
    seed: int,
) -> dict[str, float]:
    """Return the trace of the Hessian of the loss for each of these parameters, by name.

    Hutchinson's estimate, as in HAWQ-V2 (Dong et al., NeurIPS 2020, section 3.1): the mean of v . (H v) over vectors v
    of random signs, for all parameters at once, of the mean loss over the first batches of up to 1,000 rows. Batches
    count by their rows.
    """
    parameters = [model.get_parameter(name) for name in names]
    signs = generator(seed, 2, torch.device("cpu"))
    sums, rows = [0.0] * len(names), 0
    for batch in batches:
        if rows >= _ROWS:
            break
        rows += batch.rows
        result = model(*batch.args, **batch.kwargs)
        first = torch.autograd.grad(loss(result, batch.target), parameters, create_graph=True)
        for _ in range(_VECTORS):
            vectors = [
                torch.randint(0, 2, p.shape, generator=signs).mul_(2).sub_(1).to(p.device, p.dtype) for p in parameters
            ]
            along = sum(((g * v).sum() for g, v in zip(first, vectors, strict=True)), start=torch.zeros(()))
            second = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
            for i, (product, v) in enumerate(zip(second, vectors, strict=True)):
                sums[i] += batch.rows * float((product * v).sum())
    return {name: total / (rows * _VECTORS) for name, total in zip(names, sums, strict=True)}


__all__ = ["traces"]
