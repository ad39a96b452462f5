"""Bits of single elements, and maps of them: the numbers of the samples, the cut that was asked for, and refusals."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.significance import elements
from fxround.significance.bits import bits_from
from fxround.significance.moments import Moments

OPTIONS: dict[str, Any] = {"samples": 5, "reference": None, "metrics": None, "progress": False}


class Segmenter(nn.Module):
    """Two classes for each pixel or voxel."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 1, *(3,) * dims, generator=torch.Generator().manual_seed(1)))
        self.convolve = nn.functional.conv2d if dims == 2 else nn.functional.conv3d

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, padding=1)


VOLUMES = torch.rand(3, 1, 4, 5, 6, generator=torch.Generator().manual_seed(2))
IMAGES = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def volumes() -> fxround.VariabilityReport:
    return fxround.variability(Segmenter(3), VOLUMES, batch_size=2, capture="layers", keep_samples=True, **OPTIONS)


@pytest.fixture(scope="module")
def images() -> fxround.VariabilityReport:
    return fxround.variability(Segmenter(2), IMAGES, **OPTIONS)


def test_bits_are_those_of_the_samples(volumes: fxround.VariabilityReport) -> None:
    expected = []
    for batch in volumes.kept:
        samples = batch["output", "output"]
        moments = Moments(tuple(samples[0].shape), samples[0].dtype)
        for sample in samples:
            moments.add(sample)
        every = (moments.mean, moments.sigma(), moments.low, moments.high, moments.same())
        expected.append(np.clip(bits_from(*every, samples=5), 0, 24).astype(np.float32).reshape(moments.shape))
    bits = volumes.bits()
    assert bits.dtype == np.float32 and bits.shape == (3, 2, 4, 5, 6)
    assert np.array_equal(bits, np.concatenate(expected), equal_nan=True)
    assert np.array_equal(volumes.bits(batch=1), expected[1], equal_nan=True)
    figures = volumes["output"]
    assert int((~np.isnan(bits)).sum()) == figures.evidence and bits[figures.worst_at] == np.float32(figures.worst)
    volumes.bits()[:] = 0
    assert np.array_equal(volumes.bits(), bits, equal_nan=True)


def test_bits_have_names_and_units(volumes: fxround.VariabilityReport) -> None:
    array = volumes.to_xarray(dims=("n", "class", "z", "y", "x"))
    assert array.dims == ("n", "class", "z", "y", "x") and array.name == "output"
    assert np.array_equal(array.values, volumes.bits(), equal_nan=True)
    assert (array.attrs["units"], array.attrs["precision"], array.attrs["samples"]) == ("bit", 24, 5)
    assert volumes.to_xarray(batch=0).dims == ("row", "dim_1", "dim_2", "dim_3", "dim_4")


def drawn(figure: Any) -> np.ndarray[Any, Any]:
    """The numbers of the last image of a figure, NaN where nothing is drawn."""
    last = [axes for axes in figure.axes if axes.images][-1].images[-1]
    return np.ma.filled(np.ma.asarray(last.get_array(), float), np.nan)


@pytest.mark.parametrize("axis, at", [(0, 1), (1, 4), (2, 0), (1, None)])
@pytest.mark.parametrize("row, channel", [(0, 0), (2, 1), (1, None)])
def test_a_map_shows_the_cut(
    volumes: fxround.VariabilityReport, row: int, channel: int | None, axis: int, at: int | None
) -> None:
    figure = volumes.map(row=row, channel=channel, axis=axis, at=at)
    bits = volumes.bits()[row]
    chosen = np.fmin(bits[0], bits[1]) if channel is None else bits[channel]
    where = chosen.shape[axis] // 2 if at is None else at
    assert np.array_equal(drawn(figure), chosen.take(where, axis).astype(float), equal_nan=True)
    left, right = (axes for axes in figure.axes if axes.images)
    assert np.array_equal(left.images[0].get_array(), VOLUMES[row, 0].numpy().take(where, axis))
    assert right.images[-1].get_clim() == (0, 24)
    assert f"row {row}" in figure.get_suptitle() and f"{where} of {chosen.shape[axis]}" in figure.get_suptitle()


def test_an_image_lies_over_its_input_or_a_background(images: fxround.VariabilityReport, tmp_path: Path) -> None:
    own, other = IMAGES[1, 0], torch.rand(3, 7, 9)
    mean = np.mean(other.numpy(), 0)
    for background, expected in ((None, own.numpy()), (other[0], other[0].numpy()), (other.numpy(), mean)):
        figure = images.map(background=background, row=1, channel=0)
        below = figure.axes[0].images[0].get_array()
        assert np.array_equal(below, expected)
    images.map(path=tmp_path / "map.png")
    header = (tmp_path / "map.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", header[16:20])[0] >= 1280


def test_a_map_without_an_image_below() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(1, 6, 6) * 1.1

    report = fxround.variability(Square(), torch.rand(36), **OPTIONS)
    assert [bool(axes.images) for axes in report.map().axes].count(True) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"row": 3}, "row is 3; expected a whole number from 0 to 2"),
        ({"row": -1}, "row is -1; expected"),
        ({"channel": 2}, "channel is 2; expected a whole number from 0 to 1"),
        ({"axis": 3}, "axis is 3; expected a whole number from 0 to 2"),
        ({"at": 4}, "at is 4; expected a whole number from 0 to 3"),
        ({"at": 1.5}, "at is 1.5; expected"),
        ({"background": torch.rand(5, 6)}, r"background has the shape \(5, 6\); expected 4 x 5 x 6"),
        ({"output": "(root)"}, r"kept of results only: output; got the layer '\(root\)'"),
    ],
)
def test_mistakes_are_reported(volumes: fxround.VariabilityReport, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        volumes.map(**arguments)


def test_what_has_no_bits_says_why(volumes: fxround.VariabilityReport, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="batch is 2; expected one of the 2 batches"):
        volumes.bits(batch=2)
    with pytest.raises(KeyError, match="no figures of 'logits'"):
        volumes.bits("logits")
    wide = fxround.variability(Segmenter(3), [VOLUMES, VOLUMES[..., :4]], **OPTIONS)
    with pytest.raises(ValueError, match=r"shapes \(3, 2, 4, 5, 6\), \(3, 2, 4, 5, 4\), .* bits\(..., batch=0\)"):
        wide.bits()
    assert wide.bits(batch=1).shape == (3, 2, 4, 5, 4)
    table = fxround.variability(nn.Linear(3, 2), torch.rand(4, 3), **OPTIONS)
    with pytest.raises(ValueError, match=r"output has the shape \(4, 2\), which is no image; expected \[n, height"):
        table.map()
    monkeypatch.setattr(elements, "MOST", 7)
    many = fxround.variability(nn.Linear(3, 2), torch.rand(4, 3), batch_size=2, **OPTIONS)
    with pytest.raises(ValueError, match="have 8 elements, and the bits of each are kept of up to 7"):
        many.bits()
