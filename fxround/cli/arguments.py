"""What several commands have: the model and its inputs, texts of help, and the report."""

from __future__ import annotations

from typing import Any, Final

from fxround.atomic_files import write_file

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
