"""``fxround.hash``: a short text by which bits are compared across processes and machines.

The text is a SHA-256 over dtype, shape and the row-major bytes. Strides have no effect; minus zero and NaN payloads do.
Unlike ``torch.equal`` it needs only one of the two tensors at a time:
``fxround.hash(a) == "sha256:5feceb66ffc86f38..."`` compares ``a`` with a log.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxround.errors import type_of


def hash(x: Tensor | np.ndarray[Any, Any] | nn.Module) -> str:
    """Return ``sha256:`` and 64 hexadecimal digits that depend on every bit of x.

    Args:
        x: a tensor or array of any shape and dtype, whose dtype, shape and values are hashed; or a module, of which the
            names and tensors of ``state_dict()`` are hashed in order, without the seed and sample of a compiled module.

    Returns:
        A text. Equal texts mean equal bits.

    Raises:
        TypeError: for anything else.

    Example::

        assert fxround.hash(compiled(x)) == fxround.hash(compiled(x))
    """
    digest = hashlib.sha256()
    if isinstance(x, nn.Module):
        for name, tensor in x.state_dict().items():
            if name.endswith("fxround_rng"):  # seed and sample of a compiled module: no part of the model's state
                continue
            digest.update(f"{name}={hash(tensor)};".encode())
    elif isinstance(x, Tensor | np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else _plain(x)
        digest.update(f"{str(tensor.dtype).removeprefix('torch.')}{list(x.shape)}:".encode())
        # A tensor of one element counts as contiguous whatever its stride, but only a stride of 1 can be viewed as
        # bytes.
        flat = tensor.contiguous().reshape(-1)
        digest.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).cpu().numpy().tobytes())
    else:
        raise TypeError(f"x is {type_of(x)}; expected a torch tensor, a NumPy array or a torch.nn.Module")
    return f"sha256:{digest.hexdigest()}"


def _plain(x: Tensor) -> Tensor:
    """Return the values in the CPU's memory; a view may represent conjugate or negated values.

    Raises TypeError for a DTensor of which this process has a part.
    """
    placements = getattr(x, "placements", None)
    if placements is not None and not all(placement.is_replicate() for placement in placements):
        raise TypeError(
            f"x is a DTensor with the placements {placements}, of which this process has a part: pass "
            "x.full_tensor(), in every process"
        )
    return x.detach().cpu().resolve_conj().resolve_neg()
