"""The ledger of bits: hashes of 24 small models under every preset, and the digests of the kernels that compute them.

    python -m benchmarks.bits              # compare all with benchmarks/results/bits.json, and say what differs
    python -m benchmarks.bits --write      # after a change of bits that is meant: replace the file
    python -m benchmarks.bits gru fp8      # only the models and presets of these names

Every pair of model and preset is computed in several ways, which must agree before anything is compared: fused;
operation by operation; from a file (``export``, ``load``); and as code for each instruction set of the processor. With
``--texts``, also through the texts of a GPU, compiled for the host (``PYTHONPATH=tests/support``, and g++ or clang++).
What is hashed are a result in eval mode, a result in training mode with the gradients of the argument and of all
parameters, and the buffers afterwards. A change that is meant to leave bits and kernels as they are leaves the file as
it is.

Weights and arguments are exact multiples of powers of two from NumPy's generator, so that they are the same on every
machine; products are fxround's own where a preset leaves them to PyTorch. Under ``identity`` PyTorch's kernels compute,
whose bits depend on the machine: only the digests are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxround
from benchmarks.cuda import with_own_products
from benchmarks.harness import machine
from fxround import Policy
from fxround.errors import PolicyError
from fxround.graph.dialect import graphs_of, read
from fxround.policy import PRESETS
from fxround.policy.rule import IDENTITY
from fxround.runtime.cpu.llvm.engine import instruction_sets

LEDGER: Final = Path(__file__).parent / "results" / "bits.json"
SEED: Final = 5
Make = Callable[[], nn.Module]
# A model's name, how to make it, and the shape and dtype of its argument.
Row = tuple[str, Make, tuple[int, ...], torch.dtype]


class Apply(nn.Module):
    """A function of a tensor, and modules that it uses."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


class Residual(nn.Module):
    """Two convolutions with batch norms, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(x + self.other(self.second(y)))


class Tokens(nn.Module):
    """An embedding, a causal transformer layer, a classifier and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 64).long().remainder(11)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        scores = self.head(self.layer(self.table(tokens), mask, is_causal=True))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


