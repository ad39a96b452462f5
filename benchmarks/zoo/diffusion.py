"""The denoisers, transformers and autoencoders of diffusers, with the configurations of its own tests, made small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.zoo.subjects import BATCH, Example, Subject

Options = Mapping[str, Any]
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
BLOCKS: Options = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
CROSSED: Options = {**BLOCKS, "down_block_types": DOWN, "cross_attention_dim": 16, "attention_head_dim": 8}
ENCODER: Options = {
    **BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2
}  # fmt: skip
HEADS: Options = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
TEXT = 6


def _normal(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(BATCH, *shape)


def _steps() -> torch.Tensor:
    return torch.tensor([3, 7])


def _places(count: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(count)[:, None].expand(count, 3).float().contiguous()


LATENT, TOKENS = _normal(4, 16, 16), _normal(TEXT, 16)
STEPPED: Options = {"sample": LATENT, "timestep": _steps, "encoder_hidden_states": TOKENS}
# The class, its configuration, and the functions that make its arguments.
MODELS: tuple[tuple[str, Options, Options], ...] = (
    ("UNet2DModel", {**BLOCKS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8,
      "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
     {"sample": LATENT, "timestep": _steps}),
    ("UNet2DConditionModel", {**CROSSED, "up_block_types": UP, "sample_size": 16}, STEPPED),
    ("ControlNetModel", {**CROSSED, "in_channels": 4, "conditioning_embedding_out_channels": (8, 16)},
     {**STEPPED, "controlnet_cond": _normal(3, 32, 32)}),
    ("UNet3DConditionModel", {**BLOCKS, "cross_attention_dim": 16, "attention_head_dim": 8, "sample_size": 16,
      "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D",
      "CrossAttnUpBlock3D")},
     {**STEPPED, "sample": _normal(4, 2, 16, 16)}),
    ("UNet1DModel", {"block_out_channels": (8, 8, 16, 16), "in_channels": 4, "out_channels": 4,
      "time_embedding_type": "positional", "act_fn": "silu", "use_timestep_embedding": True,
      "out_block_type": "OutConv1DBlock",
      "flip_sin_to_cos": False, "freq_shift": 1.0, "mid_block_type": "MidResTemporalBlock1D", "layers_per_block": 1,
      "down_block_types": ("DownResnetBlock1D",) * 4, "up_block_types": ("UpResnetBlock1D",) * 3},
     {"sample": _normal(4, 16), "timestep": _steps}),
    ("AutoencoderKL", {**ENCODER, "latent_channels": 4, "sample_size": 32}, {"sample": _normal(3, 32, 32)}),
    ("VQModel", {**ENCODER, "latent_channels": 3, "num_vq_embeddings": 32}, {"sample": _normal(3, 32, 32)}),
    ("AutoencoderTiny", {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
      "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}, {"sample": _normal(3, 32, 32)}),
    ("AutoencoderOobleck", {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_channels": 8,
      "decoder_input_channels": 4, "channel_multiples": [1, 2]}, {"sample": _normal(2, 64)}),
    ("DiTTransformer2DModel", {**HEADS, "in_channels": 4, "out_channels": 8, "sample_size": 8,
      "num_embeds_ada_norm": 10},
     {"hidden_states": _normal(4, 8, 8), "timestep": _steps, "class_labels": _steps}),
    ("PixArtTransformer2DModel", {**HEADS, "in_channels": 4, "out_channels": 8, "sample_size": 8,
      "caption_channels": 16,
      "cross_attention_dim": 32, "use_additional_conditions": False},
     {"hidden_states": _normal(4, 8, 8), "timestep": _steps, "encoder_hidden_states": TOKENS}),
    ("SD3Transformer2DModel", {**HEADS, "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4,
      "caption_projection_dim": 32, "joint_attention_dim": 16, "pooled_projection_dim": 16},
     {"hidden_states": _normal(4, 8, 8), "timestep": _steps, "encoder_hidden_states": TOKENS,
      "pooled_projections": _normal(16)}),
    ("FluxTransformer2DModel", {**HEADS, "patch_size": 1, "in_channels": 4, "num_single_layers": 1,
      "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
     {"hidden_states": _normal(16, 4), "timestep": _normal(), "encoder_hidden_states": TOKENS,
      "pooled_projections": _normal(16), "img_ids": _places(16), "txt_ids": _places(TEXT)}),
    ("Transformer2DModel", {**HEADS, "in_channels": 16, "norm_num_groups": 8, "cross_attention_dim": 16},
     {"hidden_states": _normal(16, 8, 8), "encoder_hidden_states": TOKENS}),
    ("SanaTransformer2DModel", {**HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 1,
      "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
      "caption_channels": 16},
     {"hidden_states": _normal(4, 8, 8), "timestep": _steps, "encoder_hidden_states": TOKENS}),
    ("PriorTransformer", {**HEADS, "embedding_dim": 16, "num_embeddings": TEXT, "additional_embeddings": 4},
     {"hidden_states": _normal(16), "timestep": _steps, "proj_embedding": _normal(16),
      "encoder_hidden_states": TOKENS}),
    ("AuraFlowTransformer2DModel", {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
      "num_single_dit_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 16,
      "caption_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 64},
     {"hidden_states": _normal(4, 8, 8), "timestep": _steps, "encoder_hidden_states": TOKENS}),
    ("UVit2DModel", {"hidden_size": 32, "cond_embed_dim": 16, "encoder_hidden_size": 16, "num_hidden_layers": 1,
      "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 32, "codebook_size": 24,
      "block_out_channels": 32,
      "in_channels": 32, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 24, "sample_size": 8},
     {"input_ids": lambda: torch.randint(0, 24, (BATCH, 8, 8)), "encoder_hidden_states": TOKENS,
      "pooled_text_emb": _normal(16), "micro_conds": _normal(3)}),
    ("LTXVideoTransformer3DModel", {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32,
      "caption_channels": 16},
     {"hidden_states": _normal(8, 4), "encoder_hidden_states": TOKENS, "timestep": _steps,
      "encoder_attention_mask": lambda: torch.ones(BATCH, TEXT), "num_frames": 2, "height": 2, "width": 2}),
    ("CogVideoXTransformer3DModel", {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
      "text_embed_dim": 16,
      "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": TEXT},
     {"hidden_states": _normal(3, 4, 8, 8), "encoder_hidden_states": TOKENS, "timestep": _steps}),
    ("WanTransformer3DModel", {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16,
      "ffn_dim": 32,
      "rope_max_seq_len": 32}, {"hidden_states": _normal(4, 2, 8, 8), "encoder_hidden_states": TOKENS,
      "timestep": _steps}),
)  # fmt: skip


def _built(name: str, config: Options, inputs: Options) -> Callable[[], Example]:
    def make() -> Example:
        import diffusers

        model = getattr(diffusers, name)(**config)
        return Example(model, (), {key: made() if callable(made) else made for key, made in inputs.items()})

    return make


def subjects() -> Iterator[Subject]:
    """Yield one subject per architecture."""
    for name, config, inputs in MODELS:
        yield Subject("diffusers", name, _built(name, config, inputs))
