"""What the processes of ``fully_shard`` exchange: parameters before a call, gradients in its backward pass.

A call gathers all parameters of the model, group by group, whatever its graph needs: the graphs of two processes may
differ, as their arguments do. With the parameters, each process sends a digest of what must be the same in all of them,
so that none goes on alone. In a backward pass, process r gets part r of every gradient from all processes, and averages
it (``averages``). An average that draws random bits numbers them by the elements of the whole parameter; where the
processes share a dimension inside of others, it is computed of whole gradients, and each process keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fxround.capture.fully_sharded import Group, Part, groups_of, mesh_of_groups, pieces_of, shard_again
from fxround.compiler.agreement import require_agreement, require_known_dtensor
from fxround.compiler.averages import Averages, Call
from fxround.errors import FxroundError
from fxround.locks import applied
from fxround.python_model.functions import Sharing

# A buffer begins with a digest of what must be the same in all processes, a byte that says whether its process has an
# error, and one for each parameter that says whether it has a gradient. What follows is aligned.
_DIGEST: Final = 32
_ALIGNED: Final = 64


class FullySharded:
    """A model that ``fully_shard`` was called for, and how its processes average gradients.

    Args:
        model: the model.
        mesh: the device mesh of the processes.

    ``rank`` and ``size`` are this process and the number of processes; the compiled module sets ``averages``.
    """

    averages: Averages

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        require_known_dtensor()
        self.model, self.mesh = model, mesh
        self.rank, self.size = dist.get_rank(self.group), mesh.size()
        self._groups: tuple[Group, ...] = ()
        self._names: dict[int, str] = {}
        self._held: list[nn.Parameter] = []

    @staticmethod
    def of(model: nn.Module) -> FullySharded | None:
        """Return the processes of a model; None if ``fully_shard`` was called for no part of it.

        A method has the parameters of its module. Raises CaptureError for settings of ``fully_shard`` that change what
        is computed.
        """
        model = model.source if isinstance(model, Sharing) else model
        mesh = mesh_of_groups(model)
        return None if mesh is None else FullySharded(model, mesh)

    def renew(self) -> None:
        """Find the parameters again; register parts where a call of the model itself has left whole ones."""
        shard_again(self.model)
        groups = groups_of(self.model)
        held = [part.parameter for group in groups for part in group.parts]
        if list(map(id, held)) != list(map(id, self._held)):
            mesh_of_groups(self.model)  # raises for settings that were made since
            self._groups, self._held = groups, held
            self._names = {id(p): name for name, p in self.model.named_parameters()}

    def whole(self, inputs: Sequence[Any], described: Mapping[str, str], call: Call) -> list[Any]:
        """Return the inputs of a graph with whole parameters in the places of parts.

        described: what must be the same in all processes, in words. Raises FxroundError in all of them if it is not.
        """
        parameters = [part.parameter for group in self._groups for part in group.parts]
        if call.trains:
            self._require_shared(parameters)
        said = {**described, "average of gradients": self.averages.said, "call": str(call)}
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            made = applied(_Whole, self, self._groups, said, call, *parameters)
        else:
            made = self.gather(self._groups, said)
        wholes = {id(p): tensor for p, tensor in zip(parameters, made, strict=True)}
        return [wholes.get(id(value), value) for value in inputs]

    def _require_shared(self, parameters: Sequence[Tensor]) -> None:
        """Raise FxroundError for parameters that each process would train for itself."""
        shared = set(map(id, parameters))
        others = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in shared]
        if others and self.size > 1:
            raise FxroundError(
                f"fully_shard was not called for {others[0]}{' and others' if len(others) > 1 else ''}, whose gradient "
                "would be that of this process alone: call fully_shard for the model itself, too, or let the parameter "
                "require no gradient"
            )

    def failed(self, error: Exception) -> None:
        """Say to the other processes, which wait in ``whole``, that this one has an error, which the caller raises."""
        if self.size > 1 and self._groups:
            layout = _Layout.of_parts(self._groups[0].parts)
            self._gathered(layout.buffer(self._groups[0], failed=True))
            require_agreement(self.mesh, {}, error)

    @torch.no_grad()
    def gather(self, groups: Sequence[Group], described: Mapping[str, str]) -> list[Tensor]:
        """Return whole parameters, in the order of the groups."""
        made: list[Tensor] = []
        if self.size == 1:
            return [_local(part.parameter).detach() for group in groups for part in group.parts]
        digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
        for group in groups:
            layout = _Layout.of_parts(group.parts)
            sent = layout.buffer(group, digest)
            for j, part in enumerate(group.parts):
                layout.item(sent, j, part.shape(self.rank)).copy_(_local(part.parameter))
            rows = self._gathered(sent)
            if group is groups[0]:
                self._require_same(rows, described)
            for j, part in enumerate(group.parts):
                made.append(torch.empty(part.whole, dtype=part.parameter.dtype, device=sent.device))
                for rank, piece in enumerate(pieces_of(made[-1], part, self.size)):
                    piece.copy_(layout.item(rows[rank], j, piece.shape))
        return made

    @torch.no_grad()
    def reduce(self, groups: Sequence[Group], call: Call, gradients: Iterable[Tensor | None]) -> list[Any]:
        """Return the averages of gradients, in the order of the groups: DTensors, of which this process has its parts.

        None for a parameter that gets no gradient now: in no process, or because gradients are accumulated. Raises what
        a process raises in all of them.
        """
        given, error = iter(gradients), None
        owned: list[list[Tensor | None]] = []
        for group in groups:
            owned.append([None] * len(group.parts))
            for j, part in enumerate(group.parts):
                gradient = next(given)
                if not part.parameter.requires_grad or error is not None:
                    continue
                try:
                    place = part.place() if self._draws(part) else None
                    owned[-1][j] = self.averages.own(self._name(part), gradient, call, group.reduces, place)
                except Exception as raised:  # the other processes must know of it, whatever it is
                    error = raised
        waiting = [i for i, group in enumerate(groups) if group.reduces and _trained(group.parts)]
        if error is not None and (self.size == 1 or not waiting):
            raise error
        made: list[list[Any]] = [[None] * len(group.parts) for group in groups]
        for i in reversed(waiting):
            for j, contributions in self._exchanged(groups[i], owned[i], error):
                made[i][j] = self._averaged(groups[i].parts[j], contributions)
        return [gradient for row in made for gradient in row]

    def _averaged(self, part: Part, contributions: Sequence[Tensor]) -> Any:
        """Return the average of what the processes contributed: of whole gradients, or of the part of this process."""
        from torch.distributed.tensor import DTensor

        average, is_whole = contributions[0], self._is_whole(part)
        if average.numel():
            rank = None if is_whole else self.rank
            place = part.place(rank) if self._draws(part) else None
            average = self.averages.average(self._name(part), contributions, place)
        if is_whole:
            average = pieces_of(average, part, self.size)[self.rank].contiguous()
        p: Any = part.parameter
        return DTensor.from_local(
            average, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _exchanged(
        self, group: Group, own: Sequence[Tensor | None], error: Exception | None
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the positions of parameters of which some process has a gradient, with what all of them contribute."""
        parts = group.parts
        if self.size == 1:
            yield from ((j, [gradient]) for j, gradient in enumerate(own) if gradient is not None)
            return
        spread = [j for j in _trained(parts) if not self._is_whole(parts[j])]
        shared = [j for j in _trained(parts) if self._is_whole(parts[j])]
        layout = _Layout.of_parts([parts[j] for j in spread], len(parts))
        sent = torch.stack([layout.buffer(group, failed=error is not None)] * self.size)
        for j, gradient in enumerate(own):
            sent[:, _DIGEST + 1 + j] = gradient is not None
        for k, j in enumerate(spread):
            whole = own[j]
            if whole is not None:
                for rank, piece in enumerate(pieces_of(whole, parts[j], self.size)):
                    layout.item(sent[rank], k, piece.shape).copy_(piece)
        rows = torch.empty_like(sent)
        dist.all_to_all_single(rows, sent, group=self.group)
        self._require_same(rows, {}, error)
        flags = rows[:, _DIGEST + 1 : _DIGEST + 1 + len(parts)].bool()
        given = flags.any(0).tolist()
        if self.averages.needs_all:
            self._require_all(parts, given, flags.all(0).tolist())
        for k, j in enumerate(spread):
            if given[j]:
                yield j, [layout.item(row, k, parts[j].shape(self.rank)) for row in rows]
        for j in (j for j in shared if given[j]):
            p, whole = parts[j].parameter, own[j]
            one = torch.zeros(parts[j].whole, dtype=p.dtype, device=sent.device) if whole is None else whole
            whole_rows = self._gathered(one.reshape(-1).view(torch.uint8))
            yield j, [row.view(p.dtype).view(parts[j].whole) for row in whole_rows]

    def _require_all(self, parts: Sequence[Part], some: Sequence[bool], every: Sequence[bool]) -> None:
        """Raise FxroundError, in all processes, for a parameter of which some have a gradient and others none."""
        for part, one, all_ in zip(parts, some, every, strict=True):
            if one and not all_:
                raise FxroundError(
                    f"some processes have a gradient of {self._name(part)}, and others none: every parameter needs a "
                    "gradient from each micro-batch"
                )

    def _gathered(self, sent: Tensor) -> Tensor:
        """Return the bytes of all processes, a row for each."""
        rows = sent.new_empty(self.size, sent.numel())
        dist.all_gather_single(rows.view(-1), sent, group=self.group)
        return rows

    def _require_same(self, rows: Tensor, described: Mapping[str, str], error: Exception | None = None) -> None:
        """Raise in all processes if one has an error or another description. rows: the buffers of all of them."""
        heads = rows[:, : _DIGEST + 1]
        if bool((heads != heads[:1]).any()) or bool(heads[:, _DIGEST].any()):
            require_agreement(self.mesh, described, error)

    def _is_whole(self, part: Part) -> bool:
        """Whether each process averages all that the processes share: the elements of a part have no numbers."""
        return self._draws(part) and not part.has_places

    def _draws(self, part: Part) -> bool:
        return self.averages.draws(self._name(part), part.parameter.dtype)

    def _name(self, part: Part) -> str:
        return self._names[id(part.parameter)]

    @property
    def group(self) -> Any:
        """The process group. Raises FxroundError if it is gone."""
        try:
            group = self.mesh.get_group()
            dist.get_rank(group)
        except (ValueError, RuntimeError, KeyError, AssertionError) as error:
            raise FxroundError(
                "the process group of the mesh that fully_shard was called with was destroyed, so that nothing can be "
                f"gathered ({error}): compile and call the model before destroy_process_group()"
            ) from error
        return group


