"""How much noise each part of a model adds to its result in each format: by attribution, and by runs where it doubts.

The model with all parts in one format is attributed once for each format, on the first batch. What the roundings of a
part add to the result is taken for what they would add if the other parts had other formats. Where derivatives miss
more than a tenth of the deviation at the operations of a part, the part alone runs in the format, all others in the
finest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.utils._pytree as pytree

from fxround.attribution.attribute import Incomplete, contributions
from fxround.attribution.report import DOUBT
from fxround.attribution.subject import Subject
from fxround.errors import UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import graphs_of
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import IDENTITY
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import primary
from fxround.tuning.parts import Formats, Part, group_of
from fxround.tuning.trials import Trials


@dataclass(frozen=True)
class Sensitivities:
    """The noise of parts (rows) in formats (columns), as a part of the mean square of the result.

    noise      what each part adds; infinity for what is not finite
    doubt      the part of the deviation that derivatives miss at its operations; infinity if nothing is known
    refused    for formats that attribution refuses, by name, the reason
    attributed how many formats were attributed
    measured   the parts and formats that ran alone
    """

    noise: tuple[tuple[float, ...], ...]
    doubt: tuple[tuple[float, ...], ...]
    refused: dict[str, str]
    attributed: int
    measured: tuple[tuple[int, int], ...] = ()

    def of(self, parts: Sequence[int]) -> Sensitivities:
        """Return the rows of some parts."""
        noise, doubt = tuple(self.noise[i] for i in parts), tuple(self.doubt[i] for i in parts)
        return replace(self, noise=noise, doubt=doubt)

    @property
    def total(self) -> tuple[float, ...]:
        """The noise of all parts together in each format."""
        return tuple(math.fsum(column) for column in zip(*self.noise, strict=True))


def attributed(
    whole: RoundedModule,
    call: ModelCall,
    parts: Sequence[Part],
    formats: Formats,
    seed: int,
    stopping: Callable[[], bool],
) -> Sensitivities:
    """Attribute a call with all parts in the first format, in the second, ...

    Once ``stopping`` returns True, the formats that remain count as refused.
    """
    unrolled = _without_loops(whole, call)
    columns: list[list[tuple[float, float]]] = []
    refused: dict[str, str] = {}
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    for i, name in enumerate(formats.names):
        compiled = unrolled.with_policy(formats.uniform(parts, i)).reseed(seed)
        with torch.no_grad():
            entry = compiled._entry(call.args, call.kwargs)
        subject = Subject(unrolled.source, compiled, entry, leaves, None, None, seed, 0)
        try:
            with torch.enable_grad():
                group = group_of(parts, entry.lowered, formats.per)
                by_part = contributions(subject, primary, group, stopping=stopping)
        except (UnsupportedOperator, UnsupportedRounding, Incomplete) as error:
            refused[name] = str(error)
            columns.append([(0.0, math.inf)] * len(parts))
            continue
        total = math.fsum(one.noise for one in by_part.values())
        column = []
        for part in range(len(parts)):
            one = by_part.get(part)
            doubt = math.sqrt(one.doubt / total) if one is not None and one.doubt and total else 0.0
            column.append((0.0 if one is None else one.noise, doubt))
        columns.append(column)
    rows = list(zip(*columns, strict=True))
    adds = tuple(tuple(one for one, _ in row) for row in rows)
    doubts = tuple(tuple(one for _, one in row) for row in rows)
    return Sensitivities(adds, doubts, refused, len(columns) - len(refused))


def _without_loops(whole: RoundedModule, call: ModelCall) -> RoundedModule:
    """Return a module whose graph has no loops: the same one, or another capture."""
    with torch.no_grad():
        lowered = whole._entry(call.args, call.kwargs).lowered
    if all(part is lowered for part in graphs_of(lowered)):
        return whole
    return compile(whole.source, IDENTITY, seed=int(whole.rng[0]), unroll_loops=True)


def measured(sensitivities: Sensitivities, trials: Trials, most: int) -> Sensitivities:
    """Run parts alone in the formats that attribution doubts, the most doubtful first, at most ``most`` of them.

    Those that attribution refuses run all. The finest format is that of the other parts. Raises ``Stopped``.
    """
    finest = trials.formats.base
    pairs = [(part, i) for part in range(len(trials.parts)) for i in range(len(trials.formats.names)) if i != finest]
    doubtful = [(part, i) for part, i in pairs if sensitivities.doubt[part][i] > DOUBT]
    doubtful.sort(key=lambda pair: -sensitivities.doubt[pair[0]][pair[1]])
    unknown = [(part, i) for part, i in doubtful if trials.formats.names[i] in sensitivities.refused]
    chosen = [*unknown, *[pair for pair in doubtful if pair not in unknown][:most]]
    if not chosen:
        return sensitivities
    parts = len(sensitivities.noise)
    noise = [list(row) for row in sensitivities.noise]
    least = trials.run((finest,) * parts).noise
    for part, i in chosen:
        alone = tuple(i if other == part else finest for other in range(parts))
        noise[part][i] = max(trials.run(alone).noise - least, 0.0)
    return replace(sensitivities, noise=tuple(map(tuple, noise)), measured=tuple(chosen))


__all__ = ["Sensitivities", "attributed", "measured"]
