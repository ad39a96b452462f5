"""Batch norm without a momentum: its running statistics are the averages of all batches.

PyTorch's own code makes a Python number of the count of batches, which a graph cannot do. While a model is captured,
this formula stands for that code: m = 1 / batches, running = m * new + (1 - m) * running.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

_FORWARD: Final = _BatchNorm.forward


def averages_of_all_batches() -> contextlib.AbstractContextManager[object]:
    """Return a context in which batch norm whose momentum is None can be captured in training mode."""
    return mock.patch.object(_BatchNorm, "forward", _forward)


def _forward(self: Any, input: Tensor) -> Any:
    averages = self.training and self.momentum is None and self.track_running_stats
    if not averages or self.num_batches_tracked is None:
        return _FORWARD(self, input)
    self._check_input_dim(input)
    share = 1.0 / self.num_batches_tracked.add_(1).to(self.running_mean.dtype)
    with torch.no_grad():
        dims = [d for d in range(input.dim()) if d != 1]
        variance, mean = torch.var_mean(input, dims, correction=1)
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            kept.copy_(share * new + (1 - share) * kept)
    return torch.nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
