"""Results share memory with inputs and with each other as those of the model do, and have its gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from alias_programs import shown
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import CaptureError, FxroundError


class Sharing(nn.Module):
    """A model whose result ``returned`` makes of the model and its argument."""

    def __init__(self, returned: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4) / 8)
        self.register_buffer("buf", torch.arange(6.0).reshape(2, 3) / 4)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self, x)


def twice(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, h


def changed(h: Tensor, part: Tensor) -> Tensor:
    part.mul_(2)
    return h


INPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "itself": lambda m, x: x,
    "view": lambda m, x: x.view(-1),
    "item": lambda m, x: (x[0], x[..., 1:]),
    "transpose": lambda m, x: (x.t(), x.unsqueeze(0).transpose(1, 2)),
    "beside a product": lambda m, x: (x, F.linear(x, m.weight)),
    "chunk": lambda m, x: x.chunk(2, -1),
    "sizes": lambda m, x: (x * 2, x.view(x.shape[1], -1), x[: x.shape[0] - 1]),
    "sizes of another tensor": lambda m, x: (
        x.view_as(torch.ones(4, 2)),
        x.t().reshape_as(x),
        (x * 2).view_as(x.unsqueeze(0)),
        torch.broadcast_tensors(x * 3, torch.ones(2, 1))[0],
    ),
    "parameter": lambda m, x: (m.weight, m.weight.t(), m.weight[0], m.weight.detach()),
    "buffer": lambda m, x: (m.buf, m.buf.view(3, 2)),
    "detach": lambda m, x: x.detach(),
    "contiguous": lambda m, x: (x.contiguous(), x.to(torch.float32), x.t().contiguous()),
    "dropout": lambda m, x: (F.dropout(x, 0.0), F.dropout(x * 2, 0.5, training=False)),
    "of a result": lambda m, x: (lambda h: (h.t(), h, h[0], h.t()[0]))(x * 2),
    "twice": lambda m, x: twice(F.linear(x, m.weight)),
    "item assignment": lambda m, x: (lambda h: changed(h, h[0]))(x * 2),
    "buffer in place": lambda m, x: (m.buf.add_(1), m.buf.t(), F.linear(x, m.weight)),
}
CHANGED: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda m, x: x.add_(1),
    "in place, then itself": lambda m, x: changed(x, x),
    "in place, then a view": lambda m, x: (changed(x, x).view(-1), x * 2),
    "a view in place": lambda m, x: (changed(x, x[0]), x.t(), x[0].add_(1)),
}


def called(
    made: Callable[[nn.Module], Any], function: Callable[[Any, Tensor], Any], training: bool, gradients: bool
) -> list[Any]:
    """Return how a call's results share memory, and what a change of each of them changes."""
    model = Sharing(function).train(training)
    model.requires_grad_(training)
    x = torch.arange(8.0).reshape(2, 4) / 4
    x.requires_grad_(gradients)
    with torch.set_grad_enabled(training or gradients):
        result = made(model)(x)
    state = {"x": x, "weight": model.weight, "buf": model.buf}
    found = shown(result, state, whole=True)
    tensors = [*state.values(), *pytree.tree_leaves(result)]
    with torch.no_grad():
        for i, tensor in enumerate(tensors[3:]):
            tensor.add_(i + 1)
            found.append([each.tolist() for each in tensors])
    return found


MODES = {"training": (True, True), "eval": (False, False), "eval with gradients": (False, True)}


@pytest.mark.part(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*INPUTS, *CHANGED])
def test_results_share_memory_as_the_models_do(name: str, mode: str) -> None:
    function = (INPUTS | CHANGED)[name]
    training, gradients = MODES[mode]
    gradients = gradients and name in INPUTS
    found = called(lambda model: fxround.compile(model, "identity"), function, training, gradients)
    assert found == called(lambda model: model, function, training, gradients)


def test_results_share_memory_under_torch_compile() -> None:
    def made(model: nn.Module) -> Any:
        return torch.compile(model, backend="fxround", options={"policy": "identity"})

    for name in ("view", "transpose", "parameter", "in place, then a view", "of a result"):
        torch.compiler.reset()
        found = called(made, (INPUTS | CHANGED)[name], True, name in INPUTS)
        assert found == called(lambda model: model, (INPUTS | CHANGED)[name], True, name in INPUTS)


def test_a_view_is_made_for_the_sizes_and_strides_of_each_call() -> None:
    compiled = fxround.compile(Sharing(lambda m, x: (x * 2, x.reshape(-1), x.view(x.shape[1], -1))), "reproducible")
    for x in (torch.rand(2, 4), torch.rand(6, 4)):
        _, flat, rows = compiled(x)
        assert flat._base is x and rows._base is x and rows.shape == (4, len(x))
    as_another = fxround.compile(Sharing(lambda m, x: (x.view_as(x.t() * 2), (x * 2)[:1].expand_as(x))), "reproducible")
    for x in (torch.rand(2, 4), torch.rand(6, 4)):
        rows, repeated = as_another(x)
        assert rows._base is x and rows.shape == (4, len(x)) and torch.equal(repeated, (x * 2)[:1].expand_as(x))
    wide = torch.rand(4, 6).t()
    flat = fxround.compile(Sharing(lambda m, x: (x * 2, x.reshape(-1))), "reproducible")
    flat(torch.rand(3, 4))
    copied = flat(wide)[1]
    assert torch.equal(copied, wide.reshape(-1)) and copied.untyped_storage()._cdata != wide.untyped_storage()._cdata


