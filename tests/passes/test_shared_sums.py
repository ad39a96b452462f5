"""Processes that share a model by parallelize_module have the bits of one process, or all of them raise an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.capture import fully_sharded
from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.compiler import agreement
from fxround.errors import CaptureError, FxroundError, PolicyError, UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import AddProcesses, Matmul, Pointwise, StateOfPart, Sum
from fxround.numerics.orders import shards_of
from fxround.training import compile_optimizer

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)
if torch.__version__ < agreement.SINCE:
    pytest.skip("models that processes share need a later PyTorch", allow_module_level=True)

from parallel_models import MLP, batch_of, model_of, results, resumed, trained  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

POLICIES: dict[str, Any] = {
    "reproducible_sharded": "reproducible_sharded",
    "narrow results": Policy(
        "narrow", (Rule(rounding="bfloat16", accumulate="binary32", order="shards:8/sequential"),)
    ),
    "narrow sums": Policy("narrow", (Rule(rounding="dtype", accumulate="binary16", order="shards:8/lanes:2"),)),
    # Inside of a chain these sums have binary64's range; operands are rounded where a part reads them.
    "wide sums": Policy(
        "wide",
        (
            Rule(rounding="dtype", accumulate="bfloat16/toward_zero", order="shards:8/lanes:16"),
            Rule(operands="binary16"),
        ),
    ),
    "stochastic": Policy(
        "stochastic", (Rule(rounding="dtype/stochastic", accumulate="binary32/stochastic", order="shards:8/lanes:16"),)
    ),
    # Blocks of 2 of the 24, 12 or 6 elements that each of 2, 4 or 8 processes has; operands draw, too.
    "blocks": Policy(
        "blocks",
        (
            Rule(rounding="dtype", accumulate="binary32", order="shards:8/lanes:16"),
            Rule(operands="bfp(6,2)/stochastic"),
        ),
    ),
    "up_down": Policy(
        "up_down", (Rule(rounding="bfloat16/up_down", accumulate="binary32/up_down", order="shards:8/sequential"),)
    ),
}
CASES = {
    "MLP": ("reproducible_sharded", "narrow results", "narrow sums", "wide sums", "stochastic", "blocks", "up_down"),
    "MLP of bfloat16": ("reproducible_sharded",),
    "transformer": ("reproducible_sharded", "up_down"),
    "llama": ("reproducible_sharded", "stochastic"),
    "vocabulary": ("reproducible_sharded",),
    "uneven": ("reproducible_sharded", "up_down"),
    "maxima": ("reproducible_sharded",),
    "placed": ("reproducible_sharded", "stochastic"),
}


# What two processes run, in every run of the tests: of models of several layers, one policy, which draws; of MLP, one
# of each kind of sum, and the preset that checkpoints have. Four and eight processes run all.
OF_TWO = {
    "MLP": ("reproducible_sharded", "wide sums", "stochastic", "blocks"),
    "llama": ("stochastic",),
    "vocabulary": ("reproducible_sharded",),
    "uneven": ("up_down",),
    "placed": ("stochastic",),
}


def cases_of(size: int) -> dict[str, tuple[str, ...]]:
    """The models that are run by ``size`` processes, and their policies."""
    return OF_TWO if size == 2 else CASES


# ---- processes ----


def as_a_rank(store: str, out: str, rank: int, size: int) -> None:
    """The work of each process: every case, and two that must fail everywhere, between them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, Any] = {}
    x = batch_of("MLP")
    for case, policies in {"other policies": POLICIES, "another model": {"reproducible_sharded": ""}}.items():
        other = case == "another model" and rank == 1
        policy = list(policies)[-1 if rank == 1 else 0]
        model = model_of("MLP", mesh)
        compiled = fxround.compile(_Unfinished(model) if other else model, POLICIES[policy])
        try:
            compiled(x)
        except FxroundError as error:
            found[case] = str(error)
    known = fxround.compile(model_of("MLP", mesh), "reproducible_sharded")
    known(x)
    found["other calls"] = [refusal_of(known, call) for call in other_calls(x, rank == 1)]
    for name, names in cases_of(size).items():
        found |= of_policies(name, names, mesh)
    found["saved"] = resumed(fxround.compile(model_of("MLP", mesh), "reproducible_sharded"), f"{out}.checkpoint", True)
    torch.save(found, f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def other_calls(x: Tensor, other: bool) -> list[Callable[[Any], Any]]:
    """Calls of a model that has a graph; other: those of the process that differs."""
    return [
        lambda compiled: compiled(x[: 3 if other else 5]),
        lambda compiled: compiled.reseed(int(other))(x),
        lambda compiled: compiled.reseed(0).eval()(x) if other else compiled.reseed(0)(x),
    ]


def refusal_of(compiled: Any, call: Callable[[Any], Any]) -> str:
    try:
        call(compiled)
    except FxroundError as error:
        return str(error)
    return "no error"


def of_policies(name: str, policies: Sequence[str], mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """The results of a model under some policies, which share its captures."""
    first, *others = policies
    compiled = fxround.compile(model_of(name, mesh), POLICIES[first])
    found = {f"{name} {first}": results(name, compiled)}
    if name in ("llama", "uneven"):
        found[f"trained {name}"] = trained(name, compiled)
    return found | {f"{name} {other}": results(name, compiled.with_policy(POLICIES[other])) for other in others}


class _Unfinished(nn.Module):
    """A model that cannot be captured."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x) if x.sum() > 0 else None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes put what they found; with another number of them, the same files are written again."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)]
)
def ranks(request: pytest.FixtureRequest, place: Path) -> list[dict[str, Any]]:
    size = request.param
    command = [sys.executable, "-W", "ignore", __file__, str(place / f"store.{size}"), str(place / "out")]
    paths = [str(Path(fxround.__file__).parent.parent), str(Path(__file__).parents[1] / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = [subprocess.Popen([*command, str(rank), str(size)], env=environment) for rank in range(size)]
    try:
        assert [process.wait(600) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
    return [torch.load(f"{place / 'out'}.{rank}") for rank in range(size)]


def test_processes_have_the_bits_of_one(ranks: list[dict[str, Any]]) -> None:
    """Results and gradients, in training and eval mode, of the model that nothing is parallel in."""
    models = cases_of(len(ranks)).items()
    want = {case: tensors for name, names in models for case, tensors in of_policies(name, names).items()}
    for case, tensors in want.items():
        assert any(tensor.any() for key, tensor in tensors.items() if "bias" in key)
        for found in ranks:
            assert found[case].keys() == tensors.keys()
            pairs = {key: (found[case][key], tensors[key]) for key in tensors}
            assert [key for key, pair in pairs.items() if not torch.equal(*map(encoded, pair))] == [], case


def encoded(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_resumes_what_several_saved(ranks: list[dict[str, Any]], place: Path) -> None:
    one = resumed(fxround.compile(model_of("MLP"), "reproducible_sharded"), f"{place / 'out'}.checkpoint", False)
    assert one.keys() == ranks[0]["saved"].keys()
    assert all(torch.equal(found["saved"][key], one[key]) for found in ranks for key in one)


def test_all_processes_end_with_an_error_if_one_of_them_differs(ranks: list[dict[str, Any]]) -> None:
    """What they compute afterwards shows that none of them waits for another one."""
    assert len({found["other policies"] for found in ranks}) == 1
    assert "process 1 has another policy than process 0: 'up_down'" in ranks[0]["other policies"]
    assert "cannot be captured as one graph" in ranks[1]["another model"]
    said = f"process 1 of the {len(ranks)} that share the model has an error, so that no process runs it: CaptureError"
    assert all(said in found["another model"] for rank, found in enumerate(ranks) if rank != 1)


def test_all_processes_end_with_an_error_if_one_of_them_makes_another_call(ranks: list[dict[str, Any]]) -> None:
    said = ranks[0]["other calls"]
    assert all(found["other calls"] == said for found in ranks)
    for message, what in zip(
        said,
        ("list of argument shapes than process 0: [(3, 24)]", "seed than process 0: 1, not 0", "kind of call than"),
        strict=True,
    ):
        assert f"process 1 has another {what}" in message


# ---- graphs, without other processes ----


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeviceMesh]]:
    """A function of a number of processes, of which this is one and the others do not exist."""

    def agree(said: list[Any], own: Any, group: Any = None) -> None:
        said[:] = [own] * len(said)

    def mesh(size: int, rank: int = 0) -> DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", (size,))

    monkeypatch.setattr(dist, "all_gather_object", agree)
    yield mesh
    dist.destroy_process_group()


def prepared(model: nn.Module, x: Any, policy: Any = "reproducible_sharded") -> Any:
    return fxround.compile(model, policy, example_inputs=(x,))


def test_an_earlier_pytorch_is_refused(group: Callable[..., DeviceMesh], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SINCE", "99.1")
    with pytest.raises(CaptureError, match=r"this needs torch 99\.1 or later, and this is torch 2"):
        prepared(model_of("MLP", group(2)), batch_of("MLP"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_process_has_its_part_of_the_tree(size: int, group: Callable[..., DeviceMesh]) -> None:
    compiled = prepared(model_of("MLP", group(size)), batch_of("MLP"))
    products = [node for node in compiled.graph.graph.nodes if "matmul" in str(node.target)]
    own, rest = [node.args[2] for node in products[:2]], [node.args[2] for node in products[2:]]
    left = f" shards={8 // size}" if size < 8 else ""
    assert own == ["binary32/nearest_even/inf shards=8", f"binary32/nearest_even/inf{left}"]
    # The gradient of the weight of "down", of the activation, of the weight of "up": sums over what each process has.
    assert rest == ["binary32/nearest_even/inf shards=8"] * len(rest)
    operation = next(o for o in compiled.summary().operations if "sum_of_processes" in o.operator)
    assert (operation.module, operation.status, operation.rounding) == ("down", "rounded", "binary32/nearest_even/inf")
    assert compiled.coverage().unrounded == ()


def test_accumulators_are_passed_on_as_they_are(group: Callable[..., DeviceMesh]) -> None:
    """In a dtype with their range: bfloat16's have binary64's inside of a chain over binary32."""
    mesh, x = group(2), batch_of("MLP")
    wide = prepared(model_of("MLP", mesh).requires_grad_(False), x, POLICIES["wide sums"])
    half = prepared(model_of("MLP of bfloat16", mesh).requires_grad_(False), batch_of("MLP of bfloat16"))
    for compiled, dtype in ((wide, torch.float64), (half, torch.float32)):
        (node,) = (node for node in compiled.graph.graph.nodes if node.target == AddProcesses.overload)
        assert node.args[0].meta["val"].dtype == dtype


def test_one_process_adds_nothing(group: Callable[..., DeviceMesh]) -> None:
    compiled = prepared(model_of("MLP", group(1)), batch_of("MLP"), NO_SHARDS)
    assert not any("processes" in str(node.target) for node in compiled.graph.graph.nodes)


STOCK = Policy("stock", (Rule(rounding="dtype", accumulate="native"),))
NO_SHARDS = Policy("lanes", (Rule(rounding="dtype", accumulate="binary32"),))
TWO_SHARDS = Policy("two", (Rule(rounding="dtype", accumulate="binary32", order="shards:2/lanes:4"),))
REFUSED: dict[str, tuple[int, Any, type[Exception], str]] = {
    "no shards": (2, NO_SHARDS, PolicyError, r"in down at .* 2 processes share this sum, .* lanes:16 has no shards"),
    "stock": (2, STOCK, PolicyError, "the policy leaves it to the stock kernel"),
    "three": (3, "reproducible_sharded", PolicyError, "8 shards, which 3 cannot share evenly"),
    "four in two": (4, TWO_SHARDS, PolicyError, "2 shards, which 4 cannot share evenly"),
    "scales": (
        2,
        Policy("mx", (*TWO_SHARDS.rules, Rule(operands="mxfp8"))),
        UnsupportedRounding,
        "does not have whole blocks of it",
    ),
}


def test_a_gradient_is_placed_as_its_parameter(group: Callable[..., DeviceMesh]) -> None:
    layer = parallelize_module(nn.Linear(4, 8), group(2), ColwiseParallel())
    prepared(layer, torch.ones(3, 4))(torch.ones(3, 4)).sum().backward()
    assert isinstance(layer.weight.grad, Tensor)
    layer.weight.grad = layer.weight.grad.redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match=r"placements \(Shard\(dim=0\),\), and its gradient \(Replicate\(\),\)"):
        compile_optimizer(torch.optim.SGD(layer.parameters()), "reproducible").step()


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_the_number_of_processes_is_refused(case: str, group: Callable[..., DeviceMesh]) -> None:
    size, policy, error, said = REFUSED[case]
    model = model_of("MLP", group(size)).eval().requires_grad_(False)
    with pytest.raises(error, match=said):
        prepared(model, batch_of("MLP"), policy)


def test_what_has_no_shared_sum_needs_no_shards(group: Callable[..., DeviceMesh]) -> None:
    model = parallelize_module(nn.Sequential(nn.Linear(4, 8)), group(2), {"0": ColwiseParallel()})
    compiled = prepared(model, torch.ones(3, 4), NO_SHARDS)
    assert compiled(torch.ones(3, 4)).shape == (3, 4)


def test_the_policy_may_leave_a_sum_alone(group: Callable[..., DeviceMesh]) -> None:
    model = model_of("MLP", group(2)).requires_grad_(False)
    unrounded = prepared(model, batch_of("MLP"), Policy("up", (Rule("up", rounding="bfloat16"),))).coverage().unrounded
    (row,) = (row for row in unrounded if "sum_of_processes" in row)
    assert "in down at" in row and "an order of its own, which depends on the number of processes" in row


def test_a_part_of_another_size_is_not_read(group: Callable[..., DeviceMesh]) -> None:
    """A row-parallel layer that follows would take it for a part of 8 elements, or of 6."""
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)), group(2), plan)
    with pytest.raises(
        CaptureError, match=r"2 processes cannot share dimension 1 of a tensor of shape \(3, 7\) evenly"
    ):
        prepared(model, torch.ones(3, 4))


def test_results_are_placed_as_in_pytorch(group: Callable[..., DeviceMesh]) -> None:
    """One graph is for all batches; a DTensor of other sizes, or shared in another way, has another graph."""
    mesh = group(2)
    model = parallelize_module(nn.Linear(4, 8), mesh, ColwiseParallel(use_local_output=False))
    compiled = prepared(model, torch.ones(3, 4))
    for batch in (3, 5):
        y = compiled(torch.ones(batch, 4))
        assert isinstance(y, DTensor)
        assert (y.shape, y.placements, y.stride()) == ((batch, 8), (Shard(1),), (8, 1))
    assert len(compiled.captures().rows) == 1
    whole = distribute_module(nn.Linear(4, 8), mesh)
    compiled = fxround.compile(whole.eval().requires_grad_(False), "reproducible_sharded")
    for rows, placement in ((3, Replicate()), (6, Shard(0)), (7, Shard(0)), (6, Replicate())):
        x = distribute_tensor(torch.ones(rows, 4), mesh, [placement], src_data_rank=None)
        y, stock = compiled(x), whole(x)
        assert (y.shape, y.placements, y.stride()) == (stock.shape, stock.placements, stock.stride())
        assert y.to_local().shape == stock.to_local().shape
    # The part of one row, of some columns, has the strides of the whole.
    row = distribute_tensor(torch.ones(1, 4), mesh, [Shard(1)], src_data_rank=None)
    assert row._local_tensor.stride() == (4, 1)
    assert compiled(row).placements == (Replicate(),)


@pytest.mark.parametrize("rows", [6, 5])
def test_eval_mode_has_gradients_of_dtensors(rows: int, group: Callable[..., DeviceMesh]) -> None:
    """Those of training mode, made when a backward pass asks for them; results may be the argument, or transposed."""
    model = _Transposed(distribute_module(nn.Linear(4, 8), group(2)))
    compiled = fxround.compile(model, "reproducible_sharded")
    found = []
    for mode in (True, False):
        x = distribute_tensor(torch.randn(rows, 4), model.layer.weight.device_mesh, [Shard(0)], src_data_rank=None)
        x = (x * 0 + 1).requires_grad_()
        y, same = compiled.train(mode)(x)
        stock = model(x)[0]
        assert same is x
        assert (y.shape, y.placements, y.stride()) == (stock.shape, stock.placements, stock.stride())
        (y * y).to_local().sum().backward()
        found.append((y.to_local(), x.grad.to_local(), x.grad.placements, model.layer.weight.grad.placements))
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(found[0][:2], found[1][:2], strict=True))
    assert found[0][2:] == found[1][2:] == ((Shard(0),), (Replicate(),))


class _Transposed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).t(), x


class _Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_refusals_of_shared_models_say_what_to_write(group: Callable[..., DeviceMesh]) -> None:
    mesh = group(2)
    tokens, labels = (
        distribute_tensor(torch.randint(20, (4, 8)), mesh, [Shard(1)], src_data_rank=None) for _ in range(2)
    )
    flattened = distribute_module(_Flattened(), mesh)
    with pytest.raises(CaptureError, match=r"change  .*cross_entropy\(logits.transpose\(1, 2\), labels\)"):
        fxround.compile(flattened, "reproducible_sharded", example_inputs=(tokens, labels))

    def converted(module: Any, args: Any, mesh: DeviceMesh) -> Any:
        return (distribute_tensor(args[0], mesh, [Shard(0)]),)

    with pytest.raises(CaptureError, match=r"change  convert tensors .* by DTensor.from_local"):
        prepared(distribute_module(nn.Linear(4, 8), mesh, input_fn=converted), torch.ones(4, 4))
    shared = distribute_module(nn.Linear(4, 8), mesh)
    with pytest.raises(CaptureError, match=r"computes with tensors that several .* call fxround.compile"):
        torch.compile(shared, backend="fxround", options={"policy": "bfloat16"})(tokens.to(torch.float32)[:, :4])


def test_dtensors_that_cannot_enter_are_refused(group: Callable[..., DeviceMesh]) -> None:
    mesh = group(2)
    model = distribute_module(nn.Linear(4, 8), mesh).requires_grad_(False)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None)
    compiled = prepared(model, x)
    unfinished = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
    with pytest.raises(
        CaptureError, match=r"argument 0 is a DTensor with the placement P.*expected Shard or Replicate"
    ):
        compiled(unfinished)
    for rows, part in ((4, 3), (7, 3), (2, 0)):  # of which process 0 would have 2, 4 and 1
        other = DTensor.from_local(
            torch.ones(part, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 4)), stride=(4, 1)
        )
        with pytest.raises(
            CaptureError, match=rf"of which this process has \({part}, 4\); expected \({-(-rows // 2)}, 4\)"
        ):
            compiled(other)
    with pytest.raises(CaptureError, match=r"argument 0 is a DTensor on .*, the parameters on "):
        compiled(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 1)), [Replicate()] * 2))
    with pytest.raises(CaptureError, match="argument 0 is a DTensor, and no parameter of the model is one"):
        prepared(nn.Flatten(), x)
    with pytest.raises(CaptureError, match=r"the model changes argument 0, a DTensor, in place"):
        prepared(_InPlace(model), x)
    with pytest.raises(CaptureError, match=r"gradient of weight is in parts of shape \(8, 2\), and weight in parts of"):
        prepared(model.requires_grad_(), distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None))
    square, layer = init_device_mesh("cpu", (2, 1)), nn.Linear(4, 8)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), square, [Shard(0), Replicate()]))
    with pytest.raises(CaptureError, match="weight is a DTensor on a mesh of 2 dimensions"):
        prepared(layer, torch.ones(3, 4))


@pytest.mark.parametrize("plan", [ColwiseParallel, SequenceParallel])
def test_a_second_derivative_would_be_that_of_a_part(plan: Any, group: Callable[..., DeviceMesh]) -> None:
    """Its derivative by the weight of a norm is a sum over processes, where the gradient itself has none."""
    layer = nn.LayerNorm(8) if plan is SequenceParallel else nn.Linear(8, 8)
    compiled = prepared(parallelize_module(layer, group(2), plan()), torch.ones(2, 4, 8))
    x = torch.ones(2, 4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(FxroundError, match="a gradient of a model that processes share cannot be differentiated again"):
        gradient.sum().backward()


def test_one_process_has_second_derivatives(group: Callable[..., DeviceMesh]) -> None:
    x = torch.ones(2, 4, 8, requires_grad=True)
    layer = parallelize_module(nn.LayerNorm(8), group(1), SequenceParallel())
    (gradient,) = torch.autograd.grad(prepared(layer, x)(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert layer.weight.grad is not None


def test_dtensors_with_gaps_between_the_elements_of_a_part(group: Callable[..., DeviceMesh]) -> None:
    """As tokens[:, :-1], the input of a language model."""
    mesh = group(2)
    model = distribute_module(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3)), mesh)
    compiled = fxround.compile(model.requires_grad_(False), "reproducible_sharded")
    tokens = torch.arange(36).reshape(4, 9) % 20
    shared = distribute_tensor(tokens, mesh, [Shard(0)], src_data_rank=None)
    dense = distribute_tensor(tokens[:, :-1].contiguous(), mesh, [Shard(0)], src_data_rank=None)
    y = compiled(shared[:, :-1])
    assert (y.shape, y.placements) == ((4, 8, 3), (Shard(0),))
    assert torch.equal(y.to_local(), compiled(dense).to_local())


class _Holds(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.held = [shared]

    def forward(self, x: Tensor) -> Any:
        return x + self.held[0].redistribute(placements=[Replicate()]).to_local()


def test_a_dtensor_that_is_no_state_of_the_model_is_refused(group: Callable[..., DeviceMesh]) -> None:
    model = _Holds(distribute_tensor(torch.ones(4), group(2), [Shard(0)], src_data_rank=None))
    with pytest.raises(CaptureError, match=r"a DTensor that is no parameter, buffer or argument of it: .*buffer"):
        fxround.compile(model, "stochastic", strict=False)(torch.ones(3, 4))


class _InPlace(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x.add_(1))


def test_sequences_that_processes_cannot_share_evenly_are_refused(group: Callable[..., DeviceMesh]) -> None:
    """Also after one that they can share, whose graph has symbolic sizes."""
    plan = {
        "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "1": SequenceParallel(use_local_output=True),
    }
    model = parallelize_module(nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8)), group(2), plan)
    compiled = prepared(model.requires_grad_(False), torch.ones(2, 6, dtype=torch.int64))
    for length in (5, 1):
        said = rf"2 processes cannot share dimension 1 of a tensor of shape \(2, {length}, 8\) evenly"
        with pytest.raises(CaptureError, match=said):
            compiled.prepare(torch.ones(2, length, dtype=torch.int64))
    compiled.prepare(torch.ones(2, 8, dtype=torch.int64))
    assert len(compiled.captures()) == 1


def test_all_of_a_gradient_is_parted_as_its_parameter(group: Callable[..., DeviceMesh]) -> None:
    """The second layer reads all features, so that DTensor computes all of its gradient in every process."""
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "1": RowwiseParallel(),
    }
    model = parallelize_module(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), group(2, 1), plan)
    compiled, x = fxround.compile(model, "reproducible_sharded"), torch.ones(3, 4)
    compiled(x).sum().backward()
    assert [tuple(p.grad.to_local().shape) for p in model.parameters()] == [(4, 4), (4,), (2, 4), (2,)]


def test_a_changed_python_state_is_refused(group: Callable[..., DeviceMesh]) -> None:
    model = model_of("MLP", group(2)).requires_grad_(False)
    model.forward = lambda x: vars(model).update(calls=1) or MLP.forward(model, x)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(CaptureError, match=r"(?s)changes .*calls.*Processes share the model, so that torch.compile"):
        prepared(model, batch_of("MLP"))


def test_other_arguments_of_another_process_are_found(
    group: Callable[..., DeviceMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(said: list[Any], own: Any, group: Any = None) -> None:
        said[:] = [own, (own[0], {**own[1], "list of argument shapes": "[(4, 24)]"})]

    model = model_of("MLP", group(2))
    monkeypatch.setattr(dist, "all_gather_object", agree)
    with pytest.raises(
        FxroundError, match=r"another list of argument shapes than process 0: \[\(4, 24\)\], not \[\(5, "
    ):
        prepared(model, batch_of("MLP"))


def test_a_part_of_a_convolution_is_no_part_of_its_image(group: Callable[..., DeviceMesh]) -> None:
    """DTensor would compute it for another image; every process computes all of it."""
    mesh, layer = group(2), nn.Conv2d(3, 8, 3).requires_grad_(False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]), requires_grad=False)
    layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [Shard(0)]), requires_grad=False)
    with pytest.raises(CaptureError, match=r"aten.convolution reads a tensor of this process and one that several"):
        prepared(layer, torch.ones(2, 3, 5, 5))
    captured = prepared(_Shared(layer, mesh), torch.ones(2, 3, 5, 5)).graph.graph
    (convolution,) = (node for node in captured.nodes if "convolution" in str(node.target))
    assert convolution.meta["val"].shape[1:] == (8, 3, 3)


class _Shared(nn.Module):
    """A layer that reads a DTensor, and all of its result."""

    def __init__(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: Tensor) -> Any:
        return self.layer(DTensor.from_local(x, self.mesh, [Replicate()])).full_tensor()


def test_sums_whose_elements_do_not_follow_each_other_are_computed_by_all(group: Callable[..., DeviceMesh]) -> None:
    """Each process has some positions of all sequences; of one sequence, they are side by side."""
    mesh, x = group(2), torch.ones(2, 6, 8)
    plan = SequenceParallel(use_local_output=False)
    summed = _Summed(parallelize_module(nn.LayerNorm(8), mesh, plan)).requires_grad_(False)
    for batch, order, size in ((x, "shards:8/lanes:16", 12), (x[:1], "shards:4/lanes:16", 6)):
        sums = [node for node in prepared(summed, batch).graph.graph.nodes if node.target == Sum.overload]
        assert [node.args[3] for node in sums] == ["shards:8/lanes:16"] * 2 + [order]  # a mean, a variance, the sum
        assert sums[-1].args[0].meta["val"].shape[1] == size


def test_sums_over_uneven_parts_are_computed_by_all(group: Callable[..., DeviceMesh]) -> None:
    """Four processes have 6, 6, 6 and 3 of 21 elements; the four parts of the tree are 6, 5, 5 and 5."""
    assert [first.end for first in shards_of(21, 4)] == [6, 11, 16, 21]
    plan = RowwiseParallel(input_layouts=Replicate())
    layer = parallelize_module(nn.Linear(21, 8), group(4, 3), plan).requires_grad_(False)
    nodes = prepared(layer, torch.ones(3, 21)).graph.graph.nodes
    (product,) = (node for node in nodes if node.target == Matmul.overload)
    assert product.args[0].meta["val"].shape[1] == 21 and product.args[2].endswith("shards=8")
    assert not any(node.target == AddProcesses.overload for node in nodes)


def test_gradients_that_would_be_added_in_another_order_are_refused(group: Callable[..., DeviceMesh]) -> None:
    """Of x's four uses, two are behind one conversion: their gradients would be added first."""
    inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    inner.forward = lambda x: inner["a"](x) * inner["b"](x)  # type: ignore[method-assign]
    model, x = _Residual(inner), torch.ones(2, 6, 8)
    parallelize_module(
        model, group(2), {"layer": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())}
    )
    plan = {"layer.a": ColwiseParallel(output_layouts=Shard(1)), "layer.b": ColwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (2,)), plan)
    with pytest.raises(CaptureError, match="its gradients would be added in another order than in one process"):
        prepared(model, x.requires_grad_())
    assert prepared(model.requires_grad_(False), x.detach())(x.detach()).shape == x.shape


