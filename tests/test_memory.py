"""The memory of the process is bounded: tables and plans by bytes, models and graphs by their references."""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.guards import code_framelocals_names_reversed_cached
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

import fxround
from fxround.runtime import contractions, memo
from fxround.runtime.contractions import TABLES
from fxround.runtime.cpu import matmul, planes
from fxround.runtime.cpu.plans.straight import StraightPlanner

RNG = torch.tensor([3, 1])
TEXTS = ("binary32/nearest_even/inf",) * 2
KEPT = (contractions.offsets, contractions.windows_of, contractions._placed, matmul._bound, planes._planned)


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


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class _Scaled(nn.Module):
    """A number that is an input of the graph once it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class _Branching(nn.Module):
    """A model that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def _evaluated(_: Path) -> None:
    fxround.compile(_layers().eval(), "reproducible")(torch.rand(3, 4))


def _trained(_: Path) -> None:
    fxround.compile(_layers(), "reproducible")(torch.rand(3, 4)).sum().backward()


def _differentiated_twice(_: Path) -> None:
    _twice(fxround.compile(_layers(), "reproducible"), torch.rand(3, 4))


def _called_with_numbers(_: Path) -> None:
    model = _Scaled()
    compiled = fxround.compile(model, "reproducible")
    for scale in (1.0, 2.0, 3.0):
        model.scale = scale
        compiled(torch.rand(3, 4))
    assert len(compiled.captures()) == 2


def _refused(_: Path) -> None:
    with pytest.raises(fxround.CaptureError):
        fxround.compile(_Branching(), "reproducible")(torch.rand(3, 4))


def _exported_and_loaded(folder: Path) -> None:
    fxround.compile(_layers(), "reproducible").export(folder / "m.pt2", torch.rand(3, 4), gradients=True)
    fxround.load(folder / "m.pt2")(torch.rand(3, 4)).sum().backward()


def _perturbed(_: Path) -> None:
    model = _layers()
    with fxround.perturb(model):
        model(torch.rand(3, 4))


def _compared(_: Path) -> None:
    fxround.compare(_layers().eval(), torch.rand(3, 4), ["bfloat16", "int8", "mxfp8"])


def _left_of_traces() -> dict[str, int]:
    """Return how many objects and names of the process traces have left."""
    gc.collect()
    generated = (file for file in linecache.cache if file.startswith("<eval_with_key>"))
    spaces = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return {
        "environments": sum(issubclass(type(value), ShapeEnv | FakeTensorMode) for value in gc.get_objects()),
        "sources": len(graph_module._loader.eval_cache),
        "lines": sum(1 for _ in generated),
        "names of globals": sum(name.startswith("__builtins_dict__") for space in spaces for name in list(space)),
        "code": code_framelocals_names_reversed_cached.cache_info().currsize,
    }


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "use",
    [
        *(_evaluated, _trained, _differentiated_twice, _called_with_numbers, _refused),
        *(_exported_and_loaded, _perturbed, _compared),
    ],
)
def test_a_dropped_model_takes_its_traces_along(use: Callable[[Path], None], tmp_path: Path) -> None:
    use(tmp_path)
    before = _left_of_traces()
    for _ in range(2):
        use(tmp_path)
    assert _left_of_traces() == before


def test_a_graph_that_lives_keeps_its_source() -> None:
    compiled = fxround.compile(_layers(), "reproducible")
    for _ in range(3):
        compiled(torch.rand(3, 4)).sum().backward()
    latest = compiled._called()
    codes = [
        latest.step.forward.forward.__code__,
        *(known.plan._function.__code__ for known in latest.step.forwards._plans.values()),
    ]
    assert all(linecache.getlines(code.co_filename) for code in codes)


def _forward(model: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [x, model(x)]


def _backward(model: Any, x: Tensor) -> list[Tensor]:
    y = model(x.requires_grad_())
    tangent = torch.rand(y.shape)
    y.backward(tangent)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert x.grad is not None and all(gradient is not None for gradient in gradients)
    return [x, y, tangent, x.grad, *gradients]


def _twice(model: Any, x: Tensor) -> list[Tensor]:
    y = model(x.requires_grad_())
    (once,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    return [x, y, once, twice]


_CALLS: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    "forward": _forward,
    "backward": _backward,
    "create_graph": _twice,
}


def _outlive(make: Callable[[], list[Tensor]]) -> list[StorageWeakRef]:
    """Call often enough for every plan; return which of the values outlive their call."""
    values = [StorageWeakRef(value.untyped_storage()) for _ in range(4) for value in make()]
    gc.collect()
    return _alive(values)


def _alive(values: list[StorageWeakRef]) -> list[StorageWeakRef]:
    return [value for value in values if not value.expired()]


@pytest.mark.part(4)
@pytest.mark.parametrize("layers", ["linear", "convolution", "mxfp8"])
@pytest.mark.parametrize("name", _CALLS)
def test_a_call_leaves_none_of_its_values(name: str, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(12, 5)
    model = nn.Sequential(*(first if layers == "convolution" else (nn.Linear(4, 5),)), nn.Tanh(), nn.Linear(5, 3))
    compiled = fxround.compile(model, "mxfp8" if layers == "mxfp8" else "stochastic")
    kept = {p.untyped_storage()._cdata for p in model.parameters()}
    planned: list[StorageWeakRef] = []
    at_home = StraightPlanner._at_home

    def watched(planner: StraightPlanner, x: Tensor) -> Any:
        # Parameters stay, and so do seed and sample.
        if x.untyped_storage()._cdata not in kept and x.dtype != torch.int64:
            planned.append(StorageWeakRef(x.untyped_storage()))
        return at_home(planner, x)

    monkeypatch.setattr(StraightPlanner, "_at_home", watched)
    assert not _outlive(lambda: _CALLS[name](compiled, torch.rand(2, 4)))
    assert planned and not _alive(planned)


def test_a_loaded_program_leaves_none_of_its_values(tmp_path: Path) -> None:
    fxround.compile(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), "stochastic").export(
        tmp_path / "m.pt2", torch.rand(2, 4)
    )
    loaded = fxround.load(tmp_path / "m.pt2")
    assert not _outlive(lambda: _forward(loaded, torch.rand(2, 4)))


def test_an_iteration_leaves_none_of_its_values() -> None:
    outside: list[Tensor] = []

    def step(state: Tensor, row: Tensor) -> Tensor:
        return torch.tanh(state * outside[0] + row)

    def call() -> list[Tensor]:
        source = torch.rand(3, requires_grad=True)
        outside[:] = [source * 2]
        state, rows = torch.rand(3, requires_grad=True), torch.rand(6, 3)
        last, path = fxround.iterate(step, state, 6, "bfloat16", inputs=rows, keep=2)
        (last.sum() + path.sum()).backward()
        assert source.grad is not None and state.grad is not None
        values = [source, *outside, state, rows, last, path, source.grad, state.grad]
        outside.clear()
        return values

    assert not _outlive(call)
