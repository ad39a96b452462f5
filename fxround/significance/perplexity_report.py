"""The report of ``fxround.perplexity``: perplexities as data, a table to read, and the width that each place needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fxround.policy import Policy
from fxround.short_reprs import Short
from fxround.significance.bits import student_half_width
from fxround.significance.figures import plain
from fxround.views.table import Table, Value, of_notebook

WITHIN: Final = 0.01
COLUMNS: Final = ("site", "width", "mode", "perplexity", "low", "high", "samples")


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text if the operations of one site have one width and one mode.

    site, width, mode   where, the bits of a significand, and the rounding mode
    values              one perplexity for each run of the text; a single one if the mode draws nothing
    confidence          of the interval
    """

    site: str
    width: int
    mode: str
    values: tuple[float, ...]
    confidence: float

    @property
    def mean(self) -> float:
        """The mean of the values; NaN or infinity if one of them is."""
        return float(np.mean(self.values))

    @property
    def half_width(self) -> float | None:
        """Half of Student's interval of the mean: t(n - 1) times the standard error. None below two finite values."""
        return student_half_width(self.values, self.confidence)


@dataclass(frozen=True, repr=False)
class PerplexityReport(Short):
    """The results of ``fxround.perplexity``.

    baseline    the perplexity under ``rest`` alone; None if Ctrl-C came before it
    rest        the policy of everything outside of a site
    sites       the globs of each site
    accumulate  as passed
    samples, confidence, seed  as passed
    complete    False if Ctrl-C ended the measurement
    rows        the number of texts
    figures     one ``Perplexity`` for each site, mode and width
    provenance  versions, machine, seconds and seed, as plain data

    ``print(report)`` shows a row for each width and the widths that the sites need.
    """

    baseline: float | None
    rest: Policy
    sites: Mapping[str, tuple[str, ...]]
    accumulate: str | None
    samples: int
    confidence: float
    seed: int
    complete: bool
    rows: int
    figures: tuple[Perplexity, ...]
    provenance: dict[str, Any]

    def table(self) -> Table:
        """Return a table with one row per site, mode and width; low and high bound the mean over the samples."""
        return Table(COLUMNS, tuple(_row(f) for f in self.figures))

    def widths_table(self) -> Table:
        """Return a table with one row per width, and the perplexities of each site and mode as text."""
        keys = list(dict.fromkeys((f.site, f.mode) for f in self.figures))
        cells = {(f.width, f.site, f.mode): _cell(f) for f in self.figures}
        widths = sorted({f.width for f in self.figures})
        rows = tuple((width, *(cells.get((width, *key)) for key in keys)) for width in widths)
        return Table(("width", *(" ".join(key) for key in keys)), rows)

    def needed(self, within: float = WITHIN) -> Table:
        """Return the least width of each site and mode from which on no perplexity exceeds the baseline's by more.

        within: the share of the baseline by which a perplexity may exceed it. A site whose largest width exceeds it has
        no width. A mode that draws random bits is judged by its mean.
        """
        keys = list(dict.fromkeys((f.site, f.mode) for f in self.figures))
        rows = tuple((*key, self._needed(key, within)) for key in keys)
        return Table(("site", "mode", "width"), rows, title=f"Widths within {within:.2%} of the baseline")

    def _needed(self, key: tuple[str, str], within: float) -> int | None:
        most = math.nan if self.baseline is None else self.baseline * (1 + within)
        least = None
        for figure in sorted((f for f in self.figures if (f.site, f.mode) == key), key=lambda f: -f.width):
            if not figure.mean <= most:
                break
            least = figure.width
        return least

    @property
    def heading(self) -> str:
        """One line: model, texts, baseline, samples and seed."""
        model = self.provenance["model"]
        baseline = "none" if self.baseline is None else f"{self.baseline:.4f}"
        state = "" if self.complete else "  INTERRUPTED"
        return (
            f"{model['class'].rpartition('.')[2]}, {model['parameters']:,} parameters: {self.rows:,} texts, perplexity "
            f"{baseline} under {self.rest.name}, {self.samples} samples, seed {self.seed}{state}"
        )

    @property
    def legend(self) -> str:
        """One line on how to read the figures."""
        steps = "accumulators as results" if self.accumulate is None else f"accumulators {self.accumulate}"
        return (
            f"± : half of Student's interval of the mean over samples ({self.confidence:.0%}); width: bits of a "
            f"significand, the leading one included; {steps}."
        )

    def __str__(self) -> str:
        return "\n\n".join([self.heading, str(self.widths_table()), str(self.needed()), self.legend])

    def _repr_html_(self) -> str:
        return of_notebook(self.heading, (self.widths_table(), self.needed()), (), self.legend)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data; NaN is None, and infinities are text."""
        fields = ("baseline", "accumulate", "samples", "confidence", "seed", "complete", "rows", "provenance")
        data = {name: getattr(self, name) for name in fields}
        figures = [dict(zip(COLUMNS, _row(f), strict=True)) | {"values": f.values} for f in self.figures]
        report: dict[str, Any] = plain(
            data | {"rest": self.rest.to_dict(), "sites": dict(self.sites), "figures": figures}
        )
        return report

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON text; ``indent`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """Return ``table()`` as a ``pandas.DataFrame``. Raises ImportError without pandas."""
        return self.table().to_pandas()


def _row(f: Perplexity) -> tuple[Value, ...]:
    low, high = (None, None) if f.half_width is None else (f.mean - f.half_width, f.mean + f.half_width)
    return f.site, f.width, f.mode, f.mean, low, high, len(f.values)


def _cell(f: Perplexity) -> str:
    return f"{f.mean:.6g}" if f.half_width is None else f"{f.mean:.6g} ±{f.half_width:.2g}"
