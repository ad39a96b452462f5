"""Recurrent layers as loops: the formulas of PyTorch's decompositions, with a scan in place of Python's loop.

Cells, projections, directions and layers are PyTorch's. The products of all inputs with a layer's weight are computed
before its loop. So a layer has the bits of the unrolled formulas, and one graph for every length. The steps of a packed
sequence are those of a padded one (``packed``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.capture.loops import one_by_one, scan
from fxround.capture.packed import Places, begun, row, spread, taken
from fxround.capture.torch_private import recurrent_formulas, replaced_layers

Body = Callable[..., list[Tensor]]


@contextlib.contextmanager
def recurrent_layers(loops: bool) -> Iterator[None]:
    """Let PyTorch's decompositions of LSTM, GRU and RNN run their steps as loops, or unroll them."""
    run, formulas = scan if loops else one_by_one, recurrent_formulas()

    def lstm(
        inp: Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False, batch_sizes: Any = None
    ) -> Any:
        weight, bias = params[1], params[3] if has_biases else None
        projection = params[4] if len(params) == 5 else params[2] if len(params) == 3 else None

        def step(state: list[Tensor], x: Tensor, given: list[Tensor | None]) -> list[Tensor]:
            states: tuple[Tensor, Tensor] = formulas.lstm_cell(x, *state, *given, chunk_dim=2)
            return list(states)

        given = [weight, bias, projection]
        out, last = _rows(run, inp, params, has_biases, reverse, list(hidden), step, given, batch_sizes)
        return out, tuple(last)

    def rnn(
        inp: Tensor,
        hidden: Tensor,
        params: Any,
        has_biases: bool,
        hidden_fn: Any,
        reverse: bool = False,
        batch_sizes: Any = None,
    ) -> Any:
        # A cell is given the weight and the bias of its inputs too, and does not read them.
        def step(state: list[Tensor], x: Tensor, given: list[Tensor | None]) -> list[Tensor]:
            weight, bias = given
            return [hidden_fn(x, state[0], None, None, weight, bias)]

        given = [params[1], params[3] if has_biases else None]
        out, last = _rows(run, inp, params, has_biases, reverse, [hidden], step, given, batch_sizes)
        return out, last[0]

    packed: dict[str, Any] = {
        "one_layer_lstm_data": lstm,
        "one_layer_rnn_data": rnn,
        "_rnn_helper": functools.partial(_layers, not loops),
    }
    # The input of a packed layer's cell is multiplied by its weight before the loop, as that of any other layer.
    packed |= {"gru_cell_data": formulas.gru_cell, "rnn_cell_data": formulas.rnn_cell}
    padded: dict[str, Any] = {"one_layer_lstm": lstm, "one_layer_rnn": rnn} if loops else {}
    with replaced_layers(packed | padded):
        yield


def _layers(
    unrolled: bool,
    inp: Tensor,
    hidden: Sequence[Any],
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Any,
) -> tuple[Tensor, list[Any]]:
    """Run all layers and directions, as PyTorch's helper of this signature.

    PyTorch's helper never applies dropout: its condition is that the layer has a number above that of all layers.
    """
    inp = inp.transpose(0, 1) if batch_first else inp
    sizes = getattr(layer_fn, "keywords", {}).get("batch_sizes")
    known = {}
    if sizes is not None:
        batch = pytree.tree_leaves(hidden[0])[0].shape[0]
        known["batch_sizes"] = Places.of(sizes, inp.shape[0], batch, inp.device, unrolled)
    directions, last = 1 + bidirectional, []
    for i in range(num_layers):
        if i and dropout and train:
            inp = torch.dropout(inp, dropout, train=True)
        both = [
            layer_fn(inp, hidden[k], params[k], has_biases, reverse=k % directions == 1, **known)
            for k in range(directions * i, directions * (i + 1))
        ]
        last += [state for _, state in both]
        inp = torch.cat([out for out, _ in both], -1) if bidirectional else both[0][0]
    return (inp.transpose(0, 1) if batch_first else inp), last


def _rows(
    run: Callable[..., Any],
    inp: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
    state: list[Tensor],
    step: Body,
    given: list[Tensor | None],
    packed: Places | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the first part of the state after each step, and the last state.

    state: tensors of shape [batch, width].
    """
    inputs = F.linear(inp, params[0], params[2] if has_biases else None)
    state = [part.unsqueeze(0) for part in state]
    if packed is None:
        rows, last = _loop(run, inputs.flip(0) if reverse else inputs, state, step, given)
        out = torch.cat([rows[0], last[0]])
        return (out.flip(0) if reverse else out), [part.squeeze(0) for part in last]
    places = packed.reverse if reverse else packed.forward
    inputs = spread(inputs, places, *packed.inside.shape)
    rows, last = _loop(run, inputs, state, step, given, packed.inside)
    whole = [torch.cat(parts) for parts in zip(rows, last, strict=True)]
    # -0 is no gradient: added to a gradient it changes no bit of it.
    return taken(whole[0], places), [taken(part, packed.last, -0.0) for part in whole]


def _loop(
    run: Callable[..., Any],
    inputs: Tensor,
    state: list[Tensor],
    step: Body,
    given: list[Tensor | None],
    inside: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of the state after each step except the last, and the last state.

    inside: for packed sequences, bool of shape [steps, batch], whether a sequence has this step. Without it only the
    first part of the state has rows.
    """
    present, count = [x is not None for x in given], len(state)
    xs = [inputs] if inside is None else [inputs, inside]

    def body(*args: Tensor) -> list[Tensor]:
        others = iter(args[count + len(xs) :])
        before = list(args[:count])
        known = before if inside is None else [begun(part, args[count + 1]) for part in before]
        following = step(known, args[count], [next(others) if p else None for p in present])
        if inside is None:
            return [*following, before[0].clone()]
        return [*following, *(row(k, part, args[count + 1]) for k, part in zip(known, before, strict=True))]

    # A step returns the state that it was given, not the next one: then the gradients of a state are added in the order
    # of the unrolled formulas, that of the layer's result first.
    computed = run(body, state, xs, [x for x in given if x is not None])
    return [rows.squeeze(1)[1:] for rows in computed[count:]], list(computed[:count])
