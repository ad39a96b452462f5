"""A report is a function of (model, inputs, policy, seed), and not of threads, batches or other observed places."""

from __future__ import annotations

import copy
import json
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxround
from fxround.policy import Policy, Rule
from fxround.significance.bits import penalty, significant_bits
from fxround.significance.moments import Moments
from fxround.significance.report import CheckFailed


class Small(nn.Module):
    """A layer with the name of a result, a layer used twice, and arithmetic in the root module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.inner(self.inner(x)))) / 3


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Small().eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.rand(10, 6, generator=torch.Generator().manual_seed(4))


# No copy in binary64, where it is not looked at: every capture takes its second.
PLAIN: dict[str, Any] = {"reference": None}


def findings(report: fxround.VariabilityReport) -> dict[str, Any]:
    data = report.to_dict()
    del data["provenance"]
    return data


@pytest.fixture(scope="module")
def report(model: nn.Module, x: Tensor) -> fxround.VariabilityReport:
    return fxround.variability(model, x, samples=6, capture="layers")


def test_bits_are_those_of_the_samples_themselves(model: nn.Module, x: Tensor, report: Any) -> None:
    compiled = fxround.compile(model, "stochastic")
    with torch.no_grad():
        samples = torch.stack([compiled.reseed(0, sample=i)(x) for i in range(6)]).numpy()
    bits = significant_bits(samples)
    seen = bits[~np.isnan(bits)]
    figures = report["output"]
    assert (figures.elements, figures.evidence, figures.samples) == (40, seen.size, 6)
    # Two formulas in binary64, of which the package's loses to cancellation (x / mean - 1) what the samples agree on.
    assert figures.bits == pytest.approx(seen.mean(), rel=1e-9)
    assert figures.worst == pytest.approx(seen.min(), rel=1e-9)
    assert figures.worst_at == np.unravel_index(np.nanargmin(bits), bits.shape)
    assert sum(figures.histogram) == figures.evidence


def test_layers_are_listed_in_the_order_of_the_model(report: fxround.VariabilityReport) -> None:
    assert [(f.place.kind, f.place.name) for f in report.figures] == [
        ("output", "output"),
        ("layer", "inner"),
        ("layer", "(root)"),
        ("layer", "output"),
    ]
    assert report.figures[1].place.operator == "aten.add.Tensor"


def test_the_same_seed_gives_the_same_report_and_another_one_does_not(model: nn.Module, x: Tensor, report: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = fxround.variability(copy.deepcopy(model), x, samples=6, capture="layers")
    finally:
        torch.set_num_threads(threads)
    assert findings(again) == findings(report)
    other = fxround.variability(model, x, samples=6, seed=1, **PLAIN)
    assert other["output"].bits != report["output"].bits


def test_what_is_looked_at_changes_no_result(model: nn.Module, x: Tensor, report: fxround.VariabilityReport) -> None:
    plain = fxround.variability(model, x, samples=6)
    nodes = fxround.variability(model, x, samples=6, capture="nodes")
    assert plain.outputs == nodes.outputs == report.outputs
    assert {"mm", "tanh", "div"} <= {f.place.name for f in nodes.places}
    assert nodes["tanh"].place.source.startswith("test_variability.py:")


def test_batches_are_tallied_together(model: nn.Module, x: Tensor) -> None:
    loader = DataLoader(TensorDataset(x, torch.zeros(10, dtype=torch.long)), batch_size=4)
    by_loader = fxround.variability(model, loader, samples=5, metrics=("accuracy", "label_flips", "sqnr"), **PLAIN)
    by_size = fxround.variability(model, x, samples=5, batch_size=4, metrics=("label_flips", "sqnr"), **PLAIN)
    assert by_loader.outputs == by_size.outputs
    assert by_loader.rows == 10 and by_loader.samples == (5, 5, 5) and by_loader["output"].elements == 40
    assert by_loader.metric("sqnr") == by_size.metric("sqnr")
    right = int((model(x).argmax(1) == 0).sum()) / 10
    assert by_loader.metric("accuracy").mean == right


def test_a_deterministic_policy_is_no_evidence_and_a_check_fails_on_it(model: nn.Module, x: Tensor) -> None:
    found = fxround.variability(model, x, "bfloat16", samples=5)
    figures = found["output"]
    assert (figures.bits, figures.worst, figures.evidence) == (None, None, 0)
    assert 4 < figures.agreement["binary64"].bits < 12
    assert any("no evidence" in line for line in found.findings)
    assert any("STABLE AND WRONG" in line for line in found.findings)
    with pytest.raises(CheckFailed, match="no evidence"):
        found.check(min_bits=1)


class Stagnating(nn.Module):
    """In exact arithmetic the squares undo the square roots; in binary32 every result is one."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x.sqrt()
        for _ in range(40):
            x = x * x
        return x


