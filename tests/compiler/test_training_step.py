"""Gradients: the bits of the backward graph, the tensors that get gradients, and autograd's requests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxround
from fxround.compiler.executable import Entry
from fxround.errors import FxroundError


class Small(nn.Module):
    """Convolutions, batch norm, a pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, 2)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv1(x)))
        return self.fc(F.max_pool2d(F.relu(self.conv2(y)), 2).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))


def seeded(build: Any, *shape: int) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build(), torch.randn(*shape)


def gradients(module: nn.Module, x: Tensor, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients of the argument and the parameters, for the loss sum(result * ramp)."""
    x = x.clone().requires_grad_()
    y = module(x)
    weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / 8 - 1
    found = torch.autograd.grad((y * weight).sum(), [x, *module.parameters()], **kwargs)
    return y.detach(), list(found)


@pytest.mark.parametrize("build, shape", [(mlp, (4, 5)), (Small, (3, 1, 8, 8))])
def test_identity_gives_the_gradients_of_the_captured_graph(build: Any, shape: tuple[int, ...]) -> None:
    model, x = seeded(build, *shape)
    compiled = fxround.compile(model, "identity")
    y, found = gradients(compiled, x)
    entry = compiled._called()
    assert isinstance(entry, Entry)
    tangent = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / 8 - 1
    with torch.no_grad():
        model.load_state_dict(seeded(build, *shape)[0].state_dict())
        outputs = entry.captured.graph(*entry._inputs([x]), tangent)
    kept = [v for v, port in zip(outputs, entry.captured.outputs, strict=True) if not port.mutation]
    assert torch.equal(kept[0], y)
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], [*found[1:], found[0]], strict=True))


def test_a_rounded_policy_gives_the_gradients_of_hand_composed_roundings() -> None:
    """linear, relu, mse, with bfloat16 results and sums without rounding error: every operation is rounded by hand."""
    model, x = seeded(lambda: nn.Linear(2, 3), 4, 2)
    target = torch.full((4, 3), 0.25)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            d = F.relu(self.fc(x)) - target
            return (d * d).sum()

    compiled = fxround.compile(Loss(), fxround.Policy("b", (fxround.Rule(rounding="bfloat16", order="sequential"),)))
    compiled(x, target).backward()

    def r(value: Tensor) -> Tensor:
        return fxround.round(value, "bfloat16")

    def chain(a: Tensor, b: Tensor) -> Tensor:
        """a @ b, k ascending, a fused binary32 step each: the product is exact in float64."""
        acc = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            acc = (a[:, k : k + 1].double() * b[k : k + 1].double() + acc.double()).float()
        return r(acc)

    w, b = model.weight.detach(), model.bias.detach()
    y = F.relu(r(chain(x, w.T) + b))
    d = r(y - target)
    error = r(r(torch.ones(()) * d) + r(torch.ones(()) * d))
    error = torch.where(y <= 0, torch.zeros(()), error)
    acc = torch.zeros(3)
    for row in error:
        acc = acc + row
    assert model.weight.grad is not None and model.bias.grad is not None
    assert torch.equal(model.weight.grad, chain(error.T, x))
    assert torch.equal(model.bias.grad, r(acc))


def test_a_convolution_and_a_tanh_have_the_gradients_of_hand_composed_roundings() -> None:
    """Every result is bfloat16 in both passes; chains of short numbers have no rounding error, as is asserted."""
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1)
    drawn = torch.Generator().manual_seed(3)
    for p in conv.parameters():
        p.data = fxround.round(torch.randn(p.shape, generator=drawn), "ieee(4,4)")
    x = fxround.round(torch.randn(2, 2, 5, 4, generator=drawn), "ieee(4,4)").requires_grad_()
    compiled = fxround.compile(
        nn.Sequential(conv, nn.Tanh()), fxround.Policy("b", (fxround.Rule(rounding="bfloat16"),))
    )
    y = compiled(x)
    g = fxround.round(torch.randn(y.shape, generator=drawn), "ieee(4,4)")
    y.backward(g)

    def r(value: Tensor) -> Tensor:
        return fxround.round(value, "bfloat16").float()

    def chain(value: Tensor) -> Tensor:
        assert torch.equal(value.float().double(), value), "exact in binary32, whatever the order"
        return r(value.float())

    w, b, a = conv.weight.detach().double(), conv.bias.detach(), x.detach().double()
    h = r(chain(F.conv2d(a, w, None, 2, 1)) + b[:, None, None])
    expected = r(torch.tanh(h.double()))
    error = r(g * r(1 - r(expected * expected)))
    on_x, on_w = (
        chain(gradient(*operands, error.double(), 2, 1))
        for gradient, operands in (
            (torch.nn.grad.conv2d_input, (x.shape, w)),
            (torch.nn.grad.conv2d_weight, (a, w.shape)),
        )
    )
    found = (y, x.grad, conv.weight.grad, conv.bias.grad)
    for value, want in zip(found, (expected, on_x, on_w, chain(error.double().sum((0, 2, 3)))), strict=True):
        assert value is not None and torch.equal(value, want)


def test_a_call_with_gradients_gives_the_bits_of_one_without() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    model.eval()
    compiled = fxround.compile(model, "stochastic", seed=4)
    with torch.no_grad():
        plain = compiled(x)
    first, found = gradients(compiled, x)
    again, repeated = gradients(compiled, x)  # now with the backward in mind
    assert torch.equal(plain, first) and torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))


def test_gradients_are_those_of_the_model() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    reference = copy.deepcopy(model)
    _, found = gradients(fxround.compile(model, "reproducible"), x)
    _, expected = gradients(reference, x)
    for a, b in zip(found, expected, strict=True):
        # A tolerance: sums run in another order than the stock kernels'.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nothing_of_a_step_is_left_unrounded_and_a_short_batch_needs_no_graph_of_its_own() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    compiled = fxround.compile(model, "reproducible")
    for batch in (x, x[:2], x[:1].expand(7, -1, -1, -1)):
        compiled(batch).sum().backward()
    assert compiled.coverage().unrounded == () and len(compiled.captures().rows) == 1
    assert "fxround.convolution_weight_gradient" in compiled.graph_text(backward=True)


def test_a_training_step_advances_the_sample_and_a_call_without_gradients_does_not() -> None:
    model, x = seeded(mlp, 4, 5)
    compiled = fxround.compile(model, "stochastic", seed=3)
    first = gradients(compiled, x)[1]
    assert compiled.rng.tolist() == [3, 1]
    assert not torch.equal(gradients(compiled, x)[1][1], first[1])
    with torch.no_grad():
        compiled(x)
    assert compiled.rng.tolist() == [3, 2]
    repeated = gradients(compiled.reseed(3), x)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    compiled.eval()
    gradients(compiled, x)
    assert compiled.rng.tolist() == [3, 1]


# ---- what autograd may ask ----


class Several(nn.Module):
    """A tied weight, three results, one of them a view of the argument, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.tied(self.a(x)))
        return {"p": self.b(h), "q": self.c(h), "view": x.view(-1), "size": x.shape[0]}


