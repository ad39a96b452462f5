"""Collectives: what the processes of a group exchange while a graph runs."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fxround.errors import FxroundError

MADE_AGAIN: Final = "Call torch.distributed.init_process_group, and make the device mesh and the model again."


def gathered(x: Tensor, group: str, processes: int) -> list[Tensor]:
    """Return the tensors x of all processes of a group, in the order of their ranks. All must have the same size.

    Raises FxroundError if the process group was destroyed.
    """
    if processes == 1 or not x.numel():
        return [x] * processes
    functional: Any = torch.ops._c10d_functional
    try:
        whole = functional.all_gather_into_tensor(x.reshape(-1), processes, group)
    except RuntimeError as error:
        if dist.is_initialized():
            raise
        raise FxroundError(f"processes share the model, and their process group was destroyed. {MADE_AGAIN}") from error
    return list(functional.wait_tensor(whole).view(processes, *x.shape).unbind())
