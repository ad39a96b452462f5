"""``fxround.variability``: run a model many times under a perturbing policy and count the significant bits.

Statistics are computed for every element over the samples, and then aggregated over the elements of each result,
layer or node. The report also compares the mean of the samples with an unperturbed run and with a run in binary64,
because a result can be stable and wrong. The same arguments and seed give the same figures for any number of workers
and threads; the model is not changed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Literal

from torch import Tensor, nn

from fxround.compiler.signature import require_module
from fxround.errors import shown
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.significance.adaptive import require_tolerance
from fxround.significance.bits import CONFIDENCE, Method, known_method, penalty, require
from fxround.significance.figures import Options
from fxround.significance.inputs import ModelCall, calls, count
from fxround.significance.metrics import METRICS, is_auto, named
from fxround.significance.observed import BATCH, Runs
from fxround.significance.places import Capture, Isolate, known_capture, known_isolate
from fxround.significance.progress import progress as shown_progress
from fxround.significance.provenance import provenance
from fxround.significance.references import require_reference
from fxround.significance.report import VariabilityReport
from fxround.significance.stopping import interruptible
from fxround.significance.study import BINARY64, BITS, Sampling, Study
from fxround.significance.workers import Workers, require_jobs

FEW: Final = 5
MOST: Final = 200


def variability(
    model: nn.Module,
    inputs: Any,
    policy: Any = "stochastic",
    samples: int | Literal["auto"] = 10,
    *,
    capture: Capture = "outputs",
    metrics: Any = "auto",
    reference: Any = BINARY64,
    batch_size: int | None = None,
    seed: int = 0,
    tolerance: float = 0.5,
    watch: str = BITS,
    max_samples: int = MOST,
    method: Method = "cnh",
    probability: float | None = None,
    confidence: float = CONFIDENCE,
    isolate: Isolate | None = None,
    unroll_loops: bool = False,
    n_jobs: int = 1,
    keep_samples: bool = False,
    first_sample: int | None = None,
    progress: bool | None = None,
) -> VariabilityReport:
    """Measure how many significant bits the results of a model have, and optionally each of its layers or nodes.

    The model runs ``samples`` times on every batch, each time with other random bits. The spread of the samples gives
    the number of significant bits of each element. Elements whose samples are all equal count as no evidence.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or a
            DataLoader (the last part of its batches is the target if the model does not take it).
        policy: the perturbing policy, as for ``fxround.compile``.
        samples: runs per batch, at least 2, or ``"auto"``: sample until the mean of ``watch`` is known to within
            ``tolerance`` at ``confidence``, at most ``max_samples`` times.
        capture: what is measured beside the results: ``"outputs"`` (nothing), ``"layers"`` (each layer's last value)
            or ``"nodes"`` (the result of every operation).
        metrics: names of ``fxround.significance.metrics.METRICS``, what ``fxround.metric`` returns, functions of
            (sample, unperturbed result), or ``"auto"``: those that fit the first result.
        reference: ``"binary64"`` (a copy of the model cast to float64), None, or a tensor shaped like the results of
            all inputs; for a model that returns several, tensors in the structure that it returns.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        seed: 0 to 2^63 - 1, the seed of all random bits.
        tolerance: half width of the confidence interval for ``samples="auto"``, in bits or in the metric's unit.
        watch: ``"bits"`` or a metric's name, for ``samples="auto"``.
        max_samples: the most samples per batch for ``samples="auto"``.
        method: ``"cnh"`` (samples are normal around their mean) or ``"general"`` (no assumption).
        probability: for ``"cnh"``, that a further sample agrees to the reported bits; None takes 0.95.
        confidence: of the bits (for ``"cnh"``) and of the interval for ``samples="auto"``, between 0 and 1.
        isolate: ``"layers"`` or ``"operators"`` also perturbs them one at a time, and reports the effect of each on the
            first result; None does not.
        unroll_loops: as for ``fxround.compile``: with ``capture="nodes"``, each gate of a recurrent layer is measured
            at each step.
        n_jobs: number of joblib workers, -1 for all cores. An active joblib backend is used. Two samples run in this
            process; the others run there as well, with a warning, if they take less time than workers take to start.
        keep_samples: whether to keep every sample of everything that is measured; memory grows with ``samples``.
        first_sample: measure the samples from this number on, as one of several jobs. The report keeps its samples and
            may have one sample alone; ``save`` writes it, and ``fxround.merge`` makes one report of several.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A ``VariabilityReport``. Ctrl-C ends the sampling after the running sample, or at once where workers run, and
        returns the report of the samples taken so far. It has the references of the batches before, and of the last
        one the unperturbed result alone.

    Raises:
        TypeError, ValueError: for wrong arguments; also what ``compile`` and the model raise.
        ImportError: for a missing optional package; the message names the extra to install.

    Gives a warning for fewer than 5 samples, for operations that draw from PyTorch's generator, and for those that draw
    nothing although the policy says so, because a stock kernel computes them.

    Example::

        report = fxround.variability(model, x, "stochastic", samples=20, capture="layers")
        print(report)
        report.check(min_bits=10)

    Source: Sohier, de Oliveira Castro, Févotte, Lathuilière, Petit, Jamond, Confidence intervals for stochastic
    arithmetic, ACM TOMS 47(2), 2021.
    """
    plan = _plan(
        samples, tolerance, watch, max_samples, capture, isolate, metrics, reference, keep_samples, first_sample,
        Options(method, probability, confidence),
    )  # fmt: skip
    require_module(model)
    _require_known(inputs, plan, seed, n_jobs)
    chosen = Policy.parse(policy)
    fuse = capture == "outputs"
    runs = Runs(model, chosen, seed, fuse=fuse, unroll=unroll_loops, binary64=isinstance(reference, str))
    started = time.perf_counter()
    batches = count(inputs, batch_size)
    total = None if batches is None or plan.samples is None or isolate else batches * plan.samples
    with ExitStack() as stack:
        tick = stack.enter_context(shown_progress(f"{chosen.name}", total, progress))
        fan = (
            stack.enter_context(Workers(n_jobs, model, chosen, seed, fuse, unroll_loops)).samples
            if n_jobs != 1
            else None
        )
        study = Study(runs, plan, fan, tick, batches)
        study.stopping = stack.enter_context(interruptible())
        for call in _until(study, calls(model, inputs, batch_size)):
            study.batch(call)
        complete = not study.stopping()
    facts = provenance(model, chosen, seed, n_jobs, time.perf_counter() - started, study.seconds)
    return VariabilityReport.of(study, chosen, complete, batches, facts)


def _until(study: Study, batches: Iterator[ModelCall]) -> Iterator[ModelCall]:
    for call in batches:
        yield call
        if study.stopping():
            return


def _plan(
    samples: Any,
    tolerance: float,
    watch: str,
    most: int,
    capture: str,
    isolate: Isolate | None,
    metrics: Any,
    reference: Any,
    keep: bool,
    first: int | None,
    options: Options,
) -> Sampling:
    automatic = samples == "auto"
    if automatic:
        require_tolerance(tolerance)
    if not automatic and (isinstance(samples, bool) or not isinstance(samples, int)):
        raise TypeError(f"samples is {shown(samples)}; expected a whole number or 'auto'")
    if first is not None:
        _require_part(samples, first, isolate)
    elif not automatic and samples < 2:
        raise ValueError(f"samples is {samples}: a spread needs at least 2 (10 or more are recommended)")
    require_reference(reference, BINARY64)
    for name, value in (("probability", options.probability), ("confidence", options.confidence)):
        if value is not None and not 0 < value < 1:
            raise ValueError(f"{name} is {value}; expected more than 0 and less than 1")
    known_method(options.method)
    plan = Sampling(
        None if automatic else samples, tolerance, watch, most, known_capture(capture), known_isolate(isolate),
        metrics if is_auto(metrics) else named(metrics), reference, options,
        keep or first is not None, first,
    )  # fmt: skip
    return _watching(plan) if automatic and watch != BITS else plan


def _require_part(samples: Any, first: Any, isolate: Isolate | None) -> None:
    """Raise for a part of a study that cannot be merged with others."""
    if isinstance(first, bool) or not isinstance(first, int):
        raise TypeError(f"first_sample is {shown(first)}; expected a whole number, or None")
    if samples == "auto":
        raise ValueError("samples='auto' needs all samples: give a number with first_sample")
    if isolate is not None:
        raise ValueError(f"isolate={isolate!r} measures whole studies: leave out first_sample")
    if first < 0 or samples < 1 or first + samples > BATCH:
        raise ValueError(
            f"first_sample is {first} and samples is {samples}; expected numbers from 0 to {BATCH - 1}, at least one"
        )


def _watching(plan: Sampling) -> Sampling:
    """The plan, with the watched metric among its metrics."""
    known = {**METRICS, **{metric.name: metric for metric in named(plan.metrics)}}
    if plan.watch not in known:
        raise ValueError(f"watch is {shown(plan.watch)}; expected 'bits' or one of {', '.join(known)}")
    metric = known[plan.watch]
    if metric.pairs:
        raise ValueError(f"watch is {plan.watch!r}, a metric of pairs: it has no value of one sample to average")
    held = named(plan.metrics)
    return replace(plan, metrics=held if metric in held else (*held, metric))


def _require_known(inputs: Any, plan: Sampling, seed: int, n_jobs: int) -> None:
    """Raise for arguments that no run can use; warn of few samples."""
    Draw(seed)
    require_jobs(n_jobs)
    require("scipy.special", "report")
    if isinstance(inputs, Tensor) and inputs.dim() and inputs.shape[0] == 0:
        raise ValueError(f"inputs has shape {tuple(inputs.shape)}: there is nothing to run the model on")
    if plan.samples is not None and plan.samples < FEW and plan.first is None:
        cost = penalty(plan.samples, plan.options.probability, plan.options.confidence)
        enough = penalty(10, plan.options.probability, plan.options.confidence)
        warnings.warn(
            f"{plan.samples} samples lower every figure by {cost:.2f} bits; take 10 or more (10: by {enough:.2f})",
            stacklevel=3,
        )
