"""Comparisons of policies: the figures are those of each compiled model, of one capture, and survive interruptions."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxround
from fxround import Policy, PolicyError, Rule, demo
from fxround.capture.leftovers import computed_once
from fxround.compiler.pipeline import Pipeline
from fxround.graph.dialect import Pointwise
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.formats.scaled import ScaledRounding, short_name
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import METRICS, Metric
from fxround.significance.worker_state import Kernels, examples_of
from fxround.tuning import comparison_runs
from fxround.tuning.costs import costs_of

POLICIES = ("bfloat16", "int8:channel", "e4m3fn/stochastic/saturate")


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)).eval()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Two batches of different sizes, with targets."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(13, 24, generator=generator), torch.randint(0, 5, (13,), generator=generator)
    return [(x[:8], y[:8]), (x[8:], y[8:])]


def hits(result: Tensor, target: Tensor) -> float:
    return float((result.argmax(1) == target).double().mean())


def squares(x: Tensor) -> float:
    return float(x.double().square().sum())


@pytest.mark.parametrize("name", ["mlp", "digits"])
def test_figures_are_those_of_each_compiled_model(name: str) -> None:
    model, data = mlp(), batches()
    if name == "digits":
        digits = demo.load_digits()
        model, data = (
            demo.DigitsCNN().eval(),
            [(digits.test[0][:6], digits.test[1][:6]), (digits.test[0][6:9], digits.test[1][6:9])],
        )
    report = fxround.compare(model, data, POLICIES, ["accuracy", "sqnr", hits], samples=3, seed=5)
    plain = [fxround.compile(model, "identity").evaluate(x) for x, _ in data]
    rows = sum(len(y) for _, y in data)
    assert [row.name for row in report.policies] == list(POLICIES) and (report.rows, report.batches) == (rows, 2)
    for row in report.policies:
        compiled, runs = fxround.compile(model, row.name), 3 if "stochastic" in row.name else 1
        accuracy, sqnr, mean = [], [], []
        for i in range(runs):
            results = [compiled.reseed(5, j * 2**16 + i)(x).detach() for j, (x, _) in enumerate(data)]
            right = sum(int((r.argmax(1) == y).sum()) for r, (_, y) in zip(results, data, strict=True))
            accuracy.append(right / rows)
            mean.append(sum(hits(r, y) * len(y) for r, (_, y) in zip(results, data, strict=True)) / rows)
            signal_, noise = (
                sum(map(squares, plain)),
                sum(squares(r.double() - p.double()) for r, p in zip(results, plain, strict=True)),
            )
            sqnr.append(10 * math.log10(signal_ / noise))
        assert row.metric("accuracy").values == tuple(accuracy) and row.metric("hits").values == tuple(mean)
        assert row.metric("sqnr").values == tuple(sqnr) and row.complete and not row.error
        assert len(set(sqnr)) == runs
    labels = [p.argmax(1) == y for p, (_, y) in zip(plain, data, strict=True)]
    assert report.unrounded[0].values == (sum(int(right.sum()) for right in labels) / rows,)
    assert report.unrounded[1].values == (math.inf,)


def test_one_capture_serves_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    capture: Callable[..., Any] = Pipeline.capture
    monkeypatch.setattr(Pipeline, "capture", lambda *args: captured.append(1) or capture(*args))
    fxround.compare(mlp(), batches(), ["bfloat16", "int8", "nvfp4", "mxfp4", "fp8", "e4m3fn", "stochastic"], samples=2)
    assert len(captured) == 1


def test_policies_that_are_lowered_together_are_lowered_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    fake: Callable[..., Any] = Pointwise.fake
    monkeypatch.setattr(Pointwise, "fake", lambda self: computed.append(1) or fake(self))
    whole = fxround.compile(mlp(), "identity")
    with torch.no_grad():
        whole.prepare(batches()[0][0])
    names = ["int8", "nvfp4", "bfloat16", "int8"]
    alone = [str(whole.with_policy(name).graph.graph) for name in names]
    apart = len(computed)
    with computed_once():
        together = [str(whole.with_policy(name).graph.graph) for name in names]
    assert together == alone and apart < len(computed) < 2 * apart


def test_the_model_its_buffers_and_generators_stay_as_they_were() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    report = fxround.compare(model, loader, POLICIES, ["accuracy", "kl"], samples=2)
    assert torch.equal(torch.get_rng_state(), state) and (report.rows, report.batches) == (13, 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m.training for m in model.modules()) and not any(p.grad is not None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_data_have_all_forms_and_may_be_read_once_only() -> None:
    model, data = mlp(), batches()
    given = fxround.compare(model, data, POLICIES, samples=2)
    once: Iterator[Any] = iter(data)
    assert values(fxround.compare(model, once, POLICIES, samples=2)) == values(given)
    whole = fxround.compare(model, torch.cat([x for x, _ in data]), POLICIES, samples=2, batch_size=8)
    assert values(whole) == values(given)


class Two(nn.Module):
    """A model whose second argument may be left out, so that a target could be taken for it."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 3 if y is None else x * y


