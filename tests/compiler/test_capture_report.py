"""Captures: one graph serves every length, batch and cache, with the bits of a graph of its own; the table says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround


def reasons(compiled: fxround.RoundedModule) -> list[str]:
    return [str(row["reason"]) for row in compiled.captures()]


class Tokens(nn.Module):
    """Attention over the tokens of a text, as far as lengths are concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        scores = self.fc(x) @ x.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return torch.softmax(scores, -1) @ x


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(length))


def test_one_graph_serves_every_length_and_batch_of_tokens_with_the_bits_of_its_own() -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    compiled = fxround.compile(model, "stochastic", seed=3)
    with torch.no_grad():
        for batch, length in ((2, 5), (1, 7), (4, 4)):
            given = tokens(batch, length), torch.ones(batch, length, dtype=torch.bool)
            assert torch.equal(compiled(*given), fxround.compile(model, "stochastic", seed=3)(*given))
    assert reasons(compiled) == ["first call"]
    (row,) = compiled.captures()
    assert row["arguments"] == "int64[a, b], bool[a, b]" and row["mode"] == "eval"
    # A training step is another graph, for every length too.
    for length in (4, 6):
        compiled.zero_grad()
        compiled.train()(tokens(2, length)).sum().backward()
    assert reasons(compiled)[1:] == ["other arguments: argument 0"]


def test_a_dimension_of_floats_that_has_changed_stays_free() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1)).eval()
    compiled = fxround.compile(model, "stochastic", seed=3)
    with torch.no_grad():
        for height, width in ((8, 8), (9, 7), (12, 10)):
            x = torch.rand(2, 1, height, width)
            assert torch.equal(compiled(x), fxround.compile(model, "stochastic", seed=3)(x))
    assert reasons(compiled) == ["first call", "argument 0 has size 9 in dimension 2; the graph before has 8"]


class Cache:
    """Keys of the tokens so far, in an object that a graph cannot hold."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Remembering(nn.Module):
    """A decoder's step: tokens see the keys of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        key = self.fc(x)
        cache.keys[:] = [torch.cat([*cache.keys, key], 1)]
        return torch.softmax(x @ cache.keys[0].mT, -1) @ cache.keys[0]


def test_one_graph_serves_every_length_of_a_cache() -> None:
    torch.manual_seed(0)
    model = Remembering().eval()
    compiled = fxround.compile(model, "stochastic", seed=3)
    with torch.no_grad():
        # The first prompt's batch and length are equal, which must not be taken for a condition.
        for batch, length in ((4, 4), (2, 6)):
            cache, own = Cache(), Cache()
            alone = fxround.compile(model, "stochastic", seed=3)
            for steps in (length, 1, 1):
                x = torch.randn(batch, steps, 4)
                assert torch.equal(compiled(x, cache), alone(x, own)) and torch.equal(cache.keys[0], own.keys[0])
    first, second = compiled.captures()
    assert first["arguments"] == "float32[a, b, 4]" and first["reason"] == "first call"
    assert second["arguments"] == "float32[a, 1, 4], float32[a, b, 4]" and "cache" in str(second["reason"])


def test_sizes_that_cannot_be_symbols_are_numbers() -> None:
    def combined(x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(x)
        return x * math.comb(x.shape[1], 2)

    compiled = fxround.compile(combined, "reproducible")
    for length in (4, 6, 4):
        x, cache = torch.rand(3, length), Cache()
        assert torch.equal(compiled(x, cache), x * math.comb(length, 2)) and len(cache.keys) == 1
    assert [row["arguments"] for row in compiled.captures()] == ["float32[3, 4]", "float32[3, 6]"]


def changed(model: Any) -> dict[str, tuple[Callable[[], Any], str]]:
    x = torch.rand(2, 3)
    return {
        "dtype": (
            lambda: (x.half(), 2.0),
            "argument 0 is float16 of 2 dimensions; before, it was float32 of 2 dimensions",
        ),
        "value": (lambda: (x, 3.0), "argument 1 is 3.0; before, it was 2.0"),
        "kind": (lambda: (x, None), "argument 1 is None; before, it was 2.0"),
        "arguments": (lambda: (x,), "other arguments: argument 0"),
        "attribute": (lambda: setattr(model, "scale", 4.0) or (x, 2.0), "self.scale has changed"),
        "mode": (lambda: model.train() and (x, 2.0), "Scaling is in training mode"),
        "gradients": (lambda: (x.clone().requires_grad_(), 2.0), "argument 0 is float32 of 2 dimensions that wants"),
        "hook": (
            lambda: model.register_forward_hook(lambda *given: None) and (x, 2.0),
            "hooks of Scaling have changed",
        ),
        "module": (lambda: setattr(model, "inner", nn.ReLU()) or (x, 2.0), "Identity was replaced by another module"),
        "state": (lambda: setattr(model, "w", nn.Parameter(torch.ones(1))) or (x, 2.0), "parameters or buffers have"),
    }


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.w = 3.0, nn.Identity(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, factor: float | None = 1.0) -> Tensor:
        return self.inner(x * self.scale * (factor or 1.0) + self.w.sum().to(x.dtype))


@pytest.mark.part(2)
@pytest.mark.parametrize("what", list(changed(Scaling())))
def test_the_table_says_what_an_earlier_graph_did_not_admit(what: str) -> None:
    model = Scaling().eval()
    compiled = fxround.compile(model, "reproducible", strict=False)
    with torch.no_grad():
        compiled(torch.rand(2, 3), 2.0)
    change, said = changed(model)[what]
    with torch.set_grad_enabled(what == "gradients"):
        compiled(*change())
    assert reasons(compiled)[0] == "first call" and reasons(compiled)[-1].startswith(said)
    assert compiled.with_policy("stochastic", strict=False).captures().rows == compiled.captures().rows
