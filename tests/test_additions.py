"""What docs/design.md says of additions is true: made in the named places of a copy of the package, they work.

One child process imports the copy and tries every addition.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Insertion:
    """A text to insert into a file of the package, after or before a line that occurs once; without one, a new file."""

    file: str
    text: str
    after: str = ""
    before: str = ""

    def apply(self, package: Path) -> None:
        file, anchor = package / self.file, self.after or self.before
        if not anchor:
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.text)
            return
        text = file.read_text()
        assert text.count(anchor) == 1, (self.file, anchor)
        file.write_text(text.replace(anchor, self.after + self.text + self.before))


@dataclass(frozen=True)
class Addition:
    """What is inserted, and a script that fails where the addition does not work."""

    insertions: tuple[Insertion, ...]
    script: str


ADDITIONS = {
    "a format": Addition(
        (
            Insertion(
                "numerics/formats/rows.py",
                '    Format("e5m6", 7, -14, 65024.0),\n',
                after="_FORMATS: Final[tuple[Format, ...]] = (\n",
            ),
        ),
        """
x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 300
assert torch.equal(fxround.round(x, "e5m6"), fxround.round(x, "ieee(5,7)"))
assert fxround.round(torch.tensor([1 + 2.0**-6, 1 + 2.0**-7, 65536.0]), "e5m6").tolist() == [1.015625, 1.0, math.inf]
""",
    ),
    "a table of values": Addition(
        (
            Insertion(
                "numerics/formats/rows.py",
                '    Format.table([-1, 0, 1], name="ternary"),\n',
                after='    Format.table(_NF4, name="nf4"),\n',
            ),
        ),
        """
x = torch.tensor([-7.0, -0.6, -0.4, 0.2, 0.8])
assert fxround.round(x, "ternary").tolist() == [-1, -1, 0, 0, 1]
assert fxround.compile(Calls(lambda x: x * 1.0), "ternary")(x).tolist() == [-1, -1, 0, 0, 1]
""",
    ),
    "a scaled format": Addition(
        (
            Insertion(
                "numerics/formats/scaled/rows.py",
                '        "mxfp5": _microscaled(Format.ieee(exponent_bits=2, precision=3)),\n',
                after='        "mxint8": _microscaled(fixed_point(8, 6)),\n',
            ),
        ),
        """
x = torch.zeros(2, 32)
x[0, :4], x[1, :2] = torch.tensor([3.5, 3.25, 0.3, -9.0]), torch.tensor([1024.0, 100.0])
assert fxround.round(x, "mxfp5")[0, :4].tolist() == [4.0, 3.0, 0.0, -8.0]
model = fxround.compile(torch.nn.Linear(32, 3), "mxfp5", example_inputs=x)
assert "scaled(ieee(2,3);32,e8m0fnu,floor)" in str(model.summary())
""",
    ),
    "an operator `fxround::`": Addition(
        (
            Insertion(
                "graph/dialect/blocks.py",
                '''
@operator("count")
@dataclass(frozen=True)
class Count(Call[T]):
    """The number of elements."""

    x: T
    more: int

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Nothing is rounded."""

    def fake(self: Count[Tensor]) -> Tensor:
        return self.x.new_empty(())


