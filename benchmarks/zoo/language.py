"""The model types of transformers with a base model, their configurations made tiny by the names of their numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.subjects import BATCH, Example, Subject, Unbuildable

VOCABULARY, LENGTH, IMAGE, SOUND = 96, 8, 32, 800
# The new value of a number of a configuration, by its name; other numbers are kept.
_NAMES: tuple[tuple[int, str], ...] = (
    (
        32,
        "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size encoder_hidden_size "
        "decoder_hidden_size text_dim vision_dim projection_dim d_embed cross_attention_hidden_size "
        "encoder_hidden_dim model_dim emb_dim embedding_dim word_embed_proj_dim classifier_proj_size "
        "hidden_channels mask_feature_size feature_size fpn_feature_size encoder_dim lstm_dim d_latents shared_dim "
        "decoder_dim fusion_hidden_size latent_dim lm_hidden_size rnn_width lru_width output_dim neck_hidden_size",
    ),
    (
        64,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward "
        "encoder_intermediate_size decoder_intermediate_size feed_forward_size mlp_dim hidden_ff_dim "
        "moe_intermediate_size shared_expert_intermediate_size encoder_feedforward_dim decoder_feedforward_dim "
        "intermediate_dim dim_ff d_inner inner_dim shared_intermediate_size",
    ),
    (
        2,
        "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_encoder_layers "
        "num_decoder_layers num_hidden_blocks l_layers x_layers r_layers depth num_block num_blocks "
        "num_transformer_layers text_layers vision_layers num_attention_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_self_attends_per_block blocks",
    ),
    (
        4,
        "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads "
        "encoder_num_attention_heads decoder_num_attention_heads num_self_attention_heads "
        "num_cross_attention_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num",
    ),
    (
        8,
        "head_dim d_kv kv_channels attention_head_dim d_head",
    ),
    (
        VOCABULARY,
        "vocab_size src_vocab_size tgt_vocab_size text_vocab_size",
    ),
    (
        64,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_sequence_length "
        "max_seq_len",
    ),
    (
        IMAGE,
        "image_size img_size input_size crop_size",
    ),
)
SMALL: Mapping[str, Any] = {
    **{name: number for number, names in _NAMES for name in names.split()},
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "num_latents": 8,
    "num_queries": 8, "num_mel_bins": 16, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8, "sliding_window": 4, "num_frames": 2,
    "num_codebooks": 2, "codebook_size": 64, "rotary_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "encoder_n_layers": 2, "decoder_n_layers": 2, "d_points": 4,
    "attention_window": 4,
    "block_size": 4, "num_random_blocks": 1, "chunk_size": 4, "window_size": 4, "tubelet_size": [2, 8, 8],
}  # fmt: skip
# Names of lists of widths and of depths, one number per stage.
WIDTHS = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes", "stage_dims", "layer_widths")
DEPTHS = ("depths", "num_blocks_per_stage", "stage_depths")


def shrink(config: Any, seen: set[int] | None = None) -> Any:
    """Return the configuration and those inside it with small numbers."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return config
    seen.add(id(config))
    aliases = getattr(config, "attribute_map", {})
    staged = any(hasattr(config, name) for name in DEPTHS)
    for name in {**aliases, **vars(config)}:
        if staged and aliases.get(name) == "num_stages":
            continue
        try:
            small = _small(name, getattr(config, name, None))
            if small is not None:
                setattr(config, name, small)
        except (AttributeError, NotImplementedError, ValueError, TypeError):  # a name that means several numbers
            continue
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, seen)
    _agree(config)
    for name in ("use_cache", "layerdrop", "apply_spec_augment", "use_timm_backbone"):
        if hasattr(config, name):
            setattr(config, name, 0.0 if name == "layerdrop" else False)
    return config


