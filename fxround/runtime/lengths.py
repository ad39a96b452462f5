"""The check of the lengths of sequences, before PyTorch's kernel packs them."""

from __future__ import annotations

from torch import Tensor

from fxround.graph.dialect import PackedLengths


def packed_lengths(call: PackedLengths[Tensor]) -> Tensor:
    """Return a copy of the lengths. Raises RuntimeError, as PyTorch does for lengths, for one above the padded steps.

    PyTorch's kernel would read memory that is not the padded tensor's.
    """
    lengths = call.fake()
    lengths.copy_(call.lengths)
    steps = call.padded.shape[0]
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > steps:
        raise RuntimeError(
            f"pack_padded_sequence: a sequence has length {longest}, but the padded tensor has {steps} steps. Expected "
            f"lengths from 1 to {steps}: shorten the sequence, or pad all of them to {longest} steps."
        )
    return lengths