class Three(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x * y - z


class Stateful(nn.Module):
    """A model whose first argument is a pair of tensors."""

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return state[0] * x + state[1]


def test_arguments_may_be_apart_from_their_target() -> None:
    x, y, target = torch.randn(6, 5), torch.randn(6, 5), torch.arange(6) % 5
    for model, batch, result in (
        (Two(), ((x, y), {}, target), x * y),
        (Two(), ([x], {}, target), x * 3),
        (Two(), ((), {"x": x, "y": y}, target), x * y),
        (Stateful(), (((x, y), y), {}, target), x * y + y),
        (Stateful(), ((x, y), y, target), x * y + y),
        (Three(), ((x, y, x), target), x * y - x),
        (nn.Identity(), ({"input": x}, target), x),
    ):
        seen = fxround.compare(model.eval(), [batch], ["binary32"], "accuracy").unrounded[0].values
        assert seen == (int((result.argmax(1) == target).sum()) / 6,)


def test_a_pair_that_a_model_takes_is_its_argument() -> None:
    x, y, z = torch.randn(6, 5), torch.randn(6, 5), torch.randn(6, 5)
    report = fxround.compare(Stateful().eval(), [((x, y), z), ([x, y], z)], ["binary32"], "sqnr")
    assert report.policies[0].metrics[0].values
    with pytest.raises(TypeError, match="of one tensor and a target may mean"):
        fxround.compare(mlp(), [((x,), z)], ["binary32"])


def values(report: fxround.ComparisonReport) -> dict[str, Any]:
    return {row.name: [metric.values for metric in row.metrics] for row in report.policies}


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the policy of each evaluation."""
    ran: list[str] = []
    evaluate: Callable[..., Any] = RoundedModule.evaluate

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.policy.name)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(RoundedModule, "evaluate", noting)
    return ran


def test_a_file_has_what_need_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, data = tmp_path / "rows.json", mlp(), batches()
    asked: dict[str, Any] = {"metric": ["accuracy", "sqnr", hits], "samples": 2, "path": path}
    first = fxround.compare(model, data, ["bfloat16", "identity", POLICIES[2]], **asked)
    assert math.inf in first["identity"].metric("sqnr").values  # infinities return as they were
    ran = count_runs(monkeypatch)
    again = fxround.compare(model, data, ["int8", "bfloat16", "identity", POLICIES[2]], **asked)
    assert ran == ["identity"] * 2 + ["int8"] * 2
    assert [row.name for row in again.policies] == ["int8", "bfloat16", "identity", POLICIES[2]]
    assert again.policies[1:] == first.policies
    # Another policy of the same name runs, and rows of policies that were not asked for stay in the file.
    ran.clear()
    other = Policy("bfloat16", (Rule(rounding="bfloat16"),))
    fxround.compare(model, data, [other], **asked)
    assert ran == ["identity"] * 2 + ["bfloat16"] * 2
    held = {row["name"]: row for row in json.loads(path.read_text())["policies"]}
    assert set(held) == {"int8", "identity", "bfloat16", POLICIES[2]}
    assert Policy.from_dict(held["bfloat16"]["policy"]) == other


def test_a_file_of_another_comparison_is_refused(tmp_path: Path) -> None:
    path, model, data = tmp_path / "rows.json", mlp(), batches()

    def compare(model: nn.Module = model, data: Any = data, metric: Any = hits, **other: Any) -> Any:
        return fxround.compare(model, data, ["bfloat16"], metric, path=path, **other)

    compare()
    changed, other = copy.deepcopy(model), [(x + 1, y) for x, y in data]
    with torch.no_grad():
        changed[0].weight[0, 0] += 1
    longer = nn.Sequential(*model, nn.ReLU()).eval()
    longer.load_state_dict(model.state_dict())

    def hits_(result: Tensor, target: Tensor) -> float:
        return 2 * hits(result, target)

    hits_.__qualname__ = hits.__qualname__
    for word, arguments in {
        "weights": {"model": changed}, "graph": {"model": longer}, "data": {"data": other},
        "metrics": {"metric": hits_}, "samples": {"samples": 7}, "seed": {"seed": 1},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"another {word}.*delete the file"):
            compare(**arguments)
    targets = [(x, 4 - y) for x, y in data]
    with pytest.raises(ValueError, match="another data"):
        compare(data=targets)
    path.write_text('{"rows": 1}')
    with pytest.raises(ValueError, match="no file of a comparison"):
        compare()


def test_data_without_a_description_need_no_file(tmp_path: Path) -> None:
    data = [(x, object()) for x, _ in batches()]
    fxround.compare(mlp(), data, ["bfloat16"])
    with pytest.raises(TypeError, match=r"an object.*leave path= out"):
        fxround.compare(mlp(), data, ["bfloat16"], path=tmp_path / "rows.json")


@pytest.mark.part(2)
@pytest.mark.parametrize("at", [1, 3, 4, 8])
def test_ctrl_c_keeps_what_is_complete(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, data = tmp_path / "rows.json", mlp(), batches()
    whole = fxround.compare(model, data, POLICIES, samples=3)
    ran, take = count_runs(monkeypatch), RoundedModule.evaluate

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(ran) == at:
            signal.raise_signal(signal.SIGINT)
        return take(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RoundedModule, "evaluate", interrupted)
        report = fxround.compare(model, data, POLICIES, samples=3, path=path)
    # 2 batches without roundings, 2 of each of two policies, then 6 of the one that draws.
    complete = {1: {}, 3: {POLICIES[0]: 1}, 4: {POLICIES[0]: 1}, 8: dict(zip(POLICIES, (1, 1, 1), strict=True))}[at]
    assert report.interrupted and "INTERRUPTED" in str(report)
    assert {row.name: len(row.metrics[0].values) for row in report.policies} == complete
    assert report.remaining == POLICIES[len(complete) :]
    for row in report.policies:
        full = whole[row.name].metrics[0].values
        assert row.metrics[0].values == full[: complete[row.name]] and row.complete == (len(full) == 1)
    again = fxround.compare(model, data, POLICIES, samples=3, path=path)
    assert not again.interrupted and not again.remaining and values(again) == values(whole)


def test_a_metric_that_raises_ends_its_policy_alone(tmp_path: Path) -> None:
    path, model, data = tmp_path / "rows.json", mlp(), batches()
    exact = fxround.compile(model, "identity").evaluate(data[1][0])
    narrow = fxround.compile(model, "bfloat16").evaluate(data[1][0])

    def picky(result: Tensor, target: Tensor) -> float:
        if torch.equal(result, narrow):
            raise ArithmeticError("too narrow")
        return math.nan if result.shape == exact.shape and not torch.equal(result, exact) else 1.0

    report = fxround.compare(model, data, ["bfloat16", "int8", "identity"], picky, path=path)
    assert report["bfloat16"].error == "ArithmeticError: too narrow" and not report["bfloat16"].metrics
    assert math.isnan(report["int8"].metric("picky").mean) and report["identity"].metric("picky").values == (1.0,)
    said = str(report)
    assert "bfloat16 failed after 0 complete runs: ArithmeticError: too narrow" in said and "int8: NaN in picky" in said
    assert [row["name"] for row in json.loads(path.read_text())["policies"]] == ["int8", "identity"]
    assert not report.interrupted and len(report.to_pandas()) == 3


ALL = ("bfloat16", "int8:channel", "fp8", "identity", "e4m3fn/stochastic/saturate")


def uneven() -> list[tuple[Tensor, Tensor]]:
    """Three batches; one of a single row has a graph of its own."""
    return [*batches(), (batches()[0][0][:1], batches()[0][1][:1])]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return without_times(fxround.compare(mlp(), uneven(), ALL, ["accuracy", "sqnr", hits], samples=3))


def without_times(report: fxround.ComparisonReport) -> dict[str, Any]:
    data = report.to_dict()
    for row in data["policies"]:
        del row["seconds"]
    return data


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_workers_give_the_same_rows(backend: str, alone: dict[str, Any], tmp_path: Path) -> None:
    with joblib.parallel_config(backend=backend):
        report = fxround.compare(
            mlp(), uneven(), ALL, ["accuracy", "sqnr", hits], samples=3, n_jobs=2, path=tmp_path / "rows.json"
        )
    held = fxround.compare(mlp(), uneven(), ALL, ["accuracy", "sqnr", hits], samples=3, path=tmp_path / "rows.json")
    assert report.policies == held.policies and held.described == report.described
    assert without_times(report) | {"described": {}} == alone


def test_workers_leave_errors_in_their_rows_and_keep_the_rest() -> None:
    def picky(result: Tensor, target: Tensor) -> float:
        calls.append(result.shape[0])
        if torch.equal(result, narrow):
            raise ArithmeticError("too narrow")
        return 1.0

    calls: list[int] = []
    narrow = fxround.compile(mlp(), "bfloat16").evaluate(uneven()[1][0])
    with joblib.parallel_config(backend="threading"):
        report = fxround.compare(mlp(), uneven(), ["bfloat16", "int8", "identity"], picky, n_jobs=2)
    assert report["bfloat16"].error == "ArithmeticError: too narrow" and not report["bfloat16"].metrics
    assert report["int8"].complete and report["identity"].metric("picky").values == (1.0,)
    assert calls == [8, 5, 1, 8, 5, 8, 5, 1, 8, 5, 1]  # as in one process: none after the error


@pytest.mark.part(2)
@pytest.mark.parametrize("at", [1, 4, 9])
def test_ctrl_c_ends_workers_after_whole_rows(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counting(result: Tensor, target: Tensor) -> float:
        seen.append(len(result))
        if len(seen) == at:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    with joblib.parallel_config(backend="threading"):
        report = fxround.compare(mlp(), batches(), POLICIES, counting, samples=3, n_jobs=2)
    complete = {1: {}, 4: {POLICIES[0]: 1}, 9: dict(zip(POLICIES, (1, 1, 1), strict=True))}[at]
    assert report.interrupted and {row.name: len(row.metrics[0].values) for row in report.policies} == complete
    assert report.remaining == POLICIES[len(complete) :]


def test_a_worker_that_captures_another_graph_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fxround.compile(mlp(), "identity")
    call = ModelCall((batches()[0][0],))
    with torch.no_grad():
        whole.prepare(*call.args)
        ((_, digest),) = examples_of(whole, [call])
        assert comparison_runs._subject((mlp(), 0, [(call, digest)])).whole.policy == whole.policy
        longer = nn.Sequential(*mlp(), nn.ReLU()).eval()
        with pytest.raises(fxround.FxroundError, match=r"another graph of Sequential.*n_jobs=1"):
            comparison_runs._subject((longer, 0, [(call, digest)]))


def test_workers_have_the_settings_of_the_caller() -> None:
    before = Kernels.current()
    other = replace(before, threads=before.threads + 1, precision="high", mkldnn=not before.mkldnn, dtype=torch.float64)
    with replace(other, process=before.process + 1).active():
        assert Kernels.current() == other != before
    assert Kernels.current() == before


def test_a_thread_changes_no_setting_while_another_captures() -> None:
    given = Kernels.current()
    run, capture = given.active(), torch.backends.mkldnn.flags(enabled=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture)  # in another thread, whose switches are those of the process
        run.__enter__()
        assert not torch.backends.mkldnn.enabled
    run.__exit__(None, None, None)
    assert Kernels.current() == given


@pytest.mark.parametrize(
    "asked, error, says",
    [
        ({"data": []}, ValueError, "no batch"),
        ({"data": torch.zeros(0, 24)}, ValueError, "no batch"),
        ({"data": 3}, TypeError, "inputs is an int"),
        ({"policies": []}, ValueError, "policies has nothing"),
        ({"policies": "bfloat16"}, TypeError, "expected several"),
        ({"policies": Policy("p", ())}, TypeError, "expected several"),
        ({"policies": ["bfloat17"]}, PolicyError, "did you mean"),
        ({"policies": ["int8", "int8"]}, ValueError, "two policies have the name 'int8'"),
        ({"policies": {1: "int8"}}, TypeError, "the name 1"),
        ({"policies": [Policy("p", (Rule("missing", rounding="bfloat16"),))]}, PolicyError, "matches no operation"),
        ({"metric": "acuracy"}, ValueError, "no metric is named"),
        ({"metric": []}, ValueError, "metric has nothing"),
        ({"metric": None}, ValueError, "metric has nothing"),
        ({"metric": [3]}, TypeError, "a metric is a name"),
        ({"metric": ["kl", "kl"]}, ValueError, "two metrics have the name 'kl'"),
        ({"metric": "dice_pairs"}, ValueError, "pairs of samples"),
        ({"metric": lambda result, target: "good"}, TypeError, "returned a str; expected a number"),
        ({"metric": "accuracy", "data": torch.zeros(2, 24)}, ValueError, "accuracy needs targets"),
        ({"samples": 0}, ValueError, "samples is 0"),
        ({"n_jobs": 0}, ValueError, "n_jobs is 0"),
        ({"n_jobs": True}, ValueError, "n_jobs is True"),
        ({"seed": -1}, ValueError, "seed"),
        ({"model": nn.Sequential(nn.Dropout(), mlp()).train()}, ValueError, "bernoulli.* in 0 draws .*model.eval"),
        ({"model": nn.Sequential(nn.BatchNorm1d(24), mlp()).train()}, ValueError, "a call writes 0.run.*model.eval"),
        ({"model": torch.relu}, TypeError, "Module"),
    ],
)
def test_wrong_arguments(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {"model": mlp(), "data": batches(), "policies": ["bfloat16"]} | asked
    model, data, policies = (given.pop(name) for name in ("model", "data", "policies"))
    with pytest.raises(error, match=says):
        fxround.compare(model, data, policies, **given)


def test_training_mode_is_no_matter_where_it_changes_nothing() -> None:
    assert values(fxround.compare(mlp().train(), batches(), POLICIES)) == values(
        fxround.compare(mlp(), batches(), POLICIES)
    )


def test_nans_of_the_data_are_said() -> None:
    report = fxround.compare(mlp(), torch.full((2, 24), math.nan), ["bfloat16"])
    assert math.isnan(report["bfloat16"].metrics[0].mean) and report.to_dict()["unrounded"][0]["values"] == [None]
    assert "the unrounded model: NaN in sqnr" in str(report) and "bfloat16: NaN in sqnr" in str(report)


def test_names_may_be_the_callers_own() -> None:
    report = fxround.compare(mlp(), batches(), {"a": "int8", "b": "int8", "c": "bfloat16"})
    assert values(report)["a"] == values(report)["b"] != values(report)["c"]
    assert report["a"].policy == Policy.parse("int8")


def test_a_report_is_text_data_and_html() -> None:
    report = fxround.compare(mlp(), batches(), ["bfloat16", "identity", POLICIES[2]], ["accuracy", "sqnr"], samples=2)
    data = json.loads(report.to_json())
    assert data == report.to_dict() and data["policies"][1]["metrics"][1]["values"] == ["inf"]
    frame = report.to_pandas()
    assert frame["sqnr"][1] == math.inf
    assert list(frame["policy"]) == ["bfloat16", "identity", POLICIES[2]] and list(frame["runs"]) == [1, 1, 2]
    assert frame["sqnr"][0] == report["bfloat16"].metric("sqnr").mean
    assert frame["weight bits"].tolist() == [16, 32, 8]
    assert "±" in str(report) and "bfloat16" in report._repr_html_()
    with pytest.raises(KeyError):
        report["int8"]


def test_a_report_is_plotted_and_a_page(tmp_path: Path) -> None:
    def picky(result: Tensor, target: Tensor) -> float:
        if torch.equal(result, narrow):
            raise ArithmeticError("too <narrow>")
        return 1.0

    narrow = fxround.compile(mlp(), "bfloat16").evaluate(batches()[0][0])
    plain = fxround.compare(mlp(), batches(), ["int8", "identity", POLICIES[2]], ["accuracy", "sqnr"], samples=3)
    accuracy, sqnr = plain.plot(tmp_path / "plot.svg").axes
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert [text.get_text() for text in accuracy.texts] == ["int8", "identity", POLICIES[2]]
    assert [text.get_text() for text in sqnr.texts] == ["int8", POLICIES[2]] and "identity: inf" in sqnr.get_xlabel()
    shown = plain[POLICIES[2]]
    bar = next(c for c in sqnr.containers if c.lines[0].get_xdata()[0] == shown.costs.weight_bits == 8)
    (segment,) = bar.lines[2][0].get_segments()
    mean, spread = shown.metric("sqnr").mean, shown.metric("sqnr").spread
    assert bar.lines[0].get_ydata()[0] == mean and spread > 0
    assert [y for _, y in segment] == [mean - spread, mean + spread]
    assert "operand" in plain.plot(bits="activation").axes[0].get_xlabel()
    with pytest.raises(ValueError, match="bits is 'words'; expected one of 'weight', 'activation'"):
        plain.plot(bits="words")
    report = fxround.compare(mlp(), batches(), ["bfloat16", "int8"], picky)
    assert "bfloat16: failed" in report.plot().axes[0].get_xlabel()
    text = report.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text and "<svg" in text
    assert "ArithmeticError: too &lt;narrow&gt;" in text and "too <narrow>" not in text.partition("<script")[0]
    archived = text.partition('id="report">')[2].partition("</script>")[0]
    assert json.loads(archived) == report.to_dict()


def test_metrics_that_compare_nothing_read_no_reference() -> None:
    # Their results of the unrounded model are not kept.
    quiet = [metric for metric in METRICS.values() if not metric.compares]
    assert [metric.name for metric in quiet] == ["accuracy", "perplexity"]
    logits, tokens = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 2, 1]])
    for metric in (fxround.metric("accuracy", class_dim=-1), METRICS["perplexity"]):
        assert math.isfinite(metric.finish(metric.measure(logits, None, ModelCall((tokens,), target=tokens))))


def test_a_metric_of_ones_own() -> None:
    largest = Metric(
        "largest", "magnitude", "", "lower", lambda r, _, call: (float(r.abs().max()),), lambda s: s[0], "greatest"
    )
    report = fxround.compare(mlp(), batches(), ["bfloat16"], largest)
    compiled = fxround.compile(mlp(), "bfloat16")
    assert report["bfloat16"].metric("largest").values == (
        max(float(compiled(x).detach().abs().max()) for x, _ in batches()),
    )


class Conv(nn.Module):
    """A convolution of 2 to 8 channels and a linear layer of 8 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.conv(x).relu().mean(-1))
        return y


