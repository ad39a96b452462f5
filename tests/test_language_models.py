"""Text generation: the same bits with and without a cache, alone and among others, from a handful of captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import hugging_face
from torch import Tensor

import fxround

pytest.importorskip("transformers")

WORDS, TOKENS = 64, 3


def build(kind: str) -> Any:
    """A model of one layer whose weights are large enough that its roundings differ."""
    transformers = hugging_face()
    special = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **special)
    else:
        config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind](
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            **special,
        )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return model


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, WORDS, (batch, length), generator=torch.Generator().manual_seed(length))


def generated(compiled: Any, ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits of every new token."""
    fixed = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "output_logits": True, "return_dict_in_generate": True}
    found = compiled.generate(ids, **{"do_sample": False, **fixed, **settings})
    return found.sequences, torch.stack(found.logits, 1)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_cache_changes_no_bit_and_lengths_and_batches_need_no_capture(kind: str) -> None:
    model = build(kind)
    compiled = fxround.compile(model, "reproducible")
    assert compiled.config is model.config and compiled.generation_config is model.generation_config
    assert compiled.device == torch.device("cpu")
    for batch, length in ((2, 19), (3, 5)):
        ids = prompts(batch, length)
        tokens, logits = generated(compiled, ids)
        # Greedy: each token is the first of the largest logits of the one before.
        assert torch.equal(tokens, torch.cat([ids, logits.argmax(-1)], 1))
        with torch.no_grad():
            whole = compiled(tokens[:, :-1], use_cache=False).logits[:, length - 1 :]
        assert torch.equal(whole, logits)
    # The prompt, a token, and the whole text without a cache.
    assert len(compiled.captures()) == 3


def test_prompts_alone_padded_and_with_a_static_cache_have_the_same_bits() -> None:
    compiled = fxround.compile(build("llama"), "reproducible")
    ids = prompts(2, 19)
    tokens, logits = generated(compiled, ids)
    for same in (generated(compiled, ids[1:]), generated(compiled, ids, cache_implementation="static")):
        n = len(same[0])
        assert torch.equal(same[0], tokens[-n:]) and torch.equal(same[1], logits[-n:])
    short = torch.cat([torch.zeros(1, 6, dtype=torch.int64), ids[:1, 6:]], 1)
    mask = torch.cat([(short != 0).long(), torch.ones(1, 19, dtype=torch.int64)])
    _, padded = generated(compiled, torch.cat([short, ids[1:]]), attention_mask=mask)
    assert torch.equal(padded[:1], generated(compiled, ids[:1, 6:])[1]) and torch.equal(padded[1:], logits[1:])


def test_samples_and_beams_are_rounded_between_the_calls() -> None:
    compiled = fxround.compile(build("gpt2"), "bfloat16", strict=True)
    ids = prompts(2, 5)
    torch.manual_seed(1)
    tokens, logits = generated(compiled, ids, do_sample=True, temperature=0.7, top_k=0)
    divided = fxround.compile(lambda x, t: x / t, "bfloat16")
    softmax = fxround.compile(lambda x: torch.softmax(x, -1), "bfloat16")
    torch.manual_seed(1)
    for i in range(TOKENS):
        probabilities = softmax(divided(logits[:, i], torch.tensor(0.7)))
        assert torch.equal(torch.multinomial(probabilities, 1)[:, 0], tokens[:, 5 + i])
    beams = [
        compiled.generate(
            rows, num_beams=2, max_new_tokens=TOKENS, output_scores=True, return_dict_in_generate=True, do_sample=False
        )
        for rows in (ids, ids[1:])
    ]
    assert torch.equal(beams[0].sequences_scores[1:], beams[1].sequences_scores)
    scores = beams[0].sequences_scores
    assert torch.equal(scores, fxround.round(scores, "bfloat16"))
