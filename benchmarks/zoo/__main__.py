"""Walk the installed model zoos, or write the page from the records of a walk.

    python -m benchmarks.zoo [--zoos timm ...] [--only TEXT] [--results FILE] [--page]

The walk appends to FILE and may be interrupted: when started again, it continues with the next model. ``--again`` runs
the models that misfit or match --only anew; ``--page`` writes docs/zoo.md and docs/zoo.json from FILE. It uses one
thread, and about twenty seconds of processor time per model.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

import torch

from benchmarks.zoo.judge import POLICIES
from benchmarks.zoo.page import write
from benchmarks.zoo.subjects import ZOOS, subjects
from benchmarks.zoo.walk import Limits, read, walk, warm


def main() -> None:
    """Run what the arguments request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoos", nargs="+", choices=ZOOS, default=list(ZOOS))
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--no-gradient", action="store_true")
    parser.add_argument("--seconds", type=int, default=Limits.processor, help="processor time a model")
    parser.add_argument("--gigabytes", type=float, default=Limits.memory)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if options.page:
        write(read(options.results))
        return
    wanted = [subject for subject in subjects(options.zoos) if options.only in subject.title]
    if options.again:
        records = {record["name"]: record for record in read(options.results)}
        if not options.only:
            wanted = [s for s in wanted if records.get(s.title, {}).get("misfits")]
        forget(options.results, {s.title for s in wanted})
    if options.list:
        print("\n".join(subject.title for subject in wanted))
        return
    warm()
    limits = Limits(options.seconds, 4 * options.seconds, options.gigabytes)
    walk(wanted, options.results, limits, options.policies, not options.no_gradient)


def forget(results: Path, names: set[str]) -> None:
    """Remove the records of these names from the file."""
    kept = [text for text in results.read_text().splitlines() if not any(f'"name": "{name}"' in text for name in names)]
    results.write_text("".join(f"{text}\n" for text in kept))


if __name__ == "__main__":
    main()
