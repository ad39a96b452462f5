"""``fxround.localize``: find the roundings that make a model's result wrong, by delta debugging.

A search switches sites between a perturbing and a quiet policy (``masks``) without compiling the model again. It
searches whole modules first, then the nodes of the modules found, then, if requested, the elements of a node's
result. It first checks that the test fails with all sites on and passes with all sites off, and ends when the
remaining sites pass together. Every reported set was observed to fail. A verdict is a function of (graph, inputs,
sites, seed), so that the same call finds the same sets, and a cache directory lets an interrupted search continue.

Source of the method: Févotte and Lathuilière, Debugging and optimization of HPC programs with the Verrou tool,
Correctness 2019 (rddmin); Zeller and Hildebrandt, IEEE TSE 28(2), 2002 (ddmin).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fxround.choices import LEVELS, QUIET, Level
from fxround.compiler.signature import require_module
from fxround.errors import shown
from fxround.localization.checks import CheckLike, compares, parse_check, require_check
from fxround.localization.masked_model import Masked
from fxround.localization.report import LocalizeReport
from fxround.localization.search import NothingFails, Search
from fxround.localization.shared import Shared
from fxround.localization.verdicts import Verdicts
from fxround.module.rounded_module import PolicyLike
from fxround.significance.inputs import positive
from fxround.significance.references import reference_rows, require_reference
from fxround.significance.workers import require_jobs

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
    n_jobs: int = 1,
    progress: bool | None = None,
) -> LocalizeReport:
    """Find minimal sets of modules, nodes or elements whose roundings by ``policy`` make a check fail.

    A site is an operation that is rounded by ``policy`` (the site is on) or by ``quiet`` (off). The check fails if the
    sites of a set are on and all others are off, and passes if any one site of the set is off too. Recurrent layers and
    other loops are unrolled, as by ``fxround.compile(..., unroll_loops=True)``, so that a gate of a step is a site.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or a
            DataLoader, of which the first batch is used.
        check: a function of the output that returns True if it passes; or (metric, threshold), where metric is a name
            of ``fxround.significance.metrics.METRICS`` (worse than the threshold fails), ``fxround.metric(...)``, or a
            function of (output, reference), whose threshold says what passes: ``"<= 1e-3"``, ``">= 0.9"``; or None with
            ``min_bits``.
        policy: the policy of the sites that are on, as for ``fxround.compile``.
        quiet: the policy of the sites that are off.
        level: what a set consists of: ``"modules"``, ``"nodes"`` (operations), or ``"elements"`` (operations, and which
            elements of their results).
        min_bits: the number of leading bits in which every element must agree with the reference.
        reference: what metrics and ``min_bits`` compare with, shaped like the output; None takes the output of the
            quiet run. The reference of a metric that is a function may be anything that the function takes.
        runs: samples per set, at least 1; a set fails if one of its samples fails. One run is used if neither policy
            draws random bits.
        seed: 0 to 2^63 - 1, the seed of all random bits.
        cache: a directory for verdicts, from which a later call continues; None stores nothing.
        limit: the number of sets after which the search stops; None finds all.
        n_jobs: number of joblib workers, -1 for all cores. An active joblib backend is used. Each worker has as many
            threads as this process. They run the samples of a set, and of the sets that come next if it passes; the
            check is called here, and the report is that of one process.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A ``LocalizeReport``. Ctrl-C ends the search, workers at once, and returns the report of the sets found so far.

    Raises:
        NothingFails: a ValueError, if the check passes with every site on.
        ValueError: for wrong arguments, or if the check fails with every site off.
        TypeError: for another kind of check; also what ``fxround.compile`` raises.
        ImportError: for workers without joblib. FxroundError for a model of which a worker captures another graph.

    Example::

        report = fxround.localize(model, x, lambda y: y.isfinite().all())
        print(report)
        fixed = fxround.compile(model, report.remedy)

    Source: Févotte and Lathuilière 2019 (rddmin); Zeller and Hildebrandt 2002 (ddmin).
    """
    require_module(model)
    if level not in LEVELS:
        raise ValueError(f"level is {shown(level)}; expected one of {', '.join(LEVELS)}")
    positive("runs", runs)
    if limit is not None:
        positive("limit", limit)
    require_jobs(n_jobs)
    require_check(check, min_bits)
    if compares(check):
        require_reference(reference)
    masked = Masked(model, policy, inputs, quiet=quiet)
    compared = masked.run(seed=seed)
    if reference is not None:
        if compares(check):
            tuple(reference_rows(reference, compared))
        compared = reference
    judged = parse_check(check, min_bits, compared, masked.call)
    samples = runs if masked.random else 1
    verdicts = Verdicts(masked, judged, runs=samples, seed=seed, cache=Path(cache) if cache is not None else None)
    search = Search(verdicts, level, limit, progress)
    with ExitStack() as stack:
        if n_jobs != 1:
            verdicts.outputs = stack.enter_context(Shared(n_jobs, masked, seed)).outputs
        return search.run(type(model).__name__)
