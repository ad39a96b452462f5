"""Models that ``fully_shard`` (FSDP2) has sharded: their parameters, and how they are captured.

A process keeps a part of each parameter (a DTensor), and computes with all of it, as every other process does with
other data. PyTorch's hooks gather the parameters of a module before its call and reduce their gradients. A captured
graph takes whole parameters, so that these hooks are left out of a capture; ``compiler.fully_sharded`` gathers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.capture.processes import share_of
from fxround.capture.torch_private import capturing
from fxround.errors import CaptureError
from fxround.numerics.arithmetic.randomness import Part as Place

# What ``fully_shard`` marks modules with, for Dynamo.
_MARKS: Final = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
# The ids of what stands in for something of FSDP's, for each block of ``whole_parameters`` that is running.
_STANDING_IN: Final[list[frozenset[int]]] = []


@dataclass(frozen=True)
class Part:
    """A parameter that ``fully_shard`` has sharded.

    parameter   a DTensor, of which this process holds a part
    whole       the shape of what the processes share: of the parameter, or of a part by ``parallelize_module``
    dim         the dimension that the processes share: its first ``rows`` elements are the first process's, and so on
    rows        the last processes may have fewer, or none
    parallel    the spec of the DTensor that ``parallelize_module`` has made; None for a plain parameter
    """

    parameter: nn.Parameter
    whole: torch.Size
    dim: int
    rows: int
    parallel: Any = field(default=None, repr=False)

    def start_and_size(self, rank: int) -> tuple[int, int]:
        """Return the first element along ``dim`` that a process has, and how many it has."""
        length = self.whole[self.dim]
        start = min(rank * self.rows, length)
        return start, min(self.rows, length - start)

    def shape(self, rank: int) -> torch.Size:
        """Return the shape of a process's part."""
        sizes = list(self.whole)
        sizes[self.dim] = self.start_and_size(rank)[1]
        return torch.Size(sizes)

    @property
    def has_places(self) -> bool:
        """Whether the elements of each process's part are runs of the parameter, one as far from the next as another.

        So they are unless the dimension that the processes share is inside of others.
        """
        return self.whole[: self.dim].numel() == 1

    def place(self, rank: int | None = None) -> Place | None:
        """Return where the elements of a process's part stand in the parameter; None if they are all of it.

        rank: None asks for what all processes share, which ``parallelize_module`` may have made a part of the
        parameter, along the same dimension or another one.
        """
        if rank is None and self.whole == self.parameter.shape:
            return None
        start, rows = (0, self.whole[self.dim]) if rank is None else self.start_and_size(rank)
        shape, dim, first = self.whole, self.dim, 0
        if self.parallel is not None and self.parallel.placements[0].is_shard():
            shape, dim = self.parallel.tensor_meta.shape, self.parallel.placements[0].dim
            mesh = self.parallel.mesh
            first = share_of(shape[dim], mesh.size(), mesh.get_local_rank()).first * shape[dim + 1 :].numel()
        first += start * shape[self.dim + 1 :].numel()
        length = rows if dim == self.dim else self.whole[dim]
        inner = shape[dim + 1 :].numel()
        return Place(length * inner, (shape[dim] - length) * inner, first, 1, 0)

    def stand_in(self) -> nn.Parameter:
        """Return a parameter that is what the model has before ``fully_shard``, but for its numbers."""
        p = self.parameter
        made: Any = torch.empty(self.whole, dtype=p.dtype, device=p.device)
        if self.parallel is not None:
            mesh, placements, meta = self.parallel.mesh, self.parallel.placements, self.parallel.tensor_meta
            made = _tensor_class().from_local(
                made, mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride
            )
        return nn.Parameter(made, requires_grad=p.requires_grad)


@dataclass(frozen=True)
class Group:
    """The parameters that are gathered together. owner: PyTorch's object with their settings."""

    parts: tuple[Part, ...]
    owner: Any = field(repr=False)

    @property
    def reduces(self) -> bool:
        """Whether a backward pass reduces gradients (``set_requires_gradient_sync``)."""
        return bool(self.owner.reduce_grads)


def _module_class() -> Any:
    """Return the class of the modules; None where nothing has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_of_fsdp(model: nn.Module, name: str) -> bool:
    """Whether an attribute of a model is a method that ``fully_shard`` gave to it."""
    kind = _module_class()
    if kind is None or not isinstance(model, kind):
        return False
    return next((c for c in type(model).__mro__ if name in vars(c)), None) is kind


def modules_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that ``fully_shard`` was called for."""
    kind = _module_class()
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _owners(modules: Sequence[Any]) -> list[Any]:
    """Return PyTorch's groups of parameters, each once."""
    states = [module._get_fsdp_state() for module in modules]
    return list({id(owner): owner for state in states for owner in state._fsdp_param_groups}.values())


def groups_of(model: nn.Module) -> tuple[Group, ...]:
    """Return the parameters that ``fully_shard`` has sharded, as groups, in the order of the model's modules."""
    return tuple(Group(tuple(_part(held) for held in owner.fsdp_params), owner) for owner in _owners(modules_of(model)))


