"""What studies of a model on data have in common: captured batches, the metrics asked for, and a file to resume from.

The file says what its figures belong to (``described_by``), so that figures of another model, of other data or of other
metrics are never taken for those of this study.
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.compiler.executable import Entry
from fxround.errors import shown, type_of
from fxround.fingerprint import hash
from fxround.graph.site import site
from fxround.graph.text import digest, lines_of_graph
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import IDENTITY
from fxround.significance.figures import plain
from fxround.significance.inputs import ModelCall, calls
from fxround.significance.metrics import METRICS, Classes, Metric, mean_over_rows, named, require_names
from fxround.significance.provenance import version_of

# The leaves of arguments whose text says all of them.
_PLAIN: Final = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def captured(model: nn.Module, data: Any, batch_size: int | None, seed: int) -> tuple[list[ModelCall], RoundedModule]:
    """Return the batches, and the unrounded model, which has captured each of them.

    Raises ValueError for a model in training mode that draws random numbers or writes buffers: its figures would not
    be those of rounding alone.
    """
    batches = list(calls(model, data, batch_size))
    unrounded = compile(model, IDENTITY, seed=seed)
    for call in batches:
        unrounded.prepare(*call.args, **call.kwargs)
        if model.training:
            _require_settled(unrounded._entry(call.args, call.kwargs))
    return batches, unrounded


def _require_settled(entry: Entry) -> None:
    sites = [place for node in entry.lowered.graph.nodes if (place := site(node)) is not None]
    draws = next((place for place in sites if place.kind == "random"), None)
    written = next((port.name for port in entry.captured.outputs if port.mutation and port.name), None)
    if draws is not None:
        said = f"{draws} draws random numbers"
    elif written is not None:
        said = f"a call writes {written}"
    else:
        return
    raise ValueError(f"the model is in training mode, where {said}: call model.eval() first")


def several(asked: Any) -> list[Any]:
    """Return what was asked for as a list. Raises ValueError for nothing."""
    several = list(asked) if isinstance(asked, list | tuple) else [asked]
    if not several or any(one is None for one in several):
        raise ValueError("metric has nothing; expected a name such as 'accuracy', or a function of (result, target)")
    return several


def metrics_of(asked: Sequence[Any]) -> list[Metric]:
    """Return the metrics. Raises TypeError or ValueError for unknown ones, equal names, and one of pairs of samples."""
    metrics = [_of_target(named((one,))[0]) for one in asked]
    require_names(metrics)
    for metric in metrics:
        if metric.pairs:
            raise ValueError(
                f"metric {metric.name!r} compares pairs of samples, and a policy may run once; choose another"
            )
    # The rows that change in any sample are a matter of variability.
    return [replace(metric, changed=None) for metric in metrics]


def _of_target(metric: Metric) -> Metric:
    """Return the metric; for a function of the caller's, which is one of result and target here, that of these."""
    function = metric.function
    if function is None or metric.combine == "merge":
        return metric
    meaning = "a function of result and target, mean over rows"
    made = mean_over_rows(function, meaning, lambda result, _, call: function(result, call.target), compares=False)
    return replace(made, better=metric.better, function=function)


def described_by(
    unrounded: RoundedModule, batches: Sequence[ModelCall], metrics: Sequence[Any], samples: int, seed: int
) -> dict[str, Any]:
    """Return what figures belong to, beside policies, as plain data.

    Raises TypeError for arguments or targets of which no text says all.
    """
    first = batches[0]
    return {
        "model": type(unrounded.source).__qualname__,
        "weights": hash(unrounded.source),
        "graph": digest(lines_of_graph(unrounded._entry(first.args, first.kwargs).captured.graph)),
        "data": digest(line for call in batches for line in _lines_of_call(call)),
        "metrics": [_said_of_metric(metric) for metric in metrics],
        "samples": samples,
        "seed": seed,
        "fxround": version_of("fxround"),
        "torch": version_of("torch"),
    }


def _lines_of_call(call: ModelCall) -> Iterator[str]:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs, call.target))
    yield str(spec)
    for leaf in leaves:
        if isinstance(leaf, Tensor | np.ndarray):
            yield hash(leaf)
        elif isinstance(leaf, _PLAIN):
            yield repr(leaf)
        else:
            raise TypeError(
                f"the data hold {type_of(leaf)}, and no text says all of it, so that a file cannot say which data it "
                "belongs to; leave path= out, or pass tensors, numbers and texts"
            )


def _said_of_metric(metric: Any) -> str:
    """Return the name of a metric, with its source text if it is the caller's."""
    if isinstance(metric, str):
        return metric
    if not isinstance(metric, Metric):
        name, (own,) = getattr(metric, "__qualname__", type(metric).__qualname__), named((metric,))
        return f"{name} {own.settings}{digest([source_of(metric)])}"
    if metric == METRICS.get(metric.name):
        return metric.name
    functions = (metric.function or metric.measure, metric.finish)
    how = "" if metric.classes == Classes() else f" {metric.classes}"
    return f"{metric.name}{how} {metric.against} {metric.settings} {digest(map(source_of, functions))}"


def source_of(function: Any) -> str:
    """Return the source text of a function, or of an object's class; its name where there is none."""
    function = function.func if isinstance(function, partial) else function
    try:
        return textwrap.dedent(inspect.getsource(function if inspect.isroutine(function) else type(function)))
    except (OSError, TypeError):  # typed into a prompt, or of a built-in class
        return str(getattr(function, "__qualname__", type(function).__qualname__))


@contextmanager
def reading(path: str | Path | None, what: str) -> Iterator[None]:
    """Turn what a wrong text raises into a ValueError that names the file. what: what the file is expected to have."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no file of a {what} ({error}); pass the path of one, or of a new file") from error


def read_file(path: str | Path | None, described: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """Return what the file of a study has; None if there is none.

    Raises ValueError for a file of another study, whose ``described`` differs, or of anything else.
    """
    if path is None or not Path(path).exists():
        return None
    with reading(path, what):
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        own = dict(held["described"])
    for key, value in plain(dict(described)).items():
        if own.get(key) != value:
            raise ValueError(
                f"{path} has a {what} with another {key}: {shown(own.get(key))}, and this one has {shown(value)}. "
                "Pass another path, or delete the file to run everything again"
            )
    return dict(held)


def number_of(value: float | str | None) -> float:
    """Return the number that ``plain`` has written."""
    return math.nan if value is None else float(value)


__all__ = [
    *("described_by", "metrics_of", "number_of", "read_file", "reading", "several", "source_of"),
]
