"""The report of ``fxround.attribute``: what each rounding costs, and where the figures cannot be trusted."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import networkx as nx
from torch import Tensor

from fxround.atomic_files import write_file
from fxround.graph.site import Site
from fxround.short_reprs import Short
from fxround.views.colouring import SHADES, UNKNOWN, ByPolicy, Colouring, Mark
from fxround.views.pictures import drawn, embedded, write_picture
from fxround.views.table import Table, Tabled

# A site is doubted where what its derivatives miss is more than this part of the deviation.
DOUBT: Final = 0.1
SHOWN_ROWS: Final = 15
# The least share of each colour.
_SHARES: Final = (
    (0.0, "less than 1 %"),
    (0.01, "1 to 5 %"),
    (0.05, "5 to 20 %"),
    (0.2, "20 to 50 %"),
    (0.5, "more than 50 %"),
)


@dataclass(frozen=True, repr=False)
class SiteShare(Short):
    """What the roundings of one operation cost.

    node, operator, module, module_type, source, code   the operation and its place in the model
    share       its part of the variance of the result; under a policy that draws nothing, of the result's error, where
                it is signed: a negative part makes the error smaller
    deviation   the root mean square of what it adds to the elements of the result
    doubt       what the derivatives at this operation miss, as a part of the deviation of the result
    sensitivity for each of ``formats``, the deviation that rounding the operation's result to the format would add
    """

    node: str
    operator: str
    module: str
    module_type: str
    source: str
    code: str
    share: float
    deviation: float
    doubt: float
    sensitivity: tuple[float, ...] = ()

    def _line(self) -> str:
        where = f"{self.operator} in {self.module or 'the root module'}"
        return f"{self.node}, {where}: {self.share:.1%} of the variance, deviation {self.deviation:.3g}"

    @staticmethod
    def of(node: str, place: Site, share: float, deviation: float, doubt: float, tried: tuple[float, ...]) -> SiteShare:
        """Return the row of a node."""
        named = (place.operator, place.path, place.module_type, place.source, place.code)
        return SiteShare(node, *named, share, deviation, doubt, tried)


@dataclass(frozen=True)
class LayerDeviation:
    """The predicted deviation of a layer's last value, and beside it the one that samples have.

    name        the path of the module
    node        the node of its last value
    deviation   root mean square over elements, predicted
    magnitude   root mean square of the value
    measured    the deviation of the samples; None without ``check``
    """

    name: str
    node: str
    deviation: float
    magnitude: float
    measured: float | None

    @property
    def bits(self) -> float:
        """The significant bits: how many times the deviation fits the magnitude, as a power of two."""
        return bits_of(self.deviation, self.magnitude)

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if not self.measured else self.deviation / self.measured


@dataclass(frozen=True, repr=False)
class AttributionReport(Tabled):
    """The findings of ``fxround.attribute``.

    model       the name of the model's class
    policy      the name of the policy
    draws       whether the policy draws random bits
    shape       the shape of the result, or of ``output``; (n,) for several tensors
    deviation   the predicted root mean square deviation of the elements of the result: of samples around their mean
                under a policy that draws, of the result from the exact one under a policy that does not
    uncertainty the standard error of ``deviation`` by the random probes; 0 where it is exact
    magnitude   the root mean square of the result
    rows        a ``SiteShare`` for each operation that is rounded, the largest shares first
    formats     the formats of ``sensitivity``
    error       the predicted error of each element under a policy that draws nothing, float64, else None
    measured    the root mean square of what was measured: of the deviation of samples (``check``), or of the error
                against a run in binary64; None if nothing was
    remaining   the same for ``corrected``, under a policy that draws nothing
    elements    with ``elements=True``, the predicted deviation of each element, float64
    result      the result of the run, whose bits are those of ``fxround.compile(model, policy, unroll_loops=True)``
    layers      with ``check``, a ``LayerDeviation`` for each layer
    samples     the samples of ``check``
    noise       under a policy that draws, with ``check``: the least and the largest ``ratio`` that chance explains, but
                once in a thousand reports (``noise_of``)
    interrupted whether Ctrl-C ended the work early: with fewer random directions, fewer samples or no layers
    graph       the rounded graph for networkx

    Example::

        report = fxround.attribute(model, x)
        report.deviation, report.rows[0].module, report.rows[0].share
        report.trusted
    """

    model: str
    policy: str
    draws: bool
    shape: tuple[int, ...]
    deviation: float
    magnitude: float
    rows: tuple[SiteShare, ...]
    uncertainty: float = 0.0
    formats: tuple[str, ...] = ()
    error: Tensor | None = field(default=None, repr=False)
    measured: float | None = None
    remaining: float | None = None
    elements: Tensor | None = field(default=None, repr=False)
    result: Tensor | None = field(default=None, repr=False)
    layers: tuple[LayerDeviation, ...] = ()
    samples: int = 0
    noise: tuple[float, float] | None = None
    graph: nx.DiGraph | None = field(default=None, repr=False, compare=False)
    interrupted: bool = False

    @property
    def sites(self) -> Table:
        """The rows as a table: node, operator, module, line, share in percent, deviation, doubt."""
        columns = ("node", "operator", "module", "source", "share %", "deviation", "doubt %")
        rows = [
            (r.node, r.operator, r.module or "(root)", r.source, 100 * r.share, _short(r.deviation), 100 * r.doubt)
            for r in self.rows
        ]
        return Table(columns, tuple(rows), title=self._title())

    @property
    def modules(self) -> Table:
        """The shares of whole modules."""
        total: dict[str, float] = {}
        for row in self.rows:
            total[row.module or "(root)"] = total.get(row.module or "(root)", 0.0) + row.share
        ordered = sorted(total.items(), key=lambda item: -abs(item[1]))
        return Table(("module", "share %"), tuple((name, 100 * share) for name, share in ordered))

    @property
    def sensitivity(self) -> Table:
        """The deviation that rounding an operation's result to a format would add, for each of ``formats``."""
        rows = sorted(self.rows, key=lambda row: -max(row.sensitivity, default=0.0))
        body = tuple((r.node, r.operator, r.module or "(root)", *map(_short, r.sensitivity)) for r in rows)
        return Table(("node", "operator", "module", *self.formats), body)

    @property
    def bits(self) -> float:
        """The significant bits of the result: how many times the deviation fits its magnitude, as a power of two."""
        return bits_of(self.deviation, self.magnitude)

    @property
    def ratio(self) -> float | None:
        """The predicted deviation over the measured one."""
        return None if not self.measured else self.deviation / self.measured

    @property
    def corrected(self) -> Tensor | None:
        """The result without its predicted error, float64, under a policy that draws nothing (CENA)."""
        return None if self.error is None or self.result is None else self.result.double() - self.error

    @property
    def gained(self) -> float | None:
        """The bits that ``corrected`` has more than the result, both compared with a run in binary64."""
        if self.measured is None or self.remaining is None:
            return None
        return bits_of(self.remaining, self.measured)

    @property
    def doubtful(self) -> tuple[SiteShare, ...]:
        """The operations at which the derivatives miss more than a tenth of the deviation; the largest doubt first."""
        return tuple(sorted((r for r in self.rows if not r.doubt <= DOUBT), key=lambda r: -r.doubt))

    @property
    def doubt(self) -> float:
        """What the derivatives miss at all operations together, as a part of the deviation."""
        return math.sqrt(sum(row.doubt**2 for row in self.rows))

    @property
    def trusted(self) -> bool:
        """Whether the derivatives miss no more than a tenth of the deviation, and what was measured agrees with it."""
        return self.doubt <= DOUBT and math.isfinite(self.deviation) and self.agrees

    @property
    def agrees(self) -> bool:
        """Whether the samples, or the run in binary64, do not contradict the prediction; True without any."""
        if self.measured is None or self.measured == self.deviation:
            return True
        low, high = self.noise or ((0.0, math.inf) if self.draws else (1 - DOUBT, 1 + DOUBT))
        return low <= (self.deviation / self.measured if self.measured else math.inf) <= high

    def table(self) -> Table:
        """Return ``sites``."""
        return self.sites

    def to_dict(self) -> dict[str, Any]:
        """Return everything but tensors and the graph as plain data."""
        kept = ("model", "policy", "draws", "shape", "deviation", "uncertainty", "magnitude", "formats", "measured")
        data: dict[str, Any] = {name: _plain(getattr(self, name)) for name in (*kept, "remaining", "samples", "noise")}
        derived = {name: _plain(getattr(self, name)) for name in ("bits", "ratio", "gained", "trusted", "interrupted")}
        rows = [{name: _plain(value) for name, value in asdict(row).items()} for row in self.rows]
        layers = [asdict(layer) | {"bits": _plain(layer.bits), "ratio": layer.ratio} for layer in self.layers]
        return data | derived | {"sites": rows, "layers": layers, "doubtful": [row.node for row in self.doubtful]}

    def draw(self, path: str | Path, *, title: str = "") -> Path:
        """Draw the graph, every operation in the colour of its share; returns the path.

        path: a file that ends in .html, .svg or .json, as for ``RoundedModule.draw``. Raises ValueError for another
        suffix.
        """
        assert self.graph is not None
        return write_picture(path, self.graph, self._colourings(), title or self.colouring().title)

    def colouring(self) -> Colouring:
        """Return the colours of the graph by shares, for ``RoundedModule.draw(report=)``."""
        return ByShare(self)

    def _colourings(self) -> list[Colouring]:
        assert self.graph is not None
        return [self.colouring(), ByPolicy(drawn(self.graph))]

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file, with its text, tables and drawing; returns the path."""
        head, *rest = self._lines()
        body = [f"<h1>{html.escape(self._title())}</h1>", *(f"<p>{html.escape(line)}</p>" for line in rest if line)]
        del head
        tables = [self.sites, self.modules, *([self.sensitivity] if self.formats else [])]
        picture = "" if self.graph is None else embedded(self.graph, self._colourings(), self.colouring().title)
        page = "".join((*body, *(table._repr_html_() for table in tables), picture))
        return write_file(path, f'<!doctype html><html lang="en"><meta charset="utf-8"><body>{page}</body></html>\n')

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _title(self) -> str:
        state = ", INTERRUPTED before all probes and samples were complete" if self.interrupted else ""
        return f"{self.model}, policy {self.policy}: what each rounding costs{state}"

    def _lines(self) -> Iterator[str]:
        shown = self.rows[:SHOWN_ROWS]
        rest = self.rows[SHOWN_ROWS:]
        table = self.sites
        yield str(Table(table.columns, table.rows[: len(shown)], table.title))
        if rest:
            yield f"and {len(rest)} more, together {100 * sum(r.share for r in rest):.2f} %"
        yield ""
        said = f"{self.bits:.1f} significant bits" if self.trusted else "doubtful, see below"
        what = "Deviation of samples" if self.draws else "Error"
        spread = f" ± {self.uncertainty:.2g} by the probes" if self.uncertainty else ""
        yield (
            f"{what}, predicted: {self.deviation:.4g}{spread}, root mean square over {math.prod(self.shape):,} "
            f"elements of magnitude {self.magnitude:.4g}: {said}."
        )
        if self.measured is not None:
            how = f"{self.samples} samples" if self.draws else "a run in binary64"
            ratio = "" if self.ratio is None else f", predicted over measured {self.ratio:.3f}"
            yield f"Measured by {how}: {self.measured:.4g}{ratio}."
        if self.gained is not None:
            yield f"The result without its predicted error is nearer to the binary64 run by {self.gained:.1f} bits."
        if self.layers:
            yield ""
            columns = ("layer", "bits", "deviation", "measured", "ratio")
            rows = [
                (layer.name, layer.bits, _short(layer.deviation), _short(layer.measured), layer.ratio)
                for layer in self.layers
            ]
            yield str(Table(columns, tuple(rows)))
        if not math.isfinite(self.magnitude):
            finder = "fxround.localization.nonfinite.first_nonfinite"
            yield f"The result of the run is not finite: {finder} finds where that begins."
            return
        for row in self.doubtful[:5]:
            place = f"{row.node} ({row.operator} in {row.module or 'the root module'}, {row.source or row.code})"
            yield (
                f"Doubtful: at {place} derivatives miss {_part(row.doubt)} of the deviation: an error crosses a kink "
                "or a decision there, meets an infinite derivative, is not small, or is undone by a coarse rounding."
            )
        if not self.agrees:
            chance = f", where chance explains {self.noise[0]:.2f} to {self.noise[1]:.2f}" if self.noise else ""
            who = f"{self.samples} samples contradict" if self.draws else "the run in binary64 contradicts"
            yield f"Do not rely on these figures: {who} the prediction{chance}."
        if not self.doubt <= DOUBT:
            yield (
                f"Do not rely on these figures: derivatives miss {_part(self.doubt)} of the deviation at all "
                "operations together. Compare them with fxround.variability."
            )


def noise_of(variation: float, samples: int) -> tuple[float, float]:
    """Return the least and the largest ratio of a predicted to a measured deviation that chance explains.

    A ratio that is right is outside with a probability of 0.001. The measured variance is that of n samples of one
    element, the worst case: a chi-square variable with n - 1 degrees of freedom. The predicted one is taken for another
    with the same ``variation``, the relative standard deviation of its square root. Their ratio has an F distribution,
    whose quantiles are those of the normal distribution by the approximation of Paulson (Ann. Math. Stat. 13, 1942).
    """
    z = NormalDist().inv_cdf(0.9995)
    # Twice over nine times the degrees of freedom; the relative variance of a chi-square variable is 2 over them.
    a, b = 4 * variation**2 / 9, 2 / (9 * (samples - 1))
    square, middle, last = (1 - b) ** 2 - z * z * b, (1 - a) * (1 - b), (1 - a) ** 2 - z * z * a
    root = math.sqrt(max(0.0, middle * middle - square * last))
    high = ((middle + root) / square) ** 1.5 if square > 0 else math.inf
    low = (last / (middle + root)) ** 1.5 if last > 0 else 0.0
    return low, high


def bits_of(deviation: float, magnitude: float) -> float:
    """Return log2 of magnitude over deviation: infinite without a deviation, at least 0."""
    if not deviation:
        return math.inf
    return max(0.0, math.log2(magnitude / deviation)) if magnitude and math.isfinite(deviation) else 0.0


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _part(doubt: float) -> str:
    """Return a doubt as a part of the deviation."""
    return f"{100 * doubt:.0f} %" if math.isfinite(doubt) else "an unknown part"


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no infinities and NaNs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


class ByShare(Colouring):
    """Colours by what the roundings of operations cost; a module has the sum of the shares of its operations."""

    name = "share of the error"

    def __init__(self, report: AttributionReport) -> None:
        self.title = f"Share of the {'variance' if report.draws else 'error'} of the result"
        self._rows = {row.node: row for row in report.rows}
        self._formats = report.formats
        shades = ((said, *colours) for (_, said), colours in zip(_SHARES, SHADES, strict=True))
        self.entries = (*shades, ("no rounding", *UNKNOWN))

    def of_node(self, node: str, data: Mapping[str, Any]) -> Mark:
        """Return the share of a node."""
        row = self._rows.get(node)
        if row is None:
            return Mark(*UNKNOWN)
        tried = [(f"deviation in {form}", _short(d)) for form, d in zip(self._formats, row.sensitivity, strict=False)]
        facts = (("deviation", _short(row.deviation)), ("doubt", _part(row.doubt)), *tried)
        return _share(row.share, facts)

    def of_module(self, path: str | None, members: Mapping[str, Mapping[str, Any]]) -> Mark:
        """Return the sum of the shares of the members."""
        shares = [self._rows[node].share for node in members if node in self._rows]
        return _share(math.fsum(shares)) if shares else Mark(*UNKNOWN)


def _share(share: float, facts: tuple[tuple[str, str], ...] = ()) -> Mark:
    colours = SHADES[sum(abs(share) >= least for least, _ in _SHARES[1:])]
    return Mark(*colours, f"{100 * share:.1f} %", (("share", f"{100 * share:.2f} %"), *facts))
