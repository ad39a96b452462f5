"""Each pass on small graphs, compared as text; and the invariants of every lowered graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layers import Calls
from torch import Tensor, fx, nn

import fxround
from fxround.capture import capture
from fxround.errors import PolicyError, UnsupportedOperator, UnsupportedRounding, VerificationError
from fxround.graph.dialect import CALLS, Pointwise, read
from fxround.graph.site import META, Site, site
from fxround.graph.values import settle
from fxround.operators.formulas import decompositions
from fxround.passes import LOWERING, Plan, lower
from fxround.passes.verify import verify, verify_accounted
from fxround.policy import Policy, Rule

SR = "binary32/stochastic/inf"
RNE = "binary32/nearest_even/inf"


def graph_of(model: nn.Module | Callable[..., Any], *args: Any) -> fx.GraphModule:
    module = model if isinstance(model, nn.Module) else Calls(model)
    with torch.no_grad():
        return capture(module, args, {}, decompositions()).graph


def lowered(model: nn.Module | Callable[..., Any], *args: Any, policy: Any = "stochastic", strict: bool = False) -> Any:
    return lower(graph_of(model, *args), Plan(Policy.parse(policy), strict))


def text(graph: fx.GraphModule) -> list[str]:
    """One line an operator: ``name = operator(arguments)``."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [f"{n.name} = {n.target!s}({', '.join(map(str, n.args))})".replace(".default", "") for n in nodes]


def sites(graph: fx.GraphModule) -> dict[str, Site]:
    return {node.name: place for node in graph.graph.nodes if (place := site(node)) is not None}


def after(graph: fx.GraphModule, last: str, policy: Any = "stochastic") -> fx.GraphModule:
    """The graph after the passes up to ``last``."""
    settle(graph)
    for step in LOWERING:
        step(graph, Plan(Policy.parse(policy), False))
        verify(graph, step.__name__)
        if step.__name__ == last:
            return graph
    raise AssertionError(f"no pass is named {last}")


# ---- one pass at a time ----


def test_normalize_frees_views_of_strides() -> None:
    graph = after(graph_of(lambda x: x.view(2, 6) * 2, torch.zeros(3, 4)), "normalize")
    assert text(graph) == ["view = aten.reshape(input_0, [2, 6])", "mul = aten.mul.Tensor(view, 2)"]


def test_normalize_shows_implicit_conversions() -> None:
    graph = after(graph_of(lambda x: x * (x > 0), torch.zeros(3, 4)), "normalize")
    assert text(graph) == [
        "gt = aten.gt.Scalar(input_0, 0)",
        "_to_copy = aten._to_copy(gt)",
        "mul = aten.mul.Tensor(input_0, _to_copy)",
    ]


