"""A kernel as data: which scalar function runs in which loops, and how a rounding becomes one.

Kernels (``shapes``) are specialized for roundings and storages, so that nothing is interpreted at run time: those of
programs in ``maps``, those that accumulate in ``reductions`` and ``contractions``.
"""
