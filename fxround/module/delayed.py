"""``RoundedModule.delayed_scales`` and ``share_scales``: the state of delayed scales, and processes that share it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxround.compiler.delayed_state import DelayedState
from fxround.module.flips import Faulting


class Delayed(Faulting):
    """The part of a compiled module that shows its delayed scales."""

    _delayed: DelayedState

    @property
    def delayed_scales(self) -> dict[str, Tensor]:
        """Copies of the state of delayed scales by the names of values, such as ``first.weight0``.

        A state is a tensor of shape [1 + history]: the multiplier of the next call, and the largest magnitudes of the
        last steps, newest first. Empty before the first call, and without delayed scales.
        """
        return self._delayed.copy().values

    def share_scales(self, group: Any = None) -> None:
        """Take the largest magnitudes of all processes for delayed scales, as TransformerEngine does.

        Every call that trains and every backward pass then reduces its magnitudes by one ``all_reduce`` for each format
        and dtype, so that all processes must run the same model and the same steps. A copy of the module, or one that
        was pickled, shares nothing until it is called for it.

        Args:
            group: a process group of ``torch.distributed``; None for all processes.

        Raises:
            FxroundError: if ``torch.distributed`` is not initialized.

        Example::

            compiled.share_scales()
        """
        self._delayed.share(group)
