"""The report of ``fxround.localize``: sets of sites to blame and their place in the model.

Each set fails, and passes without any one of its members; sets are disjoint; the sites that remain when all sets are
removed pass together. The report of a search that was stopped says so and holds the sets found until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fxround.graph.site import placed
from fxround.short_reprs import Short
from fxround.significance.places import said_of_undrawn
from fxround.views.table import Table, Tabled

CONFIDENCE: Final = 0.95

_ENDED: Final = {"interrupted": "Interrupted", "limit": "Stopped at the limit of sets"}


@dataclass(frozen=True, repr=False)
class Blame(Short):
    """One site of a set: a node of the captured graph and its place in the model.

    node        the node's name
    operator    for example "aten.mm.default"
    module      the path of the module; "" is the root
    module_type the class of the module
    source      the model's line, "file:number"; code is its text
    excerpt     (number, text) of the source lines around it, if the file can be read
    shape       the shape of the node's result
    elements    row-major half-open ranges of the result's elements that are to blame; None if not searched
    amplifier   the operation, this one or a later one, in which most bits cancel in the quiet run; "" if none do
    cancelled   the number of bits that cancel there
    share       its part in the error of the result with every site on (``fxround.attribute``); None if it is not known
    """

    node: str
    operator: str
    module: str
    module_type: str
    source: str
    code: str
    excerpt: tuple[tuple[int, str], ...] = ()
    shape: tuple[int, ...] = ()
    elements: tuple[tuple[int, int], ...] | None = None
    amplifier: str = ""
    cancelled: float = 0.0
    share: float | None = None

    def _line(self) -> str:
        return f"{self.node}, {placed(self.operator, self.module, self.source, self.code)}"


@dataclass(frozen=True, repr=False)
class Culprits(Short):
    """A minimal failing set: its sites, their modules, and the numbers of the samples that fail with these sites on."""

    sites: tuple[Blame, ...]
    modules: tuple[str, ...]
    failures: tuple[int, ...]

    def _line(self) -> str:
        sites = ", ".join(site.node for site in self.sites)
        return f"{sites} in {', '.join(self.modules) or 'the root module'}, {len(self.failures)} samples fail"


@dataclass(frozen=True, repr=False)
class LocalizeReport(Tabled):
    """The findings of ``fxround.localize``.

    A site is an operation whose rounding the search switches between ``policy`` (on) and ``quiet`` (off). A set of
    sites fails if the check fails with these sites on and all others off.

    model       the name of the model's class
    policy      the name of the policy of sites that are on
    quiet       the name of the policy of sites that are off
    level       as passed
    seed        as passed
    runs        samples per set: as passed, or 1 if nothing is random
    sites       the number of sites that were searched
    modules     the number of modules that were searched
    sets        the sets that were found, as ``Culprits``: disjoint, and minimal (each passes without any one site)
    ended       "complete" (the remaining sites pass together), "limit" or "interrupted" (Ctrl-C)
    passing     names of the sites that pass together; empty if the search is not complete
    narrowed    names of the sites among which a further set is, if the search is not complete
    within      the modules of the sites of ``narrowed``
    remedy      a policy as a dict, for ``fxround.compile``, that rounds the sites of ``sets`` as ``quiet`` does; None
                if the search is not complete
    remedied    whether the check passes under ``remedy``
    executed    the number of runs of the model
    recalled    the number of verdicts that were read from the cache
    failing     the number of different sets that failed
    passed      the number of different sets that passed
    random      whether samples may differ
    unattributed why sites have no shares, and were tried in the order of the graph; "" if they have
    undrawn     the operations that are no sites: a stock kernel computes them, with the same result in every sample

    ``print(report)`` shows the sets with source lines; ``table()``, ``to_dict()`` and ``to_json()`` give the same data.
    Example::

        report = fxround.localize(model, x, min_bits=10)
        [(site.operator, site.source) for culprits in report.sets for site in culprits.sites]
    """

    model: str
    policy: str
    quiet: str
    level: str
    seed: int
    runs: int
    sites: int
    modules: int
    sets: tuple[Culprits, ...]
    passing: tuple[str, ...]
    narrowed: tuple[str, ...]
    within: tuple[str, ...]
    executed: int
    recalled: int
    failing: int
    passed: int
    ended: Literal["complete", "limit", "interrupted"]
    random: bool
    remedy: dict[str, Any] | None = None
    remedied: bool = False
    undrawn: tuple[str, ...] = ()
    unattributed: str = ""

    @property
    def overlooked(self) -> float:
        """The smallest failure rate p that ``runs`` samples detect with 95 % probability: (1 - p)^runs = 5 %.

        0 if nothing is random.
        """
        return 1 - (1 - CONFIDENCE) ** (1 / self.runs) if self.random else 0.0

    def table(self) -> Table:
        """Return a table with one row per site to blame."""
        rows = [
            (
                i,
                s.module or "(root)",
                s.operator,
                s.source,
                s.code,
                f"{len(c.failures)} of {self.runs}",
                _share(s),
                s.amplifier,
            )
            for i, c in enumerate(self.sets, 1)
            for s in c.sites
        ]
        columns = ("set", "module", "operator", "source", "code", "fails", "share %", "amplified by")
        return Table(columns, tuple(rows), title=self._title(), note=self._note())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and ``overlooked`` as plain data."""
        return asdict(self) | {"overlooked": self.overlooked}

    def __str__(self) -> str:
        parts = [self._title(), *(self._shown(i, c) for i, c in enumerate(self.sets, 1)), self._note()]
        return "\n\n".join(parts)

    def _title(self) -> str:
        sets = f"{len(self.sets)} {'set' if len(self.sets) == 1 else 'sets'} of {self.level} to blame"
        return f"{self.model}, policy {self.policy} (off: {self.quiet}): {sets}"

    def _shown(self, number: int, culprits: Culprits) -> str:
        head = f"Set {number}: fails in {len(culprits.failures)} of {self.runs} {_runs(self.runs)}"
        if self.level == "modules":
            return "\n".join([head, *(_module(path, culprits) for path in culprits.modules)])
        return "\n".join([head, *map(_lines, culprits.sites)])

    def _note(self) -> str:
        work = f"{self.executed} runs{f' and {self.recalled} from the cache' if self.recalled else ''}"
        doubt = (
            f" A set that fails in {100 * self.overlooked:.0f} % of samples is seen to fail in {self.runs} runs with"
            f" {CONFIDENCE:.0%} probability; {self.passed} different sets were taken for passing."
            if self.random
            else ""
        )
        silent = [f"{said_of_undrawn(self.undrawn)}."] if self.undrawn else []
        return "\n".join([*self._rest(), f"{work} (2^{self.sites} sets are possible).{doubt}", *silent])

    def _rest(self) -> Iterator[str]:
        if self.ended == "complete":
            yield f"The other {len(self.passing)} of {self.sites} sites pass, all of them on."
        else:
            modules = ", ".join(path or "(root)" for path in self.within[:8]) + (
                ", ..." if len(self.within) > 8 else ""
            )
            among = f"among {len(self.narrowed)} of {self.sites} sites, in {modules}"
            yield f"{_ENDED[self.ended]}: a further set is to be found {among}."
        if self.remedy is not None:
            answer = "passes" if self.remedied else "still fails"
            yield f"With report.remedy, a policy that rounds what is to blame as {self.quiet} does, the check {answer}."


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


