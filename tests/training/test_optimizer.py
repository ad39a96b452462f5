"""Optimizers: the bits of a step, the formats of state, schedulers, checkpoints, and a training."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ieee import Ieee
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.errors import PolicyError
from fxround.training import Generator, RoundedOptimizer, compile_optimizer
from fxround.training.update import Progress
from fxround.training.updates import UPDATES

optim = torch.optim
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
OPTIONS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.3, 0.99)}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.3}),
    (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.RAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1, "betas": (0.4, 0.9)}),
    (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1, "maximize": True}),
    (optim.ASGD, {"lr": 0.1, "t0": 1, "lambd": 0.01, "weight_decay": 0.1}),
    (optim.Rprop, {"lr": 0.01, "step_sizes": (0.008, 0.013)}),
    (optim.RMSprop, {"lr": 0.01}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def steps(net: nn.Module, optimizer: optim.Optimizer, count: int, scheduler: Any = None) -> list[Tensor]:
    for _ in range(count):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind, options", OPTIONS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_a_step_is_torchs_but_for_the_order_of_roundings(kind: Any, options: dict[str, Any]) -> None:
    a, b = model(), model()
    plain, rounded = kind(a.parameters(), foreach=False, **options), kind(b.parameters(), **options)
    rounded = compile_optimizer(rounded, "reproducible")
    slower = [optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (plain, rounded)]
    count = 8 if kind is optim.RAdam else 4  # RAdam rectifies from the sixth step on
    expected, computed = steps(a, plain, count, slower[0]), steps(b, rounded, count, slower[1])
    for p, q in zip(expected, computed, strict=True):
        # A tolerance: PyTorch's kernels fuse some of the products and sums that are rounded apart here.
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        # A tolerance: the states of no dimensions are computed in binary64 here, in binary32 there.
        scalars = {name: x for name, x in plain.state[p].items() if x is not None and x.dim() == 0}
        assert all(torch.allclose(rounded.state[q][name], x, rtol=1e-6, atol=0) for name, x in scalars.items())
    # A scheduler changes no graph; these have a formula of their own for first steps.
    first = (kind is optim.SGD and "momentum" in options) or kind in (optim.RAdam, optim.ASGD)
    assert len(rounded._compiled) == 1 + first
    assert rounded.coverage().unrounded == ()
    assert {k for s in plain.state.values() for k in s} == {k for s in rounded.state.values() for k in s}
    plain.load_state_dict(rounded.state_dict())


@pytest.mark.part(2)
@pytest.mark.parametrize("kind, options", OPTIONS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
@pytest.mark.parametrize("policy", ["identity", "reproducible"])
def test_a_step_has_the_bits_of_its_formula(kind: Any, options: dict[str, Any], policy: str) -> None:
    """Rounded to nearest, IEEE 754's operations as NumPy has them; under identity, stock kernels of flat tensors."""
    net, done = model(), 6 if kind is optim.RAdam else 3
    rounded = compile_optimizer(kind(net.parameters(), **options), policy)
    steps(net, rounded, done)
    before = [p.detach().clone() for p in net.parameters()]
    kept_before = [copy.deepcopy(rounded.state[p]) for p in net.parameters()]
    steps(net, rounded, 1)
    group = rounded.param_groups[0]
    scalars = {name: float(kept_before[0][name]) for name in UPDATES[kind].scalars(group)}
    at = Progress(done + 1, False, scalars)
    update = UPDATES[kind].of(group, at)
    numbers = {k: torch.tensor(v) for k, v in update.numbers(group, at).items()}
    for p, old, state in zip(net.parameters(), before, kept_before, strict=True):
        assert p.grad is not None
        # A step works on flat tensors: the same stock kernel on the same shapes and strides has the same bits.
        flat = [t.reshape(-1) for t in (old, p.grad)]
        states = {name: state[name].reshape(-1) for name in update.states}
        with contextlib.nullcontext() if policy == "identity" else Ieee():
            new, kept = update.formula(*flat, states, numbers)
        assert torch.equal(p.reshape(-1), new)
        assert all(torch.equal(rounded.state[p][name].reshape(-1), kept[name]) for name in update.states)


