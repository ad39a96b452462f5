"""Batches: what of them are arguments, what is the target, and what is refused because it may be either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxround
from fxround.significance.inputs import Batches, calls, count

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Masked(nn.Module):
    """A model with an optional second argument."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


class Several(nn.Module):
    """A model with any number of arguments."""

    def forward(self, *parts: Tensor) -> Tensor:
        return parts[0]


class Volumes(torch.utils.data.Dataset[dict[str, Any]]):
    """Items as MONAI's dictionary transforms make them."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": X[index], "label": Y[index], "path": f"{index}.nii"}


@pytest.mark.parametrize("model, argument", [(Masked(), "mask"), (Several(), "parts")])
def test_a_target_is_no_optional_argument(model: nn.Module, argument: str) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    with pytest.raises(TypeError, match=rf"the target or the optional argument '{argument}' of {type(model).__name__}"):
        list(calls(model, loader))
    said = fxround.batches(loader, lambda batch: (batch[0], batch[1]))
    assert [(c.args[0].tolist(), c.target.tolist(), c.offset) for c in calls(model, said)] == [
        (X[:4].tolist(), Y[:4].tolist(), 0),
        (X[4:].tolist(), Y[4:].tolist(), 4),
    ]
    both = list(calls(model, fxround.batches(loader, lambda batch: (tuple(batch), None))))
    assert [len(call.args) for call in both] == [2, 2] and both[0].target is None


def test_a_dict_that_the_model_does_not_take_is_said() -> None:
    loader = DataLoader(Volumes(), batch_size=4)
    with pytest.raises(TypeError, match=r"dict with 'image', 'label', 'path', and Linear\.forward\(.*batch\['image'\]"):
        fxround.variability(nn.Linear(2, 3), loader, samples=5)
    keywords = list(calls(Masked(), [{"x": X, "mask": Y}]))
    assert sorted(keywords[0].kwargs) == ["mask", "x"]


def test_ground_truth_reaches_every_metric() -> None:
    model = nn.Linear(2, 3).eval()
    data = fxround.batches(DataLoader(Volumes(), batch_size=4), lambda batch: (batch["image"], batch["label"] % 3))

    def wrong(result: Tensor, target: Tensor) -> float:
        return int((result.argmax(1) != target).sum()) / len(target)

    asked = [fxround.metric(name, against="target") for name in ("label_flips", "dice", "top_k")]
    asked += [fxround.metric("accuracy"), fxround.metric(wrong, better="lower", against="target")]
    report = fxround.variability(model, data, samples=5, reference=None, metrics=asked)
    assert report.batches == 2 and report.rows == 6
    flips = report.metric("label_flips").values
    # Both are shares of six, 4 and 2 at a time; the second is a mean weighted by rows.
    assert [round(6 * share) for share in report.metric("wrong").values] == [round(6 * share) for share in flips]
    assert report.metric("accuracy").values == tuple(round(6 * (1 - share)) / 6 for share in flips)
    assert report.metric("top_k").values == (1.0,) * 5
    assert report.metric("dice").classes is not None
    table = fxround.compare(model, data, ["bfloat16"], asked[:2])
    assert table["bfloat16"].metric("label_flips").mean in [i / 6 for i in range(7)]


def test_a_target_may_have_several_parts() -> None:
    (call,) = calls(nn.Linear(2, 3), [((X,), {}, (X, {"y": Y}))])
    assert call.args == (X,) and call.target[0] is X and call.target[1]["y"] is Y
    report = fxround.compare(
        nn.Linear(2, 2).eval(), [((X,), {}, (X, Y))], ["bfloat16"], lambda result, target: float(target[1].sum())
    )
    assert report["bfloat16"].metrics[0].mean == 15.0


def test_batches_say_their_number_if_the_data_do() -> None:
    def endless() -> Iterator[Tensor]:
        yield X
        yield X

    assert count(fxround.batches([X, X], lambda x: (x, None))) == 2
    assert count(fxround.batches(endless(), lambda x: (x, None))) is None
    assert len(list(calls(Masked(), fxround.batches(endless(), lambda x: ((x, x), None))))) == 2


@pytest.mark.parametrize(
    "arguments, call",
    [
        (X, ((X,), {})),
        ((X, Y), ((X, Y), {})),
        ({"x": X, "mask": Y}, ((), {"x": X, "mask": Y})),
        (((X,), {"mask": Y}), ((X,), {"mask": Y})),
    ],
)
def test_arguments_have_the_forms_of_inputs(arguments: Any, call: tuple[Any, Any]) -> None:
    (got,) = calls(Masked(), fxround.batches([0], lambda batch: (arguments, batch)))
    assert got.target == 0 and len(got.args) == len(call[0]) and sorted(got.kwargs) == sorted(call[1])
    assert all(a is b for a, b in zip(got.args, call[0], strict=True))


def test_mistakes_are_reported() -> None:
    with pytest.raises(TypeError, match="data is a Tensor; expected an iterable of batches"):
        fxround.batches(X, lambda x: (x, None))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="apart is a str; expected a function"):
        fxround.batches([X], "image")  # type: ignore[arg-type]
    for wrong, said in ((X, "Tensor"), ([X, Y], "list"), ((X, Y, Y), r"\(a Tensor, a Tensor, a Tensor\)")):
        with pytest.raises(TypeError, match=rf"returned (a |){said}; expected \(arguments, target\)"):
            list(Batches([X], lambda _, wrong=wrong: wrong))
