"""Text generation: the same bits with and without a cache, alone and among others, from a handful of captures."""

from __future__ import annotations

from collections.abc import Callable
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
    if kind in ENCODING:
        return enlarged(ENCODING[kind](transformers))
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **special)
    elif kind == "bloom":
        config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, **special)
    else:
        experts = {"num_local_experts": 3} if kind == "mixtral" else {}
        config = {
            "llama": transformers.LlamaConfig,
            "mixtral": transformers.MixtralConfig,
        }[kind](
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            **special,
            **experts,
        )
    return enlarged(lambda: transformers.AutoModelForCausalLM.from_config(config))


def enlarged(made: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = made().float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return model


def t5(transformers: Any) -> Callable[[], Any]:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return lambda: transformers.T5ForConditionalGeneration(config)


def speech_or_text(name: str, **settings: Any) -> Callable[[Any], Callable[[], Any]]:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in HALF.items()}
    special = {
        "vocab_size": WORDS,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
    }

    def made(transformers: Any) -> Callable[[], Any]:
        config = getattr(transformers, f"{name}Config")(d_model=16, **sizes, **special, **settings)
        return lambda: getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return made


HALF = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
SOUND = {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 32}
QUIET = {"suppress_tokens": None, "begin_suppress_tokens": None}
# The models with an encoder, which generate calls by itself.
ENCODING = {
    "t5": t5,
    "whisper": speech_or_text("Whisper", **SOUND, **QUIET),
}


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, WORDS, (batch, length), generator=torch.Generator().manual_seed(length))


def generated(compiled: Any, ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits of every new token."""
    fixed = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "output_logits": True, "return_dict_in_generate": True}
    found = compiled.generate(ids, **{"do_sample": False, **fixed, **settings})
    return found.sequences, torch.stack(found.logits, 1)


@pytest.mark.part("gpt2")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bloom"])
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


def test_hidden_states_of_the_first_call_are_recorded_once() -> None:
    model, ids = build("llama"), prompts(2, 5)
    compiled, head = fxround.compile(model, "reproducible"), fxround.compile(model.lm_head, "reproducible")
    with torch.no_grad():
        found = compiled(ids, use_cache=False, output_hidden_states=True)
        first, last = found.hidden_states
        assert torch.equal(first, model.get_input_embeddings()(ids)) and torch.equal(head(last), found.logits)
    assert len(model.model.layers[0]._forward_hooks) == 1


@pytest.mark.long
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


def test_a_cache_of_another_batch_or_without_room_is_refused_with_its_sizes(caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxround.compile(build("llama"), "reproducible")
    with torch.no_grad():
        cache = compiled(prompts(2, 5), use_cache=True).past_key_values
        with pytest.raises(fxround.CaptureError) as error:
            compiled(prompts(3, 1), past_key_values=cache)
    assert "called  with argument 0 (3, 1), past_key_values (DynamicCache, which holds (2, 1, 5, 8))" in str(
        error.value
    )
    assert "Sizes of tensors must match" in str(error.value) and "make a new one" in str(error.value)
    assert "FakeTensor" not in str(error.value) and "ERROR" not in {record.levelname for record in caplog.records}
    transformers = hugging_face()
    short = transformers.StaticCache(config=compiled.config, max_cache_len=6)
    with pytest.raises(IndexError, match="index 6 is out of bounds") as late:
        compiled.generate(prompts(2, 5), past_key_values=short, max_new_tokens=4, do_sample=False)
    assert "past_key_values (StaticCache, which holds (2, 1, 6, 8))" in late.value.__notes__[0]
    with torch.no_grad(), pytest.raises(fxround.CaptureError, match=r"StaticCache, which holds \(2, 1, 6, 8\)"):
        compiled(prompts(3, 1), past_key_values=short)


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


@pytest.mark.part("whisper-reproducible")
@pytest.mark.parametrize("kind, policy", [("t5", "reproducible"), ("whisper", "reproducible")])
def test_an_encoder_is_rounded_by_itself_and_a_text_is_the_same_alone(kind: str, policy: str) -> None:
    model = build(kind)
    compiled = fxround.compile(model, policy, strict=True)
    given = torch.rand(2, 4, 12) if kind == "whisper" else prompts(2, 7)
    name = "input_features" if kind == "whisper" else "input_ids"
    settings = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "max_length": None, "min_length": None}
    settings |= {"output_logits": True, "return_dict_in_generate": True}

    def run(rows: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        # Whisper returns the tokens without those that each text begins with.
        found = compiled.generate(rows, **settings, **more)
        return found.sequences[:, -2:], torch.stack(found.logits, 1)

    tokens, logits = run(given)
    start = torch.full((2, 1), compiled.generation_config.decoder_start_token_id)
    with torch.no_grad():
        # The whole forward pass, with the encoder in it.
        whole = compiled(**{name: given}, decoder_input_ids=torch.cat([start, tokens[:, :1]], 1), use_cache=False)
    assert torch.equal(whole.logits, logits) and torch.equal(logits.argmax(-1), tokens)
    paths = [str(row["module"]) for row in compiled.captures()]
    assert len(paths) == 4 and paths[0].endswith("encoder") and set(paths[1:]) == {""}
    (encoder,) = compiled.called_submodules.values()
    assert encoder.coverage().unrounded == ()
    many = run(torch.cat([given, given]))
    assert torch.equal(many[1], torch.cat([logits, logits])) and len(compiled.captures()) == 4
    if kind == "t5":
        alone, static = run(given[1:]), run(given, cache_implementation="static")
        assert torch.equal(alone[1], logits[1:]) and torch.equal(static[1], logits)
        assert [row["module"] for row in compiled.captures()].count("encoder") == 1


@pytest.mark.long
def test_an_encoder_draws_its_own_random_bits_in_beams_and_samples() -> None:
    model = build("t5")
    compiled = fxround.compile(model, "stochastic", seed=1, advance=True)
    settings = {"max_new_tokens": 2, "min_new_tokens": 2, "output_scores": True, "return_dict_in_generate": True}

    def scores(seed: int, **more: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.stack(compiled.reseed(seed).generate(prompts(2, 7), **settings, **more).scores)

    way = {"num_beams": 2, "do_sample": True}
    first = scores(1, **way)
    assert torch.equal(scores(1, **way), first) and not torch.equal(scores(2, **way), first)
    with torch.no_grad():
        hidden = [
            compiled.reseed(seed).call_submodule(model.encoder, (prompts(2, 7),), {}).last_hidden_state
            for seed in (1, 1, 2)
        ]
    assert torch.equal(hidden[0], hidden[1]) and not torch.equal(hidden[0], hidden[2])