def _late(mlp: nn.Module, converted: Tensor, x: Tensor) -> Tensor:
    before, product = x.sin(), mlp(converted)
    return before.sum() + product.sum() + x.cos().sum()


def _of_whole_weight(mlp: nn.Module, converted: Tensor, x: Tensor) -> Tensor:
    weight = mlp.up.weight.full_tensor()
    return (weight.sin() * weight.cos()).sum() + mlp(converted).sum()


READS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "an operation before the use": _late,
    "both operands": lambda mlp, converted, x: mlp(x).sum() + F.linear(converted, converted).to_local().sum(),
    "a whole weight": _of_whole_weight,
    "in a checkpoint": _late,
}


@pytest.mark.parametrize("case", READS)
def test_a_conversion_whose_gradient_is_added_in_another_turn_is_refused(
    case: str, group: Callable[..., DeviceMesh]
) -> None:
    model, x, replicated = _Reads(READS[case]), torch.ones(3, 24, requires_grad=True), (Replicate(), None)
    plan = {
        "": PrepareModuleInput(input_layouts=replicated, desired_input_layouts=replicated),
        **{f"mlp.{name}": style() for name, style in model.mlp.plan.items()},
    }
    parallelize_module(model, group(2), plan)
    with pytest.raises(CaptureError, match="its gradients would be added in another order than in one process"):
        prepared(_Twice(model, "checkpoint" in case), x)


