"""Localize: which roundings make a model's result wrong, found by delta debugging, without compiling anew.

What is true here. A search switches sites between a perturbing and a quiet policy (``masks``), first whole modules,
then nodes in the modules found, then, if asked, elements of a node's result. It begins by showing that the check
fails with everything on and passes with everything off, and ends when what is not to blame passes all together.

Why it is safe. Every verdict is a function of (graph, inputs, sites, seed): the same call finds the same sets, and
with a cache directory an interrupted one continues where it was. A set that is reported was seen to fail.

Source of the method: Févotte and Lathuilière, Debugging and optimization of HPC programs with the Verrou tool,
Correctness 2019 (rddmin); Zeller and Hildebrandt, IEEE TSE 28(2), 2002 (ddmin).

    before   the loss is NaN under stochastic rounding; comment out layers until it is not
    after    fxround.localize(model, x, lambda y: y.isfinite().all())
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fxround.analysis.checks import CheckLike, parse_check, require_check
from fxround.analysis.culprits import LEVELS, Level, LocalizeReport
from fxround.analysis.masks import QUIET, Masked
from fxround.analysis.search import NothingFails, Search
from fxround.analysis.verdicts import Verdicts
from fxround.compiler import PolicyLike

__all__ = ["NothingFails", "localize"]


def localize(
    model: nn.Module,
    inputs: Any,
    check: CheckLike = None,
    policy: PolicyLike = "stochastic",
    *,
    quiet: PolicyLike = QUIET,
    level: Level = "nodes",
    min_bits: float | None = None,
    reference: Any = None,
    runs: int = 5,
    seed: int = 0,
    cache: str | Path | None = None,
    limit: int | None = None,
    progress: bool | Callable[[str], None] | None = None,
) -> LocalizeReport:
    """The smallest sets of modules, nodes or elements whose roundings by ``policy`` make the check fail.

    inputs: a tensor, a tuple of arguments, a dict of keywords, a tuple and a dict, or a DataLoader, of which the first
    batch is taken. check: a function of the output, True where it passes; or (metric, threshold), a name of
    ``fxround.analysis.metrics.METRICS`` (worse than the threshold fails) or a function of (output, reference) that may
    not exceed it; or None with ``min_bits``, to which every element must agree with the reference. reference: what they
    compare with (None: the output of the quiet run). quiet: the policy of the sites that are off. runs: samples a set,
    which fails if one of them does (1 where nothing is random). cache: a directory of verdicts, for going on later.
    limit: stop after so many sets. progress: True, a function of a line of text, or None: in a terminal.

    Ctrl-C ends the search with a report of what was found so far. Raises NothingFails (a ValueError) where the check
    passes with every site on, ValueError where it fails with every site off, and what ``fxround.compile`` raises.
    """
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; expected one of {', '.join(LEVELS)}")
    if runs < 1 or (limit is not None and limit < 1):
        raise ValueError(f"runs={runs}, limit={limit}: expected at least 1")
    require_check(check, min_bits)
    masked = Masked(model, policy, inputs, quiet=quiet)
    compared = masked.run(seed=seed) if reference is None else reference
    judged = parse_check(check, min_bits, compared, masked.call)
    samples = runs if masked.random else 1
    verdicts = Verdicts(masked, judged, runs=samples, seed=seed, cache=Path(cache) if cache is not None else None)
    return Search(verdicts, level, limit, progress).run(type(model).__name__)