def test_what_is_stable_and_wrong_is_called_so() -> None:
    x = 1 + torch.rand(50, generator=torch.Generator().manual_seed(1))
    exact = fxround.variability(Stagnating(), x, "reproducible", samples=5, reference=x.double())
    assert exact["output"].evidence == 0
    assert exact["output"].agreement["reference"].bits < 3
    assert any("STABLE AND WRONG" in line and "reference" in line for line in exact.findings)
    with pytest.raises(CheckFailed, match="beyond their spread from the reference run"):
        exact.check(max_outside=0.05)


def test_operations_that_draw_nothing_are_not_called_wrong() -> None:
    """They have the roundings of binary32, which no sample shows."""

    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.pinv(x)

    x = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="draws nothing: linalg_pinv"):
        report = fxround.variability(Inverse(), x, samples=5)
    said = "\n".join(report.findings)
    assert report["output"].evidence == 0 and report["output"].agreement["binary64"].outside_share > 0.5
    assert "STABLE AND WRONG" not in said
    assert "no spread says whether that is much, since nothing is drawn in linalg_pinv" in said


def test_one_of_several_results_is_called_wrong_whatever_draws_nothing() -> None:
    class Absorbed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1e8) - 1e8

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.absorbed = Absorbed()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.pinv(x), self.absorbed(x)

    rules = (Rule(rounding="binary32/stochastic", optional=True), Rule("absorbed", rounding="binary32/nearest_even"))
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="draws nothing: linalg_pinv"):
        report = fxround.variability(Two(), x, Policy("two", rules), samples=5)
    assert any(line.startswith("output[1]: STABLE AND WRONG") for line in report.findings)


def test_a_sound_computation_is_not_called_wrong(report: fxround.VariabilityReport) -> None:
    assert report.findings == ("Labels that change in any sample: 0 of 10 inputs.",)
    assert set(report["output"].agreement) == {"unperturbed", "binary64"}
    assert report.check(min_bits=10, max_flips=0.0, max_outside=0.05) is report


def test_few_samples_are_warned_of_and_their_cost_is_printed(model: nn.Module, x: Tensor) -> None:
    with pytest.warns(UserWarning, match=r"3 samples lower every figure by 3\.62 bits"):
        found = fxround.variability(model, x, samples=3, **PLAIN)
    assert "3 samples lower every figure by 3.62 bits" in str(found)
    assert found["output"].penalty == pytest.approx(3.62, abs=0.005)
    with pytest.warns(UserWarning, match=rf"\(10: by {penalty(10, confidence=0.5):.2f}\)"):
        fxround.variability(model, x, samples=3, confidence=0.5, **PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxround.variability(model, x, samples=5, **PLAIN)


@pytest.mark.parametrize("reference", [3, nn.Linear(2, 2), [[1.0, 2.0]], "binary46"])
def test_a_reference_is_a_tensor_or_binary64(model: nn.Module, x: Tensor, reference: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="expected 'binary64', None, or a tensor shaped like the results"):
        fxround.variability(model, x, samples=5, reference=reference)


def test_ctrl_c_returns_what_there_is(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Moments.add
    seen: list[int] = []

    def add(self: Moments, value: Tensor) -> None:
        taken(self, value)
        seen.append(1)
        if len(seen) == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Moments, "add", add)
    before = signal.getsignal(signal.SIGINT)
    found = fxround.variability(model, x, samples=50, batch_size=5, **PLAIN)
    assert not found.complete
    assert found.samples == (7,)
    assert "INTERRUPTED: 1 of 2 batches, the last with 7 samples" in str(found)
    with pytest.raises(CheckFailed, match="interrupted"):
        found.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_left_in_the_model(model: nn.Module, x: Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    norm = nn.Sequential(copy.deepcopy(model), nn.BatchNorm1d(4)).train()
    fxround.variability(norm, x, samples=5, **PLAIN)
    assert norm[1].num_batches_tracked == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_reports_are_data(report: fxround.VariabilityReport) -> None:
    data = json.loads(report.to_json())
    assert [f["place"]["name"] for f in data["figures"]] == ["output", "inner", "(root)", "output"]
    assert {"policy", "seed", "versions", "machine", "model"} <= set(data["provenance"])
    assert data["provenance"]["model"]["hash"].startswith("sha256:")
    frame = report.to_pandas()
    assert list(frame["bits"]) == [f.bits for f in report.figures]
    assert report.table().to_dict()["rows"][0]["place"] == "output"


def test_samples_are_kept_where_asked(model: nn.Module, x: Tensor) -> None:
    found = fxround.variability(model, x, samples=5, keep_samples=True, capture="layers", **PLAIN)
    (batch,) = found.kept
    compiled = fxround.compile(model, "stochastic")
    assert len(batch["output", "output"]) == len(batch["layer", "inner"]) == 5
    assert torch.equal(batch["output", "output"][3], compiled.reseed(0, sample=3)(x))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"samples": 1}, ValueError, "needs at least 2"),
        ({"samples": "many"}, TypeError, "a whole number or 'auto'"),
        ({"samples": "auto", "tolerance": 0}, ValueError, "tolerance is 0"),
        ({"samples": "auto", "watch": "speed"}, ValueError, "watch is 'speed'"),
        ({"samples": "auto", "watch": "dice_pairs"}, ValueError, "a metric of pairs"),
        ({"capture": "everything"}, ValueError, "capture is 'everything'"),
        ({"metrics": ("acuracy",)}, ValueError, "no metric is named 'acuracy'"),
        ({"metrics": ("accuracy",)}, ValueError, "accuracy needs targets"),
        ({"reference": "float64"}, ValueError, "reference is 'float64'"),
        ({"reference": torch.ones(3)}, ValueError, "reference for output has shape"),
        ({"reference": torch.ones(20, 4)}, ValueError, r"shape \(20, 4\); expected that of all results together"),
        ({"reference": torch.ones(20, 4), "batch_size": 4}, ValueError, r"those from row 8 on have \(2, 4\)"),
        ({"reference": torch.ones(10, 4).long()}, ValueError, "has dtype torch.int64; expected floating point"),
        ({"reference": (torch.ones(10, 4),) * 2}, ValueError, r"has 2 tensors to compare, .* have 1 \(output\)"),
        ({"reference": ()}, TypeError, r"reference is \(\); expected 'binary64', None, or a tensor"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"isolate": "blocks"}, ValueError, "isolate is 'blocks'"),
        ({"confidence": 95}, ValueError, "confidence is 95; expected more than 0"),
        ({"method": "exact"}, ValueError, "method is 'exact'"),
        ({"policy": "stocastic"}, fxround.PolicyError, "did you mean 'stochastic'"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"n_jobs": 0}, ValueError, "n_jobs is 0"),
    ],
)
def test_mistakes_are_reported(
    model: nn.Module, x: Tensor, arguments: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        fxround.variability(model, x, **({"samples": 5, **PLAIN} | arguments))


def test_inputs_that_the_model_does_not_take_are_reported(model: nn.Module, x: Tensor) -> None:
    for inputs, message in (
        (3, "inputs is an int"),
        ([(x, x, x)], "a batch has 3 parts"),
        ([3], "a batch is an int"),
    ):
        with pytest.raises(TypeError, match=message):
            fxround.variability(model, inputs, samples=5)
    with pytest.raises(ValueError, match="no batch"):
        fxround.variability(model, [], samples=5)


def test_a_loader_is_read_once(model: nn.Module, x: Tensor) -> None:
    def once() -> Iterator[Tensor]:
        yield x[:5]
        yield x[5:]

    found = fxround.variability(model, once(), samples=5, **PLAIN)
    assert found.rows == 10 and found.batches is None


def test_other_randomness_is_reported(x: Tensor) -> None:
    noisy = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).train()
    with pytest.warns(UserWarning, match="random by themselves"):
        found = fxround.variability(noisy, x, samples=5, **PLAIN)
    assert any("model.eval()" in note for note in found.notes)


