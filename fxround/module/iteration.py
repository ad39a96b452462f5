"""Iterations: a step function applied many times, captured once and run as a loop of rounded operations.

The step becomes the body of a scan. The number of steps is a size of an argument, so that one capture serves all
numbers. States keep their shapes and dtypes, which is checked by a call of the step before anything is captured. The
same call finds the tensors that the step reads from outside, which become state of the captured module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.errors import type_of
from fxround.locks import waited_for
from fxround.module.rounded_module import PolicyLike, RoundedModule
from fxround.policy import Policy
from fxround.python_model.functions import Function
from fxround.python_model.outside_tensors import Watched, visible

# Taken while an iteration runs whose module holds tensors from outside: another thread may bring others.
_HOLDING: Final = waited_for()


class Iteration(nn.Module):
    """A step function as a module of many steps: (state, ticks, inputs) to the last state, and the kept ones.

    ticks: a tensor of integers, which no rule rounds, with a row for each step; only the number of rows counts. Each
    tensor of a state has one more dimension in front, so that its own dimensions are not taken for a batch.
    """

    def __init__(self, step: Callable[..., Any], keep: int | None) -> None:
        super().__init__()
        self.step, self.keep = step, keep
        self.outside = nn.Module()
        self._names: tuple[str, ...] = ()

    def hold(self, watched: Watched) -> None:
        """Hold the tensors that the step reads from outside as they are now, under names that stay the same."""
        held = dict(zip(self._names or watched.names(), watched.found, strict=True))
        self._names = tuple(held)
        # A tensor that is no Parameter has a gradient too, and may be a result of other operations.
        state = {name: x for name, x in held.items() if isinstance(x, nn.Parameter) or x.requires_grad}
        parameters: Any = self.outside._parameters
        parameters.update(state)
        self.outside._buffers.update({name: x for name, x in held.items() if name not in state})

    def release(self) -> None:
        """Hold no tensor from outside; it may be the result of many operations, and a step stays captured."""
        self.outside._parameters.clear()
        self.outside._buffers.clear()

    def forward(self, state: Any, ticks: Tensor, inputs: Any = None) -> Any:
        """Return the last state and every ``keep``-th one, stacked; the last state and () if none is kept."""
        from torch._higher_order_ops import scan

        keeps = self.keep is not None

        def body(carried: Any, row: Any) -> Any:
            _, given = row
            following = self.step(carried) if inputs is None else self.step(carried, given)
            kept = pytree.tree_leaves((carried, given))
            following = pytree.tree_map(lambda x: x.clone() if any(x is old for old in kept) else x, following)
            return following, pytree.tree_map(torch.clone, following) if keeps else ()

        begun = pytree.tree_map(lambda x: x[0], state)
        last, rows = scan(body, begun, (ticks, ticks if inputs is None else inputs))
        if self.keep is not None:
            k = self.keep
            rows = pytree.tree_map(lambda x: x[k - 1 :: k], rows)
        return last, rows


def iterate(
    step: Callable[..., Any],
    state: Any,
    steps: int,
    policy: PolicyLike = None,
    *,
    inputs: Any = None,
    keep: int | None = None,
    seed: int = 0,
    sample: int = 0,
    strict: bool | None = None,
    check_finite: bool = False,
) -> Any:
    """Apply a step function many times, each time rounded by the policy; return the last state.

    The step is captured once, and runs as a loop: another number of steps captures nothing. Under a policy with random
    bits every step draws its own, which depend on the seed, the sample and the number of the step alone. Gradients
    flow through all steps to the state, to the inputs, and to the tensors that the step reads from outside (globals,
    variables of the enclosing function, attributes, modules), whose current values each call reads. Example::

        def lorenz(s):
            x, y, z = s.unbind(0)
            return s + 0.01 * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

        last, path = fxround.iterate(lorenz, torch.ones(3), 10_000, "bfloat16", keep=100)

    Args:
        step: a function or module of the state, and of the inputs of its step if there are any, that returns the next
            state; or a compiled one, whose policy, seed and sample are then used.
        state: a tensor, or a tuple, list or dict of tensors; any nesting of these.
        steps: the number of steps, at least 1.
        policy: as for ``compile``; None for a compiled step.
        inputs: tensors of which step i reads ``[i]``; their first dimension is ``steps``.
        keep: k to return every k-th state too, stacked along a new first dimension; None for none.
        seed, sample, strict: as for ``compile`` and ``reseed``; not for a compiled step.
        check_finite: whether an infinity or a NaN in the last state is an error that names the first step that makes
            one. The search runs the iteration again, with fewer steps, and only if there is one. It takes it that a
            state which is not finite stays so.

    Returns:
        The last state; with ``keep``, a tuple of it and the kept states: those after k, 2 k, ... steps.

    Raises:
        FloatingPointError: for a state that is not finite, with ``check_finite``.
        TypeError, ValueError: for arguments of another type or out of range, and a state that a step gives another
            structure, shape or dtype; the message names the part. ValueError also for a step that changes a tensor from
            outside in place. Also what ``compile`` raises.
    """
    _require_count("steps", steps)
    if keep is not None:
        _require_count("keep", keep)
    if isinstance(step, RoundedModule):
        if policy is not None:
            raise TypeError("the step is compiled and has a policy: pass the function itself, or no policy")
        source, chosen, strict = step.source, step.policy, step.strict
        seed, sample = step.rng.tolist()
        step = source.function if isinstance(source, Function) else source
    elif policy is None:
        raise TypeError("iterate needs a policy, such as 'reproducible' or 'bfloat16', or a compiled step")
    else:
        chosen = Policy.parse(policy)
    name = next((name for name, value in visible(step) if isinstance(value, RoundedModule)), None)
    if name is not None:
        raise TypeError(f"the step calls {name}, a compiled module: pass {name} itself as the step, or call its source")
    _require_inputs(inputs, steps)
    watched = _require_state(step, state, inputs)
    compiled = _compiled(step, chosen, strict, keep, watched.signature)
    wide = pytree.tree_map(lambda x: x.unsqueeze(0), state)

    def run(count: int) -> Any:
        given = () if inputs is None else (pytree.tree_map(lambda x: x[:count], inputs),)
        with _holding(compiled, watched) if watched.found else contextlib.nullcontext():
            return compiled.reseed(seed, sample)(wide, torch.empty(count, 0, dtype=torch.int64), *given)

    last, rows = run(steps)
    if check_finite and _broken(last):
        with torch.no_grad():
            _raise_first(lambda count: run(count)[0] if count else state, steps)
    return last if keep is None else (last, rows)


def _broken(state: Any) -> bool:
    return not all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(state))


def _raise_first(after: Callable[[int], Any], steps: int) -> NoReturn:
    """Raise FloatingPointError for the first step that makes an infinity or a NaN.

    after: the state after a number of steps, which is not finite after ``steps``.
    """
    for path, leaf in pytree.tree_flatten_with_path(after(0))[0]:
        if _broken(leaf):
            where = tuple((~leaf.isfinite()).nonzero()[0].tolist())
            raise FloatingPointError(
                f"state{pytree.keystr(path)} is {leaf[where].item()} at {list(where)} before the first step: expected "
                "finite numbers"
            )
    finite, broken = 0, steps
    while broken - finite > 1:
        middle = (finite + broken) // 2
        finite, broken = (finite, middle) if _broken(after(middle)) else (middle, broken)
    before, leaves = pytree.tree_leaves(after(finite)), pytree.tree_flatten_with_path(after(broken))[0]
    path, leaf, old = next((p, x, y) for (p, x), y in zip(leaves, before, strict=True) if _broken(x))
    where = tuple((~leaf.isfinite()).nonzero()[0].tolist())
    raise FloatingPointError(
        f"step {broken} of {steps} makes state{pytree.keystr(path)} {leaf[where].item()} at {list(where)}, which was "
        f"{old[where].item()} before it: use a format with a wider range, a smaller step, or a saturating rounding."
    )


@functools.lru_cache(maxsize=16)
def _compiled(
    step: Callable[..., Any], policy: Policy, strict: bool | None, keep: int | None, signature: Any
) -> RoundedModule:
    return RoundedModule(Iteration(step, keep), policy, strict, 0)


@contextlib.contextmanager
def _holding(compiled: RoundedModule, watched: Watched) -> Iterator[None]:
    """Let a compiled iteration hold what its step reads from outside, until the call ends."""
    source = compiled.source
    assert isinstance(source, Iteration)
    with _HOLDING:
        source.hold(watched)
        try:
            yield
        finally:
            source.release()
            compiled._captures.forget_state()


def _require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type_of(value)}; expected an int of at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")


def _require_inputs(inputs: Any, steps: int) -> None:
    for path, leaf in pytree.tree_flatten_with_path(inputs)[0] if inputs is not None else ():
        name = f"inputs{pytree.keystr(path)}"
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} is {type_of(leaf)}; expected a tensor with a row for each step")
        if leaf.dim() == 0 or leaf.shape[0] != steps:
            raise ValueError(f"{name} has shape {tuple(leaf.shape)}; expected {steps} rows, one for each step")


def _structure(state: Any) -> str:
    """Return a state with an x in place of each tensor, as {'position': x, 'speed': x}."""
    spelled = repr(pytree.tree_map(lambda _: "\0", state))
    return spelled.replace("'\\x00'", "x")


def _require_state(step: Callable[..., Any], state: Any, inputs: Any) -> Watched:
    """Return what a step reads from outside. Copies are passed to the step.

    Raises TypeError or ValueError unless the step returns a state like its own, and changes nothing in place.
    """
    leaves, spec = pytree.tree_flatten_with_path(state)
    if not leaves:
        raise ValueError("the state has no tensor; expected at least one")
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"state{pytree.keystr(path)} is {type_of(leaf)}; expected a tensor")
    given = [pytree.tree_map(lambda x: x.detach().clone(), state)]
    if inputs is not None:
        given.append(pytree.tree_map(lambda x: x[0].detach().clone(), inputs))
    watched = Watched(step, pytree.tree_leaves(given))
    with torch.no_grad(), torch.random.fork_rng(), watched:
        following = step(*given)
    results, other = pytree.tree_flatten(following)
    if other != spec:
        old, new = _structure(state), _structure(following)
        raise ValueError(f"a step returns {new}, and was given the state {old}: return the next state alone")
    for (path, before), after in zip(leaves, results, strict=True):
        name = f"state{pytree.keystr(path)}"
        if not isinstance(after, Tensor):
            raise TypeError(f"{name} is {type_of(after)} after a step; expected a tensor")
        if after.shape != before.shape or after.dtype != before.dtype:
            raise ValueError(
                f"{name} is {before.dtype} of shape {tuple(before.shape)}, and after a step {after.dtype} of shape "
                f"{tuple(after.shape)}: a step must keep both"
            )
    return watched
