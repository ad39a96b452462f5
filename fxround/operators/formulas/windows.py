"""Formulas of the windows of spectra (``torch.hann_window`` needs none: PyTorch composes it).

A periodic window of n numbers is the first n of a symmetric one of n + 1. A window of one number is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula

aten = torch.ops.aten


def _window(made: Callable[[Tensor, int], Tensor], n: Any, periodic: bool, options: dict[str, Any]) -> Any:
    """Return the window that ``made`` makes of the numbers 0, 1, ..., last."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    if not isinstance(n, int) or n < 0 or not dtype.is_floating_point:
        return NotImplemented  # PyTorch's own definition raises, or follows a symbolic length
    device = options.get("device")
    if n < 2:
        return torch.ones(n, dtype=dtype, device=device)
    last = n if periodic else n - 1
    return made(torch.arange(last + 1, device=device).to(dtype), last)[:n]


@formula(
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
)
def hamming(n: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any) -> Any:
    """hamming_window(n)_k = cos(k * (2 pi / m)) * -beta + alpha, m = n if it is periodic, else n - 1"""
    return _window(lambda k, m: torch.cos(k * (2 * math.pi / m)) * -beta + alpha, n, periodic, options)


@formula(aten.blackman_window.default, aten.blackman_window.periodic)
def blackman(n: Any, periodic: bool = True, **options: Any) -> Any:
    """blackman_window(n)_k = (cos(4 x) * 0.08 - cos(2 x) * 0.5) + 0.42, x = k * (pi / m)"""

    def made(k: Tensor, m: int) -> Tensor:
        x = k * (math.pi / m)
        return (torch.cos(x * 4) * 0.08 - torch.cos(x * 2) * 0.5) + 0.42

    return _window(made, n, periodic, options)


@formula(aten.bartlett_window.default, aten.bartlett_window.periodic)
def bartlett(n: Any, periodic: bool = True, **options: Any) -> Any:
    """bartlett_window(n)_k = x in the first half, else 2 - x, x = k * (2 / m)"""

    def made(k: Tensor, m: int) -> Tensor:
        x = k * (2 / m)
        return torch.where(torch.arange(m + 1, device=k.device) <= m // 2, x, 2 - x)

    return _window(made, n, periodic, options)


@formula(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser(n: Any, periodic: bool = True, beta: float = 12.0, **options: Any) -> Any:
    """kaiser_window(n)_k = i0(sqrt(max(1 - x * x, 0)) * beta) / i0(beta), x = (k - m / 2) / (m / 2)"""

    def made(k: Tensor, m: int) -> Tensor:
        x = (k - m / 2) / (m / 2)
        whole = torch.full([], beta, dtype=k.dtype, device=k.device)
        return torch.i0((1 - x * x).clamp(min=0).sqrt() * beta) / torch.i0(whole)

    return _window(made, n, periodic, options)
