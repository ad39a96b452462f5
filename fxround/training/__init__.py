"""Training: optimizers whose steps are rounded operation by operation, as a policy says.

before   optimizer.step()                                # binary32, whatever the weights are stored in
after    optimizer = compile_optimizer(optimizer, "bfloat16/stochastic"); optimizer.step()
"""

from fxround.training.generator import Generator
from fxround.training.optimizer import RoundedOptimizer, compile_optimizer

__all__ = ["Generator", "RoundedOptimizer", "compile_optimizer"]
