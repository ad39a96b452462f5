"""CUDA: what the compiler makes of every text, and on a GPU the bits and the speed of everything.

    python -m benchmarks.cuda --compile              without a GPU: registers, spills, occupancy of every text, and its
                                                     machine code where CUDA's nvdisasm is on the PATH; status 1 if
                                                     a text spills registers or has a fault in its machine code
    python -m benchmarks.cuda --output cuda.json     on a GPU: bits against the CPU's, then speed, then CUDA's
                                                     compute-sanitizer if it is on the PATH; ten minutes

The second form needs nothing that the first one made. It goes on after a failure, and says which.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import machine, table, versions
from fxround import Policy, Rule
from fxround.runtime.cuda.driver import compiled, devices_found
from fxround.runtime.cuda.launcher import Text, launching

# Threads, blocks and bytes of shared memory of a multiprocessor at most (CUDA C++ Programming Guide, "Technical
# specifications per compute capability"). All have this many registers.
ARCHITECTURES: Final = {
    "sm_75": (1024, 16, 64 << 10),
    "sm_80": (2048, 32, 164 << 10),
    "sm_90": (2048, 32, 228 << 10),
    "sm_100": (2048, 32, 228 << 10),
    "sm_120": (1536, 24, 100 << 10),
}
_REGISTERS: Final = 65536
# The seconds that a tool of compute-sanitizer may take.
_SANITIZE: Final = 120
# Those whose binary64 is slow.
_SLOW: Final = ("sm_75", "sm_120")
_NOTE: Final = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill "
    r"stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?:, used \d+ barriers)?"
    r"(?:, \d+ bytes cumulative stack size)?(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


# ---- what the compiler makes ----


@dataclass(frozen=True)
class Resources:
    """What a kernel takes on an architecture: registers of a thread, bytes of a thread's stack and of its spilled
    registers, bytes of a block's shared memory, and the threads of a block."""

    arch: str
    threads: int
    name: str
    registers: int
    stack: int
    spilled: int
    shared: int

    def blocks(self) -> int:
        """The blocks that a multiprocessor holds at once."""
        threads, blocks, shared = ARCHITECTURES[self.arch]
        # Registers are given to a warp in units of 256, and the system takes 1 kB of a block's shared memory.
        by_registers = _REGISTERS // (-(-self.registers * 32 // 256) * 256 * (self.threads // 32))
        return min(by_registers, blocks, threads // self.threads, shared // (self.shared + 1024))

    def occupancy(self) -> float:
        """The threads that a multiprocessor holds at once, as a part of the most that it can hold."""
        return self.blocks() * self.threads / ARCHITECTURES[self.arch][0]


def resources(texts: Sequence[Text], arch: str) -> list[Resources]:
    """Compile texts for an architecture in one translation unit and read the compiler's notes."""
    return _made(texts, arch)[0]


def _made(texts: Sequence[Text], arch: str) -> tuple[list[Resources], bytes]:
    """The resources of each text, and the binary of all."""
    unit = "".join(f"namespace unit_{i} {{\n{text.source()}}}\n" for i, text in enumerate(texts))
    binary, notes = compiled(unit, arch)
    threads = {text.name: text.threads for text in texts}
    reports = [
        Resources(
            arch,
            threads[m["name"]],
            m["name"],
            int(m["registers"]),
            int(m["stack"]),
            int(m["stores"]) + int(m["loads"]),
            int(m["shared"] or 0),
        )
        for m in _NOTE.finditer(notes)
    ]
    missing = {text.name for text in texts} - {one.name for one in reports}
    if missing:
        raise RuntimeError(f"the compiler says nothing of {sorted(missing)[:3]}")
    return reports, binary


def machine_code(binary: bytes) -> str | None:
    """The machine code of a binary as text, by CUDA's nvdisasm; None where that is not installed."""
    program = shutil.which("nvdisasm")
    if program is None:
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder) / "code.cubin"
        file.write_bytes(binary)
        return subprocess.run([program, "-c", str(file)], check=True, capture_output=True, text=True).stdout