def _part(held: Any) -> Part:
    whole, dim = held._orig_size, held.fsdp_placement.dim
    rows = -(-whole[dim] // held.mesh_info.mesh.size())
    return Part(held.sharded_param, whole, dim, rows, held._unsharded_dtensor_spec)


def _tensor_class() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def mesh_of_groups(model: nn.Module) -> Any:
    """Return the device mesh of the processes that ``fully_shard`` shares a model's parameters among.

    None for a model that it was not called for. Raises CaptureError for settings that would change what is computed.
    """
    modules = modules_of(model)
    if not modules:
        return None
    owners = _owners(modules)
    for owner in owners:
        _require_supported(owner)
    meshes = [owner.mesh_info.mesh for owner in owners]
    if not meshes:
        return None
    if any(mesh != meshes[0] for mesh in meshes):
        raise CaptureError(
            f"fully_shard was called with {meshes[0]} and with another mesh: pass one mesh to all of its calls"
        )
    return meshes[0]


def _require_supported(owner: Any) -> None:
    mesh, settings = owner.mesh_info.mesh, owner.mp_policy
    casts = {
        name: value
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
        if (value := getattr(settings, name, None)) is not None
    }
    if casts:
        said = ", ".join(f"{name}={value}" for name, value in casts.items())
        raise CaptureError(
            f"fully_shard has the mixed precision policy {said}, and fxround computes with the formats of its own "
            "policy: leave mp_policy out, and name the formats in the policy ('bfloat16', "
            "Rule(role='gradient', rounding='bfloat16'))"
        )
    if type(owner.offload_policy).__name__ != "OffloadPolicy":
        raise CaptureError(
            f"fully_shard has the offload policy {owner.offload_policy}: parameters would be gathered from another "
            "device than the one that computes. Leave offload_policy out"
        )
    if mesh.ndim != 1 or owner.mesh_info.is_spmd_mesh:
        raise CaptureError(
            f"fully_shard has a mesh of {mesh.ndim} dimensions, {mesh}: fxround knows meshes of one dimension, of "
            "processes that each compute with all of a parameter"
        )
    if owner.gradient_divide_factor is not None:
        raise CaptureError(
            f"set_gradient_divide_factor({owner.gradient_divide_factor}) was called: gradients are divided by their "
            "number, rounded as the policy says. Multiply the loss instead"
        )
    for held in owner.fsdp_params:
        parameter = held.sharded_param
        if parameter.device.type == "meta":
            raise CaptureError(
                "a parameter that fully_shard has sharded is on the device meta: call model.to_empty(device=...) and "
                "set the parameters before the first call"
            )


def shard_again(model: nn.Module) -> None:
    """Register the parts of parameters, in the place of whole ones that a call of the model itself has left."""
    for module in modules_of(model):
        module.reshard()


@contextlib.contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Let the model have parameters that are whole, whose numbers do not matter, and none of FSDP's hooks, in a block.

    One thread at a time; another one that calls the model meanwhile would find these parameters.
    """
    with capturing(), contextlib.ExitStack() as stack:
        modules = modules_of(model)
        shard_again(model)
        stand_ins: dict[int, nn.Parameter] = {}
        for part in (part for group in groups_of(model) for part in group.parts):
            stand_ins[id(part.parameter)] = part.stand_in()
        for module in model.modules():
            held: Any = module._parameters
            for name, parameter in list(held.items()):
                if id(parameter) in stand_ins:
                    stack.callback(held.__setitem__, name, parameter)
                    held[name] = stand_ins[id(parameter)]
            own = vars(module)
            for mark in _MARKS:
                if mark in own:
                    stack.callback(own.__setitem__, mark, own.pop(mark))
        for hooks, key in _hooks(modules):
            if key in hooks:
                stack.callback(hooks.__setitem__, key, hooks[key])
                # What the trace depends on is found by the place of a hook among others: each keeps its place.
                if len(hooks) > 1:
                    hooks[key] = _no_hook
                else:
                    del hooks[key]
        _STANDING_IN.append(frozenset({id(_no_hook), *map(id, stand_ins.values())}))
        stack.callback(_STANDING_IN.pop)
        yield


def standing_in() -> frozenset[int]:
    """Return the ids of what stands in the model, in the place of parts of parameters and of FSDP's hooks, now."""
    return _STANDING_IN[-1] if _STANDING_IN else frozenset()


def _no_hook(*given: Any) -> None:
    """Do nothing, in the place of one of FSDP's hooks."""


def _hooks(modules: Sequence[Any]) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield the dicts that hold FSDP's hooks, and their keys."""
    states = {id(state): state for state in (module._get_fsdp_state() for module in modules)}.values()
    for state in states:
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            for one in getattr(handle, "handles", (handle,)):
                hooks = one.hooks_dict_ref()
                if hooks is not None:
                    yield hooks, one.id


def is_hooked(module: Any) -> bool:
    """Whether calls of a module that ``fully_shard`` was called for run FSDP's hooks."""
    return any(hooks.get(key, _no_hook) is not _no_hook for hooks, key in _hooks([module]))


def pieces_of(x: Tensor, part: Part, processes: int) -> list[Tensor]:
    """Return what each process has of a tensor of a parameter's shape."""
    places = (part.start_and_size(rank) for rank in range(processes))
    return [x.narrow(part.dim, start, size) for start, size in places]
