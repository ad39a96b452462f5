"""Formulas: the definition of each composite operator as a sequence of operations that are each rounded once.

Every ``+ - * /``, ``exp``, ``rsqrt``, sum and product in a function of this package becomes a node of the graph with a
rounding of its own: softmax, for example, is ``e = exp(x - amax(x)); y = e / sum(e)``. A function's docstring states
its formula in one line, and docs/numerics.md prints these lines. AOTAutograd takes the functions as decompositions, so
the nodes inherit the module path and the source line of the operator that they replace.
"""

from fxround.operators.formulas import (
    activations,
    alignments,
    bessel,
    choices,
    complex_numbers,
    derivatives,
    elimination,
    experts,
    fourier,
    grid_samples,
    interpolation,
    losses,
    normalization,
    orthogonal,
    pooling,
    products,
    recurrent,
    reductions,
    repdl,
    scatters,
    special,
    triangular,
    windows,
)
from fxround.operators.formulas.table import FORMULAS, TABLES, decompositions

__all__ = [
    "FORMULAS",
    "TABLES",
    "activations",
    "alignments",
    "bessel",
    "choices",
    "complex_numbers",
    "decompositions",
    "derivatives",
    "elimination",
    "experts",
    "fourier",
    "grid_samples",
    "interpolation",
    "losses",
    "normalization",
    "orthogonal",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "repdl",
    "scatters",
    "special",
    "triangular",
    "windows",
]