def faults_of(listing: str, texts: Sequence[Text]) -> list[str]:
    """What machine code does that no text asks for: it flushes subnormal numbers, or fuses a product and a sum.

    The compiler's own divisions and roots are made of multiply-adds, and flush where they look for special values: a
    text with one of them may do both, and its PTX says what it asks for.
    """
    own, asked = re.compile(r"__([fd]div|[fd]sqrt)_rn"), re.compile(r"__fmaf?_rn")
    sources = {text.name: text.source() for text in texts}
    divided = {name for name, source in sources.items() if own.search(source)}
    fused = divided | {name for name, source in sources.items() if asked.search(source)}
    faults, name = [], ""
    for line in listing.splitlines():
        name = section[1] if (section := re.match(r"\s*\.section\s+\.text\.(\w+)", line)) else name
        if name not in divided and re.search(r"\b[FD](ADD|MUL|FMA|SETP|SET|MNMX)\S*\.FTZ", line):
            faults.append(f"{name} flushes subnormal numbers: {line.strip()}")
        if name not in fused and re.search(r"\b[FD]FMA\b", line):
            faults.append(f"{name} fuses a product and a sum: {line.strip()}")
    return faults


class Listing:
    """A launcher that runs nothing and lists the texts: those for devices whose binary64 is slow or the others, with
    asynchronous copies or without."""

    def __init__(self, slow_binary64: bool, async_copies: bool) -> None:
        self.texts: dict[str, Text] = {}
        self.slow_binary64, self.async_copies = slow_binary64, async_copies

    def launch(self, text: Text, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Note the text."""
        self.texts[text.name] = text

    def has_slow_binary64(self, device: torch.device) -> bool:
        """Whether texts should avoid binary64."""
        return self.slow_binary64

    def copies_async(self, device: torch.device) -> bool:
        """Whether texts may copy asynchronously."""
        return self.async_copies


def texts_of(*runs: Callable[[], object], slow_binary64: bool = False, async_copies: bool = True) -> list[Text]:
    """The texts that some functions need; their results are meaningless."""
    listing = Listing(slow_binary64, async_copies)
    with launching(listing):
        for run in runs:
            run()
    return list(listing.texts.values())


# ---- models ----


class Vision(nn.Module):
    """A small convolutional network with residual blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.front = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, h, w] to [n, 10]."""
        x = self.front(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + torch.relu(norm(block(x)))
        head: Tensor = self.head(x.mean((2, 3)))
        return head


def encoder(width: int = 64, layers: int = 2) -> nn.Module:
    """A transformer's encoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def with_own_products(name: str) -> Policy:
    """A preset that leaves products to PyTorch, whose bits depend on the device, with fxround's products."""
    rules = Policy.parse(name).rules
    return Policy(f"{name}, own products", (*rules, Rule(operator="contraction", accumulate="binary32")))


POLICIES: Final[dict[str, Any]] = {
    **{name: name for name in ("identity", "reproducible", "stochastic", "up_down", "bfloat16")},
    **{name: with_own_products(name) for name in ("fp8", "mxfp8")},
    "chunks": Policy("chunks", (Rule(rounding="bfloat16", accumulate="bfloat16 chunk=128 combine=binary32"),)),
}