def test_a_rounded_step_is_hand_composed_roundings() -> None:
    """Weights and momentum are bfloat16, other values binary32, and the k-th parameter has its own seed."""
    policy = Policy(
        "held",
        (
            Rule(direction="update", rounding="dtype"),
            Rule(role="state", direction="update", rounding="e5m2"),
            Rule(role="weight", direction="update", rounding="bfloat16"),
        ),
    )
    net = nn.Linear(4, 3)
    optimizer = compile_optimizer(optim.SGD(net.parameters(), lr=0.1, momentum=0.5), policy)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    w, old = net.weight.detach().clone(), optimizer.state[net.weight]["momentum_buffer"].clone()
    optimizer.step()
    assert net.weight.grad is not None
    # The sums are exact in float64, so that each is rounded once.
    buffer = fxround.round(old.double() * 0.5 + net.weight.grad.double(), "e5m2").float()
    assert torch.equal(optimizer.state[net.weight]["momentum_buffer"], buffer)
    change = buffer * torch.tensor(-0.1)
    assert torch.equal(net.weight, fxround.round(w.double() + change.double(), "bfloat16").float())


def orthogonal(u: Tensor) -> Tensor:
    """Muon's direction, float32 [m, n] with m <= n, by the formula of PyTorch's documentation, kept in bfloat16."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = u.bfloat16().float()
    x = (x / torch.maximum((x * x).sum().sqrt().bfloat16().float(), torch.tensor(1e-7))).bfloat16().float()
    for _ in range(5):
        gram = (x @ x.T).bfloat16().float()
        square = gram @ gram
        change = (gram * b + square * c).bfloat16().float()
        x = (x * a + change @ x).bfloat16().float()
    return x


@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_a_step_of_muon_is_its_formula(shape: tuple[int, int]) -> None:
    """The pointwise operations are IEEE 754's; the direction is compiled as a model, for the order of its sums."""
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    q = nn.Parameter(p.detach().clone())
    rounded, plain = compile_optimizer(optim.Muon([p], lr=0.1), "reproducible"), optim.Muon([q], lr=0.1)
    direction, turned = fxround.compile(orthogonal, "reproducible"), shape[0] > shape[1]
    momentum, rest, shrink = torch.zeros(shape), torch.tensor(1 - 0.95), torch.tensor(1 - 0.1 * 0.1)
    rate = torch.tensor(0.1 * math.sqrt(max(1, shape[0] / shape[1])))
    for step in range(3):
        w = p.detach().clone()
        p.grad = torch.sin(w * (step + 2))
        q.data, q.grad = w.clone(), p.grad.clone()
        with Ieee():
            momentum = momentum + (p.grad - momentum) * rest
            u = momentum - (momentum - p.grad) * rest
        o = direction(u.T.contiguous()).T if turned else direction(u)
        with Ieee():
            expected = w * shrink - o * rate
        rounded.step()
        plain.step()
        assert torch.equal(rounded.state[p]["momentum_buffer"], momentum)
        assert torch.equal(p, expected)
        # A tolerance: 15 products in PyTorch's bfloat16, of 8 bits, in an order of its own.
        assert float((p - q).norm() / (q - w).norm()) < 0.1


def test_stochastic_updates_do_not_stagnate_and_nearest_ones_do() -> None:
    """256 updates of 2^-11 to a bfloat16 weight of 1, whose quantum is 2^-7."""
    found = {}
    for mode in ("nearest_even", "stochastic"):
        p = nn.Parameter(torch.ones(4096))
        rules = (
            Rule(direction="update", rounding="dtype"),
            Rule(role="weight", direction="update", rounding=f"bfloat16/{mode}"),
        )
        optimizer = compile_optimizer(optim.SGD([p], lr=1.0), Policy(mode, rules), seed=5)
        p.grad = torch.full_like(p, -(2.0**-11))
        for _ in range(256):
            optimizer.step()
        found[mode] = p.detach().double()
    assert bool((found["nearest_even"] == 1).all())
    # Variance at most 256 steps of (2^-7)^2 / 4 each, over 4096 weights: six sigma, a false alarm in 5e8.
    sigma = (256 * 2.0**-14 / 4 / 4096) ** 0.5
    assert abs(found["stochastic"].mean() - (1 + 256 * 2.0**-11)) < 6 * sigma


