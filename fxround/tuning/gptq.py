"""GPTQ: the columns of a weight are rounded in turn, and the error of each is made up for by those that follow.

Source: Frantar, Ashkboos, Hoefler and Alistarh, GPTQ: Accurate post-training quantization for generative pre-trained
transformers, ICLR 2023, section 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxround.errors import shown
from fxround.significance.inputs import positive
from fxround.tuning.choices import require_positive
from fxround.tuning.grid import Grid
from fxround.tuning.products import require_matrices
from fxround.tuning.task import Task


@dataclass(frozen=True)
class GPTQ:
    """Minimize the squared error of each product, one column of its weight after the other.

    damp       this part of the mean of H's diagonal is added to it, more than 0
    act_order  whether columns are rounded in the order of their inputs' squares, the largest first; else as they are
    block      columns whose errors reach the rest of the weight together, which saves time and changes rounding errors
               of binary64 alone

    H is the sum of x x^T over the inputs x of a product, of a model whose earlier weights are rounded, in binary64.
    With U the upper Cholesky factor of the inverse of H, column i becomes the nearest value q of the grid of w_i, which
    is rounded to the weight's dtype first, and (w_i - q) U_ij / U_ii is subtracted from each later column j. Scales are
    those of the weight as it was trained. A column whose inputs are all zero is rounded to nearest.
    """

    damp: float = 0.01
    act_order: bool = False
    block: int = 128

    def __post_init__(self) -> None:
        positive("block", self.block)
        require_positive(damp=self.damp)
        if not isinstance(self.act_order, bool):
            raise TypeError(f"act_order is {shown(self.act_order)}; expected True or False")

    def count(self, task: Task) -> int:
        """Return the number of weights."""
        return len(task.weights)

    def run(self, task: Task) -> Iterator[None]:
        """Round the weights in the order in which the model reads them."""
        for products in task.stream(task.model):
            name = require_matrices(products, task.done)
            weight, index = task.weights[name], products[0].weight_matrices()
            hessian = torch.zeros(len(index), *2 * [index.shape[-1]], dtype=torch.float64, device=index.device)
            for product in products:
                x = product.finite_inputs().double()
                hessian += x.transpose(1, 2) @ x
            value = weight.value.flatten().clone()
            for rows, h in zip(index, hessian, strict=True):
                value[rows] = self.rounded(weight.value.flatten()[rows], h, weight.grid.at(rows))
            task.write(name, value.view(weight.value.shape))
            yield

    def rounded(self, weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        """Return a weight of shape [rows, n] on its grid.

        hessian: [n, n], float64. grid: with scales of the weight's shape. Raises ValueError if the Hessian with
        ``damp`` is not positive definite in binary64.
        """
        h, w = hessian.clone(), weight.double()
        diagonal = h.diagonal()
        diagonal[diagonal == 0] = 1.0
        order = torch.argsort(diagonal, descending=True, stable=True) if self.act_order else torch.arange(len(h))
        order = order.to(h.device)
        h, w = h[order][:, order], w[:, order]
        scales = [scale[:, order] for scale in grid.scales]
        h.diagonal().add_(self.damp * h.diagonal().mean())
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
            upper = torch.linalg.cholesky(inverse, upper=True)
        except RuntimeError as failed:
            raise ValueError(f"the sum of x x^T is not positive definite with damp={self.damp}; use more") from failed
        kept = torch.empty_like(weight)
        for start in range(0, len(h), self.block):
            end = min(start + self.block, len(h))
            errors = torch.empty_like(w[:, start:end])
            for i in range(start, end):
                own = replace(grid, scales=tuple(scale[:, i].contiguous() for scale in scales))
                q = own.nearest(w[:, i].to(weight.dtype).contiguous())
                error = (w[:, i] - q.double()) / upper[i, i]
                w[:, i + 1 : end] -= torch.outer(error, upper[i, i + 1 : end])
                errors[:, i - start], kept[:, i] = error, q
            w[:, end:] -= errors @ upper[start:end, end:]
        return kept[:, torch.argsort(order)]
