"""Writing a compiled module to a file, which ``fxround.load`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxround.capture import export_program, trace_example
from fxround.capture.aliases import require_written
from fxround.compiler.executable import Entry
from fxround.compiler.signature import arguments
from fxround.exported.caches import Cached, caches_among, with_tensors
from fxround.exported.files import save
from fxround.exported.gradients import gradients_of
from fxround.exported.program import Exportable
from fxround.module.delayed import Delayed


class Exporting(Delayed):
    """The part of a compiled module that writes files."""

    _apart: dict[str, Any]

    def _like(self, model: nn.Module) -> Any:
        """Compile another model with the same policy, settings and seed. ``RoundedModule`` defines it."""
        raise NotImplementedError

    def _entry(self, args: Any, kwargs: Any) -> Entry:
        """Return the graph for these arguments. ``RoundedModule`` defines it."""
        raise NotImplementedError

    def export(
        self, path: str | Path, example_inputs: Any, *, keep_inputs: bool = True, gradients: bool = False
    ) -> Path:
        """Write the rounded graph and the model's state to a .pt2 file; returns the path.

        The program in the file gives the same bits as this module. ``fxround.load`` reads it, and so does
        ``torch.export.load`` after ``import fxround``. Seed and sample are a buffer of the program.

        Args:
            path: the file, which is replaced when the new one is complete.
            example_inputs: as for ``compile``. The program takes any size of the first dimension of an argument, and
                any size of the dimensions of integer arguments. A cache of keys and values (transformers'
                ``DynamicCache`` or ``StaticCache``) that a call has filled is an argument like a tensor.
            keep_inputs: whether the example inputs are stored in the file, as ``torch.export.save`` does.
            gradients: whether the loaded program can be differentiated with respect to what requires gradients now.

        Raises:
            OSError: if the file cannot be written; an existing file is then kept. Also what capturing raises.
            TypeError: for a cache that is empty, or of layers of another kind.
            FxroundError: with ``gradients``, if nothing requires a gradient, for delayed scales, or for a result that
                shares memory with an input or another result; and for a view of an input that the model changes.
        """
        args, kwargs = arguments(example_inputs)
        caches = caches_among(args, kwargs)
        if caches:
            made: Exporting = self._like(Cached(self.source, caches))
            made.__dict__.update(rng=self.rng, _delayed=self._delayed, _apart=self._apart)
            example = with_tensors(caches, args, kwargs)
            return made.export(path, example, keep_inputs=keep_inputs, gradients=gradients)
        with torch.no_grad():
            entry = self._entry(args, kwargs)
        with torch.set_grad_enabled(gradients):
            joint = self._entry(args, kwargs) if gradients else entry
        require_written(joint.captured if gradients else entry.captured, gradients)
        args, kwargs = trace_example(args, kwargs)
        with torch.no_grad():
            program = export_program(Exportable(self.source, self.rng, entry), args, kwargs, entry.captured.sizes)
        second = gradients_of(joint, entry, (args, kwargs), self.rng, self.training) if gradients else None
        caches = self.source.caches if isinstance(self.source, Cached) else ()
        return save(program, path, (args, kwargs), keep_inputs, self.training, second, caches)
