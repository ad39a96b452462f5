"""The models of segmentation-models-pytorch: every decoder with a small encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.zoo.subjects import Example, Subject, images

ENCODERS = {
    "Unet": ("resnet18", "mobilenet_v2"), "UnetPlusPlus": ("resnet18",), "MAnet": ("resnet18",),
    "Linknet": ("resnet18",), "FPN": ("resnet18", "efficientnet-b0"), "PSPNet": ("resnet18",),
    "DeepLabV3": ("resnet18",), "DeepLabV3Plus": ("mobilenet_v2",), "PAN": ("resnet18",), "UPerNet": ("resnet18",),
    "Segformer": ("mit_b0",), "DPT": ("tu-vit_tiny_patch16_224",),
}  # fmt: skip


def _built(decoder: str, encoder: str) -> Callable[[], Example]:
    def make() -> Example:
        import segmentation_models_pytorch as smp

        size = {"DPT": 224, "PAN": 128}.get(decoder, 64)
        model = getattr(smp, decoder)(encoder_name=encoder, encoder_weights=None, classes=3)
        return Example(model, (images(size),))

    return make


def subjects() -> Iterator[Subject]:
    """Yield one subject per pair of decoder and encoder."""
    for decoder, encoders in ENCODERS.items():
        for encoder in encoders:
            yield Subject("segmentation", f"{decoder}-{encoder}", _built(decoder, encoder))
