"""The policies under which linear algebra is compared with ``linear_rationals``, and what compares the bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from linear_rationals import Matrix, Steps
from rationals import in_chain
from torch import Tensor

import fxround
from fxround import Policy, Rounding, Rule
from fxround.operators.formulas import triangular

WIDE, NARROW = torch.float64, torch.float32
# The dtype of the operands, the rounding of every operation, and that of a step of a contraction.
POLICIES: dict[str, tuple[torch.dtype, str, str]] = {
    "reproducible": (NARROW, "binary32", "binary32"),
    "double": (WIDE, "binary64", "binary64"),
    "bfloat16": (NARROW, "bfloat16", "binary32"),
    "ieee(5,5)": (NARROW, "ieee(5,5)", "ieee(5,5)"),
    "upwards": (NARROW, "binary32/toward_positive", "binary32/toward_positive"),
    "downwards": (NARROW, "ieee(6,7)/toward_negative", "ieee(6,7)/toward_negative"),
}
SOME = ("double", "bfloat16", "upwards")


def policy_of(name: str) -> Policy:
    _, rounding, step = POLICIES[name]
    return Policy(name, (Rule(rounding=rounding, accumulate=step),))


def steps_of(name: str) -> Steps:
    dtype, rounding, step = POLICIES[name]
    read = Rounding.parse(step)
    return Steps(Rounding.parse(rounding), in_chain(read) if dtype is NARROW else read, triangular.BLOCK)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = NARROW) -> Tensor:
    """Multiples of 1/4 that every format here contains."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-12, 13, shape, generator=generator).to(dtype) / 4


def rows(x: Tensor) -> Matrix:
    return x.double().tolist()  # type: ignore[no-any-return]


def assert_bits(found: Tensor, expected: Matrix) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(found.shape)
    assert torch.equal(found.double(), wanted), (found.double() - wanted).abs().max()
    assert torch.equal(found.signbit() & (found != 0), wanted.signbit() & (wanted != 0))


def each_policy(
    function: Callable[..., Any],
    arguments: Callable[[torch.dtype], tuple[Tensor, ...]],
    names: tuple[str, ...] = tuple(POLICIES),
) -> Iterator[tuple[Steps, tuple[Tensor, ...], Any]]:
    """Yield the steps of a policy, its arguments and the results; a dtype is captured once."""
    compiled = {dtype: fxround.compile(function, "reproducible") for dtype in (NARROW, WIDE)}
    for name in names:
        dtype = POLICIES[name][0]
        given = arguments(dtype)
        with torch.no_grad():
            yield steps_of(name), given, compiled[dtype].with_policy(policy_of(name))(*given)
