"""Invariance: whether a model's bits stay when something changes that should not matter.

fxround.check_invariance(model, x).check()              # batch, slice, stride, threads, instruction set, process
fxround.check_invariance(model, x, policy=None)         # the same of stock PyTorch
"""

from fxround.invariance.cases import AXES
from fxround.invariance.check import check_invariance
from fxround.invariance.report import AxisResult, InvarianceReport, NotInvariant

__all__ = ["AXES", "AxisResult", "InvarianceReport", "NotInvariant", "check_invariance"]
