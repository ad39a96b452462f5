"""Subjects: the compiled module or plain PyTorch module that is checked, run without side effects.

``outcome`` returns the results of a call by name, with gradients if requested; ``steps`` yields the values of its
operations, one at a time, with their place in the model. Buffers, gradients, the module's sample and PyTorch's
generator are restored after a call. The gradients of a compiled module's operations come from the joint graph by which
it trains, and those of a plain module from the operators that PyTorch dispatches.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fxround.capture import inside_backward
from fxround.capture.processes import is_shared
from fxround.exported.program import LoadedModule
from fxround.module.rounded_module import RoundedModule
from fxround.significance.inputs import ModelCall
from fxround.views.graph_views import described

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class OperationPlace:
    """An operation: the name of its node, its operator, the path of its module, and its source line."""

    node: str
    operator: str = ""
    path: str = ""
    source: str = ""
    code: str = ""

    def __str__(self) -> str:
        line = f" at {self.source}: {self.code}" if self.source else self.code and f", {self.code}"
        return f"{self.node} ({self.operator}) in {self.path or 'the root module'}{line}"


@dataclass(frozen=True)
class Observation:
    """An operation's place, and the tensors that it yields."""

    place: OperationPlace
    value: tuple[Tensor, ...]


class Subject(Protocol):
    """A module that can be run and observed."""

    @property
    def name(self) -> str:
        """The name of the model's class."""

    @property
    def policy(self) -> str:
        """The name of its policy."""

    def outcome(self, call: ModelCall) -> Outcome:
        """Return every tensor of the result, and of the gradients, by name."""

    def steps(self, call: ModelCall) -> Iterator[Observation]:
        """Yield the operations' values, in the order in which they run."""

    def stock(self, call: ModelCall) -> bool:
        """Whether PyTorch's kernels compute floating-point numbers."""

    def on(self, device: str) -> Subject:
        """Return a copy on a device."""


@dataclass(frozen=True)
class Compiled:
    """A compiled or loaded module with its own seed and sample."""

    module: RoundedModule | LoadedModule
    gradients: bool = False

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(getattr(self.module, "source", self.module)).__name__

    @property
    def policy(self) -> str:
        """The name of its policy."""
        return self.module.policy.name if isinstance(self.module, RoundedModule) else "as exported"

    def outcome(self, call: ModelCall) -> Outcome:
        """Return results and gradients by name."""
        with self._kept():
            return outcome_of(self.module, call, self.gradients)

    def steps(self, call: ModelCall) -> Iterator[Observation]:
        """Yield the values of the lowered graph, forward and backward; nothing for an exported program."""
        if isinstance(self.module, LoadedModule):
            return
        if self.gradients:
            with self._kept():
                seen = _differentiable(call)
                leaves = pytree.tree_leaves(_run(self.module, seen))
                tangents = {i: tangent(t) for i, t in enumerate(leaves) if isinstance(t, Tensor)}
            values = self.module.observe_step(tangents, *seen.args, **seen.kwargs)
        else:
            values = self.module.observe(*call.args, **call.kwargs)
        places: dict[str, OperationPlace] = {}
        for name, value in values:
            places = places or _places(self.module.lowered)
            if name != "output":
                yield Observation(places[name], _tensors(value))

    def stock(self, call: ModelCall) -> bool:
        """Whether an operation was left to a stock kernel; True for an exported program, which does not say."""
        if isinstance(self.module, LoadedModule):
            return True
        self.outcome(call)
        return bool(self.module.coverage().unrounded)

    def on(self, device: str) -> Compiled:
        """Return a copy on a device."""
        return replace(self, module=copy.deepcopy(self.module).to(device))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Restore state and sample after the block."""
        rng = self.module.rng.clone() if isinstance(self.module, RoundedModule) else None
        with _unchanged(self.module):
            yield
        if rng is not None:
            self.module.reseed(*rng.tolist())


@dataclass(frozen=True)
class Eager:
    """A plain module, run by PyTorch."""

    module: nn.Module
    gradients: bool = False

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self.module).__name__

    @property
    def policy(self) -> str:
        """Text that says there is none."""
        return "none (stock PyTorch)"

    def outcome(self, call: ModelCall) -> Outcome:
        """Return results and gradients by name."""
        with _unchanged(self.module):
            return outcome_of(self.module, call, self.gradients)

    def steps(self, call: ModelCall) -> Iterator[Observation]:
        """Yield the operators that PyTorch dispatched."""
        with _Recorder(self.module) as seen, _unchanged(self.module):
            outcome_of(self.module, call, self.gradients)
        yield from seen.steps

    def stock(self, call: ModelCall) -> bool:
        """Always true."""
        return True

    def on(self, device: str) -> Eager:
        """Return a copy on a device."""
        return replace(self, module=copy.deepcopy(self.module).to(device))


def _places(graph: fx.GraphModule) -> dict[str, OperationPlace]:
    """Return the place of every node by its name."""
    sites = ((node.name, described(node)) for node in graph.graph.nodes)
    return {n: OperationPlace(n, s.operator, s.path, s.source, s.code) if s else OperationPlace(n) for n, s in sites}


def outcome_of(module: nn.Module, call: ModelCall, gradients: bool) -> Outcome:
    """Return the tensors of ``module(*args)``, and the gradients of everything that requires one.

    The incoming gradient of each result is ``tangent(result)``. Raises ValueError if there is nothing to compare.
    """
    if not gradients:
        with torch.no_grad():
            return {name: whole(t) for name, t in _required(_named("output", _run(module, call))).items()}
    seen = _differentiable(call)
    with torch.enable_grad():
        result = _run(module, seen)
    outcome = {name: _gathered(t) for name, t in _named("output", result).items()}
    leading = [t for t in outcome.values() if t.requires_grad]
    wanted: Outcome = {f"gradient of {name}": p for name, p in module.named_parameters() if p.requires_grad}
    given = _named("gradient of arguments", seen.args) | _named("gradient of keywords", seen.kwargs)
    wanted |= {name: t for name, t in given.items() if t.requires_grad}
    if not leading or not wanted:
        raise ValueError("no result depends on anything that requires a gradient: leave out gradients=True")
    grads = torch.autograd.grad(leading, list(wanted.values()), [tangent(t) for t in leading], allow_unused=True)
    outcome |= {name: g for name, g in zip(wanted, grads, strict=True) if g is not None}
    return {name: whole(t.detach()) for name, t in outcome.items()}


def _gathered(tensor: Any) -> Tensor:
    """Return the whole of a DTensor, through which gradients flow; any other tensor as it is."""
    return tensor.full_tensor() if is_shared(tensor) else tensor  # type: ignore[no-any-return]


def whole(tensor: Any) -> Tensor:
    """Return the whole of a tensor that processes share, and what a collective gives when it has ended."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else _gathered(tensor)


