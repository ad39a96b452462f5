"""Models that processes share by parallelize_module, and what one call and its backward pass give."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from fxround.training import compile_optimizer


class MLP(nn.Module):
    plan: ClassVar = {"up": ColwiseParallel, "down": RowwiseParallel}

    def __init__(self, processes: int = 1) -> None:
        del processes
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Each process has some of the heads."""

    def __init__(self, width: int, heads: int, processes: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or width
        self.heads, self.width = heads // processes, inner // heads
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.o = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, self.width)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Transformer(nn.Module):
    """A block of attention and an MLP, between an embedding and a head that every process has as a whole."""

    plan: ClassVar = {
        **{f"attention.{name}": ColwiseParallel for name in "qkv"},
        "attention.o": RowwiseParallel,
        "mlp.up": ColwiseParallel,
        "mlp.down": RowwiseParallel,
    }

    def __init__(self, processes: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 24), nn.Linear(10, 20)
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attention, self.mlp = Attention(24, 8, processes), MLP()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.first(x))
        return self.head(self.mlp(self.second(x)))


class Gated(nn.Module):
    def __init__(self, width: int = 24, inner: int = 32) -> None:
        super().__init__()
        shapes = ((width, inner), (width, inner), (inner, width))
        self.first, self.gate, self.down = (nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.first(x)) * self.gate(x))


class Llama(nn.Module):
    """A block with RMS norms: where no layer is parallel, each process has some positions (sequence parallel)."""

    def __init__(self, processes: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 24), nn.Linear(24, 24)
        self.first, self.second, self.last = nn.RMSNorm(24), nn.RMSNorm(24), nn.LayerNorm(24)
        self.attention, self.gated = Attention(24, 8, processes), Gated()

    plan: ClassVar = {
        "embedding": lambda: PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        **dict.fromkeys(("first", "second", "last"), SequenceParallel),
        **dict.fromkeys(
            ("attention", "gated"),
            lambda: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        ),
        **dict.fromkeys((*(f"attention.{name}" for name in "qkv"), "gated.first", "gated.gate"), ColwiseParallel),
        **dict.fromkeys(("attention.o", "gated.down"), lambda: RowwiseParallel(output_layouts=Shard(1))),
        "head": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.first(x))
        x = x + self.gated(self.second(x))
        return self.head(self.last(x))


class Vocabulary(nn.Module):
    """A loss, with the rows of the embedding and the classes of the logits shared among processes."""

    def __init__(self, processes: int = 1) -> None:
        del processes
        super().__init__()
        self.embedding, self.positions, self.head = nn.Embedding(24, 16), nn.Embedding(8, 16), nn.Linear(16, 24)
        with torch.no_grad():
            self.embedding.weight[::2, ::2] = -0.0

    plan: ClassVar = {
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
        "positions": lambda: ColwiseParallel(output_layouts=Replicate()),
        "head": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = torch.where(x.signbit(), x - 1, x)  # shows the sign of zero
        logits = self.head(self.hidden(x[:, :-1] + self.positions(tokens[:, :-1] % 8))).flatten(0, 1)
        labels = torch.where(tokens == 3, -100, tokens)[:, 1:].flatten()
        with loss_parallel():
            loss = self.of(logits, labels)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def hidden(self, x: Tensor) -> Tensor:
        return x

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Uneven(Vocabulary):
    """Rows, columns, features and classes that processes cannot share evenly; the last processes have few, or none.

    Two processes have 1 and 0 columns of "positions", and 3 and 2 features of "up"; four have 2, 2, 1 and 0 of "up".
    The layer "down" sums over 21 features.
    """

    def __init__(self, processes: int = 1) -> None:
        super().__init__(processes)
        self.embedding, self.positions = nn.Embedding(21, 21, padding_idx=20), nn.Embedding(8, 1)
        self.down, self.up, self.head = nn.Linear(21, 16), nn.Linear(16, 5), nn.Linear(5, 21)
        self.dropout = nn.Dropout(0.25)
        with torch.no_grad():
            self.embedding.weight[::2, ::2] = -0.0

    plan: ClassVar = {
        **Vocabulary.plan,
        "down": lambda: RowwiseParallel(input_layouts=Replicate()),
        "up": lambda: ColwiseParallel(output_layouts=Replicate()),
    }

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.down(x)))

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.dropout(logits), labels)


