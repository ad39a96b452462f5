"""What the roundings of one operation lost in a run: errors that are known, and variances of errors that are drawn.

A rounding without random bits lost ``value - exact``. What a drawn rounding loses is known up to its random bits: the
variance of its error, from the value that it rounds (``kernels.losses``). A chain of drawn steps is run by the kernel
that carries the sum of their variances, along the very path of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import (
    Call,
    ContractionCall,
    Convolution,
    ConvolutionInputGradient,
    ConvolutionWeightGradient,
    Matmul,
    ReductionCall,
    ScanCall,
    ScatterCall,
    Sum,
)
from fxround.kernels import from_text
from fxround.kernels.kinds import Contract, Exact, Reduce
from fxround.kernels.losses import (
    contract_losses,
    has_losses,
    loss_kernel,
    reduce_losses,
    scan_losses,
    scatter_losses,
    unpacked,
)
from fxround.numerics.formats.storage import FORMAT_OF
from fxround.numerics.modes import Rounding
from fxround.runtime.contractions import Product, convolution, input_gradient, weight_gradient
from fxround.runtime.contributions import contributions_of
from fxround.runtime.cpu.contraction import begin_product
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.cpu.scatter import run_scatter
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import storage_of
from fxround.runtime.run import run_chain, run_kernel

# A store that keeps every accumulator of a chain.
_UNROUNDED: Final = "binary32/nearest_even/inf"


class Kept(NamedTuple):
    """A loss until the backward passes: the error and the standard deviation, float32, and ``Loss.carried``."""

    error: Tensor | None
    deviation: Tensor | None
    carried: Callable[[Tensor], Tensor] | None

    def meets(self, derivative: Tensor) -> bool:
        """Whether an element with an error, or a drawn one, has a derivative that is no finite number."""
        unknown = ~derivative.isfinite()
        return any(bool((one[unknown] != 0).any()) for one in (self.error, self.deviation) if one is not None)


@dataclass(frozen=True)
class Loss:
    """What one kind of rounding lost in the elements of a result.

    error     the known error, float64, or None
    variance  the variance of the drawn error, float64, or None
    carried   from the derivative with respect to the operation's result to that with respect to its errors; None if
              they are equal. An error in a prefix sum is in all later prefixes
    spread    from the errors to what they change in the operation's result; None if they are equal
    result    which of the operation's floating-point results has the errors
    """

    error: Tensor | None = None
    variance: Tensor | None = None
    carried: Callable[[Tensor], Tensor] | None = None
    spread: Callable[[Tensor], Tensor] | None = None
    result: int = 0

    @property
    def draws(self) -> bool:
        """Whether the error is drawn."""
        return self.variance is not None

    def kept(self) -> Kept:
        """Return what the backward passes need, in half of the memory."""
        error = None if self.error is None else self.error.float()
        return Kept(error, None if self.variance is None else self.variance.sqrt().float(), self.carried)

    def sample(self, noise: torch.Generator) -> Tensor | None:
        """Return errors of both signs with the variances; None for a known error."""
        if self.variance is None:
            return None
        positive = torch.randint(2, self.variance.shape, generator=noise, dtype=torch.uint8)
        errors = self.variance.sqrt() * positive.mul_(2).sub_(1).view(torch.int8)
        return errors if self.spread is None else self.spread(errors)


def rounding_loss(rounding: Rounding, value: Tensor, exact: Tensor) -> Loss:
    """Return what a rounding of exact values, float64, to ``value`` lost."""
    require_losses(rounding)
    if rounding.mode.deterministic:
        return Loss(error=value.double() - exact)
    return Loss(variance=moments(rounding, exact)[1])


def moments(rounding: Rounding, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of a rounding's error for exact values, float64."""
    mean, variance = run_kernel(loss_kernel(rounding), [exact.contiguous()], NO_KEY)
    return mean, variance


def is_biased(rounding: Rounding) -> bool:
    """Whether the mean error over the random bits depends on the value; for deterministic modes, the error."""
    return not rounding.mode.graded or rounding.mode.random_bits < 32


