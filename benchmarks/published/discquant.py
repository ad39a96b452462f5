"""DiscQuant's question: which rounding of weights keeps a language model? Its authors' programs beside ours.

``--program FOLDER`` is a clone of github.com/jerry-chee/DiscQuant, which has DiscQuant (``discq.py``) and the GPTQ that
it was compared with (``gptq/gptq.py``). Their code runs as it is, on the CPU, on the same model, texts and grid as
ours: what needs their models, their data or a GPU is replaced (``from_pretrained``, ``get_loaders``, ``torch.cuda``),
and their quantizer has a zero point, ``sym=False``, as ``uint3`` has. DiscQuant's own loop trains; their GPTQ rounds
one layer after the other, with the inputs of a model whose earlier weights are rounded.

The model is a Phi-3 of two layers of width 128 on the bytes of ``benchmarks.perplexity``, trained with stock PyTorch.
The weights of its layers become integers with a scale and a zero point for each output; embeddings, norms and the last
layer stay. 256 texts of 128 bytes are the data; the perplexity is that of a byte of 32 held-out texts, and the
divergence (KL, nats a byte) is that of the distributions from the original model's. Both programs of DiscQuant have 256
steps of 16 texts, 32 of them warm-up, rho 200, clamp 1 and the rate 0.1. The seeds of DiscQuant draw the start and the
order of texts, each program in its own way; GPTQ and nearest draw nothing.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks import perplexity
from benchmarks.few_bits import Logits, logits_of
from benchmarks.harness import vision_operators
from fxround import Policy, Rule
from fxround.tuning.discquant import divergence

BITS: Final = (2, 3, 4)
# Of the authors' programs, in the order of a layer's forward.
LAYERS: Final = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
STEPS: Final = 256
WARMUP: Final = 32
TEXTS: Final = 16
SHAPE: Final = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
PLAIN: Final = {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 0}
COLUMNS: Final = ("bits", "", "perplexity", "KL", "weights equal to those of its pair, %", "seconds")
# Modules that the programs import and that nothing here calls.
UNUSED: Final = ("datasets", "lm_eval", "wandb")


def trained(steps: int = perplexity.STEPS) -> Any:
    """Return the model in eval mode, trained from a fixed seed by one thread."""
    vision_operators()
    import transformers

    torch.manual_seed(perplexity.SEED)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SHAPE, **PLAIN))
    perplexity.train(model, steps, progress=False)
    return model.eval()


def texts() -> tuple[Tensor, Tensor]:
    """Return 256 texts to learn from and 32 held out: bytes int64 [n, 128]."""
    seen, held = perplexity.corpus()
    return perplexity.cut(seen, 256), perplexity.cut(held, 32)


def rounded_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers whose weights are rounded, by name, in the order of the forward."""
    count = len(model.get_submodule("model.layers"))
    names = [f"model.layers.{i}.{part}" for i in range(count) for part in LAYERS]
    return {name: model.get_submodule(name) for name in names}


@contextmanager
def programs(folder: Path) -> Iterator[tuple[ModuleType, ModuleType, ModuleType]]:
    """Yield the authors' modules ``discq``, ``gptq.gptq`` and ``quant``, and let them run without a GPU.

    Raises FileNotFoundError if the folder is no clone of their repository.
    """
    if not (folder / "discq.py").is_file():
        raise FileNotFoundError(f"{folder} has no discq.py; expected a clone of github.com/jerry-chee/DiscQuant")
    before = set(sys.modules)
    unused = {name: mock.MagicMock() for name in UNUSED}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, unused))
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        for name in ("synchronize", "empty_cache"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "memory_allocated", return_value=0))
        stack.enter_context(mock.patch.object(torch, "compile", uncompiled))
        stack.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())
        try:
            discq, grids = (importlib.import_module(name) for name in ("discq", "gptq.quant"))
            # gptq/gptq.py imports its neighbour as quant; earlier, its folder would hide the package gptq.
            sys.path.append(str(folder / "gptq"))
            gptq, quant = (importlib.import_module(name) for name in ("gptq.gptq", "quant"))
            for module in (grids, quant):
                configure = module.Quantizer.configure
                stack.enter_context(mock.patch.object(module.Quantizer, "configure", asymmetric(configure)))
            torch.autograd.set_detect_anomaly(False)
            yield discq, gptq, quant
        finally:
            for name in set(sys.modules) - before:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")) or name == "gptq":
                    del sys.modules[name]


