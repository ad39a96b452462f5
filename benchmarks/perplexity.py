"""Perplexity of a small GPT-2 per width of significands, to nearest and stochastically, as a table.

    python -m benchmarks.perplexity                                 # trains for two minutes, measures for ten
    python -m benchmarks.perplexity --widths 4:12 --samples 5
    fxround perplexity benchmarks/perplexity.py:build               # the same by the command for any model

The model reads bytes of the help texts that ship with Python (pydoc_data.topics): two layers of width 128, 4 heads, a
context of 128. Stock PyTorch trains it from a fixed seed on one thread, on nine tenths of each topic; the perplexity is
that of a byte of the rest. The trained weights are stored beside the cache of machine code, under a name that depends
on the text, the configuration and the version of PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.harness import header, vision_operators

SEED: Final = 0
CONTEXT: Final = 128
BATCH: Final = 32
STEPS: Final = 500
RATE: Final = 2e-3
TEXTS: Final = 16
SHAPE: Final = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
PLAIN: Final = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes for training and those held out, the last tenth of each topic: int64, one dimension."""
    from pydoc_data.topics import topics

    parts = [topics[name].encode() for name in sorted(topics)]
    cuts = [len(part) * 9 // 10 for part in parts]
    seen = b"".join(part[:cut] for part, cut in zip(parts, cuts, strict=True))
    held = b"".join(part[cut:] for part, cut in zip(parts, cuts, strict=True))
    return torch.tensor(list(seen)), torch.tensor(list(held))


def stored() -> Path:
    """Return the file of the weights; in the folder for temporary files if the cache is switched off."""
    from fxround.runtime.disk_cache import directory

    text, held = corpus()
    settings = repr((SHAPE, PLAIN, SEED, BATCH, STEPS, RATE, str(torch.__version__)))
    digest = hashlib.sha256(text.numpy().tobytes() + held.numpy().tobytes() + settings.encode()).hexdigest()[:16]
    return (directory() or Path(tempfile.gettempdir())) / f"bytes-{digest}.pt"


def untrained() -> Any:
    """Return the model with random weights, on the CPU."""
    vision_operators()
    import transformers

    torch.manual_seed(SEED)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **PLAIN))


def trained(progress: bool | None = None) -> Any:
    """Return the trained model in eval mode, from its file if there is one; ``progress`` as for ``variability``."""
    model, path = untrained(), stored()
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, STEPS, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), aside)
    aside.replace(path)
    return model.eval()


def train(model: Any, steps: int, progress: bool | None = None) -> None:
    """Train a language model on the bytes from a fixed seed, by one thread; ``progress`` as for ``variability``."""
    from fxround.significance.progress import tracked

    text, _ = corpus()
    places = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums, and so the weights, depend on it
    try:
        for _ in tracked(range(steps), steps, "training", progress):
            starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=places)
            ids = torch.stack([text[i : i + CONTEXT] for i in starts.tolist()])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
    finally:
        torch.set_num_threads(threads)


def cut(source: Tensor, count: int) -> Tensor:
    """Return texts that begin at equal distances: int64 [count, 128]."""
    step = len(source) // count
    return torch.stack([source[i * step : i * step + CONTEXT] for i in range(count)])


def build() -> tuple[Any, Tensor]:
    """Return the trained model and the held-out texts, int64 [16, 128]."""
    _, held = corpus()
    return trained(), cut(held, TEXTS)


def main(argv: list[str] | None = None) -> None:
    """Print the report."""
    import fxround
    from fxround.cli.perplexity import widths_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=widths_of, help="as 4:12 or 4,8,12 (default 2:24)")
    parser.add_argument("--samples", type=int, default=10, help="stochastic runs of the texts (default 10)")
    asked = parser.parse_args(argv)
    print(header(("torch", "transformers", "llvmlite")), file=sys.stderr)
    print(fxround.perplexity(*build(), widths=asked.widths, samples=asked.samples))


if __name__ == "__main__":
    main()
