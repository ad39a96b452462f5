"""Perplexity per width: bits of the policies it stands for, sites that share nothing, intervals and interruptions."""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.cli import main
from fxround.significance.perplexity import sites_of
from fxround.significance.perplexity_report import Perplexity

TOKENS = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A mixture of the tokens so far, then two products."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1]).tril()
        return x + self.mlp(self.attn(causal @ x))


class Reader(nn.Module):
    """A causal model of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.lm_head = nn.Embedding(7, 5), Block(), nn.Linear(5, 7)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.block(self.embedding(ids)))
        return logits


def reader() -> Reader:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Reader().eval()


def build() -> tuple[Reader, Tensor]:
    return reader(), TOKENS


def surprise(logits: Tensor) -> float:
    # The metric's own definition, in binary64: the bits of the logits alone decide it.
    lost = F.cross_entropy(logits.detach()[:, :-1].double().flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    return math.exp(float(lost) / TOKENS[:, 1:].numel())


@pytest.mark.long
def test_values_are_those_of_the_policies_and_24_bits_to_nearest_change_none() -> None:
    model = reader()
    report = fxround.perplexity(model, TOKENS, (4, 24), 3, seed=5)
    found = {(f.site, f.width, f.mode): f.values for f in report.figures}
    assert list(report.sites) == ["everything", "attention", "mlp", "head"] and len(found) == 16 and report.complete
    fixed = fxround.compile(model, "reproducible")(TOKENS)
    assert report.baseline == surprise(fixed)
    assert all(found[site, 24, "nearest_even"] == (report.baseline,) for site in report.sites)
    for site, match in (("everything", "*"), ("mlp", "block.mlp")):
        narrow = Rule(match, rounding="ieee(8,4)/stochastic", accumulate="ieee(8,4)/stochastic")
        compiled = fxround.compile(model, Policy.preset("reproducible").with_rules(narrow), seed=5)
        values = tuple(surprise(compiled.reseed(5, sample=i)(TOKENS)) for i in range(3))
        assert found[site, 4, "stochastic"] == values and len(set(values)) == 3
    # The same seed gives the same report; another one does not.
    again = [fxround.perplexity(model, TOKENS, (4,), 3, seed=seed, modes=("stochastic",)) for seed in (5, 6)]
    assert [f.values == found[f.site, 4, f.mode] for r in again for f in r.figures] == [True] * 4 + [False] * 4


def test_sites_share_no_operation() -> None:
    model = reader()
    sites = sites_of(model)
    assert sites == {"everything": ("*",), "attention": ("*.attn",), "mlp": ("*.mlp",), "head": ("lm_head",)}
    operations = fxround.compile(model, "reproducible", example_inputs=TOKENS).summary().operations
    found = []
    for globs in list(sites.values())[1:]:
        rules = [Rule(glob, rounding="bfloat16") for glob in globs]
        found.append({
            o.node for o in operations
            if any(r.matches(path=o.module, operator=o.operator, kind=o.kind, role="activation") for r in rules)
        })  # fmt: skip
    assert all(found) and len(set.union(*found)) == sum(map(len, found))


def test_an_interval_is_students() -> None:
    values = (3.5, 3.25, 4.0, 3.125)
    figure = Perplexity("head", 4, "stochastic", values, 0.9)
    error = statistics.stdev(values) / math.sqrt(4)
    low, high = stats.t.interval(0.9, 3, statistics.fmean(values), error)
    # Not bits: SciPy's quantile and our own round at other places of the same formula in binary64.
    assert figure.mean - figure.half_width == pytest.approx(low, rel=1e-12)
    assert figure.mean + figure.half_width == pytest.approx(high, rel=1e-12)
    assert Perplexity("head", 4, "nearest_even", (3.5,), 0.9).half_width is None
    broken = Perplexity("head", 2, "stochastic", (3.5, math.inf), 0.9)
    assert broken.mean == math.inf and broken.half_width is None


def test_a_report_tells_the_width_that_a_site_needs(capsys: pytest.CaptureFixture[str]) -> None:
    report = fxround.perplexity(reader(), TOKENS, (2, 9, 24), 2, sites={"all": "*"}, modes=("nearest_even",))
    two, nine, all_bits = (f.mean for f in report.figures)
    assert report.baseline is not None and all_bits == report.baseline != nine
    far, near = sorted((abs(two - all_bits), abs(nine - all_bits)), reverse=True)
    assert two > all_bits and near < abs(two - all_bits) == far
    shares = (-1e-9, (near + far) / 2 / all_bits, 2 * far / all_bits)
    assert [[row["width"] for row in report.needed(share)] for share in shares] == [[None], [9], [2]]
    data = json.loads(report.to_json())
    assert data["figures"][0] == {
        "site": "all", "width": 2, "mode": "nearest_even", "perplexity": two, "low": None, "high": None,
        "samples": 1, "values": [two],
    }  # fmt: skip
    assert "all nearest_even" in str(report) and list(report.to_pandas()["width"]) == [2, 9, 24]
    here = f"{__file__}:build"
    asked = ["--widths", "24", "--samples", "2", "--site", "block=block", "--mode", "nearest_even", "--json", "-"]
    assert main(["perplexity", here, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][0]["perplexity"] == report.baseline


def test_ctrl_c_keeps_what_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxround.module.rounded_module import RoundedModule

    calls: list[int] = []
    evaluate: Callable[..., Any] = RoundedModule.evaluate

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the baseline, one run to nearest, and the second of three samples
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(RoundedModule, "evaluate", interrupted)
    report = fxround.perplexity(reader(), TOKENS, (4,), 3)
    assert not report.complete and [len(f.values) for f in report.figures] == [1, 2] and "INTERRUPTED" in str(report)


def test_padding_and_labels_say_which_tokens_count() -> None:
    class Output(dict[str, Tensor]):
        @property
        def logits(self) -> Tensor:
            return self["logits"]

    from fxround.significance.inputs import ModelCall
    from fxround.significance.metrics import METRICS

    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    ids = TOKENS[:2, :4]
    metric = METRICS["perplexity"]

    def of(**kwargs: Tensor) -> float:
        found = Output(loss=torch.zeros(()), logits=logits)
        return metric.finish(metric.measure(found, found, ModelCall((), {"input_ids": ids, **kwargs})))

    mask = torch.ones_like(ids)
    mask[0, 2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    lost = [-float(logits.double().log_softmax(-1)[i, t, ids[i, t + 1]]) for i, t in ((0, 0), (1, 0), (1, 1), (1, 2))]
    # Not bits: statistics.fmean sums exactly, the metric in binary64, and exp magnifies the difference.
    assert of(attention_mask=mask) == of(labels=labels) == pytest.approx(math.exp(statistics.fmean(lost)), rel=1e-12)
    assert of() != of(labels=labels)
    huge = torch.full((1, 2, 7), 1e6)
    huge[..., int(ids[0, 1])] = 0.0
    assert metric.finish(metric.measure(huge, huge, ModelCall((ids[:1, :2],)))) == math.inf


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"widths": (1,)}, ValueError, "from 2 to 24"),
        ({"widths": ()}, ValueError, "nothing"),
        ({"samples": 1}, ValueError, "at least 2"),
        ({"confidence": 1.0}, ValueError, "less than 1"),
        ({"sites": {"typo": "*.attention"}}, PolicyError, "matches no operation"),
        ({"sites": {"none": ()}}, TypeError, "globs"),
        ({"sites": "mlp"}, TypeError, "sites is 'mlp'; expected a dict"),
        ({"sites": {}}, TypeError, "sites is .*; expected a dict"),
        ({"widths": 4}, TypeError, "widths is 4; expected several"),
        ({"modes": "stochastic"}, TypeError, "modes is 'stochastic'; expected several"),
        ({"modes": ()}, ValueError, "modes has nothing; expected names of rounding modes"),
        ({"sites": {"mlp": 3}}, TypeError, "sites has 'mlp': 3; expected a name and globs"),
        ({"modes": ("nearest",)}, ValueError, "nearest_even"),
    ],
)
def test_wrong_arguments_say_what_was_expected(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fxround.perplexity(reader(), TOKENS, **{"widths": (4,), "samples": 2, **change})


def test_modes_may_be_read_once() -> None:
    found = fxround.perplexity(reader(), TOKENS, (4,), 2, sites={"all": "*"}, modes=iter(("nearest_even",)))  # type: ignore[arg-type]
    assert [(figure.site, figure.mode) for figure in found.figures] == [("all", "nearest_even")]


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.eval"):
        fxround.perplexity(reader().train(), TOKENS)


def test_texts_of_one_token_predict_nothing() -> None:
    with pytest.raises(ValueError, match="no text has two tokens that count"):
        fxround.perplexity(reader(), TOKENS[:, :1], (4,), 2)
