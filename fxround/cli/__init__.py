"""The commands of ``fxround``.

They are demo, inspect, variability, perplexity, compare, attribute, localize, invariance, describe, selftest and
doctor. Commands parse arguments, call the library and print; the same results are available as data (``--json``). A
wrong argument prints a message on standard error and exits with status 2, without a traceback; a failed check exits
with status 1, a command interrupted by Ctrl-C with 130. Examples::

    $ fxround demo --policy up_down --samples 20
    $ fxround inspect fxround.demo:DigitsCNN --shape 4,1,8,8 --policy bfloat16
    $ fxround variability net.py:build --inputs images.npy --samples auto --html report.html --min-bits 10
    $ fxround perplexity net.py:build --inputs tokens.pt --widths 4:12 --samples 5
    $ fxround compare net.py:build --inputs images.npy --policies bfloat16 int8:channel nvfp4 --path rows.json
    $ fxround attribute net.py:build --inputs images.npy --formats bfloat16 e4m3fn
    $ fxround localize net.py:build --inputs images.npy --metric label_flips 0 --level modules
    $ fxround invariance net.py:build --inputs images.npy --axes batch,threads
    $ fxround describe mxfp8
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from fxround.atomic_files import write_file
from fxround.cli.arguments import POLICY, add_device, add_model, put, said
from fxround.cli.attribute import add_attribute
from fxround.cli.compare import add_compare
from fxround.cli.invariance import add_invariance
from fxround.cli.localize import add_localize
from fxround.cli.perplexity import add_perplexity
from fxround.compiler.signature import REFUSED
from fxround.errors import FxroundError, shown
from fxround.interrupts import INTERRUPTED, SAID, interruptible

FOLDER: Final = "fxround-demo"
# What NumPy and PyTorch raise for a file that they cannot read; what the system refuses stays as it is.
_BROKEN: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError),
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed check, 2 for a wrong argument, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a pipe that lacks the characters of tables shows "?"
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        with interruptible():
            status: int = arguments.command(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FxroundError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"fxround: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if REFUSED not in getattr(error, "__notes__", ()):
            raise
        print(f"fxround: the model refuses these inputs: {type(error).__name__}: {_first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(SAID, file=sys.stderr)
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxround", description="A rounding compiler for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", **said("train a digit classifier, perturb each of its operations, and count the significant bits")
    )
    demo.add_argument("--policy", default="stochastic", help=POLICY)
    demo.add_argument("--samples", type=int, default=10, help="number of perturbed runs (default 10)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the training and of the samples (default 0)")
    demo.add_argument(
        "--output", type=Path, default=Path(FOLDER), help=f"folder for the files it writes (default {FOLDER})"
    )
    add_device(demo)
    demo.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    demo.set_defaults(command=_demo)
    inspect = commands.add_parser("inspect", **said("show how a policy rounds each operation of a model"))
    add_model(inspect)
    inspect.add_argument("--policy", default="stochastic", help=POLICY)
    inspect.add_argument("--graph", action="store_true", help="also print the graph")
    inspect.add_argument(
        "--leaks", action="store_true", help="also print the values that are not in their declared format"
    )
    inspect.add_argument("--draw", metavar="FILE.svg", type=Path, help="also draw the graph as an SVG file")
    inspect.add_argument("--json", action="store_true", help="print summary and coverage as JSON and nothing else")
    inspect.set_defaults(command=_inspect)
    _add_variability(commands)
    add_perplexity(commands, _loaded)
    add_compare(commands, _loaded, _named)
    add_localize(commands, _loaded, _named)
    add_attribute(commands, _loaded, _named)
    add_invariance(commands, _loaded)
    describe = commands.add_parser("describe", **said("print the numbers of a format, and how it treats special cases"))
    describe.add_argument("format", metavar="FORMAT", help="a format, rounding or scaled format, for example mxfp8")
    describe.add_argument("--json", action="store_true", help="print the description as JSON and nothing else")
    describe.set_defaults(command=_describe)
    selftest = commands.add_parser("selftest", **said("compare the kernels of this machine with the specification"))
    selftest.add_argument("--device", default="cpu", help="cpu (default), or a CUDA device such as cuda:0")
    selftest.add_argument("--json", action="store_true", help="print the comparisons as JSON and nothing else")
    selftest.set_defaults(command=_selftest)
    doctor = commands.add_parser(
        "doctor", **said("print versions, processor and cache, and whether the installation works")
    )
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON and nothing else")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_variability(commands: Any) -> None:
    study = commands.add_parser(
        "variability",
        **said("perturb the roundings of a model, and count the significant bits of its results and layers"),
    )
    add_model(study)
    study.add_argument("--policy", default="stochastic", help=POLICY)
    study.add_argument(
        "--samples", type=_samples, default=10, metavar="N|auto", help="runs of every batch (default 10)"
    )
    study.add_argument(
        "--tolerance",
        type=float,
        default=0.5,
        help="for --samples auto: half width of the confidence interval, in bits (default 0.5)",
    )
    study.add_argument(
        "--capture",
        choices=("outputs", "layers", "nodes"),
        default="layers",
        help="what to measure beside the results: nothing, layers or operations (default layers)",
    )
    study.add_argument(
        "--isolate", choices=("layers", "operators"), help="also perturb layers or operators one at a time"
    )
    study.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="a metric, for example sqnr; may be repeated (default: those that fit the results)",
    )
    study.add_argument(
        "--reference",
        choices=("binary64", "none"),
        default="binary64",
        help="what the mean of the samples is compared with (default binary64, a run in float64)",
    )
    study.add_argument(
        "--method",
        choices=("cnh", "general"),
        default="cnh",
        help="how bits are estimated: cnh assumes normal samples, general nothing (default cnh)",
    )
    study.add_argument("--batch-size", type=int, help="split the inputs into batches of this many rows")
    study.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    study.add_argument("--jobs", type=int, default=1, help="number of worker processes, -1 for all cores (default 1)")
    for flag, what in _CHECKS:
        study.add_argument(flag, type=float, help=f"exit with status 1 {what}")
    study.add_argument("--html", metavar="FILE", type=Path, help="write the report as one page")
    study.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    study.set_defaults(command=_variability)


_CHECKS: Final = (
    ("--min-bits", "if a result has fewer bits in the mean"),
    ("--min-worst", "if an element of a result has fewer bits"),
    ("--max-flips", "if a larger share of labels, 0 to 1, changes"),
    ("--max-outside", "if in a larger share of elements, 0 to 1, the reference is beyond the spread"),
)


def _samples(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{shown(text)}: expected a number of runs, or auto")


def _variability(arguments: argparse.Namespace) -> int:
    import fxround
    from fxround.significance.report import CheckFailed, require_bounds

    names = (flag[2:].replace("-", "_") for flag, _ in _CHECKS)
    asked = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    require_bounds(**asked)
    model, inputs = _loaded(arguments)
    report = fxround.variability(
        model,
        inputs,
        arguments.policy,
        arguments.samples,
        tolerance=arguments.tolerance,
        capture=arguments.capture,
        isolate=arguments.isolate,
        metrics=tuple(arguments.metric) if arguments.metric else "auto",
        reference=None if arguments.reference == "none" else arguments.reference,
        method=arguments.method,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        n_jobs=arguments.jobs,
        progress=False if arguments.json == "-" else None,
    )
    put(report, arguments.json)
    if arguments.html:
        report.to_html(arguments.html)
    try:
        report.check(**asked, allow_nonfinite=not asked)
    except CheckFailed as error:
        print(f"fxround: {error}", file=sys.stderr)
        return 1 if report.complete else INTERRUPTED
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from fxround import demo, demo_page
    from fxround.significance.bits import require
    from fxround.significance.progress import tracked

    require("sklearn", "demo")
    arguments.output.mkdir(parents=True, exist_ok=True)
    progress = partial(tracked, shown=not arguments.json)
    drawing = arguments.output / "graph.svg"
    device = _device(arguments.device)
    result = demo.run(arguments.policy, arguments.samples, arguments.seed, progress, drawing=drawing, device=device)
    result.write_rows(arguments.output / "table.csv")
    text = json.dumps(result.to_dict() | {"table": str(arguments.output / "table.csv")}, indent=2)
    write_file(arguments.output / "report.json", text + "\n")
    print(text) if arguments.json else demo_page.demo(result, arguments.output)
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    from fxround.views.descriptions import describe

    description = describe(arguments.format)
    print(description.to_json() if arguments.json else description)
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    import fxround

    report = fxround.selftest(_device(arguments.device))
    print(report.to_json() if arguments.json else report)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from fxround.cli.doctor import diagnose

    diagnosis = diagnose()
    print(diagnosis.to_json() if arguments.json else diagnosis)
    return 1 if diagnosis.problems else 0


def _inspect(arguments: argparse.Namespace) -> int:
    import fxround

    model, inputs = _loaded(arguments)
    compiled = fxround.compile(model, arguments.policy, example_inputs=inputs)
    tables = {"summary": compiled.summary(), "coverage": compiled.coverage()}
    tables |= {"leaks": compiled.leaks()} if arguments.leaks else {}
    if arguments.draw:
        compiled.draw(arguments.draw)
    if arguments.json:
        print(json.dumps({name: table.to_dict() for name, table in tables.items()}, indent=2))
        return 0
    texts = [compiled.graph_text()] if arguments.graph else []
    print("\n\n".join([*texts, *map(str, tables.values())]))
    return 0


def load_inputs(spec: str) -> Any:
    """Return the inputs of a .pt (weights only), .npy (one tensor) or .npz (keywords) file, or of a callable."""
    import numpy as np
    import torch

    path = Path(spec)
    if path.suffix not in (".pt", ".pth", ".npy", ".npz"):
        return _called(spec)
    if not path.is_file():
        raise ValueError(f"--inputs {spec}: no such file")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path))
        if path.suffix == ".npz":
            return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        return torch.load(path, weights_only=True)
    except _BROKEN as error:
        raise ValueError(
            f"--inputs {spec}: no {path.suffix} file of tensors or arrays of numbers ({type(error).__name__})"
        ) from error


def _loaded(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of ``model``, and the inputs of ``--inputs``, of ``--shape``, or that the callable returned.

    Both are on the device of ``--device``.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    model, inputs = _built(arguments.model)
    inputs = load_inputs(arguments.inputs) if arguments.inputs else _examples(arguments.shape) or inputs
    if inputs is None or inputs == ():
        raise ValueError(f"{arguments.model} returned no inputs: return (model, inputs), or give --inputs or --shape")
    device = _device(arguments.device)
    moved = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    return model.to(device), moved


def _device(name: str) -> Any:
    """Return a device of the command line. Raises ValueError for one that this machine does not have."""
    import torch

    from fxround.runtime.cuda.driver import devices_found

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: expected cpu or cuda, cuda:1, ...") from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ValueError(f"--device {name}: {devices_found()}")
    return device


def _built(spec: str) -> tuple[Any, Any]:
    """Return a model in eval mode, and the inputs that came with it; () if there are none."""
    import torch

    built = _called(spec)
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{spec} returned {type(model).__name__}: expected a torch.nn.Module, or (module, inputs)")
    return model.eval(), inputs


def _called(spec: str) -> Any:
    """Call ``MODULE:CALLABLE`` and return its result."""
    function = _named(spec)
    with _blamed(spec):
        return function()


@contextlib.contextmanager
def _blamed(code: str) -> Iterator[None]:
    """Turn what the user's code raises into a ValueError of one line, with the place where it was raised.

    A SystemExit is one too: its status would be taken for that of a check.
    """
    try:
        yield
    except FxroundError:
        raise
    except ImportError as error:
        raise ImportError(f"{code}: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" at {place.filename}:{place.lineno}" if not isinstance(error, SyntaxError) else ""
        raise ValueError(f"{code} raised {type(error).__name__}{where}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _named(spec: str) -> Callable[..., Any]:
    """Return the object that ``MODULE:CALLABLE`` names."""
    name, colon, attribute = spec.partition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"{shown(spec)}: expected MODULE:CALLABLE, like torchvision.models:resnet18 or net.py:build")
    build = getattr(_module(name), attribute, None)
    if not callable(build):
        raise ValueError(f"{name} has no callable {attribute!r}")
    builder: Callable[..., Any] = build
    return builder


def _examples(shapes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_example(shape) for shape in shapes)


def _module(name: str) -> Any:
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"{name}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    else:
        sys.path.insert(0, os.getcwd())
    with _blamed(f"the import of {path}"):
        return importlib.import_module(name)


def _example(shape: str) -> Any:
    import torch

    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise ValueError(f"--shape {shown(shape)}: expected sizes like 1,3,224,224") from None
    try:
        return torch.rand(sizes, generator=torch.Generator().manual_seed(0))
    except (RuntimeError, TypeError) as error:  # negative, beyond 64 bits, or more than there is memory for
        raise ValueError(f"--shape {shown(shape)}: {_first_line(error)}") from None