def test_normalize_restores_the_strides_that_as_strided_reads() -> None:
    x = torch.arange(12.0).reshape(3, 4)

    def diagonal(x: Tensor) -> Tensor:
        return (x.t() * 2).as_strided((3,), (5,))

    graph = after(graph_of(diagonal, x), "normalize")
    assert [line.partition(" = ")[2].partition("(")[0] for line in text(graph)][2:] == [
        "aten.permute",
        "aten.clone",
        "aten.permute",
        "aten.as_strided",
    ]
    for policy in ("identity", "reproducible"):
        assert torch.equal(fxround.compile(Calls(diagonal), policy)(x), diagonal(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).relu()


def test_classify_names_kind_role_and_origin() -> None:
    found = sites(after(graph_of(Norm(), torch.zeros(2, 3)), "classify"))
    described = {name: (s.path, s.operator, s.kind, s.role, s.status) for name, s in found.items()}
    assert described == {
        "fc_weight": ("fc", "placeholder", "placeholder", "weight", "movement"),
        "fc_bias": ("fc", "placeholder", "placeholder", "weight", "movement"),
        "norm_weight": ("norm", "placeholder", "placeholder", "weight", "movement"),
        "norm_bias": ("norm", "placeholder", "placeholder", "weight", "movement"),
        "input_0": ("", "placeholder", "placeholder", "input", "movement"),
        "permute": ("fc", "aten.permute.default", "movement", "weight", "movement"),
        "mm": ("fc", "aten.mm.default", "contraction", "activation", "native"),
        "add": ("fc", "aten.add.Tensor", "pointwise", "activation", "native"),
        "sum_1": ("norm", "aten.sum.dim_IntList", "reduction", "statistic", "native"),
        "div": ("norm", "aten.div.Tensor", "pointwise", "statistic", "native"),
        "sub": ("norm", "aten.sub.Tensor", "pointwise", "activation", "native"),
        "mul": ("norm", "aten.mul.Tensor", "pointwise", "activation", "native"),
        "sum_2": ("norm", "aten.sum.dim_IntList", "reduction", "statistic", "native"),
        "div_1": ("norm", "aten.div.Tensor", "pointwise", "statistic", "native"),
        "add_1": ("norm", "aten.add.Tensor", "pointwise", "statistic", "native"),
        "rsqrt": ("norm", "aten.rsqrt.default", "elementary", "statistic", "native"),
        "mul_1": ("norm", "aten.mul.Tensor", "pointwise", "activation", "native"),
        "mul_2": ("norm", "aten.mul.Tensor", "pointwise", "activation", "native"),
        "add_2": ("norm", "aten.add.Tensor", "pointwise", "activation", "native"),
        "relu": ("", "aten.relu.default", "exact", "activation", "exact"),
    }
    assert found["mm"].module_type == "Linear" and found["relu"].source.startswith("test_passes.py:")


def test_numbers_do_not_depend_on_the_policy() -> None:
    graph = graph_of(Norm(), torch.zeros(2, 3))
    numbers = []
    for policy in ("identity", "stochastic", "bfloat16", "e4m3fn/stochastic"):
        found = sites(lower(graph, Plan(Policy.parse(policy), False)))
        numbers.append({name: place.number for name, place in found.items() if not name.endswith("_rounded")})
    assert all(n == numbers[0] for n in numbers)
    assert len(set(numbers[0].values())) == len(numbers[0])


def test_assign_attaches_what_the_policy_says() -> None:
    rules = (Rule(rounding="bfloat16"), Rule(operator="contraction", accumulate="dtype/toward_zero"))
    found = sites(after(graph_of(nn.Linear(3, 2), torch.zeros(2, 3)), "assign", Policy("p", rules)))
    assert found["permute"].assignment is None and found["weight"].assignment is None
    mm, add = found["mm"].assignment, found["add"].assignment
    assert mm is not None and str(mm.rounding) == "bfloat16/nearest_even/inf"
    assert str(mm.accumulate) == "binary32/toward_zero/inf" and mm.rule == str(rules[0])
    assert add is not None and str(add.accumulate) == RNE


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    policy = Policy("p", (Rule("fc2", rounding="bfloat16"),))
    with pytest.raises(PolicyError, match=r"fc2 -> .*matches no operation"):
        lowered(Norm(), torch.zeros(2, 3), policy=policy)


def test_contractions_carry_their_roundings_as_text() -> None:
    policy = Policy("p", (Rule(rounding="bfloat16", accumulate="dtype/stochastic"),))
    result = lowered(nn.Conv1d(4, 2, 3, padding=1, groups=2), torch.zeros(2, 4, 5), policy=policy)
    assert text(result)[:1] == [
        "convolution = fxround.convolution(input_0, weight, [1], [1], [1], False, [0], 2, "
        f"{SR}, bfloat16/nearest_even/inf, rng, 0)"
    ]


def test_reductions_carry_their_order() -> None:
    policy = Policy("p", (Rule(rounding="dtype/stochastic", order="sequential"),))
    result = lowered(lambda x: (x.sum(), x.sum((0, -1), keepdim=True), x.cumsum(1)), torch.zeros(3, 4), policy=policy)
    assert text(result) == [
        f"sum_1 = fxround.sum(input_0, [0, 1], False, sequential, {RNE}, {SR}, rng, 0)",
        f"sum_2 = fxround.sum(input_0, [0, -1], True, sequential, {RNE}, {SR}, rng, 2)",
        f"cumsum = fxround.cumsum(input_0, 1, {RNE}, {SR}, rng, 4)",
    ]


def test_pointwise_operations_become_programs() -> None:
    result = lowered(lambda x, y: (x * x, 1 - x, x / y, (x + 0.1).exp(), x**3), torch.ones(2), torch.ones(2))
    programs = [line.partition("], ")[2].partition(f" @ {SR}, torch.float32, rng, ")[0::2] for line in text(result)]
    operands = [line.partition("([")[2].partition("]")[0] for line in text(result)]
    assert list(zip(operands, programs, strict=True)) == [
        ("input_0", ("t0 = mul(x0, x0)", "0)")),
        ("input_0", ("t0 = sub(0x1.0000000000000p+0, x0)", "2)")),
        ("input_0, input_1", ("t0 = div(x0, x1)", "4)")),
        ("input_0", ("t0 = add(x0, 0x1.99999a0000000p-4)", "6)")),
        ("add", ("t0 = exp(x0)", "8)")),
        ("input_0", ("t0 = pow(x0, 0x1.8000000000000p+1)", "10)")),
    ]


def test_a_size_becomes_an_operand() -> None:
    result = lowered(lambda x: x / x.shape[0], torch.ones(2, 3))
    assert text(result) == [
        "sym_size_int = aten.sym_size.int(input_0, 0)",
        "scalar_tensor = aten.scalar_tensor(sym_size_int)",
        f"div = fxround.pointwise([input_0, scalar_tensor], t0 = div(x0, x1) @ {SR}, torch.float32, rng, 0)",
    ]


def test_casts_round_where_they_lose_something() -> None:
    result = lowered(
        lambda x, n: (x.double(), x.half(), x > 0, n.float(), n.bool().float()),
        torch.ones(2),
        torch.ones(2, dtype=torch.int64),
    )
    statuses = {name: (place.operator, place.status) for name, place in sites(result).items() if "input" not in name}
    assert statuses == {
        "_to_copy": ("aten._to_copy.default", "exact"),
        "_to_copy_1": ("aten._to_copy.default", "rounded"),
        "gt": ("aten.gt.Scalar", "integer"),
        "_to_copy_5": ("aten._to_copy.default", "movement"),
        "_to_copy_2": ("aten._to_copy.default", "rounded"),
        "_to_copy_3": ("aten._to_copy.default", "integer"),
        "_to_copy_4": ("aten._to_copy.default", "exact"),
    }
    assert "t0 = identity(x0) @ binary16/stochastic/inf, torch.float16" in text(result)[1]


def test_what_enters_is_rounded_where_the_policy_names_it() -> None:
    rules = (Rule(rounding="bfloat16"), Rule(role="weight", rounding="e4m3fn"), Rule(role="input", rounding="e5m2"))
    result = lowered(nn.Linear(3, 2, bias=False), torch.zeros(2, 3), policy=Policy("p", rules))
    identity = "t0 = identity(x0)"
    assert text(result) == [
        f"weight_rounded = fxround.pointwise([weight], {identity} @ e4m3fn/nearest_even/nan, torch.float32, rng, 2)",
        f"input_0_rounded = fxround.pointwise([input_0], {identity} @ e5m2/nearest_even/inf, torch.float32, rng, 4)",
        "permute = aten.permute(weight_rounded, [1, 0])",
        f"mm = fxround.matmul(input_0_rounded, permute, {RNE}, bfloat16/nearest_even/inf, rng, 0)",
    ]


def test_constants_of_the_program_text_enter_too() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x + torch.tensor([0.1, 0.2]) + torch.full((2,), 0.3)

    assert len(text(lowered(shifted, torch.ones(3, 2)))) == len(text(graph_of(shifted, torch.ones(3, 2))))
    x = torch.zeros(3, 2)
    expected = fxround.round(
        fxround.round(torch.tensor([0.1, 0.2]), "e5m2") + fxround.round(torch.full((2,), 0.3), "e5m2"), "e5m2"
    )
    assert torch.equal(fxround.compile(Calls(shifted), "e5m2")(x), expected.expand(3, 2))


def test_a_selection_is_rounded_only_where_its_operands_may_lie_outside() -> None:
    def select(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * 2).relu(), x.relu(), (x * 2).clamp(max=0.3)

    only_results = Policy("p", (Rule(rounding="e5m2"),))
    result = sites(lowered(select, torch.ones(3), policy=only_results))
    assert result["relu"].status == "exact" and "relu_rounded" not in result
    assert "relu_1_rounded" in result and "clamp_rounded" in result
    assert [n for n in sites(lowered(select, torch.ones(3))) if "rounded" in n] == []
    assert [n for n in sites(lowered(select, torch.ones(3), policy="up_down")) if "rounded" in n] == []


AT = torch.tensor([0, 0, 1])


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.amax(),
        lambda x: x.reshape(1, 3).amin(1, keepdim=True),
        lambda x: torch.stack([x.max(), x.median(), x.nanmedian()]),
        lambda x: x.reshape(1, 3).aminmax(dim=1).max,
        lambda x: torch.linalg.vector_norm(x, torch.inf),
        lambda x: torch.zeros(2).scatter_reduce(0, AT, x, "amax", include_self=False),
        lambda x: torch.zeros(2).index_reduce(0, AT, x, "amax"),
        lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([2, 1])),
    ],
)
@pytest.mark.parametrize("policy", [Policy("narrow", (Rule(rounding="bfloat16"),)), "stochastic"])
@pytest.mark.filterwarnings("ignore:.*is in beta")
def test_the_gradient_of_a_selection_finds_what_was_chosen_before_its_rounding(choose: Any, policy: Any) -> None:
    x = torch.tensor([1.01, 3.03, 2.02], requires_grad=True)  # none is a bfloat16 number
    fxround.compile(choose, policy, strict=False)(x).sum().backward()
    found, x.grad = x.grad, None
    choose(x).sum().backward()
    assert torch.equal(found, x.grad)