@pytest.fixture(scope="module")
def captured_once() -> tuple[nn.Module, fxround.RoundedModule, Tensor]:
    model, x = seeded(Several, 5, 4)
    return model, fxround.compile(model, "reproducible"), x


@pytest.fixture
def several(captured_once: Any) -> Any:
    """Without the gradients of the tests before."""
    captured_once[0].zero_grad()
    return captured_once


def test_unused_results_give_no_gradients_and_gradients_accumulate(several: Any) -> None:
    model, compiled, x = several
    reference = copy.deepcopy(model)
    for module in (compiled, reference, compiled, reference):
        module(x)["p"].square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            # A tolerance: sums run in another order than the stock kernels'.
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert model.c.weight.grad is None


def test_a_tied_gradient_is_a_rounded_sum_of_its_own_module(several: Any) -> None:
    _, compiled, x = several
    compiled(x)
    sums = [line for line in str(compiled.summary()).splitlines() if "aten.add.Tensor" in line]
    added = [n for n in compiled.backward_graph.graph.nodes if n.meta.get("is_gradient_acc")]
    assert added and all(str(n.target) == "fxround.pointwise.default" for n in added) and sums


def test_a_graph_may_be_kept_but_not_differentiated_twice(several: Any) -> None:
    model, compiled, x = several
    loss = compiled(x)["p"].sum()
    loss.backward(retain_graph=True)
    once = model.b.weight.grad.clone()
    loss.backward()
    assert torch.equal(model.b.weight.grad, once + once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_changed_weight_is_noticed_and_a_frozen_one_gets_nothing(several: Any) -> None:
    model, compiled, x = several
    loss = compiled(x)["p"].sum()
    with torch.no_grad():
        model.a.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model.b.bias.requires_grad_(False)
    compiled(x)["p"].sum().backward()
    assert model.b.bias.grad is None and model.b.weight.grad is not None
    model.b.bias.requires_grad_(True)


def test_dropout_is_drawn_from_seed_and_sample_and_its_gradient_has_its_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.25))
    x = torch.ones(64, 64, requires_grad=True)
    compiled = fxround.compile(model, "identity", seed=9)
    state = torch.random.get_rng_state()
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert not torch.equal(compiled(x), y) and torch.equal(compiled.reseed(9)(x), y)
    # 4096 coins of 3/4: six sigma, a false alarm in 5e8 seeds.
    assert abs(float((y != 0).double().mean()) - 0.75) < 6 * (0.75 * 0.25 / 4096) ** 0.5
    with torch.no_grad():
        assert torch.equal(compiled.reseed(9)(x), y)


def test_transforms_of_a_compiled_module_are_refused_with_the_remedy() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    transforms = (torch.func.vmap, torch.func.jacrev, lambda f: torch.func.grad(lambda x: f(x).sum()))
    for transform in transforms:
        with pytest.raises(FxroundError, match=r"fxround\.compile\(torch\.func\.vmap\(model\), policy\)"):
            transform(fxround.compile(model, "reproducible"))(x)
    compiled = fxround.compile(torch.func.vmap(model), "reproducible")
    assert torch.equal(compiled(x), fxround.compile(model, "reproducible")(x))


