"""Processes that share a model must have the same graph before any of them runs it, and make the same calls.

If one of them had another policy or another version, or could not capture the model, the others would wait for it in a
collective, or would compute with what it sends. They therefore exchange what they made of a model when they have
captured it, and all of them raise an error if it differs. Every call begins with an exchange of what it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.errors import CaptureError, FxroundError
from fxround.graph.dialect import AddProcesses, graphs_of
from fxround.graph.site import SAME, operator_name
from fxround.policy import Policy
from fxround.runtime.processes import MADE_AGAIN
from fxround.version import VERSION

if TYPE_CHECKING:
    from fxround.compiler.executable import Entry
    from fxround.compiler.pipeline import Pipeline

# The first version of PyTorch whose DTensor passes the tests of several processes: with 2.11 and 2.12, sequence
# parallel layers fail them.
SINCE: Final = "2.13"
_COLLECTIVE: Final = "_c10d_functional."
# Collectives of fxround's.
_COLLECTIVES: Final = (AddProcesses.overload, SUM_OF_PROCESSES, EXTREME_OF_PROCESSES)


def agreed(mesh: Any, pipeline: Pipeline, make: Callable[[], Entry], shapes: Sequence[Any] = ()) -> Entry:
    """Return the entry that ``make`` returns, after every process of a device mesh has made the same.

    shapes: of the arguments in this process, which must be those in the others.

    Raises CaptureError for a PyTorch whose DTensor is not known, what ``make`` raises here, FxroundError in the other
    processes then, and in all of them if their entries differ.
    """
    partners = Partners(mesh)
    partners.meet("needs a graph")
    entry, error = None, None
    try:
        require_known_dtensor()
        entry = make()
    except Exception as raised:  # the other processes must know of it, whatever it is
        error = raised
    described = described_settings(pipeline) | {"list of argument shapes": str(list(shapes))}
    require_agreement(mesh, described if entry is None else described | {"graph": _graph(entry)}, error)
    assert entry is not None
    return replace(entry, partners=partners)


@dataclass(frozen=True)
class Partners:
    """The processes of a device mesh that share a model: what a call must have in all of them.

    A collective does not say what it is for: a process that makes another call than the others, or one with other
    sizes, would take their numbers for its own.
    """

    mesh: Any

    def meet(self, call: str, shapes: Sequence[Any] = (), rng: Tensor | None = None) -> None:
        """Raise FxroundError in all processes unless all have such a call. It exchanges 24 bytes of each process.

        call: what it is, in words. shapes: of the arguments. rng: (seed, sample).
        """
        if not dist.is_initialized():
            raise FxroundError(
                f"processes share the model over {self.mesh}, and their process group does not exist. {MADE_AGAIN}"
            )
        seed, sample = (0, 0) if rng is None else rng.tolist()
        digest = int(_digest(f"{call} {shapes}")[:15], 16)
        own = torch.tensor([digest, seed, sample], device=self.mesh.device_type)
        said = [own.clone() for _ in range(self.mesh.size())]
        dist.all_gather(said, own, group=self.mesh.get_group())
        if all(torch.equal(other, own) for other in said):
            return
        described = {"kind of call": f"one that {call}", "list of argument shapes": str(shapes)}
        require_agreement(self.mesh, described | {"seed": str(seed), "sample": str(sample)})


def require_agreement(mesh: Any, described: Mapping[str, str], error: Exception | None = None) -> None:
    """Return if every process of a device mesh calls this with the same descriptions, and none with an error.

    described: what must be the same in all processes, by its name in a message.

    Raises the error of this process, or FxroundError for an error or another description of any process, in all of
    them. Another description, which may have caused an error, comes first; a process with an error may lack some.
    """
    said: list[Any] = [None] * mesh.size()
    dist.all_gather_object(said, (_told(error), dict(described)), group=mesh.get_group())
    names = [name for name in said[0][1] if all(name in made for _, made in said)]
    _require_equal([{name: made[name] for name in names} for _, made in said], "processes share the model", error)
    if error is not None:
        raise error
    failed = next((rank for rank, (failure, _) in enumerate(said) if failure), None)
    if failed is not None:
        raise FxroundError(
            f"process {failed} of the {mesh.size()} that share the model has an error, so that no process runs it: "
            f"{said[failed][0]}"
        )


def require_same(group: dist.ProcessGroup, doing: str, **own: object) -> None:
    """Raise FxroundError in all processes of a group unless all have the same versions and values of this call.

    Every process must call it. doing: what the processes do, at the beginning of the message.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    values = {name.replace("_", " "): _said(value) for name, value in own.items()}
    dist.all_gather_object(said, _versions() | values, group=group)
    _require_equal(said, doing)


def _require_equal(said: Sequence[Mapping[str, str]], doing: str, error: Exception | None = None) -> None:
    """Raise FxroundError, caused by an error if there is one, if processes have said different things."""
    first = said[0]
    for rank, other in enumerate(said):
        changed = next((what for what in first if first[what] != other[what]), "")
        if changed:
            raise FxroundError(
                f"{doing}, and process {rank} has another {changed} than process 0: {other[changed]}, not "
                f"{first[changed]}. All of them need the same code, policy, seed, arguments and versions."
            ) from error


def _told(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def require_known_dtensor() -> None:
    """Raise CaptureError for a PyTorch whose DTensor does not pass the tests."""
    if torch.__version__ < SINCE:
        raise CaptureError(
            f"processes share the model, whose parameters are DTensors: this needs torch {SINCE} or later, "
            f"and this is torch {torch.__version__}"
        )


def described_settings(pipeline: Pipeline) -> dict[str, str]:
    """Return the settings that must be the same in all processes, by their names in a message."""
    setting = f"strict={pipeline.strict} fuse={pipeline.fuse} unroll_loops={pipeline.unroll}"
    return _versions() | {"policy": _said(pipeline.policy), "setting": setting}


def _versions() -> dict[str, str]:
    return {"version of fxround": VERSION, "version of PyTorch": str(torch.__version__)}


def _said(value: object) -> str:
    """Return a value in a message; of a policy, its name and a digest of its rules."""
    return f"{value.name!r} {_digest(repr(value.to_dict()))}" if isinstance(value, Policy) else str(value)


def _graph(entry: Entry) -> str:
    return _digest("\n".join(map(_text, graphs_of(entry.lowered))))


def _text(graph: fx.GraphModule) -> str:
    """Return what a graph computes and exchanges, with its arithmetic, and dtypes and fixed sizes of what is exchanged.

    What is moved, and other sizes, differ between processes: each has another place in a tensor, and the last ones may
    have fewer elements.
    """
    named = [(operator_name(node), node) for node in graph.graph.nodes]
    chosen = [(name, node) for name, node in named if name.startswith(("fxround.", _COLLECTIVE))]
    lines = [
        " ".join([name, *(a for a in node.args if isinstance(a, str)), _sent(name, node)]) for name, node in chosen
    ]
    return "\n".join([*lines, graph.meta.get(SAME, "")])


def _sent(name: str, node: fx.Node) -> str:
    """Return the dtypes and the fixed sizes of what a node sends to other processes; "" if it sends nothing.

    Symbolic sizes follow from those of the arguments, which every call compares, by other expressions of each process.
    """
    if not name.startswith(_COLLECTIVE) and node.target not in _COLLECTIVES:
        return ""
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    sent = [x for x in values if isinstance(x, Tensor)]
    return " ".join(f"{x.dtype} {[size if isinstance(size, int) else '' for size in x.shape]}" for x in sent)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
