"""Invariance: check whether a model's bits depend on its batch, memory layout, threads, machine code or process.

Example::

    fxround.check_invariance(model, x).check()              # batch, slice, stride, threads, instruction set, process
    fxround.check_invariance(model, x, policy=None)         # the same check of stock PyTorch
"""