def test_checkpoints_inside_a_model_are_captured_and_around_a_compiled_one_refused() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.f, x, use_reentrant=False)

    compiled, x = fxround.compile(Inside(), "reproducible"), torch.randn(3, 4)
    compiled(x).sum().backward()
    assert compiled.coverage().unrounded == ()
    compiled = fxround.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "stochastic")
    with pytest.raises(FxroundError, match="checkpoint around it"):
        checkpoint(compiled, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("policy", ["reproducible", "bfloat16"])
@pytest.mark.parametrize("train", [True, False])
def test_what_is_returned_as_it_came_is_differentiated_too(policy: str, train: bool) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Any:
            doubled = (x * 2) * self.weight
            return x, doubled, x, self.weight, doubled, x.t()

    model = Returns().train(train)
    compiled = fxround.compile(model, policy)
    x = torch.full((3, 8), 0.5, requires_grad=True)
    for module in (model, compiled):  # powers of two: no gradient is rounded
        x.grad = model.weight.grad = None
        sum(result.sum() * 2.0**i for i, result in enumerate(module(x))).backward()
        assert x.grad is not None and model.weight.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 1 + 4 + 32 + 2 * (2 + 16)))
        assert torch.equal(model.weight.grad, torch.full((8,), 8.0 + 3 * (2 + 16)))


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return torch.ones(3)


def test_a_gradient_may_depend_on_no_result() -> None:
    compiled = fxround.compile(lambda x: _Ones.apply(x), "reproducible")
    x = torch.zeros(3, requires_grad=True)
    for count in (1, 2, 3):  # autograd adds to the first gradient in place
        compiled(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((3,), float(count)))


class Detached(nn.Module):
    """A model without gradients, which changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(3, 2)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        with torch.no_grad():
            found: Tensor = self.layer(x)[0]
        return found


@pytest.mark.parametrize("train", [True, False])
def test_what_a_model_computes_without_gradients_has_none(train: bool) -> None:
    model = Detached().train(train)
    x = torch.ones(2, 1, 3, requires_grad=True)
    assert not fxround.compile(model, "identity")(x).requires_grad and int(model.calls) == 1
    assert not fxround.compile(lambda x: torch.zeros_like(x) + x.detach(), "identity")(x).requires_grad


def test_losses_are_compiled_as_functions() -> None:
    x, classes, y = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 4, -100, 2, 2]), torch.rand(6, 5)
    losses: list[Any] = [
        lambda x, c, y: F.cross_entropy(x, c, weight=y[0], label_smoothing=0.1),
        lambda x, c, y: F.cross_entropy(x, c, reduction="none").sum(),
        lambda x, c, y: F.kl_div(F.log_softmax(x, 1), y, reduction="batchmean"),
        lambda x, c, y: F.binary_cross_entropy(torch.sigmoid(x), y),
        lambda x, c, y: F.smooth_l1_loss(x, y) + F.huber_loss(x, y) + F.l1_loss(x, y) + F.mse_loss(x, y),
        lambda x, c, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0]),
    ]
    for loss in losses:
        compiled = fxround.compile(loss, "reproducible")
        (found,) = torch.autograd.grad(compiled(x, classes, y), x)
        (expected,) = torch.autograd.grad(loss(x, classes, y), x)
        # A tolerance: sums run in another order than the stock kernels'.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert compiled.coverage().unrounded == ()


class Frames(nn.Module):
    """Frames of videos in one batch: a result has B * T rows, a size that no argument has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, frames = x.shape[:2]
        rows = self.mix(self.embed(x.flatten(2)).reshape(batch * frames, 4).tanh())
        return rows, rows.reshape(batch, frames, 4).mean(1)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_size_that_only_a_result_has_is_computed_from_the_arguments(frames: int) -> None:
    model, x = Frames(), torch.randn(4, frames, 2, 3)
    compiled = fxround.compile(model, "reproducible")
    for part in (x, x[:2], torch.cat([x, x])):
        sum(t.square().sum() for t in compiled(part)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        sum(t.square().sum() for t in model(part)).backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            # A tolerance: PyTorch adds the same products in an order of its own, which it does not state.
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
        model.zero_grad()
    assert len(compiled.captures().rows) == 1


def test_identity_gives_the_sparse_gradients_of_an_embedding() -> None:
    embedding, indices = nn.Embedding(6, 4, sparse=True), torch.tensor([1, 5, 1])
    compiled = fxround.compile(embedding, "identity")
    found = []
    for module in (embedding, compiled):
        embedding.zero_grad()
        for _ in range(2):
            module(indices).square().sum().backward()
        assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
        found.append(embedding.weight.grad.to_dense())
    assert found[0].any() and torch.equal(*found)


@pytest.mark.parametrize("strict", [True, False])
def test_sparse_gradients_are_not_rounded(strict: bool) -> None:
    compiled = fxround.compile(nn.Embedding(6, 4, sparse=True), "stochastic", strict=strict)
    with pytest.raises(fxround.UnsupportedOperator, match=r"sparse result, .* pass sparse=False to the embedding"):
        compiled(torch.tensor([1, 5, 1]))
