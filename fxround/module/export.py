"""Writing a compiled module to a file, which ``fxround.load`` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.capture import export_program, trace_example
from fxround.capture.aliases import require_written
from fxround.compiler.executable import Entry
from fxround.errors import FxroundError
from fxround.exported.caches import Cached
from fxround.exported.files import save
from fxround.exported.gradients import gradients_of
from fxround.exported.program import Exportable
from fxround.graph.generated_code import forgotten_sources


@forgotten_sources()
def write_program(
    path: str | Path, compiled: Any, entry: Entry, joint: Entry | None, example: tuple[Any, Any], keep_inputs: bool
) -> Path:
    """Write a graph of a compiled module, and its gradients, to a file; returns the path.

    entry: the graph without gradients. joint: the one with gradients; None to write none. example: the arguments that
    both were captured for. Raises what ``RoundedModule.export`` raises.
    """
    if entry.is_shared or entry.sharded is not None:
        raise FxroundError(
            "several processes share this model, and a file has the whole of one: export a compiled copy that is not "
            "shared and has loaded the full state"
        )
    source, rng, training = compiled.source, compiled.rng, compiled.training
    require_written((joint or entry).captured, joint is not None)
    _refuse_attributes(entry, pytree.tree_leaves(example))
    args, kwargs = trace_example(*example, entry.captured.sizes)
    with torch.no_grad():
        program = export_program(Exportable(source, rng, entry, kwargs), args, kwargs, entry.captured.sizes)
    gradients = gradients_of(joint, entry, (args, kwargs), rng, training) if joint else None
    caches = source.caches if isinstance(source, Cached) else ()
    return save(program, path, (args, kwargs), keep_inputs, training, gradients, caches)


def _refuse_attributes(entry: Entry, leaves: Sequence[Any]) -> None:
    """Raise FxroundError for an attribute of a tensor that the graph depends on: a program does not look at any."""
    for leaf in leaves:
        read = entry.captured.guards.members & vars(leaf).keys() if isinstance(leaf, Tensor) else ()
        if read:
            raise FxroundError(
                f"the model reads {', '.join(sorted(read))} of a tensor among its arguments, an attribute that the "
                "program in a file would not look at: let the model take it as an argument of its own"
            )
