"""Data-parallel training: gradients of several processes are averaged in the order of their ranks.

The formula is that of ``compiler.averages``. With DistributedDataParallel, each process computes it for a part of the
elements (``exchange``). The formula does not depend on DDP's buckets, so that neither their size nor the order in which
they become ready changes a bit. With ``micro_batches=S`` it does not depend on the number of processes either
(``gradient_tree``).
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
from fxround.compiler.averages import LAST_NODE, OrderOfRanks, average_program
from fxround.errors import type_of
from fxround.kernels.maps import draws
from fxround.kernels.program import Program
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.arithmetic.randomness import Part
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.training.exchange import Exchange
from fxround.training.gradient_tree import GradientTree, TreeOfDDP


@dataclass
class _State:
    """The state of the hook: the module, and the number and program of each parameter, by its id; or the tree.

    exchange: by which each process averages a part, None for a process alone.
    """

    module: RoundedModule
    programs: dict[int, tuple[int, Program]]
    group: dist.ProcessGroup
    exchange: Exchange | None
    tree: TreeOfDDP | None = None

    def draws(self, parameter: Tensor) -> bool:
        """Whether the average of a parameter's gradients draws random bits."""
        if self.tree is not None:
            return self.tree.draws(parameter)
        return any(map(draws, self.programs[id(parameter)][1].statements))

    def average(
        self,
        parameter: Tensor,
        gradients: list[Tensor],
        seed: int,
        sample: int,
        place: Part | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the average of some elements of the gradients of all processes, in the order of their ranks.

        place: where they stand in the gradient of the parameter. out: a row-major tensor for them.
        """
        if self.tree is not None:
            return self.tree.average(parameter, gradients, place, out)
        number, program = self.programs[id(parameter)]
        return run_map(program, gradients, gradients[0].dtype, Draw(seed, sample, LAST_NODE - number, place), out)


def average_in_order(
    ddp: DistributedDataParallel | RoundedModule, policy: Any = None, *, micro_batches: int | None = None
) -> None:
    """Average the gradients of a compiled module's processes in the order of their ranks.

    With ``micro_batches``, the same global batch has the same gradients, bit for bit, for every number of processes
    that divides it: 1, 2, 4 or 8 for 8 micro-batches. Process r of N computes the micro-batches r, r + N, r + 2 N, ...
    of a step, all but the last one under ``ddp.no_sync()``; of a model that ``fully_shard`` was called for, between
    ``set_requires_gradient_sync(False)`` and ``set_requires_gradient_sync(True)``.

    Args:
        ddp: ``DistributedDataParallel(fxround.compile(model, ...))``, before its first backward; or
            ``fxround.compile(model, ...)`` of a model that ``fully_shard`` was called for, which averages in the order
            of the ranks unless this function says otherwise. The function also calls ``distribute(rank, world_size)``
            on the compiled module, so that every process draws different random bits.
        policy: the policy for sums and quotients of gradients, as for ``fxround.compile``; None takes the module's own.
        micro_batches: S, how many micro-batches the processes share in each step: a power of two. Their gradients are
            summed in the order ``lanes:S``, and divided by S. A process keeps at most S / (2 N) gradients of each
            parameter beside its own, and room for one more of each. None: each process has one batch, and the sum is in
            the order of the ranks.

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
    chosen = None if policy is None else Policy.parse(policy)
    if isinstance(ddp, RoundedModule) and ddp._captures.sharded is not None:
        _average_parts(ddp, chosen or ddp.policy, micro_batches)
        return
    module = getattr(ddp, "module", None)
    if not isinstance(ddp, DistributedDataParallel) or not isinstance(module, RoundedModule):
        kind = type(ddp).__name__ + (f" of a {type(module).__name__}" if module is not None else "")
        raise TypeError(
            f"got a {kind}; expected DistributedDataParallel(fxround.compile(model, policy)), or fxround.compile of a "
            "model that fully_shard was called for"
        )
    group = ddp.process_group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chosen = chosen or module.policy
    _require_same(group, module, chosen, micro_batches)
    exchange = Exchange(group) if world_size > 1 else None
    if micro_batches is None:
        ddp.register_comm_hook(_State(module, _programs(module, chosen, world_size), group, exchange), _average)
    else:
        said = "ddp.no_sync()", "DistributedDataParallel"
        tree = GradientTree(module, chosen, micro_batches, rank, world_size, *said)
        state = _State(module, {}, group, exchange)
        ddp.register_comm_hook(state, _average)
        state.tree = TreeOfDDP(ddp, tree)
    module.distribute(rank, world_size)


def _average_parts(module: RoundedModule, policy: Policy, micro_batches: int | None) -> None:
    """Choose how the processes of ``fully_shard`` average gradients."""
    sharded = module._captures.sharded
    assert sharded is not None
    _require_same(sharded.group, module, policy, micro_batches)
    if micro_batches is None:
        sharded.averages = OrderOfRanks.of(module, policy, sharded.size)
    else:
        said = "set_requires_gradient_sync(False)", "the compiled module"
        sharded.averages = GradientTree(module, policy, micro_batches, sharded.rank, sharded.size, *said)
    module.distribute(sharded.rank, sharded.size)


def _require_same(group: dist.ProcessGroup, module: RoundedModule, chosen: Policy, micro_batches: int | None) -> None:
    """Raise FxroundError in all processes that do not average the gradients of the same module in the same way."""
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


def _programs(module: RoundedModule, policy: Policy, world_size: int) -> dict[int, tuple[int, Program]]:
    """Return the number and the program of each parameter, by its id."""
    return {
        id(p): (k, average_program(policy, name.rpartition(".")[0], p.dtype, world_size))
        for k, (name, p) in enumerate(module.named_parameters())
        if p.requires_grad
    }


def _average(state: _State, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook: average the gradients of the bucket, parameter by parameter."""
    buffer: Tensor = bucket.buffer()
    views: list[Tensor] = bucket.gradients()
    parameters, seed, sample = bucket.parameters(), *state.module.rng.tolist()
    # Random bits are numbered by the elements of a parameter in their row-major order.
    moved = any(not view.is_contiguous() and state.draws(p) for view, p in zip(views, parameters, strict=True))
    if state.exchange is None or buffer.device.type != "cpu" or moved:
        return _gathered(state, bucket)
    places = [view.storage_offset() - buffer.storage_offset() for view in views]

    exchange = state.exchange

    def averaging(first: int, parts: list[Tensor], out: Tensor) -> None:
        for place, parameter in zip(places, parameters, strict=True):
            start, end = (min(max(x - first, 0), len(out)) for x in (place, place + parameter.numel()))
            # Of no elements, too: it counts a micro-batch of a parameter, of which another process has this part.
            run = Part(chunk=int(end - start), skip=0, first=int(first + start - place), shards=1, shard=0)
            numbered = run if start < end and state.draws(parameter) else None
            state.average(parameter, [part[start:end] for part in parts], seed, sample, numbered, out[start:end])

    return exchange.start(bucket, averaging)


def _gathered(state: _State, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Gather the gradients of all processes, and average all of them in each."""
    buffer: Tensor = bucket.buffer()
    views: list[Tensor] = bucket.gradients()
    gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size(state.group))]
    parameters, seed, sample = bucket.parameters(), *state.module.rng.tolist()

    def average(done: Any) -> Tensor:
        done.value()
        for view, parameter in zip(views, parameters, strict=True):
            offset = view.storage_offset() - buffer.storage_offset()
            parts = [g.as_strided(view.shape, view.stride(), offset) for g in gathered]
            view.copy_(state.average(parameter, parts, seed, sample))
        return buffer

    work = dist.all_gather(gathered, buffer, group=state.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(average)
    return averaged
