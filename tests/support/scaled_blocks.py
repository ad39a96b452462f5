"""Tensors rounded to scaled formats by the specification over rational numbers, block by block."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.kernels.maps import map_kernel
from fxround.kernels.scaled import element_program
from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding
from fxround.numerics.specification.exact_scaled import largest, round_block


def blocks_of(shape: tuple[int, ...], form: ScaledFormat, dim: int) -> list[list[int]]:
    """The row-major numbers of the elements of each block."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    block = "tensor" if form.scaling is None else form.scaling.block
    if block == "tensor":
        return [numbers.reshape(-1).tolist()]
    if block == "channel":
        return [list(line) for line in np.moveaxis(numbers, dim, -1).reshape(-1, shape[dim])]
    sizes = [block[0] if d == dim % len(shape) else 1 for d in range(len(shape))]
    if len(block) == 2:
        sizes = [1] * (len(shape) - 2) + list(block)
    starts = product(*(range(0, n, size) for n, size in zip(shape, sizes, strict=True)))
    return [
        numbers[tuple(slice(a, a + size) for a, size in zip(at, sizes, strict=True))].reshape(-1).tolist()
        for at in starts
    ]


def specified(x: Tensor, text: str, dim: int = -1, seed: int = 0) -> list[float]:
    """The specification's result, element by element in row-major order."""
    rounding, stored = ScaledRounding.parse(text), Format.parse(FORMAT_OF[x.dtype])
    values = x.double().reshape(-1).tolist()
    program = element_program(rounding, stored)
    storage = STORAGES[x.dtype]
    draws = map_kernel(program, (storage,) * program.arity, storage).draws
    randoms = [0] * len(values)
    if draws:
        (word,) = draws
        elements = np.arange(len(values), dtype=np.uint64)
        randoms = random_function(word.draw, word.width).evaluate(elements, seed, 0, 0, 0)[0].tolist()
    whole, found = largest(values), [math.nan] * len(values)
    for block in blocks_of(tuple(x.shape), rounding.format, dim):
        results = round_block([values[i] for i in block], rounding, stored, [randoms[i] for i in block], whole)
        for i, result in zip(block, results, strict=True):
            found[i] = result
    return found
