"""Calibration: a policy with given scales, found from the values of some inputs.

The operands of products are observed in forward passes without roundings. Those of one module and role share a scale:
the magnitude that becomes the largest element, divided by it. That magnitude is the largest one, or the one that KL
divergence chooses among the edges of a histogram, as TensorRT and NVIDIA's pytorch-quantization do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.errors import shown
from fxround.graph.site import site
from fxround.kernels.program import Program
from fxround.module import compile
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledFormat, any_rounding
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.passes.rewrite import source_of
from fxround.passes.round_inputs import operands_of
from fxround.policy import Policy, Rule
from fxround.policy.policy import of_operands
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.significance.inputs import calls

BINS: Final = 2048
# The first edge of a histogram that may become the threshold.
_FIRST: Final = 128
How = Literal["largest", "kl"]
# Nothing is rounded. A policy that treats gradients unrolls recurrent layers, whose loops would hide their operands,
# and refuses other loops.
_UNROLLED: Final = Policy("observed", (Rule(rounding="identity", gradient="binary64", optional=True),))
# The path of a module and the role of an operand.
_Key = tuple[str, str]


def calibrate(model: nn.Module, inputs: Any, format: Any = "int8", how: How = "kl") -> Policy:
    """Return a policy that rounds the operands of products to a format with scales from the values of some inputs.

    Args:
        model: is called in its own mode, without gradients and without roundings.
        inputs: a tensor, arguments, or a DataLoader, as for ``variability``; every batch runs once, for ``"kl"`` twice.
        format: ``"int2"`` to ``"int16"``, or an element format such as ``"e4m3fn"``, perhaps with a mode.
        how: ``"largest"``: the scale is the largest finite magnitude over the largest element; ``"kl"``: the threshold
            of ``kl_threshold`` in place of the magnitude, for int2 to int8.

    Returns:
        Rules for the path of each module with products and each role of an operand, but none for zeros. Scales are
        rounded to binary32.

    Raises:
        ValueError: for another format or ``how``, for a model without products, and for an operand without a finite
            value. Also what ``compile`` raises.

    Gives a warning for an operand that has NaNs or infinities among finite values, which its scale leaves out.

    Example::

        policy = fxround.calibrate(model, x, "int8")
        fxround.compile(model, policy)(x)
    """
    rounding = any_rounding(str(format))
    whole = ScaledFormat.parse(str(format).partition("/")[0]) if not isinstance(rounding, Rounding) else None
    if whole is not None and not (whole.scaling is not None and str(whole) == str(ScaledFormat.parse(_plain(format)))):
        raise ValueError(f"format is {shown(format)}; expected int2 to int16 or an element format, without a block")
    element = rounding.format if isinstance(rounding, Rounding) else rounding.format.element
    if how not in ("largest", "kl"):
        raise ValueError(f"how is {shown(how)}; expected 'largest' or 'kl'")
    levels = int(element.maximum) + 1 if whole is not None else 0
    if how == "kl" and not 2 <= levels <= _FIRST:
        raise ValueError(f"KL divergence chooses scales of int2 to int8, got {shown(format)}; use how='largest'")
    batches = [(call.args, call.kwargs) for call in calls(model, inputs)]
    compiled = compile(model, _UNROLLED)
    magnitudes: dict[_Key, float] = {}
    others: dict[_Key, int] = {}
    for key, value, skipped in _observed(compiled, batches):
        magnitudes[key] = max(magnitudes.get(key, 0.0), float(value.max()) if value.size else 0.0)
        others[key] = others.get(key, 0) + skipped
    if not magnitudes:
        raise ValueError("the model has no products of matrices and no convolutions: there is nothing to calibrate")
    for key, number in others.items():
        if number:
            warnings.warn(f"{_operand(key)} has {number} NaNs or infinities: its scale leaves them out", stacklevel=2)
    thresholds = dict(magnitudes)
    if how == "kl":
        counts = {key: np.zeros(BINS, np.int64) for key in magnitudes}
        for key, value, _ in _observed(compiled, batches):
            counts[key] += histogram(value, magnitudes[key])
        thresholds = {key: magnitudes[key] * kl_threshold(counts[key], levels) / BINS for key in magnitudes}
    mode = f"{rounding.mode}/{'saturate' if whole is not None else rounding.overflow}"
    mode = mode if "/" in str(format) else "nearest_even/saturate"
    rules = []
    for (path, role), most in sorted((key, most) for key, most in thresholds.items() if most):
        text = f"scaled({element};fixed,scale={_scale(most, element)!r})/{mode}"
        rules.append(Rule(path, role=role, operands=text))
    return of_operands(f"{format} calibrated", *rules)


def histogram(magnitudes: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.int64]:
    """Return how many magnitudes are in each of BINS bins of the width most / BINS; the last bin includes ``most``.

    A magnitude a is in bin floor(a BINS / most), where the quotient is rounded to binary64: that of binary32 numbers is
    never rounded to an integer.
    """
    if not most:
        return np.bincount([0] * len(magnitudes), minlength=BINS)
    return np.bincount(np.minimum((magnitudes * BINS / most).astype(np.int64), BINS - 1), minlength=BINS)


def kl_threshold(counts: npt.NDArray[np.int64], levels: int) -> int:
    """Return the number i of the bins that integers with ``levels`` magnitudes are to span, 128 to len(counts).

    It is the last i with the least divergence of P from Q. P is c_0 to c_(i-1), with all later counts added to its last
    one, and c_1 in place of c_0, as zeros are exact. Q spreads the sum of each of ``levels`` groups evenly over its
    bins that are not empty; bin j is in group floor(j levels / i). Both are divided by their sums:

        D = (sum of P_j log(P_j / Q_j)) / sum(P) + log(sum(Q) / sum(P)), infinite where Q_j = 0 < P_j

    Each quotient, product and sum is rounded once to binary64, and logarithms are fxround's own, so that the choice has
    no machine in it. Source: pytorch-quantization, ``_compute_amax_entropy``.
    """
    c = counts.astype(np.int64).copy()
    c[0] = c[1]
    total = int(c.sum())
    if not total:
        return len(c)
    best, chosen = math.inf, len(c)
    below = np.concatenate([[0], np.cumsum(c)])
    for i in range(min(_FIRST, len(c)), len(c) + 1):
        divergence = _divergence(c[:i], total - int(below[i]), levels)
        if divergence <= best:
            best, chosen = divergence, i
    return chosen


def _divergence(c: npt.NDArray[np.int64], outside: int, levels: int) -> float:
    group = np.arange(len(c)) * levels // len(c)
    sums, filled = (np.bincount(group, w, levels).astype(np.int64) for w in (c, c > 0))
    p = c.copy()
    p[-1] += outside
    if p[-1] and not c[-1]:
        return math.inf
    used = c > 0
    if not used.any():
        return math.inf
    ratios = (p * filled[group])[used] / sums[group[used]]
    logs = _logs(np.append(ratios, c.sum() / p.sum()))
    return math.fsum((logs[:-1] * p[used]).tolist()) / float(p.sum()) + float(logs[-1])


def _logs(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return logarithms with the same bits on every machine."""
    program = Program.parse("t0 = log(x0) @ binary64/nearest_even/inf")
    return np.asarray(run_map(program, (torch.from_numpy(numbers),), torch.float64, Draw()).numpy())


