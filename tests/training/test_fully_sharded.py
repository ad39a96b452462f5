"""fully_shard: any number of processes has the weights of one process, of DDP, and of a training that was resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxround
from fxround import Policy, Rule
from fxround.compiler import agreement
from fxround.errors import CaptureError, FxroundError
from fxround.training import compile_optimizer

dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo backend", allow_module_level=True)
if torch.__version__ < agreement.SINCE:
    pytest.skip("models that processes share need a later PyTorch", allow_module_level=True)

from parallel_models import model_of  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load as read  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as write  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from fxround.training.distributed import average_in_order  # noqa: E402

DRAWN = Policy("drawn", (*Policy.parse("reproducible").rules, Rule(role="gradient", rounding="dtype/stochastic")))
POLICIES: dict[str, Any] = {"reproducible": "reproducible", "drawn": DRAWN}
MORE = {name: name for name in ("bfloat16", "stochastic", "up_down", "mxfp8")}
SHARED, STEPS, SEED = 8, 2, 7


class Block(nn.Module):
    """Parameters whose first dimension processes cannot share evenly, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._branch, x, use_reentrant=False)
        return x + y

    def _branch(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A weight that two layers share, one that is frozen, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.block = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False), Block()
        self.head.weight = self.embedding.weight
        self.block.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(F.dropout(self.block(self.embedding(tokens)), 0.1, self.training))


def build(**settings: Any) -> Any:
    """The same weights for any number of processes, shared by fully_shard."""
    model = plain()
    fully_shard(model.block, **settings)
    return fully_shard(model, **settings)


def plain() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model()


def loss(model: nn.Module, number: int) -> Tensor:
    """The loss of a micro-batch."""
    tokens = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, size: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for j in own_of(model, rank, size, SHARED):
            loss(model, step * SHARED + j).backward()
        optimizer.step()


def own_of(model: Any, rank: int, size: int, shared: int) -> Iterator[int]:
    """Yield the micro-batches of a process in a step; gradients of all but the last stay in the process."""
    own = range(rank, shared, size)
    for j in own:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            with nullcontext() if j == own[-1] else model.no_sync():
                yield j
        else:
            model.set_requires_gradient_sync(j == own[-1])
            yield j


def optimizer_of(model: nn.Module, policy: str = "reproducible") -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return compile_optimizer(torch.optim.AdamW(trained, lr=0.05), policy, seed=5)


def whole(tensors: Any) -> list[Tensor]:
    return [t.full_tensor().detach().clone() if hasattr(t, "full_tensor") else t.detach().clone() for t in tensors]


