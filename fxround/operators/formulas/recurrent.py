"""Formulas of one step of a recurrent network: the cells of GRU and LSTM.

PyTorch computes a cell by several operators on the CPU and by a kernel of its own on CUDA devices. The formulas are
those of the CPU, so that a cell has one graph. Layers of whole sequences are loops (``capture.recurrent``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxround.operators.formulas.table import formula


@formula(torch.gru_cell)
def gru_cell(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """gru_cell(x, h) = (h - n) * z + n; n = tanh(a + b * r); r, z = sigmoid(b + a); a = linear(x), b = linear(h)"""
    a_r, a_z, a_n = F.linear(x, w_ih, b_ih).chunk(3, 1)
    b_r, b_z, b_n = F.linear(h, w_hh, b_hh).chunk(3, 1)
    r = torch.sigmoid(b_r + a_r)
    z = torch.sigmoid(b_z + a_z)
    n = torch.tanh(a_n + b_n * r)
    return (h - n) * z + n


@formula(torch.lstm_cell)
def lstm_cell(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """lstm_cell(x, h, c) = o * tanh(f * c + i * g); i, f, o = sigmoid(a); g = tanh(a); a = linear(h) + linear(x)"""
    h, c = state
    a = F.linear(h, w_hh, b_hh) + F.linear(x, w_ih, b_ih)
    a_i, a_f, a_g, a_o = a.chunk(4, 1)
    i, f, g, o = torch.sigmoid(a_i), torch.sigmoid(a_f), torch.tanh(a_g), torch.sigmoid(a_o)
    after = f * c + i * g
    return o * torch.tanh(after), after