def _module(path: str, culprits: Culprits) -> str:
    """Return a module of a set and the operations in it that are sites, as text."""
    sites = [site for site in culprits.sites if site.module == path]
    kind = next((f" ({site.module_type})" for site in sites if site.module_type), "")
    words = (site.operator.split(".")[1] if "." in site.operator else site.code for site in sites)
    return f"  {path or '(root)'}{kind}: {', '.join(dict.fromkeys(words))}"


def _share(site: Blame) -> float | None:
    return None if site.share is None else 100 * site.share


def _lines(site: Blame) -> str:
    """Return a site's place and the lines around it, with the site's line marked."""
    result = f"{site.operator} -> {list(site.shape)}"
    share = "" if not site.share else f", {100 * site.share:.2g} % of the error of the result"
    place = f"  {site.module or '(root)'}  {result}  {site.source or site.code}  (node {site.node}{share})"
    amplified = [f"    amplified by {site.amplifier}: {site.cancelled:.0f} bits cancel"] if site.amplifier else []
    elements = [f"    elements {_shown_elements(site)}"] if site.elements is not None else []
    line = int(site.source.rpartition(":")[2]) if site.excerpt else 0
    code = [f"    {'>' if n == line else ' '} {n:4} | {text}" for n, text in site.excerpt]
    return "\n".join([place, *elements, *code, *amplified])


def _shown_elements(site: Blame) -> str:
    assert site.elements is not None
    shown = [str(a) if b == a + 1 else f"{a}..{b - 1}" for a, b in site.elements[:8]]
    count = sum(b - a for a, b in site.elements)
    more = ", ..." if len(site.elements) > 8 else ""
    return f"{', '.join(shown)}{more} ({count} of a result of shape {list(site.shape)}, row-major)"
