"""Packed sequences run as loops: one graph for all lengths, and for each sequence the bits that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

import fxround


class Padded(nn.Module):
    """A recurrent layer of a padded tensor and the lengths of its sequences."""

    def __init__(self, layer: nn.RNNBase, enforce_sorted: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, lengths: Tensor, state: Any = None) -> Any:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, first, self.enforce_sorted)
        out, last = self.layer(packed, state)
        padded, _ = pad_packed_sequence(out, first, total_length=x.shape[int(first)])
        return padded, last


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _step(compiled: nn.Module, x: Tensor, rest: tuple[Any, ...], state: Any, weight: Tensor) -> list[Tensor]:
    """Return results, and the gradients of the input and of the initial state. weight: of the results, as of x."""
    own = pytree.tree_map(lambda t: t.detach().clone().requires_grad_(), (x, state))
    out, last = compiled(own[0], *rest, own[1])
    # Every element of a result has a gradient of its own; those of the last state are 1.
    ((out * weight).sum() + sum(part.sum() for part in pytree.tree_leaves(last))).backward()
    return [out.detach(), *(p.detach() for p in pytree.tree_leaves(last)), *(p.grad for p in pytree.tree_leaves(own))]


@pytest.mark.part("GRU")
@pytest.mark.parametrize(
    "layer, policy",
    [
        (nn.LSTM(3, 4, proj_size=2), "reproducible"),
        (nn.GRU(3, 2), "bfloat16"),
    ],
    ids=["LSTM", "GRU"],
)
def test_a_sequence_has_the_bits_that_it_has_alone(layer: nn.RNNBase, policy: str) -> None:
    torch.manual_seed(0)
    sort = isinstance(layer, nn.GRU)
    lengths = [6, 4, 2] if sort else [4, 6, 2]
    width, states = layer.proj_size or layer.hidden_size, layer.num_layers * (1 + layer.bidirectional)
    x, weight = torch.randn(6, 3, 3), torch.randn(6, 3, width * (1 + layer.bidirectional))
    hidden = torch.randn(states, 3, width)
    state = (hidden, torch.randn(states, 3, layer.hidden_size)) if isinstance(layer, nn.LSTM) else hidden
    together, alone = fxround.compile(Padded(layer, sort), policy), fxround.compile(layer, policy)
    found = _step(together, x, (torch.tensor(lengths),), state, weight)
    for i, n in enumerate(lengths):
        own = pytree.tree_map(lambda t: t[:, i : i + 1], state)  # noqa: B023 (called here)
        expected = _step(alone, x[:n, i : i + 1], (), own, weight[:n, i : i + 1])
        for whole, single in zip(found, expected, strict=True):
            part = whole[:, i : i + 1]
            assert torch.equal(_bits(part[: len(single)]), _bits(single))
            assert not part[len(single) :].any()


def test_one_graph_serves_all_lengths_and_gradients_of_weights_are_exact() -> None:
    """The numbers are whole and small, so that PyTorch's own results are exact."""
    torch.manual_seed(0)
    model = Padded(nn.RNN(2, 3, 2, nonlinearity="relu", bidirectional=True, batch_first=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    compiled = fxround.compile(model, "reproducible")
    x = torch.randint(-2, 3, (3, 5, 2)).float()
    for lengths in ([5, 2, 1], [5, 5, 5], [1, 1, 1], [2, 1, 4]):
        found = []
        for module in (compiled, model):
            module.zero_grad()
            out, last = module(x, torch.tensor(lengths))
            (out.sum() + last.square().sum()).backward()
            found.append([out, last, *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
        assert max(float(t.detach().abs().max()) for t in found[1]) < 2**20
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), lengths
    assert len(compiled.captures()) == 1
    for wrong, message in (
        ([5, 0, 1], "greater than 0"),
        ([10**9, 2, 1], "has length 1000000000, but the padded tensor has 5 steps. Expected lengths from 1 to 5"),
    ):
        with pytest.raises(RuntimeError, match=message):
            compiled(x, torch.tensor(wrong))


@pytest.mark.part("True")
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_are_arguments_and_results(enforce_sorted: bool, tmp_path: Path) -> None:
    layer = nn.GRU(2, 3)
    compiled = fxround.compile(layer, "stochastic" if enforce_sorted else "reproducible")
    x = torch.rand(5, 3, 2)

    def packed(*lengths: int) -> PackedSequence:
        given = lengths if enforce_sorted else lengths[::-1]
        return pack_padded_sequence(x[:, : len(lengths)], torch.tensor(given), enforce_sorted=enforce_sorted)

    with torch.no_grad():
        for lengths in ([5, 2, 1], [3, 3, 3], [1, 1, 1]):
            argument = packed(*lengths)
            out, last = compiled(argument)
            assert type(out) is PackedSequence and torch.equal(out.batch_sizes, argument.batch_sizes)
            ends = pad_packed_sequence(out)[1] - 1
            assert torch.equal(last[0], pad_packed_sequence(out)[0][ends, torch.arange(3)])
        assert len(compiled.captures()) == 1
        compiled(packed(2, 1))
        assert list(compiled.captures())[1]["reason"] == "a packed sequence of 2 sequences; before, it had 3"
        loaded = fxround.load(compiled.export(tmp_path / "gru.pt2", (packed(5, 2, 1),)))
        again, expected = loaded(packed(4, 4, 2)), compiled(packed(4, 4, 2))
        assert type(again[0]) is PackedSequence
        assert torch.equal(again[0].data, expected[0].data) and torch.equal(again[1], expected[1])


def test_sequences_are_packed_and_padded_as_by_pytorch() -> None:
    """Nothing is rounded: the results are copies."""

    def moved(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        several = pack_sequence([x[:, 0], x[:3, 1]])
        wide = pad_packed_sequence(packed, batch_first=True, padding_value=-1.5, total_length=7)
        return packed, wide, unpack_sequence(several), several

    x, lengths = torch.randn(5, 3, 2), torch.tensor([2, 5, 1])
    found = pytree.tree_leaves(fxround.compile(moved, "reproducible")(x, lengths))
    expected = pytree.tree_leaves(moved(x, lengths))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if b is not None)
    with pytest.raises(RuntimeError, match="must be sorted in decreasing order"):
        fxround.compile(lambda x, n: pack_padded_sequence(x, n).data * 2, "reproducible")(x, lengths)


@pytest.mark.long
def test_unrolled_layers_have_the_bits_of_loops() -> None:
    torch.manual_seed(0)
    model, x = Padded(nn.RNN(2, 3)), torch.rand(3, 2, 2)
    looped = fxround.compile(model, "bfloat16")
    unrolled = fxround.compile(model, "bfloat16", unroll_loops=True)
    with torch.no_grad():
        for lengths in ([3, 1], [1, 2]):
            results = [pytree.tree_leaves(c(x, torch.tensor(lengths))) for c in (looped, unrolled)]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert not any("scan" in row.operator for row in unrolled.summary().operations)
        # A delayed scale needs unrolled steps.
        assert fxround.compile(model, "fp8_delayed")(x, torch.tensor([3, 1]))[0].isfinite().all()


@pytest.mark.part("False")
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_applies_between_layers_in_training(packed: bool) -> None:
    """Two layers that return positive inputs: each result is 0, or twice its input."""
    layer = nn.RNN(8, 8, 2, nonlinearity="relu", bias=False, dropout=0.5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.eye(8) if "_ih_" in name else torch.zeros(8, 8))
    x = torch.randint(1, 9, (4, 3, 8)).float()
    compiled = fxround.compile(Padded(layer) if packed else layer, "reproducible")
    given = (x, torch.tensor([4, 4, 4])) if packed else (x,)
    out = compiled(*given)[0]
    assert ((out == 0) | (out == 2 * x)).all() and 8 < int((out == 0).sum()) < 88
    assert torch.equal(compiled.eval()(*given)[0], x)
