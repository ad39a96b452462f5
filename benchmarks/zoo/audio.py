"""The models of torchaudio, made small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.zoo.subjects import Example, Subject


def models() -> Any:
    """Return ``torchaudio.models``."""
    import torchaudio

    return torchaudio.models


def _lengths(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes)


def _wav2letter() -> Example:
    return Example(models().Wav2Letter(num_classes=10, num_features=8, input_type="mfcc"), (torch.randn(2, 8, 60),))


def _deepspeech() -> Example:
    return Example(models().DeepSpeech(n_feature=20, n_hidden=32, n_class=10), (torch.randn(2, 1, 12, 20),))


def _conformer() -> Example:
    model = models().Conformer(input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=7)
    return Example(model, (torch.randn(2, 16, 32), _lengths(16, 12)))


def _emformer() -> Example:
    model = models().Emformer(32, 4, 64, 2, segment_length=4, left_context_length=4, right_context_length=2)
    return Example(model, (torch.randn(2, 18, 32), _lengths(16, 16)))


def _tasnet() -> Example:
    model = models().ConvTasNet(
        num_sources=2, enc_kernel_size=16, enc_num_feats=16, msk_num_feats=16, msk_num_hidden_feats=32,
        msk_num_layers=2, msk_num_stacks=2,
    )  # fmt: skip
    return Example(model, (torch.randn(2, 1, 400),))


def _demucs() -> Example:
    return Example(
        models().HDemucs(["a", "b"], audio_channels=1, channels=8, nfft=256, depth=4), (torch.randn(2, 1, 4096),)
    )


def _wavernn() -> Example:
    model = models().WaveRNN(
        upsample_scales=[2, 2, 3], n_classes=16, hop_length=12, n_res_block=2, n_rnn=16, n_fc=16, n_freq=10,
        n_hidden=16, n_output=16,
    )  # fmt: skip
    return Example(model, (torch.randn(2, 1, (10 - 4) * 12), torch.randn(2, 1, 10, 10)))


def _tacotron() -> Example:
    model = models().Tacotron2(
        n_symbol=20, n_mels=10, symbol_embedding_dim=16, encoder_embedding_dim=16, attention_rnn_dim=16,
        attention_hidden_dim=16, decoder_rnn_dim=16, prenet_dim=16, postnet_embedding_dim=16, decoder_max_step=4,
    )  # fmt: skip
    args = (torch.randint(0, 20, (2, 6)), _lengths(6, 6), torch.randn(2, 10, 5), _lengths(5, 5))
    return Example(model, args)


def _wave2vec(group: str) -> Callable[[], Example]:
    def make() -> Example:
        model = models().wav2vec2_model(
            extractor_mode=group, extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False,
            encoder_embed_dim=32, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=8,
            encoder_pos_conv_groups=4, encoder_num_layers=2, encoder_num_heads=4, encoder_attention_dropout=0.0,
            encoder_ff_interm_features=64, encoder_ff_interm_dropout=0.0, encoder_dropout=0.0,
            encoder_layer_norm_first=group == "layer_norm", encoder_layer_drop=0.0, aux_num_out=10,
        )  # fmt: skip
        return Example(model, (torch.randn(2, 400),))

    return make


def _rnnt() -> Example:
    model = models().emformer_rnnt_model(
        input_dim=16, encoding_dim=32, num_symbols=11, segment_length=8, right_context_length=4,
        time_reduction_input_dim=8, time_reduction_stride=2, transformer_num_heads=2, transformer_ffn_dim=32,
        transformer_num_layers=2, transformer_dropout=0.0, transformer_activation="gelu",
        transformer_left_context_length=4, transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True, symbol_embedding_dim=16,
        num_lstm_layers=1, lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.0,
    )  # fmt: skip
    args = (torch.randn(2, 20, 16), _lengths(16, 16), torch.randint(0, 10, (2, 4)), _lengths(4, 4))
    return Example(model, args)


MAKERS: dict[str, Callable[[], Example]] = {
    "Wav2Letter": _wav2letter, "DeepSpeech": _deepspeech, "Conformer": _conformer, "Emformer": _emformer,
    "ConvTasNet": _tasnet, "HDemucs": _demucs, "WaveRNN": _wavernn, "Tacotron2": _tacotron,
    "Wav2Vec2-group": _wave2vec("group_norm"), "Wav2Vec2-layer": _wave2vec("layer_norm"), "RNNT": _rnnt,
}  # fmt: skip


def subjects() -> Iterator[Subject]:
    """Yield one subject per architecture."""
    for name, make in MAKERS.items():
        yield Subject("torchaudio", name, make)
