"""What rounding means: ``formats``, ``modes``, ``orders``, ``accumulation``, ``faults`` and ``gradients`` are data.

``specification`` says what an operation returns, and ``arithmetic`` with ``elementary`` computes it. The package
imports neither torch nor the rest of fxround.
"""