def save(model: nn.Module, optimizer: Any, path: str) -> None:
    weights, states = get_state_dict(model, optimizer)
    write({"model": weights, "optimizer": states}, checkpoint_id=path)


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    weights, states = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": states}
    read(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


# ---- processes ----


def as_a_rank(store: str, out: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    model: Any = build()
    start = [p.to_local().clone() for p in model.parameters()]
    first: Any = fxround.compile(model, "reproducible", seed=SEED)

    # Gradients of two batches of each process, in the order of the ranks.
    for i in range(2):
        first.set_requires_gradient_sync(i == 1)
        loss(first, size * i + rank).backward()
    trained = [p for p in first.parameters() if p.requires_grad]
    found["gradients"] = whole(p.grad for p in trained)
    try:
        fxround.hash(model)
    except TypeError as error:
        found["hash"] = str(error)
    assert all(p.grad.placements == p.placements for p in trained)
    first.zero_grad()

    # The model itself, which leaves whole parameters behind, and the compiled one afterwards.
    first.eval()
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        found["results"] = first(tokens), model(tokens), first(tokens)
    first.train()

    for name, policy in (POLICIES if size == 2 else POLICIES | MORE).items():
        compiled = first.with_policy(policy).reseed(SEED)
        with torch.no_grad():
            for p, before in zip(model.parameters(), start, strict=True):
                p.to_local().copy_(before)
        average_in_order(compiled, micro_batches=SHARED)
        optimizer = optimizer_of(compiled, "stochastic" if name == "drawn" else "reproducible")
        train(compiled, optimizer, range(1), rank, size)
        if name == "drawn":
            save(compiled, optimizer, f"{out}.checkpoint")
        train(compiled, optimizer, range(1, STEPS), rank, size)
        found[name] = whole(compiled.parameters()), compiled.rng

    found["whole steps"] = [whole([p])[0] for p in stepped(lambda p: fully_shard(p).weight)]

    compiled, data = parallelized(size)
    found["parallelized"] = whole(trained_together(compiled, data.get_local_rank(), data.size()).parameters())
    found["captures"] = len(compiled.captures().rows)
    compiled, data = parallelized(size)
    drawn = trained_together(compiled, data.get_local_rank(), data.size(), DRAWN)
    found["parallelized, drawn"] = whole(drawn.parameters())

    for case, use in differing(first, model, rank).items():
        first.zero_grad()
        try:
            use()
        except FxroundError as error:
            found[case] = str(error)
    torch.save(found, f"{out}.{rank}")
    dist.barrier()
    time.sleep(0.3)  # gloo may abort a process that ends at once (training.md)
    dist.destroy_process_group()


def stepped(share: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield parameters after steps that a process cannot take of its part alone: of matrices, and of blocks."""
    blocks = Policy("blocks", (Rule(rounding="dtype"), Rule(role="weight", direction="update", rounding="mxfp8")))
    for kind, policy in ((torch.optim.Muon, "reproducible"), (torch.optim.SGD, blocks)):
        layer = nn.Linear(5, 7, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(35.0).view(7, 5).cos())
        p, gradient = share(layer), torch.arange(35.0).view(7, 5).sin()
        shared = hasattr(p, "placements")
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if shared else gradient
        compile_optimizer(kind([p], lr=0.1), policy).step()
        yield p


def parallelized(size: int) -> tuple[Any, DeviceMesh]:
    """A model of which two processes share each layer, and then the others the rest; the mesh of the latter."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = model_of("MLP", mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    return fxround.compile(model, "reproducible_sharded", seed=SEED), mesh["data"]


def trained_together(model: Any, rank: int = 0, size: int = 1, averages: Any = None) -> Any:
    """The model after a step of four micro-batches."""
    average_in_order(model, averages, micro_batches=4)
    for j in own_of(model, rank, size, 4):
        loss_of_mlp(model, j).backward()
    optimizer_of(model, "stochastic").step()
    return model


def loss_of_mlp(model: nn.Module, number: int) -> Tensor:
    y: Tensor = model(torch.randn(3, 24, generator=torch.Generator().manual_seed(number)))
    return y.square().mean()


def differing(compiled: Any, model: nn.Module, rank: int) -> dict[str, Callable[[], Any]]:
    """What ends with an error in all processes, because the last two do not do the same."""

    def gradient_before() -> None:
        compiled.reseed(SEED)
        average_in_order(compiled, micro_batches=dist.get_world_size())
        if rank == 1:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        compiled.set_requires_gradient_sync(True)
        loss(compiled, rank).backward()

    return {
        "policies": lambda: loss(compiled.with_policy("bfloat16" if rank else "reproducible"), 0),
        "seeds": lambda: loss(compiled.reseed(rank), 0),
        "arguments": lambda: loss(compiled, 0) if rank != 1 else compiled(torch.ones(2)),
        "gradient before": gradient_before,
    }


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)]
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Where the processes put what they found, and how many there were."""
    size, place = request.param, tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", __file__, str(place / "store"), str(place / "out")]
    paths = [str(Path(fxround.__file__).parent.parent), str(Path(__file__).parents[1] / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = [subprocess.Popen([*command, str(rank), str(size)], env=environment) for rank in range(size)]
    try:
        assert [process.wait(600) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
    return place, size


@pytest.fixture
def ranks(place: tuple[Path, int]) -> list[dict[str, Any]]:
    return [torch.load(f"{place[0] / 'out'}.{rank}") for rank in range(place[1])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process."""
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


# A thread of gloo's that is the last to hold a group aborts the process.
KEPT: list[Any] = []


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("alone")
def test_the_weights_are_those_of_ddp_in_one_process(ranks: list[dict[str, Any]]) -> None:
    """Of ten parameters, some have no part in the last processes; the sums of "drawn" are of whole gradients."""
    seen = [whole(plain().parameters())]
    for name, policy in (POLICIES if len(ranks) == 2 else POLICIES | MORE).items():
        compiled = fxround.compile(plain(), policy, seed=SEED)
        ddp = nn.parallel.DistributedDataParallel(compiled)
        average_in_order(ddp, micro_batches=SHARED)
        train(ddp, optimizer_of(compiled, "stochastic" if name == "drawn" else "reproducible"), range(STEPS))
        seen.append(whole(compiled.parameters()))
        for found in ranks:
            weights, rng = found[name]
            assert same(weights, seen[-1]) and rng.tolist() == compiled.rng.tolist() == [SEED, STEPS * SHARED], name
    assert not any(same(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_gradients_are_averaged_in_the_order_of_the_ranks(ranks: list[dict[str, Any]]) -> None:
    """Without average_in_order, too. NumPy adds and divides, as IEEE 754 says."""
    size, compiled = len(ranks), fxround.compile(plain(), "reproducible", seed=SEED)
    trained = [p for p in compiled.parameters() if p.requires_grad]

    def gradients(number: int) -> list[Any]:
        compiled.reseed(SEED, sample=number)
        return [g.numpy() for g in torch.autograd.grad(loss(compiled, number), trained)]

    totals = [[np.add(a, b) for a, b in zip(gradients(r), gradients(size + r), strict=True)] for r in range(size)]
    for i in range(len(trained)):
        total = totals[0][i]
        for r in range(1, size):
            total = np.add(total, totals[r][i])
        expected = torch.from_numpy(np.divide(total, np.float32(size)))
        assert all(same([found["gradients"][i]], [expected]) for found in ranks)


@pytest.mark.usefixtures("alone")
def test_a_parallelized_model_has_the_weights_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Also with averages that draw: an element draws by its number in the whole parameter."""
    weights = []
    for case, averages in {"parallelized": None, "parallelized, drawn": DRAWN}.items():
        compiled = fxround.compile(model_of("MLP"), "reproducible_sharded", seed=SEED)
        ddp = nn.parallel.DistributedDataParallel(compiled)
        weights.append(whole(trained_together(ddp, averages=averages).parameters()))
        assert all(same(found[case], weights[-1]) for found in ranks)
    assert not same(*weights) and not same(weights[0], whole(model_of("MLP").parameters()))
    assert all(found["captures"] == 1 for found in ranks)


def test_steps_of_matrices_and_blocks_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    want = whole(stepped(lambda layer: layer.weight))
    assert all(same(found["whole steps"], want) for found in ranks)


def test_a_part_has_no_hash(ranks: list[dict[str, Any]]) -> None:
    assert all("of which this process has a part: pass x.full_tensor(), in every process" in r["hash"] for r in ranks)


def test_the_model_itself_still_runs(ranks: list[dict[str, Any]]) -> None:
    model = plain().eval()
    compiled = fxround.compile(model, "reproducible")
    with torch.no_grad():
        want, stock = compiled(torch.arange(6)[None]), model(torch.arange(6)[None])
    for found in ranks:
        before, itself, after = found["results"]
        assert same([before, after], [want, want]) and itself.shape == stock.shape
        # Both are stock PyTorch, in two processes: no order of its sums is promised, so that bits may differ.
        torch.testing.assert_close(itself, stock)


@pytest.mark.usefixtures("alone")
def test_one_process_resumes_what_several_saved(place: tuple[Path, int], ranks: list[dict[str, Any]]) -> None:
    compiled: Any = fxround.compile(build(), DRAWN, seed=1)
    average_in_order(compiled, micro_batches=SHARED)
    optimizer = optimizer_of(compiled, "stochastic")
    load(compiled, optimizer, f"{place[0] / 'out'}.checkpoint")
    assert compiled.rng.tolist() == [SEED, SHARED]
    train(compiled, optimizer, range(1, STEPS))
    assert same(whole(compiled.parameters()), ranks[0]["drawn"][0])


def test_all_processes_end_with_an_error_if_one_of_them_differs(ranks: list[dict[str, Any]]) -> None:
    """What they compute afterwards shows that none of them waits for another one."""
    for case, said in (
        ("policies", "process 1 has another policy than process 0: 'bfloat16'"),
        ("seeds", "process 1 has another call than process 0: one that trains, with seed 1 and sample 0, not one that"),
    ):
        assert all(said in found[case] for found in ranks)
    for case, said in (
        ("arguments", "Model cannot be captured"),
        ("gradient before", "embedding.weight has a gradient before the backward pass of a micro-batch"),
    ):
        for rank, found in enumerate(ranks):
            own = "" if rank == 1 else f"process 1 of the {len(ranks)} that share the model has an error"
            assert found[case].startswith(own) and said in found[case]


# ---- without other processes ----

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "casts": (
        lambda: build(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        CaptureError,
        r"the mixed precision policy param_dtype=torch\.bfloat16, and .* leave mp_policy out",
    ),
    "offload": (
        lambda: build(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        CaptureError,
        "gathered from another device .* Leave offload_policy out",
    ),
    "two dimensions": (
        lambda: build(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "parts"))),
        CaptureError,
        "a mesh of 2 dimensions",
    ),
    "meta": (lambda: fully_shard(nn.Linear(3, 3, device="meta")), CaptureError, "is on the device meta"),
    "python": (lambda: fully_shard(Counting()), CaptureError, r"changes self\.calls .*has to be one graph"),
    "returned": (lambda: fully_shard(Returning()), CaptureError, "returns weight itself, or a view of it"),
}


class Counting(nn.Linear):
    """A model that counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Returning(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.weight.t()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case: str) -> None:
    make, error, said = REFUSED[case]
    with pytest.raises(error, match=rf"(?s){said}"):
        fxround.compile(make(), "reproducible")(torch.ones(2, 3))


@pytest.mark.usefixtures("alone")
def test_a_later_fully_shard_and_other_factors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"call fully_shard for the module, then fxround\.compile"):
        fully_shard(fxround.compile(nn.Linear(3, 3), "reproducible"))
    model: Any = nn.Linear(3, 3)
    compiled = fxround.compile(model, "reproducible")
    fully_shard(model)
    with pytest.raises(CaptureError, match=r"fully_shard was called for FSDPLinear after fxround\.compile"):
        compiled(torch.ones(2, 3))
    other = fxround.compile(model, "reproducible")
    with pytest.raises(FxroundError, match="several processes share this model"):
        other.export(tmp_path / "model.pt2", torch.ones(2, 3))
    other.set_gradient_divide_factor(4.0)
    with pytest.raises(CaptureError, match=r"set_gradient_divide_factor\(4\.0\) was called"):
        fxround.compile(model, "reproducible")


class _Switched(nn.Module):
    """A model that reads an attribute of a parameter, which fully_shard is not called for, and of a sharded layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gate: Any = nn.Parameter(torch.ones(3), requires_grad=False)
        self.gate.enabled = True

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y * self.gate if self.gate.enabled else y + 1


@pytest.mark.usefixtures("alone")
def test_what_is_read_of_other_parameters_is_noticed() -> None:
    model = _Switched()
    fully_shard(model.layer)
    compiled, x = fxround.compile(model, "reproducible"), torch.ones(2, 3)
    with torch.no_grad():
        before = compiled(x)
        model.gate.enabled = False
        assert torch.equal(compiled(x), before + 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", [True, False])
def test_other_hooks_of_a_sharded_module_are_called(before: bool) -> None:
    """In the order in which they are registered, also when the module is captured again."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def add(module: nn.Module, args: tuple[Tensor], y: Tensor) -> Tensor:
        return y + 1

    if before:
        model[0].register_forward_hook(add)
    fully_shard(model[0])
    if not before:
        model[0].register_forward_hook(add)
    hooks = list(model[0]._forward_hooks)
    of_one = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    of_one.load_state_dict({name: whole([x])[0] for name, x in model.state_dict().items()})
    of_one[0].register_forward_hook(add)
    compiled, plain = (fxround.compile(each, "reproducible") for each in (model, of_one))
    for x in (torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 2, 3)):
        assert torch.equal(compiled(x), plain(x))
    assert list(model[0]._forward_hooks) == hooks


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dim", [0, 1])
def test_eval_mode_has_gradients_too(dim: int) -> None:
    """And the processes may share another dimension than the first."""
    weight = nn.Linear(3, 4, bias=False).double()
    want = fxround.compile(weight, "reproducible").eval()
    other: Any = nn.Linear(3, 4, bias=False).double()
    other.load_state_dict(weight.state_dict())
    fully_shard(other, shard_placement_fn=lambda p: Shard(dim))
    found = fxround.compile(other, "reproducible").eval()
    for compiled in (want, found):
        compiled(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    assert other.weight.grad.placements == (Shard(dim),)
    assert weight.weight.grad is not None and torch.equal(other.weight.grad.full_tensor(), weight.weight.grad)


@pytest.mark.usefixtures("alone")
def test_a_group_that_is_gone_is_reported() -> None:
    KEPT.append(dist.new_group([0]))
    model: Any = fully_shard(nn.Linear(3, 3), mesh=DeviceMesh.from_group(KEPT[-1], "cpu"))
    dist.destroy_process_group(KEPT[-1])
    with pytest.raises(FxroundError, match=r"the process group of the mesh .* was destroyed"):
        fxround.compile(model, "reproducible")


if __name__ == "__main__":
    as_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
