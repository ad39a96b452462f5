"""``ctc_loss`` and its gradient: over all alignments, operation by operation, and in the meaning of its options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import CaptureError

TARGETS = torch.tensor([[1, 1], [2, 1], [2, 7], [-1, 9]])
STEPS, SIZES = torch.tensor([5, 4, 3, 5]), torch.tensor([2, 2, 1, 0])


def log_probs(steps: int, batch: int, classes: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(steps, batch, classes, generator=generator, dtype=torch.float64)
    return x.log_softmax(2).to(dtype).requires_grad_()


def each_row(x: Tensor, targets: Tensor, steps: Tensor, sizes: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, steps, sizes, reduction="none")


def text_of(path: Sequence[int]) -> list[int]:
    """The labels of an alignment: repeated ones once, and no blanks."""
    return [label for label, _ in itertools.groupby(path) if label != 0]


def over_alignments(x: Tensor, text: list[int]) -> tuple[float, list[list[float]]]:
    """The loss of one row and its gradient, from the probabilities of all alignments added as rational numbers."""
    with mpmath.workprec(300):
        p = [[Fraction(*mpmath.libmp.to_rational(mpmath.exp(float(v))._mpf_)) for v in row] for row in x]
        at = [[Fraction(0)] * len(row) for row in p]
        for path in itertools.product(range(x.shape[1]), repeat=len(p)):
            if text_of(path) == text:
                probability = math.prod((p[t][label] for t, label in enumerate(path)), start=Fraction(1))
                for t, label in enumerate(path):
                    at[t][label] += probability
        whole = sum(at[0])
        loss = -mpmath.log(mpmath.mpf(whole.numerator) / whole.denominator)
        slopes = [[float(q - a / whole) for q, a in zip(*rows, strict=True)] for rows in zip(p, at, strict=True)]
        return float(loss), slopes


@pytest.mark.part("torch.float32-stochastic")
@pytest.mark.parametrize(
    "dtype, policy",
    [(torch.float32, "reproducible"), (torch.float64, "reproducible"), (torch.float32, "stochastic")],
    ids=str,
)
def test_losses_and_gradients_are_those_of_all_alignments(dtype: torch.dtype, policy: str) -> None:
    x = log_probs(5, 4, 3, dtype)
    with torch.no_grad():
        x[1, 0, 2] = x[2, 1, 0] = -math.inf
        x[4, 2] = math.nan  # behind the end of the row
    compiled = fxround.compile(each_row, policy)
    losses = compiled(x, TARGETS, STEPS, SIZES)
    (slopes,) = torch.autograd.grad(losses.sum(), x)
    expected, slopes_expected = torch.zeros(4, dtype=torch.float64), torch.zeros(5, 4, 3, dtype=torch.float64)
    for b in range(4):
        steps, text = int(STEPS[b]), TARGETS[b, : SIZES[b]].tolist()
        loss, rows = over_alignments(x.detach()[:steps, b], text)
        expected[b], slopes_expected[:steps, b] = loss, torch.tensor(rows, dtype=torch.float64)
    # A logarithm is at most A in magnitude. A step errs by 2 A + 6 units at most: log and its two sums round numbers
    # up to A + 2, and exp, its argument and the sums before it are relative errors. A posterior probability is a
    # product of T shares, each from logarithms with the errors of all steps before.
    magnitude, count = float(x.detach()[x.detach().isfinite()].abs().max()) * 5, 6
    error = count * (2 * magnitude + 6) * torch.finfo(dtype).eps
    assert (losses.detach() - expected).abs().max() <= error
    assert (slopes - slopes_expected).abs().max() <= 2 * count * error
    assert compiled.coverage().unrounded == ()


def test_long_rows_are_those_of_the_algorithm_in_many_digits() -> None:
    steps, text = 40, [1, 2, 2, 3, 1]
    x = log_probs(steps, 1, 4)
    labels = [0, *(label for pair in zip(text, [0] * len(text), strict=True) for label in pair)]
    with mpmath.workprec(200):
        a = [mpmath.mpf(1)] + [mpmath.mpf(0)] * (len(labels) - 1)
        for row in x[:, 0].tolist():
            before = [mpmath.mpf(0), mpmath.mpf(0), *a]
            a = [
                (before[s + 2] + before[s + 1] + (before[s] if s > 1 and label != labels[s - 2] else 0))
                * mpmath.exp(row[label])
                for s, label in enumerate(labels)
            ]
        expected = float(-mpmath.log(a[-1] + a[-2]))
    found = fxround.compile(F.ctc_loss, "reproducible")(x, torch.tensor([text]), (steps,), (5,), reduction="sum")
    # The bound above, with the loss for the largest logarithm that takes part.
    assert abs(found.item() - expected) <= (steps + 1) * (2 * expected + 6) * 2.0**-52


def once(function: Callable[[Any], Any], x: np.float32) -> np.float32:
    """A function rounded once to binary32; what these tests give to it has no subnormal results."""
    if x == -math.inf:
        return np.float32(0)
    with mpmath.workprec(24):
        return np.float32(float(function(mpmath.mpf(float(x)))))


def log_of_sum(*terms: np.float32) -> np.float32:
    m = max(terms)
    if m == -math.inf:
        return m
    total = once(mpmath.exp, terms[0] - m)
    for term in terms[1:]:
        total = total + once(mpmath.exp, term - m)
    return once(mpmath.log, total) + m


def test_losses_have_the_bits_of_the_formula() -> None:
    x = log_probs(5, 4, 3, torch.float32, seed=3)
    found = fxround.compile(each_row, "reproducible")(x, TARGETS, STEPS, SIZES)
    none, expected = np.float32(-math.inf), []
    for b in range(4):
        labels = [0, *(label for target in TARGETS[b, : SIZES[b]].tolist() for label in (target, 0))]
        a = [np.float32(0)] + [none] * (len(labels) - 1)
        for row in x.detach()[: STEPS[b], b].numpy():
            before = [none, none, *a]
            a = [
                log_of_sum(before[s + 2], before[s + 1], before[s] if s > 1 and label != labels[s - 2] else none)
                + row[label]
                for s, label in enumerate(labels)
            ]
        expected.append(-log_of_sum(a[-1], a[-2] if len(a) > 1 else none))
    assert found.detach().numpy().tobytes() == np.array(expected).tobytes()


PADDED, JOINED = (
    torch.tensor([[1, 1, 0], [0, 2, 4], [2, 0, 0], [4, 4, 4]]),
    torch.tensor([1, 1, 0, 2, 4, 4, 4, 4]),
)
# No alignment of the last row is as short as its input.
INPUTS, LENGTHS = (6, 4, 0, 4), (2, 3, 0, 3)


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "reduction, zero_infinity, targets, tensors",
    [
        ("none", False, PADDED, True),
        ("none", True, PADDED.int(), False),
        ("mean", False, PADDED, True),
        ("mean", True, JOINED, False),
        ("sum", True, PADDED, True),
        ("sum", False, JOINED, False),
    ],
)
def test_options_mean_what_they_mean_in_pytorch(
    reduction: str, zero_infinity: bool, targets: Tensor, tensors: bool
) -> None:
    x = log_probs(6, 4, 5)
    lengths: list[Any] = [torch.tensor(n) if tensors else n for n in (INPUTS, LENGTHS)]
    options: dict[str, Any] = {"blank": 3, "reduction": reduction, "zero_infinity": zero_infinity}
    results = []
    for call in (F.ctc_loss, fxround.compile(F.ctc_loss, "reproducible")):
        found = call(x, targets, lengths[0], lengths[1], **options)
        weights = torch.arange(1, found.numel() + 1, dtype=x.dtype).reshape(found.shape)
        results.append((found.detach(), *torch.autograd.grad((found * weights).sum(), x)))
    for theirs, ours in zip(*results, strict=True):
        # A tolerance: the stock kernel computes in another order, and its gradient from sums of logarithms.
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.long
def test_concatenated_targets_of_lengths_in_a_tensor() -> None:
    x = log_probs(6, 3, 5, torch.float32)
    padded, joined = torch.tensor([[1, 1], [2, 0], [4, 3]]), torch.tensor([1, 1, 2, 4, 3])
    steps, sizes = torch.tensor([6, 5, 6]), torch.tensor([2, 1, 2])
    compiled = fxround.compile(each_row, "reproducible")
    assert torch.equal(compiled(x, joined, steps, sizes), compiled(x, padded, steps, sizes))
    with pytest.raises(RuntimeError, match="is out of bounds"):
        compiled(x, joined, steps, torch.tensor([2, 1, 1]))


@pytest.mark.long
def test_the_function_of_torch_has_its_own_default() -> None:
    x = log_probs(5, 4, 3)
    found = fxround.compile(torch.ctc_loss, "reproducible")(x, TARGETS, STEPS, SIZES)
    assert torch.equal(found, fxround.compile(each_row, "reproducible")(x, TARGETS, STEPS, SIZES))


@pytest.mark.long
def test_one_row_without_a_batch() -> None:
    x, y = log_probs(6, 1, 5), torch.tensor([1, 1, 2])
    compiled = fxround.compile(each_row, "reproducible")
    found = compiled(x[:, 0], y, torch.tensor(6), torch.tensor(3))
    assert found.shape == () and torch.equal(found, compiled(x, y[None], torch.tensor([6]), torch.tensor([3]))[0])


def test_a_row_has_the_bits_that_it_has_alone_and_one_graph_serves_all_lengths() -> None:
    compiled = fxround.compile(each_row, "reproducible")
    x = log_probs(9, 4, 8, torch.float32)
    steps, sizes = torch.tensor([9, 7, 5, 9]), torch.tensor([2, 2, 1, 0])
    targets = TARGETS.where(TARGETS >= 0, 99)
    whole = compiled(x, targets, steps, sizes)
    (slopes,) = torch.autograd.grad(whole.sum(), x)
    for b in range(4):
        n = int(steps[b])
        rows = x.detach()[:n, b : b + 1].clone().requires_grad_()
        alone = compiled(rows, targets[b : b + 1], steps[b : b + 1], sizes[b : b + 1])
        assert torch.equal(alone, whole[b : b + 1])
        assert torch.equal(torch.autograd.grad(alone.sum(), rows)[0], slopes[:n, b : b + 1])
        assert not slopes[n:, b].any()
    count = len(compiled.captures())
    for length in (12, 20, 31):
        compiled(log_probs(length, 4, 8, torch.float32), targets, steps, sizes)
    assert len(compiled.captures()) == count


def test_stochastic_losses_are_those_of_a_seed() -> None:
    x = log_probs(9, 4, 8, torch.float32)
    compiled = fxround.compile(each_row, "stochastic")
    arguments = (x, TARGETS.clamp(0), STEPS, SIZES)
    once, again, other = (compiled.reseed(s)(*arguments) for s in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_lengths_and_dtypes_that_do_not_fit_are_errors() -> None:
    compiled = fxround.compile(each_row, "reproducible")
    x, y = log_probs(4, 2, 3), torch.ones(2, 2, dtype=torch.long)
    good = torch.tensor([2, 2])
    for steps, sizes in ((torch.tensor([5, 4]), good), (torch.tensor([-1, 4]), good), (good, torch.tensor([3, 1]))):
        with pytest.raises(RuntimeError, match="is out of bounds"):
            compiled(x, y, steps, sizes)
    for arguments, said in (
        ((x, y, (5, 4), (1, 1)), "input_lengths to have value at most 4"),
        ((x, y, (4, 4), (1, 3)), "to have size at least 3"),
        ((x, y[0], (4, 4), (2, 1)), "to have size 3"),
        ((x.half(), y, good, good), "not implemented for 'Half'"),
    ):
        with pytest.raises(RuntimeError, match=said):
            compiled(*arguments)


class Counted(nn.Module):
    """A model that changes a Python object, so that a call of it goes by way of ``torch.compile``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor, targets: Tensor, steps: Tensor, sizes: Tensor) -> Tensor:
        self.seen.append(1)
        return each_row(x, targets, steps, sizes)


def test_a_model_that_changes_python_objects_is_an_error() -> None:
    with pytest.raises(CaptureError, match="let the model change no Python object"):
        fxround.compile(Counted(), "reproducible")(log_probs(5, 4, 3), TARGETS, STEPS, SIZES)