''',
                before="def block_sizes(",
            ),
            Insertion(
                "runtime/torch_ops.py",
                "    dialect.blocks.Count: lambda call: call.x.new_tensor(call.x.numel() + call.more),\n",
                after="    dialect.BlockMaximum: block_maximum,\n",
            ),
        ),
        """
assert torch.ops.fxround.count(torch.ones(2, 3), 1) == 7
torch.library.opcheck(torch.ops.fxround.count.default, (torch.ones(2, 3), 1))
""",
    ),
    "a mode": Addition(
        (
            Insertion(
                "numerics/modes/rows.py",
                '    Mode("nearest_up", lambda lost: lost.above | (lost.half & lost.positive)),\n',
                after="_MODES: Final[tuple[Mode, ...]] = (\n",
            ),
        ),
        """
x = torch.tensor([1 + k * 2.0**-9 for k in range(9)])
want = [1 + k * 2.0**-7 for k in (0, 0, 1, 1, 1, 1, 2, 2, 2)]
assert fxround.round(x, "bfloat16/nearest_up").tolist() == want
assert fxround.compile(Calls(lambda x: x * 1.0), "bfloat16/nearest_up")(x).tolist() == want
assert fxround.round(-x, "bfloat16/nearest_up").tolist() == [-1 - k * 2.0**-7 for k in (0, 0, 0, 1, 1, 1, 1, 2, 2)]
""",
    ),
    "an elementary function": Addition(
        (
            Insertion(
                "numerics/elementary/exponential.py",
                'Elementary("special_modified_bessel_i0", 1, i0, 0.6, "i0(0) = 1", "besseli(0, x)", "|x| <= 1/8"),\n',
                after="FUNCTIONS: Final = (\n",
            ),
            Insertion(
                "numerics/elementary/exponential.py",
                """


def i0(x: Expr) -> Approximation:
    z = x * x * 0.25
    return Approximation(*fast_two_sum(f64(1.0), z * polynomial(z, [1 / math.factorial(k) ** 2 for k in range(1, 9)])))
""",
                before="\n\ndef exponential(",
            ),
            Insertion(
                "numerics/elementary/exponential.py", "import math\n", after="from __future__ import annotations\n"
            ),
        ),
        """
x = torch.linspace(-0.125, 0.125, 200)
model = fxround.compile(Calls(torch.special.modified_bessel_i0), "binary32/toward_positive")
got = model(x).tolist()
assert not model.coverage().unrounded
for a, y in zip(map(Fraction, x.tolist()), got, strict=True):
    exact = sum((a / 2) ** (2 * k) / Fraction(math.factorial(k)) ** 2 for k in range(14))
    assert y == round_exact(exact, False, fxround.Rounding.parse("binary32/toward_positive"))
""",
    ),
    "a reduction or a scan": Addition(
        (
            Insertion(
                "kernels/reductions.py",
                """
def logcumsumexp_kernel(accumulate: Rounding, rounding: Rounding, load_as: Storage, result: Storage) -> Scan:
    sums, own = cumsum_kernel(accumulate, rounding, load_as, result), Rounding.parse("binary32")
    (_, x, _), (total, _) = sums.step.params, sums.finish.params
    step = substitute(sums.step.results, {x: apply("exp", (x,), own, "f32")})
    finish = substitute(sums.finish.results, {total: apply("log", (total,), own, "f32")})
    steps = Function("step", sums.step.params, step), Function("finish", sums.finish.params, finish)
    return Scan(*steps, sums.loads, sums.result, sums.accumulator, sums.draws, sums.finish_draws)


""",
                before="def _multiply_step(",
            ),
            Insertion(
                "graph/dialect/reductions.py",
                """
from fxround.kernels.reductions import logcumsumexp_kernel

@operator("logcumsumexp", aten=("logcumsumexp.default",))
@dataclass(frozen=True)
class Logcumsumexp(ScanCall[T]):
    def kernel(self, loads: tuple[Storage, ...]) -> Scan:
        return logcumsumexp_kernel(*self.arithmetic(loads))

""",
                before='@operator("cumprod"',
            ),
        ),
        """
x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
model = fxround.compile(Calls(lambda x: torch.logcumsumexp(x, 1)), "reproducible")
one = lambda name, v: torch.ops.fxround.pointwise([v], f"t0 = {name}(x0) @ binary32/nearest_even/inf", v.dtype, RNG, 0)
sums = torch.ops.fxround.cumsum(one("exp", x), 1, *["binary32/nearest_even/inf"] * 2, RNG, 0)
assert torch.equal(model(x), one("log", sums))
assert not model.coverage().unrounded
""",
    ),
    "a contraction": Addition(
        (
            Insertion(
                "graph/dialect/contractions.py",
                """
@operator("grouped", aten=("_grouped_mm.default",))
@dataclass(frozen=True)
class Grouped(ContractionCall[T]):
    sums: ClassVar = {"self": -1, "mat2": -2}

    a: T
    b: T
    accumulate: str
    rounding: str
    rng: T
    node: int

    def fake(self: Grouped[Tensor]) -> Tensor:
        self.require()
        return self.a.new_empty([*self.a.shape[:-1], self.b.shape[-1]])

""",
                before='@operator("matmul"',
            ),
            Insertion(
                "runtime/cpu/matmul.py",
                """
from fxround.graph.dialect.contractions import Grouped
from fxround.runtime.contractions import Product
from fxround.runtime.cpu.contraction import begin_product

def begin_grouped(call: Grouped[Tensor]) -> Pending:
    right = Right.matrices(call.b.shape, call.b.stride())
    size = [*call.a.shape[:-1], call.b.shape[-1]]
    draw = Draw.of(call.rng, call.node)
    return begin_product(Product(call.kernel(call.loads()), call.a, call.b, right, 0, draw, size))

BEGUN[Grouped] = begin_grouped
""",
                after="BEGUN: Final[dict[type[Call[Any]], Callable[[Any], Pending]]] = {Matmul: begin_matmul}\n",
            ),
        ),
        """
from fxround.localization.cancellation import cancellations
a, b = (torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
product = Calls(lambda a, b: torch.nn.functional.grouped_mm(a, b.transpose(1, 2)))
one = lambda a, b: torch.ops.fxround.matmul(a, b, *["binary32/nearest_even/inf", "bfloat16/nearest_even/inf"], RNG, 0)
model = fxround.compile(product, "reproducible")
assert torch.equal(model(a, b), one(a, b.transpose(1, 2)))
assert not model.coverage().unrounded
rules = fxround.Rule(rounding="dtype", accumulate="wide"), fxround.Rule(operator="contraction", operands="mxfp8")
q = lambda v: fxround.round(v, "mxfp8", dim=-1)
assert torch.equal(fxround.compile(product, fxround.Policy("blocks", rules))(a, b), one(q(a), q(b).transpose(1, 2)))
assert "grouped" in str(cancellations(product, (a, b), bits=0))
""",
    ),
    "a composite operator": Addition(
        (
            Insertion(
                "operators/formulas/activations.py",
                '''
