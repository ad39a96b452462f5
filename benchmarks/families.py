"""Text generation by families of transformers' causal models: whose tokens are stock PyTorch's, which bits agree.

    python -m benchmarks.families                # every family: half an hour
    python -m benchmarks.families Bloom Falcon   # two of them

A model has one layer of width 16 (two where layers differ), random weights, 64 words. It generates four tokens after
two prompts of 11: greedy, with a static cache, without a cache, with sampling, with beams, and with padding to the left
of a prompt. identity: in how many of these ways the tokens are stock PyTorch's, under the same seeds. The next columns
compare logits under "reproducible", bit for bit, with those of the greedy texts. captures: under "reproducible", after
these texts and two of a prompt alone. other lengths: the captures of two further texts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import fxround
from benchmarks.harness import header, table, vision_operators

SPECIAL: Final = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTHS: Final = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
PLAIN: Final = {**WIDTHS, "num_hidden_layers": 1}
GROUPED: Final = {**PLAIN, "num_key_value_heads": 1}
HEADS: Final = {**GROUPED, "head_dim": 8}
TWO: Final = {**HEADS, "num_hidden_layers": 2, "sliding_window": 8}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gemma": HEADS,
    "Gemma2": TWO,
    "Gemma3Text": TWO,
    "Phi": PLAIN,
    "Phi3": GROUPED,
    "GPTNeoX": PLAIN,
    "GPTNeo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "Falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "OPT": {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 64,
    },
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "Mistral": {**GROUPED, "sliding_window": 8},
    "StableLm": GROUPED,
    "Qwen3": HEADS,
    "Qwen3Moe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmo2": GROUPED,
    "Cohere": GROUPED,
    "GPTJ": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    "Mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 64},
}
TOKENS: Final = 4
GREEDY: Final[Mapping[str, Any]] = {}
STATIC: Final = {"cache_implementation": "static"}
UNCACHED: Final = {"use_cache": False}
SAMPLES: Final = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
BEAMS: Final = {"num_beams": 3}


def model_of(family: str) -> Any:
    """Return a small model whose random weights are large enough that its roundings differ."""
    vision_operators()
    import transformers

    config = getattr(transformers, f"{family}Config")(**SPECIAL, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return model


def generated(model: Any, ids: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the tokens and the logits of each new token, under a fixed seed."""
    torch.manual_seed(7)
    fixed = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(ids, **{"do_sample": False, **fixed, **settings})
    return output.sequences, torch.stack(output.logits, 1)


def measure(family: str) -> tuple[str, ...]:
    """Return a family's row of the table."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(0)

    def prompts(batch: int, length: int) -> Tensor:
        return torch.randint(1, 64, (batch, length), generator=generator)

    ids = prompts(2, 11)
    padded = ids.clone()
    padded[0, :4] = 0
    mask = {"attention_mask": (padded != 0).long()}
    ways = [(ids, GREEDY), (ids, STATIC), (ids, UNCACHED), (ids, SAMPLES), (ids, BEAMS), (padded, mask)]

    compiled = fxround.compile(model, "identity")
    same = [torch.equal(generated(compiled, *way)[0], generated(model, *way)[0]) for way in ways]

    compiled = fxround.compile(model, "reproducible")
    greedy, static, uncached, _, _, beside = (generated(compiled, *way)[1] for way in ways)
    alone = generated(compiled, ids[1:], GREEDY)[1]
    without = generated(compiled, padded[:1, 4:], GREEDY)[1]
    captures = len(compiled.captures())
    for batch, length in ((3, 7), (3, 13)):
        generated(compiled, prompts(batch, length), GREEDY)
    agree = (
        torch.equal(uncached, greedy),
        torch.equal(static, greedy),
        torch.equal(alone, greedy[1:]),
        torch.equal(beside[:1], without) and torch.equal(beside[1:], greedy[1:]),
    )
    more = len(compiled.captures()) - captures
    return family, f"{sum(same)} of {len(same)}", *("yes" if a else "no" for a in agree), str(captures), str(more)


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table of all families, or of some."""
    torch.set_num_threads(1)
    head = ("family", "identity", "no cache", "static", "alone", "padded", "captures", "other lengths")
    print(header(("torch", "transformers", "llvmlite")))
    print(table(head, (measure(family) for family in arguments or FAMILIES)), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
