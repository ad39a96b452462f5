"""Metrics compared with the libraries that define them, and sums over batches compared with the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import metrics_of_torch
from scipy import stats
from sklearn import metrics as sklearn_metrics
from torch import Tensor

import fxround
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import METRICS, Classes, Metric, chosen, dice_of, dice_sums, metric
from fxround.significance.recorder import Measured, Recorder

G = torch.Generator().manual_seed(5)
NOTHING = ModelCall(())


# What is a quotient of whole numbers, with the same bits in any order.
COUNTS = {"label_flips", "top_k", "accuracy", "dice"}
SEQUENCE = {"label_flips", "top_k", "accuracy", "dice", "dice_pairs", "kl"}


def value(name: str | Metric, sample: Tensor, reference: Tensor, call: ModelCall = NOTHING) -> float:
    chosen_metric = METRICS[name] if isinstance(name, str) else name
    return chosen_metric.finish(chosen_metric.measure(sample, reference, call))


def of_sequence(name: str) -> Metric:
    """The metric for results [n, time, classes]."""
    return metric(name, class_dim=-1) if name in SEQUENCE else METRICS[name]


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
        assert value(of_sequence(name), logits, logits, call) == expected, name


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
    assert Classes().labels(torch.zeros(2, 3, 4, 4)).shape == (2, 4, 4)
    assert Classes().labels(torch.zeros(2, 7, 3)).shape == (2, 3)
    assert Classes(-1).labels(torch.zeros(2, 7, 3)).shape == (2, 7)


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
    with pytest.raises(ValueError, match=r"has 1 class in dimension 1; expected at least two\. .*threshold=0\.0"):
        value(name, x, r, ModelCall((), target=(r > 0).long()))


def test_top_k_counts_the_shared_classes() -> None:
    x, r = pair(30, 20, spread=1.0)
    shared = [len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) for a, b in zip(x, r, strict=True)]
    assert value("top_k", x, r) == sum(shared) / 150
    assert value("top_k", *pair(4, 3)) == 1


def test_dice_is_f1_of_every_class() -> None:
    x, r = pair(4, 3, 8, 8, spread=1.0)
    a, b = x.argmax(1).flatten(), r.argmax(1).flatten()
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
    whole = of_sequence(name)
    recorder = Recorder(whole)
    for part in (slice(0, 2), slice(2, 9)):
        call = ModelCall((tokens[part],), target=tokens[part], offset=part.start)
        recorder.take(0, x[part], r[part], call)
        recorder.end(call)
    measured = recorder.measured()
    assert measured is not None and measured.of == 9
    expected = value(whole, x, r, ModelCall((tokens,), target=tokens))
    if name in COUNTS:
        assert measured.values[0] == expected
    else:
        # Bits cannot be compared: two sums of parts round otherwise than one sum does.
        assert measured.values[0] == pytest.approx(expected, rel=1e-12)
    if whole.changed is not None:
        moved = x.argmax(-1) != r.argmax(-1)
        assert measured.rows == tuple(moved.any(1).nonzero().flatten().tolist())
        assert (measured.changed, measured.labels) == (int(moved.sum()), 36)
        assert measured.changed_share == int(moved.sum()) / 36


# Labels of two classes in two rows of three.
REFERENCE_LABELS = torch.tensor([[0, 1, 1], [0, 0, 1]])
SAMPLE_LABELS = torch.tensor([[0, 1, 0], [1, 0, 1]])
TARGETS = torch.tensor([[0, 1, 1], [1, 0, 1]])
BY_HAND = {
    "label_flips": 2 / 6,  # the third of the first row, the first of the second
    "accuracy": 5 / 6,
    # Class 0: twice 2 common of 3 and 3. Class 1 likewise.
    "dice": 4 / 6,
    # An equal label gives 0; a flip of logits (0, 2) to (2, 0) gives p log(p / q) + q log(q / p) = 2 (p - q), with
    # p = 1 / (1 + exp(-2)).
    "kl": 2 * 2 * math.tanh(1) / 6,
}


def scores(classes: Tensor, where: int) -> Tensor:
    """Logits of 2 for the class and 0 for the other one."""
    return (2.0 * torch.nn.functional.one_hot(classes, 2)).movedim(-1, where)


@pytest.mark.parametrize("shape, where", [((6,), 1), ((2, 3), 1), ((2, 3), -1), ((2, 1, 3), 1), ((2, 3, 1, 1), 1)])
@pytest.mark.parametrize("name", BY_HAND)
def test_every_layout_has_the_value_computed_by_hand(name: str, shape: tuple[int, ...], where: int) -> None:
    sample, reference, target = (t.reshape(shape) for t in (SAMPLE_LABELS, REFERENCE_LABELS, TARGETS))
    call = ModelCall((), target=target)
    chosen_metric = METRICS[name] if where == 1 else metric(name, class_dim=where)
    got = value(chosen_metric, scores(sample, where), scores(reference, where), call)
    if name == "kl":
        # Bits cannot be compared: the exponentials and logarithms of the softmax round on the way, and tanh here.
        assert got == pytest.approx(BY_HAND[name], rel=1e-15)
        return
    assert got == BY_HAND[name]
    # One channel of logits, positive where the class is 1.
    binary = metric(name, threshold=0.0)
    for channel in (True, False):
        one = [(2.0 * t - 1).unsqueeze(1) if channel else 2.0 * t - 1 for t in (sample, reference)]
        assert value(binary, *one, call) == BY_HAND[name]


# Results of two rows of four, powers of two, and a sample in which two elements differ.
REFERENCE = torch.tensor([[1.0, 2.0, 4.0, 1.0], [8.0, 1.0, 2.0, 5.0]])
SAMPLE = torch.tensor([[1.0, 2.0, 6.0, 1.0], [8.0, 2.0, 2.0, 5.0]])
# The signal is 22 + 94, the perturbation 4 + 1.
NUMBERS_BY_HAND = {
    "sqnr": 10 * math.log10(116 / 5),
    "relative_error": math.sqrt(5 / 116),
    "max_ulp": 2.0**23,  # 1 over 2^-23, the ulp of 1; 2 over 2^-21, that of 4, is half as many
}


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (1, 2, 2, 2), (2, 1, 1, 2, 2)])
@pytest.mark.parametrize("name", NUMBERS_BY_HAND)
def test_numbers_have_the_value_computed_by_hand_in_every_layout(name: str, shape: tuple[int, ...]) -> None:
    sample, reference = SAMPLE.reshape(shape), REFERENCE.reshape(shape)
    assert value(name, sample, reference) == NUMBERS_BY_HAND[name]
    of_target = metric(name, against="target")
    call = ModelCall((), target=reference)
    assert value(of_target, sample, of_target.reference(sample, sample, call), call) == NUMBERS_BY_HAND[name]


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4), (2, 1, 1, 4)])
def test_transport_has_the_value_computed_by_hand(shape: tuple[int, ...]) -> None:
    reference = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]])
    sample = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.25, 0.0, 0.25]])
    # All mass moves by 2 steps; a quarter moves by 2.
    assert value("wasserstein_1", sample.reshape(shape), reference.reshape(shape)) == (2 + 0.5) / 2


@pytest.mark.parametrize("where, inner", [(1, ()), (1, (2,)), (-1, (2,)), (1, (2, 1)), (1, (1, 2, 1))])
def test_top_k_has_the_value_computed_by_hand(where: int, inner: tuple[int, ...]) -> None:
    """Seven classes: the five greatest are 0 to 4 in one result, 1 to 5 in the other."""
    falling, turned = (torch.tensor(row) for row in ([7.0, 6, 5, 4, 3, 2, 1], [2.0, 7, 6, 5, 4, 3, 1]))

    def wide(row: Tensor) -> Tensor:
        return row.expand(3, *inner, 7).movedim(-1, where)

    chosen_metric = METRICS["top_k"] if where == 1 else metric("top_k", class_dim=where)
    assert value(chosen_metric, wide(turned), wide(falling)) == 4 / 5
    for label, kept in ((0, 0.0), (1, 1.0), (5, 1.0), (6, 0.0)):
        of_target = replace(chosen_metric, against="target")
        call = ModelCall((), target=torch.full((3, *inner), label))
        assert value(of_target, wide(turned), of_target.reference(wide(turned), None, call), call) == kept


def test_dice_of_pairs_has_the_value_computed_by_hand() -> None:
    for shape, where in (((6,), 1), ((2, 3), 1), ((2, 3), -1), ((2, 1, 3), 1)):
        recorder = Recorder(metric("dice_pairs", class_dim=where))
        for i, labels in enumerate((REFERENCE_LABELS, SAMPLE_LABELS, REFERENCE_LABELS)):
            recorder.take(i, scores(labels.reshape(shape), where), None, NOTHING)
        measured = recorder.measured()
        # Pairs 01, 02, 12.
        assert measured is not None and sorted(measured.values) == [4 / 6, 4 / 6, 1.0]


def test_perplexity_has_the_value_computed_by_hand() -> None:
    """Equal logits of four tokens: each has a probability of a quarter."""
    tokens = torch.tensor([[0, 1, 2], [3, 3, 3]])
    # Bits cannot be compared: the logarithm of the softmax and the exponential round.
    assert value("perplexity", torch.zeros(2, 3, 4), None, ModelCall((tokens,))) == pytest.approx(4, rel=1e-15)


@pytest.mark.parametrize("shape, where", [((6,), 1), ((2, 3), 1), ((2, 3), -1), ((2, 1, 3), 1), ((2, 3, 1, 1), 1)])
@pytest.mark.parametrize("form", ["labels", "one channel", "floats", "bytes", "scores"])
def test_targets_of_every_layout_have_the_value_computed_by_hand(shape: tuple[int, ...], where: int, form: str) -> None:
    sample, target = (t.reshape(shape) for t in (SAMPLE_LABELS, TARGETS))
    given = {
        "labels": target,
        "one channel": target.unsqueeze(where),
        "floats": target.double(),
        "bytes": target.to(torch.uint8),
        "scores": torch.nn.functional.one_hot(target, 2).movedim(-1, where),
    }[form]
    result, call = scores(sample, where), ModelCall((), target=given)
    # One of six labels is wrong: class 0 has 2 common of 3 and 2, class 1 has 3 common of 3 and 4.
    for name, expected in (("label_flips", 1 / 6), ("accuracy", 5 / 6), ("dice", 4 / 5)):
        of_target = METRICS[name] if name == "accuracy" else metric(name, against="target")
        if where != 1:
            of_target = replace(metric(name, class_dim=where), against=of_target.against)
        assert value(of_target, result, of_target.reference(result, None, call), call) == expected
    if form == "scores":
        return
    binary = metric("dice", threshold=0.0, against="target")
    one = (2.0 * sample - 1).unsqueeze(1)
    at = ModelCall((), target=target.unsqueeze(1) if form == "one channel" else given)
    assert value(binary, one, binary.reference(one, None, at), at) == 4 / 5


def test_a_target_of_minus_100_does_not_count() -> None:
    target = TARGETS.clone()
    target[0, 2] = target[1, 2] = -100  # the wrong label, and a right one
    result, call = scores(SAMPLE_LABELS, 1), ModelCall((), target=target)
    for name, expected in (("label_flips", 0.0), ("accuracy", 1.0), ("dice", 1.0), ("top_k", 1.0)):
        of_target = METRICS[name] if name == "accuracy" else metric(name, against="target")
        assert value(of_target, result, of_target.reference(result, None, call), call) == expected


@pytest.mark.parametrize(
    "target, said",
    [
        (None, "compared with targets, and the data have none: batches"),
        ("cat", "dice needs targets"),
        (TARGETS + 1, "has the target 2; expected classes from 0 to 1, or -100 for none"),
        (TARGETS - 0.5, "no whole numbers"),
        (TARGETS[:1], r"labels of shape \(2, 3\) with targets of shape \(1, 3\)"),
    ],
)
def test_targets_that_are_no_classes_are_refused(target: object, said: str) -> None:
    of_target, result = metric("dice", against="target"), scores(SAMPLE_LABELS, 1)
    with pytest.raises(ValueError, match=said):
        of_target.reference(result, None, ModelCall((), target=target))


@pytest.mark.parametrize("name", ["kl", "dice_pairs", "perplexity", "accuracy"])
def test_what_has_its_own_reference_is_not_compared_with_targets(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .* cannot be compared with targets"):
        metric(name, against="target")


@pytest.mark.parametrize("shape", [(12, 4), (5, 3, 7), (4, 3, 5, 6), (2, 3, 4, 4, 4)])
def test_torchmetrics_counts_the_same(shape: tuple[int, ...]) -> None:
    """Its shares are in binary32, and so are compared by the whole numbers in them."""
    classification = metrics_of_torch().classification
    classes, labels = shape[1], (shape[0], *shape[2:])
    target = torch.randint(0, classes, labels, generator=G)
    recorders = [
        Recorder(chosen(one, None)[0])
        for one in (
            classification.MulticlassAccuracy(classes, average="micro"),
            classification.MulticlassF1Score(classes, average="macro"),
        )
    ]
    own = [Recorder(METRICS["accuracy"]), Recorder(metric("dice", against="target"))]
    x = torch.randn(shape, generator=G)
    for part in (slice(0, 1), slice(1, None)):
        call = ModelCall((x[part],), target=target[part], offset=part.start)
        for recorder in (*recorders, *own):
            recorder.take(0, x[part], x[part], call)
            recorder.end(call)
    theirs, ours = [r.measured() for r in recorders], [r.measured() for r in own]
    assert theirs[0] is not None and theirs[1] is not None and ours[0] is not None and ours[1] is not None
    assert (theirs[0].name, theirs[0].better) == ("MulticlassAccuracy", "higher")
    assert round(theirs[0].mean * target.numel()) == ours[0].mean * target.numel()
    assert ours[1].classes is not None
    # The mean of the classes' coefficients, in binary32 there.
    assert theirs[1].mean == pytest.approx(sum(ours[1].classes) / classes, rel=1e-6)


def test_an_object_of_torchmetrics_is_not_changed_and_compares_with_what_is_said() -> None:
    classification, error = metrics_of_torch().classification, metrics_of_torch().regression.MeanSquaredError()
    x, r = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 4.0]])
    for chosen_metric, expected in (
        (chosen(error, None)[0], 1.0),
        (metric(error, against="unperturbed"), 2.0),
        (metric(error, better="lower"), 1.0),
    ):
        call = ModelCall((x,), target=torch.tensor([[2.0, 3.0]]))
        recorder = Recorder(chosen_metric)
        assert recorder.take(0, x, r, call) == expected
        assert chosen_metric.better == "lower" and chosen_metric.compares == (chosen_metric.against == "unperturbed")
    assert not error.update_called
    with pytest.raises(ValueError, match="lower values of MeanSquaredError are better"):
        metric(error, better="higher")
    with pytest.raises(ValueError, match="MeanSquaredError is compared with targets, and the data have none"):
        Recorder(chosen(error, None)[0]).take(0, x, r, ModelCall((x,)))
    several = classification.MulticlassF1Score(2, average=None)
    with pytest.raises(ValueError, match=r"computes a tensor of shape \(2,\); expected one number"):
        Recorder(chosen(several, None)[0]).take(0, x, r, ModelCall((x,), target=torch.tensor([0])))
    settings = {chosen(classification.MulticlassAccuracy(n), None)[0].settings for n in (2, 3)}
    assert len(settings) == 2


def test_a_flip_in_one_channel_is_seen() -> None:
    x = torch.full((2, 1, 4, 4), -1.0)
    moved = x.clone()
    moved[0, 0, 1, 2] = 0.5
    call = ModelCall((x,))
    recorder = Recorder(metric("label_flips", threshold=0.0))
    recorder.take(0, moved, x, call)
    recorder.end(call)
    measured = recorder.measured()
    assert measured is not None and measured.rows == (0,)
    assert (measured.changed, measured.labels, measured.changed_share) == (1, 32, 1 / 32)


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if not m.pairs and n not in ("perplexity", "max_ulp")])
def test_the_order_of_rows_classes_and_voxels_does_not_count(name: str) -> None:
    x, r = (t.softmax(1) for t in pair(4, 3, 5, 5))
    target = torch.randint(0, 3, (4, 5, 5), generator=G)
    expected = value(name, x, r, ModelCall((), target=target))
    rows, classes, columns = (torch.randperm(n, generator=G) for n in (4, 3, 5))
    renamed = torch.empty(3, dtype=torch.long).scatter_(0, classes, torch.arange(3))
    orders = {
        "rows": (x[rows], r[rows], target[rows]),
        "classes": (x[:, classes], r[:, classes], renamed[target]),
        "voxels": (x[..., columns, :], r[..., columns, :], target[..., columns, :]),
    }
    for label, (a, b, wanted) in orders.items():
        got = value(name, a, b, ModelCall((), target=wanted))
        # Bits of sums cannot be compared: the order of the elements is that of the additions.
        assert got == (expected if name in COUNTS else pytest.approx(expected, rel=1e-12)), label


def test_the_order_of_rows_does_not_count_for_the_other_metrics() -> None:
    x, r = pair(4, 3, 5)
    tokens, rows = torch.randint(0, 5, (4, 3), generator=G), torch.randperm(4, generator=G)
    assert value("max_ulp", x[rows], r[rows]) == value("max_ulp", x, r)
    whole, moved = (value("perplexity", t, t, ModelCall((ids,))) for t, ids in ((x, tokens), (x[rows], tokens[rows])))
    # Bits of sums cannot be compared: the order of the rows is that of the additions.
    assert moved == pytest.approx(whole, rel=1e-6)
    pairs = []
    for order in (torch.arange(4), rows):
        recorder = Recorder(METRICS["dice_pairs"])
        for i, sample in enumerate((x, r, x + r)):
            recorder.take(i, sample[order], None, NOTHING)
        measured = recorder.measured()
        assert measured is not None
        pairs.append(measured.values)
    assert pairs[0] == pairs[1]


def test_classes_of_a_sequence_are_asked_for() -> None:
    """Logits of a language model: dimension 1 is the time, and a greatest time is no label."""
    tokens = torch.randint(0, 6, (2, 4), generator=G)
    x, r = pair(2, 4, 6)
    for name in sorted(SEQUENCE - {"accuracy"}):
        with pytest.raises(ValueError, match=r"classes may be in dimension 1 or 2; say which: .*class_dim=-1"):
            value(name, x, r, ModelCall((tokens,)))
    with pytest.raises(ValueError, match=r"Classes are in dimension 1 of a result"):
        value("accuracy", x, r, ModelCall((tokens,), target=tokens))
    assert value(metric("accuracy", class_dim=2), x, r, ModelCall((tokens,), target=x.argmax(-1))) == 1.0
    recorder = Recorder(METRICS["dice_pairs"])
    with pytest.raises(ValueError, match="say which"):
        recorder.take(0, x, r, ModelCall((tokens,)))


def test_results_of_other_shapes_are_not_broadcast() -> None:
    for name in ("sqnr", "relative_error", "max_ulp", "label_flips", "top_k", "dice", "wasserstein_1", "kl"):
        with pytest.raises(ValueError, match=r"have the shapes \(1, 3\) and \(4, 3\), and cannot be compared"):
            value(name, torch.ones(1, 3), torch.ones(4, 3))


def test_choices_that_a_metric_does_not_have_are_refused() -> None:
    assert metric("dice") is METRICS["dice"] and metric("sqnr", better="higher") is METRICS["sqnr"]
    for wanted, options, text in (
        ("sqnr", {"class_dim": 1}, "sqnr has no labels"),
        ("kl", {"threshold": 0.0}, "compares scores of classes"),
        ("dice", {"threshold": math.nan}, "threshold is nan"),
        ("dice", {"threshold": 0.0, "class_dim": 1}, "expected one of the two"),
        ("dice", {"better": "lower"}, "higher values of dice are better"),
        ("dice", {"better": "more"}, "expected 'higher' or 'lower'"),
        ("bleu", {}, "no metric is named 'bleu'"),
        (math.dist, {"class_dim": 1}, "a function has its own"),
    ):
        with pytest.raises(ValueError, match=text):
            metric(wanted, **options)
    for wanted, options in (
        ("dice", {"class_dim": "1"}),
        ("dice", {"class_dim": True}),
        ("dice", {"threshold": "0"}),
        (3, {}),
    ):
        with pytest.raises(TypeError):
            metric(wanted, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"classes are in dimension 5 of a result, .* got \(4, 3\)"):
        value(metric("dice", class_dim=5), *pair(4, 3))


def test_the_worst_value_of_a_function_needs_its_direction() -> None:
    def spread(sample: Tensor, reference: Tensor) -> float:
        return float((sample - reference).abs().max())

    def worst(chosen_metric: Metric) -> float:
        recorder = Recorder(chosen_metric)
        for i, step in enumerate((0.5, 2.0)):
            recorder.take(i, torch.zeros(1) + step, torch.zeros(1), ModelCall((torch.zeros(1),)))
        measured = recorder.measured()
        assert measured is not None
        return measured.worst

    assert worst(metric(spread, better="lower")) == 2.0
    assert worst(metric(spread, better="higher")) == 0.5
    assert math.isnan(worst(chosen(spread, None)[0])) and math.isnan(worst(metric(spread)))


def test_functions_and_unknown_names() -> None:
    def worst(sample: Tensor, reference: Tensor) -> float:
        return float((sample - reference).abs().max())

    (own,) = chosen(worst, torch.zeros(1))
    x, r = pair(4, 3)
    assert own.name == "worst"
    assert own.finish(own.measure(x, r, ModelCall((x,)))) == worst(x, r)  # times 4 rows and divided by 4
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


def test_a_metric_may_have_another_name_and_two_may_not_have_the_same() -> None:
    net, x = torch.nn.Linear(3, 4), torch.rand(6, 3)
    data, truth = [(x, torch.arange(6) % 4)], fxround.metric("dice", against="target", name="truth")
    report = fxround.variability(net, data, samples=5, metrics=["dice", truth], reference=None)
    alone = fxround.variability(net, data, samples=5, metrics=[replace(truth, name="dice", row="")], reference=None)
    assert [measured.name for measured in report.metrics] == ["dice", "truth"]
    assert report.metric("truth").values == alone.metric("dice").values != report.metric("dice").values
    with pytest.raises(ValueError, match=r"two metrics have the name 'dice'; give functions .* name='other'"):
        fxround.variability(net, data, samples=5, metrics=["dice", fxround.metric("dice", against="target")])
    with pytest.raises(ValueError, match="name is ''; expected a text"):
        fxround.metric("dice", name="")
