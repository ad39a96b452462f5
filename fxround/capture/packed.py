"""Packed sequences as ATen operators: padded loops whose rows are taken from, and returned to, the packed tensor.

The number of sequences at a step is data, so that PyTorch's formulas of packed layers need one graph for each set of
lengths. Here a layer computes all sequences at every step. A sequence that has ended reads zeros and begins from a zero
state, and nothing reads its results. So one graph serves all lengths, and a sequence has the bits that it has alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxround.capture.traced_packing import declare_batch_sizes, most_rows, traced_packing
from fxround.graph.dialect import PackedLengths
from fxround.graph.values import instances_in

aten = torch.ops.aten


@dataclass(frozen=True)
class Places:
    """Where the rows of a packed tensor are among the rows of a padded one, of ``steps * batch`` rows.

    forward    int64 [rows]: the place of each row if every sequence is read from its first step
    reverse    int64 [rows]: the same if every sequence is read from its last step
    last       int64 [batch]: the place of each sequence's last row, in either order
    inside     bool [steps, batch]: whether a place has a row
    """

    forward: Tensor
    reverse: Tensor
    last: Tensor
    inside: Tensor

    @staticmethod
    def of(batch_sizes: Tensor, rows: Any, batch: Any, device: torch.device, unrolled: bool = False) -> Places:
        """Return the places for the number of sequences at each step, int64 of shape [steps].

        unrolled: whether the number of steps must not come from data; steps without any sequence are added then.
        """
        sizes = batch_sizes.to(device)
        if unrolled:
            added = torch.arange(batch_sizes.shape[0], device=device)
            sizes = _spread(sizes, added, most_rows(batch_sizes), 0)
        step = torch.repeat_interleave(sizes, output_size=rows)
        lane = torch.arange(rows, device=device) - (sizes.cumsum(0) - sizes).index_select(0, step)
        lanes = torch.arange(batch, device=device)
        inside = lanes < sizes.unsqueeze(1)
        end = inside.sum(0) - 1
        reverse = (end.index_select(0, lane) - step) * batch + lane
        return Places(step * batch + lane, reverse, end * batch + lanes, inside)


class _Taken(torch.autograd.Function):
    """Rows at different places; the gradient of every other row is ``fill``."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, places: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows, ctx.fill = wide.shape[0], fill
        return wide.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _spread(gradient, ctx.saved_tensors[0], ctx.rows, ctx.fill), None, None


class _Spread(torch.autograd.Function):
    """Rows put to different places among ``count`` rows of ``fill``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: Any, fill: float) -> Tensor:
        ctx.save_for_backward(places)
        return _spread(rows, places, count, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None, None


class _Begun(torch.autograd.Function):
    """A state where ``inside`` is true, and zero elsewhere.

    The gradient of a state that is not used is -0, which added to any number is that number.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return torch.where(inside, state, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.where(ctx.saved_tensors[0], gradient, -0.0), None


class _Row(torch.autograd.Function):
    """The state that a step was given: ``begun`` of it where ``inside`` is true, so that all gradients meet there."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, state: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return torch.where(inside, begun, state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inside = ctx.saved_tensors[0]
        return torch.where(inside, gradient, -0.0), torch.where(inside, -0.0, gradient), None


def _spread(rows: Tensor, places: Tensor, count: Any, fill: float) -> Tensor:
    return rows.new_full((count, *rows.shape[1:]), fill).index_copy(0, places, rows)


def taken(wide: Tensor, places: Tensor, fill: float = 0.0) -> Tensor:
    """Return the rows of a tensor of shape [steps, batch, ...] at places that are all different."""
    result: Tensor = _Taken.apply(wide.flatten(0, 1), places, fill)  # type: ignore[no-untyped-call]
    return result


def spread(rows: Tensor, places: Tensor, steps: Any, batch: Any, fill: float = 0.0) -> Tensor:
    """Return a tensor of shape [steps, batch, ...] with the rows at their places, and ``fill`` elsewhere."""
    result: Tensor = _Spread.apply(rows, places, steps * batch, fill)  # type: ignore[no-untyped-call]
    wide: Tensor = result.unflatten(0, (steps, batch))
    return wide


def begun(state: Tensor, inside: Tensor) -> Tensor:
    """Return the state of the sequences that have not ended, and zero for the others. inside: bool [batch]."""
    result: Tensor = _Begun.apply(state, inside.unsqueeze(1))  # type: ignore[no-untyped-call]
    return result


def row(begun: Tensor, state: Tensor, inside: Tensor) -> Tensor:
    """Return a copy of the state, whose gradient is added to the others of ``begun(state, inside)``."""
    result: Tensor = _Row.apply(begun, state, inside.unsqueeze(1))  # type: ignore[no-untyped-call]
    return result


def pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the packed rows and the number of sequences at each step, as PyTorch's ``_pack_padded_sequence``.

    PyTorch's own kernel packs the numbers of the rows, and raises what it raises for the lengths. A length above the
    padded number of steps, for which it would read other memory, is refused before.
    """
    wide = padded.transpose(0, 1) if batch_first else padded
    steps, batch = wide.shape[:2]
    numbers = torch.arange(steps * batch).unflatten(0, (steps, batch))
    checked = PackedLengths.overload(lengths, numbers)
    places, sizes = aten._pack_padded_sequence.default(numbers, checked, False)
    torch._check(sizes.shape[0] <= steps, lambda: "a length of a packed sequence is above the padded number of steps")
    declare_batch_sizes(sizes, batch, steps)
    return taken(wide, places.to(padded.device)), sizes


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the padded tensor and the lengths, as PyTorch's ``_pad_packed_sequence``."""
    batch = batch_sizes[0].item()
    places = Places.of(batch_sizes, data.shape[0], batch, data.device)
    steps = total_length if total_length > 0 else batch_sizes.shape[0]
    wide = spread(data, places.forward, steps, batch, float(padding_value))
    return (wide.transpose(0, 1) if batch_first else wide), places.inside.sum(0).to(batch_sizes.device)


def as_tuples(values: Any) -> Any:
    """Return arguments with a plain tuple in place of each packed sequence, which may hold anything."""
    if isinstance(values, PackedSequence):
        return tuple(values)
    if type(values) in (tuple, list):
        return type(values)(as_tuples(value) for value in values)
    return {name: as_tuples(value) for name, value in values.items()} if type(values) is dict else values


def packed_sequences(args: Any = ()) -> contextlib.AbstractContextManager[None]:
    """Let Dynamo trace packed sequences, those among the arguments with their number of sequences as a constant."""
    kernels: Any = torch._VF
    known = [(x.batch_sizes, int(x.batch_sizes[0])) for x in instances_in(args, PackedSequence)]
    return traced_packing({kernels._pack_padded_sequence: pack, kernels._pad_packed_sequence: pad}, known)