@dataclass(frozen=True)
class _Layout:
    """Where parts of parameters are in a buffer of bytes, which has the same size in every process."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    size: int

    @staticmethod
    def of_parts(parts: Sequence[Part], flags: int = 0) -> _Layout:
        """Return the layout of some parameters. flags: how many bytes say whether parameters have gradients."""
        end, offsets = _aligned(_DIGEST + 1 + flags), []
        for part in parts:
            offsets.append(end)
            end += _aligned(part.shape(0).numel() * part.parameter.dtype.itemsize)
        return _Layout(tuple(parts), tuple(offsets), end)

    def buffer(self, group: Group, digest: bytes = b"", failed: bool = False) -> Tensor:
        """Return a buffer of zeros behind its head."""
        made = torch.zeros(self.size, dtype=torch.uint8, device=_local(group.parts[0].parameter).device)
        head = [*digest.ljust(_DIGEST, b"\0"), failed]
        made[: len(head)] = torch.tensor(head, dtype=torch.uint8)
        return made

    def item(self, row: Tensor, j: int, shape: torch.Size) -> Tensor:
        """Return the memory of parameter j in a buffer."""
        dtype = self.parts[j].parameter.dtype
        end = self.offsets[j] + shape.numel() * dtype.itemsize
        return row[self.offsets[j] : end].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _local(parameter: Any) -> Tensor:
    """Return the part of a parameter that this process has."""
    with torch.no_grad():
        part: Tensor = parameter.to_local()
    return part


def _trained(parts: Sequence[Part]) -> list[int]:
    """Return the positions of the parameters that require gradients."""
    return [j for j, part in enumerate(parts) if part.parameter.requires_grad]


class _Whole(torch.autograd.Function):
    """Whole parameters of parts; the gradients of the parts are averages over all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        shared: FullySharded,
        groups: tuple[Group, ...],
        described: Mapping[str, str],
        call: Call,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        made = shared.gather(groups, described)
        ctx.shared, ctx.groups, ctx.call = shared, groups, call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(w for w, p in zip(made, parameters, strict=True) if not p.requires_grad))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, None, *ctx.shared.reduce(ctx.groups, ctx.call, gradients)
