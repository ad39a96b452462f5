"""Capture: one graph or an error that names the line; traps switched off; sizes free where they can be."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.capture import Captured, capture
from fxround.errors import CaptureError
from fxround.graph.site import Port, located
from fxround.graph.source_lines import source_line
from fxround.operators.formulas import decompositions

aten = torch.ops.aten


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    with torch.no_grad():
        return capture(model, args, kwargs, decompositions())


def operators(found: Captured) -> list[str]:
    return [str(node.target) for node in found.graph.graph.nodes if node.op == "call_function"]


class Net(nn.Module):
    """Tied weights, a buffer, a constant, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.dec.weight = self.enc.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor, *, scale: float = 2.0, mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.dec(self.enc(x)) * scale + self.shift
        return {"y": y if mask is None else y * mask}


def test_ports_name_parameters_buffers_arguments_and_results() -> None:
    found = captured(Net(), torch.randn(2, 3), scale=3.0)
    state = Port("parameter", "enc.weight"), Port("buffer", "shift")
    assert {p for p in found.inputs if p.kind in ("parameter", "buffer")} >= set(state)
    assert [p for p in found.inputs if p.kind == "argument"] == [Port("argument", index=i) for i in range(2)]
    assert found.outputs == (Port("result", index=0),)


def test_tied_weights_are_one_value() -> None:
    found = captured(Net(), torch.randn(2, 3))
    used = [n for n in found.graph.graph.nodes if n.op == "placeholder" and n.users and "weight" in str(n.meta["desc"])]
    assert len(used) == 1


def test_keyword_arguments_in_any_order() -> None:
    x, mask, model = torch.randn(2, 3), torch.tensor([1.0, 0.0, 1.0]), Net()
    compiled = fxround.compile(model, "identity")
    with torch.no_grad():
        for kwargs in ({"mask": mask, "scale": 3.0}, {"scale": 3.0, "mask": mask}, {"scale": 3.0}):
            assert torch.equal(compiled(x, **kwargs)["y"], model(x, **kwargs)["y"])


def test_every_node_knows_its_module_and_line() -> None:
    example = build("resnet18")
    found = captured(example.model, *example.args)
    sites = [located(n) for n in found.graph.graph.nodes if n.op == "call_function"]
    assert {s.path for s in sites} >= {"conv1", "layer1.0.conv1", "layer3.1.bn2", "fc"}
    assert all(re.fullmatch(r"resnet\.py:\d+", s.source) for s in sites)
    convolution = next(s for s in sites if s.path == "layer2.0.downsample.0")
    assert (convolution.operator, convolution.module_type) == ("aten.convolution.default", "Conv2d")
    assert "downsample" in convolution.code


def test_the_source_line_is_the_innermost_frame() -> None:
    trace = (
        '  File "/a/model.py", line 3, in forward\n    y = f(x)\n  File "/a/util.py", line 9, in f\n    return x + 1\n'
    )
    assert source_line(trace) == ("util.py:9", "return x + 1")
    assert source_line("") == ("", "")


