"""Data-parallel training: gradients of several processes are averaged in the order of their ranks.

For every element, with N processes and the gradients g_0 ... g_(N-1) of one parameter,

    s = g_0;  s = R(s + g_r) for r = 1, ..., N - 1;  gradient = R(s / N)

R is the rounding that the policy has for a gradient (role ``gradient``, direction ``backward``) of that parameter's
module, for the operators ``add`` and ``div``. Every process gathers all gradients and computes this itself. The
formula does not depend on DDP's buckets, so that neither their size nor the order in which they become ready changes a
bit. Random bits come from the module's (seed, sample), which all processes share, and from a number of the parameter
that no node of a graph has. With ``micro_batches=S`` the formula does not depend on N either (``gradient_tree``).
"""

# No ``from __future__ import annotations``: DDP compares the annotations of its hook, which must not be texts.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from fxround.compiler.agreement import require_same
from fxround.errors import type_of
from fxround.graph.dtypes import STORAGES
from fxround.kernels.program import Program
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.formats.storage import FORMAT_OF
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.training.gradient_tree import LAST_NODE, GradientTree


@dataclass(frozen=True)
class _State:
    """The state of the hook: the module, and the number and program of each parameter, by its id; or the tree."""

    module: RoundedModule
    programs: dict[int, tuple[int, Program]]
    group: dist.ProcessGroup
    tree: GradientTree | None = None


def average_in_order(ddp: DistributedDataParallel, policy: Any = None, *, micro_batches: int | None = None) -> None:
    """Average the gradients of a compiled module's processes in the order of their ranks, by DDP's communication hook.

    With ``micro_batches``, the same global batch has the same gradients, bit for bit, for every number of processes
    that divides it: 1, 2, 4 or 8 for 8 micro-batches. Process r of N computes the micro-batches r, r + N, r + 2 N, ...
    of a step, all but the last one under ``ddp.no_sync()``.

    Args:
        ddp: ``DistributedDataParallel(fxround.compile(model, ...))``, before its first backward. The function also
            calls ``distribute(rank, world_size)`` on its module, so that every process draws different random bits.
        policy: the policy for sums and quotients of gradients, as for ``fxround.compile``; None takes the module's own.
        micro_batches: S, how many micro-batches the processes share in each step: a power of two. Their gradients are
            summed in the order ``lanes:S``, and divided by S. A process keeps at most S / (2 N) gradients of each
            parameter beside its own. None: each process has one batch, and the sum is in the order of the ranks.

    Raises:
        FxroundError: in all processes, if they have other policies, seeds, samples, micro_batches or versions.
        TypeError: for another module, or a parameter of a dtype that no kernel stores; also what DDP raises if a hook
            is registered already.
        ValueError: if micro_batches or the number of processes is no power of two, or if the second does not divide
            the first.
        FxroundError: in a backward pass, for a step that is not made of such micro-batches, and for a model whose calls
            change buffers, delayed scales or Python state, on which the number of processes would show.

    Example::

        ddp = DistributedDataParallel(fxround.compile(model, "stochastic"))
        average_in_order(ddp, micro_batches=8)
        for i in range(count := 8 // world_size):
            with nullcontext() if i == count - 1 else ddp.no_sync():
                loss(ddp(x[i * world_size + rank])).backward()
    """
    if micro_batches is not None and (isinstance(micro_batches, bool) or not isinstance(micro_batches, int)):
        raise TypeError(f"micro_batches is {type_of(micro_batches)}; expected an int")
    module = getattr(ddp, "module", None)
    if not isinstance(ddp, DistributedDataParallel) or not isinstance(module, RoundedModule):
        kind = type(ddp).__name__ + (f" of a {type(module).__name__}" if module is not None else "")
        raise TypeError(f"got a {kind}; expected DistributedDataParallel(fxround.compile(model, policy))")
    group = ddp.process_group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chosen = module.policy if policy is None else Policy.parse(policy)
    seed, sample = module.rng.tolist()
    require_same(
        group,
        "processes average their gradients",
        seed=seed,
        sample=sample,
        policy=module.policy,
        policy_of_averages=chosen,
        number_of_micro_batches=micro_batches,
    )
    if micro_batches is None:
        ddp.register_comm_hook(_State(module, _programs(module, chosen, world_size), group), _average)
    else:
        tree = _tree(ddp, chosen, micro_batches, rank, world_size)
        ddp.register_comm_hook(_State(module, {}, group, tree), _average)
        tree.attach()
    module.distribute(rank, world_size)


def average_program(policy: Policy, path: str, dtype: torch.dtype, world_size: int) -> Program:
    """Return the program of (g_0, ..., g_(N-1)) -> gradient, for a parameter of the module ``path``.

    Raises TypeError for a dtype that no kernel stores.
    """
    add, div = (_rounding(policy, path, dtype, operator) for operator in ("add", "div"))
    others = range(1, world_size)
    sums = [f"t{r - 1} = add({'x0' if r == 1 else f't{r - 2}'}, x{r}) @ {add}" for r in others]
    total = f"t{world_size - 2}" if sums else "x0"
    return Program.parse("; ".join([*sums, f"t{world_size - 1} = div({total}, {world_size}) @ {div}"]))


def _rounding(policy: Policy, path: str, dtype: torch.dtype, operator: str) -> str:
    """Return the rounding of a sum or quotient of gradients of a parameter of the module ``path``."""
    if dtype not in STORAGES:
        raise TypeError(f"a parameter of {path or 'the root module'} is {dtype}; expected a real floating dtype")
    own = FORMAT_OF[STORAGES[dtype]].name
    place = {"path": path, "operator": f"aten.{operator}.Tensor", "kind": "pointwise", "role": "gradient"}
    rule = policy.assign(**place, dtype=own, direction="backward")
    return str(rule.rounding) if rule is not None and rule.rounding is not None else f"{own}/nearest_even"


def _tree(ddp: DistributedDataParallel, policy: Policy, micro_batches: int, rank: int, world_size: int) -> GradientTree:
    """Return the tree of the gradients of a module under a policy."""
    programs = {}
    for name, p in ddp.module.named_parameters():
        if p.requires_grad:
            path = name.rpartition(".")[0]
            add, div = (_rounding(policy, path, p.dtype, operator) for operator in ("add", "div"))
            programs[name] = (
                Program.parse(f"t0 = add(x0, x1) @ {add}"),
                Program.parse(f"t0 = div(x0, {micro_batches}) @ {div}"),
            )
    return GradientTree(ddp, programs, micro_batches, rank, world_size)


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
    parameters = bucket.parameters()

    def average(done: Any) -> Tensor:
        done.value()
        for view, parameter in zip(views, parameters, strict=True):
            offset = view.storage_offset() - buffer.storage_offset()
            parts = [g.as_strided(view.shape, view.stride(), offset) for g in gathered]
            if state.tree is not None:
                view.copy_(state.tree.average(parameter, parts))
                continue
            number, program = state.programs[id(parameter)]
            view.copy_(run_map(program, parts, view.dtype, Draw(seed, sample, LAST_NODE - number)))
        return buffer

    work = dist.all_gather(gathered, buffer, group=state.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(average)
    return averaged