@formula(aten.logaddexp.default)
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """logaddexp(x, y) = max(x, y) + log1p(exp(-|x - y|))"""
    return torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs()))
''',
                after="aten = torch.ops.aten\n",
            ),
        ),
        """
x, y = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
model = fxround.compile(Calls(torch.logaddexp), "bfloat16")
r = lambda v: fxround.round(v, "bfloat16")
one = lambda name, v: torch.ops.fxround.pointwise([v], f"t0 = {name}(x0) @ bfloat16/nearest_even/inf", v.dtype, RNG, 0)
x, y = r(x), r(y)
assert torch.equal(model(x, y), r(torch.maximum(x, y) + one("log1p", one("exp", -r(x - y).abs()))))
assert not model.coverage().unrounded
""",
    ),
    "other formulas for the same operators": Addition(
        (
            Insertion(
                "operators/formulas/repdl.py",
                '''
@formula(aten.elu.default, definitions="repdl")
def elu(x: Tensor, *rest: Any) -> Tensor:
    """elu(x) = x + x, to be seen"""
    return x + x
''',
                after="aten = torch.ops.aten\n",
            ),
        ),
        """
x = torch.tensor([-1.0, 3.0])
assert fxround.compile(torch.nn.ELU(), "repdl")(x).tolist() == [-2.0, 6.0]
assert fxround.compile(torch.nn.ELU(), "reproducible")(x).tolist()[1] == 3.0
""",
    ),
    "an operator's kind": Addition(
        (Insertion("operators/rules.py", "special_bessel_j0\n", after='"no kernel has this function yet": """\n'),),
        """
model = fxround.compile(Calls(torch.special.bessel_j0), "bfloat16")
model(torch.ones(2))
assert "no kernel has this function yet" in model.coverage().unrounded[0]
""",
    ),
    "a pass": Addition(
        (
            Insertion(
                "passes/counted.py",
                """SEEN = []
def counted(graph, plan): SEEN.append(len(graph.graph.nodes))
""",
            ),
            Insertion(
                "passes/__init__.py",
                "from fxround.passes.counted import counted\n",
                after="from fxround.passes.classify import classify\n",
            ),
            Insertion("passes/__init__.py", "    counted,\n", after="    lower_pointwise,\n"),
        ),
        """
from fxround.passes.counted import SEEN
fxround.compile(torch.nn.ReLU(), "bfloat16")(torch.ones(2))
assert SEEN and min(SEEN) > 2
""",
    ),
    "an optimization": Addition(
        (
            Insertion(
                "passes/optimizations/tidied.py",
                """SEEN = []
def tidied(graph):
    SEEN.append(len(graph.graph.nodes))
    graph.graph.eliminate_dead_code()
    return graph
""",
            ),
            Insertion(
                "passes/__init__.py",
                "from fxround.passes.optimizations.tidied import tidied\n",
                after="from fxround.passes.optimizations.hoist import hoist\n",
            ),
            Insertion(
                "passes/__init__.py",
                "    fused = tidied(fused)\n",
                after="    fused = fuse(hoist(choose(lowered)))\n",
            ),
        ),
        """
from fxround.passes.optimizations.tidied import SEEN
x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
plain = fxround.compile(torch.nn.Softmax(-1), "stochastic", seed=1, fuse=False)
fused = fxround.compile(torch.nn.Softmax(-1), "stochastic", seed=1)
assert torch.equal(plain(x), fused(x)) and SEEN and min(SEEN) > 2
""",
    ),
    "an operator of the scalar IR": Addition(
        (
            Insertion(
                "numerics/arithmetic/scalar.py",
                '    "xnor": Op(_same(*_INTEGERS), lambda a, b: ~(a ^ b)),\n',
                after='    "xor": Op(_same("bool", *_INTEGERS), np.bitwise_xor),\n',
            ),
            Insertion(
                "numerics/arithmetic/scalar.py",
                '\n\ndef xnor(a: Expr, b: Expr) -> Expr:\n    return _apply("xnor", a, b)\n',
                after='    return _apply("sqrt", x)\n',
            ),
            Insertion(
                "runtime/cpu/llvm/render.py",
                '    "xnor": lambda b, a, t: b.not_(b.xor(*a)),\n',
                after='    "xor": lambda b, a, t: b.xor(*a),\n',
            ),
            Insertion(
                "runtime/cuda/cpp/table.py", '        "xnor": "~({0} ^ {1})",\n', after='        "xor": "{0} ^ {1}",\n'
            ),
        ),
        """
from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.scalar import Function, bits, from_bits, param, xnor
from fxround.runtime.cuda.cpp.table import device_function
from fxround.runtime.run import run_kernel
a, b = param("a", "f32"), param("b", "f32")
body = Function("map", (a, b), (from_bits(xnor(bits(a), bits(b))),))
codes = torch.randint(-(2**31), 2**31, (2, 99), generator=torch.Generator().manual_seed(0)).int()
x, y = codes.view(torch.float32)
(got,) = run_kernel(Map(body, ("f32", "f32"), ("f32",), ()), [x, y], NO_KEY)
assert torch.equal(got.view(torch.int32), ~(codes[0] ^ codes[1]))
assert got.view(torch.int32).tolist() == body.evaluate(x.numpy(), y.numpy())[0].view("i4").tolist()
assert "~(" in device_function(body)
""",
    ),
    "a device": Addition(
        (
            Insertion(
                "runtime/counting/__init__.py",
                """from collections import Counter
from torch import Tensor
from fxround.runtime.cpu.target import CpuTarget

class Counting:
    on, calls, cpu = False, Counter(), CpuTarget()

    def takes(self, operands):
        return self.on and all(x.is_cpu for x in operands if isinstance(x, Tensor))

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.cpu, name)

COUNTING = Counting()
""",
            ),
            Insertion(
                "runtime/target.py",
                "from fxround.runtime.counting import COUNTING\n",
                after="from fxround.runtime.contributions import Contributions\n",
            ),
            Insertion(
                "runtime/target.py",
                "    if COUNTING.takes(operands):\n        return COUNTING\n",
                before="    if runs_texts(operands):\n",
            ),
        ),
        """
from collections import Counter
from fxround.graph.dialect import Matmul
from fxround.kernels import from_text
from fxround.runtime.counting import COUNTING
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_chain, run_product
from fxround.runtime.target import Target
from fxround.runtime.torch_ops import gather, max_pool2d

ops, generator = torch.ops.fxround, torch.Generator().manual_seed(0)
steps, drawn = "binary32/nearest_even/inf", "bfloat16/stochastic/inf"
x, y = torch.randn(3, 5, generator=generator), torch.randn(5, 4, generator=generator)
large = torch.randn(1 << 11, (1 << 10) + 64, generator=generator)
product = from_text.contract(steps, steps, ("f32", "f32"), "f32")
index = torch.tensor([[0, 2, 1, 0, 2]] * 3)
wide = torch.randn(1 << 10, 1 << 9, generator=generator)
softmax = fxround.compile(torch.nn.Softmax(-1), "stochastic", seed=1)

def small():
    compiled = fxround.compile(torch.nn.Softmax(-1), "stochastic", seed=1)
    return [compiled(x) for _ in range(4)]

@lambda function: fxround.compile(Calls(function), "stochastic", seed=1)
def loop(xs):
    return torch._higher_order_ops.scan(lambda s, x: (s * 0.5 + x, s * x), xs[0], xs)

layer = fxround.compile(torch.nn.Sequential(torch.nn.Linear(1 << 9, 8), torch.nn.ReLU()), "stochastic", seed=1)

def stepped():
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(2, 3)), layer.bias.zero_()
    optimizer = fxround.compile_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), "bfloat16")
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()
    return [parameter.detach() for parameter in layer.parameters()]

# What runs, and the calls of a target that it makes.
CASES = {
    "pointwise": (lambda: ops.pointwise([x], f"t0 = exp(x0) @ {drawn}", x.dtype, RNG, 3), {"pointwise": 1}),
    "fused": (lambda: ops.fused([x], f"t0 = exp(x0) @ {drawn}; return t0", "f32", RNG, [3]), {"fused": 1}),
    "matmul": (lambda: ops.matmul(x, y, steps, drawn, RNG, 3), {"contraction": 1}),
    "sum": (lambda: ops.sum(x, [1], False, "lanes:16", steps, steps, RNG, 3), {"reduce": 1}),
    "exact sum": (lambda: ops.sum(x, [1], False, "exact", steps, steps, RNG, 3), {"exact": 1}),
    "cumsum": (lambda: ops.cumsum(x, 1, steps, drawn, RNG, 3), {"scan": 1}),
    "scatter_add": (lambda: ops.scatter_add(x, 1, index, x, steps, RNG, 3), {"scatter": 1}),
    "gather": (lambda: gather(x, 1, index), {"gather": 1}),
    "max_pool2d": (lambda: max_pool2d(x[None], [2, 2]), {"max_pool2d": 1}),
    "iterations": (lambda: ops.iterations(torch.arange(3), RNG, 3), {"iterations": 1}),
    "round": (lambda: fxround.round(x, "bfloat16"), {"map": 1}),
    "round in blocks": (lambda: fxround.round(x, "mxfp8"), {"blocks": 1}),
    "product": (lambda: run_product(product, x[None], y[None], 1, Draw()), {"product": 1}),
    "product again": (lambda: run_chain(Matmul(x, y, steps, steps, RNG, 3), product), {"product_of": 1}),
    "optimizer": (stepped, {"several": 1}),
    "a chain over rows": (lambda: softmax(wide), {"rows": 1}),
    "small values": (small, None),
    "a loop": (lambda: loop(x), {"iterations": 1, "scan_of": 1}),
    "a layer": (lambda: layer(wide), {"followed": 1}),
    "round piece by piece": (lambda: fxround.round(large, "mxfp8/stochastic", seed=3), None),
}
seen = Counter()
for name, (run, want) in CASES.items():
    with torch.no_grad():
        expected = run()
    COUNTING.on, COUNTING.calls = True, Counter()
    try:
        with torch.no_grad():
            got = run()
    finally:
        COUNTING.on = False
    for a, b in zip(*[v if isinstance(v, list | tuple) else [v] for v in (got, expected)], strict=True):
        assert torch.equal(a, b), name
    seen += COUNTING.calls
    del COUNTING.calls["settings"]  # the key of every plan has them
    assert want is None or COUNTING.calls == want, (name, COUNTING.calls)
assert set(seen) == {name for name in vars(Target) if not name.startswith("_")}
""",
    ),
    "a command": Addition(
        (
            Insertion(
                "cli/digits.py",
                """from fxround.cli.arguments import said
from fxround.numerics.formats import Format

def add_digits(commands):
    parser = commands.add_parser("digits", **said("print the precision of a format"))
    parser.add_argument("format")
    parser.set_defaults(command=run)

def run(arguments):
    print(Format.parse(arguments.format).precision)
    return 0
""",
            ),
            Insertion(
                "cli/__init__.py",
                "from fxround.cli.digits import add_digits\n",
                after="from fxround.cli.describe import add_describe\n",
            ),
            Insertion("cli/__init__.py", "    add_digits(commands)\n", after="    add_invariance(commands)\n"),
        ),
        """
import contextlib, io
from fxround.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["digits", "bfloat16"]) == 0
assert said.getvalue() == "8\\n"
with contextlib.redirect_stderr(io.StringIO()) as said:
    assert main(["digits", "quux"]) == 2
assert "quux" in said.getvalue()
""",
    ),
    "a method of rounding weights": Addition(
        (
            Insertion(
                "tuning/downward.py",
                """from dataclasses import dataclass

@dataclass(frozen=True)
class Downward:
    def count(self, task):
        return len(task.weights)

    def run(self, task):
        for name, weight in task.weights.items():
            task.write(name, weight.grid.down(weight.value))
            yield
""",
            ),
            Insertion(
                "tuning/quantize_weights.py",
                "from fxround.tuning.downward import Downward\n",
                after="from fxround.tuning.discquant import DiscQuant\n",
            ),
            Insertion(
                "tuning/quantize_weights.py",
                '        "downward": Downward,\n',
                after='        "discquant": DiscQuant,\n',
            ),
        ),
        """
layer, x = torch.nn.Linear(8, 4), torch.rand(3, 8)
small = fxround.quantize_weights(layer, "int4:channel", x, "downward")
assert small.quantization["weight"].method == "downward"
assert (small.weight <= layer.weight).all() and not torch.equal(small.weight, layer.weight)
""",
    ),
    "a preset": Addition(
        (
            Insertion(
                "policy/presets.py",
                'in_format("short", Rounding.parse("ieee(5,7)")),\n',
                after="_PRESETS: Final = (\n",
            ),
        ),
        """
policy = fxround.Policy.preset("short")
assert fxround.Policy.from_toml(policy.to_toml()) == policy
assert fxround.compile(Calls(lambda x: x * 3), "short")(torch.tensor([1.015625])).tolist() == [3.0625]
""",
    ),
    "a metric": Addition(
        (
            Insertion(
                "significance/metrics.py",
                'Metric("elements", "of a result", "", "lower", lambda s, r, c: (primary(s).numel(), 1.0), _share),\n',
                after='    pairs = "the same, of the worst pair of samples"\n    return (\n',
            ),
        ),
        """
report = fxround.variability(torch.nn.Tanh(), torch.ones(3, 2), samples=3, metrics=["elements"])
assert re.search(r"elements.* 6\\b", str(report)), report
""",
    ),
}
PREAMBLE = """
import json, math, re, sys, traceback
from fractions import Fraction
import torch, fxround
from fxround.numerics.specification.exact import round_exact
from fxround.runtime.draw import NO_KEY
RNG = torch.tensor([0, 0])
class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, *args):
        return self.function(*args)
results = {"where": fxround.__file__}
for name, script in json.load(sys.stdin).items():
    try:
        exec(script, dict(globals()))
        results[name] = ""
    except BaseException:
        results[name] = traceback.format_exc()
print(json.dumps(results))
"""
# They change what is there, and need more than rows.
UNTRIED = {
    "a field of faults",
    "a kind of fault",
    "a report",
    "an operator on complex numbers",
    "a guard of capture",
    "what code on disk depends on",
    "an order of reduction",
    "a stream of random words",
    "a way to make scales",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package in which all additions are made, and of what its design names."""
    place = tmp_path_factory.mktemp("copy")
    for folder in ("fxround", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    for addition in ADDITIONS.values():
        for insertion in addition.insertions:
            insertion.apply(place / "fxround")
    return place


def run(place: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A Python process that imports the copy."""
    environment = os.environ | {"PYTHONPATH": str(place), "FXROUND_CACHE_DIR": str(place / "cache")}
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin, cwd=place, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def failures(place: Path) -> dict[str, str]:
    """What went wrong with each addition, by its name; an empty text for nothing."""
    scripts = {name: addition.script for name, addition in ADDITIONS.items()}
    child = run(place, "-W", "ignore", "-c", PREAMBLE, stdin=json.dumps(scripts))
    assert child.returncode == 0, child.stderr
    results: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    assert Path(results.pop("where")).parents[1] == place
    return results


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_in_the_named_places_is_enough(name: str, failures: dict[str, str]) -> None:
    assert failures[name] == ""


def test_the_additions_keep_the_rules_of_the_design(place: Path) -> None:
    """Who imports whom, rows apart from code, and how long files are. What the design says of tests is the same."""
    # A new pass wants its name in the list of docs/design.md, which the copy does not get.
    rules = "not oracle and not comparisons and not lists_the_passes"
    child = run(place, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_design.py", "-k", rules)
    assert child.returncode == 0, child.stdout[-3000:]
    assert re.search(r"^\d{3} passed", child.stdout, re.M), child.stdout[-3000:]


def cells() -> dict[str, list[str]]:
    """The table of docs/design.md: what to touch for each addition, which tables want a row, which tests find it."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("| to add |")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name: [cell.strip() for cell in rest] for name, *rest in lines}


def test_every_row_of_the_table_is_tried_in_the_files_that_it_names() -> None:
    rows = cells()
    assert set(ADDITIONS) <= set(rows) <= set(ADDITIONS) | UNTRIED
    for name, addition in ADDITIONS.items():
        named = re.findall(r"`([a-z_/]+(?:\.py|/))`", rows[name][0])
        for file in (insertion.file for insertion in addition.insertions):
            assert any(file == n or (n.endswith("/") and file.startswith(n)) for n in named), (name, file, named)


def test_every_table_that_wants_a_row_is_there() -> None:
    wanted = [pair for _, tables, _ in cells().values() for pair in re.findall(r"`(\w+)` of `([\w/]+\.py)`", tables)]
    assert len(wanted) >= 6
    for table, file in wanted:
        assert re.search(rf"^ *(def )?{table}\b.*[=:]", (ROOT / file).read_text(encoding="utf-8"), re.M), (table, file)


# What asks where a tensor is, or which devices there are.
ASKS = re.compile(r"\b(runs_texts|forces_texts|is_cuda|is_cpu|get_device_name|device_count|DEVICES)\b|\.type [!=]= \"c")


def test_the_row_of_a_device_names_every_file_that_asks_for_the_device() -> None:
    """The folders of devices are left out: each is one device's own."""
    package = ROOT / "fxround"
    files = {file.relative_to(package).as_posix() for file in package.rglob("*.py") if ASKS.search(file.read_text())}
    named = set(re.findall(r"`([a-z_/]+\.py)`", cells()["a device"][0]))
    assert {file for file in files if not file.startswith(("runtime/cuda/", "runtime/cpu/"))} <= named


@pytest.mark.parametrize(
    "line",
    [
        *("if runs_texts([x]):", "x.is_cuda and x.numel()", 'if x.device.type != "cpu":', "for d in DEVICES"),
        *('torch.device(device).type == "cpu"', "range(torch.cuda.device_count())", 'x.type == "cuda"'),
    ],
)
def test_a_question_for_a_device_is_seen(line: str) -> None:
    assert ASKS.search(line) and not ASKS.search("x.new_empty(3, device=x.device)")
