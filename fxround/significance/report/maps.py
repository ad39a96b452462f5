"""Maps of significant bits: an image, or a slice of a volume, over the anatomy that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fxround.errors import shown
from fxround.significance.bits import require
from fxround.significance.report.plots import INK, STYLE, new_figure, write

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

# No colour of it is a grey, which the anatomy has; it can be told apart with any colour vision.
_COLOURS: Final = "viridis"
_OPACITY: Final = 0.8
_TICKS: Final = 4
# The grey values of the anatomy span these percentiles, so that a few bright voxels do not darken the rest.
_WINDOW: Final = (1, 99)
_SIDE: Final = 5.2
_AXES: Final = ("depth", "height", "width")
_FORMS: Final = "[n, height, width], [n, channels, height, width] or [n, channels, depth, height, width]"

Image = NDArray[np.float32]


@dataclass(frozen=True)
class Cut:
    """What of a result is drawn: the row of all batches, the channel (None: the least bits), and where it is cut."""

    row: int
    channel: int | None
    axis: int
    at: int | None

    def of(self, volume: Image) -> Image:
        """Return an image of an image or a volume. Raises ValueError for an index out of range."""
        if volume.ndim == 2:
            return volume
        _require("axis", self.axis, 3)
        at = self.position(volume.shape)
        _require("at", at, volume.shape[self.axis])
        image: Image = np.take(volume, [at], self.axis).squeeze(self.axis)
        return image

    def position(self, shape: tuple[int, ...]) -> int:
        """Return where a volume is cut."""
        return shape[self.axis] // 2 if self.at is None else self.at

    def said(self, name: str, shape: tuple[int, ...], channels: int) -> str:
        """Return what is drawn, in words."""
        which = "" if channels == 1 else f", least of {channels} channels"
        which = which if self.channel is None else f", channel {self.channel}"
        where = f", {_AXES[self.axis]} {self.position(shape)} of {shape[self.axis]}" if len(shape) == 3 else ""
        return f"{name}, row {self.row}{which}{where}"


def draw(report: VariabilityReport, name: str, cut: Cut, background: Any, path: str | Path | None) -> Any:
    """Return the figure of ``VariabilityReport.map``."""
    bits = _bits(report, name, cut)
    channels, volume = len(bits), bits[0]
    least = np.fmin.reduce(bits) if cut.channel is None else bits[_require("channel", cut.channel, channels)]
    given = background is not None
    anatomy = _anatomy(background, volume.shape) if given else _input(report, name, cut, volume.shape)
    image, precision = cut.of(least), report[name].precision
    below = None if anatomy is None else cut.of(anatomy)
    panels = 1 if below is None else 2
    height, width = image.shape
    with require("matplotlib", "report").rc_context(STYLE | {"axes.grid": False}):
        tall = min(max(_SIDE * height / width, 2.0), 9.0)
        figure = new_figure((_SIDE * panels + 1.2, tall + 0.9))
        axes = np.atleast_1d(figure.subplots(1, panels, sharex=True, sharey=True))
        if below is not None:
            low, high = np.nanpercentile(below, _WINDOW)
            for one in axes:
                one.imshow(below, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            axes[0].set_title("anatomy")
        coloured = axes[-1].imshow(
            image,
            cmap=_COLOURS,
            vmin=0,
            vmax=precision,
            interpolation="nearest",
            alpha=None if below is None else _OPACITY,
        )
        silent = float(np.isnan(image).mean())
        axes[-1].set_title("significant bits" + (f" (no evidence at {silent:.1%} of pixels)" if silent else ""))
        for one in axes:
            one.set(xticks=[], yticks=[])
            for spine in one.spines.values():
                spine.set_visible(False)
        bar = figure.colorbar(coloured, ax=list(axes), ticks=range(0, precision + 1, _TICKS), fraction=0.05, pad=0.02)
        bar.solids.set_alpha(1)
        bar.set_label(f"significant bits, of {precision} of {report[name].dtype}")
        figure.suptitle(cut.said(name, volume.shape, channels), x=0.005, ha="left", fontsize=10, color=INK)
        if path is not None:
            write(figure, Path(path))
    return figure


def _bits(report: VariabilityReport, name: str, cut: Cut) -> Image:
    """Return the bits of a row: [channels, height, width] or [channels, depth, height, width]."""
    batch, row = report.elements.located(name, cut.row)
    whole = report.bits(name, batch)
    if not 3 <= whole.ndim <= 5:
        raise ValueError(f"{name} has the shape {whole.shape}, which is no image; expected {_FORMS}")
    channels: Image = whole[row : row + 1] if whole.ndim == 3 else whole[row]
    return channels


def _input(report: VariabilityReport, name: str, cut: Cut, size: tuple[int, ...]) -> Image | None:
    """Return the row of the model's first input if it has this size."""
    batch, row = report.elements.located(name, cut.row)
    given = report.elements.inputs[batch]
    if given is None or row >= len(given) or given.shape[-len(size) :] != size or given.ndim > len(size) + 2:
        return None
    return _anatomy(given[row], size)


def _anatomy(given: Any, size: tuple[int, ...]) -> Image:
    """Return a background as an array of this size. Raises ValueError for another one."""
    array: Image = np.array(given.detach().cpu().float().numpy() if isinstance(given, Tensor) else given, np.float32)
    if array.shape[-len(size) :] != size or array.ndim > len(size) + 1:
        expected = " x ".join(map(str, size))
        raise ValueError(f"background has the shape {array.shape}; expected {expected}, perhaps with channels in front")
    image: Image = array if array.ndim == len(size) else np.mean(array, 0)
    return image


def _require(name: str, index: Any, size: int) -> int:
    """Return an index. Raises ValueError unless it is a whole number from 0 to size - 1."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
        raise ValueError(f"{name} is {shown(index)}; expected a whole number from 0 to {size - 1}")
    return index
