"""The run-time tensor (seed, sample) that every lowered graph takes.

On the CPU it is read for each launch, and every change makes another tensor. On a CUDA device the kernels read it when
they run, and it is changed in place without waiting for the device: each replay of a CUDA graph draws the bits of what
the tensor then holds.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from fxround.errors import shown
from fxround.graph.dialect import require_state
from fxround.runtime.draw import Draw


def state_of(saved: Any, what: str) -> tuple[int, int]:
    """Return (seed, sample) of a saved random state, a tensor or a list. Raises ValueError for anything else."""
    if isinstance(saved, Tensor):
        try:
            require_state(saved)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    values = saved.tolist() if isinstance(saved, Tensor) else saved
    if not isinstance(values, list | tuple) or len(values) != 2 or not all(type(v) is int for v in values):
        raise ValueError(f"{what} is {shown(saved)}; expected (seed, sample), two numbers")
    try:
        drawn = Draw(*values)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return drawn.seed, drawn.sample


def random_state(seed: int, sample: int) -> Tensor:
    """Return the run-time tensor (seed, sample) that every lowered graph takes, int64 of shape [2]."""
    drawn = Draw(seed, sample)
    return torch.tensor([drawn.seed, drawn.sample], dtype=torch.int64, device="cpu")


def state_on(device: torch.device | str, seed: int, sample: int) -> Tensor:
    """Return the tensor (seed, sample) on a device."""
    if torch.device(device).type == "cpu":
        return random_state(seed, sample)
    # A tensor that inference mode made could not be changed outside of it.
    with torch.inference_mode(False):
        rng = torch.empty(2, dtype=torch.int64, device=device)
    write(rng, seed, sample)
    return rng


def write(rng: Tensor, seed: int, sample: int) -> None:
    """Write numbers into a tensor; no device is waited for."""
    drawn = Draw(seed, sample)
    for place, number in enumerate((drawn.seed, drawn.sample)):
        rng[place].fill_(number)


def changed(rng: Tensor, seed: int, sample: int) -> Tensor:
    """Return another tensor with these numbers; on a device it has the same memory."""
    if rng.is_cpu:
        return random_state(seed, sample)
    write(rng, seed, sample)
    return rng.detach()


def of_rank(rng: Tensor, rank: int) -> Tensor:
    """Return (seed, sample + rank)."""
    if not rank:
        return rng
    if rng.is_cpu:
        seed, sample = rng.tolist()
        return random_state(seed, sample + rank)
    own = rng.clone()
    own[1] += rank
    return own


def of_submodule(rng: Tensor, path: str) -> Tensor:
    """Return the (seed, sample) of a submodule that a method calls; the module's own for ""."""
    if not path:
        return rng
    seed, sample = rng.tolist()
    return random_state(seed_of(seed, f"submodule {path}"), sample)


def advanced(rng: Tensor, world_size: int = 1) -> Tensor:
    """Return another tensor of what follows a training call of every process; on a device with the same memory."""
    if rng.is_cpu:
        seed, sample = rng.tolist()
        return random_state(*following(seed, sample, world_size))
    advance(rng, world_size)
    return rng.detach()


def advance(rng: Tensor, world_size: int = 1) -> None:
    """Write what follows a training call of every process into a tensor; no device is waited for."""
    last = rng[1] + 2 * world_size > 1 << 32
    rng[0] += last
    # Numbers of Python as torch.where takes them are copied to the device.
    rng[1] += world_size
    rng[1] *= ~last


def following(seed: int, sample: int, world_size: int = 1) -> tuple[int, int]:
    """Return (seed, sample) after a training call of every process; a seed has 2^32 samples."""
    return (seed, sample + world_size) if sample + 2 * world_size <= 1 << 32 else (seed + 1, 0)


def seed_of(seed: int, name: str) -> int:
    """Return the seed of what a method computes beside the model's forward: independent bits for each name."""
    digest = hashlib.blake2b(f"{name} of {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