def tangent(result: Tensor) -> Tensor:
    """Return a gradient for a result: multiples of 1/8 that depend on the last dimension alone, so on no other row."""
    last = result.shape[-1] if result.dim() > 1 else 1
    numbers = ((torch.arange(last, device=result.device) * 7 + 3) % 13 - 6).to(result.dtype) / 8
    return numbers.expand(result.shape).contiguous() if result.dim() else numbers.reshape([])


def _run(module: nn.Module, call: ModelCall) -> Any:
    return module(*call.args, **call.kwargs)


def _differentiable(call: ModelCall) -> ModelCall:
    """Return the call with arguments that require gradients and share the memory of the old ones."""

    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_(t.is_floating_point() or t.is_complex())

    return ModelCall(*pytree.tree_map_only(Tensor, leaf, (call.args, call.kwargs)))


def _named(head: str, result: Any) -> Outcome:
    leaves = pytree.tree_flatten_with_path(result)[0]
    return {f"{head}{pytree.keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _required(outcome: Outcome) -> Outcome:
    if not outcome:
        raise ValueError("the model returned no tensor: there is nothing to compare")
    return outcome


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(v for v in pytree.tree_leaves(value) if isinstance(v, Tensor))


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore buffers and PyTorch's generator after the block; the generator starts at seed 0."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


_TORCH, _CALLERS = (str(Path(file).parent) for file in (torch.__file__, __file__))


class _Recorder(TorchDispatchMode):
    """Records the place and copies of the results of every dispatched operator; backward ones have no module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Observation] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._inside = [""]
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for hook in (
            register_module_forward_pre_hook(lambda module, _: self._inside.append(self._names.get(module, ""))),
            register_module_forward_hook(lambda module, *_: self._left(), always_call=True),
        ):
            self._hooks.callback(hook.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _left(self) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source, code = ("", "backward") if inside_backward() else _line(sys._getframe(1))
        place = OperationPlace(f"operation {len(self.steps)}", str(func), self._inside[-1], source, code)
        self.steps.append(Observation(place, tuple(whole(t.detach()).clone() for t in _tensors(result))))
        return result


def _line(frame: FrameType | None) -> tuple[str, str]:
    """Return file and line of the model's own code, and its text; empty if all frames below the call are PyTorch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_CALLERS):
        return "", ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}", linecache.getline(file, line).strip()
