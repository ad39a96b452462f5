"""Judge one model: whether it is captured, what is left unrounded, its distance from binary64, and whether its bits
hold.

The model is captured twice, without and with gradients, and lowered from there by every policy. All policies but one
run node by node; the other checks that fusing changes no bit. The error of a call is the distance of its results from
those of the same model in float64 under stock PyTorch, relative to their norm; it is compared with the error of stock
float32. A misfit is a sentence that states which promise was not kept.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxround
from benchmarks.zoo.subjects import Example, Subject, Unbuildable
from fxround.errors import FxroundError

# The unit roundoff of each policy's arithmetic over binary32's, at most (up_down moves by a whole unit).
POLICIES: Final[Mapping[str, float]] = {
    "identity": 1.0, "reproducible": 1.0, "stochastic": 2.0, "up_down": 2.0, "bfloat16": 2.0**16
}  # fmt: skip
# An error may be this multiple of stock float32's, because the operations have another order. It need not be
# below FLOOR times the unit roundoff, and errors that exceed ALL say nothing.
SLACK: Final = 16.0
FLOOR: Final = 64 * 2.0**-24
ALL: Final = 1.5
SEED: Final = 3
# The largest relative error of gradients in float64 that is one of roundings alone.
WIDE: Final = 1e-9
# The policy that runs fused, as users run it. The others run node by node, on kernels that models share.
FUSED: Final = "reproducible"

Record = dict[str, Any]
Report = Callable[[Record], None]


class Interloper(nn.Module):
    """Another model that runs between two calls: its buffers come from the same pool as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.cat([self.a(x).relu(), self.b(x).relu()], 1))
        return y.softmax(1)


@cache
def _interloper() -> Any:
    torch.manual_seed(0)
    return fxround.compile(Interloper().eval(), "reproducible")


def interrupt() -> None:
    """Run another model."""
    plain(_interloper(), (torch.randn(2, 3, 12, 12),), {})


class Binary64(TorchFunctionMode):
    """Stock PyTorch with every float32 that a model requests replaced by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = pytree.tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}), is_leaf=_is_dtype
        )
        return func(*args, **kwargs)


def _is_dtype(x: Any) -> bool:
    return isinstance(x, torch.dtype)


def floats(result: Any) -> list[Tensor]:
    """Return the floating-point tensors of a result, in order."""
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative distance of a tensor from its yardstick (finite elements); inf for other shapes."""
    if [t.shape for t in results] != [t.shape for t in exact]:
        return math.inf
    worst = 0.0
    for a, b in zip(results, exact, strict=True):
        a, b = a.detach().double(), b.detach().double()
        # Masks contain the least number of their format, which is no result of an operation.
        kept = b.isfinite() & (b.abs() < 1e30)
        if bool((a.isfinite() & (a.abs() < 1e30) != kept).any()):
            return math.inf
        a, b = a[kept], b[kept]
        size = float(b.norm())
        worst = max(worst, float((a - b).norm()) / size if size else float((a != 0).any()))
    return worst


def same(a: Any, b: Any) -> bool:
    """Whether bits are equal; NaNs are equal."""
    x, y = floats(a), floats(b)
    return len(x) == len(y) and all(
        s.shape == t.shape and bool(((s == t) | (s.isnan() & t.isnan())).all()) for s, t in zip(x, y, strict=True)
    )


def rows(value: Any, batch: int, row: int) -> Any:
    """Return row ``row`` of every tensor whose dimension 0 is the batch."""

    def of(x: Any) -> Any:
        return x[row : row + 1] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x

    return pytree.tree_map(of, value)


def yardstick(example: Example, call: Callable[[nn.Module, Any, Any], Any]) -> Any:
    """Return ``call(model, args, kwargs)`` of a copy in float64, in which no float32 is left."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    model = copy.deepcopy(example.model).double()
    args, kwargs = pytree.tree_map(wide, (example.args, example.kwargs))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Binary64():
            return call(model, args, kwargs)
    finally:
        torch.set_default_dtype(before)


def plain(model: Any, args: Any, kwargs: Any) -> Any:
    """Call the model without gradients, with PyTorch's own generator seeded."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        return model(*args, **kwargs)


