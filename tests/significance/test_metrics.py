"""Metrics compared with the libraries that define them, and sums over batches compared with the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics
from torch import Tensor

from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import METRICS, chosen, dice_of, dice_sums, labels
from fxround.significance.recorder import Measured, Recorder

G = torch.Generator().manual_seed(5)
NOTHING = ModelCall(())


def value(name: str, sample: Tensor, reference: Tensor, call: ModelCall = NOTHING) -> float:
    metric = METRICS[name]
    return metric.finish(metric.measure(sample, reference, call))


def pair(*shape: int, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    reference = torch.randn(*shape, generator=G)
    return reference + spread * torch.randn(*shape, generator=G), reference


def test_every_metric_finds_nothing_in_equal_results() -> None:
    logits = torch.randn(3, 4, 5, generator=G).softmax(-1)
    call = ModelCall((torch.randint(0, 5, (3, 4), generator=G),), target=logits.argmax(-1))
    neutral = {"sqnr": math.inf, "relative_error": 0, "max_ulp": 0, "label_flips": 0, "top_k": 1, "accuracy": 1}
    neutral |= {"dice": 1, "dice_pairs": 1, "wasserstein_1": 0, "kl": 0}
    assert set(neutral) | {"perplexity"} == set(METRICS)
    for name, expected in neutral.items():
        assert value(name, logits, logits, call) == expected, name


def test_signal_and_error() -> None:
    x, r = pair(40, 7)
    noise = ((x.double() - r.double()) ** 2).sum() / (r.double() ** 2).sum()
    # Sums in another order, in binary64.
    assert value("sqnr", x, r) == pytest.approx(-10 * math.log10(noise), rel=1e-12)
    assert value("relative_error", x, r) == pytest.approx(math.sqrt(noise), rel=1e-12)


def test_a_sample_that_is_not_finite_has_no_signal_over_its_error() -> None:
    x, r = pair(4, 7)
    assert value("sqnr", x / 0, r) == -math.inf and math.isnan(value("sqnr", x * math.nan, r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_ulps_are_steps_of_the_format(dtype: torch.dtype) -> None:
    r = torch.tensor([1.0, 2.0, -3.0, 0.0, 5e-6], dtype=dtype)
    x = r.clone()
    x[2] = torch.nextafter(torch.nextafter(r[2], r[1]), r[1]) if dtype in (torch.float32, torch.float64) else r[2]
    steps = 2.0 if dtype in (torch.float32, torch.float64) else 0.0
    assert value("max_ulp", x, r) == steps
    tiny = torch.tensor([torch.finfo(dtype).smallest_normal / 2], dtype=dtype)
    assert value("max_ulp", torch.zeros(1, dtype=dtype), tiny) == 2.0 ** (round(-math.log2(torch.finfo(dtype).eps)) - 1)
    assert value("max_ulp", torch.tensor([math.inf], dtype=dtype), r[:1]) == math.inf


def test_labels_and_accuracy() -> None:
    x, r = pair(60, 5, spread=1.0)
    flips = int((x.argmax(1) != r.argmax(1)).sum()) / 60
    assert 0 < value("label_flips", x, r) == flips
    target = torch.randint(0, 5, (60,), generator=G)
    assert value("accuracy", x, r, ModelCall((), target=target)) == sklearn_metrics.accuracy_score(target, x.argmax(1))
    assert labels(torch.zeros(2, 3, 4, 4)).shape == (2, 4, 4)
    assert labels(torch.zeros(2, 7, 3)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(10, 3), (3, 4, 8, 8), (3, 4, 6, 6, 6)])
def test_targets_may_have_one_channel_and_are_not_broadcast(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=G)
    target = x.argmax(1)
    target[0] = (target[0] + 1) % shape[1]
    count = target.numel()
    right = (count - target[0].numel()) / count  # one division of two whole numbers, as in the metric
    for given in (target, target.unsqueeze(1)):
        assert value("accuracy", x, x, ModelCall((), target=given)) == right
    for given in (target[:1], target.flatten()[:1], target.unsqueeze(-1).unsqueeze(-1)):
        with pytest.raises(ValueError, match="expected one class for each label"):
            value("accuracy", x, x, ModelCall((), target=given))


@pytest.mark.parametrize("name", ["label_flips", "top_k", "accuracy", "dice", "dice_pairs", "kl"])
def test_one_channel_has_no_labels(name: str) -> None:
    """The greatest of one class is always the same: nothing could ever change."""
    x, r = pair(2, 1, 8, 8)
    with pytest.raises(ValueError, match=r"has 1 class in dimension 1; expected at least two\. .*torch\.cat"):
        value(name, x, r, ModelCall((), target=(r > 0).long()))
    two = torch.cat([-x, x], 1)
    assert torch.equal(labels(two).bool(), x[:, 0] > 0)


def test_top_k_counts_the_shared_classes() -> None:
    x, r = pair(30, 20, spread=1.0)
    shared = [len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) for a, b in zip(x, r, strict=True)]
    assert value("top_k", x, r) == sum(shared) / 150
    assert value("top_k", *pair(4, 3)) == 1


def test_dice_is_f1_of_every_class() -> None:
    x, r = pair(4, 3, 8, 8, spread=1.0)
    a, b = labels(x).flatten(), labels(r).flatten()
    expected = sklearn_metrics.f1_score(b, a, average=None)
    assert dice_of(dice_sums(a, b, 3)) == tuple(expected)
    assert value("dice", x, r) == min(expected)


def test_dice_of_pairs_is_the_minimum_over_all_pairs_and_batches() -> None:
    batches = [torch.randn(5, 2, 3, 6, 6, generator=G) for _ in range(2)]
    recorder = Recorder(METRICS["dice_pairs"])
    for samples in batches:
        for i, sample in enumerate(samples):
            recorder.take(i, sample, sample, NOTHING)
        recorder.end(NOTHING)
    whole = torch.cat(batches, 1).argmax(2).flatten(1)
    pairs = [(i, j) for j in range(5) for i in range(j)]
    expected = {(i, j): min(sklearn_metrics.f1_score(whole[i], whole[j], average=None)) for i, j in pairs}
    found = recorder.measured()
    assert found is not None and len(found.values) == 10
    assert found.worst == min(expected.values())
    assert found.classes is not None and min(found.classes) == found.worst


def test_transport_is_scipys() -> None:
    x, r = (t.softmax(-1) for t in pair(6, 30))
    steps = np.arange(30)
    expected = np.mean(
        [stats.wasserstein_distance(steps, steps, a, b) for a, b in zip(x.numpy(), r.numpy(), strict=True)]
    )
    # scipy adds in binary64 in another order, from weights in binary32.
    assert value("wasserstein_1", x, r) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="must not be negative"):
        value("wasserstein_1", r, r - 1)


def test_divergence_is_scipys() -> None:
    x, r = pair(6, 30)
    p, q = (t.double().softmax(1).numpy() for t in (r, x))
    # The same sum by another route, in binary64.
    assert value("kl", x, r) == pytest.approx(
        np.mean([stats.entropy(a, b) for a, b in zip(p, q, strict=True)]), rel=1e-9
    )


def test_perplexity_is_of_the_next_token() -> None:
    logits, _ = pair(2, 6, 11)
    tokens = torch.randint(0, 11, (2, 6), generator=G)
    chance = logits.double().softmax(-1)
    lost = [-math.log(chance[i, t, tokens[i, t + 1]]) for i in range(2) for t in range(5)]
    # The same sum by another route, in binary64.
    assert value("perplexity", logits, logits, ModelCall((tokens,))) == pytest.approx(math.exp(np.mean(lost)), rel=1e-9)
    with pytest.raises(ValueError, match="integer tokens"):
        value("perplexity", logits, logits, ModelCall((logits,)))


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if not m.pairs])
def test_batches_add_up_to_the_whole(name: str) -> None:
    x, r = (t.softmax(-1) for t in pair(9, 4, 6))
    tokens = torch.randint(0, 6, (9, 4), generator=G)
    recorder = Recorder(METRICS[name])
    for part in (slice(0, 2), slice(2, 9)):
        call = ModelCall((tokens[part],), target=tokens[part], offset=part.start)
        recorder.take(0, x[part], r[part], call)
        recorder.end(call)
    found = recorder.measured()
    assert found is not None and found.of == 9
    # Sums of parts, in binary64.
    assert found.values[0] == pytest.approx(value(name, x, r, ModelCall((tokens,), target=tokens)), rel=1e-12)
    if METRICS[name].rows is not None:
        moved = (x.argmax(-1) != r.argmax(-1)).any(1)
        assert found.rows == tuple(moved.nonzero().flatten().tolist())


def test_functions_and_unknown_names() -> None:
    def worst(sample: Tensor, reference: Tensor) -> float:
        return float((sample - reference).abs().max())

    (metric,) = chosen(worst, torch.zeros(1))
    x, r = pair(4, 3)
    assert metric.name == "worst"
    assert metric.finish(metric.measure(x, r, ModelCall((x,)))) == pytest.approx(worst(x, r), rel=1e-12)
    with pytest.raises(ValueError, match="no metric is named 'bleu'"):
        chosen(("bleu",), x)
    with pytest.raises(TypeError, match="a metric is a name"):
        chosen((3,), x)
    assert [m.name for m in chosen("auto", x)] == ["sqnr", "max_ulp", "label_flips"]
    assert [m.name for m in chosen("auto", {"y": x.flatten()})] == ["sqnr", "max_ulp"]
    assert chosen("auto", torch.zeros(3, dtype=torch.long)) == () == chosen(None, x)


def test_equal_values_have_no_spread() -> None:
    # The mean of three times 0.1 is rounded to another number.
    assert Measured("m", "", "", "higher", (0.1, 0.1, 0.1)).spread == 0.0
