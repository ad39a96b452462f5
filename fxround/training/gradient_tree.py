"""The sum of the gradients of a step's micro-batches, by a tree that no number of processes changes.

A step has S micro-batches, and g_j is the gradient of one parameter for micro-batch j. With N processes, process r
computes those with j modulo N = r, in ascending order, and their sum is that of the order ``lanes:S``:

    for w = S / 2, S / 4, ..., 1:  g_l = R(g_l + g_(l + w)) for every l < w;   gradient = R(g_0 / S)

S and N are powers of two, and N divides S. A pair (l, l + w) with w >= N is in one process, which adds it as soon as it
has both; the processes gather what is left, and each of them adds the rest. R draws the bits of the sample of
micro-batch 0 and of a number that counts parameters and pairs, which do not depend on N either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxround.compiler.averages import LAST_NODE, Call, rounding_of_gradients
from fxround.errors import FxroundError
from fxround.kernels.maps import draws
from fxround.kernels.program import Program
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.arithmetic.randomness import Part
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# The samples of a seed (``random_state.following``).
_SAMPLES: Final = 1 << 32


@dataclass
class _Sums:
    """The sums of one parameter in a step.

    number      of the parameter, among all parameters of the module
    add, divide the programs of a pair and of the quotient
    all         the program of everything that is left after the processes have gathered, if it does not draw
    step        (seed, sample) of micro-batch 0 of the step that the sums belong to
    received    how many micro-batches of this process are in the sums
    waiting     the first of a pair whose second has not come, by (w, l)
    """

    name: str
    number: int
    add: Program
    divide: Program
    all: Program | None
    step: tuple[int, int] = (-1, -1)
    received: int = 0
    waiting: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class GradientTree:
    """Sums what the backward passes of one process accumulate, and then what the processes gathered.

    Args:
        module: the compiled module.
        policy: of sums and quotients of gradients.
        micro_batches: S.
        rank, world_size: r and N.
        apart: what a call that is not the last one of its process in a step belongs under, in words.
        called_by: what calls the module, in words.

    Raises:
        ValueError: if S or N is no power of two, or N does not divide S.
    """

    def __init__(
        self,
        module: RoundedModule,
        policy: Policy,
        micro_batches: int,
        rank: int,
        world_size: int,
        apart: str,
        called_by: str,
    ) -> None:
        for what, count in (("micro_batches", micro_batches), ("the number of processes", world_size)):
            if count < 1 or count & (count - 1):
                raise ValueError(f"{what} is {count}; expected a power of two")
        if micro_batches % world_size:
            raise ValueError(f"{world_size} processes cannot share {micro_batches} micro-batches evenly")
        self.module, self._apart, self._called_by = module, apart, called_by
        self.micro_batches, self.rank, self.world_size = micro_batches, rank, world_size
        self.of_each = micro_batches // world_size
        self.said = f"{micro_batches} micro-batches, {policy.name!r}"
        self._sums: dict[str, _Sums] = {}
        for number, (name, p) in enumerate(module.named_parameters()):
            if p.requires_grad:
                path = name.rpartition(".")[0]
                add, div = (rounding_of_gradients(policy, path, p.dtype, operator) for operator in ("add", "div"))
                pair, quotient = f"t0 = add(x0, x1) @ {add}", f"t0 = div(x0, {micro_batches}) @ {div}"
                programs = Program.parse(pair), Program.parse(quotient)
                drawn = any(draws(statement) for program in programs for statement in program.statements)
                whole = None if drawn else Program.parse(self._whole(add, div))
                self._sums[name] = _Sums(name, number, *programs, whole)

    @property
    def needs_all(self) -> bool:
        """True: a parameter needs a gradient of every micro-batch."""
        return True

    def draws(self, name: str, dtype: torch.dtype) -> bool:
        """Whether sums or the quotient draw random bits."""
        del dtype
        return self._known(name).all is None

    def average(
        self, name: str, gradients: Sequence[Tensor], place: Part | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of a parameter, of the sums of all processes in the order of their ranks.

        place: where it stands in that of the whole parameter. out: a row-major tensor for it. Raises FxroundError if
        this process has not summed all of its micro-batches.
        """
        own, sums = self._known(name), list(gradients)
        if own.received != self.of_each:
            raise FxroundError(
                f"the processes average the gradient of {own.name} after {own.received} of {self.of_each} "
                "micro-batches of this process: every parameter needs a gradient from each micro-batch"
            )
        own.received = 0
        dtype = sums[0].dtype
        if own.all is not None:
            return run_map(own.all, sums, dtype, self._draw(own, 0, place), out)
        width = self.world_size
        while width > 1:
            width //= 2
            sums = [self._add(own, width, i, sums[i], sums[i + width], place) for i in range(width)]
        return run_map(own.divide, sums, dtype, self._draw(own, 0, place), out)

    def _whole(self, add: str, divide: str) -> str:
        """Return the program of the sums of all processes, in the order of their ranks, to the gradient."""
        sums = [f"x{rank}" for rank in range(self.world_size)]
        statements: list[str] = []
        while len(sums) > 1:
            half = len(sums) // 2
            pairs = [f"t{len(statements) + i} = add({sums[i]}, {sums[i + half]}) @ {add}" for i in range(half)]
            sums = [f"t{len(statements) + i}" for i in range(half)]
            statements += pairs
        quotient = f"t{len(statements)} = div({sums[0]}, {self.micro_batches}) @ {divide}"
        return "; ".join([*statements, quotient])

    def require_no_gradient(self, name: str, parameter: Tensor) -> None:
        """Raise FxroundError for a parameter that has a gradient before the backward pass of a micro-batch."""
        if parameter.grad is not None:
            raise FxroundError(
                f"{name} has a gradient before the backward pass of a micro-batch; a sum in a tree begins without one: "
                "call optimizer.zero_grad(set_to_none=True) before each step"
            )

    def own(
        self, name: str, gradient: Tensor | None, call: Call, synchronizes: bool, place: Part | None = None
    ) -> Tensor | None:
        """Take the gradient of a parameter that has none yet; arguments and result as of ``receive``."""
        if gradient is not None:
            self.require_no_gradient(name, self.module.get_parameter(name))
        return self.receive(name, gradient, call, synchronizes, place)

    def receive(
        self, name: str, gradient: Tensor | None, call: Call, synchronizes: bool, place: Part | None = None
    ) -> Tensor | None:
        """Take a micro-batch's gradient; return the sum of those of this process with the last one, None before.

        call: of the micro-batch. synchronizes: whether the processes average gradients after this backward pass.
        place: where the gradient stands in that of the whole parameter.

        Raises FxroundError for a step that is not made of such micro-batches.
        """
        if gradient is None:  # of a parameter that a call did not use
            return None
        own, micro_batch = self._known(name), self._micro_batch(call)
        step = call.seed, call.sample - micro_batch * self.world_size
        if step != own.step:
            own.step, own.received = step, 0
            own.waiting.clear()
        if micro_batch != own.received:
            raise FxroundError(
                f"the gradient of {own.name} came from call {micro_batch + 1} of this process in the step, after "
                f"{own.received} others: every micro-batch is one call of the model and one backward pass"
            )
        if synchronizes != (micro_batch == self.of_each - 1):
            raise FxroundError(
                f"micro-batch {micro_batch + 1} of {self.of_each} of this process was called "
                f"{'outside of' if synchronizes else 'under'} {self._apart}: all but the last belong under it, the "
                "last one does not"
            )
        self._require_invariant()
        total, position, width = gradient, micro_batch, self.of_each
        own.received += 1
        while width > 1:
            width //= 2
            if position < width:
                own.waiting[width, position] = total
                return None
            position -= width
            first = own.waiting.pop((width, position))
            number = position * self.world_size + self.rank
            total = self._add(own, width * self.world_size, number, first, total, place)
        return total

    def _known(self, name: str) -> _Sums:
        if name not in self._sums:
            raise FxroundError(
                f"{name} required no gradient when average_in_order was called: call it when parameters are as they "
                "are trained"
            )
        return self._sums[name]

    def _micro_batch(self, call: Call) -> int:
        """Return which of this process's micro-batches a call was.

        Raises FxroundError for a call that is not the latest one, and for samples that do not count micro-batches.
        """
        seed, sample = call.seed, call.sample
        after, now = _rng(self.module)
        # A seed ends with its last sample.
        if ((after - (now == 0)) - seed, (now - sample) % _SAMPLES) != (0, self.world_size):
            raise FxroundError(
                f"a gradient came from a call of the model that {self._called_by} did not see, or from an earlier one: "
                "call it in training mode, then backward, once for every micro-batch"
            )
        if sample % self.world_size:
            raise FxroundError(
                f"the module's sample is {sample}, and {self.world_size} processes count micro-batches from a multiple "
                f"of {self.micro_batches}: call reseed(seed, sample=0) in every process before training"
            )
        return sample % self.micro_batches // self.world_size

    def _require_invariant(self) -> None:
        """Raise FxroundError for a model whose calls change what later micro-batches compute."""
        if self.module._replay is not None:
            raise FxroundError(
                "the model changes Python state, which would count the calls of one process: its gradients would "
                "depend on the number of processes; leave micro_batches= out"
            )
        entry = self.module._captures.called
        written = next((port.name for port in entry.captured.outputs if port.mutation), None)
        if written is None and not entry.delayed:
            return
        kept = f"a call writes {written or 'an argument'}" if written is not None else "delayed scales follow the calls"
        raise FxroundError(
            f"{kept} of one process, so that gradients would depend on the number of processes: leave micro_batches= "
            "out, or use a model without such a state, as BatchNorm is with track_running_stats=False"
        )

    def _add(self, own: _Sums, width: int, position: int, first: Tensor, second: Tensor, place: Part | None) -> Tensor:
        """Return R(g_l + g_(l + w)) for w = width and l = position. Pairs are numbered w + l, from 1 to S - 1."""
        return run_map(own.add, [first, second], first.dtype, self._draw(own, width + position, place))

    def _draw(self, own: _Sums, pair: int, place: Part | None) -> Draw:
        return Draw(*own.step, LAST_NODE - (own.number * self.micro_batches + pair), place)