def _observed(compiled: Any, batches: Sequence[Any]) -> Iterator[tuple[_Key, npt.NDArray[np.float64], int]]:
    """Yield module and role of the operands of products in forward passes, their finite magnitudes, and how many of
    their elements are not finite.
    """
    for args, kwargs in batches:
        with torch.no_grad():
            entry = compiled._entry(args, kwargs)
        wanted: dict[str, list[_Key]] = {}
        for node in entry.lowered.graph.nodes:
            place = site(node)
            if place is None or place.kind != "contraction" or node.op != "call_function":
                continue
            for source in dict.fromkeys(map(source_of, operands_of(node))):
                own = site(source)
                if own is not None and (place.path, own.role) not in wanted.get(source.name, []):
                    wanted.setdefault(source.name, []).append((place.path, own.role))
        leaves = pytree.tree_leaves((args, kwargs))
        named = [*entry.named(leaves).items(), *compiled.observe(*args, **kwargs)] if wanted else []
        for name, value in named:
            keys = wanted.get(name, ())
            if keys and isinstance(value, Tensor):
                flat = value.detach().to(torch.float64).abs().reshape(-1).cpu().numpy()
                finite = flat[np.isfinite(flat)]
                if flat.size and not finite.size:
                    raise ValueError(
                        f"{_operand(keys[0])} has NaNs and infinities alone, of which no scale can be made: check the "
                        "data"
                    )
                yield from ((key, finite, flat.size - finite.size) for key in keys)


def _operand(key: _Key) -> str:
    path, role = key
    return f"an operand of {path or 'the model'} with the role {role}"


def _plain(format: Any) -> str:
    """Return the integers of a text without a block, for comparison; ``int8`` of another text."""
    name = str(format).partition("/")[0].partition(":")[0]
    return name if name.startswith("int") else "int8"


def _scale(most: float, element: Format) -> float:
    """Return most / maximum, rounded to nearest in binary32; the smallest positive number for zero."""
    binary32 = Rounding(FORMATS["binary32"], MODES["nearest_even"], "saturate")
    return round_exact(Fraction(most) / Fraction(element.maximum), False, binary32) or 2.0**-149