def uncompiled(function: Any = None, **_: Any) -> Any:
    """Stand for ``torch.compile``, also as a decorator with arguments: the function itself."""
    return (lambda f: f) if function is None else function


def asymmetric(configure: Callable[..., None]) -> Callable[..., None]:
    """Return ``Quantizer.configure`` with a zero point."""
    return lambda self, bits: configure(self, bits, sym=False)


def theirs_discquant(folder: Path, model: Any, data: Tensor, held: Tensor, bits: int, seed: int) -> nn.Module:
    """Run the authors' ``train`` and return the model that it saves."""
    saved = copy.deepcopy(model)
    models = [copy.deepcopy(model), saved]
    tokenizer = SimpleNamespace(eos_token="", save_pretrained=lambda _: None)
    saved.save_pretrained = lambda _: None
    with programs(folder) as (discq, _, _), tempfile.TemporaryDirectory() as output:
        options = [f"--output={output}", "--model_id=microsoft/Phi-3-mini-4k-instruct", "--dataset=red_concat"]
        options += [f"--wbits={bits}", f"--seed={seed}", f"--window_size={data.shape[1]}", "--dtype=float32"]
        options += ["--clamp_value=1", "--rho_factor=200", "--learning_rate=0.1", f"--grad_accum={TEXTS}"]
        options += [f"--number_of_iterations={STEPS}", f"--number_of_warmup={WARMUP}", "--number_of_samples_val=1"]
        options += [f"--log_interval={STEPS}", f"--out_interval={STEPS}", "--no-grad_ckpt", "--save_model"]
        windows = [data[i % len(data)] for i in range(STEPS * TEXTS)]
        auto = discq.transformers
        with (
            mock.patch.object(sys, "argv", ["discq.py", *options]),
            mock.patch.object(auto.AutoModelForCausalLM, "from_pretrained", side_effect=models),
            mock.patch.object(auto.AutoTokenizer, "from_pretrained", return_value=tokenizer),
            mock.patch.object(discq, "get_loaders", return_value=(windows, [held[:1]])),
            open(os.devnull, "w") as nowhere,
            mock.patch.object(sys, "stdout", nowhere),
            mock.patch.object(sys, "stderr", nowhere),
        ):
            discq.reset_seeds(seed)
            discq.train(discq.parse_args(), ["cpu"])
    del saved.save_pretrained
    return saved.eval()


def theirs_gptq(folder: Path, model: Any, data: Tensor, bits: int, baseline: bool = False) -> nn.Module:
    """Round one layer after the other by the authors' class; ``baseline`` is rounding to nearest."""
    small = copy.deepcopy(model)
    with programs(folder) as (_, gptq, quant), open(os.devnull, "w") as nowhere, torch.no_grad():
        for layer in rounded_layers(small).values():
            solver = gptq.GPTQ(layer)
            solver.quantizer = quant.Quantizer()
            solver.quantizer.configure(bits)
            hook = layer.register_forward_hook(lambda _, x, y, solver=solver: solver.add_batch(x[0], y))
            for batch in data.split(TEXTS):
                small(batch, use_cache=False)
            hook.remove()
            with mock.patch.object(sys, "stdout", nowhere):
                solver.fasterquant(percdamp=0.01, baseline=baseline)
    return small


