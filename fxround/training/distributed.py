"""Data-parallel training: gradients of several processes are averaged in the order of their ranks.

For every element, with N processes and the gradients g_0 ... g_(N-1) of one parameter,

    s = g_0;  s = R(s + g_r) for r = 1, ..., N - 1;  gradient = R(s / N)

R is the rounding that the policy has for a gradient (role ``gradient``, direction ``backward``) of that parameter's
module, for the operators ``add`` and ``div``. Every process gathers all gradients and computes this itself. The
formula does not depend on DDP's buckets, so that neither their size nor the order in which they become ready changes a
bit. Random bits come from the module's (seed, sample), which all processes share, and from a number of the parameter
that no node of a graph has.
"""

# No ``from __future__ import annotations``: DDP compares the annotations of its hook, which must not be texts.
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from fxround.graph.dtypes import STORAGES
from fxround.kernels.program import Program
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.formats.storage import FORMAT_OF
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# Parameter k draws as node 2^32 - 1 - k: a graph counts its nodes from 0.
_LAST: Final = (1 << 32) - 1


@dataclass(frozen=True)
class _State:
    """The state of the hook: the module, and the number and program of each parameter, by its id."""

    module: RoundedModule
    programs: dict[int, tuple[int, Program]]
    group: dist.ProcessGroup


def average_in_order(ddp: DistributedDataParallel, policy: Any = None) -> None:
    """Average the gradients of a compiled module's processes in the order of their ranks, by DDP's communication hook.

    Args:
        ddp: ``DistributedDataParallel(fxround.compile(model, ...))``, before its first backward. The function also
            calls ``distribute(rank, world_size)`` on its module, so that every process draws different random bits.
        policy: the policy for sums and quotients of gradients, as for ``fxround.compile``; None takes the module's own.

    Raises:
        TypeError: for another module, or a parameter of a dtype that no kernel stores; also what DDP raises if a hook
            is registered already.

    Example::

        ddp = DistributedDataParallel(fxround.compile(model, "stochastic"))
        average_in_order(ddp)
    """
    module = getattr(ddp, "module", None)
    if not isinstance(ddp, DistributedDataParallel) or not isinstance(module, RoundedModule):
        kind = type(ddp).__name__ + (f" of a {type(module).__name__}" if module is not None else "")
        raise TypeError(f"got a {kind}; expected DistributedDataParallel(fxround.compile(model, policy))")
    group = ddp.process_group
    module.distribute(dist.get_rank(group), dist.get_world_size(group))
    chosen = module.policy if policy is None else Policy.parse(policy)
    programs = _programs(module, chosen, dist.get_world_size(group))
    ddp.register_comm_hook(_State(module, programs, group), _average)


def average_program(policy: Policy, path: str, dtype: torch.dtype, world_size: int) -> Program:
    """Return the program of (g_0, ..., g_(N-1)) -> gradient, for a parameter of the module ``path``.

    Raises TypeError for a dtype that no kernel stores.
    """
    if dtype not in STORAGES:
        raise TypeError(f"a parameter of {path or 'the root module'} is {dtype}; expected a real floating dtype")
    own = FORMAT_OF[STORAGES[dtype]].name

    def rounding(operator: str) -> str:
        place = {"path": path, "operator": f"aten.{operator}.Tensor", "kind": "pointwise", "role": "gradient"}
        rule = policy.assign(**place, dtype=own, direction="backward")
        return str(rule.rounding) if rule is not None and rule.rounding is not None else f"{own}/nearest_even"

    others = range(1, world_size)
    sums = [f"t{r - 1} = add({'x0' if r == 1 else f't{r - 2}'}, x{r}) @ {rounding('add')}" for r in others]
    total = f"t{world_size - 2}" if sums else "x0"
    return Program.parse("; ".join([*sums, f"t{world_size - 1} = div({total}, {world_size}) @ {rounding('div')}"]))


def _programs(module: RoundedModule, policy: Policy, world_size: int) -> dict[int, tuple[int, Program]]:
    """Return the number and the program of each parameter, by its id."""
    return {
        id(p): (k, average_program(policy, name.rpartition(".")[0], p.dtype, world_size))
        for k, (name, p) in enumerate(module.named_parameters())
        if p.requires_grad
    }


def _average(state: _State, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook: gather the gradients of the bucket, then average them parameter by parameter."""
    buffer: Tensor = bucket.buffer()
    views: list[Tensor] = bucket.gradients()
    gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size(state.group))]
    seed, sample = state.module.rng.tolist()
    wanted = [state.programs[id(p)] for p in bucket.parameters()]

    def average(done: Any) -> Tensor:
        done.value()
        for view, (number, program) in zip(views, wanted, strict=True):
            offset = view.storage_offset() - buffer.storage_offset()
            parts = [g.as_strided(view.shape, view.stride(), offset) for g in gathered]
            view.copy_(run_map(program, parts, view.dtype, Draw(seed, sample, _LAST - number)))
        return buffer

    work = dist.all_gather(gathered, buffer, group=state.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(average)
    return averaged
