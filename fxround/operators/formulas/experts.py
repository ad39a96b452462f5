"""Formulas of products in groups of rows: mixtures of experts, whose rows are sorted by expert.

The number of rows of a group is data, so that a group is no dimension: each row is multiplied by the matrix of its own
group, which costs the memory of one matrix for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula

aten = torch.ops.aten


@formula(aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """grouped_mm(a, b)_i = mm(a_i as a row, b_g), g the group of row i; 0 for rows beyond the last group"""
    if bias is not None or out_dtype not in (None, a.dtype):
        return NotImplemented
    if offs is None or (a.dim(), b.dim()) not in ((2, 3), (2, 2)):
        return torch.bmm(a, b) if offs is None and a.dim() == b.dim() == 3 else NotImplemented
    if b.dim() == 2:
        return _by_terms(a, b, offs)
    group, groups = _groups(offs, a.shape[0]), b.shape[0]
    product = torch.bmm(a.unsqueeze(1), b[group.clamp(max=groups - 1)]).squeeze(1)
    return torch.where((group < groups).unsqueeze(1), product, 0.0)


@formula("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(a: Tensor, b: Tensor, offs: Tensor, gradient: Tensor) -> tuple[Any, Any]:
    """grouped_mm_backward(g) = (grouped_mm(g, b^T), mm(a^T, g) with 0 for the rows of other groups)"""
    return grouped_mm(gradient, b.transpose(1, 2), offs), _by_terms(a.t(), gradient, offs)


def _by_terms(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return one product [m, n] for each group of the terms k of a [m, k] and b [k, n]; other terms are 0."""
    mine = _groups(offs, b.shape[0]) == torch.arange(offs.shape[0], device=offs.device).unsqueeze(1)
    return torch.bmm(torch.where(mine.unsqueeze(1), a, 0.0), torch.where(mine.unsqueeze(2), b, 0.0))


def _groups(offs: Tensor, rows: Any) -> Tensor:
    """Return the group of each row; the number of groups for rows beyond the last."""
    return torch.searchsorted(offs, torch.arange(rows, dtype=offs.dtype, device=offs.device), right=True)
