"""The state of delayed scales: multipliers, and the largest magnitudes of the steps of which they are made.

A step that trains appends the largest magnitude m of each value, and the next multiplier is M / max(m) / 2^margin of
the last ``history`` steps, rounded once as ``kernels.scaled`` says. Before the first step a multiplier is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fxround.errors import FxroundError
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.scaled import scale_program
from fxround.numerics.formats import Format
from fxround.passes.delayed_scales import DelayedScale
from fxround.policy import Policy
from fxround.policy.calibrated import CalibratedPolicy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# The prefix of the keys of a state_dict.
SCALES: Final = "fxround_scales."


class Names:
    """An object that has itself as an attribute under any name, as the names of values have no objects."""

    def __getattr__(self, name: str) -> Names:
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self


class DelayedState:
    """The state by the names of values: [multiplier, largest magnitudes of the last steps, newest first].

    Held scales are tensors with a number for each block. values: tensors of shape [1 + history], or those, of float32,
    or float64 for values of that dtype.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        self.values = dict(values or {})
        # Whether processes share their magnitudes, and which: None for all.
        self.shared = False
        self.group: Any = None

    @staticmethod
    def given(policy: Policy) -> DelayedState | None:
        """Return a copy of the held scales of a calibrated policy; None for any other policy."""
        return DelayedState(policy.scales).copy() if isinstance(policy, CalibratedPolicy) else None

    def __getstate__(self) -> dict[str, Any]:
        # A process group belongs to its process.
        return {"values": self.values, "shared": False, "group": None}

    def share(self, group: Any) -> None:
        """Reduce the magnitudes of each step over a process group, None for all processes, from now on.

        Raises FxroundError if torch.distributed is not initialized.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise FxroundError(
                "share_scales() reduces magnitudes over the processes of torch.distributed, which is not initialized: "
                "call torch.distributed.init_process_group first"
            )
        self.shared, self.group = True, group

    def multipliers(self, scales: Sequence[DelayedScale]) -> list[Tensor]:
        """Return copies of the multipliers, of shape [], and of held scales.

        Raises FxroundError for a state of another history or shape, and for held scales that are missing.
        """
        return [(self._held(scale) if scale.shape is not None else self._of(scale)[0]).clone() for scale in scales]

    def copy(self) -> DelayedState:
        """Return the same state in memory of its own."""
        return DelayedState({name: value.clone() for name, value in self.values.items()})

    def record(self, scales: Sequence[DelayedScale], magnitudes: Sequence[Tensor]) -> None:
        """Append the largest magnitudes of a step, and make the next multipliers."""
        groups: dict[tuple[Any, torch.dtype, torch.device], list[tuple[DelayedScale, Tensor]]] = {}
        for scale, most in zip(scales, magnitudes, strict=True):
            groups.setdefault((scale.rounding, scale.dtype, scale.device), []).append((scale, most))
        for (rounding, dtype, _), rows in groups.items():
            old = torch.stack([self._of(scale) for scale, _ in rows])
            now = torch.stack([most.detach().reshape(()).to(dtype) for _, most in rows])
            if self.shared:
                # The largest of several numbers does not depend on their order.
                dist.all_reduce(now, dist.ReduceOp.MAX, group=self.group)
            history = torch.cat([now[:, None], old[:, 1:-1]], 1)
            program = scale_program(rounding, Format.parse(FORMAT_OF[dtype]))
            following = run_map(program, (history.amax(1), old[:, 0].contiguous()), dtype, Draw())
            state = torch.cat([following[:, None], history], 1)
            self.values |= {scale.name: row.clone() for (scale, _), row in zip(rows, state, strict=True)}

    def _held(self, scale: DelayedScale) -> Tensor:
        state = self.values.get(scale.name)
        if state is None:
            raise FxroundError(
                f"the policy rounds {scale.name!r} with held scales, and the compiled module has none for it: compile "
                "with the policy that fxround.calibrate returned, or load the state_dict of such a module"
            )
        if state.shape != scale.shape:
            raise FxroundError(
                f"the held scales {scale.name!r} have the shape {tuple(state.shape)}, and the policy needs "
                f"{scale.shape}: calibrate this model, or load the state of a model with the same policy"
            )
        return state.to(scale.device, scale.dtype)

    def _of(self, scale: DelayedScale) -> Tensor:
        scaling = scale.rounding.format.scaling
        assert scaling is not None
        size = 1 + scaling.history
        state = self.values.get(scale.name)
        if state is None:
            state = torch.zeros(size, dtype=scale.dtype, device=scale.device)
            state[:1].fill_(1.0)
            self.values[scale.name] = state
        state = state.to(scale.device)
        if state.shape != (size,) or state.dtype != scale.dtype:
            raise FxroundError(
                f"the delayed scale {scale.name!r} has a state of {state.dtype} and {len(state) - 1} steps, and the "
                f"policy needs {scale.dtype} and {scaling.history}: load the state of a model with the same policy"
            )
        return state

    def load(self, state: dict[str, Any], prefix: str, replace: bool) -> None:
        """Take this state's keys out of a ``state_dict``; replace: whether a state without them is an empty one.

        Raises RuntimeError for a value that is no such state.
        """
        start = f"{prefix}{SCALES}"
        saved = {key[len(start) :]: state.pop(key) for key in list(state) if key.startswith(start)}
        for name, value in saved.items():
            if not isinstance(value, Tensor) or not value.dim() or not value.numel() or not value.is_floating_point():
                raise RuntimeError(
                    f"{start}{name} is {type(value).__name__} {tuple(getattr(value, 'shape', ()))}; expected a "
                    "multiplier and the largest magnitudes of steps, or held scales: a tensor of floats"
                )
        if saved or replace:
            self.values = {name: value.clone() for name, value in saved.items()}
