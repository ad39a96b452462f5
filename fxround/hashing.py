"""``fxround.hash``: one short text that is equal exactly when the bits are.

What is true here. The text is a SHA-256 over dtype, shape and the row-major bytes; strides do not count, minus zero and
NaN payloads do. A module's is that of its state_dict, names included.

    before   torch.equal(a, b)                              # both must be here, and NaN != NaN
    after    fxround.hash(a) == "sha256:5feceb66ffc86f38..."   # written in a log last week, on another machine
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def hash(x: Tensor | np.ndarray[Any, Any] | nn.Module) -> str:
    """``sha256:`` and 64 hexadecimal digits. Raises TypeError for anything but a tensor, an array or a module."""
    digest = hashlib.sha256()
    if isinstance(x, nn.Module):
        for name, tensor in x.state_dict().items():
            if name.endswith("fxround_rng"):  # seed and sample of a compiled module: no part of the model's state
                continue
            digest.update(f"{name}={hash(tensor)};".encode())
    elif isinstance(x, Tensor | np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else _plain(x)
        digest.update(f"{str(tensor.dtype).removeprefix('torch.')}{list(x.shape)}:".encode())
        # One element counts as contiguous whatever its stride, and only a stride of 1 can be read as bytes.
        flat = tensor.contiguous().reshape(-1)
        digest.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes())
    else:
        raise TypeError(f"x is a {type(x).__name__}; expected a torch tensor, a NumPy array or a torch.nn.Module")
    return f"sha256:{digest.hexdigest()}"


def _plain(x: Tensor) -> Tensor:
    """The values in the memory of the CPU; a view may stand for what is conjugate or negative."""
    return x.detach().cpu().resolve_conj().resolve_neg()
