"""Distribute samples over processes or machines with joblib.

A task is one sample of one batch: a function of (model, policy, seed, sample, batch). A worker unpickles and compiles a
model once and keeps it by the digest of its bytes. Tasks are sent in waves and results are returned in the order of the
samples, so that a report depends neither on the number of workers nor on the backend, and results do not accumulate.
The active joblib backend is used (``with joblib.parallel_config(backend="dask"): ...``), loky by default.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray
from torch import Tensor

from fxround.significance.bits import require
from fxround.significance.inputs import ModelCall
from fxround.significance.observed import Key, Sample, Watch, compiled_for, sample_stream

# Each thread of a worker process keeps its own model, because running a model sets the model's sample.
_KEPT: Final = threading.local()
_PARENT: Final = os.getpid()


class Workers:
    """A joblib pool that keeps one model under one policy; ``n_jobs`` as joblib's."""

    def __init__(self, n_jobs: int, model: Any, policy: Any, seed: int, fuse: bool, unroll: bool) -> None:
        joblib = require("joblib", "distributed")
        self._dumps = require("cloudpickle", "distributed").dumps
        self._model = self._packed((model, policy, seed, fuse, unroll))
        self._pool = joblib.Parallel(n_jobs=n_jobs, return_as="list")
        self._delayed = joblib.delayed
        self._wave = 2 * max(1, joblib.effective_n_jobs(n_jobs))

    def __enter__(self) -> Workers:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.__exit__(*error)

    def samples(self, call: ModelCall, numbers: Iterable[int], watch: Watch) -> Iterator[Sample]:
        """Yield the values of each sample, in order, as ``sample_stream`` yields them."""
        batch = self._packed((call, dict(watch)))
        rest = iter(numbers)
        while wave := list(islice(rest, self._wave)):
            yield from self._pool(self._delayed(_work)(*self._model, *batch, number) for number in wave)

    def _packed(self, value: Any) -> tuple[NDArray[np.uint8], str]:
        """Return pickled bytes as an array, which joblib sends to each worker once, and their digest."""
        data = self._dumps(value)
        return np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest()


def _work(model: NDArray[np.uint8], key: str, batch: NDArray[np.uint8], at: str, number: int) -> list[tuple[Key, Any]]:
    _leave_interrupts_to_the_parent()
    compiled = _kept("model", key, model, lambda parts: compiled_for(*parts))
    call, watch = _kept("batch", at, batch, lambda parts: parts)
    compiled.prepare(*call.args, **call.kwargs)
    return [(name, _owned(value)) for name, value in sample_stream(compiled, call, number, watch)]


def _kept(slot: str, key: str, data: NDArray[np.uint8], make: Any) -> Any:
    """Return the object that the bytes hold, unpickled once per thread."""
    if getattr(_KEPT, slot, (None,))[0] != key:
        loads = require("cloudpickle", "distributed").loads
        setattr(_KEPT, slot, (key, make(loads(data.tobytes()))))
    return getattr(_KEPT, slot)[1]


def _owned(value: Any) -> Any:
    """Copy tensors into storage of their own, so that a view is not sent with its whole storage."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), value)


def _leave_interrupts_to_the_parent() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the parent decides when to stop."""
    if os.getpid() != _PARENT and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
