"""Formulas on operands of the whole range: a lowered graph runs node by node and is compared with references.

Programs, sums and products run through the NumPy reference, scatters through their kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from array_rationals import Arrays, Bags
from formula_rationals import Arithmetic
from layers import Calls
from torch import Tensor, fx
from whole_range import DETERMINISTIC, NO_KEY, RNG, ROUNDS, SEED, Operands, check

from fxround import Policy, Rule
from fxround.capture import capture
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Reduce
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.operators.formulas import decompositions
from fxround.passes import Plan, lower
from fxround.policy import OWN
from fxround.runtime import reference

OPS = torch.ops.fxround
STORED: Final = {torch.float64: "f64", torch.float32: "f32"}
# Of the formats that differ in range and precision, the pairs (of operations, of steps) that lose at different places.
VALUES: Final = ["binary32", "bfloat16", "binary16", "tf32"]
STEPS: Final = ["binary32", "bfloat16", "tf32"]


class Reference(fx.Interpreter):
    """The NumPy reference in place of compiled kernels."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        run = _RUN.get(target)
        if run is not None:
            return run(*args)
        assert "fxround" not in str(target) or target in _COMPILED, target
        return super().call_function(target, args, kwargs)


def _pointwise(xs: list[Tensor], text: str, dtype: torch.dtype, *rest: Any) -> Tensor:
    body = map_kernel(Program.parse(text), tuple(STORED[x.dtype] for x in xs), STORED[dtype]).body
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    found = body.evaluate(*(x.expand(shape).numpy() for x in xs))[0]
    return torch.from_numpy(np.broadcast_to(found, shape).copy())


def _sum(x: Tensor, dims: list[int], keepdim: bool, order: str, step: str, value: str, *rest: Any) -> Tensor:
    stored = STORED[x.dtype]
    kernel = sum_kernel(Order.parse(order), Rounding.parse(step), Rounding.parse(value), stored, stored)
    assert isinstance(kernel, Reduce)
    dims = [d % x.dim() for d in dims]
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*kept, *sorted(dims)).reshape(math.prod(x.shape[d] for d in kept), -1)
    found = torch.from_numpy(np.array(reference.reduce(kernel, rows.numpy(), NO_KEY)))
    return found.reshape([1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims])


def _matmul(a: Tensor, b: Tensor, step: str, value: str, *rest: Any) -> Tensor:
    stored = STORED[a.dtype]
    kernel = contract_kernel(Accumulation.parse(step), Rounding.parse(value), (stored, stored), stored)
    left, right = (t.reshape(-1, *t.shape[-2:]).numpy() for t in (a, b))
    return torch.from_numpy(np.array(reference.contract(kernel, left, right, NO_KEY))).reshape(
        *a.shape[:-1], b.shape[-1]
    )


_RUN: Final[dict[Any, Callable[..., Tensor]]] = {
    OPS.pointwise.default: _pointwise,
    OPS.sum.default: _sum,
    OPS.matmul.default: _matmul,
}
_COMPILED: Final = {OPS.scatter_add.default, OPS.index_put.default}


