"""The roundings of a run's operations: what each lost, and what a backward pass says of their effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxround.attribution.losses import Kept, Loss, moments
from fxround.graph.site import Site
from fxround.numerics.modes import Rounding


@dataclass(frozen=True)
class Effects:
    """What the roundings of a site do to one number, by one backward pass.

    variance    the variance that its drawn errors add
    effect      the sum of the effects of its known errors
    fourth      the sum of the squares of the elements' parts of ``variance``
    doubt       the magnitude of what the derivatives miss at the operation
    tried       for each of ``formats``, the variance that a rounding of its result would add
    """

    variance: float = 0.0
    effect: float = 0.0
    doubt: float = 0.0
    tried: tuple[float, ...] = ()
    fourth: float = 0.0


@dataclass
class SiteLosses:
    """What the roundings of an operation lost.

    missed      what the derivatives miss of the operation for the perturbation of its operands, bfloat16; None for
                nothing
    value       its result; only with ``formats``
    formats     roundings to try on the result
    collected   the effects that the last backward pass found; None if no derivative reached the operation
    tried       the mean and the variance of the error in each of the formats, None before a pass asks for them
    """

    node: str
    place: Site
    losses: list[Kept]
    missed: Tensor | None = None
    value: Tensor | None = None
    formats: tuple[Rounding, ...] = ()
    collected: Effects | None = None
    tried: list[tuple[Tensor, Tensor]] | None = None

    def collect(self, gradient: Tensor) -> Tensor | None:
        """Keep the effects for this derivative with respect to the operation's result.

        Returns the derivative with zeros in place of what is no finite number, None if there is nothing to replace. An
        infinite derivative of an element without an error means nothing; of any other element it is the doubt.
        """
        raw = gradient.double()
        if self._only_drawn and (effects := _of_deviation(raw, self.losses)) is not None:
            self.collected = effects
            return None
        finite = bool(raw.isfinite().all())
        g = raw if finite else raw.nan_to_num(0.0, 0.0, 0.0)
        variance = effect = doubt = fourth = 0.0
        for loss in self.losses:
            own = g if loss.carried is None else loss.carried(g)
            if loss.deviation is not None:
                parts = (own * loss.deviation).square()
                variance += float(parts.sum())
                fourth += float(parts.square().sum())
            if loss.error is not None:
                effect += float((own * loss.error).sum())
            if not finite and loss.meets(raw if loss.carried is None else loss.carried(raw)):
                doubt = math.inf
        if self.missed is not None:
            each = torch.where((self.missed == 0) | (raw == 0), 0.0, raw * self.missed).nan_to_num(math.inf)
            # Elements may miss in one direction, or in all.
            doubt = max(doubt, abs(float(each.sum().nan_to_num(math.inf))), float(each.square().sum().sqrt()))
        tried: tuple[float, ...] = ()
        if self.value is not None:
            tried = tuple(_effect_of(raw, *errors) for errors in self._errors_of_formats())
        self.collected = Effects(variance, effect, doubt, tried, fourth)
        return None if finite else g.to(gradient.dtype)

    @property
    def _only_drawn(self) -> bool:
        """Whether one drawn error is all that there is."""
        if self.missed is not None or self.value is not None or len(self.losses) != 1:
            return False
        (loss,) = self.losses
        return loss.error is None and loss.carried is None

    def _errors_of_formats(self) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and the variance of the error of the result in each of the formats."""
        if self.tried is None:
            assert self.value is not None
            self.tried = [moments(rounding, self.value.double()) for rounding in self.formats]
        return self.tried


def _of_deviation(derivative: Tensor, losses: Sequence[Kept]) -> Effects | None:
    """Return the effects of the one drawn error; None where they, and so the derivative, are no finite numbers."""
    (loss,) = losses
    assert loss.deviation is not None
    parts = (derivative * loss.deviation).square_()
    variance = float(parts.sum())
    return Effects(variance, fourth=float(parts.square_().sum())) if math.isfinite(variance) else None


class Sites:
    """The sites of a run.

    known    the sites of the runs before, to which those of this one are added
    root     what every value that an error reaches depends on
    formats  roundings to try on the result of each site
    within   what the names of these sites begin with
    """

    def __init__(self, known: list[SiteLosses], root: Tensor, formats: tuple[Rounding, ...], within: str) -> None:
        self.known, self.root, self.formats, self.within = known, root, formats, within

    def add(
        self, name: str, place: Site, derived: Tensor, losses: list[Kept], missed: Tensor | None, bits: Tensor
    ) -> None:
        """Add a site, whose effects are collected at ``derived``, the value for autograd."""
        record = SiteLosses(f"{self.within}{name}", place, losses, missed, bits if self.formats else None, self.formats)
        self.known.append(record)
        derived.register_hook(record.collect)


def _effect_of(derivative: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Return the mean square of what errors do to a number: their known parts together, and what is drawn.

    A number that leaves the range of a format, or is none there, is as wrong as can be.
    """
    known = torch.where((derivative == 0) | (mean == 0), 0.0, derivative * mean)
    known = known.nan_to_num(math.inf, math.inf, -math.inf)
    drawn = torch.where((derivative == 0) | (variance == 0), 0.0, derivative.square() * variance)
    total = known.sum().square() + drawn.sum()
    return float(total.nan_to_num(math.inf, math.inf))


def doubt_of(missed: Tensor | None, moved: Tensor | None) -> Tensor | None:
    """Return what derivatives miss, in few bits; None if it is nowhere more than a thousandth of the perturbation."""
    if missed is None or (moved is not None and bool((missed.abs() <= moved.abs() / 1000).all())):
        return None
    return missed.to(torch.bfloat16)


def finite(loss: Loss) -> Loss:
    """Return a loss in which what is not finite is zero."""
    return replace(
        loss,
        error=None if loss.error is None else loss.error.nan_to_num(0.0, 0.0, 0.0),
        variance=None if loss.variance is None else loss.variance.nan_to_num(0.0, 0.0, 0.0),
    )