def test_native_accumulation_rounds_the_stock_result_once() -> None:
    policy = Policy("p", (Rule(operator="mm", rounding="e5m2", accumulate="native"),))
    x, model = torch.randn(4, 8), nn.Linear(8, 3, bias=False)
    result = lowered(model, x, policy=policy, strict=True)
    assert sites(result)["mm"].reason == (
        "the policy keeps the stock kernel, whose bits depend on the device; its result is rounded once"
    )
    with torch.no_grad():
        assert torch.equal(fxround.compile(model, policy)(x), fxround.round(model(x), "e5m2"))


def test_an_operator_without_a_kernel_says_so_and_raises_under_strict() -> None:
    result = sites(lowered(lambda x: torch.special.erfcx(x) + 1, torch.zeros(3)))
    assert (result["special_erfcx"].status, result["special_erfcx_rounded"].status) == ("native", "rounded")
    assert result["special_erfcx"].reason == "no kernel has this function yet; its result is rounded once"
    with pytest.raises(UnsupportedOperator, match=r"aten\.special_erfcx\.default in the root module"):
        lowered(lambda x: torch.special.erfcx(x) + 1, torch.zeros(3), strict=True)


def test_several_results_are_each_rounded() -> None:
    result = sites(lowered(lambda x: torch.linalg.eigh(x), torch.eye(3)))
    assert result["_linalg_eigh"].status == "native"
    assert [n for n in result if n.endswith("_rounded")] == ["getitem_rounded", "getitem_1_rounded"]


