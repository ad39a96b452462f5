"""Generator: the random bits of one training, saved and taken up again together.

A training draws in several places: the compiled model, a compiled loss, a compiled optimizer. Each has a (seed, sample)
of its own, and one that is forgotten in a checkpoint has other bits after a resume. A Generator seeds all of them from
one number, by their names, so that no two draw the same bits, and its state is that of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from fxround.compiler import RoundedModule
from fxround.training.optimizer import RNG_KEY, RoundedOptimizer

_SEED: Final = "seed"


class Generator:
    """Seeds what a training is made of, and saves and restores what its next random bits are a function of.

    seed: 0 to 2^63 - 1. parts: compiled modules, losses and optimizers, by a name that stays the same when the training
    is resumed. A part's seed is a function of (seed, name): another part changes nobody's bits. Making a Generator
    reseeds the parts. Raises TypeError for a part of another type, ValueError for no parts.
    """

    def __init__(self, seed: int = 0, **parts: RoundedModule | RoundedOptimizer) -> None:
        if not parts:
            raise ValueError("a Generator seeds what it is given by name: Generator(0, model=compiled, loss=...)")
        for name, part in parts.items():
            if not isinstance(part, RoundedModule | RoundedOptimizer):
                raise TypeError(
                    f"{name} is a {type(part).__name__}; expected what fxround.compile or compile_optimizer returned"
                )
        self.parts = dict(parts)
        self.reseed(seed)

    def reseed(self, seed: int) -> Generator:
        """Start anew: every part gets the seed of its name, and the sample or step 0. Returns the generator itself."""
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"seed {seed}: expected 0 to 2^63 - 1")
        self.seed = seed
        for name, part in self.parts.items():
            part.reseed(_seed_of(seed, name))
        return self

    def state_dict(self) -> dict[str, Any]:
        """The seed, and of every part by name the (seed, sample) of its next call: ints and lists of ints."""
        states = {name: _state(part) for name, part in self.parts.items()}
        return {_SEED: self.seed, "parts": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned. Raises ValueError where the parts have other names or groups."""
        found = state.get("parts")
        if not isinstance(found, Mapping) or set(found) != set(self.parts) or not isinstance(state.get(_SEED), int):
            names = sorted(found) if isinstance(found, Mapping) else "no parts"
            raise ValueError(f"the state is of {names}; this generator has {sorted(self.parts)}")
        for name, part in self.parts.items():
            if len(found[name]) != len(_state(part)):
                raise ValueError(f"{name}: the state has {len(found[name])} groups, the part {len(_state(part))}")
        self.seed = state[_SEED]
        for name, part in self.parts.items():
            if isinstance(part, RoundedModule):
                part.reseed(*found[name][0])
            else:
                for group, own in zip(part.param_groups, found[name], strict=True):
                    group[RNG_KEY] = list(own)


def _state(part: RoundedModule | RoundedOptimizer) -> list[list[int]]:
    """(seed, sample) of a module, (seed, step) of each group of an optimizer."""
    if isinstance(part, RoundedModule):
        return [part.rng.tolist()]
    return [list(group[RNG_KEY]) for group in part.param_groups]


def _seed_of(seed: int, name: str) -> int:
    """63 bits of a digest."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