def require_losses(rounding: Rounding) -> None:
    """Raise UnsupportedRounding for a rounding whose losses binary64 does not hold."""
    if rounding.mode.noise is not None:
        raise UnsupportedRounding(
            f"{rounding}: the noise of Monte Carlo arithmetic is more than what a rounding loses; attribute a policy "
            "of stochastic roundings, or see the effect of the noise with fxround.variability"
        )
    if rounding.format.precision >= FORMAT_OF["f64"].precision - 1:
        raise UnsupportedRounding(
            f"{rounding}: what a rounding to {rounding.format.precision} bits loses is no binary64 number; attribute a "
            "model in float32 (model.float()) or a policy with narrower formats"
        )
    if rounding.format.posit and not rounding.mode.deterministic:
        raise UnsupportedRounding(
            f"{rounding}: the probabilities of a posit's roundings are not known here; use a mode without random bits"
        )


@singledispatch
def losses_of(call: Call[Tensor], value: Tensor, exact: Tensor) -> list[Loss]:
    """Return what a call lost, for its operands, its result, and the exact result, float64."""
    return [Loss(error=value.double() - exact)]


@losses_of.register
def _(call: ContractionCall, value: Tensor, exact: Tensor) -> list[Loss]:  # type: ignore[type-arg]
    accumulate, rounding = from_text.accumulation(call.accumulate), from_text.rounding(call.rounding)
    kernel = call.kernel(call.loads())
    if not kernel.draws and not kernel.finish_draws:
        require_losses(rounding)
        return [Loss(error=value.double() - exact)]
    _require_chain(call)
    if kernel.draws:
        accumulators, variance = unpacked(_contracted(call, contract_losses(accumulate, kernel)))
        return [Loss(variance=variance), *_stored(rounding, accumulators, value)]
    accumulators = _contracted(call, from_text.contract(call.accumulate, _UNROUNDED, kernel.loads, "f32"))
    return [Loss(error=accumulators.double() - exact), *_stored(rounding, accumulators, value)]


@losses_of.register
def _(call: ReductionCall, value: Tensor, exact: Tensor) -> list[Loss]:  # type: ignore[type-arg]
    loads = (storage_of(call.x, f"{call.name}'s operand"),)
    kernel, rounding = call.kernel(loads), from_text.rounding(call.rounding)
    accumulate = from_text.accumulation(call.accumulate)
    draw, dims = Draw.of(call.rng, call.node), call.reduced()
    if isinstance(kernel, Exact):
        require_losses(accumulate.step)
        if not any(kernel.draws):
            return [Loss(error=value.double() - exact)]
        if kernel.draws[1]:
            raise UnsupportedRounding(f"{call.name}: an exact sum whose store draws has no attribution; use lanes:16")
        return [Loss(variance=moments(accumulate.step, exact)[1])]
    if not kernel.draws and not kernel.finish_draws:
        require_losses(rounding)
        return [Loss(error=value.double() - exact)]
    _require_chain(call)
    if kernel.draws:
        packed = run_reduce(reduce_losses(accumulate, kernel), call.x, draw, dims).reshape(value.shape)
        accumulators, variance = unpacked(packed)
        return [Loss(variance=variance), *_stored(rounding, accumulators, value)]
    chain: Any = call
    wide = replace(chain, x=call.x.float(), rounding=_UNROUNDED).kernel(("f32",))
    assert not isinstance(wide, Exact)
    accumulators = run_reduce(wide, call.x.float(), draw, dims).reshape(value.shape)
    return [Loss(error=accumulators.double() - exact), *_stored(rounding, accumulators, value)]


@losses_of.register
def _(call: ScanCall, value: Tensor, exact: Tensor) -> list[Loss]:  # type: ignore[type-arg]
    kernel = call.kernel((storage_of(call.x, f"{call.name}'s operand"),))
    if not kernel.draws and not kernel.finish_draws:
        require_losses(from_text.rounding(call.rounding))
        return [Loss(error=value.double() - exact)]
    _require_chain(call)
    x = call.x if call.x.dim() else call.x.reshape(1)
    draw, dim, rounding = Draw.of(call.rng, call.node), call.dim % x.dim(), from_text.rounding(call.rounding)
    if not kernel.draws:
        chain: Any = call
        wide = replace(chain, x=x.float(), rounding=_UNROUNDED).kernel(("f32",))
        accumulators = run_scan(wide, x.float(), draw, dim).reshape(value.shape)
        return [Loss(error=accumulators.double() - exact), *_stored(rounding, accumulators, value)]
    packed = run_scan(scan_losses(from_text.accumulation(call.accumulate), kernel), x, draw, dim).reshape(value.shape)
    accumulators, variance = unpacked(packed)
    carried, spread = _of_products(call.dim, accumulators) if kernel.first else _of_sums(call.dim)
    return [Loss(variance=variance, carried=carried, spread=spread), *_stored(rounding, accumulators, value)]


