"""Training of all widths at once: its gradients, rates and draws by hand, and integers that it has computed with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from weight_models import Shared

import fxround
from benchmarks import bit_switching, tables
from fxround.numerics.modes import MODES
from fxround.policy import Policy, Rule
from fxround.policy.policy import of_operands
from fxround.significance.inputs import ModelCall
from fxround.tuning.integers import Scales
from fxround.tuning.sensitivity import traces
from fxround.tuning.switch import IntegerWeight
from fxround.tuning.train_widths import DoubleRounding, Roulette, adapted_rate


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than idle cores make small steps slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int = 4, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Four classes, which the signs of two numbers tell apart."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x = torch.randn(rows, 12, generator=generator)
        made.append((x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))
    return made


def trained(model: nn.Module, **options: Any) -> Any:
    settings: dict[str, Any] = {"widths": (8, 4, 2), "epochs": 2, "progress": False} | options
    policy = settings.pop("policy", "int8:channel")
    return fxround.train_widths(model, policy, settings.pop("data", batches()), **settings)


@pytest.mark.parametrize("served", range(2, 9))
def test_gradients_are_those_of_the_straight_through_rule(served: int) -> None:
    """Dyadic numbers, so that every step is exact: the scale is 1/4, and the factor of LSQ is 1."""
    least, most, factor = -(2 ** (served - 1)), 2 ** (served - 1) - 1, 2 ** (8 - served)
    w = torch.arange(-40, 40, dtype=torch.float64).mul(0.8125).reshape(8, 10)
    w[0, :2] = torch.tensor([least, most]) * 0.25 * factor  # the ends themselves are outside
    w.requires_grad_()
    scale = torch.full((1, 1), 0.25, dtype=torch.float64, requires_grad=True)
    gradient = torch.arange(80, dtype=torch.float64).reshape(8, 10) - 33
    rounded = DoubleRounding.apply(w, scale, 1 / most, 8, served)
    rounded.backward(gradient)
    of_weight, of_scale = [], Fraction(0)
    for x, g in zip(w.flatten().tolist(), gradient.flatten().tolist(), strict=True):
        stored = max(-128, min(127, round(Fraction(x) * 4)))
        part = max(least, min(most, round(Fraction(stored, factor))))
        exact = Fraction(x) * 4 / factor
        inside = least < exact < most
        of_weight.append(g if inside else 0.0)
        slope = part - exact if inside else Fraction(least if exact <= least else most)
        of_scale += Fraction(g) * slope * factor
    assert w.grad is not None and w.grad.flatten().tolist() == of_weight and len(set(of_weight)) > 2
    assert scale.grad is not None and scale.grad.shape == scale.shape and float(scale.grad) == of_scale


def test_the_factor_of_lsq_and_scales_of_blocks() -> None:
    torch.manual_seed(0)
    w, scale = torch.randn(3, 8), torch.rand(3, 1) + 0.01
    whole, quarter = [scale.clone().requires_grad_() for _ in range(2)]
    for leaf, count in ((whole, 1.0), (quarter, 16.0)):
        DoubleRounding.apply(w, leaf, count, 8, 4).sum().backward()
    assert whole.grad is not None and quarter.grad is not None
    assert torch.equal(quarter.grad * 4, whole.grad) and whole.grad.shape == (3, 1)


def test_rates_of_scales() -> None:
    none = [torch.zeros(3)]
    wanted = {8: 1.0, 7: 0.5, 6: 0.1, 5: 0.05, 4: 0.01, 3: 0.005, 2: 0.001}
    for served, share in wanted.items():
        assert math.isclose(adapted_rate(0.25, 8, served, none), 0.25 * share, rel_tol=1e-12)
    small, large = torch.tensor([0.25, -0.5]), torch.tensor([30.0, -40.0])  # norms below 1, and 50
    assert math.isclose(adapted_rate(1.0, 8, 8, [small]), 0.5, rel_tol=1e-12)
    assert math.isclose(adapted_rate(1.0, 8, 8, [large]), 1 - 0.8, rel_tol=1e-6)
    assert math.isclose(adapted_rate(1.0, 8, 6, [small, large]), 0.1 * (1 - 0.65), rel_tol=1e-6)
    assert adapted_rate(1.0, 8, 8, [torch.tensor([7.0])]) == 0.0


def weight(widths: tuple[int, ...]) -> IntegerWeight:
    return IntegerWeight(torch.zeros(2, 2), Scales(torch.ones(1, 1), (2, 2)), widths, MODES["nearest_even"])


def test_draws_have_the_probabilities_of_algorithm_1() -> None:
    named = {"low": 1.0, "high": 5.0}
    weights = {name: weight((2, 4, 6, 8)) for name in named}
    roulette = Roulette(named, 0)
    assert roulette.probabilities("low", (2, 4, 6, 8)) == [0.25] * 4
    assert roulette.probabilities("high", (2, 4, 6, 8)) == [0.1, 0.2, 0.3, 0.4]
    assert Roulette({"a": 2.0, "b": 2.0}, 0).probabilities("a", (2, 8)) == [0.2, 0.8]  # at the mean: sensitive
    assert Roulette(None, 0).probabilities("high", (2, 8)) == [0.5, 0.5]
    start = dict.fromkeys(named, 8)
    assert all(roulette.drawn(start, weights, 0.0) == start for _ in range(50))
    drawn = [roulette.drawn(start, weights, 1.0) for _ in range(4000)]
    for name in named:
        for bits, probability in zip((2, 4, 6, 8), roulette.probabilities(name, (2, 4, 6, 8)), strict=True):
            seen = sum(one[name] == bits for one in drawn)
            # Five standard deviations; the draws are those of the seed.
            assert abs(seen - 4000 * probability) < 5 * math.sqrt(4000 * probability * (1 - probability))
    kept = sum(roulette.drawn(start, weights, 0.5)["high"] == 8 for _ in range(4000)) / 4000
    assert abs(kept - (0.5 + 0.5 * 0.4)) < 5 * math.sqrt(0.21 / 4000)
    again = Roulette(named, 0)
    assert [again.drawn(start, weights, 1.0) for _ in range(54)][50:] != drawn[:4]


def test_traces_of_a_hessian_that_is_diagonal_are_exact() -> None:
    """The mean of half a square of k-fold unit vectors has the Hessian k^2 / n for each weight that a row reads."""
    model = nn.Linear(4, 3, bias=False)
    rows = [torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.diag(torch.tensor([2.0, 2.0, 2.0, 2.0]))]

    def loss(result: Tensor, target: Tensor) -> Tensor:
        return (result - target).square().sum() / (2 * len(result))

    calls = [ModelCall((x,), {}, torch.zeros(4, 3)) for x in rows]
    # Three outputs; each batch has four rows, so that its Hessian has k^2 / 4 on the diagonal.
    wanted = 3 * ((1 + 4 + 9 + 16) / 4 + 4.0) / 2
    assert traces(model, ["weight"], calls, loss, 0) == {"weight": pytest.approx(wanted, rel=1e-6)}
    many = [calls[0]] * 300  # 1,000 rows are enough
    assert traces(model, ["weight"], many, loss, 0)["weight"] == pytest.approx(3 * 7.5, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"threshold": 1.0}, {"adaptive": False}])
def test_without_steps_of_any_size_the_integers_are_those_of_store_integers(options: dict[str, Any]) -> None:
    model, data = mlp(), batches()
    made = trained(model, rate=1e-30, **options)
    stored = fxround.store_integers(model, "int8:channel", data, widths=(8, 4, 2))
    for bits in (8, 4, 2):
        made.switch(bits)
        stored.switch(bits)
        assert list(made.state_dict()) == list(stored.state_dict())
        assert all(torch.equal(value, stored.state_dict()[name]) for name, value in made.state_dict().items())


def test_the_model_serves_what_the_training_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the last steps, with the parameters before each, are made again from state that the test keeps."""
    seen: list[tuple[Tensor, Tensor, int, Tensor]] = []
    forward = DoubleRounding.forward

    def kept(ctx: Any, w: Tensor, scale: Tensor, count: float, stored: int, served: int, mode: Any) -> Tensor:
        result = forward(ctx, w, scale, count, stored, served, mode)
        seen.append((w.detach().clone(), scale.detach().clone(), served, result.detach().clone()))
        return result

    monkeypatch.setattr(DoubleRounding, "forward", staticmethod(kept))
    made = trained(mlp(), rate=1e-3)
    assert len(seen) == 2 * 4 * 3 * 2  # epochs, batches, widths, weights
    assert [one[2] for one in seen[:6]] == [8, 8, 4, 4, 2, 2]
    first = [one for one in seen if one[0].shape == (16, 12)]
    assert not torch.equal(first[0][0], first[-1][0]) and not torch.equal(first[0][1], first[-1][1])
    # A rate of zero makes a step that changes nothing: what it computes is what the model serves.
    seen.clear()
    model = copy.deepcopy(made)
    del model.switch
    for module in (model[0], model[2]):
        for end in ("integers", "scale", "blocks", "bits"):
            delattr(module, f"weight_{end}")
    again = trained(model, rate=1e-30)
    for w, _, served, result in seen:
        again.switch(served)
        name = "0.weight" if w.shape == (16, 12) else "2.weight"
        assert torch.equal(again.get_parameter(name), result)


