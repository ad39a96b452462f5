"""What PyTorch keeps of a trace after it: removed, so that a model that is dropped takes its traces along.

The symbolic sizes of fake tensors are C++ objects. A cycle of references through them is never collected: a list or a
cache of Python's that holds a fake tensor and is reached from its sizes keeps the whole environment of a trace.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxround.graph.values import fake_mode, forget_values


def forget_tensors(environment: Any) -> None:
    """Forget the fake tensors of a finished trace; guards on sizes can no longer be made."""
    if getattr(environment, "tracked_fakes", None):
        environment.tracked_fakes = None


def forget_computed(graph: fx.GraphModule) -> None:
    """Forget what was computed with the fake values of a graph, which computing with them again gives."""
    mode = fake_mode(graph)
    forget_values(mode)
    # torch 2.11 to 2.13 have this cache of an environment; its entries are computed again when they are missing.
    getattr(mode.shape_env, "fake_tensor_cache", {}).clear()
    for method in vars(ShapeEnv).values():
        function = method
        while function is not None and not hasattr(function, "cache_clear"):
            function = getattr(function, "__wrapped__", None)
        if function is not None:
            function.cache_clear()
