"""Outputs that transformers' models record through hooks: hidden states and attentions.

A model installs these hooks in the first call that asks for such outputs, under a lock, which Dynamo cannot enter. So
they are installed before the call is captured, by transformers itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

_RECORDING: Final = "transformers.utils.output_capturing"
_INSTALLED: Final = "_output_capturing_hooks_installed"
_ASKED: Final = "output_"


def record_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let transformers install the hooks of a model, if a call or the configuration asks for their outputs."""
    install = getattr(sys.modules.get(_RECORDING), "maybe_install_capturing_hooks", None)
    if install is None or not _asks(model, kwargs):
        return
    for module in model.modules():
        # The hooks of a model are those of its parts too, which must not have them twice.
        if hasattr(module, "_can_record_outputs") and not any(hasattr(part, _INSTALLED) for part in module.modules()):
            install(module)


def _asks(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    config = getattr(model, "config", None)
    configured = (getattr(config, f"{_ASKED}{what}", False) for what in ("hidden_states", "attentions"))
    asked = (value for name, value in kwargs.items() if name.startswith(_ASKED) and not isinstance(value, Tensor))
    return any(asked) or any(configured)
