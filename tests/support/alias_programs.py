"""Random small functions of views, operations in place and returned inputs, and how their results share memory.

``fault_of`` compares a compiled function with eager PyTorch: which results are the same tensor as an input, a parameter
or another result, which share memory, and where, their strides, gradients, and what the call has changed. All numbers
are small integers, on which every operation is exact. Where a policy rounds, the numbers are those of the function with
copies of its results.

    python tests/support/alias_programs.py [--count 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import FxroundError

VIEWS: Final = """
{t}.t() | {t}.view(-1) | {t}.reshape(-1) | {t}[0] | {t}[..., 1:] | {t}[:, :2] | {t}.unsqueeze(0) | {t}.squeeze()
{t}.transpose(0, -1) | {t}.flatten() | {t}.detach() | {t}.contiguous() | {t}.to(torch.float32) | {t}.float()
{t}.T | {t}.narrow(0, 0, 1) | {t}.chunk(2, -1)[1] | {t}.unbind(0)[0] | {t}.split(1)[0] | {t}.view_as({t})
{t}[None] | {t}.mT | {t}.expand(2, *{t}.shape) | {t}.diagonal() | F.dropout({t}, 0.5, training=False)
torch.ravel({t}) | {t}.swapaxes(0, -1) | {t}.reshape({t}.shape) | {t}.type_as({t}) | torch.atleast_2d({t})
{t}.movedim(0, -1) | {t}.as_strided((2,), (1,)) | {t}.clone() | {t}.expand_as({t}) | {t}.permute(0, 1)
{t}.data | {t}.view({t}.shape[0], -1) | m.same({t}) | {t}.unflatten(0, (1, -1)) | {t}[:] | {t}[::2]
{t}.select(-1, 1) | {t}.broadcast_to({t}.shape) | torch.squeeze({t}, 0)
"""
COMPUTED: Final = """
{t} * 2 | {t} + 1 | {t} - {u} | F.linear({t}, m.weight) | torch.relu({t}) | {t}.sum(0) | torch.cat([{t}, {t}])
torch.stack([{t}, {u}]) | {t}.clone() | {t}.where({u} > 0, {u}) | {t}.flip(0)
"""
IN_PLACE: Final = """
{t}.mul_(2) | {t}.add_(1) | {t}.zero_() | {t}.relu_() | {t}.neg_() | {t}.copy_({u}) | {t}[0].add_(1)
{t}.add_({u}) | {t}.view(-1).mul_(2) | {t}.fill_(3) | {t}.detach().add_(1) | {t}.T.mul_(2) | {t}.unsqueeze_(0)
{t}.t_()
"""
_KINDS: Final = [[each.strip() for each in re.split(r"[|\n]", table.strip())] for table in (VIEWS, COMPUTED, IN_PLACE)]
# Errors that say what to change: results that PyTorch would differentiate, or that no graph holds.
REFUSALS: Final = (
    "a view in which elements of an input, or of another result, repeat",
    "share elements of a tensor which is no result",
    "computes no tensor: there is nothing to round",
    "returns arguments, parameters and buffers alone",
    "Unsupported function call (delayed)",  # x.t_() of an input
    "as_strided of a tensor with gaps reads memory by layout",
    "gives a tensor another shape in place",
    "a gradient flows through the change",
)
POLICIES: Final = ("identity", "reproducible", "bfloat16")
MODES: Final = {"training": (True, True), "eval": (False, False), "eval with gradients": (False, True)}


class Model(nn.Module):
    """A model that calls a function with itself and its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4) - 4)
        self.register_buffer("buf", torch.arange(8.0).reshape(2, 4) - 3)
        self.same = nn.Identity()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


@dataclass(frozen=True)
class Program:
    """A function as text, and the mode of the model that calls it: training or not, and whether x has a gradient."""

    text: str
    training: bool
    gradients: bool

    def function(self) -> Callable[..., Any]:
        """Return the function."""
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.text, names)
        found: Callable[..., Any] = names["f"]
        return found

    def copied(self) -> Program:
        """Return the program that returns copies."""
        text = re.sub(r"\b(h\d+|x|y|beside|m\.\w+)\b(?=[,\])}])", r"\1.clone()", self.text.splitlines()[-1])
        return Program("\n".join([*self.text.splitlines()[:-1], text]), self.training, self.gradients)


def called(program: Program, made: Callable[[nn.Module], Any]) -> tuple[dict[str, Tensor], Any]:
    """Return inputs and state after a call, and the results."""
    model = Model(program.function()).train(program.training)
    model.requires_grad_(program.training)
    x, y = (torch.arange(8.0) - 2).reshape(2, 4), torch.arange(4.0) - 1
    x.requires_grad_(program.gradients)
    with torch.set_grad_enabled(program.training or program.gradients):
        result = made(model)(x, y)
    return {"x": x, "y": y, "m.weight": model.weight, "m.buf": model.buf}, result


