"""How often the bits of a call flip: kernels that count (``counting``), an operation run with them (``accumulators``),
and the table of a call (``flip_table``).

A fault itself is arithmetic: ``numerics.faults`` defines it, ``numerics.specification.exact_faults`` says what flips,
``numerics.arithmetic.flipping`` computes it, and ``passes.inject_faults`` puts it into a graph.
"""
