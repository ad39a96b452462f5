"""Weights of the digits CNN in 2, 3 and 4 bits by each method: ``python -m benchmarks.few_bits --seeds 3``.

Each seed trains a network with stock PyTorch. Weights become integers with a scale for each output channel; activations
stay in float32. The data are 512 training images in batches of 64, the figures those of 500 test images: accuracy, and
the divergence of the distributions from the original network's. Options are the defaults, but for DiscQuant's number of
steps (512 of 2 batches). One thread; the seconds are those of the machine's clock, captures included.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import fxround
from fxround import demo
from fxround.policy.policy import of_operands
from fxround.policy.rule import Rule
from fxround.tuning.discquant import divergence

METHODS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "gptq": {},
    "adaround": {},
    "discquant": {"steps": 512, "accumulate": 2, "warmup": 64},
}


def main() -> None:
    """Print a line for each seed, width and method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)
    digits = demo.load_digits()
    images, labels = digits.test
    for seed in range(parser.parse_args().seeds):
        model, _ = demo.trained(digits, seed, lambda items, total, label: items)
        data = [(batch,) for batch in digits.train[0][:512].split(64)]
        with torch.no_grad():
            wanted = model(images)
        print(f"seed {seed}: {_accuracy(wanted, labels):.1f} % in float32", flush=True)
        for bits in (2, 3, 4):
            policy = of_operands(f"int{bits}", Rule(role="weight", operands=f"int{bits}:channel"))
            for method, options in METHODS.items():
                started = time.perf_counter()
                small = fxround.quantize_weights(model, policy, data, method, seed=seed, progress=False, **options)
                seconds = time.perf_counter() - started
                with torch.no_grad():
                    logits = small(images)
                lost = float(divergence(wanted, logits))
                figures = f"{_accuracy(logits, labels):5.1f} %  divergence {lost:.4f}  {seconds:5.1f} s"
                print(f"  {bits} bits  {method:9}  {figures}", flush=True)


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * int((logits.argmax(1) == labels).sum()) / len(labels)


if __name__ == "__main__":
    main()
