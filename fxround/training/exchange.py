"""Averages of DDP's buckets, of which each process computes a part.

Of a bucket of n elements, N processes, and n / N elements for each: every process gets its elements of the gradients of
all, averages them, and sends the averages to all. A process receives 2 (N - 1) / N n elements, as in an all-reduce by a
ring, and computes n / N averages; to gather all gradients, it would receive (N - 1) n elements, and compute n averages.

What is sent must be sent in the same order in all processes. The averages of a bucket are therefore sent after the
gradients of the next bucket, if there is one, and not when the gradients happen to have come.
"""

# No ``from __future__ import annotations``: as in ``distributed``.
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from fxround.errors import FxroundError

# Of (first, parts, out): write the averages of the elements of a bucket from ``first`` on, of which ``parts`` are those
# of the gradients of all processes, and ``out`` is one of them.
Averaging = Callable[[int, list[Tensor], Tensor], None]
# Of messages between two processes, which no other ones have.
_TAG: Final = 0x66787264


@dataclass
class _Sent:
    """A bucket that is on its way: its parts by the ranks, and this process's part of the gradients of all."""

    parts: list[Tensor]
    received: list[Tensor]
    first: int
    averaging: Averaging
    buffer: Tensor
    works: list[Any]
    done: torch.futures.Future[Tensor] = field(default_factory=torch.futures.Future)


class Exchange:
    """The buckets of a module whose gradients the processes of a group average."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self._names = [dist.get_global_rank(group, rank) for rank in range(self._size)]
        self._sent: list[_Sent] = []
        self._kept: dict[int, Tensor] = {}
        self._error: Exception | None = None

    def start(self, bucket: GradBucket, averaging: Averaging) -> torch.futures.Future[Tensor]:
        """Return what DDP's hook returns: the future of the bucket's tensor, with the averages.

        With the last bucket, raises what averaging has raised; FxroundError if it has in another process.
        """
        if bucket.index() == 0:
            self._sent.clear()  # of a backward pass that has failed
            self._error = None
        buffer: Tensor = bucket.buffer()
        each = -(-buffer.numel() // self._size)
        parts = [buffer[rank * each : (rank + 1) * each] for rank in range(self._size)]
        own = parts[self.rank]
        received = [part[: len(own)] for part in self._space(bucket.index(), own, each)]
        received.insert(self.rank, own)
        works = self._messages(parts, received)
        self._sent.append(_Sent(parts, received, each * self.rank, averaging, buffer, works))
        done = self._sent[-1].done
        for sent in self._sent[-2:-1]:
            self._average(sent)
        if bucket.is_last():
            self._average(self._sent[-1])
            for sent in self._sent:
                _wait(sent.works)
            self._require_no_error(buffer.device)
            for sent in self._sent:
                sent.done.set_result(sent.buffer)
            self._sent.clear()
        return done

    def _average(self, sent: _Sent) -> None:
        """Average this process's part when the gradients have come, and start to exchange the averages."""
        _wait(sent.works)
        own = sent.parts[self.rank]
        try:
            # A map reads an element of its operands before it writes that of its result.
            sent.averaging(sent.first, sent.received, own)
        except Exception as error:  # the others wait for the averages, and must know of it, whatever it is
            self._error = self._error or error
        sent.works = self._messages([own] * self._size, sent.parts)

    def _require_no_error(self, device: torch.device) -> None:
        """Raise, in all processes, if one of them could not average."""
        failed = torch.zeros(self._size, dtype=torch.uint8, device=device)
        failed[self.rank] = self._error is not None
        flags = list(failed.split(1))
        _wait(self._messages([flags[self.rank]] * self._size, flags))
        if self._error is not None:
            raise self._error
        if failed.any():
            raise FxroundError(
                f"process {int(failed.nonzero()[0])} of the {self._size} that average gradients has an error, which "
                "its own message says"
            )

    def _messages(self, given: list[Tensor], taken: list[Tensor]) -> list[Any]:
        """Start to send every other process the tensor of its rank, and to receive one from it."""
        works: list[Any] = []
        for rank, name in enumerate(self._names):
            if rank == self.rank:
                continue
            if taken[rank].numel():
                works.append(dist.irecv(taken[rank], name, group=self._group, tag=_TAG))
            if given[rank].numel():
                works.append(dist.isend(given[rank], name, group=self._group, tag=_TAG))
        return works

    def _space(self, index: int, like: Tensor, each: int) -> list[Tensor]:
        """Return a tensor for what each other process sends of a bucket, kept for the next step."""
        kept = self._kept.get(index)
        if kept is None or (kept.shape[1], kept.dtype) != (each, like.dtype):
            kept = self._kept[index] = like.new_empty(self._size - 1, each)
        return list(kept.unbind())


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
