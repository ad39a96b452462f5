"""The report of ``fxround.rescale_channels``: which channels were multiplied by what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxround.significance.figures import plain
from fxround.views.table import Table, Tabled


@dataclass(frozen=True)
class Rescaling:
    """The products that read one value, whose channels share factors.

    weights    the names of their weights, which were divided by the factors
    into       the names of the parameters that were multiplied; empty for a multiplication of the layer's inputs
    channels   how many there are
    alpha      the exponent; None if nothing changed
    least      the least factor
    greatest   the greatest factor
    error      the sum of squared errors of the products by rounded weights relative to that without factors, for
               ``"awq"``; else None
    reason     why nothing changed, or ""
    """

    weights: tuple[str, ...]
    into: tuple[str, ...]
    channels: int
    alpha: float | None
    least: float = 1.0
    greatest: float = 1.0
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class RescalingReport(Tabled):
    """What ``fxround.rescale_channels`` did, in the order in which the model computes.

    model, method  the names of the model's class and of the method
    batches, rows  the data: how many batches, and rows of them
    exact          whether all factors are powers of two
    groups         a ``Rescaling`` for the products of each value
    """

    model: str
    method: str
    batches: int
    rows: int
    exact: bool
    groups: tuple[Rescaling, ...]

    def __getitem__(self, weight: str) -> Rescaling:
        """Return the row of a weight. Raises KeyError for a name that no product reads."""
        return {name: row for row in self.groups for name in row.weights}[weight]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    def table(self) -> Table:
        """Return a row for each group of products."""
        columns = "weights", "factors in", "channels", "alpha", "least", "greatest", "error", "kept because"
        rows = tuple(
            (
                ", ".join(row.weights),
                ", ".join(row.into) or ("" if row.least == row.greatest == 1 else "inputs"),
                *(row.channels, row.alpha, row.least, row.greatest, row.error, row.reason),
            )
            for row in self.groups
        )
        powers = ", powers of two" if self.exact else ""
        title = f"{self.model}: channels rescaled by {self.method}{powers}, {self.rows:,} rows of data"
        note = "Weights are divided by the factors. error: of the products by rounded weights, relative to before."
        return Table(columns, rows, title, note)


__all__ = ["Rescaling", "RescalingReport"]