def test_parameters_and_steps_draw_bits_of_their_own_and_a_seed_repeats_them() -> None:
    def run(seed: int) -> list[Tensor]:
        pair = [nn.Parameter(torch.ones(256)) for _ in range(2)]
        optimizer = compile_optimizer(optim.SGD(pair, lr=1.0), "bfloat16/stochastic", seed=seed)
        for p in pair:
            p.grad = torch.full_like(p, -(2.0**-9))
        optimizer.step()
        first = [p.detach().clone() for p in pair]
        optimizer.step()
        return [*first, *(p.detach() for p in pair)]

    a, b, c, _ = run(1)
    assert not torch.equal(a, b) and not torch.equal(a, c)
    assert all(torch.equal(p, q) for p, q in zip(run(1), run(1), strict=True))
    assert not torch.equal(run(2)[0], a)


def test_resuming_gives_the_bits_of_not_stopping() -> None:
    def start() -> tuple[nn.Module, fxround.RoundedModule, RoundedOptimizer]:
        net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        compiled = fxround.compile(net, "stochastic", seed=3)
        return net, compiled, compile_optimizer(optim.Adam(net.parameters(), lr=0.01), "bfloat16/stochastic", seed=4)

    net, compiled, optimizer = start()
    steps(compiled, optimizer, 2)
    saved = copy.deepcopy((compiled.state_dict(), optimizer.state_dict()))
    expected = steps(compiled, optimizer, 2)
    _, again, other = start()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert again.rng.tolist() == [3, 2]
    assert all(torch.equal(p, q) for p, q in zip(expected, steps(again, other, 2), strict=True))
    assert net.state_dict().keys() == saved[0].keys() - {"fxround_rng"}


def test_rules_may_name_modules_and_frozen_parameters_stay() -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    frozen = net[0].bias.clone()
    policy = Policy("one", (Rule("2", direction="update", rounding="bfloat16"),))
    steps(net, compile_optimizer(optim.SGD(net.parameters(), lr=0.1), policy, model=net), 1)
    assert torch.equal(net[2].weight, fxround.round(net[2].weight.detach(), "bfloat16"))
    assert not torch.equal(net[0].weight, fxround.round(net[0].weight.detach(), "bfloat16"))
    assert torch.equal(net[0].bias, frozen)


def test_what_has_no_formula_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"LBFGS.*calls the model several.*one of torch\.optim's SGD, Adam"):
        compile_optimizer(optim.LBFGS([p]), "identity")
    optimizer = compile_optimizer(optim.SGD([p], lr=0.1), "identity")
    with pytest.raises(TypeError, match="compiled already"):
        compile_optimizer(optimizer, "identity")
    with pytest.raises(ValueError, match="no step has been taken"):
        optimizer.summary()
    p.grad = torch.ones(3)
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(ValueError, match="differentiable=True has no formula"):
        optimizer.step()
    layer = nn.Linear(3, 1)
    layer.weight.grad = torch.ones(1, 3)
    lost = Policy("lost", (Rule("fc", direction="update", rounding="bfloat16"),))
    with pytest.raises(PolicyError, match="matches no operation"):
        compile_optimizer(optim.SGD(layer.parameters(), lr=0.1), lost, model=layer).step()


def test_rules_that_name_modules_need_the_model() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer, policy = optim.SGD(layers.parameters(), lr=0.1), Policy("p", (Rule("0", rounding="bfloat16"),))
    with pytest.raises(PolicyError, match=r"rule 1, .* names a module, .* pass the module whose parameters"):
        compile_optimizer(optimizer, policy)
    with pytest.raises(ValueError, match="model has none of the optimizer's parameters"):
        compile_optimizer(optimizer, policy, model=nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"model is a str; expected the torch\.nn\.Module"):
        compile_optimizer(optimizer, policy, model="layers")
    rounded = compile_optimizer(optimizer, policy, model=layers)
    layers(torch.rand(2, 3)).sum().backward()
    rounded.step()
    narrow = [torch.equal(layer.weight, layer.weight.bfloat16().float()) for layer in layers]
    assert narrow == [True, False]
    compile_optimizer(optimizer, Policy("p", (Rule("0", role="activation", rounding="bfloat16"),)))