class Maxima(Vocabulary):
    """With the largest and the smallest logit in the loss."""

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().of(logits, labels) + (logits.amax(-1) * logits.amin(-1)).sum()


class Placed(nn.Module):
    """Of a DTensor with some positions in each process, a DTensor with some of 7 classes: no equal parts."""

    plan: ClassVar = {
        "norm": SequenceParallel,
        "mlp": lambda: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel,
        "mlp.down": lambda: RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }

    def __init__(self, processes: int = 1) -> None:
        del processes
        super().__init__()
        self.norm, self.mlp, self.head = nn.LayerNorm(24), MLP(), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.norm(x)))


MODELS: dict[str, Any] = {
    "MLP": MLP,
    "MLP of bfloat16": MLP,
    "transformer": Transformer,
    "llama": Llama,
    "vocabulary": Vocabulary,
    "uneven": Uneven,
    "maxima": Maxima,
    "placed": Placed,
}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a model's parameters."""
    return torch.bfloat16 if name.endswith("bfloat16") else torch.float32


def model_of(name: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """The model of a name, with the same weights for any number of processes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind = MODELS[name]
        model: nn.Module = kind(1 if mesh is None else mesh.size())
    model.to(dtype_of(name))
    plan = {path: style() for path, style in kind.plan.items()}
    return model if mesh is None else parallelize_module(model, mesh, plan)


def batch_of(name: str) -> Tensor:
    g = torch.Generator().manual_seed(4)
    if name == "placed":
        return torch.randn(2, 8, 24, generator=g)
    return (
        torch.randn(5, 24, generator=g).to(dtype_of(name))
        if name.startswith("MLP")
        else torch.randint(20, (2, 8), generator=g)
    )


def _passed(name: str, compiled: nn.Module) -> Tensor:
    """The arguments of a model, as it takes them: of "placed", what each process has of them."""
    parameter = next(compiled.parameters())
    if name != "placed" or not isinstance(parameter, DTensor):
        return batch_of(name)
    return distribute_tensor(batch_of(name), parameter.device_mesh, [Shard(1)], src_data_rank=None)


def results(name: str, compiled: nn.Module) -> dict[str, Tensor]:
    """The result and the gradients of a training step; of most models, of MLP in eval mode too, one without them."""
    found = {}
    for mode in ("train", "eval") if name == "MLP" else ("train",):
        compiled.train(mode == "train")
        compiled.zero_grad()
        x = _passed(name, compiled)
        x = x.requires_grad_() if x.is_floating_point() else x
        y = compiled(x)
        with loss_parallel():  # stock PyTorch's loss of shared logits has its gradient here alone
            (whole(y) if name == "placed" else y).square().sum().backward()
        found[f"{mode} result"] = whole(y.detach())
        named = [*compiled.named_parameters(), *([("x", x)] if x.is_floating_point() else [])]
        found |= {f"{mode} {path}": whole(p.grad) for path, p in named}
    if name in ("vocabulary", "uneven", "maxima"):
        return found
    with torch.no_grad():
        found["no gradients"] = whole(compiled(_passed(name, compiled)[:1]))
    return found


def trained(name: str, compiled: nn.Module) -> dict[str, Tensor]:
    """The weights after three steps of an optimizer."""
    optimizer = compile_optimizer(torch.optim.AdamW(compiled.parameters(), lr=0.01), "reproducible_sharded")
    for _ in range(3):
        optimizer.zero_grad()
        compiled(batch_of(name)).square().mean().backward()
        optimizer.step()
    return {f"trained {path}": whole(p.detach()) for path, p in compiled.named_parameters()}


def resumed(compiled: nn.Module, path: str, saves: bool) -> dict[str, Tensor]:
    """The weights after two steps of MLP, with a checkpoint between them that is written, or read for the second."""
    optimizer = compile_optimizer(torch.optim.AdamW(compiled.parameters(), lr=0.01), "reproducible_sharded")

    def step() -> None:
        optimizer.zero_grad()
        compiled(batch_of("MLP")).square().mean().backward()
        optimizer.step()

    if saves:
        step()
    weights, states = get_state_dict(compiled, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": states}
    (write if saves else read)(found, checkpoint_id=path)
    if not saves:
        set_state_dict(compiled, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    step()
    return {name: whole(p.detach()) for name, p in compiled.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """The whole of a DTensor; what a collective gives when it has ended."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
