"""The operators ``torch.ops.fxround.*``, which are defined when one is first asked for.

Their definitions need the whole compiler, and a program that was exported from a compiled model names them without
importing it: ``import fxround; torch.export.load("model.pt2")``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any

import torch


class _Operators(ModuleType):
    """Stands for PyTorch's namespace of the operators until one is asked for."""

    def __init__(self, namespace: Any) -> None:
        super().__init__(namespace.__name__)
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._defined(), name)

    def __dir__(self) -> list[str]:
        return dir(self._defined())

    def _defined(self) -> Any:
        """Return PyTorch's namespace, with all operators unless it is fxround's code that asks, which defines them."""
        if not _is_asked_by_fxround():
            import_module("fxround.module")
            operators: Any = torch.ops
            operators.fxround = self._namespace
        return self._namespace


def _is_asked_by_fxround() -> bool:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("fxround."):
        frame = frame.f_back
    return frame is not None


def register() -> None:
    """Put the namespace among PyTorch's."""
    operators: Any = torch.ops
    operators.fxround = _Operators(operators.fxround)