# ---- what cannot be captured ----


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("here", x.shape)
        return -x


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Gaussian(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gaussian_nll_loss(x, x + 1, x.abs())


class Covariance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cov(x)


class Divergence(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.kl_divergence(*(torch.distributions.Normal(x, scale) for scale in (1.0, 2.0)))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(5, 5)


@pytest.mark.parametrize(
    "model, line, advice",
    [
        (Branch(), "if x.sum() > 0", "torch.where"),
        (Prints(), 'print("here"', "remove the print"),
        (Item(), "x.sum().item()", "Keep it a tensor"),
        (Gaussian(), "gaussian_nll_loss(x", "write 0.5 * (var.log()"),
        (Covariance(), "torch.cov(x)", "x @ x.mT"),
        (Divergence(), "kl_divergence(", "write the formula"),
        (Broken(), "x @ torch.ones(5, 5)", "change"),
    ],
)
def test_a_model_that_cannot_be_captured_is_reported_with_its_line(model: nn.Module, line: str, advice: str) -> None:
    with pytest.raises(CaptureError) as error:
        captured(model, torch.randn(4, 3))
    assert line in str(error.value) and advice in str(error.value)
    assert re.search(r"test_capture\.py:\d+", str(error.value))


def test_a_failed_capture_leaves_no_trace() -> None:
    with pytest.raises(CaptureError):
        captured(Branch(), torch.randn(4, 3))
    assert type(torch.ones(1)) is Tensor and type(torch.ones(1) + 1) is Tensor
    assert torch.backends.mkldnn.enabled and torch.backends.cudnn.enabled and torch.backends.mha.get_fastpath_enabled()
    assert captured(nn.Linear(3, 2), torch.randn(4, 3)).outputs


def test_a_process_that_has_frozen_the_flags_of_pytorch_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's own tools for tests do, by disable_global_flags, which cannot be undone."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    assert torch.backends.flags_frozen()
    assert captured(nn.Linear(3, 2), torch.randn(4, 3)).outputs and torch.backends.cudnn.enabled


def test_quantized_and_sparse_tensors_are_refused_by_name() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"argument 0 is quantized \(torch\.quint8\)"):
        captured(nn.ReLU(), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
    with pytest.raises(CaptureError, match=r"layout torch\.sparse_coo"):
        captured(nn.ReLU(), x.to_sparse())
    with pytest.raises(CaptureError, match="argument 0 is a nested tensor; expected a dense one"):
        fxround.compile(nn.ReLU(), "bfloat16")(torch.nested.nested_tensor([x, x[:1]]))
    module = nn.Linear(3, 3)
    module.register_buffer("phase", torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
    with pytest.raises(CaptureError, match="phase is quantized"):
        captured(module, x)


def test_another_device_is_refused() -> None:
    with pytest.raises(CaptureError, match="is on meta"):
        captured(nn.Linear(3, 3, device="meta"), torch.randn(2, 3))


# ---- sizes ----


class Sizes(nn.Module):
    """Asks for sizes in Python."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x * 2
        if x.shape[0] > 7:
            return x * 3
        return x * 4


def graphs(compiled: fxround.RoundedModule) -> int:
    return len(compiled.captures().rows)


def test_one_graph_serves_every_batch_size() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)).eval()
    compiled = fxround.compile(model, "identity", example_inputs=torch.randn(1, 1, 8, 8))
    for batch in (1, 2, 3, 17, 64):
        x = torch.randn(batch, 1, 8, 8)
        assert compiled(x).shape == (batch, 3)
    assert graphs(compiled) == 1
    assert compiled(torch.randn(0, 1, 8, 8)).shape == (0, 3)
    assert graphs(compiled) == 2


@pytest.mark.parametrize("asked", [lambda x: len(x) == 0, lambda x: not x.numel(), lambda x: len(x) < 1])
def test_an_empty_batch_has_a_graph_of_its_own(asked: Callable[[Tensor], bool], tmp_path: Path) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((5,), 7.0) if asked(x) else x * 2

    model = Asks().eval()
    compiled, full, empty = fxround.compile(model, "reproducible"), torch.ones(3, 4), torch.ones(0, 4)
    for x in (full, empty, full, empty):
        assert torch.equal(compiled(x), model(x))
    assert compiled.captures().rows[1][5] == "argument 0 has size 0 in dimension 0; the graph before is for other sizes"
    loaded = fxround.load(compiled.export(tmp_path / "full.pt2", full))
    assert torch.equal(loaded(full), model(full))
    with pytest.raises(ValueError, match=r"'x' has the shape \(0, 4\), and the program was exported for sizes"):
        loaded(empty)
    assert torch.equal(fxround.load(compiled.export(tmp_path / "empty.pt2", empty))(empty), model(empty))


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_an_argument_that_nothing_reads_may_be_empty(size: int) -> None:
    compiled = fxround.compile(lambda x, unread: x + 1, "reproducible")
    for batch in (0, 3):
        assert compiled(torch.zeros(batch, 2), torch.zeros(size, 3)).tolist() == [[1, 1]] * batch
    asked = fxround.compile(lambda x, y: x + 1 if len(y) else x - 1, "reproducible")
    for batch in (3, size, 3):
        assert asked(torch.zeros(2), torch.zeros(batch, 3)).tolist() == ([1, 1] if batch else [-1, -1])


def test_a_condition_on_the_batch_size_is_asked_again() -> None:
    model, compiled = Sizes(), fxround.compile(Sizes(), "identity")
    for batch in (4, 1, 9, 7, 2, 8):
        x = torch.randn(batch, 3)
        assert torch.equal(compiled(x), model(x)), batch
    assert graphs(compiled) == 3


def test_a_fixed_batch_is_captured_for_each_size() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 6) + torch.arange(6.0)

    compiled = fxround.compile(Fixed(), "identity")
    assert compiled(torch.zeros(4, 3)).shape == (2, 6)
    assert compiled(torch.zeros(3, 4)).shape == (2, 6)


def test_equal_sizes_are_required_where_the_trace_found_them_equal() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    compiled = fxround.compile(Sum(), "identity")
    assert compiled(torch.ones(4, 3), torch.ones(4, 3)).shape == (4, 3)
    assert compiled(torch.ones(4, 3), torch.ones(1, 3)).shape == (4, 3)
    with pytest.raises(RuntimeError, match="must match the size"):  # the model's own words
        compiled(torch.ones(4, 3), torch.ones(3, 3))


def test_the_callers_tensors_are_not_touched() -> None:
    x = torch.randn(4, 3)
    captured(nn.Linear(3, 2), x)
    assert not [name for name in vars(x) if "dynamo" in name]


# ---- traps ----


def test_attention_becomes_products_and_softmax() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    found = operators(captured(Attention(), torch.randn(2, 2, 4, 8)))
    assert found.count("aten.bmm.default") == 2 and not [name for name in found if "attention" in name]


@pytest.mark.part("encoder")
@pytest.mark.parametrize("name", ["recurrent", "encoder"])
def test_no_fused_kernel_hides_arithmetic(name: str) -> None:
    example = build(name)
    found = operators(captured(example.model, *example.args, **example.kwargs))
    assert "aten.mm.default" in found
    assert not [op for op in found if re.search("mkldnn|_thnn|encoder_layer|native_|addmm|softmax", op)]


def test_effect_tokens_are_dropped() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    x = torch.eye(3) * 2
    found = captured(Inverse(), x)
    assert found.inputs == (Port("argument", index=0),) and "aten._linalg_check_errors.default" in operators(found)
    compiled = fxround.compile(Inverse(), "identity")
    assert torch.equal(compiled(x), torch.linalg.inv(x))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(3, 3))


def test_a_module_of_two_names_keeps_its_parameters() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x))

    model, x = Twice(), torch.ones(2, 3)
    before = list(model.parameters())
    compiled = fxround.compile(model, "identity")
    torch.testing.assert_close(compiled(x), model(x))  # another order of the same sums
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [fx.symbolic_trace, lambda m: torch.export.export(m, (torch.rand(4, 3),)).module()])
def test_a_traced_or_exported_model_is_compiled_like_the_model_and_not_changed(make: Any, inside: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    x = torch.rand(4, 3)
    graph = make(copy.deepcopy(model))
    traced = nn.Sequential(graph) if inside else graph
    compiled = fxround.compile(traced, "stochastic", seed=1)
    assert torch.equal(compiled(x), fxround.compile(model, "stochastic", seed=1)(x))
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in traced.parameters())
    assert not graph.meta.get("tracing_context")
    assert torch.equal(copy.deepcopy(traced).double()(x.double()).float(), model.double()(x.double()).float())


def test_layers_of_a_traced_model_have_their_paths() -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2)))
    rules = (Rule(rounding="identity"), Rule("0.0", rounding="bfloat16"), Rule("1", rounding="binary16"))
    compiled = fxround.compile(traced, Policy("p", rules))
    compiled(torch.rand(4, 3))
    found = {operation.module: operation.rounding for operation in compiled.summary().operations}
    assert found["0.0"].startswith("bfloat16") and found["1"].startswith("binary16")


def test_batch_norm_averages_all_batches_where_its_momentum_is_none() -> None:
    """PyTorch's own code makes a number of the count of batches, which no graph can."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None))
    compiled = fxround.compile(model, "reproducible")
    # Every sum, quotient and average of these numbers is in binary32: m + k [-2, -1, 0, 1, 2] has the mean m and
    # the variance 2.5 k^2.
    steps = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[:, None]
    for m, k in (([3.0, -8.0], [1.0, 2.0]), ([5.0, 0.5], [4.0, 1.0])):
        compiled(torch.tensor(m) + torch.tensor(k) * steps).sum().backward()
    assert len(compiled.captures()) == 1 and int(model[0].num_batches_tracked) == 2
    assert model[0].running_mean.tolist() == [4.0, -3.75]
    assert model[0].running_var.tolist() == [(2.5 + 40.0) / 2, (10.0 + 2.5) / 2]
    torch.optim.swa_utils.update_bn([5.0 + steps.expand(5, 2)], compiled)
    assert model[0].momentum is None and model[0].running_mean.tolist() == [5.0, 5.0]


@pytest.mark.long
def test_a_distribution_is_captured_whatever_was_captured_before() -> None:
    command = "import math, torch, fxround; f = lambda x: torch.distributions.Normal(0.0, 1.0).log_prob(x)\n"
    # At 0 the density is 1 / sqrt(2 pi): one constant, rounded once.
    command += "want = torch.full((2,), -math.log(math.sqrt(2 * math.pi)))\n"
    command += "assert torch.equal(fxround.compile(f, 'reproducible')(torch.zeros(2)), want)"
    subprocess.run([sys.executable, "-c", command], check=True)
