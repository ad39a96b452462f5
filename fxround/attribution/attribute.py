"""``fxround.attribute``: which rounding of a model costs how much of its result.

Rounding errors are small, so that the error of a result is, to first order, a sum over roundings: the derivative of the
result with respect to the rounded value, times what the rounding lost. One run of the model gives every loss and
records the derivatives (``linearized``); a backward pass gives the derivatives of one number of the result with respect
to all roundings at once.

A result of many elements has a derivative for each. For signs z of equal probability, the square of the derivative of
z * result has the sum of the squares of all of them as its mean (Hutchinson 1989), so that few passes with random signs
estimate the variance of the whole result without bias. The errors of a policy that draws nothing are known, and so is
their sum, the error of the result; one pass in its direction splits it among the roundings exactly.

Sources: Linnainmaa, Taylor expansion of the accumulated rounding error, BIT 16, 1976; Langlois, Automatic linear
correction of rounding errors (CENA), BIT 41, 2001; Hutchinson, Comm. Stat. Sim. 18, 1989.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, fmean, stdev
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.attribution.derivatives import directional
from fxround.attribution.linearized import Linearized
from fxround.attribution.losses import require_losses
from fxround.attribution.report import DOUBT, AttributionReport, LayerDeviation, SiteShare, noise_of
from fxround.attribution.sites import Effects, SiteLosses
from fxround.attribution.states import State, is_float
from fxround.attribution.subject import Subject
from fxround.attribution.widening import widely
from fxround.compiler.signature import require_module
from fxround.errors import type_of
from fxround.graph.site import Site
from fxround.localization.bundles import origin
from fxround.module.rounded_module import PolicyLike
from fxround.numerics.modes import Rounding
from fxround.policy import Policy
from fxround.significance.inputs import positive
from fxround.significance.moments import Moments
from fxround.significance.places import places
from fxround.significance.progress import progress as shown_progress
from fxround.significance.stopping import interruptible
from fxround.training.optimizer import RoundedOptimizer
from fxround.views.graph_views import to_networkx

MOST_ELEMENTS: Final = 4096
MOST_PROBES: Final = 64

Output = Callable[[Any], Any]


class Incomplete(KeyboardInterrupt):
    """Raised after Ctrl-C where nothing is complete that a report could have."""


@dataclass(frozen=True)
class _Going:
    """A step to count after each pass, and whether Ctrl-C was pressed."""

    tick: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False

    def require(self, state: str) -> None:
        """Raise Incomplete, with a text on what is complete, if Ctrl-C was pressed."""
        if self.stopping():
            raise Incomplete(f"Ctrl-C ended the attribution: {state}")


def attribute(
    model: nn.Module,
    inputs: Any,
    policy: PolicyLike = "stochastic",
    *,
    output: Output | None = None,
    loss: Output | None = None,
    optimizer: RoundedOptimizer | None = None,
    probes: int = 4,
    elements: bool = False,
    formats: Sequence[Any] = (),
    check: int = 0,
    seed: int = 0,
    sample: int = 0,
    progress: bool | None = None,
) -> AttributionReport:
    """Attribute the error of a result to the roundings that cause it, from one run and its derivatives.

    Under a policy that draws random bits, the report has the standard deviation of the result over samples, and the
    share of each operation in its variance. Under any other policy it has the error of the result, and the signed share
    of each operation in it. Nothing is sampled, unless ``check`` asks for it.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed. Loops are unrolled.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or a
            DataLoader, of which the first batch is used.
        policy: as for ``fxround.compile``.
        output: a differentiable function of the model's result, whose roundings do not count: a loss, one logit, the
            margin between two classes. None takes all floating-point tensors of the result. With ``loss``, a function
            of the dict of gradients.
        loss: a function of the model's result that returns a number. With it, the results are the gradients of the loss
            with respect to all parameters that require one, a dict by name: which rounding spoils a weight's gradient.
        optimizer: of ``fxround.compile_optimizer``. With it, the results are the parameters after the step that would
            follow, a dict by name. Neither the model nor the optimizer is changed.
        probes: the backward passes with random signs, for results of more elements. Fewer elements are exact. While
            they leave the deviation less certain than a tenth, there are more, at most 64.
        elements: whether to predict the deviation of each element, by a backward pass for each; at most 4,096.
        formats: formats, or roundings, to try on the result of each operation (``report.sensitivity``).
        check: the number of samples of the model to compare the prediction with, for the result and for each layer;
            0 for none. At least 2.
        seed: 0 to 2^63 - 1, the seed of the run's random bits, and of the signs.
        sample: 0 to 2^32 - 1, the sample of the run.
        progress: whether to show progress, a step for each pass; None shows it in a terminal or a notebook.

    Returns:
        An ``AttributionReport``; ``report.trusted`` says whether its figures can be relied on. Ctrl-C ends the work
        after the pass or sample that runs, and the report has what is complete, with ``interrupted``.

    Raises:
        TypeError, ValueError: for wrong arguments; also what ``compile`` raises.
        KeyboardInterrupt: for a Ctrl-C before anything is complete, and for a second one.
        UnsupportedOperator: for a loop whose length depends on data, and for complex numbers.
        UnsupportedRounding: for roundings whose losses are not known, such as those of binary64.

    Example::

        report = fxround.attribute(model, (x,), output=lambda logits: logits[0, 3] - logits[0, 5])
        print(report)
    """
    require_module(model)
    positive("probes", probes)
    if check:
        positive("check", check)
        if check < 2:
            raise ValueError("check is 1: a deviation needs at least 2 samples")
    for name, function in (("output", output), ("loss", loss)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {type_of(function)}; expected a function of the model's result")
    if optimizer is not None and not isinstance(optimizer, RoundedOptimizer):
        raise TypeError(f"optimizer is {type_of(optimizer)}; expected what fxround.compile_optimizer returns")
    if optimizer is not None and loss is None:
        raise ValueError("optimizer without loss: a step needs gradients; pass loss=lambda result: ...")
    tried = tuple(Rounding.parse(text) for text in formats)
    for rounding in tried:
        require_losses(rounding)
    chosen = Policy.parse(policy)
    subject = Subject.of(model, inputs, chosen, loss, optimizer, seed, sample)
    lowered, spec = subject.entry.lowered, subject.spec
    layers = {place.node: place.name for place in places(lowered, "layers").values()} if check else {}
    random, signs = subject.draws, torch.Generator().manual_seed(seed)
    # What a format does is one error: the signs leave its square as uncertain as they can.
    passes = max(probes, MOST_PROBES) if tried else probes
    with shown_progress(f"{type(model).__name__} attribution", None, progress) as tick, interruptible() as stopping:
        run, states = subject.linearized(signs if random else None, layers, tried)
        tick()
        going = _Going(tick, stopping)
        result = _Result.of(states, spec, output)
        if elements and result.count > MOST_ELEMENTS:
            raise ValueError(
                f"elements=True: the result has {result.count:,} elements, expected at most {MOST_ELEMENTS:,}; choose "
                "some by output=lambda result: ..."
            )
        told: dict[str, Any] = {}
        if random:
            spread = _Spread.of(run, result, result.count if elements else passes, signs, going)
            samples = _Samples.of(subject, output, layers, check, going)
            if samples is not None:
                told |= {"measured": samples.deviation, "samples": samples.taken}
                told["noise"] = noise_of(spread.variation, samples.taken)
            if samples is not None and not stopping():
                with suppress(Incomplete):
                    told["layers"] = _layers(run, layers, samples.layers, probes, signs, going)
            rows, deviation = spread.rows(run.sites), spread.deviation
            told |= {"uncertainty": spread.uncertainty, "elements": spread.each(result) if elements else None}
        else:
            values, _ = subject.evaluated(exact=True)
            exact = _Result.of([State.constant(value) for value in values], spec, output)
            told |= {
                "measured": rms(result.bits - exact.bits),
                "remaining": rms(result.bits - result.moved - exact.bits),
            }
            rows, deviation = _signed(run, result, passes, signs, going), rms(result.moved)
            told["error"] = result.moved.reshape(result.shape)
        told["interrupted"] = stopping()
    if (missed := rms(result.missed)) > DOUBT * deviation:
        nothing = (0.0,) * len(tried)
        place = Site("", "", "output", "", "", "", "the function of the result")
        rows.append(SiteShare.of("output", place, 0.0, 0.0, missed / deviation if deviation else math.inf, nothing))
    return AttributionReport(
        model=type(model).__name__,
        policy=chosen.name,
        draws=random,
        shape=result.shape,
        deviation=deviation,
        magnitude=rms(result.bits),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.share))),
        formats=tuple(map(str, tried)) if all(row.sensitivity for row in rows) else (),
        result=result.bits.reshape(result.shape),
        graph=to_networkx(lowered),
        **told,
    )


def shares_of(subject: Subject, probes: int = 2) -> dict[str, float]:
    """Return the part of each node of the captured graph in the error of the whole result; NaN if it is not known."""
    random, signs = subject.draws, torch.Generator().manual_seed(subject.seed)
    run, states = subject.linearized(signs if random else None, (), ())
    result = _Result.of(states, subject.spec, None)
    if random:
        rows = _Spread.of(run, result, probes, signs, _Going()).rows(run.sites)
    else:
        rows = _signed(run, result, probes, signs, _Going())
    origins = {node.name: origin(node) for node in subject.entry.lowered.graph.nodes}
    shares: dict[str, float] = {}
    for row in rows:
        name = origins[row.node]
        shares[name] = shares.get(name, 0.0) + abs(row.share)
    return shares


@dataclass(frozen=True)
class Contribution:
    """What the roundings of several operations together do to a result, as parts of the mean square of the result.

    noise   the mean square of what they add to its elements
    doubt   the mean square of what derivatives miss at these operations
    """

    noise: float
    doubt: float


def contributions(
    subject: Subject,
    output: Output | None,
    group: Callable[[SiteLosses], Hashable],
    probes: int = 32,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[Hashable, Contribution]:
    """Return the contribution of each group of operations to the error of a result, from one run of a subject.

    Errors that are known add up within a group before they are squared; errors that are drawn do not. For a result of
    more elements than ``probes``, directions of random signs estimate the squares without bias. Raises what
    ``Linearized`` raises, and Incomplete once ``stopping`` returns True.
    """
    signs = torch.Generator().manual_seed(subject.seed)
    run, states = subject.linearized(signs if subject.draws else None, (), ())
    result = _Result.of(states, subject.spec, output)
    count = result.count
    half, exact = torch.full((count,), 0.5), count <= probes
    directions = torch.eye(count) if exact else [half.bernoulli(generator=signs) * 2 - 1 for _ in range(probes)]
    added: dict[Hashable, float] = {}
    missed: dict[Hashable, float] = {}
    for number, direction in enumerate(directions):
        _Going(stopping=stopping).require(f"{number} of {len(directions)} backward passes are complete")
        known: dict[Hashable, float] = {}
        for site, effects in zip(run.sites, run.backward(result.derived, direction), strict=True):
            name = group(site)
            known[name] = known.get(name, 0.0) + effects.effect
            added[name] = added.get(name, 0.0) + effects.variance
            missed[name] = missed.get(name, 0.0) + effects.doubt**2
        for name, effect in known.items():
            added[name] += effect**2
    total = float(result.bits.square().sum()) * (1 if exact else probes)
    return {name: Contribution(_part_of(added[name], total), _part_of(missed[name], total)) for name in added}


def _part_of(square: float, total: float) -> float:
    """Return a part of a sum of squares; infinity for a part of nothing, and for what is no number."""
    if square == 0:
        return 0.0
    return square / total if total and math.isfinite(square / total) else math.inf


def rms(values: Tensor) -> float:
    """Return the root mean square of the elements; 0 of none."""
    return float(values.detach().double().square().mean().sqrt()) if values.numel() else 0.0


@dataclass(frozen=True)
class _Result:
    """The elements of a result, or of what ``output`` makes of it, in one dimension.

    derived   for autograd
    bits      the values, float64
    moved     the perturbation of the run, float64
    missed    what the derivatives of ``output`` miss for it
    shape     the shape of the one tensor that there is, else the number of elements
    """

    derived: Tensor
    bits: Tensor
    moved: Tensor
    missed: Tensor
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.bits.numel()

    @staticmethod
    def of(states: Sequence[State], spec: Any, output: Output | None) -> _Result:
        """Return the result of the states of its leaves."""
        floats = [state for state in states if is_float(state.derived)]
        shapes: list[tuple[int, ...]] = []

        def chosen(*tensors: Tensor) -> tuple[Tensor]:
            given = iter(tensors)
            leaves = [next(given) if is_float(s.derived) else s.bits for s in states]
            made = pytree.tree_unflatten(leaves, spec)
            flat = _tensors(made if output is None else widely(output, made), output is not None)
            shapes[:] = [tuple(tensor.shape) for tensor in flat]
            return (torch.cat([tensor.reshape(-1) for tensor in flat]),)

        with torch.enable_grad():
            (derived,) = chosen(*(state.derived for state in floats))
        shape = shapes[0] if len(shapes) == 1 else (derived.numel(),)
        with torch.no_grad():
            low, middle, high = (chosen(*(state.shifted(sign) for state in floats))[0].double() for sign in (-1, 0, 1))
        moved = torch.zeros_like(middle)
        if any(state.moves for state in floats):
            plain = tuple(state.shifted(0) for state in floats)
            (passed,) = directional(chosen, plain, tuple(state.shifted(1) - state.shifted(0) for state in floats))
            moved = moved if passed is None else passed.double().nan_to_num(0.0, 0.0, 0.0)
        return _Result(derived, middle, moved, (low + high) / 2 - middle, shape)

    @staticmethod
    def of_layer(state: State) -> _Result:
        """Return the value of a layer as a result."""
        derived = next(leaf for leaf in pytree.tree_leaves(state.derived) if is_float(leaf)).reshape(-1)
        bits = derived.detach().double()
        return _Result(derived, bits, torch.zeros_like(bits), torch.zeros_like(bits), tuple(bits.shape))


def _tensors(made: Any, by_output: bool) -> list[Tensor]:
    """Return the floating-point tensors of a result. Raises TypeError if there are none."""
    tensors = [leaf for leaf in pytree.tree_leaves(made) if is_float(leaf)]
    if not tensors:
        what = f"output returned {type_of(made)}" if by_output else f"the model returned {type_of(made)}"
        raise TypeError(f"{what}; expected a floating-point tensor, or several")
    return tensors


@dataclass(frozen=True)
class _Spread:
    """The effects of every site on a result, by backward passes in several directions.

    The squares of the derivatives in these directions add up to those of all elements: exactly, with a direction for
    each element (``exact``), or in the mean over directions of random signs.
    """

    passes: list[list[Effects]]
    count: int
    exact: bool

    @staticmethod
    def of(run: Linearized, result: _Result, passes: int, signs: torch.Generator, going: _Going) -> _Spread:
        """Run the passes: one for each element, if there are no more elements than passes.

        Twice as many, and so on up to ``MOST_PROBES``, while the signs leave the deviation less certain than a tenth.
        At Ctrl-C, the random directions that are complete are the result. Raises KeyboardInterrupt if there are none.
        """
        half = torch.full((result.count,), 0.5)
        spread = _Spread([], result.count, False)
        while result.count > passes:
            while len(spread.passes) < passes:
                spread.passes.append(run.backward(result.derived, half.bernoulli(generator=signs) * 2 - 1))
                going.tick()
                if going.stopping():
                    return spread
            if passes >= MOST_PROBES or spread.is_certain:
                return spread
            passes = min(2 * passes, MOST_PROBES)
        made: list[list[Effects]] = []
        for direction in torch.eye(result.count):
            if going.stopping() and spread.passes:
                return spread
            going.require(f"{len(made)} of {result.count} backward passes are complete, and shares need all")
            made.append(run.backward(result.derived, direction))
            going.tick()
        return _Spread(made, result.count, True)

    @property
    def is_certain(self) -> bool:
        """Whether the interval of 95 % of the deviation by the random directions is at most a tenth to each side."""
        if len(self.passes) < 2:
            return False
        # Student's t distribution by the first terms of its expansion (Abramowitz and Stegun, 26.7.5).
        z, n = NormalDist().inv_cdf(0.975), len(self.passes) - 1
        student = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
        return not student * self.uncertainty > self.deviation / 10

    @property
    def variation(self) -> float:
        """The relative standard deviation of ``deviation``, from one run to another and by the random directions.

        The variance of a rounding's error is ulp^2 f (1 - f) for the place f between two numbers, which another run has
        elsewhere; for an f of which all values are equally likely, it has a relative variance of 1/5. The mean square
        of what one run has is 6/5 of the square of the mean.
        """
        total = sum(self._totals)
        # At most, by the inequality of Minkowski: the directions are added up for each rounding.
        parts = sum(math.sqrt(sum(effects.fourth for effects in one)) for one in self.passes)
        concentrated = (parts / total) ** 2 if total else 0.0
        relative = self.uncertainty / self.deviation if self.deviation else 0.0
        return math.sqrt(concentrated / 24 + relative**2)

    def _mean(self, values: Sequence[float]) -> float:
        """Return the mean over elements of a sum over directions, or of the mean over random ones."""
        return sum(values) / self.count if self.exact else fmean(values) / self.count

    @property
    def _totals(self) -> list[float]:
        """The variance in each direction."""
        return [sum(effects.variance for effects in one) for one in self.passes]

    @property
    def deviation(self) -> float:
        """The root mean square deviation of the elements."""
        return math.sqrt(self._mean(self._totals))

    @property
    def uncertainty(self) -> float:
        """The standard error of the deviation by the random directions."""
        totals = self._totals
        if self.exact or not self.deviation:
            return 0.0
        if len(totals) < 2 or not math.isfinite(self.deviation):
            return math.inf
        return stdev(totals) / math.sqrt(len(totals)) / self.count / (2 * self.deviation)

    def each(self, result: _Result) -> Tensor:
        """Return the deviation of each element; the passes are exact."""
        return torch.tensor(self._totals, dtype=torch.float64).sqrt().reshape(result.shape)

    def tried(self, site: int) -> tuple[float, ...]:
        """Return the deviation that each of the formats would add at a site."""
        by_format = zip(*(one[site].tried for one in self.passes), strict=True)
        return tuple(math.sqrt(self._mean(values)) for values in by_format)

    def rows(self, sites: Sequence[SiteLosses]) -> list[SiteShare]:
        """Return the row of each operation that loses something, or is doubtful."""
        total = self._mean(self._totals)
        parts = []
        for i, site in enumerate(sites):
            own = self._mean([one[i].variance for one in self.passes])
            missed = math.sqrt(self._mean([one[i].doubt ** 2 for one in self.passes]))
            parts.append((site, own / total if total else 0.0, math.sqrt(own), missed, self.tried(i)))
        return _joined(parts, math.sqrt(total))


def _signed(run: Linearized, result: _Result, probes: int, signs: torch.Generator, going: _Going) -> list[SiteShare]:
    """Return the rows of a policy that draws nothing: the parts of the error along its own direction."""
    size = float(result.moved.norm())
    direction = result.moved / size if size else torch.zeros_like(result.moved)
    going.require("the backward pass has not begun")
    effects = run.backward(result.derived, direction)
    going.tick()
    spread = None
    if run.formats:
        with suppress(Incomplete):
            spread = _Spread.of(run, result, probes, signs, going)
    scale = math.sqrt(result.count)
    parts = []
    for i, (site, one) in enumerate(zip(run.sites, effects, strict=True)):
        tried = spread.tried(i) if spread else ()
        parts.append((site, one.effect / size if size else 0.0, abs(one.effect) / scale, one.doubt / scale, tried))
    return _joined(parts, size / scale)


def _layers(
    run: Linearized,
    layers: Mapping[str, str],
    measured: Mapping[str, float],
    probes: int,
    signs: torch.Generator,
    going: _Going,
) -> tuple[LayerDeviation, ...]:
    """Return the predicted and the measured deviation of each layer. Raises Incomplete at Ctrl-C."""
    rows: list[LayerDeviation] = []
    for node, name in layers.items():
        going.require(f"{len(rows)} of {len(layers)} layers are complete")
        result = _Result.of_layer(run.seen[node])
        spread = _Spread.of(run, result, probes, signs, going)
        rows.append(LayerDeviation(name, node, spread.deviation, rms(result.bits), measured[node]))
    return tuple(rows)


_Part = tuple[SiteLosses, float, float, float, tuple[float, ...]]


def _joined(parts: Sequence[_Part], deviation: float) -> list[SiteShare]:
    """Return a row for each node; a node may round several times. deviation: of the result."""
    rows = []
    for node, group in groupby(parts, key=lambda part: part[0].node):
        own = list(group)
        share = sum(part[1] for part in own)
        added = math.sqrt(sum(part[2] ** 2 for part in own))
        missed = math.sqrt(sum(part[3] ** 2 for part in own))
        doubt = missed / deviation if deviation else (math.inf if missed else 0.0)
        rows.append(SiteShare.of(node, own[0][0].place, share, added, doubt, own[-1][4]))
    return rows


@dataclass(frozen=True)
class _Samples:
    """The deviations of samples: of the elements of the result, and of layers by node, each as root mean square."""

    deviation: float
    layers: dict[str, float]
    taken: int

    @staticmethod
    def of(
        subject: Subject, output: Output | None, layers: Collection[str], samples: int, going: _Going
    ) -> _Samples | None:
        """Run the samples, until Ctrl-C; None for fewer than two."""
        taken = 0
        measured: dict[str, Moments] = {}

        def add(name: str, value: Tensor) -> None:
            measured.setdefault(name, Moments(tuple(value.shape), value.dtype)).add(value)

        for sample in range(samples):
            if going.stopping():
                break
            leaves, seen = subject.evaluated(later=sample, watched=layers)
            for name, value in seen.items():
                add(name, next(leaf for leaf in pytree.tree_leaves(value) if is_float(leaf)))
            wide = pytree.tree_unflatten([x.double() if is_float(x) else x for x in leaves], subject.spec)
            made = _tensors(wide if output is None else widely(output, wide), output is not None)
            add("", torch.cat([tensor.detach().reshape(-1) for tensor in made]).double())
            going.tick()
            taken += 1
        if taken < 2:
            return None
        # Of a sample, not of a population.
        more = math.sqrt(taken / (taken - 1))
        spreads = {name: more * rms(torch.from_numpy(moments.sigma())) for name, moments in measured.items()}
        return _Samples(spreads.pop(""), spreads, taken)
