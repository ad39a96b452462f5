"""Calibration: a policy with given scales, found from the values of some inputs.

The operands of products are observed in forward passes without roundings. Those of one module and role share a scale:
the magnitude that becomes the largest element, divided by it. That magnitude is the largest one, the one that KL
divergence chooses among the edges of a histogram, as TensorRT and NVIDIA's pytorch-quantization do, a percentile of the
magnitudes, or the one with the least squared error (``thresholds``). A format with a block has scales for the channels
and groups of each operand instead, which a compiled module keeps as state (``passes.held_scales``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fxround.errors import shown, type_of
from fxround.module import compile
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding, Scaling, any_rounding
from fxround.numerics.formats.scaled.format import Block
from fxround.numerics.modes import Rounding
from fxround.policy import Policy, Rule
from fxround.policy.calibrated import CalibratedPolicy
from fxround.policy.policy import of_operands
from fxround.significance.calibration_runs import RANGES, UNROLLED, Known, Shared, found
from fxround.significance.inputs import ModelCall, calls, count
from fxround.significance.kl_divergence import FIRST, Divergence
from fxround.significance.observed_operands import Operand, Range, readers, unreached
from fxround.significance.progress import progress as shown_progress
from fxround.significance.thresholds import Chooser, LeastSquares, Percentile, scales_of
from fxround.significance.workers import require_jobs

How = Literal["largest", "kl", "percentile", "mse"]


def calibrate(
    model: nn.Module,
    inputs: Any,
    format: Any = "int8",
    how: How = "kl",
    *,
    percentile: float = 99.9,
    batch_size: int | None = None,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> Policy:
    """Return a policy that rounds the operands of products to a format with scales from the values of some inputs.

    Args:
        model: is called in its own mode, without gradients and without roundings.
        inputs: a tensor, arguments, or a DataLoader, as for ``variability``; every batch runs once, and twice unless
            ``how`` is ``"largest"``. All batches are kept meanwhile.
        format: ``"int2"`` to ``"int16"``, or an element format such as ``"e4m3fn"``, perhaps with a mode. With a block,
            as in ``"int8:channel"``, ``"int4:32"``, ``"int8:tensor"`` or ``"scaled(e4m3fn;32,binary32,nearest)"``,
            scales are held: a weight has one for each output channel, group along the sum, or tensor; any other operand
            has one for each group, the same for all rows, or one alone.
        how: ``"largest"``: the scale is the largest finite magnitude over the largest element; ``"kl"``: the threshold
            of ``kl_threshold`` in place of the magnitude, for int2 to int8; ``"percentile"``: the least magnitude that
            ``percentile`` percent of the finite ones do not exceed; ``"mse"``: of the thresholds 100 to 21 percent of
            the largest magnitude, the one with the least sum of squared errors, as ``thresholds.LeastSquares`` says.
        percentile: more than 0 and at most 100.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        n_jobs: number of joblib workers, -1 for all cores. An active joblib backend is used. Each worker has as many
            threads as this process, and what it finds in a batch is added here in the order of the batches, so that
            scales have the bits of one process.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        Rules for the path of each module with products and each role of an operand; an operand that is always zero is
        not rounded. Scales are rounded to binary32. Parameters enter once, whatever the number of batches. With a
        block, a ``CalibratedPolicy``: its ``scales`` become state of the module that is compiled with it.

    Raises:
        TypeError, ValueError: for another format or ``how``, for a model without products, for inputs without a batch,
            for an operand without a finite value, for one with zeros if the format cannot hold zero, and for workers
            of a model that draws random numbers. Also what ``compile`` raises.
        ImportError: for workers without joblib. FxroundError for a model of which a worker captures another graph.

    Gives a warning for an operand that has NaNs or infinities among finite values, which its scale leaves out, for
    weights that the inputs never reach, and for a DataLoader that ends before the number of batches that it announced.

    Example::

        policy = fxround.calibrate(model, loader, "int8", "mse")
        fxround.compile(model, policy)(x)
    """
    rounding, block = _format_of(format)
    scaled = isinstance(rounding, ScaledRounding)
    element = rounding.format.element if isinstance(rounding, ScaledRounding) else rounding.format
    _require_how(how, percentile, int(element.maximum) + 1 if scaled and block is None else 0, format)
    require_jobs(n_jobs)
    batches = [ModelCall(call.args, call.kwargs) for call in calls(model, inputs, batch_size)]
    _warn_of_end(inputs, batch_size, len(batches))
    compiled = compile(model, UNROLLED)
    steps = len(batches) * (1 + (how != "largest"))
    with ExitStack() as stack:
        tick = stack.enter_context(shown_progress(f"{type(model).__name__} {how}", steps, progress))
        known: Known = (
            partial(found, compiled, batches, block)
            if n_jobs == 1
            else stack.enter_context(Shared(n_jobs, compiled, batches, block)).found
        )
        ranges: dict[Operand, Range] = {}
        for operand, part in known(tick, RANGES):
            ranges.setdefault(operand, Range()).add(part)
        _require_ranges(ranges, element)
        _warn_of_values(ranges, unreached(model, compiled._captures))
        scales = {operand: scales_of(values.most, element.maximum) for operand, values in ranges.items()}
        if how != "largest":
            choosers = {operand: _chooser(how, values, element, percentile) for operand, values in ranges.items()}
            for operand, part in known(tick, choosers):
                choosers[operand].add(part)
            scales = {operand: chooser.scales() for operand, chooser in choosers.items()}
    mode = f"{rounding.mode}/{rounding.overflow}" if "/" in str(format) else "nearest_even/saturate"
    if block is not None:
        own = ScaledFormat(element, Scaling(block, FORMATS["binary32"], "held"))
        rules = [Rule(path, role=role, operands=f"{own}/{mode}") for path, role in sorted(readers(compiled._captures))]
        held = {operand.name: _shaped(own, ranges[operand]) for operand, own in scales.items()}
        return CalibratedPolicy(**vars(of_operands(f"{format} calibrated", *rules)), scales=held)
    rules = []
    for operand in sorted(scales, key=lambda known: (known.path, known.role)):
        given = f"scaled({element};fixed,scale={float(scales[operand])!r})/{mode}"
        text = given if ranges[operand].most.any() else "identity"
        rules.append(Rule(operand.path, role=operand.role, operands=text))
    return of_operands(f"{format} calibrated", *rules)


def _shaped(scales: Tensor, known: Range) -> Tensor:
    """Return the scales of blocks in the shape of held ones; a block of zeros has the largest one of its operand."""
    used = known.most > 0
    most = scales[used].max() if used.any() else torch.ones(())
    return torch.where(used, scales, most.to(scales)).view(known.shape)


def _format_of(format: Any) -> tuple[Rounding | ScaledRounding, Block | None]:
    """Return the rounding of a text, and the block of scales that are held, or None. Raises ValueError for others."""
    rounding = any_rounding(str(format))
    if isinstance(rounding, Rounding):
        return rounding, None
    text, scaling = str(format).partition("/")[0], rounding.format.scaling
    plain = None if scaling is None else replace(scaling, block="tensor", percentile=None, fit=(), whole=None)
    expected = "int2 to int16 or an element format, perhaps with :tensor, :channel or the length of a group"
    if scaling is None or plain != replace(scaling, block="tensor") or scaling.is_tile or rounding.hadamard is not None:
        raise ValueError(f"format is {shown(format)}; expected {expected}")
    if scaling.how != "nearest" or scaling.format != FORMATS["binary32"]:
        raise ValueError(
            f"format is {shown(format)}, whose scales are no binary32 numbers to nearest; expected {expected}"
        )
    return rounding, scaling.block if ":" in text or text.startswith("scaled(") else None


def _require_how(how: str, percentile: float, levels: int, format: Any) -> None:
    """Raise ValueError or TypeError for an unknown way, a percentile out of range, and KL divergence without levels."""
    if how not in get_args(How):
        raise ValueError(f"how is {shown(how)}; expected {', '.join(map(repr, get_args(How)))}")
    if isinstance(percentile, bool) or not isinstance(percentile, int | float):
        raise TypeError(f"percentile is {type_of(percentile)}; expected a number of more than 0 and at most 100")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile}; expected more than 0 and at most 100")
    if how == "kl" and not 2 <= levels <= FIRST:
        raise ValueError(f"KL divergence chooses one scale for int2 to int8, got {shown(format)}; use how='mse'")


def _chooser(how: How, values: Range, element: Format, percentile: float) -> Chooser[Any]:
    if how == "percentile":
        return Percentile(percentile, values.counts, element.maximum)
    if how == "mse":
        return LeastSquares(values.most, ScaledRounding.parse(f"scaled({element};fixed)/nearest_even/saturate"))
    return Divergence(values.most.double(), element.maximum)


def _require_ranges(ranges: Mapping[Operand, Range], element: Format) -> None:
    """Raise ValueError without products, and for operands of which no scale can be made."""
    if not ranges:
        raise ValueError("the model has no products of matrices and no convolutions: there is nothing to calibrate")
    for operand, values in ranges.items():
        if values.others and not values.counts.any():
            raise ValueError(f"{operand} has NaNs and infinities alone, of which no scale can be made: check the data")
        if values.zeros and not element.zero:
            raise ValueError(f"{operand} has zeros, and {element} cannot hold zero; choose a format with a zero")


def _warn_of_values(ranges: Mapping[Operand, Range], lost: list[str]) -> None:
    """Give a warning for operands that are not finite in part, and for weights that no call reads."""
    for operand, values in ranges.items():
        if values.others:
            warnings.warn(f"{operand} has {values.others} NaNs or infinities: its scale leaves them out", stacklevel=3)
    if lost:
        warnings.warn(
            f"the inputs never reach {', '.join(lost)}: the policy has no scales for them, and leaves them unrounded",
            stacklevel=3,
        )


def _warn_of_end(inputs: Any, batch_size: int | None, seen: int) -> None:
    announced = count(inputs, batch_size)
    if announced is not None and seen < announced:
        warnings.warn(
            f"the data ended after {seen} of {announced} batches: scales are made of these alone", stacklevel=3
        )
