"""Text generation with small models of transformers: captures, the time of the first texts, and the time of a token.

    python -m benchmarks.generation                  # every row: three minutes
    python -m benchmarks.generation "llama, batch 1" # one

Each row is a process of its own with an empty cache of machine code, on one thread: two texts of the same length, then
two of other lengths, under the policy "reproducible". first: 100 tokens after a prompt of 5, with imports of Dynamo,
captures and compilations. captures: of the model, after all texts. token: the least of three runs. The models have two
layers of width 64, 4 heads, 512 words and random weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.harness import header, table, vision_operators

TOKENS = 100
ROWS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "gpt2, batch 2": ("gpt2", 2, {}),
    "llama, batch 2": ("llama", 2, {}),
    "qwen2, batch 2": ("qwen2", 2, {}),
    "llama, batch 1": ("llama", 1, {}),
    "llama, batch 2, without cache": ("llama", 2, {"use_cache": False}),
    "llama, batch 2, static cache": ("llama", 2, {"cache_implementation": "static"}),
    "llama, batch 2, 4 beams": ("llama", 2, {"num_beams": 4}),
    "llama, batch 2, sampling": ("llama", 2, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
}


def model_of(name: str) -> Any:
    """Return a small model with random weights: gpt2, llama or qwen2."""
    vision_operators()
    import transformers

    size: dict[str, Any] = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    if name == "gpt2":
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **shape)).eval()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[name]
    return model(config(**size, **shape, num_key_value_heads=2, max_position_embeddings=256)).eval()


def measure(row: str) -> dict[str, float]:
    """Return the seconds of the first text and of tokens, and the number of captures, of this process."""
    import fxround

    name, batch, settings = ROWS[row]
    torch.set_num_threads(1)
    model = model_of(name)
    compiled = fxround.compile(model, "reproducible")

    def seconds(generating: Any, length: int = 5, texts: int = batch) -> float:
        ids = torch.randint(1, 512, (texts, length))
        began = time.perf_counter()
        generating.generate(ids, min_new_tokens=TOKENS, max_new_tokens=TOKENS, **{"do_sample": False, **settings})
        return time.perf_counter() - began

    first = seconds(compiled)
    token = min(seconds(compiled) for _ in range(3)) / TOKENS
    seconds(model)
    stock = min(seconds(model) for _ in range(3)) / TOKENS
    for length, texts in ((9, batch), (12, batch + (batch > 1))):
        seconds(compiled, length, texts)
    return {"first": first, "captures": len(compiled.captures()), "token": token, "stock": stock}


def _row(row: str) -> tuple[str, ...]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.generation", "--measure", row]
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "FXROUND_CACHE_DIR": place}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    times = [f"{figures['first']:.1f}", f"{1000 * figures['token']:.1f}", f"{1000 * figures['stock']:.1f}"]
    return row, str(figures["captures"]), *times, f"{figures['token'] / figures['stock']:.1f}x"


def main(arguments: tuple[str, ...] = ()) -> None:
    """Print the table of all rows, or of one."""
    if arguments[:1] == ("--measure",):
        print(json.dumps(measure(arguments[1])))
        return
    torch.set_num_threads(1)
    head = ("model", "captures", "first 100 tokens, s", "token, ms", "stock, ms", "ratio")
    print(header(("torch", "transformers", "llvmlite")))
    print(table(head, (_row(row) for row in arguments or ROWS)), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
