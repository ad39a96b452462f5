"""Recurrent layers as loops: the formulas of PyTorch's decompositions, with a scan in place of Python's loop.

Cells, projections, directions and layers are PyTorch's. The products of all inputs with a layer's weight are computed
before its loop. So a layer has the bits of the unrolled formulas, and one graph for every length. A packed sequence,
whose batch changes from step to step, is unrolled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxround.capture.loops import scan
from fxround.capture.torch_private import lstm_cell, replaced_layers


@contextlib.contextmanager
def recurrent_loops() -> Iterator[None]:
    """Let PyTorch's decompositions of LSTM, GRU and RNN run their steps as loops."""

    def lstm(inp: Tensor, hidden: Any, params: Sequence[Tensor], has_biases: bool, reverse: bool = False) -> Any:
        weight, bias = params[1], params[3] if has_biases else None
        projection = params[4] if len(params) == 5 else params[2] if len(params) == 3 else None

        def step(state: list[Tensor], x: Tensor, given: list[Tensor | None]) -> list[Tensor]:
            found: tuple[Tensor, Tensor] = lstm_cell()(x, *state, *given, chunk_dim=2)
            return list(found)

        state = [part.unsqueeze(0) for part in hidden]
        out, last = _rows(inp, params, has_biases, reverse, state, step, [weight, bias, projection])
        return out, tuple(part.squeeze(0) for part in last)

    def rnn(inp: Tensor, hidden: Tensor, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False) -> Any:
        # A cell is given the weight and the bias of its inputs too, and does not read them.
        biases = (params[2], params[3]) if has_biases else (None, None)

        def step(state: list[Tensor], x: Tensor, given: list[Tensor | None]) -> list[Tensor]:
            weight, bias = given
            return [hidden_fn(x, state[0], None, None, weight, bias)]

        out, last = _rows(inp, params, has_biases, reverse, [hidden.unsqueeze(0)], step, [params[1], biases[1]])
        return out, last[0].squeeze(0)

    with replaced_layers(lstm, rnn):
        yield


def _rows(
    inp: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
    state: list[Tensor],
    step: Callable[..., list[Tensor]],
    given: list[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """Return the first part of the state after each step, and the last state."""
    inputs = F.linear(inp, params[0], params[2] if has_biases else None)
    inputs = inputs.flip(0) if reverse else inputs
    present = [x is not None for x in given]

    def body(*args: Tensor) -> list[Tensor]:
        others = iter(args[len(state) + 1 :])
        following = step(list(args[: len(state)]), args[len(state)], [next(others) if p else None for p in present])
        return [*following, args[0].clone()]

    # A step returns the state that it was given, not the next one: then the gradients of a state are added in the order
    # of the unrolled formulas, that of the layer's result first.
    *last, rows = scan(body, state, [inputs], [x for x in given if x is not None])
    out = torch.cat([rows.squeeze(1)[1:], last[0]])
    return (out.flip(0) if reverse else out), last
