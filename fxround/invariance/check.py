"""``fxround.check_invariance``: run a model in ways that must not change its result, and compare the bits.

Every axis makes groups of runs that must agree (``cases``). If two runs differ, they run again operation by operation
to find the first one that differs. State, gradients, sample, generator, threads and instruction set are restored
afterwards. An axis that does not apply to a model is reported with the reason; if none applies, it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from fxround.choices import REPRODUCIBLE
from fxround.compiler.signature import require_module
from fxround.errors import FxroundError, shown, type_of
from fxround.exported.program import LoadedModule
from fxround.invariance import world
from fxround.invariance.cases import AXES, Axis, Case, CaseGroup, Inapplicable, Setting, mapped, taken
from fxround.invariance.cases import world_size as of_world_sizes
from fxround.invariance.difference import BatchRows, comparable, digest, distinct, first_difference, largest, shapes
from fxround.invariance.process import Build, elsewhere
from fxround.invariance.report import AxisResult, InvarianceReport
from fxround.invariance.subjects import Compiled, Eager, Observation, OperationPlace, Outcome, Subject
from fxround.invariance.world import WORLD_SIZES, require_sharing
from fxround.module import compile
from fxround.module.rounded_module import PolicyLike, RoundedModule
from fxround.runtime.cpu.code import instruction_set
from fxround.significance.inputs import ModelCall, calls
from fxround.significance.progress import progress as shown_progress
from fxround.significance.stopping import interruptible


def check_invariance(
    model: nn.Module,
    inputs: Any,
    axes: Sequence[str] = tuple(AXES),
    policy: PolicyLike | None = REPRODUCIBLE,
    *,
    gradients: bool = False,
    dim: int = 0,
    build: Build | None = None,
    first: bool = True,
    progress: bool | None = None,
    parallelize: Any = None,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> InvarianceReport:
    """Count the distinct results of a model when its batch, memory layout, threads, code, device or process change.

    Args:
        model: a ``torch.nn.Module``, a ``RoundedModule`` or a ``LoadedModule``. It is not changed.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or a
            DataLoader, of which the first batch is used.
        axes: some of ``"batch"`` (a row in batches of other sizes), ``"slice"`` (its position, and the tensor that the
            batch is a slice of), ``"stride"`` (the memory layout of the arguments), ``"threads"``, ``"isa"`` (the
            instruction set), ``"device"`` (the CPU and every CUDA device), ``"process"`` (a new process) and
            ``"world_size"`` (the number of processes that share the model, by gloo on this machine).
        policy: as for ``fxround.compile``; None checks stock PyTorch. A compiled or loaded module keeps its own policy.
        gradients: whether to compare the gradients of parameters and arguments as well, in the model's own mode.
        dim: the dimension of the arguments that is the batch.
        build: a function or ``"module:function"`` that makes the model in another process, for a model that cannot be
            pickled.
        first: whether to find the first operation that differs; this keeps the values of one run in memory.
        progress: whether to show progress, a step for each axis; None shows it in a terminal or a notebook.
        parallelize: for the axis ``"world_size"``: how processes share the model. A plan of PyTorch's
            ``parallelize_module``, a function of (model, mesh) that shares the model itself, or its name
            ``"module:function"``. The other processes import it, or cloudpickle sends it.
        world_sizes: the numbers of processes that are compared with this one.

    Returns:
        An ``InvarianceReport`` with one ``AxisResult`` per axis. Ctrl-C ends the comparison after the running axis and
        returns the axes compared so far; such a report is not invariant.

    Raises:
        ValueError: for an unknown axis, a dimension that no argument has, inputs to which no axis applies, or a policy
            for a compiled module.
        TypeError: for a ``dim`` that is no int, and another type of model under ``policy=None``.
        FxroundError: for a model that no other process can run, and if one of several processes fails; also what
            ``compile`` and the model raise.

    Example::

        report = fxround.check_invariance(model, x, ("batch", "threads", "isa"))
        report.check()
        print(report["batch"].distinct)
    """
    asked = _axes(axes)
    if parallelize is not None and AXES["world_size"] not in asked:
        raise ValueError("parallelize is for the axis 'world_size', which is not among axes")
    call = next(calls(getattr(model, "source", model), inputs))
    _require_dim(dim, call)
    comparison = _Comparison(_subject(model, policy, gradients), call, dim, build, first, parallelize)
    asked = [_of_sizes(axis, comparison.subject, parallelize, world_sizes) for axis in asked]
    compared: list[AxisResult] = []
    label = f"{comparison.subject.name} invariance"
    with shown_progress(label, len(asked), progress) as tick, interruptible() as stopped:
        for axis in asked:
            if stopped():
                break
            compared.append(comparison.axis(axis))
            tick(axis.name)
    remaining = tuple(axis.name for axis in asked[len(compared) :])
    if not remaining and not any(axis.distinct for axis in compared):
        reasons = "; ".join(f"{axis.axis}: {axis.reason}" for axis in compared)
        raise ValueError(f"no axis applies to {comparison.subject.name} and these inputs: {reasons}")
    return InvarianceReport(comparison.subject.name, comparison.subject.policy, gradients, tuple(compared), remaining)


def _axes(names: Sequence[str]) -> list[Axis]:
    if isinstance(names, str):
        names = (names,)
    for name in names:
        if name not in AXES:
            near = get_close_matches(str(name), AXES, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"unknown axis {shown(name)}{hint} The axes are {', '.join(AXES)}.")
    if not names:
        raise ValueError(f"axes is empty; expected some of {', '.join(AXES)}")
    return [AXES[name] for name in dict.fromkeys(names)]


def _require_dim(dim: Any, call: ModelCall) -> None:
    """Raise for a batch dimension that no argument has; without one, axes that need it say why they do not apply."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is {type_of(dim)}; expected an int")
    ranks = [t.dim() for t in call.tensors] or [0]
    if dim and not -min(ranks) <= dim < max(ranks):
        shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors) or "no tensor"
        raise ValueError(f"dim is {dim}; expected a dimension of the arguments, which are {shapes}")