class _Reads(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.mlp = function, MLP()

    def forward(self, converted: Tensor, x: Tensor) -> Tensor:
        return self.function(self.mlp, converted, x)


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module, again: bool) -> None:
        super().__init__()
        self.layer, self.again = layer, again

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return checkpoint(self.layer, x, x, use_reentrant=False) if self.again else self.layer(x, x)


def test_prefixes_of_a_shared_dimension_are_those_of_the_whole(group: Callable[..., DeviceMesh]) -> None:
    """DTensor computes them of each part alone."""
    plan = ColwiseParallel(use_local_output=False)
    layer = parallelize_module(nn.Linear(4, 8), group(2), plan).requires_grad_(False)
    captured = prepared(_Prefixes(layer), torch.ones(3, 4)).graph.graph
    (prefixes,) = (node for node in captured.nodes if "scan" in str(node.target) or "cumsum" in str(node.target))
    assert prefixes.meta["val"].shape[-1] == 8


def test_a_maximum_over_processes_is_rounded_once(group: Callable[..., DeviceMesh]) -> None:
    """By the rule of the model's operation, as in one process; the gradient looks for what was chosen."""
    plan = ColwiseParallel(use_local_output=False)
    policy = NO_SHARDS.with_rules(Rule(operator="aten.amax.default", rounding="bfloat16"))
    largest = _Largest(parallelize_module(nn.Linear(4, 8), group(2), plan))
    nodes = prepared(largest, torch.ones(3, 4), policy).graph.graph.nodes
    (part,) = (node for node in nodes if "aten.amax" in str(node.target))
    (chosen,) = (node for node in nodes if node.target is EXTREME_OF_PROCESSES)
    assert list(part.users) == [chosen]
    assert any("bfloat16" in str(user.args) for user in chosen.users)
    assert chosen in _saved(nodes) and not any(user in _saved(nodes) for user in chosen.users)
    assert sum("aten.bitwise_and" in str(node.target) for node in nodes) == 3  # what says which zero it is