def test_an_operator_that_the_table_lacks_is_reported() -> None:
    result = sites(lowered(lambda x: torch._standard_gamma(x), torch.ones(3)))
    assert result["_standard_gamma"].kind == "unknown"
    assert result["_standard_gamma"].reason.startswith("fxround has no rule for aten._standard_gamma.default")
    with pytest.raises(UnsupportedOperator, match=r"has no rule for aten._standard_gamma"):
        lowered(lambda x: torch._standard_gamma(x), torch.ones(3), strict=True)


def test_what_numerics_cannot_round_is_reported_with_the_line() -> None:
    with pytest.raises(
        UnsupportedRounding, match=r"aten\.add\.Tensor in the root module at test_passes\.py:\d+.*float64"
    ):
        lowered(lambda x: x + 0.1, torch.ones(3, dtype=torch.float64), policy="binary64/nearest_away")


@pytest.mark.part("bilinear", "nearest", "nearest-exact")
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_an_index_in_the_making_is_not_rounded(mode: str) -> None:
    """Indices of 1024 pixels are not representable in these formats; rounded ones would be outside of the image."""
    image = torch.arange(1024.0).remainder(4).expand(2, 1, 1, 1024).contiguous()
    larger = nn.Upsample(scale_factor=(1, 2), mode=mode)
    graph = graph_of(larger, image)
    for policy in ("e4m3fn", "e5m2/stochastic/saturate", "up_down", "bfloat16"):
        (got,) = lower(graph, Plan(Policy.parse(policy), False))(image, torch.tensor([0, 0]))
        assert got.isfinite().all()
        if mode.startswith("nearest"):
            assert torch.equal(got, larger(image)), (
                "the values 0 to 3 are exact in every format: only a wrong pixel differs"
            )