class States(nn.Module):
    """The results of a recurrent layer, and its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        results, last = self.layer(x)
        return torch.cat([results.flatten(), *(state.flatten() for state in pytree.tree_leaves(last))])


def _elementary(x: Tensor) -> Tensor:
    near = x.abs() + 0.5
    return torch.cat([x.exp(), near.log(), x.sin(), x.cos(), x.tanh(), x.sigmoid(), x.erf(), near.rsqrt(), near**0.3])


def _activations(x: Tensor) -> Tensor:
    return torch.cat([F.gelu(x), F.silu(x), F.softplus(x), F.elu(x), F.mish(x), F.hardswish(x), F.logsigmoid(x)])


def _losses(x: Tensor) -> Tensor:
    p, q = x.softmax(-1), x.flip(-1).log_softmax(-1)
    apart = F.kl_div(q, p, reduction="none").sum(-1), F.binary_cross_entropy_with_logits(x, p, reduction="none").sum(-1)
    return torch.stack([*apart, F.smooth_l1_loss(x, p, reduction="none").mean(-1), x.logsumexp(-1)])


def _sums(x: Tensor) -> Tensor:
    statistics = x.mean(-1), x.var(-1), x.norm(dim=-1), x.amax(-1), (x * 0.25 + 1).prod(-1), x.cumsum(-1)[..., -2]
    return torch.stack(statistics)


def _scattered(x: Tensor) -> Tensor:
    index = (torch.arange(x.shape[-1]) * 7 % 5).expand(x.shape)
    return x.new_zeros((*x.shape[:-1], 5)).scatter_add(-1, index, x)


def _attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.flip(1), x.roll(1, 1), is_causal=True)


def _gated(x: Tensor, up: nn.Module, gate: nn.Module, down: nn.Module, norm: nn.Module) -> Tensor:
    y = norm(x)
    return x + down(F.silu(gate(y)) * up(y))


def _gate() -> nn.Module:
    return Apply(_gated, nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8), nn.RMSNorm(8))


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.SiLU(), nn.Conv2d(5, 3, 3, 2))


def _resampled(x: Tensor) -> Tensor:
    larger = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    return torch.cat([larger.flatten(), F.adaptive_avg_pool2d(x, 3).flatten(), F.max_pool2d(x, 2).flatten()])


def _warped(x: Tensor) -> Tensor:
    turned = torch.tensor([[[0.75, 0.25, 0.125], [-0.25, 0.75, 0.0]]]).expand(len(x), -1, -1)
    places = F.affine_grid(turned, x.shape, align_corners=False)
    return F.grid_sample(x, places, align_corners=False)


def _stepped(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + 0.0625 * (x.roll(1, -1) - 2 * x + x.roll(-1, -1)) * (1 - x)
    return x


def _mlp(activation: Make) -> Make:
    return lambda: nn.Sequential(nn.Linear(12, 20), activation(), nn.Linear(20, 20), activation(), nn.Linear(20, 3))


def _images(*layers: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(*(layer() for layer in layers))


_PLAIN, _FINE = torch.float32, torch.float64
ROWS: Final[tuple[Row, ...]] = (
    ("mlp", _mlp(nn.ReLU), (6, 12), _PLAIN),
    ("mlp_binary64", _mlp(nn.Tanh), (6, 12), _FINE),
    ("mlp_bfloat16", _mlp(nn.GELU), (6, 12), torch.bfloat16),
    ("dropout", lambda: nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.25), nn.Linear(40, 3)), (6, 12), _PLAIN),
    ("convolution", _convolutions, (3, 2, 9, 9), _PLAIN),
    ("depthwise", _images(lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: nn.GroupNorm(2, 4)), (2, 4, 8, 8), _PLAIN),
    ("transposed", _images(lambda: nn.ConvTranspose2d(3, 2, 3, 2), nn.Sigmoid), (2, 3, 5, 5), _PLAIN),
    ("convolution_1d", _images(lambda: nn.Conv1d(4, 6, 5, dilation=2, groups=2), nn.ELU), (2, 4, 20), _PLAIN),
    ("residual", Residual, (3, 4, 6, 6), _PLAIN),
    ("resampled", lambda: Apply(_resampled), (2, 2, 6, 6), _PLAIN),
    ("warped", lambda: Apply(_warped), (2, 2, 5, 5), _PLAIN),
    ("attention", lambda: Apply(_attention), (2, 7, 8), _PLAIN),
    ("tokens", Tokens, (2, 6), _PLAIN),
    ("gated", _gate, (2, 5, 8), _PLAIN),
    ("norms", _images(lambda: nn.LayerNorm(24), lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(-1)), (4, 24), _PLAIN),
    ("lstm", lambda: States(nn.LSTM(5, 6, batch_first=True)), (2, 4, 5), _PLAIN),
    ("gru", lambda: States(nn.GRU(5, 4, 1, batch_first=True, bidirectional=True)), (2, 4, 5), _PLAIN),
    ("elementary", lambda: Apply(_elementary), (3, 11), _PLAIN),
    ("elementary_binary64", lambda: Apply(_elementary), (3, 11), _FINE),
    ("activations", lambda: Apply(_activations), (3, 11), _PLAIN),
    ("losses", lambda: Apply(_losses), (4, 9), _PLAIN),
    ("sums", lambda: Apply(_sums), (4, 300), _PLAIN),
    ("scattered", lambda: Apply(_scattered), (3, 40), _PLAIN),
    ("steps", lambda: Apply(_stepped), (2, 16), _FINE),
)
NAMES: Final = tuple(name for name, *_ in ROWS)


def exact(shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Return multiples of scale / 64 in (-2 scale, 2 scale), which every dtype here represents."""
    integers = np.random.Generator(np.random.PCG64(seed)).integers(-127, 128, tuple(shape))
    return torch.from_numpy(integers * (scale / 64)).to(dtype)


@cache
def built(name: str) -> tuple[nn.Module, Tensor]:
    """Return the model of a row with its weights, and its argument."""
    _, make, shape, dtype = ROWS[NAMES.index(name)]
    model = make().to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(exact(parameter.shape, dtype, i + 1, 0.25))
    return model, exact(shape, dtype, 0)


def policy_of(preset: str) -> Policy:
    """Return a preset, with fxround's own products where it leaves them to PyTorch."""
    policy = PRESETS[preset]
    return with_own_products(preset) if any(rule.accumulate == "native" for rule in policy.rules) else policy


def bits(compiled: Any, model: nn.Module, x: Tensor) -> str:
    """Return the hash of a training step: result, gradients of argument and parameters, and buffers afterwards."""
    before = {name: value.clone() for name, value in compiled.state_dict().items()}
    compiled.reseed(SEED)
    leaf = x.clone().requires_grad_()
    result = compiled(leaf)
    wanted = [leaf, *model.parameters()]
    gradients = torch.autograd.grad(result, wanted, exact(result.shape, result.dtype, 99), allow_unused=True)
    tensors = [result, *(g for g in gradients if g is not None), *model.buffers()]
    total = hashlib.sha256("".join(fxround.hash(t) for t in tensors).encode()).hexdigest()
    compiled.load_state_dict(before)  # buffers, and the scales that a step remembers
    return total


def evaluated(compiled: Any, x: Tensor) -> str:
    """Return the hash of a result in eval mode without gradients."""
    compiled.reseed(SEED)
    with torch.no_grad():
        return fxround.hash(compiled(x))


