"""Programs: what their text computes, statement by statement, over rational numbers; and which kernels are the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import rationals
from hypothesis import given, settings
from hypothesis import strategies as st

from fxround.kernels import from_text
from fxround.kernels.maps import fused_kernel, map_kernel
from fxround.kernels.program import Program, Statement
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel, sum_kernel
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order

FORMATS = ("binary32", "bfloat16", "binary16", "tf32", "e5m2", "ieee(8,2)")
DETERMINISTIC = [name for name, mode in MODES.items() if mode.deterministic]
ELEMENTS = st.floats(width=32)
OPERANDS = 3


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to five statements on any values before them; some are results."""
    statements: list[Statement] = []
    for number in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(rationals.OPERATORS)))
        known = [*(f"x{i}" for i in range(OPERANDS)), *(s.target for s in statements)]
        operand = st.sampled_from(known) | ELEMENTS
        operands = tuple(draw(operand) for _ in range(rationals.OPERATORS[name][0]))
        rounding = Rounding.parse(f"{draw(st.sampled_from(FORMATS))}/{draw(st.sampled_from(DETERMINISTIC))}")
        statements.append(Statement(f"t{number}", name, operands, rounding))
    targets = [s.target for s in statements]
    return Program(tuple(statements), tuple(draw(st.lists(st.sampled_from(targets), unique=True, max_size=3))))


@settings(max_examples=60)
@given(programs(), st.lists(st.tuples(*[ELEMENTS] * OPERANDS), min_size=1, max_size=8))
def test_a_program_is_its_statements_one_after_the_other(program: Program, rows: list[tuple[float, ...]]) -> None:
    kernel = fused_kernel(program, ("f32",) * OPERANDS, ("f32",) * len(program.results))
    columns = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    got = [np.broadcast_to(result, len(rows)).tolist() for result in kernel.body.evaluate(*columns)]
    for row, *found in zip(rows, *got, strict=True):
        values = {f"x{i}": x for i, x in enumerate(row)}
        for s in program.statements:
            operands = (values[o] if isinstance(o, str) else o for o in s.operands)
            values[s.target] = rationals.OPERATORS[s.operator][1](*operands, s.rounding)
        want = [values[name] for name in program.results]
        # float.hex tells the zeros apart and has one NaN.
        assert [x.hex() for x in found] == [x.hex() for x in want], (str(program), row)


@settings(max_examples=30)
@given(programs())
def test_a_text_is_its_program_and_has_its_kernel(program: Program) -> None:
    again = Program.parse(str(program))
    assert again == program and hash(again) == hash(program) and str(again) == str(program)
    loads, results = ("f32",) * OPERANDS, ("f32",) * len(program.results)
    assert fused_kernel(again, loads, results).digest == fused_kernel(program, loads, results).digest


ONE = "t0 = add(x0, x1) @ binary32/toward_zero"
DIFFERENT = (
    ONE,
    "t0 = add(x1, x0) @ binary32/toward_zero",
    "t0 = sub(x0, x1) @ binary32/toward_zero",
    "t0 = add(x0, x1) @ binary32/toward_positive",
    "t0 = add(x0, x1) @ tf32/toward_zero",
    "t0 = add(x0, x1) @ tf32/toward_zero/saturate",
    "t0 = add(x0, x1) @ binary32/stochastic",
    "t0 = add(x0, x1) @ binary32/stochastic:31",
    "t0 = add(x0, 0.0) @ binary32/toward_zero",
    "t0 = add(x0, -0.0) @ binary32/toward_zero",
    f"{ONE}; t1 = neg(t0) @ exact",
    f"{ONE}; t1 = neg(t0) @ exact; return t0",
)


def test_different_programs_have_different_digests() -> None:
    """A digest is the key of compiled code: two kernels of one digest would share it."""
    digests = [from_text.pointwise(text, ("f32", "f32"), "f32").digest for text in DIFFERENT]
    # The last two differ in what is stored; the second of them computes what the first line does.
    assert len(set(digests)) == len(DIFFERENT) - 1 and digests[-1] == digests[0]


def test_spellings_of_a_program_share_a_kernel() -> None:
    texts = ("t0 = mul(x0, 1.5) @ bfloat16", " t0=mul( x0 , 0x1.8p+0 ) @ bfloat16/nearest_even/inf ;")
    assert len({Program.parse(text) for text in texts}) == 1
    assert len({map_kernel(Program.parse(text), ("f32",), "f32").digest for text in texts}) == 1


def test_storages_and_draws_are_part_of_a_kernel() -> None:
    program = Program.parse("t0 = mul(x0, x0) @ bfloat16/stochastic; t1 = mul(t0, x0) @ bfloat16/stochastic")
    kernels = [map_kernel(program, (load,), result) for load in ("f32", "bf16") for result in ("f32", "bf16")]
    # Alone, the statements draw numbers 0 and 1 of one node; fused, each draws number 0 of a node of its own.
    kernels.append(fused_kernel(program, ("f32",), ("f32",)))
    assert len({kernel.digest for kernel in kernels}) == 5
    assert [(w.node, w.draw) for w in kernels[0].draws] == [(0, 0), (0, 1)]
    assert [(w.node, w.draw) for w in kernels[-1].draws] == [(0, 0), (1, 0)] and from_text.drawn(str(program)) == 2


@pytest.mark.parametrize("accumulate", ["binary32", "bfloat16/stochastic"])
def test_reductions_of_one_step_are_distinguished(accumulate: str) -> None:
    step, rest = Rounding.parse(accumulate), (Rounding.parse("binary32"), "f32", "f32")
    sums = [sum_kernel(Order.parse(order), step, *rest) for order in ("sequential", "lanes:2", "lanes:16", "exact")]
    others = [make(step, *rest) for make in (prod_kernel, cumsum_kernel, cumprod_kernel)]
    assert len({kernel.digest for kernel in (*sums, *others)}) == 7


def test_a_program_that_does_not_fit_its_storages_is_refused() -> None:
    for loads, result, message in (
        (("f32",), "f32", "uses 2 operands, got 1"),
        (("f32", "f32"), "bf16", "cannot store"),
    ):
        with pytest.raises(ValueError, match=message):
            from_text.pointwise(ONE, loads, result)
    with pytest.raises(ValueError, match="is used before it is defined"):
        Program.parse("t1 = neg(t0) @ exact; t0 = neg(x0) @ exact")
    assert math.isnan(map_kernel(Program.parse("t0 = add(x0, nan) @ bfloat16"), ("f32",), "f32").body.evaluate(1.0)[0])