# ---- every graph ----


def test_the_pipeline_leaves_the_captured_graph_alone() -> None:
    graph = graph_of(Norm(), torch.zeros(2, 3))
    before = text(graph)
    lower(graph, Plan(Policy.parse("bfloat16"), False))
    assert text(graph) == before


def test_identity_changes_layout_only() -> None:
    graph = graph_of(Norm(), torch.zeros(2, 3))
    result = lower(graph, Plan(Policy.parse("identity"), True))
    assert text(result) == [line.replace("aten.view(", "aten.reshape(") for line in text(graph)]
    native = [place for place in sites(result).values() if place.status == "native"]
    assert native and all(place.reason == "the policy leaves it alone" for place in native)


def test_verify_catches_a_changed_dtype_and_a_malformed_graph() -> None:
    graph = after(graph_of(lambda x: x * 2 + 1, torch.ones(3)), "classify")
    mul = next(node for node in graph.graph.nodes if node.name == "mul")
    mul.target, mul.args = torch.ops.aten.gt.Scalar, (mul.args[0], 2)
    with pytest.raises(VerificationError, match=r"after broken: mul was torch.float32"):
        verify(graph, "broken")
    other = graph_of(lambda x: x * 2, torch.ones(3))
    mul.args = (next(iter(other.graph.nodes)), 2)
    with pytest.raises(VerificationError, match="after broken: the graph is malformed"):
        verify(graph, "broken")


def test_a_size_may_be_written_in_another_way_that_a_condition_proves_equal() -> None:
    def halves(x: Tensor) -> Tensor:
        n = x.shape[0] // 4
        y = x[: 4 * n].reshape(n, 4, 3)
        return y * x[:4].reshape(1, 4, 3) if n == 1 else y  # the size n // 4 of the product is recomputed as 1

    compiled = fxround.compile(halves, "reproducible")
    for rows in (5, 7, 9):  # products of small whole numbers are exact
        x = torch.arange(3.0 * rows).reshape(rows, 3)
        assert torch.equal(compiled(x), halves(x))
    assert [row["arguments"] for row in compiled.captures()] == ["float32[a, 3]"] * 2