# Elements: weights 48 + 8 + 24 + 3, operands 5 * 2 * 10 and 5 * 8.
WEIGHTS, BIASES, OPERANDS = 72, 11, 140


@pytest.mark.parametrize(
    "policy, weights, operands",
    [
        ("identity", 32 * WEIGHTS, 32 * OPERANDS),
        ("bfloat16", 16 * (WEIGHTS + BIASES) - 32 * BIASES, 16 * OPERANDS),
        # A scale of 32 bits for each tensor, for each output channel or row, and for blocks of 8 along the sum.
        ("int8", 8 * WEIGHTS + 2 * 32, 8 * OPERANDS + 2 * 32),
        ("int4:channel", 4 * WEIGHTS + (8 + 3) * 32, 4 * OPERANDS + (5 + 5) * 32),
        # Blocks are along channels: each of 8 * 3 positions of the first weight, each of 50 of its input.
        ("uint4:8", 4 * WEIGHTS + (24 + 3) * 36, 4 * OPERANDS + (50 + 5) * 36),
        ("nvfp4", 4 * WEIGHTS + (24 + 3) * 8 + 2 * 32, 4 * OPERANDS + (50 + 5) * 8 + 2 * 32),
        ("fixed(8,4)", 8 * WEIGHTS, 8 * OPERANDS),
    ],
)
def test_bits_are_those_of_codes_and_scales(policy: str, weights: int, operands: int) -> None:
    compiled = fxround.compile(Conv().eval(), policy)
    with torch.no_grad():
        costs = costs_of(compiled.prepare(torch.randn(5, 2, 10)).lowered)
    assert costs.weight_bits is not None and costs.activation_bits is not None
    # Means of counts below 2^53, in another order of operations.
    assert costs.weight_bits == pytest.approx(float(Fraction(weights + 32 * BIASES, WEIGHTS + BIASES)), rel=1e-14)
    assert costs.activation_bits == pytest.approx(float(Fraction(operands, OPERANDS)), rel=1e-14)
    assert sum(costs.multiply_adds.values()) == 5 * 10 * 8 * 2 * 3 + 5 * 8 * 3


