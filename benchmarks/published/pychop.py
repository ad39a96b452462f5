"""Pychop's question: which format and which rounding mode keeps a trained model's accuracy?

The classifiers are the digits CNN (``fxround.demo``, four layers) and a residual network of 18 layers (``residual``),
with the accuracy on 500 test images; the detector is that of
``scenes``, with the mean average precision of 128 scenes. Stock PyTorch trains them in binary32, and nothing is trained
after that; norms are fused into the convolutions before them, as in Pychop's experiments. ``weights``: the parameters
alone are rounded, as there. ``all``: arguments and the result of every operation, too; accumulators are binary32.
Figures are means over seeds of models and of random bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fxround
from benchmarks.published import folders, residual
from benchmarks.published.scenes import Scenes, mean_average_precision, trained
from fxround import Policy, Rule, demo

# Pychop's name of a format, and fxround's: ieee(bits of the exponent, precision).
FORMATS: Final[Mapping[str, str]] = {
    "q43": "ieee(4,4)",
    "q52": "ieee(5,3)",
    "custom(5, 5)": "ieee(5,6)",
    "bfloat16": "bfloat16",
    "half": "binary16",
}
# Pychop's modes 1 to 6.
MODES: Final = ("nearest_even", "toward_positive", "toward_negative", "toward_zero", "stochastic", "stochastic_equal")
SCOPES: Final = ("weights", "all")
# Both files are in github.com/inEXASCALE/pychop, folder exps. quantization_results.csv (commit 1d2e78f): a ResNet on
# MNIST, accuracy in percent. obj_detect_results_ft.csv (commit 0d8d4c1): Faster R-CNN on 100 images of COCO, mAP of
# overlaps 0.5 to 0.95, for which the boxes and scores of the result were rounded, too.
CLASSIFIED: Final[Mapping[str, tuple[float, ...]]] = {
    "q43": (99.66, 18.66, 51.16, 99.70, 99.71, 99.60),
    "q52": (99.60, 10.10, 11.35, 99.59, 99.63, 99.49),
    "custom(5, 5)": (99.66, 99.48, 99.59, 99.66, 99.65, 99.61),
    "bfloat16": (99.63, 99.60, 99.71, 99.64, 99.64, 99.62),
    "half": (99.63, 99.63, 99.63, 99.63, 99.63, 99.63),
}
DETECTED: Final[Mapping[str, tuple[float, ...]]] = {
    "q43": (0.027, 0.000, 0.000, 0.010, 0.023, 0.014),
    "q52": (0.165, 0.000, 0.000, 0.036, 0.115, 0.090),
    "bfloat16": (0.420, 0.406, 0.396, 0.399, 0.416, 0.407),
    "half": (0.423, 0.423, 0.421, 0.422, 0.422, 0.422),
}
SCENES: Final = 3000
TESTED: Final = 500
EPOCHS: Final = 8
Scores = dict[tuple[str, str, str], list[float]]


def fused(model: nn.Module) -> nn.Module:
    """Return the model in eval mode with each norm of the kind BatchNorm2d in the convolution before it."""
    layers = [(name, layer) for name, layer in model.eval().named_modules() if not list(layer.children())]
    for (first, conv), (second, norm) in pairwise(layers):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            model.set_submodule(first, fuse_conv_bn_eval(conv, norm))
            model.set_submodule(second, nn.Identity())
    return model


def policies(formats: Mapping[str, Any]) -> dict[str, Policy]:
    """Return the policies by scope, format and mode, joined by semicolons."""
    named = {}
    for name in formats:
        for mode in MODES:
            text = f"{FORMATS[name]}/{mode}"
            named[f"weights; {name}; {mode}"] = Policy(text, (Rule(role="weight", rounding=text),))
            named[f"all; {name}; {mode}"] = Policy.parse(text)
    return named


@dataclass(frozen=True)
class Study:
    """A model by seed, its data, what is measured and how a figure is written, and the published figures."""

    make: Callable[[int], nn.Module]
    data: Callable[[], Any]
    metric: Any
    title: str
    shown: Callable[[float], str]
    published: Mapping[str, tuple[float, ...]]


@cache
def digits() -> demo.Digits:
    """Return the images."""
    return demo.load_digits()


def _scenes() -> Any:
    tested = Scenes.make(128, 1, test=True)
    return [(tested.images, tested.objects)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


STUDIES: Final[Mapping[str, Study]] = {
    "cnn": Study(
        lambda seed: demo.trained(digits(), seed, lambda items, total, label: items)[0],
        lambda: [digits().test],
        "accuracy",
        "digits CNN: accuracy, %",
        _percent,
        CLASSIFIED,
    ),
    "residual": Study(
        lambda seed: residual.trained(*digits().train, seed),
        lambda: [digits().test],
        "accuracy",
        "residual network: accuracy, %",
        _percent,
        CLASSIFIED,
    ),
    "detector": Study(
        lambda seed: trained(Scenes.make(SCENES, 0, test=False), seed, EPOCHS),
        _scenes,
        mean_average_precision,
        "detector: mAP",
        "{:.3f}".format,
        DETECTED,
    ),
}


def of_folder(folder: Path) -> Study:
    """Return the study of the residual network on the images of a folder."""
    train, test = folders.images(folder)
    return replace(
        STUDIES["residual"],
        make=lambda seed: residual.trained(*train.tensors, seed),
        data=lambda: list(zip(*(each.split(TESTED) for each in test.tensors), strict=True)),
        title=f"residual network on {folder.name}: accuracy, %",
    )


def tables(
    seeds: int = 5, models: Iterable[str] = tuple(STUDIES), folder: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Compare the policies on the models of each seed, and yield a model's table after each.

    folder: images for the residual network, which is then the only model; None for the digits.
    """
    studies = {name: STUDIES[name] for name in models} if folder is None else {"residual": of_folder(folder)}
    for model, study in studies.items():
        scores, unrounded = Scores(), list[float]()
        data = study.data()
        for seed in range(seeds):
            named = policies(study.published)
            made = fused(study.make(seed))
            report = fxround.compare(made, data, named, [study.metric], samples=1, seed=seed, progress=False)
            unrounded.append(report.unrounded[0].mean)
            for row in report.policies:
                if row.error:
                    raise RuntimeError(f"{row.name}: {row.error}")
                scope, form, mode = row.name.split("; ")
                scores.setdefault((scope, form, mode), []).append(row.metrics[0].mean)
            yield {f"published-pychop-{model}": _table(study, scores, unrounded)}


def _table(study: Study, scores: Scores, unrounded: list[float]) -> dict[str, Any]:
    """Return a row for each format and scope, with the means over seeds, and one with the published figures."""
    rows = [["binary32, unrounded", study.shown(statistics.fmean(unrounded)), *[""] * (len(MODES) - 1)]]
    for form, theirs in study.published.items():
        for scope in SCOPES:
            means = [study.shown(statistics.fmean(scores[scope, form, mode])) for mode in MODES]
            rows.append([f"{form}, {scope}", *means])
        rows.append([f"{form}, published", *(f"{value:.{1 if max(theirs) > 1 else 3}f}" for value in theirs)])
    return {"columns": [study.title, *MODES], "numbers": list(range(1, len(MODES) + 1)), "rows": rows}