def test_verify_catches_what_is_not_accounted_for() -> None:
    graph = lowered(lambda x: x * 2, torch.ones(3))
    mul = next(node for node in graph.graph.nodes if node.name == "mul")
    place = mul.meta.pop(META)
    with pytest.raises(VerificationError, match=r"mul .* has no Site"):
        verify_accounted(graph)
    mul.meta[META] = place
    verify_accounted(graph)
    mul.target = torch.ops.aten.mul.Tensor
    with pytest.raises(VerificationError, match="claims to be rounded"):
        verify_accounted(graph)


def test_verify_asks_whether_what_rounds_is_said_to_round() -> None:
    graph = lowered(lambda x: torch.dropout(x * 2, 0.5, train=True), torch.ones(3))
    verify_accounted(graph)
    rounded = [node for node in graph.graph.nodes if (place := site(node)) and place.status == "rounded"]
    (draw,) = (node for node in graph.graph.nodes if (place := site(node)) and place.kind == "random")
    assert {node.name for node in rounded} >= {"mul"} and draw.target in CALLS and draw.meta[META].status == "exact"
    for node, status in ((rounded[0], "exact"), (rounded[0], "native"), (draw, "native")):
        place = node.meta[META]
        node.meta[META] = replace(place, status=status)
        with pytest.raises(VerificationError, match=f"{node.name} .* claims to be {status}"):
            verify_accounted(graph)
        node.meta[META] = place


def test_up_down_does_not_move_an_integer_that_becomes_a_float() -> None:
    """Mixtures of experts count the tokens of each expert in this way."""

    def counts(ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.histc(ids.float(), bins=4, min=0, max=3), x + ids.to(x.dtype)

    ids, x = torch.arange(4).repeat(8), torch.full((32,), 1.0)
    compiled = fxround.compile(counts, "up_down")
    counted, moved = compiled(ids, x)
    assert counted.tolist() == [8.0] * 4 and not bool((moved == ids + 1).any())
    assert [row["rounding"] for row in compiled.summary() if "_to_copy" in row["operator"]] == [
        "binary32/stochastic/inf"
    ] * 2


class Readers(nn.Module):
    """One value that several layers read, and another one after it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) + 1
        w = y * 2
        return self.last(w) + sum(reader(y) for reader in self.readers)


def readers(count: int) -> Policy:
    """A policy under which each reader rounds its operand in a way of its own, and one bit of it may flip."""
    counts = ("", *(f":{n}" for n in range(1, 21)))
    formats = [f"{f}/stochastic{n}" for f in ("bfloat16", "e4m3fn", "e5m2", "binary16") for n in counts]
    rules = [Rule(f"readers.{i}", operands=formats[i], faults="sign:0.1 any:0.1") for i in range(count)]
    return Policy("readers", (*rules, Rule("last", operands="bfloat16/stochastic")))


def test_every_rounding_of_an_operand_has_random_bits_of_its_own_or_is_refused() -> None:
    compiled = fxround.compile(Readers(20), readers(20))
    compiled(torch.rand(3, 4))
    drawn: dict[int, set[str]] = {}
    for node in compiled.graph.graph.nodes:
        call = read(node)
        if isinstance(call, Pointwise) and node.meta[META].kind == "operand":
            drawn.setdefault(call.node, set()).add(f"{call.xs} {call.program}")
    # The value and a weight of each reader are rounded and flip twice; the last layer rounds both of its operands.
    assert len(drawn) == 20 * 2 * 3 + 2
    assert all(len(operands) == 1 for operands in drawn.values())
    with pytest.raises(UnsupportedRounding, match="more than 64 different ways as an operand"):
        fxround.compile(Readers(65), readers(65))(torch.rand(3, 4))
