"""The memory of the process is bounded: tables and plans by bytes, models and graphs by their references."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxround
from fxround.runtime import contractions, memo
from fxround.runtime.contractions import TABLES
from fxround.runtime.cpu import depthwise, matmul

RNG = torch.tensor([3, 1])
TEXTS = ("binary32/nearest_even/inf",) * 2
KEPT = (contractions.offsets, contractions.windows_of, contractions._placed, matmul._bound, depthwise._planned)


def test_a_memo_forgets_what_was_used_longest_ago() -> None:
    made = []

    @memo.by_bytes(4 * 5000)
    def table(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    for size in (3000, 3001, 3002, 3000, 3003, 3004):
        assert table(size).numel() == size
    assert made == [3000, 3001, 3002, 3003, 3004] and table.bytes == 4 * 1024 + sum((3000, 3002, 3003, 3004))
    assert list(table.known) == [(3002,), (3000,), (3003,), (3004,)]
    assert table(90_000) is table(90_000) and table.bytes == 91_024, "the latest value stays, and alone"
    table.cache_clear()
    assert table.bytes == 0 and not table.known


def test_plans_of_many_shapes_hold_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 18
    for cached in KEPT:
        cached.cache_clear()
        assert cached.most == TABLES
        monkeypatch.setattr(cached, "most", most)
    for i in range(12):
        a, b = torch.ones(9, 2), torch.ones(2, 9_000 + i)
        torch.ops.fxround.matmul(a, b, *TEXTS, RNG, 1)
        x, w = torch.ones(1, 1, 1, 9_000 + i), torch.ones(6, 1, 1, 2)
        torch.ops.fxround.convolution(x, w, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *TEXTS, RNG, 1)
        x, w = torch.ones(2, 1, 200, 80 + i), torch.ones(1, 1, 3, 3)
        torch.ops.fxround.convolution(x, w, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *TEXTS, RNG, 1)
    for cached in KEPT[:2] + KEPT[3:]:
        assert cached.known, "nothing was kept"
    for cached in KEPT:
        assert cached.bytes == sum(1024 + memo.held(value) for value, _ in cached.known.values()) <= most


@pytest.mark.part("True")
@pytest.mark.parametrize("training", [False, True])
def test_a_deleted_module_takes_its_model_and_its_graphs_along(training: bool) -> None:
    def used() -> dict[str, weakref.ref[Any]]:
        model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.Softmax(-1))
        model.train(training)
        rounded = fxround.compile(model, "reproducible")
        y = rounded(torch.rand(2, 2, 6))
        if training:
            y.sum().backward()
        latest = rounded._called()
        watched = {"module": rounded, "model": model, "parameter": model[0].weight, "entry": latest}
        graphs = {name: value for name, value in vars(latest).items() if isinstance(value, torch.fx.GraphModule)}
        assert graphs
        return {name: weakref.ref(value) for name, value in (watched | graphs).items()}

    watched = used()
    gc.collect()
    assert [name for name, value in watched.items() if value() is not None] == []


@pytest.mark.parametrize("training", [False, True])
def test_a_dropped_model_takes_its_traces_along(training: bool) -> None:
    def used() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).train(training)
        y = fxround.compile(model, "reproducible")(torch.rand(3, 4))
        if training:
            y.sum().backward()

    def kept() -> int:
        gc.collect()
        return sum(issubclass(type(value), ShapeEnv | FakeTensorMode) for value in gc.get_objects())

    used()
    before = kept()
    for _ in range(2):
        used()
    assert kept() == before
