"""Refusals name what came, the place, and what to do."""

from __future__ import annotations

import importlib
import logging
import random
import runpy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao import quantization
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import fxround
from fxround.capture.refusals import explained
from fxround.compiler.torch_backend import rounding_backend
from fxround.errors import CaptureError

BACKEND: Final[dict[str, Any]] = {"backend": rounding_backend, "options": {"policy": "bfloat16"}, "fullgraph": True}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


x: Final = torch.ones(3, 4)
REFUSED: Final[dict[str, tuple[Callable[[DeviceMesh], Any], str]]] = {
    "FSDP2, compiled before": (
        lambda mesh: fully_shard(fxround.compile(net(), "reproducible"), mesh=mesh),
        "a compiled module keeps its class",
    ),
    "FSDP": (
        lambda _: fxround.compile(FullyShardedDataParallel(net(), device_id=torch.device("cpu")), "bfloat16")(x),
        "the model is a FullyShardedDataParallel",
    ),
    "DDP": (lambda _: fxround.compile(DistributedDataParallel(net()), "bfloat16")(x), "is a DistributedDataParallel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_sharded_is_refused_with_the_remedy(case: str, mesh: DeviceMesh) -> None:
    call, said = REFUSED[case]
    with pytest.raises(CaptureError, match=said) as error:
        call(mesh)
    assert "DistributedDataParallel(fxround.compile(module))" in str(error.value) and len(str(error.value)) < 600


def test_the_remedies_work(mesh: DeviceMesh) -> None:
    model = net()
    compiled = fxround.compile(model, "reproducible")
    assert torch.equal(DistributedDataParallel(compiled)(x), compiled(x))
    gathered = fxround.round(distribute_tensor(x, mesh, [Replicate()]).full_tensor(), "bfloat16")
    assert torch.equal(gathered, x)
    with pytest.raises(ValueError, match=r"a DTensor .* pass a plain tensor"):
        fxround.round(distribute_tensor(x, mesh, [Replicate()]), "bfloat16")


def test_a_branch_in_a_library_is_named_with_the_line_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchdiffeq's solvers decide by their error estimates."""
    package = tmp_path / "solvers"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from solvers.inner.steps import solve\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "steps.py").write_text(
        "def solve(x):\n    return halved(x)\n\n"
        "def halved(x):\n    while x.sum() > 1:\n        x = x / 2\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    solvers = importlib.import_module("solvers")

    class Solved(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return solvers.solve(x) * 2

    with pytest.raises(CaptureError) as error:
        fxround.compile(Solved(), "reproducible")(x)
    lines = str(error.value).splitlines()
    assert lines[1].endswith("inner/steps.py:5: while x.sum() > 1:")
    assert lines[2].startswith("  from ") and lines[2].endswith("return solvers.solve(x) * 2")
    assert "test_refusals.py" in lines[2] and lines[4].startswith("  change  choose with torch.where")


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
@pytest.mark.parametrize("training, reason", [(True, "FakeQuantize"), (False, "_observer_forward_hook")])
def test_a_model_that_is_prepared_for_quantization_is_refused_with_the_remedy(training: bool, reason: str) -> None:
    model, of = net().train(training), "x86"
    config = quantization.get_default_qat_qconfig(of) if training else quantization.get_default_qconfig(of)
    model.qconfig = config  # type: ignore[assignment]
    prepared = (quantization.prepare_qat if training else quantization.prepare)(model)
    with pytest.raises(CaptureError) as refused:
        fxround.compile(prepared, "bfloat16")(x)
    assert reason in str(refused.value)
    assert "change  compile the model before torch.ao.quantization prepares it" in str(refused.value)


def warned(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("large", stacklevel=2)
    return x * 2


def logged(x: torch.Tensor) -> torch.Tensor:
    logging.getLogger("model").info("called")
    return x * 2


def dropped(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 0.5 else x


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert not x.isnan().any()
    return x * 2


ADVICE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "warning": (warned, "give the warning where the model is called"),
    "logger": (logged, "make the logger outside of the model's forward"),
    "clock": (lambda x: x * time.time(), "call it outside of the model, and pass what it returns"),
    "generator": (dropped, r"as in torch\.rand\(\(\)\)"),
    "generator of NumPy": (lambda x: x * float(np.random.rand()), "else compute the number outside of the model"),
    "assert": (asserted, "leave out an assert about numbers"),
    "sparse constant": (lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x), "compute with dense tensors"),
    "sparse argument": (lambda x: torch.sparse.mm(x.to_sparse(), x.mT), "compute with dense tensors"),
    "list": (lambda x: x * x.tolist()[0][0], r"as in x\[0, 0\] in place of x\.tolist\(\)"),
    "combinations": (lambda x: torch.combinations(x[0], 2).prod(1), r"take x\[pairs\], with pairs"),
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("name", ADVICE)
def test_what_no_graph_can_do_is_refused_with_what_to_do_instead(name: str) -> None:
    function, advice = ADVICE[name]
    with pytest.raises(CaptureError, match=rf"change  .*{advice}"):
        fxround.compile(function, "reproducible")(torch.rand(3, 4))


class Bins(nn.Module):
    """A result that floor division makes, for which PyTorch knows no derivative, beside one that has a gradient."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.layer, self.detaches = nn.Linear(4, 4), detaches

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, (y.detach() if self.detaches else y) // 0.5


@pytest.mark.filterwarnings("error")
def test_an_operation_without_a_derivative_is_named_with_its_line_and_the_remedy() -> None:
    model, x = Bins(detaches=False), torch.rand(3, 4)
    compiled = fxround.compile(model, "reproducible")
    where = r"at +test_refusals\.py:\d+: return y, .* // 0\.5\n"
    with pytest.raises(CaptureError, match=where + r".*floor_divide is not implemented\n.*y\.detach\(\) // 2"):
        compiled(x)
    with torch.no_grad():
        bins = compiled(x)[1]
    model.detaches = True
    y, again = compiled(x)
    y.sum().backward()
    assert torch.equal(bins, again) and not again.requires_grad
    assert torch.equal(again, (y.detach().double() / 0.5).floor().float()), "the exact quotient by a power of two"
    assert torch.equal(model.layer.bias.grad, torch.full((4,), 3.0))


def _doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def test_a_hook_of_a_modules_gradients_is_refused_with_what_works() -> None:
    first = torch.nn.Linear(4, 4)
    model, x = nn.Sequential(first, nn.Tanh()), torch.rand(3, 4, requires_grad=True)
    fxround.compile(model, "reproducible")(x).sum().backward()
    assert x.grad is not None
    wanted, x.grad = x.grad * 2, None  # exact, and every operation of the backward pass scales
    handle = first.register_full_backward_hook(lambda module, given, taken: None)
    with pytest.raises(
        CaptureError, match=r"change  register the hook on the compiled module; inside of the model"
    ) as refused:
        fxround.compile(model, "reproducible")(x)
    handle.remove()
    # As the message says.
    assert "lambda module, args, result: result.register_hook(hook) and None" in str(refused.value)
    handle = first.register_forward_hook(lambda module, args, result: result.register_hook(_doubled) and None)
    fxround.compile(model, "reproducible")(x).sum().backward()
    assert torch.equal(x.grad, wanted)
    handle.remove()
    x.grad, compiled = None, fxround.compile(model, "reproducible")
    compiled.register_full_backward_hook(lambda module, given, taken: (_doubled(given[0]),))
    compiled(x).sum().backward()
    assert torch.equal(x.grad, wanted)


class _Shifted(nn.Module):
    """The derivative of an energy at positions that a buffer moves."""

    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((x + self.shift).square().sum(), x, create_graph=True)
        return slope


def test_a_buffer_that_was_computed_with_gradients_is_named() -> None:
    x, cell = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    with pytest.raises(CaptureError, match=r"beyond it: self\.shift was computed and requires gradients") as refused:
        fxround.compile(_Shifted(cell * 2), "reproducible")(x)
    # As the message says.
    assert "change  detach it before: tensor.detach()" in str(refused.value)
    slope = fxround.compile(_Shifted((cell * 2).detach()), "reproducible")(x)
    assert torch.equal(slope, torch.full((3,), 10.0))  # stock: small integers


class _Kept(nn.Module):
    """The mean of the rows that a threshold leaves, if there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[self.scores(x)[:, 0] > 0]
        return x[0] if len(rows) == 3 else rows[1]


def test_a_decision_on_a_size_that_depends_on_data_says_what_to_compile() -> None:
    model, x = _Kept(), torch.ones(4, 2)
    nn.init.ones_(model.scores.weight)
    with pytest.raises(CaptureError, match=r"model\.part = fxround\.compile\(model\.part\)"):
        fxround.compile(model, "reproducible")(x)
    # As the message says.
    model.scores = fxround.compile(model.scores, "reproducible")
    assert torch.equal(model(x), x[0])


def test_a_tensor_that_wraps_others_is_refused_by_its_class() -> None:
    wrapped, model = TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), nn.Linear(4, 3)
    model.weight = nn.Parameter(wrapped)
    with pytest.raises(CaptureError, match=r"weight is a torch\.testing\S*\.TwoTensor, which wraps .*dequantize\(\)"):
        fxround.compile(model, "bfloat16")(torch.ones(2, 4))
    for call in (fxround.compile(nn.ReLU(), "bfloat16"), torch.compile(nn.ReLU(), **BACKEND)):
        with pytest.raises(CaptureError, match=r"argument \d is a \S*TwoTensor, which wraps"):
            call(wrapped)


def test_a_hook_of_a_tool_is_refused_with_what_the_tool_can_take(tmp_path: Path) -> None:
    compiled = fxround.compile(net(), "bfloat16")
    with (
        pytest.raises(CaptureError, match=r"a tool has set a hook .*\(compiled\.source\)"),
        FlopCounterMode(display=False),
    ):
        compiled(torch.ones(2, 4))
    folder = tmp_path / "site-packages" / "watcher"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(WATCHER, encoding="utf-8")
    watcher: Any = runpy.run_path(str(folder / "__init__.py"))
    for hook, advice in ((watcher["hook"], "a tool has set a hook"), (own_hook, "Avoid using the unsupported")):
        handle = compiled.source[0].register_forward_hook(hook)
        with pytest.raises(CaptureError, match=advice):
            compiled(torch.ones(2, 4))
        handle.remove()
    assert compiled(torch.ones(2, 4)).shape == (2, 8)


WATCHER: Final = """
import threading
lock = threading.Lock()
def hook(module, args, result):
    with lock:
        result
"""


def own_hook(module: nn.Module, args: Any, result: Any) -> None:
    with LOCK:
        pass


LOCK: Final = threading.Lock()


def test_an_error_without_a_message_is_named() -> None:
    assert "reason  AssertionError without a message\n" in str(explained(nn.Linear(1, 1), AssertionError()))


def test_an_embedding_that_is_renormalized_and_trained_is_refused_with_advice_that_works() -> None:
    torch.manual_seed(0)
    stock, tokens = nn.Embedding(10, 4, max_norm=1.0), torch.tensor([1, 2, 1])
    with pytest.raises(
        CaptureError, match=r"changes weight in place.*leave max_norm out, and call torch\.embedding_re"
    ):
        fxround.compile(stock, "identity")(tokens)
    other = nn.Embedding(10, 4)
    other.load_state_dict(stock.state_dict())
    compiled = fxround.compile(other, "identity")
    with torch.no_grad():
        torch.embedding_renorm_(other.weight, tokens, 1.0, 2.0)
    for model in (stock, compiled):
        model(tokens).square().sum().backward()
    assert torch.equal(stock.weight, other.weight)
    assert other.weight.grad is not None and torch.equal(stock.weight.grad, other.weight.grad)
