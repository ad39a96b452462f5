"""Programs that take a cache of keys and values: one file for a prompt and the tokens after it, on a cache itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import hugging_face
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule

pytest.importorskip("transformers")

WORDS = 64
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FIRST_LAYER = Policy("first layer", (Rule("*layers.0*", rounding="bfloat16"),))


def llama() -> Any:
    transformers = hugging_face()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return made


class Reader(nn.Module):
    """Two layers that weigh what a cache holds."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hugging_face().LlamaConfig(**SIZES | {"num_hidden_layers": 2})
        self.weight = nn.Parameter(torch.linspace(-1, 1, WORDS * 8).view(WORDS, 8))

    def forward(self, input_ids: Tensor, past_key_values: Any) -> dict[str, Any]:
        x = nn.functional.embedding(input_ids, self.weight).unsqueeze(1)
        for layer in range(2):
            keys, values = past_key_values.update(x, x * 0.3, layer)
            x = x + (x @ keys.mT) @ values
        return {"logits": x[:, 0] @ self.weight.mT, "past_key_values": past_key_values}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The compiled model and a file of it, which takes any number of tokens."""
    path = tmp_path_factory.mktemp("reader") / "model.pt2"
    return exported(Reader(), "reproducible", "dynamic", path), path


def new(model: Any, kind: str) -> Any:
    transformers = hugging_face()
    return transformers.DynamicCache() if kind == "dynamic" else transformers.StaticCache(model.config, 16)


def texts(batch: int, length: int) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(batch))


def exported(model: Any, policy: Any, kind: str, path: Path) -> Any:
    """The compiled model and its file, which takes any number of tokens."""
    compiled, cache = fxround.compile(model, policy), new(model, kind)
    with torch.no_grad():
        compiled(texts(2, 4), past_key_values=cache)
    compiled.export(path, {"input_ids": texts(2, 2), "past_key_values": cache})
    return compiled


@pytest.mark.part("Reader-reproducible-static")
@pytest.mark.parametrize("build, policy, kind", [(llama, FIRST_LAYER, "dynamic"), (Reader, "reproducible", "static")])
def test_one_file_reads_prompts_and_tokens_of_any_batch(build: Any, policy: Any, kind: str, tmp_path: Path) -> None:
    model = build()
    compiled = exported(model, policy, kind, tmp_path / "model.pt2")
    loaded = fxround.load(tmp_path / "model.pt2")
    for batch in (2, 1, 3):
        here, there, ids = new(model, kind), new(model, kind), texts(batch, 4)
        storage = 0
        for call in range(3):
            with torch.no_grad():
                want = compiled(ids, past_key_values=here)
            got = loaded(input_ids=ids, past_key_values=there)
            assert torch.equal(want["logits"], got["logits"])
            assert got["past_key_values"] is there and type(got) is type(want)
            assert int(there.get_seq_length()) == int(here.get_seq_length()) == 4 + call
            for mine, theirs in zip(there.layers, here.layers, strict=True):
                assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
            # A cache of a fixed size is changed in place.
            address = there.layers[0].keys.data_ptr()
            assert not call or kind == "dynamic" or address == storage
            ids, storage = want["logits"][:, -1:].argmax(-1), address


def test_the_cache_of_the_example_is_not_changed(tmp_path: Path) -> None:
    compiled, cache = fxround.compile(Reader(), "reproducible"), new(Reader(), "static")
    with torch.no_grad():
        compiled(texts(2, 4), past_key_values=cache)
        before = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
        compiled.export(tmp_path / "model.pt2", ((texts(2, 2),), {"past_key_values": cache}))
    assert int(cache.get_seq_length()) == 4
    after = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert all(map(torch.equal, before, after))
    assert fxround.load(tmp_path / "model.pt2")(texts(2, 3), past_key_values=cache)["logits"].shape == (2, 3, WORDS)
    assert int(cache.get_seq_length()) == 7


class Scaled(nn.Module):
    """A model that trains what it adds to the first keys of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        keys, values = cache.update(x, x * self.weight, 0)
        return (keys * values).sum(-1), cache


