"""Run a model in several processes that share it: what each of them computes.

The subject, the call and the way of sharing are pickled, as for one other process (``process``). Every process makes
the model, shares it out among all of them over a mesh of CPUs, by gloo, and computes with one thread. A process that
fails ends the others: none of them waits longer than the timeout of the process group for one that does not answer.
"""

from __future__ import annotations

import os
import pickle
import pkgutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch import nn

from fxround import new_process
from fxround.capture.processes import is_shared, mesh_of
from fxround.errors import FxroundError, brief, shown, type_of
from fxround.invariance.difference import digest
from fxround.invariance.process import Build, packed, portable
from fxround.invariance.subjects import Observation, Outcome, Subject
from fxround.module.rounded_module import RoundedModule
from fxround.significance.inputs import ModelCall

WORLD_SIZES: Final = (2, 4, 8)
_CHILD: Final = """
import sys
from fxround.invariance.world import serve
serve(sys.argv[1], *map(int, sys.argv[2:]))
"""
# How long a process waits for another one, and how long others may work on when one has failed, in seconds.
_TIMEOUT: Final = 600
_GRACE: Final = 3.0


def require_sharing(model: nn.Module, parallelize: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of processes, each once. Raises for what ``check_invariance`` cannot share a model by."""
    if mesh_of(model) is not None:
        raise ValueError(
            "processes share the model already: pass it as it is before parallelize_module, and the plan or the "
            "function that shares it as parallelize="
        )
    elsewhere = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ValueError(f"the model is on {elsewhere}, and the processes share it on the CPU: pass model.cpu()")
    if not (isinstance(parallelize, str | Mapping) or callable(parallelize) or _is_style(parallelize)):
        raise TypeError(
            f"parallelize is {type_of(parallelize)}; expected a plan of parallelize_module, a function of "
            "(model, mesh), or the name 'module:function' of one"
        )
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise TypeError(f"world_sizes is {shown(sizes)}; expected some numbers of processes, like {WORLD_SIZES}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"world_sizes has {shown(size)}; expected numbers of processes, of 1 or more")
    return tuple(dict.fromkeys(sizes))


def _is_style(value: Any) -> bool:
    """Whether a value is a style of PyTorch's for a whole model."""
    known = sys.modules.get("torch.distributed.tensor.parallel")
    return known is not None and isinstance(value, known.ParallelStyle)


def outcomes(subject: Subject, call: ModelCall, how: Any, size: int, build: Build | None) -> list[Outcome]:
    """Return ``subject.outcome(call)`` of each of ``size`` processes that share the model; how: ``parallelize``.

    Raises FxroundError with the message of the process that failed first.
    """
    first, *others = _answers(subject, call, how, size, build, trace=False)
    return [first, *(first if other is None else other for other in others)]


def steps(subject: Subject, call: ModelCall, how: Any, size: int, build: Build | None) -> list[Observation]:
    """Return the steps of the first of ``size`` processes: whole values, and parts of others. Raises FxroundError."""
    result: list[Observation] = _answers(subject, call, how, size, build, trace=True)[0]
    return result


def _answers(subject: Subject, call: ModelCall, how: Any, size: int, build: Build | None, trace: bool) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="fxround-") as folder:
        Path(folder, "request").write_bytes(packed((portable(subject, build), call, how), _WAYS_OUT))
        ended = new_process.run_together(
            _CHILD, [(folder, str(rank), str(size), str(int(trace))) for rank in range(size)], grace=_GRACE
        )
        answers = [Path(folder, f"answer{rank}") for rank in range(size)]
        missing = [rank for rank, answer in enumerate(answers) if not answer.exists()]
        if missing:
            rank, said = _failure(ended, missing, Path(folder))
            raise FxroundError(
                f"{size} processes that share {subject.name} could not run it, and all of them have ended. Process "
                f"{rank}: {said}"
            )
        return [pickle.loads(answer.read_bytes()) for answer in answers]


_WAYS_OUT: Final = (
    "pass build= for the model, and for parallelize= a plan of PyTorch's styles or the name 'module:function' of a "
    "function that can be imported, or leave the axis 'world_size' out."
)


def _failure(ended: Sequence[Any], missing: Sequence[int], folder: Path) -> tuple[int, str]:
    """Return the process that failed first, and what it said: others fail because it no longer answers."""
    first, process = next((rank, p) for p in ended if (rank := int(p.args[-3])) in missing)
    raised = {rank: file for rank in missing if (file := folder / f"error{rank}").exists()}
    if first in raised:
        earliest = min(raised, key=lambda rank: raised[rank].stat().st_mtime_ns)
        return earliest, raised[earliest].read_text(encoding="utf-8")
    last = next(reversed(process.stderr.strip().splitlines()), "it printed no error")
    return first, f"{brief(last, 400)} (exit status {process.returncode})"


def serve(folder: str, rank: int, size: int, trace: int) -> None:
    """Run the request as process ``rank`` of ``size``, write the answer, and end this process.

    It ends without Python's shutdown, in which gloo may abort a process that ends soon after a collective.
    """
    try:
        _serve(Path(folder), rank, size, bool(trace))
    except Exception as error:
        traceback.print_exc()
        Path(folder, f"error{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(1)
    os._exit(0)


def _serve(folder: Path, rank: int, size: int, trace: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    made, call, how = pickle.loads((folder / "request").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    subject: Any = shared(made if hasattr(made, "outcome") else made(), how, init_device_mesh("cpu", (size,)))
    answer: Any = None
    if trace:
        answer = [step for step in subject.steps(call) if rank == 0]
    else:
        answer = subject.outcome(call)
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, digest(answer))
        answer = None if rank and digests[rank] == digests[0] else answer
    written = folder / f"written{rank}"
    written.write_bytes(pickle.dumps(answer))
    written.rename(folder / f"answer{rank}")
    dist.barrier()


def shared(subject: Any, how: Any, mesh: Any) -> Any:
    """Return the subject with a model that the processes of a mesh share; raises FxroundError if nothing is shared."""
    module = subject.module
    compiled = isinstance(module, RoundedModule)
    model = _shared(module.source if compiled else module, how, mesh)
    if not any(is_shared(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise FxroundError(
            "parallelize= left the model as it is: no parameter is a DTensor, and every process computes all of it"
        )
    if compiled:
        seed, sample = module.rng.tolist()
        settings = module.strict, seed, sample, module.fuse, module.advance, module.unroll_loops
        model = RoundedModule(model, module.policy, *settings)
    return replace(subject, module=model)


def _shared(model: nn.Module, how: Any, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    chosen = pkgutil.resolve_name(how) if isinstance(how, str) else how
    if callable(chosen):
        made = chosen(model, mesh)
        return model if made is None else made
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Parallelize plan key")  # it names no module
        return parallelize_module(model, mesh, chosen)