def shown(result: Any, known: dict[str, Tensor], whole: bool = False) -> list[Any]:
    """Return, for each tensor, the earlier ones that it is, those whose memory it shares and where, and its layout.

    whole: also the layout of memory of its own, and whether a tensor without a gradient is a view.
    """
    rows: list[Any] = []
    known = dict(known)
    for i, tensor in enumerate(pytree.tree_leaves(result)):
        same = [name for name, other in known.items() if other is tensor]
        memory = tensor.untyped_storage().data_ptr()
        shared = [name for name, other in known.items() if other.untyped_storage().data_ptr() == memory]
        place = tensor.storage_offset() if shared else 0
        asked = whole or (tensor.requires_grad and not same)
        view = tensor._is_view() if shared and asked else False
        # Memory of its own may hold elements in another order.
        layout = tensor.stride() if shared or whole else None
        rows.append((same, shared, place, view, tensor.shape, layout, tensor.requires_grad))
        known[f"result {i}"] = tensor
    return rows


def numbers(known: dict[str, Tensor], result: Any) -> list[Any]:
    """Return the numbers of inputs, state and results."""
    return [t.detach().tolist() for t in (*known.values(), *pytree.tree_leaves(result))]


def gradients(known: dict[str, Tensor], result: Any) -> list[Any]:
    """Return the gradients of a sum in which all numbers have other weights; [] if there are none."""
    leaves = [t for t in pytree.tree_leaves(result) if t.requires_grad and t.numel()]
    sources = [t for t in known.values() if t.requires_grad and t.is_leaf]
    if not leaves or not sources:
        return []
    weights = [torch.arange(float(t.numel())).reshape(t.shape) for t in leaves]
    loss = torch.stack([(t * w).sum() for t, w in zip(leaves, weights, strict=True)]).sum()
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return [None if g is None else g.tolist() for g in found]


def drawn(seed: int) -> Program:
    """Draw a program that eager PyTorch runs."""
    chosen = random.Random(seed)
    training, wanted = MODES[chosen.choice(list(MODES))]
    if training:
        wanted = chosen.random() < 0.5
    lines, names, steps = ["def f(m, x, y):"], ["x", "y", "m.weight", "m.buf"], chosen.randint(1, 6)
    while len(lines) <= steps:
        (kind,) = chosen.choices(_KINDS, (5, 3, 2))
        t, u = (chosen.choice(names + 2 * names[4:]) for _ in range(2))
        expression, name = chosen.choice(kind).format(t=t, u=u), f"h{len(lines)}"
        line = f"    {name} = {expression}"
        if _runs(Program("\n".join([*lines, line, f"    return [{', '.join([*names, name])}]"]), training, wanted)):
            lines.append(line)
            names.append(name)
    returned = chosen.choices(names + names[4:], k=chosen.randint(1, 4))
    if chosen.random() < 0.7:
        lines.append("    beside = x * 2")
        returned.append("beside")
    if len(returned) > 2 and chosen.random() < 0.3:
        text = f"({returned[0]}, {{'a': [{', '.join(returned[1:])}]}})"
    else:
        text = f"({', '.join(returned)},)"
    program = Program("\n".join([*lines, f"    return {text}"]), training, wanted)
    return program if _runs(program) else drawn(seed + 1_000_003)


def _runs(program: Program) -> bool:
    """Whether eager PyTorch runs a program and its backward pass, on small tensors with small numbers."""
    try:
        known, result = called(program, lambda model: model)
        leaves = pytree.tree_leaves((list(known.values()), result))
        small = all(t.numel() < 200 and t.dim() < 5 and not (t.abs() > 1e4).any() for t in leaves)
        return small and gradients(known, result) is not None
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False


def fault_of(program: Program, policy: str) -> str:
    """Return what differs from eager PyTorch: "" if nothing does, "refused: ..." for an error of ``REFUSALS``."""

    def made(model: nn.Module) -> Any:
        return fxround.compile(model, policy)

    try:
        known, result = called(program, made)
        found, values = shown(result, known), numbers(known, result)
        slopes = gradients(known, result)
    except FxroundError as error:
        told = str(error)
        named = any(each in told for each in REFUSALS)
        return f"refused: {told[:80]}" if named else f"{type(error).__name__}: {told[:300]}"
    if policy in ("identity", "reproducible"):
        others, their = called(program, lambda model: model)
        want = shown(their, others), numbers(others, their), gradients(others, their)
        names = ("shares memory", "numbers", "gradients")
        pairs = zip(names, (found, values, slopes), want, strict=True)
    else:
        others, their = called(program.copied(), made)
        pairs = zip(("numbers",), (values,), (numbers(others, their),), strict=True)
    return "; ".join(f"{name}: {a} for {b}" for name, a, b in pairs if a != b)


def main() -> None:
    """Print every fault with its program, and how many programs were refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many programs (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (0)")
    chosen = parser.parse_args()
    counts = collections.Counter[str]()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        program = drawn(seed)
        for policy in POLICIES:
            try:
                fault = fault_of(program, policy)
            except Exception as error:  # no error of fxround's may come
                fault = f"{type(error).__name__}: {str(error)[:500]}"
            counts["refused" if fault.startswith("refused") else "faults" if fault else "right"] += 1
            if fault and not fault.startswith("refused"):
                print(f"seed {seed}, {policy}, training={program.training}, gradients={program.gradients}: {fault}")
                print(program.text, flush=True)
    print(dict(counts))
    sys.exit(bool(counts["faults"]))


if __name__ == "__main__":
    main()
