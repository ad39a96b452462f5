"""Draw the graph of a variability report: every operation in the colour of the bits that it has lost.

An operation has the figures of its node where the report has them, else those of its layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fxround.significance.figures import Figures
from fxround.views.colouring import SHADES, UNKNOWN, Colouring, Mark
from fxround.views.pictures import coloured, drawn

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

STEP: Final = 5


def drawing(report: VariabilityReport, *, step: int = STEP, title: str = "", columns: int = 3) -> str:
    """Return the SVG text. ``step``: the bits that one colour stands for; ``columns``: of the legend.

    Raises ValueError for a report without a graph (of a study that was interrupted before its first sample) and for a
    step below 1.
    """
    return coloured(drawn(report.drawable), ByBits(report, step), title=title, columns=columns)


class ByBits(Colouring):
    """Colours by the significant bits that operations have lost; ``step`` bits have one colour.

    Raises ValueError for a step below 1.
    """

    name = "significant bits"
    title = "Bits lost, mean over elements"

    def __init__(self, report: VariabilityReport, step: int = STEP) -> None:
        if step < 1:
            raise ValueError(f"step is {step}: expected a number of bits of at least 1")
        self._step = step
        self._by_node = {f.place.node: f for f in report.places if f.place.kind == "node"}
        self._by_path = {f.place.path: f for f in report.places if f.place.kind == "layer"}
        self._result = next(iter(report.outputs), None)
        entries = [(f"{i * step} to {(i + 1) * step} bits lost", *colours) for i, colours in enumerate(SHADES[:-1])]
        most = (f"more than {step * len(entries)} lost", *SHADES[-1])
        self.entries = (*entries, most, ("not looked at, or no evidence", *UNKNOWN))

    def of_node(self, node: str, data: Mapping[str, Any]) -> Mark:
        """Return the figures of a node, else those of its layer."""
        return self._mark(self._figures(node, data))

    def of_module(self, path: str | None, members: Mapping[str, Mapping[str, Any]]) -> Mark:
        """Return the figures of a layer, else those of the member that has lost the most bits."""
        if path is not None and path in self._by_path:
            return self._mark(self._by_path[path])
        known = [f for node, data in members.items() if (f := self._figures(node, data)) is not None]
        return self._mark(max(known, key=_lost, default=None), "least: ")

    def _figures(self, node: str, data: Mapping[str, Any]) -> Figures | None:
        if data["op"] == "output":
            return self._result
        return self._by_node.get(node) or (self._by_path.get(data["path"]) if data["op"] == "call_function" else None)

    def _mark(self, f: Figures | None, whose: str = "") -> Mark:
        if f is None:
            return Mark(*UNKNOWN)
        whole = f"{f.place.name}: " if f.place.kind == "layer" and not whose else whose
        if f.bits is None:
            return Mark(*UNKNOWN, f"{whole}no evidence")
        facts = [("significant bits", f"{f.bits:.1f} of {f.precision} in the mean of {f.place.name}")]
        facts += [] if f.worst is None else [("worst element", f"{f.worst:.1f} bits")]
        return Mark(*shade(_lost(f), self._step), f"{whole}{f.bits:.1f} bits", tuple(facts))


def shade(lost: float, step: int = STEP) -> tuple[str, str]:
    """Return fill and border for a number of bits lost."""
    return SHADES[min(max(int(lost // step), 0), len(SHADES) - 1)]


def _lost(f: Figures) -> float:
    return -1.0 if f.bits is None else f.precision - f.bits
