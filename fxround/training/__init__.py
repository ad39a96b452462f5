"""Training: optimizers whose steps are rounded operation by operation, as a policy says.

PyTorch's ``optimizer.step()`` rounds every operation to the dtype of the parameters. Example::

    optimizer = compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bfloat16/stochastic")
    optimizer.step()
"""

from fxround.training.generator import Generator
from fxround.training.optimizer import RoundedOptimizer, compile_optimizer

__all__ = ["Generator", "RoundedOptimizer", "compile_optimizer"]
