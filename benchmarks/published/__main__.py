"""Make a table that another project published, in small.

python -m benchmarks.published qpytorch [--seeds 5] [--data FOLDER] [--write]
python -m benchmarks.published pychop [--seeds 5] [--models cnn residual detector | --data FOLDER] [--write]
python -m benchmarks.published fuzzy [--write]
python -m benchmarks.published repdl [--data FOLDER] [--write]
python -m benchmarks.published discquant --program FOLDER [--seeds 5] [--write]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.harness import conditions, table
from benchmarks.tables import RESULTS

NAMES: Final = ("qpytorch", "pychop", "fuzzy", "repdl", "discquant")
MODELS: Final = ("cnn", "residual", "detector")
SEEDED: Final = ("qpytorch", "pychop", "discquant")
FOLDERS: Final = ("qpytorch", "pychop", "repdl")


def main() -> None:
    """Print the tables of one project, or store them after each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seeds", type=int, default=5, help="of weights, batches and random bits (default 5)")
    parser.add_argument("--write", action="store_true", help="store the tables under benchmarks/results")
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder with the files of MNIST; for qpytorch and pychop also of CIFAR-10, or pictures by class",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, help="of pychop (default all)")
    parser.add_argument("--program", type=Path, help="discquant: a clone of github.com/jerry-chee/DiscQuant")
    chosen = parser.parse_args()
    if chosen.data is not None and (chosen.name not in FOLDERS or chosen.models):
        parser.error(f"--data goes with {', '.join(FOLDERS)}, and without --models")
    if (chosen.program is not None) != (chosen.name == "discquant"):
        parser.error("discquant needs --program, a clone of its authors' repository, and nothing else takes it")
    if chosen.models and chosen.name != "pychop":
        parser.error("--models goes with pychop")
    torch.set_num_threads(1)
    seeded = chosen.name in SEEDED
    asked: dict[str, Any] = {"seeds": chosen.seeds} if seeded else {}
    asked |= {key: getattr(chosen, key) for key in ("program", "models") if getattr(chosen, key)}
    asked |= {"folder": chosen.data} if chosen.data else {}
    of_folder = f"-{chosen.data.resolve().name}" if chosen.data else ""
    loads = [os.getloadavg()[0]]
    for named in importlib.import_module(f"benchmarks.published.{chosen.name}").tables(**asked):
        loads.append(os.getloadavg()[0])
        for page in named.values():
            print(table(page["columns"], page["rows"]), flush=True)
        if chosen.write:
            said = f" --seeds {chosen.seeds}" if seeded else ""
            said = f" --program FOLDER{said}" if chosen.program else said
            said += " --data FOLDER" if chosen.data else ""
            threads = ", one thread" if chosen.name != "repdl" else ""
            told = conditions(f"python -m benchmarks.published {chosen.name}{said}", loads, threads)
            path = RESULTS / f"published_{chosen.name}{of_folder}.json"
            held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            held |= {f"{name}{of_folder}": {**told, **page} for name, page in named.items()}
            path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