def _saved(nodes: Any) -> Any:
    """What a forward graph returns for the backward one."""
    return next(node for node in nodes if node.op == "output").args[0][1:]


class _Largest(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).amax(-1).to_local()


class _Prefixes(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).cumsum(-1).to_local()


class _Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class _Summed(nn.Module):
    """The sum over batch and positions of what a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum((0, 1)).to_local()


def rounded_by(rounding: str, **fields: Any) -> Policy:
    return Policy("rounded", (Rule(rounding=rounding, accumulate="binary32", order="shards:8/lanes:16", **fields),))


def test_parts_draw_by_their_place_in_the_whole(group: Callable[..., DeviceMesh]) -> None:
    """Rank 1 of 2 has columns 24 to 47 of 48 in "up", and all of what follows the sum."""
    compiled = prepared(model_of("MLP", group(2, 1)), batch_of("MLP"), rounded_by("bfloat16/stochastic"))
    calls = [node for node in compiled.graph.graph.nodes if node.target == Pointwise.overload]
    states = {str(n.meta["fxround"].path): n.args[3] for n in calls if n.meta["fxround"].direction == "forward"}
    (chunk, first, own, whole, shards, shard) = states["up"].args[1:]
    assert (chunk, first, own, whole, shards, shard) == ([24], 1, 1, 2, 1, 0)
    assert states["down"].op == "placeholder"


@pytest.mark.parametrize(
    "features, size, rank, share",
    [
        (21, 2, 0, ([11], 0, 11, 21)),
        (21, 2, 1, ([10], 11, 10, 21)),
        (5, 4, 2, ([1], 4, 1, 5)),
        (5, 4, 3, ([], 0, 1, 1)),
    ],
)
def test_uneven_parts_draw_by_their_place_in_the_whole(
    features: int, size: int, rank: int, share: tuple[Any, ...], group: Callable[..., DeviceMesh]
) -> None:
    """The last process has no element to draw for; its graph has the same operations."""
    layer = parallelize_module(
        nn.Linear(4, features), group(size, rank), ColwiseParallel(output_layouts=Replicate())
    ).requires_grad_(False)
    nodes = prepared(layer, torch.ones(3, 4), rounded_by("bfloat16/stochastic")).graph.graph.nodes
    states = [node for node in nodes if node.target == StateOfPart.overload]
    assert [tuple(node.args[1:5]) for node in states] == [share] * 2  # of the product, and of the sum with the bias


def test_a_part_of_an_uneven_part_has_its_place_in_the_whole(group: Callable[..., DeviceMesh]) -> None:
    """By fully_shard, of what process 1 of two has: rows 4 to 6 of 7, of which two more processes share 2 and 1."""
    shared: Any = distribute_tensor(torch.ones(7, 8), group(2, 1), [Shard(0)], src_data_rank=None)
    part = fully_sharded.Part(nn.Parameter(shared), shared.to_local().shape, 0, 2, shared._spec)
    places = [part.place(), part.place(0), part.place(1)]
    assert [place[:3] for place in places if place] == [(24, 32, 32), (16, 40, 32), (8, 48, 48)]


def test_processes_agree_on_what_they_exchange_not_on_their_parts(group: Callable[..., DeviceMesh]) -> None:
    """Process 1 of two has 10 of 21 features, and pads them to 11; a process with 10 of 20 would send 10."""

    def graph(features: int, rank: int) -> str:
        layer = nn.Linear(4, features).requires_grad_(False)
        parallelize_module(layer, group(2, rank), ColwiseParallel(output_layouts=Replicate()))
        text = agreement._text(prepared(layer, torch.ones(3, 4), rounded_by("bfloat16/stochastic")).graph)
        dist.destroy_process_group()
        return text

    first, last, another = graph(21, 0), graph(21, 1), graph(20, 1)
    group(1)  # which the fixture destroys
    assert first == last != another
    assert "all_gather_into_tensor.default 0 torch.float32 ['', 11]" in first


class _Cut(nn.Module):
    """A model that takes, of what a layer has in this process, the first elements."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, :3] * 2