def _agree(config: Any) -> None:
    """Adjust numbers that depend on one another in a way that their names do not show."""
    numbers = vars(config)
    if numbers.get("kv_lora_rank") and "num_key_value_heads" in numbers:  # latent attention has as many of both
        config.num_key_value_heads = config.num_attention_heads
    if "state_size" in numbers and "expand" in numbers and "num_heads" in numbers:  # Mamba 2
        config.num_heads = config.expand * config.hidden_size // config.head_dim
    if "head_dim" in numbers and numbers["head_dim"] is None and numbers.get("num_attention_heads"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    rope = numbers.get("rope_parameters") or numbers.get("rope_scaling")
    if isinstance(rope, dict) and "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]


def _small(name: str, value: Any) -> Any:
    """Return the new value, or None if it is kept."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index")):
            return min(value, VOCABULARY - 1)
        small = SMALL.get(name)
        return None if small is None or isinstance(small, list) else min(value, small) if value > 0 else None
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        if name in WIDTHS or name in ("conv_dim", "channels", "num_channels_list"):
            return type(value)(16 * (i + 1) if name in WIDTHS else 32 for i in range(len(value)))
        if name.endswith("heads"):
            return type(value)(2 for _ in value)
        if name in DEPTHS:
            return type(value)(1 for _ in value)
        if name in ("image_size", "input_size"):
            return type(value)(IMAGE for _ in value)
    if name == "layer_types" and isinstance(value, list):
        return _both(value)
    return None


def _both(kinds: list[str]) -> list[str]:
    """Return two layers, of different kinds if there are different ones."""
    first = kinds[0]
    return [first, next((kind for kind in kinds if kind != first), first)]


def arguments(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return keyword arguments for ``forward``. Raises Unbuildable for a required one of unknown name."""
    text = getattr(config, "text_config", None) or getattr(config, "text_encoder", None) or config
    vision = getattr(config, "vision_config", None) or config
    words = int(getattr(text, "vocab_size", None) or VOCABULARY)
    size = getattr(vision, "image_size", None) or IMAGE
    size = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(size) == 2 and not all(isinstance(s, int) for s in size):
        size = (IMAGE, IMAGE)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 16
    mel = getattr(config, "max_source_positions", None)
    low = min(10, words // 2)

    def tokens() -> torch.Tensor:
        return torch.randint(low, min(words, VOCABULARY), (BATCH, LENGTH))

    makers: Mapping[str, Callable[[], Any]] = {
        "input_ids": tokens,
        "attention_mask": lambda: torch.ones(BATCH, LENGTH, dtype=torch.long),
        "decoder_input_ids": tokens,
        "pixel_values": lambda: torch.randn(BATCH, channels, *size),
        "pixel_values_videos": lambda: torch.randn(BATCH, int(getattr(config, "num_frames", 2)), channels, *size),
        "input_values": lambda: torch.randn(BATCH, SOUND),
        "input_features": lambda: torch.randn(BATCH, bins, 2 * mel) if mel else torch.randn(BATCH, 32, bins),
        "bbox": lambda: torch.randint(0, 16, (BATCH, LENGTH, 2)).repeat(1, 1, 2).sort(-1).values,
        "inputs": lambda: torch.randn(BATCH, LENGTH, getattr(config, "d_model", 32)),
        "visual_feats": lambda: torch.randn(BATCH, 4, getattr(config, "visual_feat_dim", 32)),
        "visual_pos": lambda: torch.rand(BATCH, 4, 4),
        "past_values": lambda: torch.randn(
            BATCH, getattr(config, "context_length", 16), getattr(config, "num_input_channels", 1)
        ),
        "input_embeds": lambda: torch.randn(BATCH, LENGTH, 32),
        "sequence_ids": tokens,
        "xpath_tags_seq": lambda: torch.randint(0, 10, (BATCH, LENGTH, 50)),
        "input_boxes": lambda: torch.rand(BATCH, 2, 4) * 20,
        "noisy_pixel_values": lambda: torch.randn(BATCH, channels, *size),
    }
    forward = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    named = [p for p in forward.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wanted = [p.name for p in named if p.default is p.empty]
    wanted += [name for name in (main, "bbox", "visual_feats", "visual_pos") if name in forward]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in forward:
        wanted.append("decoder_input_ids")
    if "pixel_values" in forward and (hasattr(config, "projection_dim") or "logit" in " ".join(vars(config))):
        wanted.append("pixel_values")
    made = {}
    for name in dict.fromkeys(wanted):
        if name not in makers:
            raise Unbuildable(f"no argument is known for {name!r} of {type(model).__name__}")
        made[name] = makers[name]()
    if "input_ids" in made and "attention_mask" in forward and not getattr(config, "is_encoder_decoder", False):
        made["attention_mask"] = makers["attention_mask"]()
        made["attention_mask"][0, LENGTH - 2 :] = 0
    return made


def _built(kind: str) -> Callable[[], Example]:
    def make() -> Example:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = shrink(CONFIG_MAPPING[kind]())
        model = transformers.AutoModel.from_config(config).float().eval()
        if sum(p.numel() for p in model.parameters()) > 30_000_000:
            raise Unbuildable("the configuration stays large: more than 30 million parameters")
        given = arguments(model, config)
        first: Exception = Unbuildable("not run")
        for change in ({}, _frames(given, config), _upright(given)):
            try:
                with torch.no_grad():
                    model(**given | change)
            except Exception as e:  # a model may raise anything for arguments that it does not accept
                first = first if change else e
                continue
            return Example(model, (), given | change)
        raise first

    return make


def _frames(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return images as a video."""
    pixels = given.get("pixel_values")
    count = getattr(config, "num_frames", 2)
    return (
        {} if pixels is None else {"pixel_values": torch.stack([pixels] * (count if isinstance(count, int) else 2), 1)}
    )


def _upright(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spectrum with its axes exchanged, a sound with a channel."""
    spectrum, sound = given.get("input_features"), given.get("input_values")
    inputs = {} if spectrum is None else {"input_features": spectrum.transpose(1, 2).contiguous()}
    return inputs if sound is None else inputs | {"input_values": sound[:, None]}


def subjects() -> Iterator[Subject]:
    """Yield every model type for which transformers names a base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in MODEL_MAPPING_NAMES:
        yield Subject("transformers", kind, _built(kind))