def test_multiply_adds_are_counted_by_the_formats_of_both_operands() -> None:
    rules = (
        Rule(operator="contraction", role="weight", operands="int4:channel"),
        Rule("fc", role="activation", operands="e4m3fn"),
    )
    compiled = fxround.compile(Conv().eval(), Policy("mixed", rules))
    with torch.no_grad():
        costs = costs_of(compiled.prepare(torch.randn(5, 2, 10)).lowered)
    assert costs.multiply_adds == {"binary32 x int4:channel": 5 * 10 * 8 * 2 * 3, "e4m3fn x int4:channel": 5 * 8 * 3}


@pytest.mark.parametrize("unroll", [False, True])
def test_a_loop_counts_each_step(unroll: bool) -> None:
    lstm = nn.LSTM(8, 4, batch_first=True).eval()
    compiled = fxround.compile(lstm, "bfloat16", unroll_loops=unroll)
    with torch.no_grad():
        costs = costs_of(compiled.prepare(torch.randn(2, 5, 8)).lowered)
    assert costs.multiply_adds == {"bfloat16": 5 * 2 * (8 + 4) * 16}
    assert costs.weight_bits == costs.activation_bits == 16


@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "int8", "int4:channel", "uint4:8", "int8:4x4", "int8:tensor"])
def test_a_short_name_is_the_format(text: str) -> None:
    rounding = ScaledRounding.parse(text)
    name = short_name(rounding.format)
    assert ScaledRounding.parse(name).format == rounding.format and len(name) <= len(text)


def test_names_of_policies_at_one_place_do_not_cover_each_other() -> None:
    model, x = nn.Linear(8, 3), torch.rand(6, 8)
    names = ["bfloat16", "binary16", "e4m3fn", "e5m2", "int8:channel", "mxfp8", "fp8"]
    figure = fxround.compare(model, x, names, fxround.metric(lambda result, target: 1.0, better="higher")).plot()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(names)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
