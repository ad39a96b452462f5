"""The report of ``fxround.quantize_weights``: what became of each weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxround.significance.figures import plain
from fxround.views.table import Table, Tabled


@dataclass(frozen=True)
class WeightRounding:
    """What became of one weight.

    weight      the name of the parameter
    module      the path of the module that reads it
    format      the format of its values
    elements    how many it has
    method      how they were chosen: "nearest" for a weight that no product reads, or that an interrupt left
    weight_sqnr the sum of the squared weights over that of the squared errors, in dB; infinite without errors
    output_sqnr the same for the results of the products that read it, on the data, with the inputs of the original
                model; None if no product reads it
    changed     the share of elements that differ from those rounded to nearest
    clamped     the share of weights beyond the ends of the grid
    left        for a method whose choices are not all whole at its end, the share that was rounded to nearest then;
                else None
    """

    weight: str
    module: str
    format: str
    elements: int
    method: str
    weight_sqnr: float
    output_sqnr: float | None
    changed: float
    clamped: float
    left: float | None = None


@dataclass(frozen=True, repr=False)
class QuantizationReport(Tabled):
    """What ``fxround.quantize_weights`` did, in the order in which the model reads its weights.

    model, policy  the names of the model's class and of the policy
    method         the method, with its options
    batches, rows  the data: how many batches, and rows of them
    interrupted    whether Ctrl-C ended the method before its end
    weights        a ``WeightRounding`` for each weight that was rounded
    """

    model: str
    policy: str
    method: str
    batches: int
    rows: int
    interrupted: bool
    weights: tuple[WeightRounding, ...]

    def __getitem__(self, weight: str) -> WeightRounding:
        """Return the row of a weight. Raises KeyError for a name that no rounded weight has."""
        return {row.weight: row for row in self.weights}[weight]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; "inf" for an infinite ratio."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    def table(self) -> Table:
        """Return a row for each weight."""
        columns = "weight", "format", "elements", "method", "weight dB", "output dB", "changed %", "clamped %", "left %"
        rows = tuple(
            (
                *(row.weight, row.format, row.elements, row.method, row.weight_sqnr, row.output_sqnr),
                *(None if share is None else 100 * share for share in (row.changed, row.clamped, row.left)),
            )
            for row in self.weights
        )
        stopped = ", interrupted: what was not reached is rounded to nearest" if self.interrupted else ""
        title = f"{self.model}: weights by {self.method}, policy {self.policy}, {self.rows:,} rows of data{stopped}"
        note = (
            "dB: signal over error of the weights, and of their products on the data. changed: differs from nearest. "
            "clamped: beyond the grid. left: rounded to nearest at the end."
        )
        return Table(columns, rows, title, note)


__all__ = ["QuantizationReport", "WeightRounding"]
