"""The models of torchvision: the smallest of each family; detectors as backbone and heads, without box selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.subjects import Example, Subject, images


class Heads(nn.Module):
    """A detector up to the results of its heads, because the selection of boxes depends on data."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        proposals = getattr(detector, "rpn", None)
        self.head = proposals.head if proposals is not None else detector.head
        regions = getattr(detector, "roi_heads", None)
        self.box = nn.Sequential(regions.box_head, _Boxes(regions.box_predictor)) if regions is not None else None
        masks = getattr(regions, "mask_head", None)
        self.mask = nn.Sequential(masks, regions.mask_predictor) if masks is not None else None
        points = getattr(regions, "keypoint_head", None)
        self.points = nn.Sequential(points, regions.keypoint_predictor) if points is not None else None

    def forward(self, x: Tensor) -> Any:
        features = self.backbone(x)
        maps = list(features.values()) if isinstance(features, dict) else [features]
        results = [self.head(maps)]
        if self.box is not None:
            results.append(self.box(nn.functional.adaptive_avg_pool2d(maps[0], 7)))
        for more in (self.mask, self.points):
            if more is not None:
                results.append(more(nn.functional.adaptive_avg_pool2d(maps[0], 14)))
        return results


class _Boxes(nn.Module):
    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, x: Tensor) -> Any:
        return self.predictor(x)


def _classifier(name: str, size: int) -> Callable[[], Example]:
    def make() -> Example:
        from torchvision import models

        options: dict[str, Any] = {"num_classes": 10, "weights": None}
        if name.startswith(("googlenet", "inception")):
            options |= {"init_weights": False, "aux_logits": False}
        if name.startswith("vit"):
            options |= {"image_size": size}
        return Example(models.get_model(name, **options), (images(size),))

    return make


def _video(name: str) -> Callable[[], Example]:
    def make() -> Example:
        from torchvision import models

        if name.startswith("mvit"):
            module: Any = models.video.mvit
            blocks = [
                module.MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 4, 4]),
                module.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
            ]
            model = module.MViT((32, 32), 4, blocks, True, True, True, 0, num_classes=10) if "v2" in name else \
                module.MViT((32, 32), 4, blocks, False, False, False, 0, num_classes=10)  # fmt: skip
            return Example(model, (torch.randn(2, 3, 4, 32, 32),))
        size, frames = (224, 14) if name == "s3d" else (32, 4)
        if name.startswith("swin3d"):
            model = models.video.SwinTransformer3d([2, 4, 4], 24, [1, 1], [2, 4], [2, 7, 7], num_classes=10)
            return Example(model, (torch.randn(2, 3, 4, 32, 32),))
        return Example(models.get_model(name, weights=None, num_classes=10), (torch.randn(2, 3, frames, size, size),))

    return make


def _segmentation(name: str) -> Callable[[], Example]:
    def make() -> Example:
        from torchvision import models

        options = {"weights": None, "weights_backbone": None, "num_classes": 5, "aux_loss": name.startswith("fcn")}
        return Example(models.get_model(name, **options), (images(64),))

    return make


def _detection(name: str) -> Callable[[], Example]:
    def make() -> Example:
        from torchvision import models

        detector = models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
        size = 320 if name.startswith("ssdlite") else 300 if name.startswith("ssd") else 96
        return Example(Heads(detector), (images(size),))

    return make


def _raft() -> Example:
    from torchvision.models import optical_flow

    model = optical_flow.raft_small(weights=None)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raft = model

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.raft(a, b, num_flow_updates=2)

    return Example(Flow(), (images(128).tanh(), images(128).tanh()))


CLASSIFIERS = {
    "alexnet": 64, "vgg11": 32, "vgg11_bn": 32, "resnet18": 32, "resnet50": 32, "resnext50_32x4d": 32,
    "wide_resnet50_2": 32, "squeezenet1_0": 64, "squeezenet1_1": 64, "densenet121": 32, "googlenet": 64,
    "inception_v3": 96, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "mobilenet_v3_large": 32, "mnasnet0_5": 32,
    "shufflenet_v2_x0_5": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32, "regnet_x_400mf": 32,
    "regnet_y_400mf": 32, "convnext_tiny": 32, "vit_b_32": 64, "swin_t": 64, "swin_v2_t": 64, "maxvit_t": 224,
}  # fmt: skip


def subjects() -> Iterator[Subject]:
    """Yield classifiers, segmentation, detection, video and optical flow."""
    from torchvision import models

    for name, size in CLASSIFIERS.items():
        yield Subject("torchvision", name, _classifier(name, size))
    for name in models.list_models(module=models.segmentation):
        if "101" not in name:
            yield Subject("torchvision", name, _segmentation(name))
    for name in models.list_models(module=models.detection):
        yield Subject("torchvision", name, _detection(name))
    for name in models.list_models(module=models.video):
        if name not in ("swin3d_s", "swin3d_b"):
            yield Subject("torchvision", name, _video(name))
    yield Subject("torchvision", "raft_small", _raft)