def models(device: str) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Models with random weights and their inputs, the same on every device."""
    # 1536 x 1536 results are enough for the largest tiles.
    wide = partial(nn.Linear, 32, 1536)
    for name, make, shape in (
        ("vision", Vision, (8, 3, 16, 16)),
        ("encoder", encoder, (4, 12, 64)),
        ("wide", wide, (1536, 32)),
    ):
        torch.manual_seed(0)
        model = make()
        yield name, model.to(device), torch.randn(shape).to(device)


def step(model: nn.Module, x: Tensor, policy: Any) -> Callable[[], list[Tensor]]:
    """A function that runs the model forward and backward, from one seed: (loss, gradients)."""
    rounded = fxround.compile(model, policy)

    def run() -> list[Tensor]:
        rounded.reseed(5)
        loss = rounded(x).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    return run


# ---- on a GPU: bits ----


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    a, b = a.cpu().reshape(-1), b.cpu().reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def compare_bits() -> dict[str, str]:
    """Every comparison of the GPU with the CPU: ``equal``, or what differs."""
    verdicts: dict[str, str] = {}

    def note(name: str, run: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            verdicts[name] = run()
        except Exception:  # Whatever stops one comparison must not stop the others.
            verdicts[name] = traceback.format_exc(limit=3)[-600:]
        print(f"{name}: {verdicts[name]} ({time.perf_counter() - began:.1f} s)", flush=True)

    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 1 << 16)
    for text in (
        "bfloat16",
        "e4m3fn/stochastic",
        "binary16/up_down",
        "binary32/stochastic",
        "mxfp8",
        "int8:channel",
        "nf4",
    ):
        note(f"round {text}", partial(_rounded, x, text))
    here, there = (list(models(device)) for device in ("cpu", "cuda"))
    for (name, model, x), (_, twin, y) in zip(here, there, strict=True):
        for policy in POLICIES:
            if policy != "identity":
                pairs = (model, x, POLICIES[policy]), (twin, y, POLICIES[policy])
                note(f"{name} {policy}", partial(_stepped, *pairs))
    for policy in ("reproducible", "stochastic"):
        note(f"100 training steps {policy}", partial(_trained_twice, policy))
    note("a CUDA graph", _graph)
    return verdicts


def _same(want: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    wrong = [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if not equal(a, b)]
    return "equal" if not wrong else f"{len(wrong)} of {len(want)} tensors differ, first {wrong[0]}"


def _rounded(x: Tensor, text: str) -> str:
    return _same([fxround.round(x, text)], [fxround.round(x.cuda(), text)])


def _stepped(here: tuple[nn.Module, Tensor, Any], there: tuple[nn.Module, Tensor, Any]) -> str:
    return _same(step(*here)(), step(*there)())


def _trained_twice(policy: str) -> str:
    return _same(_trained("cpu", policy), _trained("cuda", policy))


def _trained(device: str, policy: str) -> list[Tensor]:
    """The weights of a model after 100 steps."""
    torch.manual_seed(1)
    model = Vision(8)
    data = torch.randn(100, 8, 3, 8, 8)
    model, data = model.to(device), data.to(device)
    rounded = fxround.compile(model, policy, seed=3)
    optimizer = fxround.compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), policy)
    for batch in data:
        optimizer.zero_grad()
        rounded(batch).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _graph() -> str:
    """Replays of a forward pass that a CUDA graph captured draw the random bits of the latest ``reseed``."""
    (_, model, x), *_ = models("cuda")
    rounded = fxround.compile(model.eval(), "stochastic").reseed(5, device="cuda")
    want, got = [], []
    with torch.no_grad():
        want += [rounded.reseed(5, sample)(x) for sample in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = rounded(x)
        for sample in range(3):
            rounded.reseed(5, sample)
            graph.replay()
            got.append(result.clone())
    return _same(want, got)


def sanitized() -> dict[str, str]:
    """What compute-sanitizer says of the self-test's kernels, if it is on the PATH: ``clean``, or its last lines."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"compute-sanitizer": "not on the PATH"}
    verdicts = {}
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "fxround", "selftest"]
        try:
            done = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True, timeout=_SANITIZE)
            verdicts[tool] = "clean" if done.returncode == 0 else done.stdout[-600:] + done.stderr[-600:]
        except subprocess.TimeoutExpired:
            verdicts[tool] = f"not finished after {_SANITIZE} s"
        print(f"{tool}: {verdicts[tool]}", flush=True)
    return verdicts


# ---- on a GPU: speed ----