def gradients(model: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the gradients of the parameters, of the mean square of every result."""
    torch.manual_seed(SEED)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = None
    with torch.enable_grad():
        results = [t for t in floats(model(*args, **kwargs)) if t.requires_grad]
        if not results:
            return []
        kept = [t[t.detach().abs() < 1e30] for t in results]
        torch.stack([t.square().mean() for t in kept if t.numel()]).sum().backward()
    return [p.grad for p in parameters if p.grad is not None]


@dataclasses.dataclass
class Judge:
    """The checks of one subject, in order; ``record`` grows with each result, and ``report`` is called with it.

    gradient, unfused: whether to check gradients, and whether fusing changes a bit.
    """

    subject: Subject
    policies: Sequence[str] = tuple(POLICIES)
    gradient: bool = True
    report: Report = lambda record: None
    unfused: bool = True

    def __post_init__(self) -> None:
        self.record: Record = {"name": self.subject.title, "outcome": "running", "stage": "build", "misfits": []}

    def run(self) -> Record:
        """Return the record. Errors of fxround are in it; a fault of the zoo is ``Unbuildable``'s sentence."""
        began = time.process_time()
        try:
            self._ask()
            self.record["outcome"] = "captured"
        except Unbuildable as e:
            self.record |= {"outcome": "unbuildable", "reason": brief(e)}
        except FxroundError as e:
            self.record |= {"outcome": "refused", "reason": brief(e, _WHOLE)}
        except Exception as e:  # any other exception that passes through fxround is a finding
            self._foreign(e)
            self.record |= {"outcome": "failed", "reason": f"{type(e).__name__}: {brief(e)}"}
        self.record["seconds"] = round(time.process_time() - began, 1)
        self.report(self.record)
        return self.record

    def _stage(self, name: str) -> None:
        self.record["stage"] = name
        self.report(self.record)

    def _misfit(self, text: str) -> None:
        self.record["misfits"].append(text)
        self.report(self.record)

    def _foreign(self, e: Exception) -> None:
        where = traceback.extract_tb(e.__traceback__)[-1]
        place = f"{'/'.join(where.filename.split('/')[-3:])}:{where.lineno}"
        self._misfit(f"{self.record['stage']}: foreign {type(e).__name__} at {place}: {brief(e)}")

    def _ask(self) -> None:
        self._stage("build")
        example, stock, exact = self._built()
        self.record["parameters"] = sum(p.numel() for p in example.model.parameters())
        self.record["stock_error"] = error(floats(stock), exact)
        self._stage("capture")
        base = fxround.compile(example.model, "identity", strict=False, seed=SEED, fuse=False)
        with torch.no_grad():
            base.prepare(*example.args, **example.kwargs)
        self.record["nodes"] = len(base.captured.graph.graph.nodes)
        fixed = None
        self.record["policies"] = answers = {}
        for name in self.policies:
            module = _under(base, name, name == FUSED)
            answers[name] = self._policy(name, module, example, exact)
            fixed = module if name == FUSED else fixed
        if fixed is not None:
            if self.unfused:
                self._fused(fixed, _under(base, FUSED, False), example)
            self._row(fixed, example)
            if self.gradient:
                self._gradient(fixed, example)

    def _built(self) -> tuple[Example, Any, list[Tensor]]:
        """Return the example, the stock result and the yardstick."""
        try:
            example = self.subject.build()
            stock = plain(example.model, example.args, example.kwargs)
            torch.rand(7)
            if not same(stock, plain(example.model, example.args, example.kwargs)):
                raise Unbuildable("two stock calls differ")
            if not floats(stock):
                raise Unbuildable("the result holds no floating-point tensor")
            exact = self._yardstick(example, stock)
        except Unbuildable:
            raise
        except Exception as e:  # stock PyTorch does not run it: the record says why
            raise Unbuildable(f"{type(e).__name__}: {brief(e)}") from e
        if any(t.isnan().any() for t in floats(stock)):
            raise Unbuildable("the stock result holds NaN")
        torch.manual_seed(SEED)
        state = torch.get_rng_state()
        plain(example.model, example.args, example.kwargs)
        self.record["draws"] = not torch.equal(torch.get_rng_state(), state)
        return example, stock, exact

    def _yardstick(self, example: Example, stock: Any) -> list[Tensor]:
        """Return the results in float64; stock float32's own if the model runs in no other dtype."""
        try:
            return [t.clone() for t in floats(yardstick(example, plain))]
        except Exception as e:  # a kernel without float64 may raise anything
            self.record["no_yardstick"] = f"{type(e).__name__}: {brief(e)}"
            return [t.clone() for t in floats(stock)]

    def _policy(self, name: str, module: Any, example: Example, exact: Sequence[Tensor]) -> Record:
        self._stage(name)
        began = time.process_time()
        first = plain(module, example.args, example.kwargs)
        coverage = module.coverage()
        verdict: Record = {"error": error(floats(first), exact), "unrounded": len(coverage.unrounded)}
        if coverage.unrounded and name == "reproducible":
            self.record["unrounded"] = sorted({_operator(text) for text in coverage.unrounded})
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, first)
        interrupt()
        verdict["again"] = same(plain(module, example.args, example.kwargs), kept) and same(first, kept)
        verdict["seconds"] = round(time.process_time() - began, 1)
        if not verdict["again"]:
            self._misfit(f"{name}: the second call differs from the first")
        allowed = bound(name, self.record["stock_error"])
        if not verdict["error"] <= allowed and not self.record["draws"]:
            self._misfit(f"{name}: error {verdict['error']:.2g} against binary64, {allowed:.2g} allowed")
        return verdict

    def _fused(self, fused: Any, single: Any, example: Example) -> None:
        """Check that fusing, reuse of memory and chains over rows change no bit."""
        self._stage("fused")
        first = [t.clone() for t in floats(plain(fused, example.args, example.kwargs))]
        self.record["fused"] = same(first, floats(plain(single, example.args, example.kwargs)))
        if not self.record["fused"]:
            self._misfit("reproducible: fused and node by node differ")

    def _row(self, module: Any, example: Example) -> None:
        """Check rows alone: None if the model's rows depend on one another, a sentence if a row is refused."""
        self._stage("row")
        self.record["row"] = None
        if not example.batch or self.record["draws"]:
            return
        batch, last = example.batch, example.batch - 1
        args, kwargs = rows((example.args, example.kwargs), batch, last)
        single = dataclasses.replace(example, args=args, kwargs=kwargs)
        try:
            apart = floats(yardstick(single, plain))
        except Exception:  # a model that takes no batch of one
            return
        whole = floats(yardstick(example, plain))
        if error(apart, rows(whole, batch, last)) > 1e-9:
            return
        try:
            alone = plain(module, args, kwargs)
        except FxroundError as e:
            self.record["row"] = f"{type(e).__name__}: {brief(e)}"
            return
        together = rows(floats(plain(module, example.args, example.kwargs)), batch, last)
        self.record["row"] = same(floats(alone), together)
        if not self.record["row"]:
            self._misfit(f"row alone differs under reproducible, by {error(floats(alone), together):.2g}")

    def _gradient(self, module: Any, example: Example) -> None:
        self._stage("gradient")
        verdict: Record = {}
        self.record["gradient"] = verdict
        try:
            stock = gradients(example.model, example.args, example.kwargs)
            exact = yardstick(example, gradients)
        except Exception as e:  # the model itself has no gradient here
            verdict["reason"] = f"stock: {type(e).__name__}: {brief(e)}"
            return
        if not stock or error(exact, exact) or not all(bool(t.isfinite().all()) for t in (*stock, *exact)):
            verdict["reason"] = "stock: no finite gradient"
            return
        try:
            first = [t.clone() for t in gradients(module, example.args, example.kwargs)]
            interrupt()
            second = gradients(module, example.args, example.kwargs)
            verdict["unrounded"] = len(module.coverage().unrounded)
        except FxroundError as e:
            verdict["reason"] = brief(e, _WHOLE)
            return
        except Exception as e:  # recorded as a misfit
            self._foreign(e)
            verdict["reason"] = f"{type(e).__name__}: {brief(e)}"
            return
        verdict |= {"again": same(first, second), "finite": all(bool(t.isfinite().all()) for t in first)}
        verdict |= {"stock_error": distance(stock, exact), "error": distance(first, exact)}
        if not verdict["again"]:
            self._misfit("gradient: the second backward differs from the first")
        if not verdict["finite"]:
            self._misfit("gradient: not finite")
        allowed = bound("reproducible", verdict["stock_error"])
        # Where stock float32 has infinities or NaNs that binary64 has not, there is nothing to compare with.
        if not verdict["error"] <= allowed and not self.record["draws"] and math.isfinite(verdict["stock_error"]):
            # A ReLU whose operand is zero up to its last bit may decide differently, which moves the gradient by far
            # more than its roundings. In float64 no such operand is near, and a wrong formula is as wrong as before.
            verdict["wide"] = self._in_float64(example, exact)
            if not verdict["wide"] <= WIDE:
                self._misfit(f"gradient: error {verdict['error']:.2g} against binary64, {allowed:.2g} allowed")

    def _in_float64(self, example: Example, exact: list[Tensor]) -> float:
        """Return the error of the gradients of the model in float64."""

        def wide(x: Any) -> Any:
            return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

        model = copy.deepcopy(example.model).double()
        args, kwargs = pytree.tree_map(wide, (example.args, example.kwargs))
        compiled = fxround.compile(model, FUSED, strict=False, seed=SEED)
        return distance(gradients(compiled, args, kwargs), exact)


def _under(base: Any, policy: str, fuse: bool) -> Any:
    """Return the module under another policy, from the same capture."""
    base.fuse = fuse
    return base.with_policy(policy, False)


def distance(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the relative distance of all gradients as one vector; inf for other shapes."""
    if [t.shape for t in results] != [t.shape for t in exact]:
        return math.inf
    squares = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(results, exact, strict=True))
    size = sum(float(b.double().square().sum()) for b in exact)
    return math.sqrt(squares / size) if size else float(squares > 0)


def bound(policy: str, stock: float) -> float:
    """Return the largest permitted error: stock float32's, scaled by the policy's unit roundoff and SLACK."""
    return min(ALL, SLACK * POLICIES[policy] * max(stock, FLOOR / SLACK))


# Characters of a refusal that is kept whole: the page has its sentences.
_WHOLE: Final = 2000


def brief(e: BaseException, most: int = 300) -> str:
    """Return the text of an exception on one line."""
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _operator(text: str) -> str:
    """Return ``aten.foo.default (reason)`` of an entry of ``Coverage.unrounded``."""
    _, _, rest = text.partition(": ")
    operator, _, where = rest.partition(" in ")
    return f"{operator} ({where.rpartition('(')[2].rstrip(')')})"
