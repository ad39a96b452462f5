"""``torch.compile(model, backend="fxround", options={"policy": ...})``, another entry to the pipeline.

Dynamo captures as for ``torch.compile`` and passes its graph to the backend, which lowers, fuses and schedules it as
``fxround.compile`` does; the bits are the same for the same (seed, sample). The graphs that Dynamo makes of one
``torch.compile`` (another batch, another dtype) share one (seed, sample), and a call that trains advances the sample.
``strict`` is the default, because there is no ``coverage()`` to read. An error is raised when the graph is called,
because Dynamo would wrap an error of the backend in one of its own. Example::

    torch.compile(model, backend="fxround", options={"policy": "stochastic", "seed": 0})
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, fx, nn

from fxround.compiler.pipeline import Pipeline
from fxround.compiler.samples_of_calls import give_back_to, take_from
from fxround.compiler.signature import require_flag
from fxround.errors import FxroundError, PolicyError
from fxround.float_state import require_ieee_arithmetic
from fxround.policy import Policy
from fxround.runtime.random_state import random_state

OPTIONS: Final = ("policy", "seed", "strict", "fuse")


@dataclass(frozen=True)
class _Options:
    """The parsed ``options=``; ``rng`` is the (seed, sample) that all graphs of one ``torch.compile`` share."""

    policy: Policy
    rng: Tensor
    strict: bool
    fuse: bool


# Keyed by the id of the options, which are kept alive so that no others take the id: torch.compile passes one and the
# same object for every graph.
_STATES: dict[int, tuple[Any, Tensor]] = {}


def rounding_backend(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; ``torch.compile`` knows this backend as ``"fxround"`` if the package is installed.

    Args:
        graph, inputs: the graph and its example inputs, from Dynamo.
        options: ``policy``, as for ``fxround.compile``; ``seed``, an int or an int64 tensor (seed, sample) of shape [2]
            that every call reads, and advances if it trains (default 0); ``strict`` (True); ``fuse`` (True).

    Returns:
        A function that runs the lowered graph. It raises what ``fxround.compile`` raises, and CaptureError if the model
        is not a single graph.
    """
    try:
        return _compiled(graph, inputs, _read(options))
    except (FxroundError, TypeError, ValueError) as error:
        return _refusing(error)


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any], options: _Options) -> Callable[..., Any]:
    require_ieee_arithmetic()
    entry, model = Pipeline(options.policy, options.strict, options.fuse).receive(graph, inputs)
    trains = _training(model)

    def run(*args: Any) -> Any:
        require_ieee_arithmetic()
        if not (entry.step and trains()):
            return entry.run(args, options.rng)
        own = take_from(options.rng)
        try:
            return entry.run(args, own)
        except BaseException:
            give_back_to(options.rng, own)
            raise

    return run


def _training(model: nn.Module | None) -> Callable[[], bool]:
    """Return a function that tells whether the model is in training mode.

    The flag is read at every call, because Dynamo guards it only if the model reads it.
    """
    if model is None:
        return lambda: True
    kept = weakref.ref(model)
    return lambda: (alive := kept()) is not None and alive.training


def _refusing(error: Exception) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        raise type(error)(*error.args) from error

    return refuse


def _read(options: Mapping[str, Any] | None) -> _Options:
    given = dict(options or {})
    wrong = [key for key in given if key not in OPTIONS]
    if wrong:
        raise TypeError(f"options has no key {wrong[0]!r}; expected {', '.join(OPTIONS)}")
    if "policy" not in given:
        raise PolicyError(
            'no policy is given: torch.compile(model, backend="fxround", options={"policy": "stochastic"}); '
            "a policy is a preset's name, a rounding, a path to a TOML file, a dict or a Policy."
        )
    for key in ("strict", "fuse"):
        require_flag(f"options[{key!r}]", given.get(key, True))
    policy = Policy.parse(given["policy"])
    return _Options(policy, _state(options, given.get("seed", 0)), given.get("strict", True), given.get("fuse", True))


def _state(options: Any, seed: Any) -> Tensor:
    """Return the caller's own tensor, or the one that belongs to these options."""
    if not isinstance(seed, Tensor):
        return _STATES.setdefault(id(options), (options, random_state(seed, 0)))[1]
    if seed.dtype != torch.int64 or seed.shape != (2,):
        raise TypeError(
            f"options['seed'] is a tensor of {seed.dtype}, {tuple(seed.shape)}; expected an int, or int64 (2,)"
        )
    return seed