def _subject(model: Any, policy: PolicyLike | None, gradients: bool) -> Subject:
    if isinstance(model, RoundedModule | LoadedModule):
        if policy != REPRODUCIBLE:
            raise ValueError("the model is compiled, and keeps its own policy: leave out policy=, or pass the original")
        if gradients and isinstance(model, LoadedModule):
            raise ValueError("gradients of an exported program are not compared: pass the compiled module")
        return Compiled(model, gradients)
    if policy is not None:
        return Compiled(compile(model, policy), gradients)
    require_module(model)
    return Eager(model, gradients)


def _of_sizes(axis: Axis, subject: Subject, parallelize: Any, world_sizes: Sequence[int]) -> Axis:
    """Return the axis of several processes with their numbers; any other axis as it is."""
    if axis.name != "world_size" or parallelize is None:
        return axis
    if not isinstance(subject, Compiled | Eager) or isinstance(subject.module, LoadedModule):
        raise ValueError("an exported program has no parameters that processes can share: pass the compiled module")
    source = subject.module.source if isinstance(subject.module, RoundedModule) else subject.module
    sizes = require_sharing(source, parallelize, world_sizes)
    return replace(axis, groups=partial(of_world_sizes, sizes=sizes))


@dataclass(frozen=True)
class _Comparison:
    """A subject, the call from which all cases are made, how processes share the model, copies of the subject on other
    devices, and what several processes have computed, by their number.
    """

    subject: Subject
    call: ModelCall
    dim: int
    build: Build | None
    first: bool
    parallelize: Any = None
    moved: dict[str, Subject] = field(default_factory=dict)
    shared: dict[int, list[Outcome]] = field(default_factory=dict)

    def axis(self, axis: Axis) -> AxisResult:
        """Return the result of an axis, with the reason if it does not apply."""
        try:
            groups = list(axis.groups(self.call, self.dim, axis.name == "isa" and self.subject.stock(self.call)))
            parts = [self._group(axis.name, group) for group in groups]
        except Inapplicable as reason:
            return AxisResult(axis.name, 0, 0, axis.meaning, reason=str(reason))
        shown = next((part for part in parts if not part.invariant), parts[0])
        return AxisResult(
            axis.name,
            max(part.distinct for part in parts),
            sum(part.runs for part in parts),
            "; ".join(part.compared for part in parts),
            tuple(label for part in parts for label in part.differing),
            tuple(label for part in parts for label in part.refused),
            shown.first,
            shown.share,
            shown.largest,
            "; ".join(part.reason for part in parts if part.reason),
            tuple(_most(parts).items()),
            shown.captured_differently,
        )

    def _group(self, axis: str, group: CaseGroup) -> AxisResult:
        rows = self._result_rows() if group.cases[0].row else None
        ran: list[tuple[Case, Outcome]] = []
        refused = []
        for case in group.cases:
            try:
                ran.append((case, comparable(self._outcome(case), rows, case.row)))
            except FxroundError:
                raise
            except Exception as error:  # the model's own code may raise anything for these arguments
                if case.setting != Setting() or case.label in ("row-major", "copied", "here", "a batch of its own"):
                    raise
                refused.append(f"{case.label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        if len(ran) < 2:
            return AxisResult(axis, 0, len(ran), group.what, refused=tuple(refused), reason=_refusal(refused))
        (reference, expected), *others = ran
        digests = [digest(outcome) for _, outcome in ran]
        wrong = [(case, got) for (case, got), d in zip(others, digests[1:], strict=True) if d != digests[0]]
        share, gap = largest(expected, wrong[0][1]) if wrong else (0.0, 0.0)
        place, differently = self._first(reference, wrong[0][0]) if wrong and self.first else (None, False)
        labels = tuple(case.label for case, _ in wrong)
        counts = tuple(distinct(digests).items())
        return AxisResult(
            axis,
            len(set(digests)),
            len(ran),
            group.what,
            labels,
            tuple(refused),
            place,
            share,
            gap,
            "",
            counts,
            differently,
        )

    def _outcome(self, case: Case) -> Outcome:
        setting = case.setting
        if setting.process:
            result = elsewhere(self.subject, case.call, setting.isa, dict(setting.environment), self.build, trace=False)
            assert isinstance(result, dict)
            return result
        if setting.world_size:
            return self._of_processes(case, setting.world_size)[setting.rank]
        subject, call = self._placed(case)
        with _set(setting):
            return {name: value.cpu() for name, value in subject.outcome(call).items()}

    def _steps(self, case: Case) -> Iterator[Observation]:
        setting = case.setting
        if setting.process:
            steps = elsewhere(self.subject, case.call, setting.isa, dict(setting.environment), self.build, trace=True)
            assert isinstance(steps, list)
            yield from steps
            return
        if setting.world_size:
            yield from world.steps(self.subject, case.call, self.parallelize, setting.world_size, self.build)
            return
        subject, call = self._placed(case)
        with _set(setting):
            yield from subject.steps(call)

    def _of_processes(self, case: Case, size: int) -> list[Outcome]:
        """Return what each of ``size`` processes computes, which run once."""
        if size not in self.shared:
            self.shared[size] = world.outcomes(self.subject, case.call, self.parallelize, size, self.build)
        return self.shared[size]

    def _placed(self, case: Case) -> tuple[Subject, ModelCall]:
        """Return the subject and the call on the device of a case."""
        device = case.setting.device
        if device is None:
            return self.subject, case.call
        if device not in self.moved:
            self.moved[device] = self.subject.on(device)
        return self.moved[device], mapped(case.call, lambda t: t.to(device))

    def _first(self, reference: Case, other: Case) -> tuple[OperationPlace | None, bool]:
        """Return the first operation of ``other`` that differs from ``reference``, and whether the graphs do."""
        rows = None
        if other.row:
            few, more = (shapes(self.subject.steps(taken(self.call, self.dim, range(n)))) for n in (_PROBE, _PROBE + 1))
            rows = BatchRows(_PROBE, few, more)
        parts, pair = other.setting.world_size is not None, (reference.row, other.row)
        return first_difference(list(self._steps(reference)), self._steps(other), rows, pair, parts)

    def _result_rows(self) -> BatchRows:
        """Return which results hold the batch. Raises Inapplicable if none does."""
        few, more = (
            {name: tuple(t.shape) for name, t in self.subject.outcome(taken(self.call, self.dim, range(n))).items()}
            for n in (_PROBE, _PROBE + 1)
        )
        rows = BatchRows(_PROBE, few, more)
        if not any(rows.holds(name) for name in few):
            seen = ", ".join(f"{name} {shape}" for name, shape in few.items())
            raise Inapplicable(f"no result has rows that follow those of the arguments ({seen})")
        return rows


# The probes have _PROBE and _PROBE + 1 rows. A batch of 1 could be broadcast and an empty one could be refused.
_PROBE = 5


@contextlib.contextmanager
def _set(setting: Setting) -> Iterator[None]:
    """Set threads and instruction set within the block."""
    before = torch.get_num_threads()
    with instruction_set(setting.isa) if setting.isa else contextlib.nullcontext():
        try:
            torch.set_num_threads(setting.threads or before)
            yield
        finally:
            torch.set_num_threads(before)


def _most(parts: Sequence[AxisResult]) -> dict[str, int]:
    """Return for each result the greatest number of distinct values that a group has."""
    most: dict[str, int] = {}
    for name, count in (pair for part in parts for pair in part.by_result):
        most[name] = max(count, most.get(name, 0))
    return most


def _refusal(refused: Sequence[str]) -> str:
    return (
        f"the model refused {len(refused)} runs, the first {refused[0]}" if refused else "one run, nothing to compare"
    )
