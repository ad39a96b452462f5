"""Generator: seed, save and restore the random bits of all parts of one training together.

A training draws in several places: the compiled model, a compiled loss, a compiled optimizer. Each has its own (seed,
sample), and one that is missing from a checkpoint has other bits after a resume. A Generator seeds all of them from
one number and their names, so that no two draw the same bits, and its state is the state of all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from fxround.errors import type_of
from fxround.module.rounded_module import RoundedModule
from fxround.training.optimizer import RNG_KEY, RoundedOptimizer

_SEED: Final = "seed"


class Generator:
    """Seed the parts of a training, and save and restore the (seed, sample) of their next calls.

    The seed of a part is a function of (seed, name), so that adding a part does not change the bits of another. Making
    a Generator reseeds its parts.

    Args:
        seed: 0 to 2^63 - 1.
        parts: compiled modules, losses and optimizers, under names that stay the same when the training is resumed.

    Raises:
        TypeError: for a part of another type.
        ValueError: for no parts, or a seed outside the range.

    Example::

        generator = Generator(0, model=compiled, loss=loss, optimizer=optimizer)
        torch.save({"random": generator.state_dict()}, "checkpoint.pt")
    """

    def __init__(self, seed: int = 0, **parts: RoundedModule | RoundedOptimizer) -> None:
        if not parts:
            raise ValueError(
                "a Generator needs the parts that it seeds, by name: Generator(0, model=compiled, loss=...)"
            )
        for name, part in parts.items():
            if not isinstance(part, RoundedModule | RoundedOptimizer):
                raise TypeError(
                    f"{name} is {type_of(part)}; expected what fxround.compile or compile_optimizer returned"
                )
        self.parts = dict(parts)
        self.reseed(seed)

    def reseed(self, seed: int) -> Generator:
        """Restart: every part gets the seed of its name, and sample or step 0. Returns the generator itself.

        Raises ValueError for a seed outside 0 to 2^63 - 1.
        """
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"seed {seed}: expected 0 to 2^63 - 1")
        self.seed = seed
        for name, part in self.parts.items():
            part.reseed(_seed_of(seed, name))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and for every part by name the (seed, sample) of its next call: ints and lists of ints."""
        states = {name: _state(part) for name, part in self.parts.items()}
        return {_SEED: self.seed, "parts": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises ValueError if names or numbers of groups differ."""
        parts = state.get("parts")
        if not isinstance(parts, Mapping) or set(parts) != set(self.parts) or not isinstance(state.get(_SEED), int):
            names = sorted(parts) if isinstance(parts, Mapping) else "no parts"
            raise ValueError(f"the state is of {names}; this generator has {sorted(self.parts)}")
        for name, part in self.parts.items():
            if len(parts[name]) != len(_state(part)):
                raise ValueError(f"{name}: the state has {len(parts[name])} groups, the part {len(_state(part))}")
        self.seed = state[_SEED]
        for name, part in self.parts.items():
            if isinstance(part, RoundedModule):
                part.reseed(*parts[name][0])
            else:
                for group, own in zip(part.param_groups, parts[name], strict=True):
                    group[RNG_KEY] = list(own)


def _state(part: RoundedModule | RoundedOptimizer) -> list[list[int]]:
    """Return (seed, sample) of a module, or (seed, step) of each group of an optimizer."""
    if isinstance(part, RoundedModule):
        return [part.rng.tolist()]
    return [list(group[RNG_KEY]) for group in part.param_groups]


def _seed_of(seed: int, name: str) -> int:
    """Return 63 bits of a SHA-256 digest."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
