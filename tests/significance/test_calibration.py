"""Calibration: thresholds by KL divergence against 50 digits, and scales against rational numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import joblib
import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.policy import Policy
from fxround.significance.calibration import How
from fxround.significance.kl_divergence import BINS, histogram, kl_threshold


@cache
def log(number: int) -> mpmath.mpf:
    with mpmath.workdps(50):
        return mpmath.log(number)


def chosen(counts: list[int], levels: int, first: int = 128) -> int:
    """pytorch-quantization's loop, bin by bin, over rational numbers and logarithms of 50 digits."""
    bins = [counts[1], *counts[1:]]
    found = []
    for i in range(first, len(bins) + 1):
        edges = [Fraction(g * i, levels) for g in range(levels + 1)]
        groups = [next(g for g in range(levels) if edges[g] <= j < edges[g + 1]) for j in range(i)]
        places = [g if bins[j] else -1 for j, g in enumerate(groups)]
        sums, filled = Counter[int](), Counter(places)
        for j, g in enumerate(places):
            sums[g] += bins[j]
        reference = bins[:i]
        reference[-1] += sum(bins[i:])
        new = [Fraction(sums[g], filled[g]) if g >= 0 else Fraction(0) for g in places]
        if any(p and not q for p, q in zip(reference, new, strict=True)):
            found.append((mpmath.inf, -i))
            continue
        with mpmath.workdps(50):
            kl = mpmath.mpf(0)
            for p, q in zip(reference, new, strict=True):
                if p:
                    kl += p * (log(p) - log(q.numerator) + log(q.denominator))
            found.append((kl / sum(reference) + log(sum(bins[:i])) - log(sum(reference)), -i))
    return -min(found)[1]


@pytest.mark.parametrize("levels", [2, 8, 128])
def test_the_threshold_is_the_one_of_exact_divergences(levels: int) -> None:
    rng = np.random.default_rng(levels)
    for shape in ("normal", "tail", "sparse"):
        values = np.abs(rng.standard_normal(20_000) if shape == "normal" else rng.standard_t(3, 5_000))
        if shape == "sparse":
            values = values[:60]
        counts = np.bincount(np.minimum(values / values.max() * 160, 159).astype(int), minlength=160)
        counts[40] = 0
        assert kl_threshold(counts, levels) == chosen(counts.tolist(), levels), shape


def test_equal_divergences_take_the_last_and_empty_histograms_all() -> None:
    assert kl_threshold(np.zeros(300, np.int64), 128) == 300
    counts = np.zeros(300, np.int64)
    counts[:50] = 7  # any threshold from 128 on has the divergence zero where groups do not mix empty bins
    assert kl_threshold(counts, 128) == chosen(counts.tolist(), 128)


def test_bins_are_exact() -> None:
    most = float(np.float32(2.7182817))
    values = np.abs(np.random.default_rng(0).standard_normal(3000)).astype(np.float32).astype(np.float64)
    values = np.concatenate([values[values <= most], [0.0, most, np.float32(most * 5 / BINS)]])
    wanted = Counter(min(int(Fraction(v) * BINS / Fraction(most)), BINS - 1) for v in values.tolist())
    assert dict(enumerate(histogram(values, most).tolist())) == {i: wanted[i] for i in range(BINS)}
    assert histogram(np.zeros(3), 0.0)[0] == 3


