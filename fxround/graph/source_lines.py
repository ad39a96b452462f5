"""Source lines: the place in a user's program that a stack trace of a node leads to."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

import torch

TORCH: Final = str(PurePath(torch.__file__).parent)
# The folders whose code calls a model, is called by one, or stands for PyTorch's.
_OWN: Final = tuple(str(PurePath(__file__).parents[1] / folder) + "/" for folder in ("capture", "compiler", "eager"))


def source_line(stack_trace: str) -> tuple[str, str]:
    """Return ("file.py:12", "x = self.fc(x)") of the innermost frame of a stack trace, or two empty texts."""
    frame = innermost(stack_trace)
    return (f"{PurePath(frame[0]).name}:{frame[1]}", frame[2]) if frame else ("", "")


def innermost(stack_trace: str) -> tuple[str, int, str] | None:
    """Return (path of the file, line, code) of the innermost frame of a stack trace, or None if it has no frame.

    Frames of fxround's own code, through which a model is called, count only where there are no others.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', stack_trace)
    frames = [frame for frame in frames if not frame[0].startswith(_OWN)] or frames
    return (frames[-1][0], int(frames[-1][1]), frames[-1][2].strip()) if frames else None
