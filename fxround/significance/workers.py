"""Distribute samples over processes or machines with joblib.

A task is one sample of one batch: a function of (model, policy, seed, sample, batch). A worker unpickles and compiles a
model once and keeps it by the digest of its bytes. Tasks are sent in waves, one for each worker, and results are
returned in the order of the tasks, so that a report depends neither on the number of workers nor on the backend, and
results do not accumulate. Ctrl-C ends the workers, and what they have not returned is lost.
The active joblib backend is used (``with joblib.parallel_config(backend="dask"): ...``), loky by default.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Self

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray
from torch import Tensor

from fxround.errors import FxroundError, shown
from fxround.locks import waited_for
from fxround.significance.bits import require
from fxround.significance.inputs import ModelCall
from fxround.significance.observed import Key, Sample, Watch, compiled_for, sample_stream
from fxround.significance.progress import LOGGER
from fxround.significance.stopping import Stopped, workers

# Each thread of a worker process keeps its own model, because running a model sets the model's sample.
_KEPT: Final = threading.local()
_TURN: Final = waited_for()


# Pickled bytes as an array, which joblib sends to each worker once, and their digest.
Packed = tuple[NDArray[np.uint8], str]


def require_jobs(n_jobs: Any) -> None:
    """Raise ValueError unless the argument is a number of workers."""
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or n_jobs == 0:
        raise ValueError(f"n_jobs is {shown(n_jobs)}; expected the number of workers, or -1 for all cores")


class Pool:
    """A joblib pool that runs tasks in waves, and returns their results in order; ``n_jobs`` as joblib's."""

    def __init__(self, n_jobs: int) -> None:
        joblib = require("joblib", "distributed")
        # Ray's backend is a subclass.
        if type(joblib.parallel.get_active_backend()[0]) is joblib.parallel.BACKENDS["multiprocessing"]:
            raise ValueError(
                "the active joblib backend is 'multiprocessing', which forks this process without the threads of "
                "PyTorch, and waits forever for a worker that dies; expected 'loky', 'threading', 'dask' or 'ray'"
            )
        self._dumps = require("cloudpickle", "distributed").dumps
        self._pool = joblib.Parallel(n_jobs=n_jobs, batch_size=1)
        self._delayed = joblib.delayed
        self._wave = max(1, joblib.effective_n_jobs(n_jobs))

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.__exit__(*error)

    def ordered(self, work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield what ``work`` returns for the arguments of each task, in the order of the tasks.

        Ctrl-C alone ends the results early. If a worker dies, the tasks of its wave run once more. Raises what ``work``
        raises, and FxroundError for a wave in which workers die twice.
        """
        with suppress(Stopped):
            yield from self.every(work, tasks)

    def every(self, work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield as ``ordered`` does, but Ctrl-C raises KeyboardInterrupt."""
        rest = iter(tasks)
        while wave := list(islice(rest, self._wave)):
            results = self._results(work, wave)
            yield from (result for result, _ in zip(results, wave, strict=True))

    def _results(self, work: Callable[..., Any], wave: list[tuple[Any, ...]]) -> list[Any]:
        if _TURN._is_owned():  # this thread is itself a worker: others would wait for its turn to end
            return [work(*task) for task in wave]
        for last in (False, True):
            try:
                with workers():
                    return list(self._pool(self._delayed(_worked)(os.getpid(), work, task) for task in wave))
            except BrokenProcessPool as error:
                said = str(error).partition("\n")[0]
                if last:
                    raise FxroundError(
                        f"worker processes died twice, of {self._wave}; expected the results of all: {said} If memory "
                        "is short, ask for fewer workers by n_jobs, or split the data by batch_size"
                    ) from error
                LOGGER.warning("a worker process died, of %d; what they had to do is done again: %s", self._wave, said)
        raise AssertionError("the last attempt returns or raises")

    def packed(self, value: Any) -> Packed:
        """Return a value for a task's arguments, which ``kept`` unpacks in a worker."""
        data = self._dumps(value)
        return np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest()


class Workers(Pool):
    """A pool that keeps one model under one policy."""

    def __init__(self, n_jobs: int, model: Any, policy: Any, seed: int, fuse: bool, unroll: bool) -> None:
        super().__init__(n_jobs)
        self._model = self.packed((model, policy, seed, fuse, unroll))

    def samples(self, call: ModelCall, numbers: Iterable[int], watch: Watch) -> Iterator[Sample]:
        """Yield the values of each sample, in order, as ``sample_stream`` yields them."""
        batch = self.packed((call, dict(watch)))
        return self.ordered(_work, ((self._model, batch, number) for number in numbers))


def _work(model: Packed, batch: Packed, number: int) -> list[tuple[Key, Any]]:
    compiled = kept("model", model, lambda parts: compiled_for(*parts))
    call, watch = kept("batch", batch, lambda parts: parts)
    compiled.prepare(*call.args, **call.kwargs)
    return [(name, owned(value)) for name, value in sample_stream(compiled, call, number, watch)]


def kept(slot: str, packed: Packed, make: Callable[[Any], Any]) -> Any:
    """Return what ``make`` returns for a packed value, which is unpacked once per thread; a slot keeps the latest."""
    data, key = packed
    if getattr(_KEPT, slot, (None,))[0] != key:
        loads = require("cloudpickle", "distributed").loads
        setattr(_KEPT, slot, (key, make(loads(data.tobytes()))))
    return getattr(_KEPT, slot)[1]


def owned(value: Any) -> Any:
    """Copy tensors into storage of their own, so that a view is not sent with its whole storage."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), value)


def _worked(parent: int, work: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    """Return what ``work`` returns in a worker of the process ``parent``.

    One thread of a process works at a time: a capture has switches off, such as oneDNN's, for all threads of its
    process, so that results of PyTorch's own kernels would depend on whether another thread captures meanwhile.
    """
    _prepare_worker(parent)
    with _TURN:
        return work(*task)


def _prepare_worker(parent: int) -> None:
    """Let a process of workers end at any moment: Ctrl-C reaches it, and its parent decides when to stop.

    It ignores Ctrl-C, and tqdm, which PyTorch uses, makes no semaphore for other processes, of whose loss the system's
    tracker would warn.
    """
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and not hasattr(bars, "_lock"):
        bars.set_lock(threading.RLock())
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