def ways(
    compiled: fxround.RoundedModule, x: Tensor, sets: Sequence[str], host: Any
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each way to compute a model, and the hashes of training step and evaluation; nothing without ``sets``."""
    if not sets:
        return
    model = compiled.source
    unfused = fxround.compile(model, compiled.policy, fuse=False)
    for what, module in (("fused", compiled), ("operation by operation", unfused)):
        for isa in sets:
            with fxround.instruction_set(isa) if isa != "host" else nullcontext():
                step = bits(module.train(), model, x)
                yield f"{what}, {isa}", (step, evaluated(module.eval(), x))
    with tempfile.TemporaryDirectory() as folder:
        loaded = fxround.load(compiled.eval().export(Path(folder) / "model.pt2", x))
        yield "loaded", ("", evaluated(loaded, x))
    if host is not None:
        yield "texts of a GPU", through_texts(host, compiled, x)


def through_texts(host: Any, compiled: fxround.RoundedModule, x: Tensor) -> tuple[str, str]:
    """Return the hashes of training step and evaluation through the texts of a GPU, run as host code."""
    import cuda_host

    from fxround.runtime.cuda.launcher import launching

    def run() -> tuple[str, str]:
        return bits(compiled.train(), compiled.source, x), evaluated(compiled.eval(), x)

    cuda_host.prepare(host, run)
    with launching(host):
        return run()


def digests(compiled: fxround.RoundedModule) -> str:
    """Return a hash of the digests of all kernels in a module's captured graphs, fused and unfused."""
    seen: set[str] = set()
    for entry in compiled._captures:
        parts = [entry.lowered, entry.fused]
        if entry.step is not None:
            parts += [part for part in vars(entry.step).values() if isinstance(part, fx.GraphModule)]
        for graph in (graph for part in parts for graph in graphs_of(part)):
            calls = [call for node in graph.graph.nodes if (call := read(node)) is not None]
            kernels = [call.kernel(call.loads()) for call in calls]
            seen |= {kernel.digest for kernel in kernels if kernel is not None}
    return hashlib.sha256("".join(sorted(seen)).encode()).hexdigest()


def entry_of(name: str, preset: str, sets: Sequence[str] = (), host: Any = None) -> dict[str, str]:
    """Return the line of the ledger for a model and a preset: ``step``, ``evaluation`` and ``kernels``.

    sets: the instruction sets for which all ways are compared; none for the fused graph of this machine alone. host: a
    ``HostLauncher`` of tests/support for the texts of a GPU.

    A model whose dtype cannot store the preset's format has the line ``refused``. Raises AssertionError if two ways to
    compute the model disagree.
    """
    model, x = built(name)
    compiled = fxround.compile(model, policy_of(preset), seed=SEED)
    try:
        compiled.prepare(x)
    except PolicyError as error:
        return {"refused": type(error).__name__}
    step, evaluation = bits(compiled.train(), model, x), evaluated(compiled.eval(), x)
    if preset == IDENTITY:
        return {"kernels": digests(compiled)}
    for way, hashes in ways(compiled, x, sets, host):
        assert hashes[0] in ("", step) and hashes[1] == evaluation, f"{name}, {preset}: {way} has other bits"
    return {"step": step, "evaluation": evaluation, "kernels": digests(compiled)}


def stored() -> dict[str, dict[str, str]]:
    """Return the ledger's lines by ``model, preset``."""
    lines: dict[str, dict[str, str]] = json.loads(LEDGER.read_text(encoding="utf-8"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the ledger, and compare or write it; returns the number of lines that differ."""
    parser = argparse.ArgumentParser(description="Hashes of models under every preset")
    parser.add_argument("words", nargs="*", help="only these models and presets")
    parser.add_argument("--write", action="store_true", help="replace the stored lines")
    parser.add_argument("--texts", action="store_true", help="also through the texts of a GPU, as host code")
    arguments = parser.parse_args(argv)
    words = {*arguments.words}
    if unknown := words - {*NAMES, *PRESETS}:
        parser.error(f"no model or preset is named {', '.join(sorted(unknown))}")
    names = [name for name in NAMES if name in words or not words & {*NAMES}]
    presets = [preset for preset in PRESETS if preset in words or not words & {*PRESETS}]
    ledger = stored() if LEDGER.exists() else {}
    print(f"{machine()}; {', '.join(instruction_sets())}")
    with texts_on_host() if arguments.texts else nullcontext() as host:
        lines = {}
        for name, preset in product(names, presets):
            lines[f"{name}, {preset}"] = line = entry_of(name, preset, instruction_sets(), host)
            before = ledger.get(f"{name}, {preset}", {})
            differing = [key for key in sorted({*line, *before}) if before.get(key) != line.get(key)]
            print(f"{name}, {preset}: {'other ' + ', '.join(differing) if differing else 'equal'}", flush=True)
    wrong = sum(ledger.get(key) != line for key, line in lines.items())
    if arguments.write:
        LEDGER.parent.mkdir(exist_ok=True)
        LEDGER.write_text(json.dumps(ledger | lines, indent=1) + "\n", encoding="utf-8")
        return 0
    return wrong


@contextmanager
def texts_on_host() -> Iterator[Any]:
    """Yield a launcher that runs the texts of a GPU as host code."""
    import cuda_host
    import host_gpu

    with tempfile.TemporaryDirectory() as folder:
        yield cuda_host.HostLauncher(Path(folder), host_gpu.COMPILER)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(min(1, main()))