@losses_of.register
def _(call: ScatterCall, value: Tensor, exact: Tensor) -> list[Loss]:  # type: ignore[type-arg]
    kernel = call.kernel(call.loads())
    if not kernel.draws:
        return [Loss(error=value.double() - exact)]
    _require_chain(call)
    losses = scatter_losses(from_text.accumulation(call.accumulate), kernel)
    packed = run_scatter(losses, call.x, contributions_of(call), Draw.of(call.rng, call.node))
    accumulators, variance = unpacked(packed)
    return [Loss(variance=variance), Loss(error=value.double() - accumulators.double())]


def carried_losses(call: ContractionCall[Tensor] | Sum[Tensor], kernel: Contract | Reduce) -> Tensor | None:
    """Return the packed accumulators (``kernels.losses``) of a chain whose steps draw.

    None if they draw nothing, if the store loses something as well, or if the result is not stored in binary32.
    """
    rounding = from_text.rounding(call.rounding)
    if not kernel.draws or not _keeps_accumulators(rounding) or kernel.result != "f32":
        return None
    _require_chain(call)
    accumulate = from_text.accumulation(call.accumulate)
    if isinstance(kernel, Contract):
        assert isinstance(call, ContractionCall)
        return _contracted(call, contract_losses(accumulate, kernel))
    assert isinstance(call, Sum)
    packed = run_reduce(reduce_losses(accumulate, kernel), call.x, Draw.of(call.rng, call.node), call.reduced())
    return packed.reshape(call.size())


def stored_deterministically(call: Call[Tensor]) -> Rounding | None:
    """Return the rounding of the store of a chain that draws, if the store itself draws nothing."""
    if not isinstance(call, ContractionCall | ReductionCall | ScanCall):
        return None
    rounding = from_text.rounding(call.rounding)
    return rounding if from_text.accumulation(call.accumulate).random and rounding.mode.deterministic else None


def _require_chain(call: Any) -> None:
    """Raise UnsupportedRounding for a chain whose losses no kernel carries."""
    accumulate = from_text.accumulation(call.accumulate)
    if not has_losses(accumulate):
        raise UnsupportedRounding(
            f"accumulate={accumulate}: what its steps lose is not attributed; expected formats within binary32 (a "
            "model in float32: model.float()), no posits and no faults"
        )


def _stored(rounding: Rounding, accumulators: Tensor, value: Tensor) -> list[Loss]:
    """Return what the store of accumulators lost; nothing where the format holds them all."""
    return [] if _keeps_accumulators(rounding) else [rounding_loss(rounding, value, accumulators.double())]


def _keeps_accumulators(rounding: Rounding) -> bool:
    """Whether a store keeps every accumulator that it can have."""
    return FORMAT_OF["f32"].within(rounding.format) and not rounding.mode.jitter


Linear = Callable[[Tensor], Tensor]


def _of_sums(dim: int) -> tuple[Linear, Linear]:
    """Return how derivatives are carried and how errors spread: an error in a prefix sum is in all later ones."""

    def carried(g: Tensor) -> Tensor:
        return g.flip(dim).cumsum(dim).flip(dim) if g.dim() else g

    def spread(errors: Tensor) -> Tensor:
        return errors.cumsum(dim) if errors.dim() else errors

    return carried, spread


def _of_products(dim: int, prefixes: Tensor) -> tuple[Linear, Linear]:
    """Return the same for prefix products: an error is in later ones as they are multiples of the prefix."""
    sums, all_before = _of_sums(dim)
    p = prefixes.double()

    def carried(g: Tensor) -> Tensor:
        return torch.where(p == 0, g, sums(g * p) / p)

    def spread(errors: Tensor) -> Tensor:
        return torch.where(p == 0, errors, all_before(errors / p) * p)

    return carried, spread


def _contracted(call: ContractionCall[Tensor], kernel: Contract) -> Tensor:
    """Run a contraction by another kernel of its chain; the elements have their own random bits."""
    if isinstance(call, Matmul):
        return run_chain(call, kernel)
    product = _product(call)
    return begin_product(replace(product, kernel=kernel)).finish()


def _product(call: ContractionCall[Tensor]) -> Product:
    if isinstance(call, ConvolutionWeightGradient):
        return weight_gradient(call)
    assert isinstance(call, Convolution | ConvolutionInputGradient)
    plain = convolution(call) if isinstance(call, Convolution) else input_gradient(call)
    return plain.product()