def test_it_is_a_function_of_the_seed_and_changes_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)).train()
    model[2].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    data = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    made = [trained(model, data=data, threshold=0.5, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in [*model.parameters(), *made[0].parameters()])
    hashes = [fxround.hash(one) for one in made]
    assert hashes[0] == hashes[1] != hashes[2]
    assert [m.training for m in made[0].modules()] == [m.training for m in model.modules()]
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(made[0].state_dict()[name], before[name])
    assert not torch.equal(made[0][1].weight, model[1].weight)


def test_every_width_learns() -> None:
    model, data = mlp(), batches(8, 32)
    stored = fxround.store_integers(model, "int8:channel", data, widths=(8, 4, 2))
    made = trained(model, data=data, epochs=8, rate=1e-2)

    def loss(one: Any, bits: int) -> float:
        one.switch(bits)
        with torch.no_grad():
            return sum(float(F.cross_entropy(one(x), y)) for x, y in data)

    for bits in (8, 4, 2):
        assert loss(made, bits) < 0.7 * loss(stored, bits)
    assert bool((made[0].weight_scale > 0).all())


def test_what_needs_no_gradient_stays() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    made = trained(model, rate=1e-2)
    assert torch.equal(made[0].bias, model[0].bias) and not made[2].weight.requires_grad
    assert not torch.equal(made[2].bias, model[2].bias)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires gradients"):
        trained(model)


def test_rules_keep_layers_and_store_others_in_fewer_bits() -> None:
    policy = of_operands(
        "mixed", Rule(role="weight", operands="int8:channel"), Rule("2", role="weight", operands="int4:8")
    )
    made = trained(mlp(), policy=policy)
    assert made.switch.widths == {"0.weight": (2, 4, 8), "2.weight": (2, 4)}
    kept = Policy.parse("int8:channel").with_rules(Rule("0", role="weight", operands="identity"))
    assert list(trained(mlp(), policy=kept).switch.bits) == ["2.weight"]


def with_nan(where: Callable[[nn.Sequential], Tensor]) -> nn.Module:
    model = mlp()
    with torch.no_grad():
        where(model).view(-1)[0] = math.nan
    return model


@pytest.mark.parametrize(
    "model, options, error, said",
    [
        (mlp(), {"data": [x for x, _ in batches()]}, ValueError, "has no target"),
        (mlp(), {"data": iter(batches())}, ValueError, "read once; expected a DataLoader or a list"),
        (mlp(), {"data": []}, ValueError, "hold no batch"),
        (
            mlp(),
            {"data": [(torch.full((2, 12), math.nan), torch.tensor([0, 1]))]},
            ValueError,
            r"loss in 8 bits is .*nan",
        ),
        (mlp(), {"loss": lambda y, t: y}, ValueError, "expected a finite scalar"),
        (mlp(), {"loss": lambda y, t: 1.0}, ValueError, r"loss in 8 bits is 1\.0"),
        (mlp(), {"epochs": 0}, ValueError, "epochs"),
        (mlp(), {"rate": 0.0}, ValueError, r"rate is 0\.0; expected a positive number"),
        (mlp(), {"decay": -1.0}, ValueError, r"decay is -1\.0"),
        (mlp(), {"threshold": 1.5}, ValueError, r"threshold is 1\.5; expected 0 to 1"),
        (mlp(), {"threshold": "much"}, TypeError, "threshold is a str"),
        (mlp(), {"seed": -1}, ValueError, "seed"),
        (mlp(), {"widths": (8, 1)}, ValueError, "widths has 1; expected 2 to 16"),
        (mlp(), {"widths": (4, 2)}, ValueError, "is stored in 8 bits"),
        (mlp(), {"policy": "nvfp4"}, ValueError, "expected symmetric integers"),
        (Shared(12), {}, ValueError, "is shared: a, b read it"),
        (with_nan(lambda m: m[0].weight), {}, ValueError, r"weight 0\.weight has NaNs"),
        (with_nan(lambda m: m[2].bias), {}, ValueError, "loss in 8 bits is"),
        (nn.Sequential(nn.Linear(12, 12), nn.ReLU()), {"policy": "reproducible"}, ValueError, "rounds no weight"),
    ],
)
def test_wrong_arguments(model: nn.Module, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        trained(model, **options)


def test_the_table_has_means_and_paired_differences() -> None:
    names = ["float32", bit_switching.STORED, *bit_switching.TOGETHER, bit_switching.ALONE]
    figures = [
        {name: [90.0 + seed + place] * (4 if name == "alone" else 6) for place, name in enumerate(names)}
        for seed in (0, 2)
    ]
    made = {row[0]: row[1:] for row in bit_switching.rows(figures)}
    assert made["float32"][0] == "91.00 ± 12.71"  # t of one degree of freedom, 12.706, times sqrt(2) / sqrt(2)
    assert made["together, ALRS, minus alone"] == ["-4.00 ± 0.00"] * 4 + ["", ""]
    stored = tables.tables()["bit-switching"]
    assert stored["rows"] == bit_switching.rows(stored["seeds"]) and len(stored["seeds"]) == 5