class Net(nn.Module):
    """Two products of one module, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.first(x * 2))


def test_scales_are_the_largest_magnitudes_of_all_batches() -> None:
    model, batches = Net().eval(), [torch.randn(4, 12), torch.randn(2, 12)]
    batches[0][0, 0] = torch.inf
    policy = fxround.calibrate(model, [(batch,) for batch in batches], "e4m3fn/stochastic/saturate", "largest")
    most = max(float(b[b.isfinite()].abs().max()) for b in batches)
    binary32 = Rounding.parse("binary32")

    def rule(match: str, role: str, magnitude: float) -> str:
        scale = round_exact(Fraction(magnitude) / 448, False, binary32)
        text = f"scaled(e4m3fn;fixed,scale={scale!r})/stochastic/saturate"
        return f"{match} operator=contraction role={role} -> operands={text}"

    texts = [str(r) for r in policy.rules]
    for module in ("first", "last"):
        weight = model.get_submodule(module).get_parameter("weight").detach()
        assert rule(module, "weight", float(weight.abs().max())) in texts
    assert rule("first", "input", most) in texts
    assert any(text.startswith("first operator=contraction role=activation") for text in texts)  # x * 2
    assert Policy.from_toml(policy.to_toml()) == policy
    compiled = fxround.compile(model, policy, example_inputs=batches[1])
    assert not compiled.leaks()
    with torch.no_grad():
        assert torch.isfinite(compiled(batches[1])).all()


def test_recurrent_layers_are_observed_step_by_step() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(5, 4).eval(), torch.randn(6, 2, 5)
    policy = fxround.calibrate(model, x, "int8", "largest")
    assert {rule.role for rule in policy.rules if rule.role} >= {"input", "weight", "activation"}
    with torch.no_grad():
        assert torch.isfinite(fxround.compile(model, policy)(x)[0]).all()


def test_a_policy_by_kl_clips_a_heavy_tail() -> None:
    torch.manual_seed(1)
    x = torch.randn(400, 12)
    x[0, 0] = 60.0
    kl, largest = (fxround.calibrate(Net().eval(), x, "int4", how) for how in ("kl", "largest"))  # type: ignore[arg-type]

    def scale(policy: Policy) -> float:
        (text,) = (str(r.operands) for r in policy.rules if (r.match, r.role) == ("first", "input"))
        return float(text.partition("scale=")[2].partition(")")[0])

    assert scale(largest) == float(np.float32(60.0 / 7)) and scale(kl) < scale(largest) / 4
    again = fxround.calibrate(Net().eval(), x, "int4")
    assert again == kl


def test_what_cannot_be_is_said() -> None:
    model, x = Net().eval(), torch.zeros(2, 12)
    for format, how, said in (
        ("int8:channel", "kl", "KL divergence chooses one scale"),
        ("mxfp8", "largest", "no binary32 numbers to nearest"),
        ("uint8", "largest", "no binary32 numbers to nearest"),
        ("int16", "kl", "use how='mse'"),
        ("e4m3fn", "kl", "use how='mse'"),
        ("int8", "mean", "expected 'largest', 'kl', 'percentile', 'mse'"),
    ):
        with pytest.raises(ValueError, match=said):
            fxround.calibrate(model, x, format, how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to calibrate"):
        fxround.calibrate(nn.ReLU(), x)
    with pytest.raises(ValueError, match=r"with the role .* has NaNs and infinities alone"):
        fxround.calibrate(model, x * math.nan)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        fxround.calibrate(nn.Identity(), x)


@pytest.mark.parametrize("how", ["largest", "kl"])
@pytest.mark.parametrize("special", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_left_out_with_a_warning(special: float, how: How) -> None:
    model, x = nn.Linear(8, 3), torch.rand(4, 8)
    plain = fxround.calibrate(model, x, how="largest")
    hurt = torch.cat([x, torch.zeros(1, 8).fill_(0.5)])
    hurt[4, 3] = special
    with pytest.warns(
        UserWarning, match=r"^an operand of the model with the role input has 1 NaNs or infinities"
    ) as seen:
        found = fxround.calibrate(model, hurt, how=how)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert how == "kl" or found == plain


def scale_of(policy: Policy, match: str, role: str) -> float:
    (text,) = (str(r.operands) for r in policy.rules if (r.match, r.role) == (match, role))
    return float(text.partition("scale=")[2].partition(")")[0])


def test_percentile_and_least_squares_read_all_batches_of_a_loader() -> None:
    torch.manual_seed(2)
    data = torch.distributions.StudentT(3.0).sample((60, 12))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=25)
    model = Net().eval()
    whole = {how: fxround.calibrate(model, data, "int4", how) for how in ("mse", "percentile")}  # type: ignore[arg-type]
    split = fxround.calibrate(model, loader, "int4", "percentile")
    assert split == whole["percentile"]
    magnitudes = sorted(map(abs, data.flatten().tolist()))
    wanted = magnitudes[math.ceil(len(magnitudes) * Fraction(99.9) / 100) - 1]
    assert scale_of(split, "first", "input") == float(np.float32(wanted) / np.float32(7))
    # The least error is that of the least squares over rows of the data, in whatever batches.
    mse = scale_of(fxround.calibrate(model, loader, "int4", "mse"), "first", "input")
    assert mse == scale_of(whole["mse"], "first", "input") < max(magnitudes) / 7
    with torch.no_grad():
        y = fxround.compile(model, whole["mse"])(data)
    assert torch.isfinite(y).all()


class Shared(nn.Module):
    """A weight that two modules read, one that no call reads, and an operand of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never, self.zero = (nn.Linear(6, 6, bias=False) for _ in range(4))
        self.second.weight = self.first.weight
        nn.init.zeros_(self.zero.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.zero(x)


def test_shared_weights_have_one_scale_and_zeros_stay() -> None:
    x = torch.randn(5, 6)
    with pytest.warns(UserWarning, match=r"^the inputs never reach never\.weight: the policy has no scales") as seen:
        policy = fxround.calibrate(Shared(), x, "int8", "mse")
    assert len(seen) == 1 and seen[0].filename == __file__
    assert scale_of(policy, "first", "weight") == scale_of(policy, "second", "weight")
    assert "zero operator=contraction role=weight -> operands=identity" in map(str, policy.rules)
    with pytest.raises(ValueError, match=r"an operand of zero with the role weight has zeros, and .* cannot hold zero"):
        fxround.calibrate(Shared(), x, "table(-1,1)", "largest")


class Ends(torch.utils.data.IterableDataset[Tensor]):
    """Announces more rows than it yields."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.count, 12))


def test_data_that_end_early_are_said() -> None:
    model = Net().eval()
    with pytest.warns(UserWarning, match=r"^the data ended after 3 of 4 batches: scales are made of these alone"):
        policy = fxround.calibrate(model, torch.utils.data.DataLoader(Ends(5), batch_size=2), how="percentile")
    assert scale_of(policy, "first", "input") == float(np.float32(1) / np.float32(127))
    spent = iter([(torch.ones(2, 12),)])
    next(spent)
    for empty in (spent, [], torch.utils.data.DataLoader(Ends(0), batch_size=2)):
        with pytest.raises(ValueError, match="inputs hold no batch"):
            fxround.calibrate(model, empty)
    for wrong, said in ((0, "more than 0"), (101, "at most 100"), (math.nan, "more than 0")):
        with pytest.raises(ValueError, match=said):
            fxround.calibrate(model, torch.ones(2, 12), how="percentile", percentile=wrong)
    with pytest.raises(TypeError, match="percentile is a str"):
        fxround.calibrate(model, torch.ones(2, 12), how="percentile", percentile="99")  # type: ignore[arg-type]


# ---- workers ----


def stages() -> nn.Module:
    """A model of torch's own classes, because workers cannot import the test modules by name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)).eval()


def scales_of_jobs(jobs: int, how: How, format: str) -> tuple[str, dict[str, list[float]]]:
    data = torch.randn(11, 12, generator=torch.Generator().manual_seed(3))
    data[4, 2] = torch.nan
    batches = [(part,) for part in (data[:5], data[5:10], data[10:])]  # a batch of one row has a graph of its own
    policy = fxround.calibrate(stages(), batches, format, how, percentile=90, n_jobs=jobs)
    held = policy.scales if isinstance(policy, fxround.CalibratedPolicy) else {}
    return policy.to_toml(), {name: scales.tolist() for name, scales in held.items()}


@pytest.mark.filterwarnings("ignore:an operand of")
@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "how, format",
    [
        ("largest", "int8"),
        ("kl", "int8"),
        ("percentile", "int4"),
        ("mse", "int4"),
        ("mse", "int4:4"),
        ("percentile", "int4:4"),
    ],
)
def test_workers_find_the_scales_of_one_process(backend: str, how: How, format: str) -> None:
    with joblib.parallel_config(backend=backend):
        assert scales_of_jobs(2, how, format) == scales_of_jobs(1, how, format)


def test_workers_refuse_a_model_that_draws() -> None:
    model = stages().append(nn.Dropout()).append(nn.Linear(3, 2)).train()
    with joblib.parallel_config(backend="threading"), pytest.raises(ValueError, match="in 3 draws random numbers"):
        fxround.calibrate(model, torch.rand(2, 12), n_jobs=2)
