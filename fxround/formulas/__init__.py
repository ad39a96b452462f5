"""Formulas: what each composite operator is, as a sequence of operations that are each rounded once.

What is true here. A function of this package is the definition of its operator: every ``+ - * /``, ``exp``,
``rsqrt``, sum and product in it becomes a node of the graph with a rounding of its own. Its docstring states the
formula in one line, and docs/numerics.md prints these lines. They are handed to AOTAutograd as decompositions,
so the nodes inherit the module path and the source line of the operator that they replace.

    before   y = aten._softmax.default(x, -1, False)
    after    e = exp(x - amax(x)); y = e / sum(e)
"""

from fxround.formulas import (
    activations,
    choices,
    derivatives,
    losses,
    normalization,
    pooling,
    products,
    reductions,
    repdl,
    scatters,
)
from fxround.formulas.table import FORMULAS, TABLES, decompositions

__all__ = [
    "FORMULAS",
    "TABLES",
    "activations",
    "choices",
    "decompositions",
    "derivatives",
    "losses",
    "normalization",
    "pooling",
    "products",
    "reductions",
    "repdl",
    "scatters",
]