def test_a_closure_is_called_with_gradients() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = compile_optimizer(optim.SGD([p], lr=0.5), "reproducible")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert torch.equal(p, torch.zeros(3))


def test_a_scaled_loss_changes_no_bit_and_an_infinite_gradient_no_parameter() -> None:
    """The scale is a power of two, and nothing underflows."""
    trained = {}
    for way in ("plain", "scaled"):
        net = model()
        compiled = fxround.compile(net, "reproducible")
        optimizer = compile_optimizer(optim.Adam(net.parameters()), "stochastic", seed=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=way == "scaled")
        for factor in (1.0, 1.0, 2.0**125, 1.0):
            optimizer.zero_grad()
            if way == "scaled" or factor == 1:
                scaler.scale(compiled(X).square().sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        trained[way] = [p.detach() for p in net.parameters()]
        assert scaler.get_scale() == (2.0**9 if way == "scaled" else 1)
    assert all(torch.equal(a, b) for a, b in zip(trained["plain"], trained["scaled"], strict=True))


class Digits(nn.Module):
    """A LeNet-style network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3)
        self.drop, self.fc = nn.Dropout(0.1), nn.Linear(16 * 9, 10)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))
        y = self.fc(self.drop(F.max_pool2d(y, 2).flatten(1)))
        return y if target is None else F.cross_entropy(y, target)


@pytest.mark.part("reproducible")
@pytest.mark.parametrize("policy", ["reproducible", "stochastic"])
def test_digits_are_learnt(policy: str) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Digits()
    compiled = fxround.compile(net, policy)
    optimizer = compile_optimizer(optim.SGD(net.parameters(), lr=0.1, momentum=0.9), policy)
    for batch in (*torch.arange(1200).split(70), *torch.arange(1200).split(70)):
        optimizer.zero_grad()
        compiled(images[batch], labels[batch]).backward()
        optimizer.step()
    assert len(compiled.captures().rows) == 1  # the last batch is shorter
    compiled.eval()
    with torch.no_grad():
        accuracy = (compiled(images[1200:]).argmax(1) == labels[1200:]).double().mean()
    assert accuracy > 0.8


@pytest.mark.part(
    without=(
        "SGD-lr-momentum-dampening-maximize",
        "RMSprop-lr-momentum-centered-weight_decay",
        "SGD-lr-momentum-nesterov-weight_decay",
        "Adam-lr-weight_decay-betas",
    )
)
@pytest.mark.parametrize("kind, options", OPTIONS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_a_step_in_place_has_the_bits_of_the_long_way(kind: Any, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(70, 3, generator=generator) for _ in range(4)]
    ways = {}
    # The second is not row-major, the third has no kernel of its own.
    for way, turned in (("short", False), ("turned", True), ("long", False)):
        p = nn.Parameter(values[0].t().contiguous().t() if turned else values[0].clone())
        optimizer = compile_optimizer(kind([p], **options), "stochastic", seed=1)
        for grad in values[1:]:
            p.grad = grad.clone()
            version, place = p._version, p.data_ptr()
            optimizer.step()
            assert p._version > version and p.data_ptr() == place
            if way == "long":
                for key, compiled in optimizer._compiled.items():
                    optimizer._compiled[key] = replace(compiled, kernel=None)
        state = {name: x for name, x in optimizer.state[p].items() if isinstance(x, Tensor)}
        ways[way] = {"p": p.detach(), **state}
    assert all(torch.equal(ways["short"][n], x) for way in ("turned", "long") for n, x in ways[way].items())


def taken(long: bool, make: Any) -> list[Tensor]:
    """Parameters and states after three steps; long: by the graph, a parameter at a time."""
    parameters = make()
    optimizer = compile_optimizer(optim.SGD(parameters, lr=0.1, momentum=0.9), "stochastic", seed=1)
    if long:
        optimizer._compile = lambda *given: replace(RoundedOptimizer._compile(optimizer, *given), kernel=None)  # type: ignore[method-assign]
    for step in range(3):
        for p in parameters:
            p.grad = torch.sin(p.detach() + step)
        optimizer.step()
    return [*(p.detach() for p in parameters), *(optimizer.state[p]["momentum_buffer"] for p in parameters)]


def of_every_sort() -> list[nn.Parameter]:
    """Parameters without elements, with one, with many; of two dtypes; row-major or not."""
    shapes: list[Any] = [(), (1,), (0, 3), (5, 4), (70000,), *[(3,)] * 9]
    plain = [torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for shape in shapes]
    return [
        nn.Parameter(x) for x in (*plain, torch.ones(4, 5).t(), torch.ones(7, dtype=torch.bfloat16), torch.ones(65))
    ]


def of_one_memory() -> list[nn.Parameter]:
    """Two parameters that share elements: the second step starts from the results of the first."""
    memory = torch.linspace(-1, 1, 70)
    return [nn.Parameter(memory[:50]), nn.Parameter(memory[20:])]


@pytest.mark.parametrize("make", [of_every_sort, of_one_memory])
def test_the_step_of_a_group_has_the_bits_of_single_steps(make: Any) -> None:
    expected, threads = taken(True, make), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for a, b in zip(taken(False, make), expected, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_a_refused_parameter_changes_no_other() -> None:
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = compile_optimizer(optim.Adam([good, bad]), "reproducible")
    good.grad, bad.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    before, step = good.detach().clone(), optimizer.state[good]["step"].clone()
    optimizer.state[bad]["exp_avg"] = torch.ones(5)
    with pytest.raises(ValueError, match=r"state 'exp_avg' is torch.float32 \(5,\); expected"):
        optimizer.step()
    assert torch.equal(good, before) and torch.equal(optimizer.state[good]["step"], step)


def test_a_generator_seeds_by_name_and_takes_up_everything_that_draws() -> None:
    def training() -> tuple[nn.Module, Any, Any, Any, Generator]:
        net = model()
        compiled, loss = fxround.compile(net, "stochastic"), fxround.compile(F.mse_loss, "stochastic")
        optimizer = compile_optimizer(optim.SGD(net.parameters(), lr=0.1), "stochastic")
        return net, compiled, loss, optimizer, Generator(7, model=compiled, loss=loss, optimizer=optimizer)

    def run(parts: Any, count: int) -> None:
        _, compiled, loss, optimizer, _ = parts
        for _ in range(count):
            optimizer.zero_grad()
            loss(compiled(X), torch.ones(6, 3)).backward()
            optimizer.step()

    whole, stopped, resumed = training(), training(), training()
    run(whole, 4)
    run(stopped, 2)
    saved = [copy.deepcopy(part.state_dict()) for part in (stopped[0], stopped[3], stopped[4])]
    for part, state in zip((resumed[0], resumed[3], resumed[4]), saved, strict=True):
        part.load_state_dict(state)
    run(resumed, 2)
    assert [tuple(state[0]) for state in saved[2]["parts"].values()] != [(7, 2)] * 3
    for p, q in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)
    # No two parts share a seed, and another part changes nobody's.
    seeds = {name: state[0][0] for name, state in saved[2]["parts"].items()}
    assert len(set(seeds.values())) == 3
    alone = fxround.compile(model(), "stochastic")
    assert Generator(7, model=alone).parts["model"].rng.tolist() == [seeds["model"], 0]
    for mistake, message in (
        (lambda: Generator(7), "the parts that it seeds, by name"),
        (lambda: Generator(-1, model=alone), "expected 0 to"),
        (lambda: Generator(7, model=alone).load_state_dict(saved[2]), r"state is of \['loss', 'model', 'optimizer'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mistake()
    with pytest.raises(TypeError, match="model is a Linear; expected what"):
        Generator(7, model=nn.Linear(1, 1))  # type: ignore[arg-type]