def milliseconds(call: Callable[[], object], passes: int = 7) -> float:
    """The median time of a call by CUDA events, the second-level cache flushed before each."""
    flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(passes + 2):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def speeds() -> dict[str, Any]:
    """The tables of speed: milliseconds, and the ratio to PyTorch's own."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    table: dict[str, Any] = {}

    def row(name: str, stock: Callable[[], object], calls: dict[str, Callable[[], object]]) -> None:
        try:
            base = milliseconds(stock)
            table[name] = {"stock": base} | {key: milliseconds(call) for key, call in calls.items()}
        except Exception:  # Whatever stops one row must not stop the others.
            table[name] = {"error": traceback.format_exc(limit=3)[-600:]}
        print(name, table[name], flush=True)

    def under(model: nn.Module, *args: Tensor) -> dict[str, Callable[[], object]]:
        model.eval()
        named = {p: fxround.compile(model, POLICIES[p]) for p in ("reproducible", "stochastic", "up_down", "bfloat16")}
        return {p: partial(r, *args) for p, r in named.items()}

    with torch.no_grad():
        x, out = torch.randn(100_000_000, device="cuda"), torch.empty(100_000_000, device="cuda")
        roundings = ("bfloat16", "e4m3fn", "bfloat16/stochastic", "e4m3fn/stochastic")
        row(
            "round 1e8, stock: copy",
            partial(out.copy_, x),
            {t: partial(fxround.round, x, t, out=out) for t in roundings},
        )
        x = out = x[:1]
        for n in (1024, 4096):
            linear = nn.Linear(n, n, bias=False, device="cuda")
            a = torch.randn(n, n, device="cuda")
            row(f"mm {n}", partial(linear, a), under(linear, a))
        for channels, size, stride in ((64, 56, 1), (128, 28, 1), (256, 14, 1)):
            conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False, device="cuda")
            images = torch.randn(32, channels, size, size, device="cuda")
            row(f"conv {channels} at {size}", partial(conv, images), under(conv, images))
        rows = torch.randn(8192, 1024, device="cuda")
        for name, layer in (("softmax", nn.Softmax(-1)), ("layer_norm", nn.LayerNorm(1024, device="cuda"))):
            row(f"{name} 8192 x 1024", partial(layer, rows), under(layer, rows))
        wide = torch.randn(8, 128, 768, device="cuda")
        deep = encoder(768, 12).cuda().eval()
        row("12 layers of width 768", partial(deep, wide), under(deep, wide))
    return table


def run_on_gpu(output: str | None) -> int:
    """Compare bits, then measure; returns the number of comparisons that failed."""
    name = torch.cuda.get_device_name()
    conditions = f"{name}, {machine()}, {versions(('torch', 'fxround', 'cuda-core', 'nvidia-cuda-nvrtc'))}"
    print(conditions, flush=True)
    bits = compare_bits()
    results = {"conditions": conditions, "bits": bits, "milliseconds": speeds(), "sanitizer": sanitized()}
    if output:
        Path(output).write_text(json.dumps(results, indent=1))
    wrong = [key for key, value in bits.items() if value != "equal"]
    print(f"{len(bits) - len(wrong)} of {len(bits)} comparisons equal", *wrong, sep="\n  ")
    return len(wrong)


def compile_texts(archs: Sequence[str]) -> int:
    """Print what the compiler makes of the texts of all models under all policies; returns the number of problems."""
    runs = [step(model, x, POLICIES[p]) for _, model, x in models("cpu") for p in POLICIES]
    rows, problems = [], 0
    for arch in archs:
        began = time.process_time()
        texts = texts_of(*runs, slow_binary64=arch in _SLOW, async_copies=arch != "sm_75")
        reports, binary = _made(texts, arch)
        most, spilled = max(reports, key=lambda r: r.registers), [r for r in reports if r.spilled]
        stack, shared = max(r.stack for r in reports), max(r.shared for r in reports)
        numbers = (len(reports), most.registers, len(spilled), stack, shared)
        busy = [r.occupancy() for r in reports]
        listing = machine_code(binary)
        faults = [] if listing is None else faults_of(listing, texts)
        problems += len(spilled) + len(faults)
        told = "no nvdisasm" if listing is None else str(len(faults))
        shares = f"{min(busy):.0%}", f"{statistics.median(busy):.0%}"
        rows.append([arch, *map(str, numbers), *shares, told, f"{time.process_time() - began:.0f}"])
        for problem in (*(f"{one.name} spills {one.spilled} bytes" for one in spilled), *faults):
            print(arch, problem)
    head = (
        "architecture",
        "texts",
        "registers at most",
        "that spill",
        "stack, bytes",
        "shared, bytes",
        "occupancy at least",
        "median",
        "faults in SASS",
        "s",
    )
    print(table(head, rows))
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile every text, without a GPU")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=[*ARCHITECTURES], help="default: all")
    parser.add_argument("--output", help="a JSON file for the results of a GPU")
    options = parser.parse_args(arguments)
    if options.compile:
        return min(1, compile_texts(options.arch))
    if not torch.cuda.is_available():
        print(f"{devices_found()}. Without one: python -m benchmarks.cuda --compile", file=sys.stderr)
        return 2
    return min(1, run_on_gpu(options.output))


if __name__ == "__main__":
    sys.exit(main())