@pytest.mark.parametrize("training", [True, False])
def test_shared_results_that_a_policy_rounds_have_the_rounded_numbers(training: bool) -> None:
    model = Sharing(lambda m, x: (x, x.t(), m.weight[0], x * 2)).train(training)
    compiled, x = fxround.compile(model, "bfloat16"), torch.rand(2, 4)
    for given in (x, x.clone().requires_grad_()):
        same, turned, row, _ = compiled(given)
        assert torch.equal(same, fxround.round(x, "bfloat16")) and torch.equal(turned, same.t())
        assert torch.equal(row, fxround.round(model.weight[0].detach(), "bfloat16"))
    assert torch.autograd.grad((same * 3).sum() + turned.sum(), given)[0].tolist() == [[4.0] * 4] * 2


@pytest.mark.parametrize("policy", ["identity", "bfloat16", "stochastic"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_flow_through_shared_results(policy: str, training: bool) -> None:
    """The sums over the uses of a tensor outside of the model are PyTorch's, exact for these numbers."""

    def returned(m: Any, x: Tensor) -> Any:
        h = F.linear(x, m.weight)
        return h, h.t(), x.view(-1), m.weight[0], m.weight.detach()

    def gradients(called: Any, model: nn.Module) -> list[Tensor]:
        x = (torch.arange(8.0).reshape(2, 4) / 4).requires_grad_()
        results = called(x)
        weights = [torch.arange(float(r.numel())).reshape(r.shape) for r in results]
        loss = torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()
        return list(torch.autograd.grad(loss, [x, model.weight]))

    model = Sharing(returned).train(training)
    found = gradients(fxround.compile(model, policy), model)
    assert all(map(torch.equal, found, gradients(model, model)))


def test_an_unused_shared_result_adds_nothing_to_a_gradient() -> None:
    """Zeros that a policy rounds would move up or down."""
    model = Sharing(lambda m, x: (F.linear(x, m.weight), x.view(-1), m.weight))
    x = torch.rand(2, 4, requires_grad=True)
    compiled = fxround.compile(model, "up_down")
    captured = [compiled.prepare(x)._called().captured]
    assert [port.index for port in captured[0].inputs if port.kind == "tangent"] == [0]


def test_repeated_elements_with_gradients_are_refused() -> None:
    compiled = fxround.compile(Sharing(lambda m, x: x[:1].expand(5, 4)), "reproducible")
    with pytest.raises(FxroundError, match=r"elements of an input.*repeat.*clone\(\)"):
        compiled(torch.rand(2, 4, requires_grad=True))
    x = torch.rand(2, 4)
    assert compiled(x)._base is x and compiled(x).stride() == (0, 1)


def test_overlapping_views_of_a_tensor_that_is_no_result_are_refused() -> None:
    def overlapping(m: Any, x: Tensor) -> Any:
        h = F.linear(x, m.weight)
        return h[0], h.t()

    with pytest.raises(CaptureError, match=r"share elements.*clone\(\)"):
        fxround.compile(Sharing(overlapping), "reproducible", example_inputs=torch.rand(2, 4))


def turned(view: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    view.t_()
    return view, *others


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "returned",
    [
        lambda m, x: turned(x[:], x + 1),
        lambda m, x: turned(m.buf[:], x * 2),
        lambda m, x: (lambda h: turned(h[:], h))(x * 2),
    ],
    ids=["argument", "buffer", "result"],
)
def test_a_shared_tensor_with_another_shape_in_place_is_refused(returned: Any, training: bool) -> None:
    compiled = fxround.compile(Sharing(returned).train(training), "reproducible")
    with pytest.raises(CaptureError, match=r"t_ gives a tensor another shape in place.*write x = x\.t\("):
        compiled(torch.ones(2, 3))


def test_a_tensor_of_its_own_may_get_another_shape_in_place() -> None:
    compiled = fxround.compile(Sharing(lambda m, x: turned(x * 2, x + 1)), "reproducible")
    assert [tuple(t.shape) for t in compiled(torch.ones(2, 3))] == [(3, 2), (2, 3)]


def test_loaded_programs_share_memory_or_are_refused(tmp_path: Path) -> None:
    def loaded(model: nn.Module) -> Any:
        return fxround.load(fxround.compile(model, "identity").export(tmp_path / "m.pt2", torch.rand(2, 4)))

    for name in ("itself", "view", "transpose", "in place", "in place, then itself"):
        x = torch.arange(8.0).reshape(2, 4) / 4
        y = x.clone()
        function = (INPUTS | CHANGED)[name]
        own = shown(loaded(Sharing(function).eval())(x), {"x": x}, whole=True)
        assert own == shown(Sharing(function).eval()(y), {"x": y}, whole=True)
        assert torch.equal(x, y)
    with pytest.raises(FxroundError, match="view of an argument, parameter or buffer that the model changes"):
        loaded(Sharing(CHANGED["in place, then a view"]))
    model = Sharing(lambda m, x: (F.linear(x, m.weight), m.weight))
    with pytest.raises(FxroundError, match=r"gradients=True.*shares memory"):
        fxround.compile(model, "identity").export(tmp_path / "n.pt2", torch.rand(2, 4), gradients=True)
