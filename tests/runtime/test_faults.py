"""Faults of values in codes of every kind: the machine code of each instruction set has the specification's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_operands import DRAW, KEY, same
from product_operands import threads

from fxround.kernels.program import Program
from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.faults import Fault, flip_operator, numbers_of
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.scaled import ScaledFormat
from fxround.numerics.specification.exact_faults import flip, value_of
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.run import run_map

ENCODINGS = [
    *(Encoding(Format.parse(text)) for text in ("nf4", "table(-1,0,1)", "posit(16,2)", "posit(7,0)", "e8m0fnu")),
    *(Encoding.of_elements(ScaledFormat.parse(text)) for text in ("fixed(8,4)", "uint4:32", "int8:scale=1,zero=9")),
]


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.format.said[:20])
def test_codes_flip_as_the_specification_says(encoding: Encoding, dtype: torch.dtype) -> None:
    operator, fmt = flip_operator(Fault("any", 0.5), encoding), encoding.format
    numbers, (_, count) = numbers_of(operator), encoding.field("any")
    assert numbers is not None
    values = np.array([value_of(code % (1 << count), encoding) for code in range(3, 3000, 7)])
    key = (np.full(values.size, word, np.uint32) for word in KEY)
    (words,) = random_function().evaluate(np.arange(values.size, dtype=np.uint64), *key)
    want = torch.tensor([flip(v, encoding, numbers, int(r)) for v, r in zip(values.tolist(), words, strict=True)])
    operands = ", ".join(["x0", *(bound.hex() for bound in encoding.span or ())])
    program = Program.parse(f"t0 = {operator}({operands}) @ {fmt}/stochastic/{fmt.default_overflow}")
    x = torch.from_numpy(values).to(dtype)
    for name in instruction_sets():
        with instruction_set(name), threads(2):
            same(run_map(program, [x], dtype, DRAW), want.to(dtype).numpy())