def drawn(draw: Operands, shapes: Sequence[tuple[int, ...]], value: Rounding) -> list[Tensor]:
    """Of every exponent, of the format's own, and of a few binades around 1, where functions bend.

    Half of the time all of them are near 1: sums of others are soon infinite, or one of their terms.
    """
    tame = draw.rng.random() < 0.5

    def one(shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        wide, near = draw.values(count, 0.04), np.ldexp(draw.significands(count), draw.rng.integers(-5, 4, count) - 52)
        fmt = value.format
        own = np.ldexp(draw.significands(count), draw.rng.integers(fmt.emin - 8, fmt.emax + 2, count) - 52)
        sign = draw.rng.choice([-1.0, 1.0], count)
        kind = 1 if tame else draw.rng.integers(0, 3)
        mixed = draw.some(0.4, wide, draw.some(0.6, near * sign, own * sign))
        return torch.from_numpy([mixed, near * sign, wide][kind]).reshape(shape)

    return [one(shape) for shape in shapes]


def narrowed(draw: Operands, x: Tensor) -> Tensor:
    """x in binary32; exponents beyond its range are drawn again within it."""
    with np.errstate(all="ignore"):
        m, _ = np.frexp(x.numpy())
        again = np.ldexp(m, draw.rng.integers(-149, 129, m.shape))
        outside = np.isfinite(x.numpy()) & ((abs(x.numpy()) > 2.0**127) | (abs(x.numpy()) < 2.0**-149))
        return torch.from_numpy(np.where(outside, again, x.numpy()).astype(np.float32))


@dataclass(frozen=True)
class Case:
    """An operator on drawn tensors, and its definition on arrays of the same numbers."""

    shapes: Sequence[tuple[int, ...]]
    run: Callable[..., Any]
    want: Callable[..., Any]
    results: int = 1


def compare(
    cases: Mapping[str, Case],
    dtype: torch.dtype,
    policies: int,
    draws: int = 2,
    *,
    gradients: bool = False,
    definitions: str = OWN,
) -> None:
    """Every case under some policies, on some operands each. All of binary32 is decided, but for powers.

    gradients: a case's first operand is the gradient of its one result, its results are those of the others.
    """
    if dtype is torch.float32 and ROUNDS == 1:
        # A capture costs more than what runs: a short run leaves half of the cases to float64.
        cases = dict(list(cases.items())[SEED % 2 :: 2])
    draw = Operands(*cases, str(dtype))
    value, step = (Rounding.parse("binary32") for _ in range(2))
    tangents = int(gradients)

    def operands() -> list[list[Tensor]]:
        found = iter(drawn(draw, [shape for case in cases.values() for shape in case.shapes], value))
        own = [[next(found) for _ in case.shapes] for case in cases.values()]
        return own if dtype is torch.float64 else [[narrowed(draw, x) for x in xs] for xs in own]

    def forward(*xs: Tensor) -> list[Any]:
        given = iter(xs)
        found = [case.run(*(next(given) for _ in case.shapes[tangents:])) for case in cases.values()]
        return [y for result in found for y in (result if isinstance(result, list | tuple) else [result])]

    with torch.set_grad_enabled(gradients):
        example = [x.requires_grad_(gradients) for xs in operands() for x in xs[tangents:]]
        captured = capture(Calls(forward), example, {}, decompositions(definitions))
    compared, asked = 0, 0
    for _ in range(policies):
        value = Rounding.parse(f"{draw.choice(VALUES)}/{draw.choice(DETERMINISTIC)}")
        step = Rounding.parse(f"{draw.choice(STEPS)}/{draw.choice(DETERMINISTIC)}")
        policy = Policy("drawn", (Rule(rounding=str(value), accumulate=str(step), optional=True),))
        where = f"{value} {step} {dtype}"
        graph = Reference(lower(captured.graph, Plan(policy, gradients)))
        o = Arrays(Arithmetic(value, step, dtype is torch.float32))
        for _ in range(draws):
            xs = operands()
            given = [x for own in xs for x in own[tangents:]] + [x for own in xs for x in own[:tangents]]
            found = iter(list(graph.run(*given, RNG))[len(cases) * tangents :])
            for (name, case), own in zip(cases.items(), xs, strict=True):
                got = [next(found) for _ in range(case.results)]
                arrays = [x.double().numpy().astype(object) for x in own]
                want = case.want(o, *arrays)
                wanted = [v for w in (want if isinstance(want, list | tuple) else [want]) for v in np.ravel(w)]
                numbers = [v for g in got for v in g.double().flatten().tolist()]
                assert len(numbers) == len(wanted), (name, len(numbers), len(wanted))
                told = [(g, w) for g, w in zip(numbers, wanted, strict=True) if w is not None]
                compared, asked = compared + len(told), asked + len(numbers)
                check([g for g, _ in told], [w for _, w in told], name, where, tuple(arrays))
    assert compared > (0.98 if dtype is torch.float32 else 0.8) * asked


LABELS, IGNORED = torch.tensor([2, 0, 1, 2]), 1
PIXELS = torch.tensor([[[0, 2], [1, 1]], [[2, 2], [1, 0]]])
BAGS = Bags((0, 3, 1, 3, 2, 0, 1), (0, 3, 3, 5), 3)
INDICES, OFFSETS = torch.tensor(BAGS.indices), torch.tensor(BAGS.offsets)
