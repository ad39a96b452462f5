"""What several commands have: the model and its inputs, metrics, texts of help, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from fxround.atomic_files import write_file
from fxround.cli.loading import named

POLICY: Final = "a preset, format, scaled format, rounding or .toml file (default stochastic)"


def put(report: Any, to: str | None) -> None:
    """Print a report, and write it as JSON to a file; as JSON alone if the file is ``-``."""
    print(report.to_json() if to == "-" else report)
    if to and to != "-":
        write_file(to, report.to_json() + "\n")


def said(text: str) -> dict[str, Any]:
    """Return a text as the help of a command in the list of commands, and as the description on the command's own."""
    return {"help": text, "description": f"{text[0].upper()}{text[1:]}."}


def add_device(parser: Any) -> None:
    """Add the argument ``--device``."""
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu (default), or cuda, cuda:1, ...")


def add_model(parser: Any) -> None:
    """Add the arguments ``model``, ``--inputs``, ``--shape`` and ``--device``, which ``fxround.cli.loading`` loads."""
    parser.add_argument(
        "model",
        metavar="MODULE:CALLABLE",
        help="a callable that returns a model, or (model, inputs), in a module or a file: torchvision.models:resnet18, "
        "net.py:build; the model runs in eval mode",
    )
    parser.add_argument(
        "--inputs", metavar="FILE|MODULE:CALLABLE", help="a .pt, .npy or .npz file, or a callable that returns inputs"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="the shape of a random float32 input, for example 1,3,224,224; once for each input",
    )
    add_device(parser)


def add_metric_choices(parser: Any) -> None:
    """Add the arguments that ``metrics_of`` reads: the choices of ``fxround.metric``."""
    parser.add_argument(
        "--class-dim",
        type=int,
        metavar="N",
        help="the dimension of a result that has the classes, -1 for [n, time, classes] (default 1)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="T",
        help="for a result without classes, such as one channel of logits: the label is whether an element is greater",
    )
    parser.add_argument(
        "--better", choices=("higher", "lower"), help="which values of a metric that is a function are better"
    )
    parser.add_argument(
        "--against",
        choices=("unperturbed", "target"),
        help="what metrics compare a result with: the unperturbed one (default), or the targets of the inputs",
    )


def metrics_of(texts: Sequence[str], arguments: argparse.Namespace) -> list[Any]:
    """Return the metrics of names and ``MODULE:FUNCTION``, with the choices of ``add_metric_choices``.

    A choice belongs to the metrics that have it. Raises ValueError for one that no metric has.
    """
    from fxround.significance.metrics import METRICS, OF_LABELS, metric

    given = {name: getattr(arguments, name) for name in ("class_dim", "threshold", "better", "against")}
    asked = {name: value for name, value in given.items() if value is not None}
    if not asked:
        return [named(text) if ":" in text else text for text in texts]
    unused, metrics = set(asked), []
    for text in texts:
        own = {
            name: value
            for name, value in asked.items()
            if (name == "better" and ":" in text)
            or (name == "against" and (":" in text or (text in METRICS and METRICS[text].compares)))
            or (name in ("class_dim", "threshold") and text in OF_LABELS)
        }
        unused -= set(own)
        metrics.append(metric(named(text) if ":" in text else text, **own))
    if unused:
        flag = sorted(unused)[0].replace("_", "-")
        none = f"{', '.join(texts)} has no such choice" if texts else "without --metric, no metric has such a choice"
        raise ValueError(f"--{flag}: {none}")
    return metrics