class _Turned(_Cut):
    """A model whose view may be one of rows or of columns: (rows, 2 * 4) as (rows * 2, 4), with one of two here."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.view(-1, 4).t() * 2


UNKNOWN: dict[str, tuple[Any, Any, Any]] = {
    "a slice": (_Cut, rounded_by("bfloat16/stochastic"), "fxround does not know which part of its result"),
    "a view": (_Turned, rounded_by("bfloat16/stochastic"), "fxround does not know which part of its result"),
    "faults": (_Cut, rounded_by("bfloat16", faults="any:0.1"), "flips bits by chance"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_draws_of_unknown_parts_are_refused(case: str, group: Callable[..., DeviceMesh]) -> None:
    kind, policy, message = UNKNOWN[case]
    model = kind(parallelize_module(nn.Linear(4, 8), group(2), ColwiseParallel()))
    with pytest.raises(UnsupportedRounding, match=message):
        prepared(model, torch.ones(3, 4), policy)


def test_attribution_is_for_one_process(group: Callable[..., DeviceMesh]) -> None:
    with pytest.raises(UnsupportedOperator, match="pass the model as it is before parallelize_module"):
        fxround.attribute(model_of("MLP", group(2)), batch_of("MLP"), policy="reproducible_sharded")


if __name__ == "__main__":
    as_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