def ours(model: Any, data: Tensor, bits: int, method: str, seed: int = 0) -> nn.Module:
    """Return the model that ``quantize_weights`` makes."""
    grid = Rule("model.model.layers.*", operator="contraction", role="weight", operands=f"uint{bits}:channel")
    learned = method == "discquant"
    options: dict[str, Any] = {"steps": STEPS, "accumulate": 1, "warmup": WARMUP} if learned else {}
    small = fxround.quantize_weights(
        Logits(model), Policy("layers", (grid,)), list(data.split(TEXTS)), method, seed=seed, **options
    )
    return small.model


def figures(model: Any, original: Tensor, held: Tensor) -> tuple[float, float]:
    """Return perplexity and divergence."""
    logits = logits_of(Logits(model), [(held,)])
    shaped = logits.unflatten(0, held.shape)[:, :-1]
    loss = F.cross_entropy(shaped.flatten(0, 1).double(), held[:, 1:].flatten())
    return math.exp(float(loss)), float(divergence(original, logits))


def equal_weights(one: nn.Module, other: nn.Module) -> float:
    """Return the percentage of rounded weights that two models have in common, within two ulp.

    The programs multiply integers and scales in their own order, so that one value of the grid has two neighbours.
    """
    pairs = list(zip(rounded_layers(one).values(), rounded_layers(other).values(), strict=True))
    # Bits cannot be compared: the programs compute scales by divisions of their own, whose results differ by an ulp.
    same = sum(int(torch.isclose(a.weight, b.weight, rtol=2**-22, atol=0).sum()) for a, b in pairs)
    return 100 * same / sum(a.weight.numel() for a, _ in pairs)


def row(bits: int, label: str, runs: list[tuple[float, float, float, float]]) -> list[str]:
    """Return a row of the table: the mean of each figure and, where there are several runs, the least and largest."""
    cells = [str(bits), label]
    for values, digits in zip(zip(*runs, strict=True), (3, 4, 1, 0), strict=True):
        cell = f"{statistics.fmean(values):.{digits}f}"
        cells.append(cell if len(values) == 1 else f"{cell} ({min(values):.{digits}f} to {max(values):.{digits}f})")
    return cells


def tables(program: Path, seeds: int, bits: tuple[int, ...] = BITS) -> Iterator[dict[str, Mapping[str, Any]]]:
    """Yield the table, after each width with the rows up to it."""
    model, (data, held) = trained(), texts()
    original = logits_of(Logits(model), [(held,)])
    plain, _ = figures(model, original, held)
    rows = [["32", "float32", f"{plain:.3f}", "", "", ""]]
    for width in bits:
        pairs = {
            "nearest": (
                lambda _, b=width: theirs_gptq(program, model, data, b, baseline=True),
                lambda _, b=width: ours(model, data, b, "nearest"),
            ),
            "GPTQ": (
                lambda _, b=width: theirs_gptq(program, model, data, b),
                lambda _, b=width: ours(model, data, b, "gptq"),
            ),
            "DiscQuant": (
                lambda seed, b=width: theirs_discquant(program, model, data, held, b, seed),
                lambda seed, b=width: ours(model, data, b, "discquant", seed),
            ),
        }
        for label, makers in pairs.items():
            runs: tuple[list[Any], list[Any]] = ([], [])
            for seed in range(seeds if label == "DiscQuant" else 1):
                made = []
                for make in makers:
                    started = time.process_time()
                    small = make(seed)
                    made.append((small, time.process_time() - started))
                same = equal_weights(*(small for small, _ in made))
                for kept, (small, seconds) in zip(runs, made, strict=True):
                    kept.append((*figures(small, original, held), same, seconds))
            for who, kept in zip(("authors'", "fxround's"), runs, strict=True):
                rows.append(row(width, f"{label}, {who}", kept))
        yield {"published-discquant": {"columns": list(COLUMNS), "numbers": [2, 3, 4, 5], "rows": rows}}