class TreeOfDDP:
    """Passes the calls of a DistributedDataParallel, and what its backward passes accumulate, to a tree."""

    def __init__(self, ddp: DistributedDataParallel, tree: GradientTree) -> None:
        self.tree, self._called_at, self._synchronizes = tree, Call(-1, -1), False
        self.names = {id(p): name for name, p in ddp.module.named_parameters() if p.requires_grad}
        ddp.register_forward_pre_hook(self._called)
        for p in ddp.module.parameters():
            if p.requires_grad:
                p.register_hook(partial(self._require_no_gradient, p))
                p.register_post_accumulate_grad_hook(self._receive)

    def draws(self, parameter: Tensor) -> bool:
        """Whether the average of a parameter's gradients draws random bits."""
        return self.tree.draws(self.names[id(parameter)], parameter.dtype)

    def average(
        self, parameter: Tensor, sums: Sequence[Tensor], place: Part | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of a parameter, of the sums of all processes in the order of their ranks."""
        return self.tree.average(self.names[id(parameter)], sums, place, out)

    def _called(self, ddp: DistributedDataParallel, args: object) -> None:
        del args
        if ddp.training and torch.is_grad_enabled():
            self._called_at, self._synchronizes = Call(*_rng(ddp.module), True), ddp.require_backward_grad_sync

    def _require_no_gradient(self, parameter: Tensor, gradient: Any) -> None:
        del gradient
        self.tree.require_no_gradient(self.names[id(parameter)], parameter)

    def _receive(self, parameter: Tensor) -> None:
        """Take a micro-batch's gradient from a parameter; the last one leaves the sum there, for DDP."""
        name = self.names[id(parameter)]
        parameter.grad = self.tree.receive(name, parameter.grad, self._called_at, self._synchronizes)


def _rng(module: RoundedModule) -> tuple[int, int]:
    seed, sample = module.rng.tolist()
    return seed, sample
