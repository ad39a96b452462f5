"""The search of ``localize``: over modules, then nodes, then elements.

Sites are tried in the order of their shares in the error of the result (``attribution``): the first few alone, before
all of them are divided. Modules are tested first, whole branches of the data flow before their parts; then the nodes of
the modules found; then, for every node of a set, ranges of its result's elements, while the other nodes of the set stay
on.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final, Literal

import networkx as nx
from torch import fx

from fxround.choices import Level
from fxround.errors import UnsupportedOperator, UnsupportedRounding
from fxround.graph.site import located
from fxround.graph.source_lines import innermost
from fxround.localization.cancellation import Cancellation, cancelled
from fxround.localization.delta_debugging import Branches, Units, disjoint, halves, likely, minimal
from fxround.localization.remedy import remaining, remedy
from fxround.localization.report import Blame, Culprits, LocalizeReport
from fxround.localization.verdicts import Ranges, Verdicts
from fxround.numerics.lazy import cached_property
from fxround.policy import Policy
from fxround.significance.progress import progress

CONTEXT: Final = 2
PIECES: Final = 16
# Any sum of numbers of both signs loses a bit or two; an amplifier loses more than this.
AMPLIFIES: Final = 4
_SINK: Final = "(output)"


class NothingFails(ValueError):
    """The check passes with every site on, so that there is nothing to localize."""


class Search:
    """A search for disjoint minimal sets; ``shown``: as for ``significance.progress``."""

    def __init__(self, verdicts: Verdicts, level: Level, limit: int | None, shown: bool | None) -> None:
        self.verdicts, self.masked, self.level, self.limit = verdicts, verdicts.masked, level, limit
        self.found: list[Culprits] = []
        self.rest: Units = tuple(self.masked.sites)
        self.narrowed: Units = self.rest
        self.shares, self.unattributed = self._shares()
        self.remedy: Policy | None = None
        self.remedied = False
        self._shown = shown

    def _shares(self) -> tuple[dict[str, float], str]:
        """Return the shares of sites, by which they are tried, or none and the reason."""
        try:
            return self.masked.shares(self.verdicts.seed), ""
        except (UnsupportedOperator, UnsupportedRounding) as error:
            return {}, str(error)

    def run(self, model: str) -> LocalizeReport:
        """Find sets until the rest passes, the limit is reached or Ctrl-C is pressed.

        Raises NothingFails or ValueError if there is nothing to find.
        """
        ended: Literal["complete", "limit", "interrupted"] = "interrupted"
        with suppress(KeyboardInterrupt), progress("localize", None, self._shown) as tick:
            self.verdicts.after_run = lambda: tick(self._said_of_progress())
            self._begin()
            ended = self._all()
            if ended == "complete":
                self._remedy()
        verdicts, masked = self.verdicts, self.masked
        return LocalizeReport(
            model=model,
            policy=masked.policy.name,
            quiet=masked.quiet.name,
            level=self.level,
            seed=verdicts.seed,
            runs=verdicts.runs,
            sites=len(masked.sites),
            modules=len(self._modules(tuple(masked.sites))),
            sets=tuple(self.found),
            passing=self.rest if ended == "complete" else (),
            narrowed=self.narrowed if ended != "complete" else (),
            within=self._modules(self.narrowed) if ended != "complete" else (),
            executed=verdicts.executed,
            recalled=verdicts.recalled,
            failing=len(verdicts.failing),
            passed=len(verdicts.passing),
            ended=ended,
            random=masked.random,
            remedy=self.remedy.to_dict() if self.remedy else None,
            remedied=self.remedied,
            undrawn=masked.undrawn,
            unattributed=self.unattributed,
        )

    def _begin(self) -> None:
        """Require that the check fails with everything on and passes with everything off."""
        verdicts, everything = self.verdicts, self.rest
        off = verdicts.passes((), 0, again=True) and not verdicts.fails(())
        if not off:
            own = self.masked.unsettled
            advice = f"{own[0].upper()}{own[1:]}: call model.eval() first. Else loosen" if own else "Loosen"
            raise ValueError(
                f"the check fails with every site off (policy {self.masked.quiet.name!r})"
                f"{self._seen((), verdicts.failures(())[0])}: the perturbation is not the cause. {advice} the "
                "check, or choose another quiet= policy (or reference=)"
            )
        verdicts.passes(everything, 0, again=True)
        if not everything or not verdicts.fails(everything):
            times = f"in {verdicts.runs} {'run' if verdicts.runs == 1 else 'runs'} with all {len(everything)} sites on"
            raise NothingFails(
                f"the check passes {times} (policy {self.masked.policy.name!r}){self._seen(everything)}: there is "
                "nothing to localize. Tighten the check, perturb more strongly, or raise runs="
            )

    def _seen(self, on: Units, sample: int = 0) -> str:
        seen = self.verdicts.check.seen(self.verdicts.output(on, sample))
        return f" ({seen})" if seen else ""

    def _all(self) -> Literal["complete", "limit"]:
        for sites in disjoint(self.rest, self._fails, self._minimal):
            self.found.append(self._culprits(sites))
            self.rest = self.narrowed = tuple(name for name in self.rest if name not in sites)
            if len(self.found) == self.limit:
                return "limit" if self.rest and self._fails(self.rest) else "complete"
        return "complete"

    def _remedy(self) -> None:
        cured = remedy(self.masked, (site.node for culprits in self.found for site in culprits.sites))
        self.remedied = not self.verdicts.fails(remaining(self.masked, cured))
        self.remedy = cured

    def _modules(self, sites: Units) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.masked.sites[name].path for name in sites))

    def _fails(self, on: Units) -> bool:
        return self._first([on]) is not None

    def _first(self, sets: Sequence[Units]) -> Units | None:
        """Return the first of several sets that fails."""
        place = self.verdicts.first_failing([(on, None) for on in sets])
        if place is None:
            return None
        if len(sets[place]) < len(self.narrowed):
            self.narrowed = sets[place]
        return sets[place]

    def _minimal(self, rest: Units) -> Units:
        """Return a minimal set within ``rest``, which fails: first of modules, then of nodes."""
        paths = {name: self.masked.sites[name].path for name in rest}

        def sites(modules: Units) -> Units:
            return tuple(name for name in rest if paths[name] in modules)

        def first(several: Sequence[Units]) -> Units | None:
            failing = self._first([sites(modules) for modules in several])
            return next((modules for modules in several if sites(modules) == failing), None)

        modules = tuple(dict.fromkeys(paths.values()))
        totals = {path: sum(self.shares.get(name, 0.0) for name in sites((path,))) for path in modules}
        guilty = minimal(likely(modules, totals, first), first, self._module_branches.divide)
        if self.level == "modules":
            return sites(guilty)
        return minimal(likely(sites(guilty), self.shares, self._first), self._first, self._branches.divide)

    @cached_property
    def _branches(self) -> Branches:
        return Branches(self.masked.flow(), self.masked.output.name)

    @cached_property
    def _module_branches(self) -> Branches:
        """The branches of the flow between modules, each one vertex named by its path."""
        paths = {node.name: located(node).path for node in self.masked.nodes}
        paths |= {name: place.path for name, place in self.masked.sites.items()} | {self.masked.output.name: _SINK}
        flow = nx.DiGraph()
        flow.add_nodes_from(paths.values())
        flow.add_edges_from((paths[a], paths[b]) for a, b in self.masked.flow().edges if paths[a] != paths[b])
        return Branches(flow, _SINK)

    def _culprits(self, sites: Units) -> Culprits:
        elements = self._elements(sites) if self.level == "elements" else {}
        return Culprits(
            sites=tuple(self._blame(name, elements.get(name)) for name in sites),
            modules=self._modules(sites),
            failures=self.verdicts.failures(sites, elements),
        )

    def _elements(self, sites: Units) -> dict[str, Ranges]:
        """Return for every site the ranges of its result that must be on, one site after the other."""
        chosen: dict[str, Ranges] = {}
        for name in sites:
            chosen[name] = self._ranges(sites, chosen, name)
        return chosen

    def _ranges(self, sites: Units, chosen: dict[str, Ranges], name: str) -> Ranges:
        """Cut the ranges and leave out pieces until single elements or only needed pieces remain."""
        ranges: Ranges = ((0, self.verdicts.count(name)),)
        while any(end - begin > 1 for begin, end in ranges):
            pieces = {f"{a}:{b}": (a, b) for a, b in _cut(ranges)}
            if len(pieces) > 4 * PIECES:
                break

            def first(several: Sequence[Units], pieces: dict[str, tuple[int, int]] = pieces) -> Units | None:
                cut = [chosen | {name: tuple(pieces[text] for text in some)} for some in several]
                place = self.verdicts.first_failing([(sites, elements) for elements in cut])
                return None if place is None else several[place]

            left = minimal(tuple(pieces), first, halves)
            ranges = tuple(pieces[text] for text in left)
            if len(left) == len(pieces) > PIECES // 2:
                break
        return _joined(ranges)

    def _blame(self, name: str, elements: Ranges | None) -> Blame:
        place, node, worst = self.masked.sites[name], self._nodes[name], self._amplifier(name)
        return Blame(
            node=name,
            operator=place.operator,
            module=place.path,
            module_type=place.module_type,
            source=place.source,
            code=place.code,
            excerpt=_excerpt(node),
            shape=tuple(self.masked.shapes[name]),
            elements=elements,
            amplifier=f"{worst.operator} at {worst.source or worst.node}" if worst else "",
            cancelled=worst.lost if worst else 0.0,
            share=self.shares.get(name),
        )

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.masked.nodes}

    def _amplifier(self, name: str) -> Cancellation | None:
        """Return the operation, the node or a later one, in which most bits cancel; None if few do."""
        after = {name, *nx.descendants(self.masked.flow(), name)}
        candidates = [one for one in self._cancelled if one.node in after and one.lost > AMPLIFIES]
        return max(candidates, key=lambda one: one.lost, default=None)

    @cached_property
    def _cancelled(self) -> list[Cancellation]:
        return cancelled(self.masked)

    def _said_of_progress(self) -> str:
        return f"{len(self.found)} found, the next is among {len(self.narrowed)} of {len(self.masked.sites)} sites"


def _cut(ranges: Ranges) -> Ranges:
    """Cut every range into pieces, about PIECES in all, at least two for a range of two or more elements."""
    each = max(2, PIECES // len(ranges))
    cut: list[tuple[int, int]] = []
    for begin, end in ranges:
        parts = min(each, end - begin)
        edges = [begin + (end - begin) * i // parts for i in range(parts + 1)]
        cut += pairwise(edges)
    return tuple(cut)


def _joined(ranges: Ranges) -> Ranges:
    """Join adjacent ranges."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return tuple(joined)


def _excerpt(node: fx.Node) -> tuple[tuple[int, str], ...]:
    """Return the source lines around that of a node, if its file can be read."""
    frame = innermost(node.meta.get("stack_trace") or "")
    lines = linecache.getlines(frame[0]) if frame else []
    if frame is None or len(lines) < frame[1]:
        return ()
    first = max(frame[1] - CONTEXT, 1)
    return tuple((n, line.rstrip()) for n, line in enumerate(lines[first - 1 : frame[1] + CONTEXT], first))