def test_a_program_with_gradients_takes_a_cache(tmp_path: Path) -> None:
    transformers, x = hugging_face(), torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    compiled, gradients = fxround.compile(Scaled(), "bfloat16"), []
    filled = transformers.DynamicCache()
    filled.update(x, x, 0)
    compiled.export(tmp_path / "model.pt2", (x, filled), gradients=True)
    for module in (compiled, fxround.load(tmp_path / "model.pt2")):
        cache = transformers.DynamicCache()
        cache.update(x[:, :, :2], x[:, :, 1:3], 0)
        result, returned = module(x, cache)
        assert returned is cache and cache.get_seq_length() == 6
        result.square().sum().backward()
        (weight,) = module.parameters()
        gradients.append((weight.grad, result, cache.layers[0].values))
        weight.grad = None
    assert all(map(torch.equal, *gradients))


@pytest.mark.long
def test_another_process_needs_only_transformers(reader: tuple[Any, Path]) -> None:
    compiled, path = reader
    code = (
        "import sys, torch, fxround\n"
        "loaded = fxround.load(sys.argv[1])\n"
        "from transformers import DynamicCache\n"
        "cache, ids = DynamicCache(), torch.tensor([[1, 2, 3]])\n"
        "for _ in range(3):\n"
        "    logits = loaded(input_ids=ids, past_key_values=cache)['logits']\n"
        "    ids = logits[:, -1:].argmax(-1)\n"
        "print(fxround.hash(logits), len(cache.layers), cache.get_seq_length())\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    cache, ids = new(compiled, "dynamic"), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(3):
            logits = compiled(ids, past_key_values=cache)["logits"]
            ids = logits[:, -1:].argmax(-1)
    assert printed == [fxround.hash(logits), "2", "5"]


def test_what_a_program_cannot_take_is_named(reader: tuple[Any, Path], tmp_path: Path) -> None:
    transformers, (compiled, _) = hugging_face(), reader
    file = tmp_path / "model.pt2"
    with pytest.raises(TypeError, match="DynamicCache is empty, so that its heads"):
        compiled.export(file, {"input_ids": texts(2, 2), "past_key_values": transformers.DynamicCache()})
    sliding = transformers.MistralConfig(**SIZES, sliding_window=4)
    cache = transformers.DynamicCache(config=sliding)
    with pytest.raises(TypeError, match=r"DynamicSlidingWindowLayer.*makes the cache of them"):
        compiled.export(file, {"input_ids": texts(2, 2), "past_key_values": cache})
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with pytest.raises(TypeError, match=r"EncoderDecoderCache"):
        compiled.export(file, {"input_ids": texts(2, 2), "past_key_values": both})
    assert not file.exists()


def test_another_cache_than_the_example_s_is_refused(reader: tuple[Any, Path]) -> None:
    transformers, (compiled, path) = hugging_face(), reader
    loaded, ids = fxround.load(path), texts(2, 3)
    with pytest.raises(TypeError, match="'past_key_values' is missing"):
        loaded(input_ids=ids)
    with pytest.raises(TypeError, match=r"'past_key_values' is .*tuple"):
        loaded(input_ids=ids, past_key_values=())
    first, second, wide = (transformers.DynamicCache() for _ in range(3))
    for layer in range(3):
        first.update(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), layer)
    for layer in range(2):
        wide.update(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 16), layer)
        second.update(torch.zeros(2, 1, 1, 8, dtype=torch.float64), torch.zeros(2, 1, 1, 8), layer)
    static = new(compiled, "static")
    with pytest.raises(ValueError, match="the cache has 3 layers; the program was exported for 2"):
        loaded(input_ids=ids, past_key_values=first)
    for other, what in ((wide, "value_width=16"), (second, "float64"), (static, "StaticLayer")):
        with pytest.raises(ValueError, match=rf"layer 0 of the cache is .*{what}"):
            loaded(input_ids=ids, past_key_values=other)


def test_sizes_that_were_not_exported_are_named(reader: tuple[Any, Path], tmp_path: Path) -> None:
    compiled, cache = reader[0], new(reader[0], "dynamic")
    with torch.no_grad():
        compiled(texts(2, 4), past_key_values=cache)
    compiled.export(tmp_path / "token.pt2", {"input_ids": texts(2, 1), "past_key_values": cache})
    with pytest.raises(ValueError, match=r"not exported for these sizes or numbers .*input_ids.*example of them"):
        fxround.load(tmp_path / "token.pt2")(input_ids=texts(2, 3), past_key_values=cache)
