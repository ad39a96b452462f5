"""The walk: one process per subject, under limits of time and memory; each result is appended to a file.

The parent imports PyTorch and fxround, captures one model, and forks; it runs one thread, so that a child inherits no
held lock. If a child dies, its last report is kept with the signal and the stage: a hang, a crash and a model that
exhausts memory are results too. Subjects that the file already holds do not run again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import time
import traceback
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fxround
from benchmarks.zoo.judge import POLICIES, Interloper, Judge, Record, interrupt
from benchmarks.zoo.subjects import Subject


@dataclass(frozen=True)
class Limits:
    """The seconds of processor time, seconds of wall time and gigabytes of memory that a subject may use.

    Memory that its process shares with the one that has started it is not counted.
    """

    processor: int = 150
    clock: int = 600
    memory: float = 4.0


def revision() -> str:
    """Return the commit of the work tree, as git names it."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def walk(
    subjects: Iterable[Subject],
    results: Path,
    limits: Limits,
    policies: Sequence[str] = tuple(POLICIES),
    gradient: bool = True,
) -> None:
    """Judge every subject that the file does not hold, append a line for each, and print it.

    The zoos are mixed in a fixed order, so that an interrupted walk has seen some of each.
    """
    known = {record["name"] for record in read(results)}
    waiting = sorted((s for s in subjects if s.title not in known), key=lambda s: zlib.crc32(s.title.encode()))
    print(f"{len(known)} known, {len(waiting)} to go, commit {revision()}", flush=True)
    began = time.time()
    for i, subject in enumerate(waiting):
        print(f"[{i + 1}/{len(waiting)}] {subject.title} ...", end=" ", flush=True)
        record = alone(subject, limits, policies, gradient) | {"commit": revision(), "date": time.strftime("%Y-%m-%d")}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        left = (time.time() - began) / (i + 1) * (len(waiting) - i - 1) / 60
        print(f"{line(record)}; {left:.0f} min left", flush=True)


def read(results: Path) -> list[Record]:
    """Return the records of a file; for a subject that ran twice, the last."""
    if not results.exists():
        return []
    records = [json.loads(text) for text in results.read_text().splitlines() if text.strip()]
    return list({record["name"]: record for record in records}.values())


def line(record: Record) -> str:
    """Return a record on one line."""
    words = [record["outcome"], f"{record.get('seconds', 0):.0f} s"]
    for name, verdict in record.get("policies", {}).items():
        left = f" ({verdict['unrounded']} unrounded)" if verdict["unrounded"] and name != "identity" else ""
        words.append(f"{name} {verdict['error']:.1e}{left}")
    if record.get("reason"):
        words.append(record["reason"][:160])
    return "; ".join([*words, *(f"MISFIT {text}" for text in record["misfits"])])


def alone(subject: Subject, limits: Limits, policies: Sequence[str], gradient: bool) -> Record:
    """Return the record of a subject, judged in a process of its own."""
    reader, writer = os.pipe()
    began, shared = time.time(), _gigabytes(os.getpid())
    child = os.fork()
    if child == 0:
        os.close(reader)
        _judge(subject, writer, limits, policies, gradient)
    os.close(writer)
    text, piece, ended = b"", b"-", ""
    while True:
        ready, _, _ = select.select([reader], [], [], 0.2)
        if ready:
            piece = os.read(reader, 1 << 16)
            text += piece
        # A process that the model itself started may hold the pipe open.
        if piece == b"" or (not ready and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            break
        if not ended and time.time() - began > limits.clock:
            ended = "time"
        if not ended and _gigabytes(child) - shared > limits.memory:
            ended = "memory"
        if ended:
            os.kill(child, signal.SIGKILL)
    # Read what the process wrote between the last check of the pipe and its end.
    while piece != b"" and select.select([reader], [], [], 0)[0]:
        piece = os.read(reader, 1 << 16)
        text += piece
    os.close(reader)
    _, status, usage = os.wait4(child, 0)
    reports = [json.loads(text) for text in text.decode().splitlines() if text.endswith("}")]
    record: Record = reports[-1] if reports else {"name": subject.title, "stage": "start", "misfits": []}
    if record.get("outcome", "running") == "running":
        record |= {"outcome": _death(status, ended), "seconds": round(usage.ru_utime + usage.ru_stime, 1)}
        record["reason"] = f"at stage {record['stage']}"
        if record["outcome"].startswith("signal"):
            record["misfits"].append(f"{record['stage']}: the process died of {record['outcome']}")
    record["megabytes"] = usage.ru_maxrss // 1024
    return record


def _death(status: int, ended: str) -> str:
    if ended:
        return ended
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "time" if number in (signal.SIGXCPU, signal.SIGKILL) else f"signal {signal.Signals(number).name}"
    return f"exit {os.WEXITSTATUS(status)}"


def _judge(subject: Subject, writer: int, limits: Limits, policies: Sequence[str], gradient: bool) -> None:
    """Run in the child: report to the pipe, and exit without the parent's clean-up."""
    status = 0
    faulthandler.disable()
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.processor, limits.processor + 5))
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)

        def report(record: Any) -> None:
            os.write(writer, (json.dumps(record) + "\n").encode())

        Judge(subject, policies, gradient, report).run()
    except BaseException:
        traceback.print_exc()
        status = 3
    finally:
        os._exit(status)


def _gigabytes(process: int) -> float:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**30


def warm() -> None:
    """Import and compile in the parent what every child needs."""
    interrupt()
    model = fxround.compile(Interloper(), "reproducible")
    model(torch.randn(2, 3, 12, 12)).sum().backward()
