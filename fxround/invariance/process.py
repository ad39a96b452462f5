"""Run a case in a new interpreter.

The subject and the call are pickled (by cloudpickle if it is installed, so that classes of a script or notebook can be
sent), and run by a new interpreter with the same module search path; the result returns in a file. ``build`` makes the
model in the new process instead, and the state of the present model is loaded into it. Files are stored in a temporary
directory. A failure in either process raises FxroundError with its message.
"""

from __future__ import annotations

import pickle
import pkgutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from torch import nn

from fxround import new_process
from fxround.errors import FxroundError
from fxround.invariance.subjects import Observation, Outcome, Subject
from fxround.module.rounded_module import RoundedModule
from fxround.runtime.cpu.code import instruction_set
from fxround.significance.inputs import ModelCall

Build = Callable[[], nn.Module] | str
_CHILD: Final = """
import sys
from fxround.invariance.process import serve
serve(*sys.argv[1:])
"""
_WAYS_OUT: Final = (
    "pass build=, a function that makes the model or its name 'module:function', or leave the axis 'process' out."
)


def elsewhere(
    subject: Subject, call: ModelCall, isa: str | None, environment: Mapping[str, str], build: Build | None, trace: bool
) -> Outcome | list[Observation]:
    """Return ``subject.outcome(call)``, or its steps, computed by a new interpreter.

    Raises FxroundError with the last line of the error.
    """
    with tempfile.TemporaryDirectory(prefix="fxround-") as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        request.write_bytes(packed((portable(subject, build), call, isa, trace), _WAYS_OUT))
        ran = new_process.run(_CHILD, str(request), str(answer), environment=environment)
        if ran.returncode or not answer.exists():
            last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
            raise FxroundError(
                f"{subject.name} could not be run in another process: {last}. It is pickled for that process: define "
                "its class in a module that can be imported, install cloudpickle (pip install "
                f"'fxround[distributed]'), or {_WAYS_OUT}"
            )
        result: Outcome | list[Observation] = pickle.loads(answer.read_bytes())
        return result


def serve(request: str, answer: str) -> None:
    """Run the request in the new process and write the answer."""
    made, call, isa, trace = pickle.loads(Path(request).read_bytes())
    subject: Subject = made() if isinstance(made, _Rebuilt) else made
    with instruction_set(isa) if isa else nullcontext():
        result = list(subject.steps(call)) if trace else subject.outcome(call)
    Path(answer).write_bytes(pickle.dumps(result))


class _Rebuilt:
    """A subject without its model, which the other process builds and gives the state of the present model."""

    def __init__(self, subject: Any, build: Build) -> None:
        module = subject.module
        source = module.source if isinstance(module, RoundedModule) else module
        self.build, self.training = build, {name: part.training for name, part in source.named_modules()}
        self.state = source.state_dict()
        self.policy = (
            (module.policy, module.strict, *module.rng.tolist()) if isinstance(module, RoundedModule) else None
        )
        self.subject = replace(subject, module=None)

    def __call__(self) -> Subject:
        build = pkgutil.resolve_name(self.build) if isinstance(self.build, str) else self.build
        model = build()
        model.load_state_dict(self.state)
        for name, part in model.named_modules():
            part.training = self.training.get(name, part.training)
        subject: Subject = replace(self.subject, module=RoundedModule(model, *self.policy) if self.policy else model)
        return subject


def portable(subject: Subject, build: Build | None) -> Any:
    """Return what is pickled for a subject: with ``build``, a function that makes it over there."""
    return subject if build is None else _Rebuilt(subject, build)


def packed(value: Any, ways_out: str) -> bytes:
    """Return a value as bytes for another process. Raises FxroundError, which ends with ``ways_out``."""
    try:
        return bytes(_pickler().dumps(value))
    except Exception as error:  # pickling runs the model's own code
        raise FxroundError(
            f"{type(error).__name__}: {error}: what cannot be pickled cannot run in another process: {ways_out}"
        ) from error


def _pickler() -> Any:
    try:
        return import_module("cloudpickle")
    except ImportError:
        return pickle