class Solving(nn.Module):
    """An algorithm of linear algebra, between operations that draw."""

    def forward(self, x: Tensor) -> Tensor:
        a = x[:6] * 1.1
        return torch.linalg.svdvals(a + torch.eye(6))


def test_operations_that_draw_nothing_are_named_above_the_figures(x: Tensor) -> None:
    with pytest.warns(UserWarning, match=r"1 operation of this model draws nothing: _linalg_svd\. Stock kernels"):
        found = fxround.variability(Solving(), x, samples=5, **PLAIN)
    (place,) = found.undrawn
    assert place.startswith("_linalg_svd: aten._linalg_svd.default in the root module at test_variability")
    text, page = str(found), found.to_html()
    for shown, figures in ((text, "evidence %"), (page, "<table")):
        assert shown.index("draws nothing: _linalg_svd") < shown.index(figures)
    assert found.to_dict()["undrawn"] == [place]
    for policy in ("up_down", "bfloat16"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = fxround.variability(Solving(), x, policy, samples=5, **PLAIN)
        assert other.undrawn == () and "draws nothing" not in str(other)


def test_what_draws_nothing_is_the_same_in_every_sample(x: Tensor) -> None:
    """The warning against the samples: with equal operands, a result that is named differs in none, all others do."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    assert fxround.variability(model, x, samples=5, **PLAIN).undrawn == ()

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    with pytest.warns(UserWarning, match="draws nothing: _linalg_svd"):
        found = fxround.variability(Alone(), x, samples=5, **PLAIN)
    assert found["output"].evidence == 0


class Structured(nn.Module):
    """Results in a structure, one of them of integers."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = x * 1.1
        return {"logits": y, "states": (y.exp(), y.sum(1)), "labels": y.argmax(1)}


def test_results_are_named_by_where_they_are(x: Tensor) -> None:
    found = fxround.variability(Structured(), x, samples=5, reference=None)
    assert [f.place.name for f in found.figures] == ["output.logits", "output.states[0]", "output.states[1]"]
    assert found["output.states[1]"].elements == 10
