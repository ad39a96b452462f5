"""Checks: decide whether an output is right.

A check is a function of the output; or a metric that compares the output with a reference, and a threshold; or a
number of bits to which every element must agree with the reference. A NaN passes no threshold, and a value that is
finite where the reference is not, or the reverse, agrees to 0 bits. The ``key`` of a check changes with its code, its
defaults, its closure and the plain globals that it names. Examples::

    parse_check(lambda y: y.isfinite().all())
    parse_check(("sqnr", 40), reference=y)
    parse_check((function, "<= 1e-3"), reference=y)
    parse_check(None, min_bits=10, reference=y)
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.errors import shown, type_of
from fxround.fingerprint import hash
from fxround.graph.dtypes import FORMAT_OF, real_numbers
from fxround.numerics.formats import Format
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import Metric, bound_of, named

CheckLike = Callable[[Any], Any] | tuple[str | Metric | Callable[[Any, Any], Any], float | str] | None


@dataclass(frozen=True)
class Check:
    """A check: ``passes(output)``, ``seen(output)`` as text, and ``key``, equal for checks of equal code."""

    passes: Callable[[Any], bool]
    seen: Callable[[Any], str]
    key: str


def require_check(check: CheckLike, min_bits: float | None) -> None:
    """Raise unless the check has one of the three forms.

    TypeError for anything but a function, (metric, threshold), or None with ``min_bits``; ValueError for an unknown
    metric, for a threshold that is NaN or on the wrong side of the metric, and for a number as the threshold of a
    function of which nobody has said which values are better.
    """
    if (check is None) == (min_bits is None):
        raise TypeError(
            "a check is needed, in one of three forms: check=function, check=(metric, threshold) or min_bits="
        )
    if check is None or callable(check):
        if check is None and not isinstance(min_bits, int | float):
            raise TypeError(f"min_bits is {type_of(min_bits)}; expected a number of bits")
        if isinstance(min_bits, float) and math.isnan(min_bits):
            raise ValueError("min_bits is nan; expected a number of bits")
        return
    if not isinstance(check, tuple) or len(check) != 2 or not isinstance(check[1], int | float | str):
        raise TypeError(
            f"check is {shown(check)}; expected a function of the output that returns True where it passes, or (metric"
            ", threshold) with a metric's name or a function of the output and the reference"
        )
    (metric,) = named((check[0],))
    _limit(metric, check[1])


def _limit(metric: Metric, threshold: float | str) -> tuple[float, bool]:
    """Return the threshold and whether values above it pass. Raises ValueError as ``require_check`` says."""
    if isinstance(threshold, str):
        better, limit = bound_of("the threshold", threshold)
        if metric.better and better != metric.better:
            raise ValueError(f"the threshold is {threshold!r}, and {metric.better} values of {metric.name} are better")
        return limit, better == "higher"
    if math.isnan(threshold):
        raise ValueError("the threshold is nan, and no value passes or fails it; expected a number")
    if not metric.better:
        raise ValueError(
            f"it is not known whether higher or lower values of {metric.name} are better; expected the threshold as "
            f"'<= {threshold:g}' or '>= {threshold:g}'"
        )
    return threshold, metric.better == "higher"


def compares(check: CheckLike) -> bool:
    """Whether the check compares with a reference by itself; a function may take a reference of any form."""
    return check is None or (isinstance(check, tuple) and named((check[0],))[0].function is None)


def parse_check(
    check: CheckLike = None, min_bits: float | None = None, reference: Any = None, call: ModelCall | None = None
) -> Check:
    """Return the check; metrics and bits compare with ``reference``, the output of ``call``.

    Raises what ``require_check`` raises.
    """
    require_check(check, min_bits)
    key = str([hash(leaf) for leaf in _tensors(reference)])
    if min_bits is not None:
        return _threshold(lambda output: agreement(output, reference), float(min_bits), "bits", key, higher=True)
    if callable(check):
        return Check(partial(_asked, check), lambda output: "", _key(check))
    assert isinstance(check, tuple)
    (metric,) = named((check[0],))
    limit, higher = _limit(metric, check[1])
    function = metric.function

    def measure(output: Any) -> float:
        ran = call or ModelCall(())
        compared = metric.reference(output, reference, ran)
        if function is not None and metric.combine == "add":
            return float(function(output, compared))
        return metric.finish(metric.measure(output, compared, ran))

    described = metric.name if function is None else _key(function)
    how = f"{metric.classes if function is None else higher} {metric.against} {metric.settings}"
    return _threshold(measure, limit, metric.unit, described + how + key, higher=higher)


def agreement(output: Any, reference: Any) -> float:
    """Return the bits to which the worst element of ``output`` agrees with ``reference``: -log2 of its relative error.

    Both are tensors or equal structures of them. The result is between 0 and the precision of the output's dtype, 0 if
    the structure or a shape differs, and infinite if there are no elements.
    """
    pairs = [_tensors(output), _tensors(reference)]
    if [x.shape for x in pairs[0]] != [x.shape for x in pairs[1]]:
        return 0.0
    return min((_bits(x, r) for x, r in zip(*pairs, strict=True) if x.numel()), default=float("inf"))


def _bits(x: Tensor, reference: Tensor) -> float:
    precision = Format.parse(FORMAT_OF[x.dtype]).precision if x.is_floating_point() else 53
    a, r = x.detach().double(), reference.detach().double()
    bits = -((a - r).abs() / r.abs()).log2()
    bits = torch.where((a == r) | (a.isnan() & r.isnan()), float(precision), bits.nan_to_num(0.0, precision, 0.0))
    return float(bits.clamp(0, precision).min())


def _tensors(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    kinds = Tensor | np.ndarray | complex | float | int
    tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, kinds)]
    return [x if (numbers := real_numbers(x)) is None else numbers for x in tensors]


def _threshold(measure: Callable[[Any], float], limit: float, unit: str, key: str, *, higher: bool) -> Check:
    """Return a check that passes on the right side of the limit; a NaN is on neither side."""

    def passes(output: Any) -> bool:
        return measure(output) >= limit if higher else measure(output) <= limit

    def seen(output: Any) -> str:
        return (
            f"{' '.join(f'{measure(output):.4g} {unit}'.split())}, at {'least' if higher else 'most'} {limit:g} asked"
        )

    return Check(passes, seen, f"{key} {limit} {unit}")


def _asked(check: Callable[[Any], Any], output: Any) -> bool:
    answer = check(output)
    if isinstance(answer, Tensor) and answer.numel() == 1:
        return bool(answer.item())
    if not isinstance(answer, bool | np.bool_):
        raise TypeError(
            f"check returned {type(answer).__name__} {answer!r}; expected True where the output passes, or False"
        )
    return bool(answer)


def _key(function: Any) -> str:
    """Return a digest of a function's code, defaults, closure and plain globals, or of an object's ``repr``."""
    return hashlib.sha256(repr(_described(function, ())).encode()).hexdigest()


def _described(value: Any, outer: tuple[int, ...]) -> Any:
    """Return plain data that changes with the value; ``outer`` holds the ids of the enclosing values."""
    inside = (*outer, id(value))
    if id(value) in outer:
        return "itself"
    if isinstance(value, Tensor | np.ndarray | nn.Module):
        return type(value).__qualname__, hash(value)
    if isinstance(value, partial):
        return tuple(_described(v, inside) for v in (value.func, value.args, tuple(value.keywords.items())))
    if isinstance(value, MethodType):
        return _described(value.__func__, inside), _described(value.__self__, inside)
    if isinstance(value, FunctionType):
        seen = inspect.getclosurevars(value)
        named = {**seen.nonlocals, **{k: v for k, v in seen.globals.items() if isinstance(v, _PLAIN)}}
        parts = (value.__code__, value.__defaults__ or (), tuple(sorted(named.items())))
        return tuple(_described(part, inside) for part in parts)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _described(value.co_consts, inside)
    if isinstance(value, tuple | list):
        return tuple(_described(item, inside) for item in value)
    if isinstance(value, dict):
        return tuple((_described(k, inside), _described(v, inside)) for k, v in value.items())
    if is_dataclass(value) and not isinstance(value, type):  # a repr may say a part of it
        return type(value).__qualname__, *(_described(getattr(value, field.name), inside) for field in fields(value))
    return repr(value)


_PLAIN: Final = (bool, int, float, str, tuple, list, Tensor, np.ndarray, FunctionType)
